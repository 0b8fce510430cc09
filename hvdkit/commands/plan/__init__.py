"""Command ``hvdkit plan``: the placement of embedding tables, and step times predicted for more ranks."""
