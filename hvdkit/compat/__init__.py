"""The APIs of other libraries, implemented with hvdkit: :mod:`hvdkit.compat.horovod` has Horovod's names."""
