"""Compares the parameters that a model has now with those that regions synchronize."""

from collections.abc import Mapping, Sequence, Set
from typing import Any

from torch import Tensor, nn

from ..errors import InputError
from ..parts.fragments import Fragment, names_of, refuse_overlaps
from ..parts.tensors.flat import local_shard, reshard
from .fragment import FragmentState


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
            self._refuse_more(_params(self._model))

    def look(self, fragments: Sequence[FragmentState]) -> None:
        """Let `fragments` use the model's present memory.

        Raises InputError if a synchronized parameter is gone, overlaps another one or has another form, or if
        another parameter is trainable.
        """
        if self._is_sharded:
            reshard(self._model)
        present = _params(self._model)
        forms = {name: _form(present[name]) for name in self._forms if name in present}
        if forms != self._forms:
            self._refuse_other_forms(present, forms)
            shards = {name: local_shard(present[name]) for name in forms}
            refuse_overlaps(shards)
            for fragment in fragments:
                fragment.move_to(shards)
            self._forms = forms
        if len(present) != len(forms):
            self._refuse_more(present)

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

    def _refuse_more(self, present: Mapping[str, nn.Parameter]) -> None:
        # the adapters of tied layers are several parameters in one memory
        places = {form[:2] for form in self._forms.values() if form[0]}
        for name, param in present.items():
            if param.requires_grad and name not in self._forms and _form(param)[:2] not in places:
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
