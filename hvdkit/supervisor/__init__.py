"""The chief: initialises or restores, saves, writes summaries, and stops every rank at the same step."""
