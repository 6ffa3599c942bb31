"""A recipe: the complete description of a run, and how its YAML is read.

May import: errors, settings.
"""
