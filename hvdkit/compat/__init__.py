"""Compatibility modules with the APIs of other libraries."""
