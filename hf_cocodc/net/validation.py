"""What others say is believed only where it can be true: numbers in their range."""

from typing import Annotated, Any

from msgspec import Meta

MOST = (1 << 53) - 1
"""No count of ours is larger: so far fp64 tells whole numbers apart."""
Count = Annotated[int, Meta(ge=0, le=MOST)]
Positive = Annotated[int, Meta(ge=1, le=MOST)]


def whole(value: Any, least: int = 0, most: int = MOST) -> int:
    """A whole number in least .. most, as it is. Raises ValueError if it is something else.

    >>> whole(3)
    3
    >>> whole(True)
    Traceback (most recent call last):
    ValueError: True is no whole number in 0 .. 9007199254740991
    """
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{str(value)[:40]} is no whole number in {least} .. {most}")
    return value
