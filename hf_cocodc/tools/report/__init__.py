"""The result of a run for people: figures and pictures, made from the journals alone."""
