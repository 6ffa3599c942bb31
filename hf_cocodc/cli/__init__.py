"""The command `hf-cocodc`: each file one command; they parse, call, print and return an exit code."""
