"""A WAN between regions, emulated on one Linux machine, and training over it.

May import: bench, errors, meeting, methods, recipes, resolve, run, settings, tensors, training.
"""
