"""The outer optimizer as a product: a region's run from the first meeting to the last checkpoint."""
