"""What others say is believed only where it can be true: counts in their range."""

from typing import Annotated

from msgspec import Meta

MOST = (1 << 53) - 1
"""No count of ours is larger: so far fp64 tells whole numbers apart."""
Count = Annotated[int, Meta(ge=0, le=MOST)]
Positive = Annotated[int, Meta(ge=1, le=MOST)]
