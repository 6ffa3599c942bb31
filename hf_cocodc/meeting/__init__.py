"""How regions find each other at the start of a run, compare what must be equal, and show that they are alive.

May import: errors, settings, tensors.
"""
