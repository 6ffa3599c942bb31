"""Regions meet at the start of a run, compare their settings, and show each other that they are alive.

May import: errors, settings, tensors.
"""
