"""Forecasts a run before anyone rents machines for it: utilisation, waiting, bytes, memory, and settings that suit a link.

May import: auto, bench, engine, errors, links, methods, newer, parts, recipes, resolve, run, settings, tensors, views.
"""
