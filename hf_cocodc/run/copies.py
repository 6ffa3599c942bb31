"""Optimizers with weights of their own: fp32 masters, copies on the host, the slow weights of Lookahead.

Such an optimizer computes on its copy, and writes it over the parameters. A landing changes only the parameters: the next step
would undo it, and the regions would train apart without a word. A copy is known by two things: it has once been equal to a
parameter, and it is so again after a landing has changed the parameter, which has lost the landing.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InputError
from ..parts.tensors.flat import local_shard

_DEEPEST = 6
_WINDOW = 64
"""Inner steps after the first landing in which an optimizer may write its copy back; Lookahead does in every fifth or tenth."""
_BACK = 0.25
"""A step undoes a landing if, beyond what the step before it did, it takes back more than this part of the change. Lookahead
takes back a half or less.
"""


class _Probe:
    """One parameter that an optimizer trains, of which a copy in this optimizer is looked for."""

    def __init__(self, optimizer: Any, param: nn.Parameter, trained: set[int]) -> None:
        self.optimizer, self._param, self._trained = optimizer, param, trained
        self._size_of_state = -1
        self._copies: list[Tensor] = []
        self._before: Tensor | None = None  # after the last step or landing
        self._step: Tensor | None = None
        self._change: Tensor | None = None
        self._undone: Tensor | None = None
        self._looks = 0
        self.search()

    @property
    def values(self) -> Tensor:
        return local_shard(self._param).reshape(-1)

    def search(self) -> None:
        """Find tensors that are equal to the parameter now. Reads values."""
        if len(self._copies) < 4:
            known = {id(each) for each in self._copies}
            new = [each for each in self._tensors() if id(each) not in known and self._equals(each)]
            self._copies += new

    def look(self) -> None:
        """After an optimizer step, before a landing. Reads values only where the optimizer has new state, and once after the
        first landing.
        """
        if self._undone is None:
            state = getattr(self.optimizer, "state", None)
            size = len(state.get(self._param, ())) if isinstance(state, Mapping) else 0
            if size != self._size_of_state:
                self._size_of_state = size
                self.search()
        if not self._copies:
            return
        values = self.values.float()
        step = torch.zeros_like(values) if self._before is None else values - self._before
        if self._change is not None:
            assert self._step is not None
            self._looks += 1
            # regions agree on much: a landing, with outer_lr below 1, and the next step point in opposite directions
            back = torch.dot(self._step - step, self._change) / torch.dot(self._change, self._change)
            is_copied = torch.stack([_cast(each, self.values).eq(self.values).all() for each in self._copies])
            undone = is_copied.any() & (back > _BACK)
            is_first = self._undone is None
            self._undone = undone if self._undone is None else self._undone | undone
            if is_first or self._looks == _WINDOW:
                self.refuse()
            if self._looks == _WINDOW:
                self._copies = []
        self._before, self._step = values.clone(), step

    def landed(self) -> None:
        """After a landing, of whichever parameters. Reads values if there may be a copy."""
        if self._before is None or not self._copies:
            return
        self.refuse()
        values = self.values.float()
        change = values - self._before
        if bool(change.any()):
            self._change, self._before = change, values.clone()

    def refuse(self) -> None:
        """Raise InputError if the optimizer has undone a landing."""
        if self._undone is not None and bool(self._undone):
            raise InputError(undoes(type(self.optimizer).__name__))

    def _equals(self, tensor: Tensor) -> bool:
        values = self.values
        return torch.equal(_cast(tensor, values), values)

    def _tensors(self) -> Iterator[Tensor]:
        """Tensors of the optimizer that may be copies of the parameter."""
        values = self.values
        memory = values.untyped_storage().data_ptr()
        for tensor in _reachable(self.optimizer, set(), _DEEPEST):
            if id(tensor) in self._trained or tensor is self._param.grad or not tensor.is_floating_point():
                continue
            own = local_shard(tensor)
            if own.numel() == values.numel() and own.untyped_storage().data_ptr() != memory:
                yield own


class Copies:
    """Looks for copies of the weights in the optimizers `parts` of `model`, in one of each class. Call `look` after each step
    of theirs, `landed` after each landing, and `refuse` at the end of the run: they raise InputError.

    Ordinary optimizers cost one search when their state appears, and no synchronization of the device in other steps.
    """

    def __init__(self, parts: list[Any], model: nn.Module) -> None:
        trained = {id(param) for param in model.parameters()}
        self._probes: list[_Probe] = []
        for part in {type(part): part for part in reversed(parts)}.values():
            own = (param for group in part.param_groups for param in group.get("params", ()))
            mine = [param for param in own if id(param) in trained and param.requires_grad]
            probe = next((param for param in sorted(mine, key=_numel) if _is_telling(param)), None)
            if probe is not None:
                self._probes.append(_Probe(part, probe, trained))

    def values(self) -> list[Tensor]:
        """Copies, as bytes, of some values that each class of optimizers trains."""
        return [probe.values.clone().view(torch.uint8) for probe in self._probes]

    def look(self) -> None:
        for probe in self._probes:
            probe.look()

    def landed(self) -> None:
        for probe in self._probes:
            probe.landed()

    def refuse(self) -> None:
        for probe in self._probes:
            probe.refuse()


def undoes(optimizer: str) -> str:
    """The message that refuses an optimizer which undoes landings."""
    return (
        f"{optimizer} keeps a copy of the weights of its own, and has written it over what had landed from the other regions: "
        "they would train apart. Use an optimizer that works on the model's parameters, as torch.optim.AdamW does: for fp32 "
        "weights beside half precision keep the model in fp32, with Accelerate's mixed_precision; leave out Lookahead and copies "
        "on the host."
    )


def _reachable(thing: Any, seen: set[int], levels: int) -> Iterator[Tensor]:
    """Every tensor in an optimizer: in its containers, and in optimizers inside it."""
    if isinstance(thing, Tensor):
        yield thing
        return
    if id(thing) in seen or not levels:
        return
    inside: Any = ()
    if isinstance(thing, Mapping):
        inside = thing.values()
    elif isinstance(thing, list | tuple):
        inside = thing
    elif hasattr(thing, "param_groups"):
        inside = getattr(thing, "__dict__", {}).values()
    seen.add(id(thing))
    for each in list(inside):
        yield from _reachable(each, seen, levels - 1)


def _cast(tensor: Tensor, like: Tensor) -> Tensor:
    return local_shard(tensor).reshape(-1).to(like.device, like.dtype)


def _numel(param: nn.Parameter) -> int:
    return local_shard(param).numel()


def _is_telling(param: nn.Parameter) -> bool:
    """Whether a tensor that equals this parameter must be a copy of it. A constant one equals other state, too."""
    values = local_shard(param).reshape(-1)
    return values.numel() > 1 and values.is_floating_point() and bool(values.ne(values[0]).any())
