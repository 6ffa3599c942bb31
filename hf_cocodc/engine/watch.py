"""Compares the parameters that a model has now with those that regions synchronize."""

import zlib
from collections.abc import Collection, Mapping, Sequence, Set
from typing import Any, NamedTuple

from torch import Tensor, nn

from ..errors import InputError, LeftBehind
from ..parts.tensors.flat import local_shard, reshard
from .fragment import FragmentState

UNKNOWN = -1
"""The layout that a transfer of an older version carries."""


class ParameterProposal(NamedTuple):
    """The parameters that a region wants to synchronize.

    `more` names those not adopted yet. `lines` describes all (of a resumed run only `more`); equal lines are equal layouts.
    """

    more: tuple[str, ...]
    lines: tuple[str, ...]


class Watch:
    """Watches a model's parameters.

    An adopted parameter is one that regions synchronize. It stays adopted if it is frozen: its outer gradient is then zero, and
    it moves only by what is left of its outer momentum. If its memory is replaced (`p.data = ...`, or another module of equal
    shape), the new memory takes its place; this needs no other region.

    A parameter that becomes trainable, or is added, is noticed: in the same inner step if the model had it frozen, else at the
    next send. It is adopted when all regions are known to have noticed the same ones. It is noticed for good: one that is
    frozen again has made steps that the other regions lack.

    `noticed` has the parameters to adopt, and whether the model had them, frozen, at the last adoption: these are still equal
    in all regions. `replicas`: other ranks of this region hold the same parameters.
    """

    def __init__(self, model: nn.Module, replicas: bool) -> None:
        self._model, self._replicas = model, replicas
        self.noticed: dict[str, bool] = {}
        self._adopted: dict[str, tuple] = {}
        self._lines: dict[str, str] = {}
        self._had: frozenset[str] = frozenset()
        self._frozen: dict[str, nn.Parameter] = {}
        self._proposals: dict[int, ParameterProposal] = {}
        self._settled = UNKNOWN
        self._is_sharded = False

    def begin(self, names: Collection[str]) -> None:
        """These parameters have been adopted."""
        present = _params(self._model)
        self._adopted = {name: _form(param) for name, param in present.items() if name in names}
        self._lines = {name: _line(name, present[name]) for name in self._adopted}
        self._is_sharded = any(hasattr(param, "placements") for param in present.values())
        self._had = frozenset(present)
        self.noticed = {name: had for name, had in self.noticed.items() if name not in names}
        self._proposals = {}
        self._settled = self._propose({})
        self._keep_frozen(present)

    def _keep_frozen(self, present: dict[str, nn.Parameter]) -> None:
        self._frozen = {
            name: param for name, param in self._unknown(present).items() if not param.requires_grad
        }

    def _unknown(self, present: dict[str, nn.Parameter]) -> dict[str, nn.Parameter]:
        known = self._adopted.keys() | self.noticed.keys()
        return {name: param for name, param in present.items() if name not in known}

    def notice(self) -> None:
        """Notice frozen parameters that are trainable now. Called after every inner step: almost free."""
        for param in self._frozen.values():
            if param.requires_grad:
                self._notice(_params(self._model))
                return

    def _notice(self, present: dict[str, nn.Parameter]) -> None:
        # the adapters of tied layers are several parameters in one memory
        places = {form[:2] for form in self._adopted.values() if form[0]}
        places |= {_form(present[name])[:2] for name in self.noticed if name in present}
        for name, param in present.items():
            if param.requires_grad and name not in self._adopted and name not in self.noticed:
                place = _form(param)[:2]
                if not place[0] or place not in places:
                    refuse_complex(name, param)
                    places.add(place)
                    self.noticed[name] = name in self._had
        self._keep_frozen(present)

    def look(self, fragments: Sequence[FragmentState]) -> None:
        """Notice what has changed, and let `fragments` use the model's present memory.

        Raises InputError if an adopted parameter is gone or has another form; or if parameters have become trainable in a
        region whose ranks hold the same parameters (DDP).
        """
        if self._is_sharded:
            reshard(self._model)
        present = _params(self._model)
        forms = {name: _form(present[name]) for name in self._adopted if name in present}
        if forms != self._adopted:
            places: dict[tuple, str] = {}
            for name, form in self._adopted.items():
                wrong = None
                if name not in forms:
                    wrong = "no longer in the model, or is tied"
                elif forms[name][1:4] != form[1:4]:
                    wrong = f"{_line(name, present[name])} now"
                elif forms[name][0] and places.setdefault(forms[name][:2], name) != name:
                    wrong = f"in the memory of {places[forms[name][:2]]} now"
                if wrong is not None:
                    raise InputError(
                        f"{self._lines[name]} is synchronized between the regions, and is {wrong}. Parameters may be "
                        "frozen, unfrozen, added or given other memory during a run, but not removed, tied or changed in shape "
                        "or type: start a new run with the changed model, from the global model of a checkpoint."
                    )
            shards = {name: local_shard(present[name]) for name in self._adopted}
            for fragment in fragments:
                fragment.move_to(shards)
            self._adopted = forms
        if len(present) != len(self._adopted):
            self._notice(present)
        self.noticed = {name: had for name, had in self.noticed.items() if name in present}
        if self.noticed and self._replicas:
            raise InputError(
                f"{min(self.noticed)} has become trainable, but DDP reduces only gradients of parameters that were trainable "
                "when it wrapped the model: the ranks of this region would train different models. Launch each region as one "
                "process or with FSDP2, or let these parameters be trainable from the start of the run."
            )

    @property
    def adopted(self) -> Set[str]:
        """Names of the adopted parameters."""
        return self._adopted.keys()

    @property
    def layout(self) -> int:
        """A number for the parameters that this region wants to synchronize; equal in regions that want the same ones."""
        return self._propose(self.noticed) if self.noticed else self._settled

    def _propose(self, noticed: Mapping[str, bool]) -> int:
        present = _params(self._model)
        line_of = dict(self._lines)
        for name, had in noticed.items():
            # one that the model had is averaged, another one is region 0's: regions must agree on this, too
            line_of[name] = _line(name, present[name]) + ("" if had else " (new)")
        lines = tuple(line_of[name] for name in sorted(line_of))
        layout = zlib.crc32("\n".join(lines).encode())
        self._proposals[layout] = ParameterProposal(tuple(sorted(noticed)), lines)
        return layout

    def proposal(self, layout: int) -> ParameterProposal:
        """What this region has called by this number since parameters were adopted last.

        Raises InputError if one of the parameters is no longer in the model; LeftBehind if this region has not called anything
        so, because it was coming in when the others noticed parameters.
        """
        if layout != UNKNOWN and layout not in self._proposals:
            raise LeftBehind(
                "the other regions have made more parameters trainable while this region was coming in. It can come in again, "
                "from a state that has them."
            )
        proposal = ParameterProposal((), ()) if layout == UNKNOWN else self._proposals[layout]
        gone = [name for name in proposal.more if name not in self.noticed]
        if gone:
            raise InputError(
                f"{gone[0]} has become trainable, but it was removed from the model before the regions could adopt it at the "
                "next landing. Keep it for more than sync_interval inner steps, or add it before the run."
            )
        return proposal

    def state_dict(self) -> dict[str, Any]:
        """What regions are about to adopt, and what was added to the model since the last adoption."""
        proposals = [[layout, list(each.more)] for layout, each in self._proposals.items() if each.more]
        added = [name for name in _params(self._model) if name not in self._had]
        return {"noticed": self.noticed, "proposals": proposals, "added": added}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned; what has been noticed since then does not count."""
        present = _params(self._model)
        self._had = frozenset(present).difference(state.get("added", ()))
        self.noticed = dict(state.get("noticed", {}))
        proposals = state.get("proposals", ())
        self._proposals |= {layout: ParameterProposal(tuple(more), tuple(more)) for layout, more in proposals}
        # what is trainable now may be of later steps, which are undone: the next inner step shows it
        self._frozen = self._unknown(present)


def refuse_complex(name: str, param: Tensor) -> None:
    """Check that a trainable parameter is real. Raises InputError if it is complex."""
    if param.is_complex():
        raise InputError(
            f"the parameter {name} is complex ({param.dtype}), but regions exchange real numbers. Freeze it "
            "(requires_grad_(False)), or keep its real and imaginary parts as two real parameters (torch.view_as_real)."
        )


def _params(model: nn.Module) -> dict[str, nn.Parameter]:
    return dict(model.named_parameters())


def _form(param: Tensor) -> tuple:
    """A parameter's memory and form: address, size, shape, type, strides, device."""
    own = local_shard(param) if hasattr(param, "placements") else param
    return (own.data_ptr(), own.numel(), own.shape, own.dtype, own.stride(), own.device)


def _line(name: str, param: Tensor) -> str:
    return f"{name} {list(param.shape)} {str(param.dtype).removeprefix('torch.')}"
