"""Who takes part in a run: what regions and their coordinator tell each other, and what the coordinator decides."""
