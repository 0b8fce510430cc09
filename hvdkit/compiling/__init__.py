"""XLA around the steps of several ranks: programs between the exchanges."""
