"""The costs of a link, a codec and an outer step on this machine, as ratios to the physical floor."""
