"""Checks one machine before a run: what is wrong, what may go wrong, and the command that mends it."""
