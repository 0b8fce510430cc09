__version__ = "0.1.0"
"""hvdkit's version, e.g. to report a problem."""
