"""What a run came to, for people: figures and pictures, made from journals alone.

May import: errors, run.
"""
