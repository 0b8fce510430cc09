"""The supported versions of Python, TensorFlow and Keras; docs/compatibility.md lists those that were tested."""

OLDEST_PYTHON = (3, 10)
NEWEST_PYTHON = (3, 14)
OLDEST_KERAS = (3, 5)  # older ones clip before they accumulate
OLDEST_TENSORFLOW = (2, 16)
NEWEST_TENSORFLOW = (2, 22)

PYTHON = "Python 3.10 to 3.14"
TENSORFLOW = "TensorFlow 2.16 to 2.22"
TENSORFLOW_RELEASES = ">=2.16.2,<2.23"
