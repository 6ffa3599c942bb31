"""Regions meet at the start of a run, compare their settings, show each other that they are alive, and agree on where to stop.

May import: errors, settings, tensors, threads.
"""
