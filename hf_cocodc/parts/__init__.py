"""The parts of a method, as pure algorithms. They know nothing about clusters, files or Hugging Face.

May import: errors, tensors.
"""
