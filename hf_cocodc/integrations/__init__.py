"""Everything that touches Transformers' Trainer.

May import: errors, links, recipes, resolve, run, settings.
"""
