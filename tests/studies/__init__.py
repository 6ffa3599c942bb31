"""Studies: which method and which settings, measured over many small runs in one process each. Programs, not tests."""
