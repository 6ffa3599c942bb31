"""Training a recipe: its data, its metrics, one region of it, all regions on this machine, or all in one process.

May import: errors, integrations, links, recipes, resolve, run, settings.
"""
