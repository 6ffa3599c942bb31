"""Train a recipe: its data, its metrics, and one region, all regions on this machine, or all regions in one process."""
