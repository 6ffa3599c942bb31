"""How regions reach each other: see `base` for what a link is."""
