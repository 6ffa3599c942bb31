"""The cost of training over a link: every method in regions of an emulated WAN, against regions without a link."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from hf_cocodc.errors import InputError, nearest, shown
from hf_cocodc.methods import METHODS
from hf_cocodc.parts.tensors.pieces import cores
from hf_cocodc.resolve import from_config
from hf_cocodc.settings import OuterConfig, RegionConfig
from hf_cocodc.settings.reading import shipped
from hf_cocodc.settings.recipe import Recipe
from hf_cocodc.tools.bench import link
from hf_cocodc.tools.bench.report import BenchReport
from hf_cocodc.tools.bench.workers import PORT, OtherRegions, coordinator_in_region_0, run, serve

from .emulation.wan import INTERFACE, Wan

MODEL = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
"""3.2 million parameters: 13 MB in fp32, or 0.1 s at 1 Gbit/s; an inner step on one core takes about as long."""

BATCH, LENGTH = 4, 64
HELD_OUT = 128  # blocks of LENGTH bytes
LEARNING_RATE, WARMUP_STEPS = 2e-3, 20
NO_LINK = "no link"
PACE_STEPS = 30
COVERS = 4.0
"""Streaming's overlap_steps cover this many times the shortest possible transfer; other methods need no such number."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The training and its link.

    Attributes:
        regions: number of regions; each is one process with one thread.
        rtt_s: seconds of a round trip.
        rate: bits per second of each pair of regions and direction.
        loss: probability that a packet gets lost.
        congestion: TCP congestion control; None takes the machine's.
        methods: names, in the order of the rows.
        steps: inner steps of each region with each method.
        sync_interval: H of every method.
        rate_limit: the most Mbit/s that a region sends (`regions.rate_limit`); None for no limit.

    Raises:
        InputError: a value is out of range or unknown.
    """

    regions: int = 2
    rtt_s: float = 0.1
    rate: float = 1e9
    loss: float = 0.0
    congestion: str | None = None
    methods: Sequence[str] = tuple(METHODS)
    steps: int = 240
    sync_interval: int = 20
    rate_limit: float | None = None

    def __post_init__(self) -> None:
        for name in self.methods:
            if name not in METHODS:
                raise InputError(f"--methods {shown(name)} is not known.{nearest(name, list(METHODS))}")
            num_fragments = settings_of(name).get("num_fragments", 1)
            if self.sync_interval < num_fragments:
                raise InputError(
                    f"--sync-interval {self.sync_interval} is too short for {name}, which sends {num_fragments} fragments in one "
                    f"interval. Set at least {num_fragments}, or leave {name} out of --methods."
                )
        if self.steps < self.sync_interval:
            raise InputError(
                f"--steps {self.steps} is less than one round of --sync-interval {self.sync_interval} inner steps. Raise --steps."
            )

    def outer(self, method: str) -> OuterConfig:
        """The configuration of a method."""
        return OuterConfig(method=method, sync_interval=self.sync_interval, **settings_of(method))

    def wan(self) -> Wan:
        """The emulated WAN, not up yet."""
        return Wan(self.regions, rtt_s=self.rtt_s, rate=self.rate, loss=self.loss, congestion=self.congestion)


_OF_THE_LINK = ("sync_interval", "overlap_steps", "sends_per_interval")


def settings_of(method: str) -> dict[str, Any]:
    """Settings of a method as in its quickstart, without those that follow from the link.

    The papers' outer learning rates and momenta suit thousands of rounds, these suit tens.
    """
    given = Recipe.load(shipped()[f"quickstart/{method}"]).outer.given()
    return {name: value for name, value in given.items() if name not in _OF_THE_LINK}


def measure(plan: Plan, progress: Callable[[str], object]) -> Iterator[BenchReport]:
    """Measure first the link alone, then training over it.

    Args:
        plan: the training and its link.
        progress: called with a line of text after each method.

    Raises:
        InputError: this machine cannot emulate a WAN.
        LinkError: a process failed.
    """
    with plan.wan() as wan:
        setting = {
            "rtt_ms": plan.rtt_s * 1e3,
            "rate_mbit": plan.rate / 1e6,
            "loss": plan.loss,
            "congestion": wan.congestion,
            "cores": cores(),
        }
        trial, rate = link.Trial(rate_limit=plan.rate_limit), plan.rate * (plan.regions - 1)
        yield link.report(trial, measure_across(trial, wan), setting, rate, plan.rtt_s)
        phases = [NO_LINK, *plan.methods]
        common = {
            "coordinator": f"{wan.address(0)}:{PORT}",
            "plan": {**vars(plan), "methods": list(plan.methods)},
            "phases": phases,
        }
        specs = [{**common, "region": region} for region in range(plan.regions)]
        found = []
        for figures in run(__name__, specs, wan.popen, num_threads=1):
            found.append(figures)
            share = figures["tokens_per_s"] / figures["ceiling"]
            progress(f"{len(found)} of {len(phases)}: {figures['phase']}, {share:.0%} of the ceiling")
    yield _report(plan, found, setting)


def measure_across(trial: link.Trial, wan: Wan) -> link.Figures:
    """Measure between the regions of an emulated WAN.

    Raises:
        LinkError: a process failed.
    """
    spec = {"coordinator": f"{wan.address(0)}:{PORT}", "interface": INTERFACE, "alone": True}
    return link.measure_between(trial, wan.regions, wan.popen, spec)


def _report(plan: Plan, found: Sequence[dict[str, Any]], setting: dict[str, Any]) -> BenchReport:
    rows = [
        {
            "method": figures["phase"],
            "tokens/s": figures["tokens_per_s"],
            "ceiling": figures["ceiling"],
            "of ceiling": figures["tokens_per_s"] / figures["ceiling"],
            "seconds": figures["seconds"],
            "blocked s": figures["blocked_s"],
            "MB sent": figures["bytes_sent"] / 1e6,
            "held-out loss": figures["loss"],
        }
        for figures in found
    ]
    tokens = plan.steps * BATCH * LENGTH
    notes = [
        f"tokens/s: of all {plan.regions} regions, including the last round. Each region is one process with one thread. All "
        f"share {setting['cores']} core(s) with the emulation of the link.",
        "ceiling: tokens/s of the same regions side by side, without a link or an outer optimizer, measured over "
        f"{PACE_STEPS} steps before and {PACE_STEPS} after each row. {NO_LINK!r} should reach 100%; a difference shows other "
        "load on the machine.",
        f"held-out loss: nats per byte, of the global weights after {plan.regions * tokens} tokens. The loss of {NO_LINK!r} is "
        f"of region 0's weights after its own {tokens} tokens.",
        "seconds and blocked s: of the slowest region. MB sent: payload that region 0 sent while it trained.",
        *(
            f"{figures['phase']}: overlap_steps={figures['overlap_steps']} covers {COVERS:g} times the shortest transfer that "
            "the link allows."
            for figures in found
            if figures["overlap_steps"] is not None
        ),
    ]
    setting = {
        "regions": plan.regions,
        **setting,
        "parameters": found[0]["parameters"],
        "rate_limit": plan.rate_limit,
        "sync_interval": plan.sync_interval,
        "steps": plan.steps,
        "tokens a step": BATCH * LENGTH,
    }
    formats = {"of ceiling": ".0%", "held-out loss": ".3f"}
    return BenchReport("training over a link", setting, rows, notes, formats)


def _region(spec: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One region: train in each phase and yield its figures."""
    plan = Plan(**spec["plan"])
    with coordinator_in_region_0(spec["coordinator"], spec["region"], plan.regions) as company:
        region = _Region(plan, company, spec["coordinator"])
        before = region.pace()
        for phase in spec["phases"]:
            figures = region.train(phase)
            after = region.pace()
            yield {**figures, "ceiling": (before + after) / 2}
            before = after


