"""Programs that make wrong inputs by the thousand, and hold the command to its word: one paragraph, never a traceback."""
