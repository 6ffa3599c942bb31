"""Real engines that train over the links of an elastic run, and what must hold whatever happens to a region."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hf_cocodc.engine.synchronizer import Synchronizer
from hf_cocodc.link.base import Arrival, Handle, MeanRequest
from hf_cocodc.link.part import Standing
from hf_cocodc.link.records import NOTHING_TO_SAY, Word, Words
from hf_cocodc.link.tcp import TcpLink
from hf_cocodc.methods import Method
from hf_cocodc.parts.codecs.base import Message
from hf_cocodc.resolve import from_config
from hf_cocodc.settings import OuterConfig
from tests.link.memory import Regions
from tests.toys import Blocks

STEPS = 7
METHODS: dict[str, dict[str, Any]] = {
    "diloco": {"sync_interval": 2},
    "streaming": {"sync_interval": 4, "num_fragments": 2, "overlap_steps": 1, "codec": "int8"},
    "eager": {"sync_interval": 2, "num_fragments": 1},
    "co2": {"sync_interval": 2, "outer_momentum": 0.3},
    "dilocox": {"sync_interval": 2, "rank": 1},
    "cocodc": {"sync_interval": 4, "num_fragments": 2, "overlap_steps": 1, "sends_per_interval": 2},
}
NEWER: dict[str, dict[str, Any]] = {
    "sparseloco": {"sync_interval": 2, "top_k": 4},
    "muloco": {"sync_interval": 2},
}
EXACT = ("diloco", "co2")
"""Methods that send outer gradients as they are, in one message."""


def method_of(name: str) -> Method:
    return from_config(OuterConfig(method=name, **(METHODS | NEWER)[name]))


@dataclass
class Sent:
    """A transfer as one region saw it."""

    outer_grad: Tensor
    handle: Handle
    takes_part: bool
    arrival: Arrival | None = None
    mean: Tensor | None = None

    def wait(self) -> Arrival:
        if self.arrival is None:
            self.arrival = self.handle.wait()
            self.mean = self.arrival.result.mean.clone()  # the engine uses this memory again
        return self.arrival


@dataclass
class Trained:
    """A region's training, step by step, and what it saw.

    Attributes:
        sent: its transfers, by name.
        digests: of the global params after each inner step.
        epochs: number of the epoch after each inner step.
    """

    link: TcpLink
    method: Method
    state: dict[str, Any] | None = None
    sent: dict[str, Sent] = field(default_factory=dict)
    digests: dict[int, int] = field(default_factory=dict)
    epochs: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        region = self.link.region
        self.model = Blocks([torch.full((6,), region + 1.0), torch.full((4, 3), 0.5)])
        mean = self.link.mean

        def seen(parcel: MeanRequest) -> Handle:
            message = next(parcel.converse())
            assert isinstance(message, Message)
            name = parcel.what if parcel.what not in self.sent else f"{parcel.what}, again"
            takes_part = self.link.standing is Standing.MEMBER
            self.sent[name] = Sent(message.values.clone(), mean(parcel), takes_part)
            return self.sent[name]

        self.link.mean = seen  # type: ignore[method-assign]
        self.sync = Synchronizer(self.model, self.method, self.link, digest_interval=1, state=self.state)

    def train(self, region: int, trains: bool = True, word: Word = NOTHING_TO_SAY) -> Words | None:
        """An inner step that depends on the region and the step, or none; then the outer one."""
        step = self.sync.inner_step + 1
        generator = torch.Generator().manual_seed(100 * region + step)
        with torch.no_grad():
            for param in self.model.parameters() if trains else ():
                param -= 0.1 * torch.randn(param.shape, generator=generator)
        words = self.sync.step(0.1, word, trained=trains)
        self.digests[step] = self.sync.global_digest()
        self.epochs.append(self.link.epoch.number)
        return words

    def finish(self) -> int:
        self.sync.finish()
        with torch.no_grad():
            return hash(tuple(torch.cat([p.flatten() for p in self.model.parameters()]).tolist()))


class Died(Exception):
    """The region's process has come to its end."""


def train_all(
    name: str, dies: dict[int, int], steps: int = STEPS
) -> tuple[dict[int, tuple[Trained, int]], dict[int, BaseException]]:
    """Three regions train; some die in an inner step. Returns those that have come to the end, and the errors of the others."""
    method = method_of(name)

    def body(region: int, link: TcpLink) -> tuple[Trained, int]:
        trained = Trained(link, method)
        for step in range(1, steps + 1):
            if step == dies.get(region):
                raise Died("its process has died")
            trained.train(region)
        return trained, trained.finish()

    found = Regions(3).run(body)
    errors = {region: each for region, each in found.items() if isinstance(each, BaseException)}
    return {region: each for region, each in found.items() if not isinstance(each, BaseException)}, errors


def check(name: str, found: dict[int, tuple[Trained, int]]) -> None:
    """What holds for those that come to the end, whatever happened."""
    assert found
    assert len({end for _, end in found.values()}) == 1, "regions end with different models"
    runs = {region: trained for region, (trained, _) in found.items()}
    longest = max(runs.values(), key=lambda trained: len(trained.digests))
    for trained in runs.values():
        if name != "eager":
            assert trained.digests.items() <= longest.digests.items(), "global params differ"
        assert trained.epochs == sorted(trained.epochs)
        own = {what for what, sent in trained.sent.items() if sent.takes_part}
        assert own <= longest.sent.keys()
    for what in longest.sent:
        sent = {region: trained.sent[what] for region, trained in runs.items() if what in trained.sent}
        arrivals = [each.arrival for each in sent.values() if each.arrival is not None]
        assert len(arrivals) in (0, len(sent)), f"{what} has landed in some regions only"
        assert len({arrival.members for arrival in arrivals}) <= 1
        assert len({str(arrival.trailers) for arrival in arrivals}) <= 1
        if arrivals:
            taking_part = arrivals[0].members
            senders = {region for region, each in sent.items() if each.takes_part}
            assert senders <= set(taking_part), f"{what} has lost a region's outer gradient"
            if name in EXACT and what.startswith("fragment") and set(taking_part) == senders:
                _check_mean([each for region, each in sorted(sent.items())])


def _check_mean(sent: list[Sent]) -> None:
    """It is the mean of the outer gradients of those that took part."""
    grads = [each.outer_grad.double() for each in sent if each.takes_part]
    for each in sent:
        assert each.mean is not None
        expected = torch.stack(grads).mean(0)
        torch.testing.assert_close(each.mean.double(), expected, rtol=1e-5, atol=1e-6)
