"""Checkpoints on disk: what is written, when a checkpoint counts as complete, and how it is read.

::

    checkpoint-N/                     the global model, for `from_pretrained`, and files of Trainer (inner optimizer, ...)
        cocodc/state.json             format version, facts of the run, and the engine's state without its tensors
        cocodc/global-lane0.safetensors   its tensors: global params, outer state, transfers in flight, residuals
        cocodc/local-lane0.safetensors    this region's local weights (see `local_weights`)
        cocodc/state-lane1.json, ...  the same for further lanes, if the model is sharded
        cocodc/COMPLETE               written last: every file of the checkpoint with its size and SHA-256 (see `manifest`)
        global/                       the files of the global model once more (see `export`)

`accelerator.save_state` writes no global model: what lies beside `cocodc/` is Accelerate's, with the local weights. We read no
pickle.
"""

import contextlib
import json
import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..errors import CheckpointError
from ..link.base import Link
from ..link.ranks import SharedLink
from ..net.validation import MOST
from ..parts.fragments import names_in
from ..parts.tensors.flat import alone
from ..parts.tensors.memory import HOST
from . import manifest
from .durable import replace, saving
from .folders import begin_run, is_unsaved, run_of
from .manifest import COMPLETE, FOLDER, FORMAT, damage

logger = logging.getLogger(__name__)

_TENSOR = "$tensor"
_FLOAT = "$float"
_DEEPEST = 64
"""Most levels of a state."""

TAKEN_OVER = "joining"
"""Name of `Facts.taken_over` in the file."""
_OF_DAMAGE = (
    *(
        ArithmeticError,
        AttributeError,
        LookupError,
        MemoryError,
        OSError,
        RecursionError,
        SafetensorError,
        TypeError,
    ),
    ValueError,
)


def take_apart(value: Any) -> tuple[Any, dict[str, Tensor]]:
    """A state as JSON-able values, and its tensors by name: each as `alone` makes it, none twice."""
    tensors: dict[str, Tensor] = {}
    return _take_apart(value, "", tensors, {}), tensors


def put_together(value: Any, tensors: dict[str, Tensor]) -> Any:
    """The state that `take_apart` took apart. Raises KeyError if a tensor is missing, ValueError if it is no such state."""
    return _put_together(value, tensors, _DEEPEST)


def _put_together(value: Any, tensors: dict[str, Tensor], levels: int) -> Any:
    if not isinstance(value, dict | list):
        return value
    if not levels:
        raise ValueError(f"a state has more than {_DEEPEST} levels")
    if isinstance(value, list):
        return [_put_together(each, tensors, levels - 1) for each in value]
    for mark in (_TENSOR, _FLOAT):
        if mark in value and (len(value) > 1 or not isinstance(value[mark], str)):
            raise ValueError(f"a state has {str(value)[:80]} in the place of a tensor or a number")
    if _TENSOR in value:
        return tensors[value[_TENSOR]]
    if _FLOAT in value:
        return float(value[_FLOAT])
    return {key: _put_together(each, tensors, levels - 1) for key, each in value.items()}


