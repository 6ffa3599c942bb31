"""The outer optimizer of a plain Accelerate loop; the Trainer callback stands on it too."""

import contextlib
import logging
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn

from ..config import OuterConfig, RegionConfig
from ..errors import InputError
from ..handshake import compare, hello
from ..journal import Journal
from ..links.base import Link
from ..links.gloo import GlooLink
from ..links.loopback import loopback
from ..methods import Method, from_config, settings
from ..regions import SharedLink, connect_store, own_address, rendezvous
from ..synchronizer import Synchronizer

logger = logging.getLogger(__name__)


class OuterOptimizer:
    """Trains one model across regions from an ordinary Accelerate loop.

    ::

        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        with OuterOptimizer(accelerator, model, optimizer, OuterConfig(sync_interval=100)) as outer:
            for batch in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(model(**batch).loss)
                    optimizer.step()
                    optimizer.zero_grad()
                    outer.step()
        # left without an exception, finish() has been called: the model holds the global weights

    Args:
        accelerator: of this region; its processes are the region's ranks.
        model: as `accelerator.prepare` returned it.
        optimizer: the inner optimizer, as `accelerator.prepare` returned it; read for its learning rate.
        config: method and its settings.
        regions: which region this is; by default the environment says so.
        max_steps: inner steps of the run where known; regions must agree on it.
        journal: file for one JSON line an event; none by default.
        link: reaches the other regions; by default one is made from `regions`.

    Constructing it is a collective call: it waits for all regions, compares their settings, and starts them from region
    0's parameters.

    Raises:
        InputError: settings that cannot work.
        HandshakeError: regions disagree.
        LinkError: the store or a region cannot be reached in time.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        optimizer: Any,
        config: OuterConfig,
        regions: RegionConfig | None = None,
        *,
        max_steps: int | None = None,
        journal: str | Path | None = None,
        link: Link | None = None,
    ) -> None:
        method = from_config(config)
        _refuse_unsupported(accelerator)
        self._accelerator = accelerator
        self._finished = False
        self._inner_lr = 0.0
        bare = accelerator.unwrap_model(model, keep_torch_compile=False)
        if link is None:
            regions = (regions or RegionConfig()).resolved()
            link = _join(accelerator, bare, method, config, regions, max_steps)
        self.link = link
        main = accelerator.is_main_process
        record = Journal(Path(journal) if journal is not None and main else None)
        self.synchronizer = Synchronizer(
            bare, method, link, journal=record, digest_interval=config.digest_interval
        )
        self.journal = record
        record.write(
            "start",
            step=0,
            region=link.region,
            num_regions=link.num_regions,
            num_params=self.synchronizer.num_params,
            num_fragments=len(self.synchronizer.fragments),
            max_steps=max_steps,
            outer=settings(config),
        )
        self._hook = getattr(optimizer, "optimizer", optimizer).register_step_post_hook(self._note_lr)

    @property
    def inner_step(self) -> int:
        """Inner steps made so far."""
        return self.synchronizer.inner_step

    @property
    def report(self) -> dict[str, float]:
        """What the last landing told: rounds, staleness, seconds blocked, bytes sent, mean loss of the regions."""
        return self.synchronizer.report

    def step(self, loss: float | None = None) -> None:
        """Call after every `optimizer.step()`; does nothing on micro-batches that only accumulate.

        A step that a gradient scaler skipped counts, as in Trainer's `global_step`: scalers of different regions skip
        at different times, and regions that counted differently would wait for each other for ever.

        Args:
            loss: this region's training loss, if you want the mean over regions in `report`.
        """
        if self._finished:
            raise InputError(
                "step() after finish(): the run has ended. Make a new OuterOptimizer to train on."
            )
        if not self._accelerator.sync_gradients:
            return
        if loss is not None:
            self.synchronizer.loss = float(loss)
        self.synchronizer.step(self._inner_lr)

    def finish(self) -> None:
        """End the run: the model holds the global weights afterwards. A collective call; calling it again does nothing."""
        if self._finished:
            return
        self.synchronizer.finish()
        self._finished = True
        self.close()

    def close(self, reason: str | None = None) -> None:
        """Leave the other regions without finishing; `reason` is what they are told."""
        self._hook.remove()
        self.link.close(reason)

    def global_weights(self) -> contextlib.AbstractContextManager[None]:
        """The model holds the global weights inside the block, for evaluation or export."""
        if self._finished:
            return contextlib.nullcontext()
        return self.synchronizer.global_weights()

    def __enter__(self) -> "OuterOptimizer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.finish()
        else:  # never communicate while an exception passes: the others may not come
            self.close(f"{kind.__name__} at step {self.inner_step}: {error}")

    def _note_lr(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._inner_lr = float(optimizer.param_groups[0]["lr"])


def _refuse_unsupported(accelerator: Accelerator) -> None:
    kind = accelerator.distributed_type
    supported = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
    if kind not in supported:
        raise InputError(
            f"distributed type {kind.value} inside a region is not supported yet: only one process or DDP is. Launch the region "
            "without FSDP, DeepSpeed or Megatron."
        )


def _join(
    accelerator: Accelerator,
    model: nn.Module,
    method: Method,
    config: OuterConfig,
    regions: RegionConfig,
    max_steps: int | None,
) -> Link:
    """Meet the other regions and connect; only the region's leader talks."""
    region, count = regions.region, regions.count
    assert region is not None and count is not None
    if count == 1:
        logger.info(
            "training as a single region: nothing crosses a link (HF_COCODC_REGIONS is not set, or 1)."
        )
        return loopback()
    link: Link | None = None
    if accelerator.is_main_process:
        assert regions.store is not None
        store = connect_store(regions.store, regions.timeout_s)
        shared = {"connections": regions.connections, "timeout_s": regions.timeout_s}
        mine = hello(model, {**settings(config), **shared}, max_steps, num_lanes=1)
        address = own_address(regions.store, regions.interface)
        roster = rendezvous(store, region, count, mine, regions.timeout_s)
        compare(roster.hellos)
        logger.info("all %d regions are here: %s", count, ", ".join(str(h["host"]) for h in roster.hellos))
        link = GlooLink(store, roster.run, region, count, regions.connections, address, regions.timeout_s)
    if accelerator.num_processes == 1:
        assert link is not None
        return link
    return SharedLink(link, region, count, accelerator.device)
