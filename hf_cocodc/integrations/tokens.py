"""How many tokens the batches of a Trainer hold."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from ..errors import InputError

IGNORED = -100
"""The label of a token that has no loss."""


def tokens_of(batches: Iterable[Any]) -> Any:
    """Tokens in the micro-batches of one inner step, as a number or a tensor of one: to read it may wait for a GPU.

    What counts are the labels that have a loss; without labels, what the attention mask shows; without a mask, `input_ids`.

    Raises:
        InputError: a batch has none of them.

    >>> import torch
    >>> int(tokens_of([{"input_ids": torch.ones(2, 3), "labels": torch.tensor([[1, 2, -100], [1, -100, -100]])}]))
    3
    """
    return sum(_of(batch) for batch in batches)


def _of(batch: Any) -> Any:
    fields = batch if isinstance(batch, Mapping) else {}
    for name in ("shift_labels", "labels"):
        if isinstance(fields.get(name), Tensor):
            return fields[name].ne(IGNORED).sum()
    if isinstance(fields.get("attention_mask"), Tensor):
        return fields["attention_mask"].ne(0).sum()
    if isinstance(fields.get("input_ids"), Tensor):
        return fields["input_ids"].numel()
    found = ", ".join(map(str, fields)) if fields else type(batch).__name__
    raise InputError(
        f"outer.weights=tokens, but a batch ({found}) has no labels, attention_mask or input_ids to count. Set outer.weights to "
        "equal or steps."
    )