def _take_apart(value: Any, name: str, tensors: dict[str, Tensor], seen: dict[int, str]) -> Any:
    if isinstance(value, Tensor):
        if id(value) not in seen:
            seen[id(value)] = name
            tensors[name] = alone(value)
        return {_TENSOR: seen[id(value)]}
    if isinstance(value, dict):
        return {key: _take_apart(each, _join(name, key), tensors, seen) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_take_apart(each, _join(name, i), tensors, seen) for i, each in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        return {_FLOAT: str(value)}
    return value


def _join(name: str, key: Any) -> str:
    return f"{name}/{key}" if name else str(key)


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What identifies the run of a checkpoint.

    Attributes:
        step: inner steps made.
        region: the one that wrote it.
        settings: of the method.
        journal: bytes of the journal that belong to the run up to here; `journal_sha256` is their hash (`journal.Mark`).
        taken_over: whether it was copied from another region, so that this region's own part is missing.
        stopping: whether all regions stopped here, at a step at which no checkpoint was due.
        model: `About.model` of the run; empty in checkpoints of older versions, as is `facts` (`About.facts`).
        members: the regions that took part then; empty in checkpoints of older versions, where all did.
    """

    step: int
    region: int
    num_regions: int
    num_lanes: int
    settings: dict[str, Any]
    finished: bool
    journal: int
    taken_over: bool = False
    stopping: bool = False
    model: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    journal_sha256: str = ""
    members: Sequence[int] = ()

    @property
    def writers(self) -> Sequence[int]:
        """The regions that took part then."""
        return self.members or range(self.num_regions)

    @classmethod
    def of(cls, link: Link, **more: Any) -> "Facts":
        """The facts that a link knows, and more."""
        members = list(link.members)
        return cls(
            region=link.region, num_regions=len(members), members=members, num_lanes=link.num_lanes, **more
        )

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "Facts":
        """Raises KeyError if a fact is missing that every version writes, ValueError if a value cannot be that fact."""
        named = {**content, "taken_over": content.get(TAKEN_OVER, False)}
        always = {each.name for each in fields(cls) if each.default is each.default_factory is MISSING}
        facts = {each.name: named[each.name] for each in fields(cls) if each.name in named.keys() | always}
        for name, value in facts.items():
            if not _IS[name](value):
                raise ValueError(f"{name}={str(value)[:80]} is no such fact of a run")
        return cls(**facts)

    def to_json(self) -> dict[str, Any]:
        named = asdict(self)
        return {**{name: named[name] for name in named if name != "taken_over"}, TAKEN_OVER: self.taken_over}


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MOST


def _is_dict(value: Any) -> bool:
    return isinstance(value, dict)


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)


_IS: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("step", "region", "journal"), _is_count),
    **dict.fromkeys(("num_regions", "num_lanes"), lambda value: _is_count(value) and value > 0),
    **dict.fromkeys(("settings", "model", "facts"), _is_dict),
    **dict.fromkeys(("finished", "taken_over", "stopping"), _is_bool),
    "journal_sha256": lambda value: isinstance(value, str),
    "members": lambda value: isinstance(value, list | tuple) and all(map(_is_count, value)),
}
"""What holds for the value of each fact."""


class Saved(NamedTuple):
    """Our part of a checkpoint, as read: what `Synchronizer.state_dict` returned, and the facts of the run that wrote it.

    `weights` has the digests of the lane's weights (`parts.tensors.flat.digests`); it is empty after a take-over.
    """

    state: dict[str, Any]
    facts: Facts
    weights: Mapping[str, str] = MappingProxyType({})

    @property
    def synchronized(self) -> frozenset[str]:
        """Names of the parameters that the run had trained."""
        return names_in(self.state["layout"])


def tensors_file(lane: int = 0) -> str:
    """File of a lane's tensors in a checkpoint."""
    return f"{FOLDER}/global-lane{lane}.safetensors"


def state_file(lane: int = 0) -> str:
    """File of a lane's state, without its tensors, in a checkpoint."""
    return f"{FOLDER}/state-lane{lane}.json" if lane else f"{FOLDER}/state.json"


def begin(checkpoint: Path) -> None:
    """Make a checkpoint's folder. It is not complete before `seal`. Raises CheckpointError if the disk refuses."""
    with saving(checkpoint):
        (checkpoint / FOLDER).mkdir(parents=True, exist_ok=True)
        (checkpoint / COMPLETE).unlink(missing_ok=True)
    begin_run(checkpoint, run_of(checkpoint.parent))


def write(checkpoint: Path, saved: Saved, lane: int = 0) -> None:
    """Write the engine's state into a checkpoint. Raises CheckpointError if the disk refuses; other checkpoints stay intact."""
    with saving(checkpoint):
        tree, tensors = take_apart(saved.state)
        replace(checkpoint / tensors_file(lane), lambda path: save_file(tensors, path))
        content = {"format": FORMAT, **saved.facts.to_json(), "weights": dict(saved.weights), "state": tree}
        text = json.dumps(content, indent=1, allow_nan=False)
        replace(checkpoint / state_file(lane), lambda path: path.write_text(text, encoding="utf-8"))


def seal(checkpoint: Path) -> None:
    """Complete a checkpoint: flush its files, and list them with their hashes. Raises CheckpointError if the disk refuses."""
    folder = checkpoint.parent
    with saving(checkpoint):
        manifest.write(checkpoint, run_of(folder))
    if is_unsaved(folder):
        begin_run(folder, run_of(folder))


def read_own(link: Link, checkpoint: Path, checked: bool = False) -> Saved:
    """What this rank needs of a checkpoint: the state of its lane, without values if it has no engine. See `read`."""
    has_engine = not isinstance(link, SharedLink) or link.is_leader
    return read(checkpoint, link.lane, checked, with_values=has_engine)


def read(checkpoint: Path, lane: int = 0, checked: bool = False, with_values: bool = True) -> Saved:
    """The engine's state and the facts of its run. With `checked`, the caller has compared the hashes, and this is not
    repeated.

    Args:
        with_values: else all tensors are empty.

    Raises:
        CheckpointError: the checkpoint is incomplete, damaged, or of a format that this version does not know.
    """
    wrong = damage(checkpoint, hashes=not checked)
    if wrong is not None:
        raise CheckpointError(
            f"{checkpoint} cannot be resumed from: {wrong}. Resume from another checkpoint of the run."
        )
    listed = manifest.read(checkpoint).files
    for name in (state_file(lane), tensors_file(lane)):
        if name not in listed:
            raise CheckpointError(
                f"{checkpoint} has no {name}: a region with fewer ranks wrote it. Launch the region with as many ranks as then."
            )
    with refusing(checkpoint / FOLDER):
        content = _content_of(checkpoint, lane)
        # copies: a matrix product may give other bits if the file's layout leaves a tensor unaligned
        tensors: dict[str, Tensor] = defaultdict(lambda: torch.empty(0, device=HOST))
        if with_values:
            tensors = {
                name: each.clone() for name, each in load_file(checkpoint / tensors_file(lane)).items()
            }
        state = put_together(content["state"], tensors)
        names_in(state["layout"])
        return Saved(state, Facts.from_json(content), dict(content.get("weights", {})))


def mark_taken_over(checkpoint: Path) -> None:
    """Note in a copied checkpoint that it is another region's."""
    for path in (checkpoint / FOLDER).glob("state*.json"):
        content = json.loads(path.read_text(encoding="utf-8"))
        path.write_text(json.dumps({**content, "weights": {}, TAKEN_OVER: True}), encoding="utf-8")


def trained(checkpoint: Path) -> frozenset[str]:
    """Names of the parameters that a complete checkpoint's run trains. Raises CheckpointError if it is damaged."""
    with refusing(checkpoint / state_file()):
        return names_in(_content_of(checkpoint)["state"]["layout"])


def facts_of(checkpoint: Path) -> Facts:
    """The facts of a complete checkpoint, without reading its tensors. Raises CheckpointError if it is damaged."""
    with refusing(checkpoint / state_file()):
        return Facts.from_json(_content_of(checkpoint))


def _content_of(checkpoint: Path, lane: int = 0) -> dict[str, Any]:
    return json.loads((checkpoint / state_file(lane)).read_text(encoding="utf-8"))


@contextlib.contextmanager
def refusing(path: Path) -> Iterator[None]:
    """Inside the block, whatever a damaged file raises becomes a CheckpointError."""
    try:
        yield
    except CheckpointError:
        raise
    except KeyError as error:
        raise CheckpointError(f"{path} lacks {error}.") from error
    except _OF_DAMAGE as error:
        raise CheckpointError(
            f"{path} cannot be read: {type(error).__name__}: {str(error)[:200]}."
        ) from error
