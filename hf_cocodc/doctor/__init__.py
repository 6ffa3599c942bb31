"""Looks at one machine before a run: what is wrong there, what may become wrong, and the command that mends it.

May import: engine, errors, links, meeting, methods, parts, recipes, resolve, run, settings, tensors, training.
"""
