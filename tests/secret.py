"""Secrets for tests."""

import hashlib


def secret(name: str = "ours") -> str:
    """The same for the same name."""
    return hashlib.sha256(name.encode()).hexdigest()
