"""The link of a lone region: every mean is its own value, no byte leaves."""

from .lockstep import LockstepHub, LockstepLink


def loopback() -> LockstepLink:
    """A link for one region, so that the same code trains alone and across regions."""
    return LockstepHub(1).links[0]
