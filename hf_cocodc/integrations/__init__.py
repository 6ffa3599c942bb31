"""Everything that touches Transformers' Trainer.

May import: engine, errors, links, recipes, resolve, run, settings.
"""
