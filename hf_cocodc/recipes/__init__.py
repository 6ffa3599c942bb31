"""Recipes: the complete description of a run, and the reader for its YAML."""
