"""The training loop of a region, for what its run asks of it: a plain Accelerate loop here, Trainer's in `trainer/beginning`."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import DistributedType, load_fsdp_optimizer, save_fsdp_optimizer

from ..snapshot.donor import Inner

logger = logging.getLogger(__name__)


class Loop(Protocol):
    """What makes the inner steps of a rank.

    Attributes:
        started: what the regions have agreed on before step 1, for newcomers (JSON-able); None in a `PlainLoop`, whose regions
            have yet to agree.
        keeps_link: whether the link stays open after the end of the run, until `OuterOptimizer.close`.
    """

    @property
    def started(self) -> dict[str, Any] | None: ...

    @property
    def keeps_link(self) -> bool: ...

    def inner(self) -> Inner:
        """The rest of the training, for newcomers."""
        ...

    def jump(self, before: int, after: int, is_new: bool) -> None:
        """Go along to inner step `after`: the steps since `before` were made without training. `is_new`: the loop has yet to
        begin; else it is inside `outer.step()`.
        """
        ...

    def take_over(self, base: Path) -> None:
        """Go on from another region's base, in the same process."""
        ...

    def stand_in(self) -> None:
        """After an inner step whose rest the loop leaves out, because this region trains no more or not yet: do what else the
        others need of it then.
        """
        ...


class PlainLoop:
    """A loop of a user's own, as far as its accelerator shows it."""

    started = None
    keeps_link = False

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator

    def inner(self) -> Inner:
        states = {}
        for name, parts in self._prepared().items():
            for index, part in enumerate(parts):
                if not self._is_sharded(name):
                    states[_file(name, index)] = part.state_dict()
        return Inner(states, self._save_shards)

    def load_inner(self, base: Path) -> None:
        """Continue from a base, which lacks objects registered for checkpointing: they travel only as pickles."""
        self._load_shards(base)
        for name, parts in self._prepared().items():
            for index, part in enumerate(parts):
                if self._is_sharded(name):
                    continue
                path = base / _file(name, index)
                if path.is_file():
                    part.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
                else:
                    logger.warning(
                        "the base of the other region has no %s: this region begins with a fresh one.",
                        path.name,
                    )
        if self._accelerator._custom_objects:
            logger.warning(
                "objects that were registered for checkpointing do not come from another region: they begin as they are."
            )

    def jump(self, before: int, after: int, is_new: bool) -> None:
        """Step the learning rate schedules.

        Only those that are stepped once for each inner step: by their own count, they are at `before`, or one step behind if the
        loop steps them after `outer.step()`.
        """
        for schedule in self._accelerator._schedulers:
            plain, often = self._plain(schedule)
            count = int(getattr(plain, "last_epoch", -1))
            if count not in (often * before, often * (before - 1)):
                logger.warning(
                    "%s is at %d after %d inner steps: it is not stepped once for each, and stays as it is.",
                    *(type(plain).__name__, count, before),
                )
                continue
            for _ in range(often * after - count if is_new else often * (after - before)):
                plain.step()

    def take_over(self, base: Path) -> None:
        """Nothing of a plain loop is in a base beside what is trained."""

    def stand_in(self) -> None:
        """A plain loop does nothing together with other regions."""

    def _is_sharded(self, name: str) -> bool:
        """Whether these states are shards in each rank (FSDP2), which all ranks save and load together."""
        return name == "optimizer" and self._accelerator.distributed_type is DistributedType.FSDP

    def _save_shards(self, folder: Path) -> None:
        save_shards(self._accelerator, self._accelerator._optimizers, self._accelerator._models, folder)

    def _load_shards(self, base: Path) -> None:
        if self._is_sharded("optimizer"):
            plugin = self._accelerator.state.fsdp_plugin
            pairs = zip(self._accelerator._optimizers, self._accelerator._models, strict=False)
            for index, (optimizer, model) in enumerate(pairs):
                load_fsdp_optimizer(plugin, self._accelerator, optimizer, model, str(base), index)

    def _plain(self, schedule: Any) -> tuple[Any, int]:
        """A schedule without Accelerate's wrapper, and how often that steps it each time."""
        if not isinstance(schedule, AcceleratedScheduler):
            return schedule, 1
        once = schedule.split_batches or not schedule.step_with_optimizer
        return schedule.scheduler, 1 if once else self._accelerator.num_processes

    def _prepared(self) -> dict[str, Sequence[Any]]:
        scaler = self._accelerator.scaler
        return {
            "optimizer": self._accelerator._optimizers,
            "scheduler": self._accelerator._schedulers,
            "scaler": [] if scaler is None else [scaler],
        }


def save_shards(
    accelerator: Accelerator, optimizers: Sequence[Any], models: Sequence[Any], folder: Path
) -> None:
    """Save inner optimizers of sharded models as Accelerate does in a checkpoint. A collective call of the ranks; without
    shards it does nothing.
    """
    if accelerator.distributed_type is DistributedType.FSDP:
        for index, (optimizer, model) in enumerate(zip(optimizers, models, strict=False)):
            save_fsdp_optimizer(
                accelerator.state.fsdp_plugin, accelerator, optimizer, model, str(folder), index
            )


def _file(name: str, index: int) -> str:
    return f"{name}_{index}.pt" if index else f"{name}.pt"
