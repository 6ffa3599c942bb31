"""The outer loop of one region: what is kept of each fragment, and what its sends and landings do."""
