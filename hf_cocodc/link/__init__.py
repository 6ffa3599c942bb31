"""The ways by which a mean crosses from region to region, and how the ranks of a region share it."""
