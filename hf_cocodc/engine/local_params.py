"""The local params: this rank's own tensors, read and written in place, watched, and put back after others were shown."""

from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InputError
from ..parts.fragments import Fragment, names_of, refuse_overlaps
from ..parts.tensors.flat import copy_all_, local_shard, reshard
from ..parts.tensors.memory import HOST, Home
from ..parts.tensors.slices import Cut, cuts, longest


class LocalParams:
    """The trainable parameters of one fragment (of a sharded model, this rank's shards), slice by slice.

    `device`: where slices are read, and from where they are written; by default the first parameter's. A model may lie
    on several devices.

    Attributes:
        cuts: the slices.
        numels: number of values of each parameter, fp64 on the device: brought there once, because training waits for that.
        is_rounded: whether the model stores values with less precision than fp32.
    """

    def __init__(self, params: Sequence[Tensor], device: torch.device | None = None) -> None:
        self.params = list(params)
        self.device = device or self.params[0].device
        self.is_rounded = any(param.dtype != torch.float32 for param in self.params)
        numels = [param.numel() for param in self.params]
        self.numels = torch.tensor(numels, dtype=torch.float64, device=HOST).to(self.device)
        # strided ones cannot be cut: they are all in one slice
        is_contiguous = all(param.is_contiguous() for param in self.params)
        most = longest(self.device) if is_contiguous else max(sum(numels), 1)
        self.cuts: list[Cut] = cuts(numels, most)
        self._parts = _parts(self.params, self.cuts)

    def read(self, index: int, into: Tensor | None = None, spare: Tensor | None = None) -> Tensor:
        """The values of a slice in fp32, on their device: written to `into`; or else perhaps the parameter's own memory, and
        perhaps `spare`.
        """
        parts = self._parts[index]
        if into is None:
            [first, *others] = parts
            is_plain = first.dim() == 1 and first.dtype == torch.float32 and first.device == self.device
            if is_plain and not others:
                return first
            into = spare
        if into is None:
            into = torch.empty(self.cuts[index].numel, dtype=torch.float32, device=self.device)
        copy_all_(self._views(index, into), parts)
        return into

    def write(self, index: int, values: Tensor) -> None:
        """Write the values of a slice into the parameters."""
        copy_all_(self._parts[index], self._views(index, values))

    def rounded(self, index: int, values: Tensor) -> Tensor:
        """The values of a slice as the model would store them, in fp32."""
        if not self.is_rounded:
            return values
        cut = self.cuts[index]
        views = cut.views(values)
        stored = [view.to(self.params[param].dtype) for view, param in zip(views, cut.params, strict=True)]
        into = torch.empty_like(values)
        copy_all_(cut.views(into), stored)
        return into

    def gather(self, into: Tensor, home: Home) -> Tensor:
        """Copy all values into a flat tensor at rest; returns that tensor."""
        for index, part in enumerate(self.split(into)):
            home.store(part, self.read(index, part if part.device == self.device else None))
        return into

    def show(self, flat: Tensor, home: Home) -> None:
        """Copy a flat tensor into the parameters."""
        for index, part in enumerate(self.split(flat)):
            self.write(index, home.visit(part))

    def _views(self, index: int, values: Tensor) -> list[Tensor]:
        """Views of a slice with the shapes of its stretches of the parameters."""
        parts = self._parts[index]
        if len(parts) == 1:
            return [values.view(parts[0].shape)]
        split = values.split_with_sizes(self.cuts[index].sizes)
        return [view.view(part.shape) for view, part in zip(split, parts, strict=True)]

    def split(self, flat: Tensor) -> Sequence[Tensor]:
        """A flat tensor of this fragment, slice by slice."""
        if len(self.cuts) == 1:
            return (flat,)
        return flat.split_with_sizes([cut.numel for cut in self.cuts]) if self.cuts else ()


def _parts(params: Sequence[Tensor], slices: Sequence[Cut]) -> list[list[Tensor]]:
    """For each slice the stretches of the parameters that lie in it; one that lies in it as a whole and strided, as it is."""
    starts = [0] * len(params)
    found: list[list[Tensor]] = []
    for cut in slices:
        found.append([])
        for param, size in zip(cut.params, cut.sizes, strict=True):
            own, start = params[param], starts[param]
            found[-1].append(own.view(-1)[start : start + size] if own.is_contiguous() else own)
            starts[param] += size
    return found


