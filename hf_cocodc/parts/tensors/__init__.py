"""Flat fp32 tensors: how parameters lie in them, their pieces, their memory, and their way between devices."""