class _Region:
    """A region that trains one model after another, each from the same weights on the same text."""

    def __init__(self, plan: Plan, company: OtherRegions, coordinator: str) -> None:
        from accelerate import Accelerator

        self._plan, self._company, self._address = plan, company, coordinator
        self._region = company.region
        self._accelerator = Accelerator(cpu=True)
        self._text = _bytes_of("train", company.region, plan.regions)
        self._held_out = _bytes_of("test", 0, 1)[: HELD_OUT * LENGTH].view(-1, LENGTH)
        self._step_s = 0.0

    def pace(self) -> float:
        """Tokens per second of all regions without a link, under the machine's present load: the ceiling."""
        self._step_s = (
            max(self._company.exchange(self._run(*self._model(), PACE_STEPS, lambda: None))) / PACE_STEPS
        )
        return self._plan.regions * BATCH * LENGTH / self._step_s

    def train(self, phase: str) -> dict[str, Any]:
        """Train with a method, or without a link; return the figures of all regions together."""
        from hf_cocodc.run.outer_optimizer import OuterOptimizer

        plan = self._plan
        model, optimizer, scheduler = self._model()
        overlap_steps = None
        if phase == NO_LINK:
            mine = {"seconds": self._run(model, optimizer, scheduler, plan.steps, lambda: None)}
            mine |= {"blocked_s": 0.0, "bytes_sent": 0}
        else:
            config = plan.outer(phase)
            if phase == "streaming":
                overlap_steps = self._covering(config, model)
                config = replace(config, overlap_steps=overlap_steps)
            regions = RegionConfig(
                region=self._region,
                count=plan.regions,
                coordinator=self._address,
                interface=INTERFACE,
                rate_limit=plan.rate_limit,
                congestion="system",  # that of the emulated link
            )
            outer = OuterOptimizer(self._accelerator, model, optimizer, config, regions, max_steps=plan.steps)
            at_start = outer.synchronizer.totals.bytes_sent
            seconds = self._run(model, optimizer, scheduler, plan.steps, outer.step, outer.finish)
            totals = outer.synchronizer.totals
            sent = totals.bytes_sent - at_start
            mine = {"seconds": seconds, "blocked_s": totals.blocked_s, "bytes_sent": sent}
        everyone = self._company.exchange(mine)
        seconds = max(each["seconds"] for each in everyone)
        return {
            "phase": phase,
            "tokens_per_s": plan.regions * plan.steps * BATCH * LENGTH / seconds,
            "seconds": seconds,
            "blocked_s": max(each["blocked_s"] for each in everyone),
            "bytes_sent": everyone[0]["bytes_sent"],
            "loss": self._loss(model) if self._region == 0 else None,
            "overlap_steps": overlap_steps,
            "parameters": model.num_parameters(),
        }

    def _model(self) -> tuple[Any, Any, Any]:
        from transformers import AutoConfig, AutoModelForCausalLM, get_cosine_schedule_with_warmup, set_seed

        set_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**MODEL))
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1
        )
        scheduler = get_cosine_schedule_with_warmup(optimizer, WARMUP_STEPS, self._plan.steps)
        return *self._accelerator.prepare(model, optimizer), scheduler

    def _run(
        self,
        model: Any,
        optimizer: Any,
        scheduler: Any,
        steps: int,
        after_step: Callable[[], None],
        at_end: Callable[[], None] = lambda: None,
    ) -> float:
        """Make inner steps; all regions start at the same moment. Return the seconds."""
        self._company.exchange(None)
        start = time.perf_counter()
        for batch in self._batches(steps):
            self._accelerator.backward(model(input_ids=batch, labels=batch).loss)
            optimizer.step()
            optimizer.zero_grad()
            after_step()
            scheduler.step()
        at_end()
        return time.perf_counter() - start

    def _covering(self, config: OuterConfig, model: Any) -> int:
        """Inner steps that cover a transfer of the largest fragment; equal in all regions, because all know all figures."""
        plan, method = self._plan, from_config(config)
        sent = max(method.codec.wire_bytes(each, 0, plan.regions) for each in method.fragments(model))
        seconds = COVERS * (sent * 8 / (plan.regions - 1) / plan.rate + plan.rtt_s)
        return min(max(math.ceil(seconds / self._step_s), 1), plan.sync_interval - 1)

    def _batches(self, steps: int) -> Iterator[torch.Tensor]:
        """(BATCH, LENGTH) bytes at random places of this region's text, the same in every phase."""
        places = torch.Generator().manual_seed(self._region)
        for _ in range(steps):
            starts = torch.randint(self._text.numel() - LENGTH, (BATCH,), generator=places).tolist()
            yield torch.stack([self._text[start : start + LENGTH] for start in starts]).long()

    @torch.no_grad()
    def _loss(self, model: Any) -> float:
        model.eval()
        blocks = self._held_out.long().split(32)
        return torch.stack([model(input_ids=each, labels=each).loss for each in blocks]).mean().item()


def _bytes_of(split: str, region: int, regions: int) -> torch.Tensor:
    """A region's part of the Python standard library's source, as a flat tensor of bytes."""
    from hf_cocodc.run.shards import region_shard
    from hf_cocodc.training.data import python_stdlib

    documents = region_shard(python_stdlib(split).shuffle(seed=0), region, regions)
    return torch.frombuffer(bytearray("\0".join(documents["text"]).encode()), dtype=torch.uint8)


if __name__ == "__main__":
    serve(_region)
