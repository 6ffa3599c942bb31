"""Everything that touches Transformers' Trainer.

May import: engine, errors, links, methods, recipes, resolve, run, settings.
"""
