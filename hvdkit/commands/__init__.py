"""The subcommands of ``hvdkit``. The training library imports none of them."""
