"""Checkpoints on disk: what is written, when a checkpoint counts as complete, and how it is read.

::

    checkpoint-N/                     the global model, for `from_pretrained`, and files of Trainer (inner optimizer, ...)
        cocodc/state.json             format version, facts of the run, and the engine's state without its tensors
        cocodc/global-lane0.safetensors   its tensors: global params, outer state, transfers in flight, residuals
        cocodc/local-lane0.safetensors    this region's local weights (see `local_weights`)
        cocodc/state-lane1.json, ...  the same for further lanes, if the model is sharded
        cocodc/COMPLETE               written last: every file of the checkpoint with its size and SHA-256 (see `manifest`)

`accelerator.save_state` writes no global model: what lies beside `cocodc/` is Accelerate's, with the local weights. None of our
files is a pickle.
"""

import contextlib
import json
import logging
import pickle
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..errors import CheckpointError
from ..link.base import Link
from ..link.ranks import SharedLink
from ..parts.fragments import names_in
from ..parts.tensors.flat import alone
from ..parts.tensors.memory import HOST
from ..validation import Count, Positive
from . import manifest
from .folders import run_of
from .manifest import COMPLETE, FOLDER, FORMAT, saving

logger = logging.getLogger(__name__)

_TENSOR = "$tensor"
_DEEPEST = 64
"""Most levels of a state."""

_OF_DAMAGE = (
    *(ArithmeticError, AttributeError, EOFError, LookupError, MemoryError, OSError, RecursionError),
    *(RuntimeError, SafetensorError, TypeError, ValueError, pickle.UnpicklingError),
)


def take_apart(value: Any) -> tuple[Any, dict[str, Tensor]]:
    """A state as JSON-able values, and its tensors by name: each as `alone` makes it, none twice."""
    tensors: dict[str, Tensor] = {}
    return _take_apart(value, "", tensors, {}), tensors


def put_together(value: Any, tensors: dict[str, Tensor], levels: int = _DEEPEST) -> Any:
    """The state that `take_apart` took apart. Raises KeyError if a tensor is missing, ValueError if it is no such state, or has
    more `levels`.
    """
    if not isinstance(value, dict | list):
        return value
    if not levels:
        raise ValueError(f"a state has more than {_DEEPEST} levels")
    if isinstance(value, list):
        return [put_together(each, tensors, levels - 1) for each in value]
    if _TENSOR in value:
        if len(value) > 1 or not isinstance(value[_TENSOR], str):
            raise ValueError(f"a state has {str(value)[:80]} in the place of a tensor")
        return tensors[value[_TENSOR]]
    return {key: put_together(each, tensors, levels - 1) for key, each in value.items()}


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
    return value


def _join(name: str, key: Any) -> str:
    return f"{name}/{key}" if name else str(key)


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What identifies the run of a checkpoint.

    Attributes:
        step: inner steps made.
        region: the one that wrote it.
        members: the regions that took part then.
        settings: of the method.
        journal: name of the run's record in the journal.
        taken_over: whether it was copied from another region, so that this region's own part is missing.
        stopping: whether all regions stopped here, at a step at which no checkpoint was due.
        model, facts: `About.model` and `About.facts` of the run.
    """

    step: Count
    region: Count
    members: tuple[Count, ...]
    num_lanes: Positive
    settings: dict[str, Any]
    finished: bool
    journal: str = ""
    taken_over: bool = False
    stopping: bool = False
    model: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)


class Saved(NamedTuple):
    """Our part of a checkpoint, as read: what `Synchronizer.state_dict` returned, and the facts of the run that wrote it.

    `weights` has the digests of the lane's weights (`parts.tensors.flat.digests`); it is empty after a take-over. `folder` is
    that of the checkpoint, None before it is written.
    """

    state: dict[str, Any]
    facts: Facts
    weights: Mapping[str, str] = MappingProxyType({})
    folder: Path | None = None

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


def write(checkpoint: Path, saved: Saved, lane: int = 0) -> None:
    """Write the engine's state into a checkpoint, which counts once it is sealed, or into a base. Raises CheckpointError if the
    disk refuses; other checkpoints stay intact.
    """
    with saving(checkpoint):
        tree, tensors = take_apart(saved.state)
        save_file(tensors, checkpoint / tensors_file(lane))
        content = {"format": FORMAT, **asdict(saved.facts), "weights": dict(saved.weights), "state": tree}
        (checkpoint / state_file(lane)).write_text(json.dumps(content, indent=1), encoding="utf-8")


def seal(checkpoint: Path) -> None:
    """Complete a checkpoint: flush its files, and list them with their hashes. Raises CheckpointError if the disk refuses."""
    with saving(checkpoint):
        manifest.write(checkpoint, run_of(checkpoint.parent))


def read_own(link: Link, checkpoint: Path) -> Saved:
    """What this rank needs of a checkpoint: the state of its lane, without values if it has no engine. See `read`."""
    has_engine = not isinstance(link, SharedLink) or link.is_leader
    return read(checkpoint, link.lane, with_values=has_engine)


def read(checkpoint: Path, lane: int = 0, with_values: bool = True) -> Saved:
    """The engine's state and the facts of its run, from a checkpoint of which `damage` has found none. Raises CheckpointError if
    it holds no such state, or none of this lane. Without `with_values` all tensors are empty.
    """
    path = checkpoint / state_file(lane)
    if lane and not path.is_file():
        raise CheckpointError(
            f"{checkpoint} has no {state_file(lane)}: a region with fewer ranks wrote it. Launch the region with as many ranks "
            "as then."
        )
    with refusing(path):
        content = json.loads(path.read_text(encoding="utf-8"))
        # copies: a matrix product may give other bits if the file's layout leaves a tensor unaligned
        tensors: dict[str, Tensor] = defaultdict(lambda: torch.empty(0, device=HOST))
        if with_values:
            tensors = {
                name: each.clone() for name, each in load_file(checkpoint / tensors_file(lane)).items()
            }
        state = put_together(content["state"], tensors)
        names_in(state["layout"])
        weights = msgspec.convert(content.get("weights", {}), dict[str, str])
        return Saved(state, msgspec.convert(content, Facts), weights, checkpoint)


def mark_taken_over(checkpoint: Path) -> None:
    """Note in a copied checkpoint that it is another region's."""
    for path in (checkpoint / FOLDER).glob("state*.json"):
        content = json.loads(path.read_text(encoding="utf-8"))
        path.write_text(json.dumps({**content, "weights": {}, "taken_over": True}), encoding="utf-8")


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
