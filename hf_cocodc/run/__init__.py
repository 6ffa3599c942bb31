"""The outer optimizer as a product: a region's run from the first meeting to the last checkpoint.

May import: auto, engine, errors, links, meeting, methods, newer, parts, resolve, settings, tensors, threads.
"""
