"""How many tokens a region trains on in an inner step, for `outer.weights=tokens`."""

from typing import Any

import torch
from accelerate import Accelerator

from ..errors import InputError


class Tokens:
    """Counts the tokens of an inner step over its micro-batches, and over the ranks of the region.

    Args:
        accelerator: of this region.
        counted: whether tokens are the weights; else nothing is counted, and ranks say nothing to each other.
        alike: whether all ranks of the region train on the same samples (pipeline stages).
    """

    def __init__(self, accelerator: Accelerator, counted: bool, alike: bool = False) -> None:
        self.counted = counted
        self._accelerator, self._alike = accelerator, alike
        self._noted: Any = None

    def note(self, tokens: Any) -> None:
        """Add the tokens of a micro-batch of this rank: a number, or a tensor of one, on any device."""
        if self.counted:
            self._noted = tokens if self._noted is None else self._noted + tokens

    def take(self) -> int | None:
        """The region's tokens since the last call; None if none were noted. If they are, a collective call of its ranks.

        Raises:
            InputError: their number is not a whole number from 0.
        """
        if self._noted is None:
            return None
        noted, self._noted = float(self._noted), None
        if noted < 0 or not noted.is_integer():
            raise InputError(
                f"outer.step(tokens={noted:g}): the tokens of an inner step must be a whole number from 0."
            )
        if self._alike or self._accelerator.num_processes == 1:
            return int(noted)
        own = torch.tensor([int(noted)], dtype=torch.int64, device=self._accelerator.device)
        return int(self._accelerator.reduce(own, "sum"))
