"""Pure algorithms that methods are composed of. They know nothing of clusters, of files or of Hugging Face.

May import: errors, tensors.
"""
