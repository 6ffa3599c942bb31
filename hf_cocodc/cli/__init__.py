"""The command `hf-cocodc`, one file a command: they parse, call, print and return an exit code.

May import: bench, emulation, errors, meeting, recipes, run, settings, training, views.
"""
