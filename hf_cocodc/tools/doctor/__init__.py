"""Looks at one machine before a run: what is wrong there, what may become wrong, and the command that mends it."""
