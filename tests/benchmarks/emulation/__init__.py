"""A WAN between regions, emulated on one Linux machine, and training over it."""
