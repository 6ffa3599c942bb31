"""What breaks inside a region of a benchmark, in this library and in another one alike; and on its way to the others.

Damages of the numbers of training are hooks of the inner optimizer. Others replace a function of this package in one process:
what a region that is broken, or somebody on the network, would send.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .elastic_region import Place

Params = Callable[[], list[Tensor]]
GREETINGS = "greetings.jsonl"
"""The file in the run's folder for greetings that were overheard."""
_HIGHEST = 0x40
"""In the fourth byte of an fp32 value: the highest bit of its exponent."""


def prepare(place: Place, inner: torch.optim.Optimizer, global_params: Params) -> None:
    """Let it break as the place says, if it is to break in this region. Call it before training begins."""
    if place.damage and place.region == place.damaged:
        DAMAGES[place.damage](place, inner, global_params)


def _once(change: Callable[[Tensor, Tensor], Any]) -> Callable[..., None]:
    """Once, behind inner step `damaged_at` and before a sync that follows: change(local param, global param)."""

    def begin(place: Place, inner: torch.optim.Optimizer, global_params: Params) -> None:
        def now() -> None:
            mine = [param for group in inner.param_groups for param in group["params"]]
            for param, at in zip(mine, global_params(), strict=True):
                change(param.detach(), at)

        _after(inner, place.damaged_at, now)

    return begin


def _after(inner: torch.optim.Optimizer, step: int, do: Callable[[], None]) -> None:
    made = 0

    def count(*args: Any) -> None:
        nonlocal made
        made += 1
        if made == step:
            do()

    inner.register_step_post_hook(count)


def _one_value(value: float) -> Callable[[Tensor, Tensor], Any]:
    return lambda local, at: local.view(-1)[:1].fill_(value)


def _too_fast(place: Place, inner: torch.optim.Optimizer, global_params: Params) -> None:
    """A learning rate a thousand times too high, from the first step on."""

    def raise_it(*args: Any) -> None:
        for group in inner.param_groups:
            group["lr"] *= 1000

    inner.register_step_pre_hook(raise_it)


def _weight(place: Place, inner: torch.optim.Optimizer, global_params: Params) -> None:
    """The trailer of one transfer claims a weight of 1e6."""
    from hf_cocodc.link import calls
    from hf_cocodc.link.records import Trailer

    to_row = calls.to_row

    def lie(record: tuple, beside: Sequence[float] = ()) -> Tensor:
        if isinstance(record, Trailer) and record.inner_step == place.damaged_at:
            record = record._replace(weight=1e6)
        return to_row(record, beside)

    calls.to_row = lie


def _flip(gathered: bool) -> Callable[..., None]:
    """One bit of one piece on the network; `gathered`: of a mean on its way back, otherwise of an outer gradient."""

    def begin(place: Place, inner: torch.optim.Optimizer, global_params: Params) -> None:
        from hf_cocodc.link.exchange import Exchange

        due, send = threading.Event(), Exchange._send

        def send_it(self: Any, rows: Any, index: int, payload: Tensor, others: Sequence[int]) -> None:
            if others and due.is_set() and (rows is not self._scattered) == gathered:
                due.clear()
                damaged = payload.clone()
                damaged[4003] ^= _HIGHEST
                send(self, rows, index, damaged, others[:1])
                others = others[1:]
            send(self, rows, index, payload, others)

        Exchange._send = send_it  # type: ignore[method-assign]
        _after(inner, place.damaged_at, due.set)

    return begin


def _flip_sealed(place: Place, inner: torch.optim.Optimizer, global_params: Params) -> None:
    """One bit of what is sealed, on the network."""
    from tests.processes.numbers_worker import flip_sealed

    _after(inner, place.damaged_at, flip_sealed)


def overhear(folder: Path) -> None:
    """Write every greeting of this process for the coordinator to a file, as somebody on the network could."""
    from hf_cocodc.coordinator import caller

    line_of = caller.line_of

    def said(message: Any, *limits: int) -> bytes:
        line = line_of(message, *limits)
        if isinstance(message, dict) and "hf_cocodc" in message:
            with (folder / GREETINGS).open("ab") as file:
                file.write(line)
        return line

    caller.line_of = said  # type: ignore[assignment]


DAMAGES: dict[str, Callable[..., None]] = {
    "NaN": _once(_one_value(math.nan)),
    "Inf": _once(_one_value(math.inf)),
    "weights": _once(lambda local, at: local.mul_(1e4)),
    "gradient": _once(lambda local, at: local.copy_(at + 1e6 * (local - at))),
    "fp16": _once(_one_value(1e6)),
    "learning rate": _too_fast,
    "trailer": _weight,
    "flip": _flip(gathered=False),
    "flip back": _flip(gathered=True),
    "flip sealed": _flip_sealed,
}
