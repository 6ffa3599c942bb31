"""Measures what a merge is to correct: the inner steps made during a transfer, against the same steps truly redone."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_cocodc.engine.fragment import FragmentState
from hf_cocodc.parts.info import MergeInfo, MergeSlice
from hf_cocodc.parts.merges import Merge, compensate_delay, mix, replace
from hf_cocodc.parts.tensors.slices import squares

from .inner import Inner
from .text import Text

MERGES: dict[str, Merge] = {
    "fixed": compensate_delay("fixed"),
    "lr_normalized": compensate_delay("lr_normalized"),
    "adaptive": compensate_delay("adaptive"),
    "replace": replace(),
    "mix 0.5": mix(0.5),
}
"""What is measured against the additive merge, on the same landings."""
PARTS = ("first third", "second third", "last third")
"""Of the training."""
KEPT = 16
"""Sends whose state is kept for their landings."""


class Probe:
    """The error of every merge, at every landing of one region.

    At a landing, a copy of the region goes back to the send, takes the new global params of the fragment, and makes the inner
    steps of the flight anew: same batches, same state of the inner optimizer, same learning rates. R is where it ends, A is what
    the additive merge makes, Theta the new global params, C what another merge makes:

    - `missing` = |R - A| / |R - Theta|: how large what the additive merge leaves out is, as a share of the steps redone.
    - `error` = |R - C| / |R - A|: below 1 the merge is nearer to the truth than the additive one.
    - `cosine` between C - A and R - A: whether the correction points to the truth at all. 0: no strength of it would help.

    Norms are those of the whole fragment.

    Args:
        inner: of the region.
        text: where its batches come from; it is region 0.
    """

    def __init__(self, inner: Inner, text: Text) -> None:
        self._inner, self._text = inner, text
        self._again: Inner | None = None
        self._sent, self._kept = False, dict[int, tuple[dict[str, Tensor], Any]]()
        self._landed: list[tuple[int, int]] = []
        self._trained: dict[str, Tensor] = {}
        self._rows: list[dict[str, Any]] = []

    def note(self, kind: str, facts: Mapping[str, Any]) -> None:
        """Hear of an event of the region, while it happens."""
        if kind == "send":
            self._sent = True
        elif kind == "land" and facts["staleness"]:
            self._landed.append((facts["fragment"], facts["sent_at"]))

    def before(self, step: int) -> None:
        """Call after an inner step, before its events."""
        self._trained = self._params(self._inner)

    def after(self, step: int, fragments: Sequence[FragmentState]) -> None:
        """Call after the events of an inner step."""
        for index, sent_at in self._landed:
            if sent_at in self._kept:
                self._rows.append(self._measure(fragments[index], sent_at, step))
        self._landed = []
        if self._sent:
            self._kept[step] = self._params(self._inner), copy.deepcopy(self._inner.optimizer.state_dict())
            self._kept = dict(list(self._kept.items())[-KEPT:])
        self._sent = False

    def found(self, steps: int) -> dict[str, dict[str, float]]:
        """The means over the landings in each third of a run of so many inner steps."""
        means: dict[str, dict[str, float]] = {}
        for number, name in enumerate(PARTS):
            rows = [row for row in self._rows if min(3 * (row["step"] - 1) // steps, 2) == number]
            if rows:
                names = [name for name in rows[0] if name != "step"]
                means[name] = {each: sum(row[each] for row in rows) / len(rows) for each in names}
        return means

    @staticmethod
    def _params(inner: Inner) -> dict[str, Tensor]:
        return {name: param.detach().clone() for name, param in inner.model.named_parameters()}

    @torch.no_grad()
    def _measure(self, state: FragmentState, sent_at: int, step: int) -> dict[str, Any]:
        fragment, (params, saved) = state.fragment, self._kept[sent_at]
        new = fragment.views(state.global_params.clone())
        snapshot, local = fragment.views_of(params), fragment.views_of(self._trained)
        again, rates = self._redo(params, saved, sent_at, step, fragment.views_of, new)
        redone = fragment.views_of(again)
        info = MergeInfo(sent_at=sent_at, landed_at=step, flight_lr=sum(rates) / len(rates))
        additive = _joined([n + (x - s) for n, x, s in zip(new, local, snapshot, strict=True)])
        truth = _joined(redone)
        needed = truth - additive
        length = max(float(needed.norm()), 1e-30)
        row: dict[str, Any] = {"step": step, "missing": length / float((truth - _joined(new)).norm())}
        for name, merge in MERGES.items():
            made = _joined([_apply(merge, *each, info) for each in zip(local, new, snapshot, strict=True)])
            change = made - additive
            row[f"{name} error"] = float((truth - made).norm()) / length
            row[f"{name} cosine"] = float(change @ needed / (change.norm() * length).clamp(min=1e-30))
        return row

    def _redo(
        self,
        params: dict[str, Tensor],
        saved: Any,
        sent_at: int,
        step: int,
        views: Any,
        new: list[Tensor],
    ) -> tuple[dict[str, Tensor], list[float]]:
        """Make the inner steps of a flight from other values of a fragment; returns all params and the learning rates."""
        if self._again is None:
            self._again = copy.deepcopy(self._inner)
        again = self._again
        held = {name: param.detach() for name, param in again.model.named_parameters()}
        for name, param in held.items():
            param.copy_(params[name])
        for target, source in zip(views(held), new, strict=True):
            target.copy_(source)
        again.optimizer.load_state_dict(copy.deepcopy(saved))
        again.step = sent_at
        with torch.enable_grad():
            rates = [again.train(self._text.batch(0, each)) for each in range(sent_at + 1, step + 1)]
        return held, rates


def _joined(views: Sequence[Tensor]) -> Tensor:
    return torch.cat([view.reshape(-1) for view in views])


def _apply(merge: Merge, local: Tensor, new: Tensor, snapshot: Tensor, info: MergeInfo) -> Tensor:
    """What the package's merge makes of one parameter."""
    numel = local.numel()
    mine, given, sent = (each.reshape(-1) for each in (local, new, snapshot))
    whole = MergeSlice(mine, given, sent, [numel])
    if merge.measure is not None:
        assert merge.scales is not None
        first, second = (squares([each]).sqrt() for each in merge.measure(whole, info))
        scales = merge.scales(first, second, torch.tensor([numel], dtype=torch.float64), info)
        whole = whole._replace(scales=scales.unbind())
    return merge.apply(whole, info).view_as(local)
