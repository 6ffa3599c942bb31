"""Simulation of whole runs over the real rules, in virtual time: no threads, no sockets, and the same again for a seed."""