class Watch:
    """Watches a model's parameters: regions synchronize those in `fragments`, and no others, until the run ends.

    A parameter that is frozen stays synchronized: its outer gradient is then zero, and it moves only by what is left of its
    outer momentum. If its memory is replaced (`p.data = ...`, or another module of equal shape), the new memory takes its
    place; this needs no other region.
    """

    def __init__(self, model: nn.Module, fragments: Sequence[Fragment]) -> None:
        self._model = model
        present, names = _params(model), names_of(fragments)
        self._forms = {name: _form(param) for name, param in present.items() if name in names}
        self._lines = {name: _line(name, present[name]) for name in self._forms}
        self._others = [
            param for name, param in present.items() if name not in names and not param.requires_grad
        ]
        self._is_sharded = any(hasattr(param, "placements") for param in present.values())

    @property
    def names(self) -> Set[str]:
        """Names of the parameters that regions synchronize."""
        return self._forms.keys()

    def notice(self) -> None:
        """Refuse a frozen parameter that is trainable now, as `look` does. Called after every inner step: almost free."""
        if any(param.requires_grad for param in self._others):
            self._refuse_more(_params(self._model), self._forms)

    def look(self) -> dict[str, Tensor] | None:
        """The memory of this rank's parameters, by name, if it is another one than before; else None.

        Raises InputError if a synchronized parameter is gone, overlaps another one or has another form, or if
        another parameter is trainable.
        """
        if self._is_sharded:
            reshard(self._model)
        present, moved = _params(self._model), None
        forms = {name: _form(present[name]) for name in self._forms if name in present}
        if forms != self._forms:
            self._refuse_other_forms(present, forms)
            moved = {name: local_shard(present[name]) for name in forms}
            refuse_overlaps(moved)
        if len(present) != len(forms):
            self._refuse_more(present, forms)
        self._forms = forms
        return moved

    def _refuse_other_forms(
        self, present: Mapping[str, Tensor], forms: Mapping[str, tuple[Any, ...]]
    ) -> None:
        places: dict[tuple[Any, ...], str] = {}
        for name, form in self._forms.items():
            wrong = None
            if name not in forms:
                wrong = "no longer in the model, or is tied"
            elif forms[name][1:4] != form[1:4]:
                wrong = f"{_line(name, present[name])} now"
            elif forms[name][0] and places.setdefault(forms[name][:2], name) != name:
                wrong = f"in the memory of {places[forms[name][:2]]} now"
            if wrong is not None:
                raise InputError(
                    f"{self._lines[name]} is synchronized between the regions, and is {wrong}. Parameters may be frozen or given "
                    "other memory during a run, but not removed, tied or changed in shape or type: start a new run with the "
                    "changed model, from the global model of a checkpoint."
                )

    def _refuse_more(self, present: Mapping[str, nn.Parameter], forms: Mapping[str, tuple[Any, ...]]) -> None:
        # the adapters of tied layers are several parameters in one memory
        places = {form[:2] for form in forms.values() if form[0]}
        for name, param in present.items():
            if param.requires_grad and name not in forms and _form(param)[:2] not in places:
                raise InputError(
                    f"{_line(name, param)} is trainable now, and was not when the run began: regions synchronize only what is "
                    "trainable then, and would train different models. Make it trainable before the run (the optimizer may give "
                    "it a learning rate of 0 until you need it), or start a new run from the global model of a checkpoint."
                )


def _params(model: nn.Module) -> dict[str, nn.Parameter]:
    return dict(model.named_parameters())


def _form(param: Tensor) -> tuple[Any, ...]:
    """A parameter's memory and form: address, size, shape, type, strides, device."""
    own = local_shard(param) if hasattr(param, "placements") else param
    return (own.data_ptr(), own.numel(), own.shape, own.dtype, own.stride(), own.device)


def _line(name: str, param: Tensor) -> str:
    return f"{name} {list(param.shape)} {str(param.dtype).removeprefix('torch.')}"


@contextmanager
def local_kept(model: nn.Module, params: Sequence[Tensor], device: torch.device) -> Iterator[None]:
    """Restore these local params after the block, bit for bit, from `device`: that of the outer state costs a GPU no memory."""
    with torch.no_grad():
        reshard(model)
        kept = [param.to(device, copy=True) for param in params]
    try:
        yield
    finally:
        reshard(model)
        with torch.no_grad():
            for param, local in zip(params, kept, strict=True):
                param.copy_(local)
