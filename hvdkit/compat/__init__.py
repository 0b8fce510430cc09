"""Other libraries' names for what hvdkit does."""
