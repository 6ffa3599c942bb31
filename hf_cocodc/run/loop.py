"""The training loop of a region, for what its run asks of it: a plain Accelerate loop here, Trainer's in `trainer/beginning`."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import DistributedType, load_fsdp_optimizer, save_fsdp_optimizer
from torch import nn

from ..engine.balance import Batch
from ..errors import InputError
from ..parts.deal import OWN
from ..snapshot.donor import Inner
from .feed import ORDER_SEED, DealtBatches, DealtSamples, Now, is_shuffled
from .shards import facts_of_shards, note_order

logger = logging.getLogger(__name__)


class Loop:
    """What makes the inner steps of a rank.

    Attributes:
        started: what the regions have agreed on before step 1, for newcomers (JSON-able); None in a `PlainLoop`, whose regions
            have yet to agree.
        keeps_link: whether the link stays open after the end of the run, until `OuterOptimizer.close`.
    """

    started: dict[str, Any] | None = None
    keeps_link = False

    @property
    def batch(self) -> Batch:
        """Of this region, by its own settings."""
        raise NotImplementedError

    def deal(self, micro_batches: int) -> None:
        """From the next inner step on, this region has so many micro-batches in each (`regions.balance`)."""
        raise NotImplementedError

    def refuse_undealt(self, rule: str | None, micro_batches: int) -> None:
        """Raise InputError if this loop does not train what it was dealt by this `rule` (`RegionConfig.rule_of_batch`): so many
        micro-batches in this inner step. Called with each micro-batch.
        """

    def inner(self) -> Inner:
        """The rest of the training, for newcomers."""
        raise NotImplementedError

    def jump(self, before: int, after: int, is_new: bool) -> None:
        """Go along to inner step `after`: the steps since `before` were made without training. `is_new`: the loop has yet to
        begin; else it is inside `outer.step()`.
        """
        raise NotImplementedError

    def take_over(self, base: Path) -> None:
        """Go on from another region's base, in the same process, with what is in it beside what is trained."""

    def save_model(self, folder: Path, model: nn.Module) -> None:
        """Save an unwrapped model, which holds the global weights, so that `from_pretrained` loads it. A collective call of the
        region's ranks. Raises InputError if it cannot be saved.
        """
        raise NotImplementedError

    def stand_in(self) -> None:
        """After an inner step whose rest the loop leaves out, because this region trains no more or not yet: do what else the
        others need of it then.
        """


class PlainLoop(Loop):
    """A loop of a user's own, as far as its accelerator shows it.

    `is_dealt`: samples are dealt to it (`regions.shards`), and its first dataloader has all of the data. Raises InputError if it
    has not.
    """

    def __init__(self, accelerator: Accelerator, is_dealt: bool = False) -> None:
        self._accelerator, self._is_dealt = accelerator, is_dealt
        self._batches: DealtBatches | None = None
        self.facts: dict[str, Any] = {}
        """What regions compare of the data."""
        if is_dealt:
            if self._loader is None:
                raise InputError(
                    "regions.shards=dealt deals samples by their numbers: give a dataloader with all of the data (map-style) to "
                    "accelerator.prepare before the OuterOptimizer is made, and read from outer.batches(loader)."
                )
            shuffles = is_shuffled(self._loader)
            note_order(self._loader.dataset)
            self.facts = {"data.shuffle": shuffles, **facts_of_shards()}

    @property
    def _loader(self) -> Any:
        """The first dataloader that is prepared; None without one."""
        loaders = self._accelerator._dataloaders
        return loaders[0] if loaders else None

    def batches(self, loader: Any, now: Now) -> DealtBatches:
        """The micro-batches of this region, without an end. Raises InputError if they cannot be read from this loader."""
        if loader is not self._loader:
            raise InputError(
                "outer.batches(loader): regions count the samples of the first dataloader that accelerator.prepare has returned, "
                "and this is another one. Prepare it before the OuterOptimizer is made, and before any other dataloader."
            )
        seed = ORDER_SEED if is_shuffled(loader) else None
        samples = DealtSamples(len(loader.dataset), 1, seed, now, is_own=not self._is_dealt)
        loader.set_sampler(samples)
        self._batches = DealtBatches(loader, now)
        return self._batches

    @property
    def batch(self) -> Batch:
        """By the first dataloader that is prepared; without one, micro-batches count as samples."""
        unit = getattr(self._loader, "total_batch_size", None)
        unit = unit if isinstance(unit, int) and unit > 0 else self._accelerator.num_processes
        return Batch(unit * self._accelerator.gradient_accumulation_steps, unit)

    def deal(self, micro_batches: int) -> None:
        self._accelerator.gradient_accumulation_steps = micro_batches
        self._accelerator.step = 0  # accumulate() counts from here

    def refuse_undealt(self, rule: str | None, micro_batches: int) -> None:
        accelerator = self._accelerator
        if self._batches is None and self._is_dealt:
            raise InputError(
                "regions.shards=dealt deals samples, and this loop reads others: let it read from outer.batches(loader) instead "
                "of from loader."
            )
        if self._batches is not None and accelerator.sync_gradients and self._batches.given != micro_batches:
            raise InputError(
                f"this inner step has {micro_batches} micro-batches, and the loop has read {self._batches.given} from "
                "outer.batches. Read one for each `with accelerator.accumulate(model):`, optimizer.step() and outer.step() "
                "included."
            )
        if rule in (None, OWN):
            return
        if not accelerator.step and not accelerator.gradient_state.end_of_dataloader:
            raise InputError(
                "regions.balance=auto changes the number of micro-batches of an inner step, and this loop does not count them. "
                "Put `with accelerator.accumulate(model):` around the work on each micro-batch, optimizer.step() and "
                "outer.step() included; or remove regions.balance."
            )

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

    def save_model(self, folder: Path, model: nn.Module) -> None:
        save_pretrained = getattr(model, "save_pretrained", None)
        if save_pretrained is None:
            raise InputError(
                f"{type(model).__name__} has no save_pretrained. Take the weights from a checkpoint (accelerator.save_state)."
            )
        weights = self._accelerator.get_state_dict(model)  # shards come from all ranks
        if self._accelerator.is_main_process:
            save_pretrained(folder, state_dict=weights)

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
