"""The forecast of one run: a recipe's model, a method and its settings, a link, and the times of a step and of this machine."""

import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...engine.footprint import memory as memory_of
from ...link.backends import expected
from ...link.base import drive
from ...link.exchange import num_frames
from ...methods import Method
from ...parts.blocks import find_blocks
from ...parts.codecs.base import Message, Reply, swaps_whole
from ...parts.fragments import Fragment
from ...parts.schedules import AgreedStats, Schedule, Send
from ...parts.tensors.memory import HOST, Home
from ...resolve import from_config, settings
from ...run.figures import data_parallel_bytes
from ...settings import OuterConfig
from ...settings.environment import ENV_SECRET
from ...settings.recipe import Recipe
from ...settings.regions import OF_GROUPS
from .course import WARM_UP, Cargo, Carried, Course, Rhythm, Work, course
from .speeds import Speeds
from .storages import StorageFigures, StorageLine, requests_an_hour
from .transfers import LATE, LIMIT, Codes, LinkFigures, TcpLine, wanted_connections

_SIDE, _LOW_RANK = 64, 4
STORAGE = "storage"
"""The carrier of payloads where regions meet in a storage."""


@dataclass(frozen=True)
class Forecast:
    """What to expect of a run.

    Attributes:
        shown: all settings of `config`, with the method's defaults.
        course: how the training goes.
        device_bytes, host_bytes: on the model's device and on the host, beyond the training itself.
    """

    config: OuterConfig
    shown: dict[str, Any]
    course: Course
    device_bytes: int
    host_bytes: int


class Subject:
    """What is planned: forecasts of a model on a link, with any method; an inner step takes `step_s` seconds.

    `network_rtt_s`: the link's round trip without what processes take; by default all of it.

    Attributes:
        carrier: what carries payloads: tcp, gloo, nccl or a storage; `why` says why.
        connections: TCP connections to each other region; a process group and a storage have one.
        limit: the most payload bytes per second that a region should send; a process group keeps no limit.
        steps: inner steps of the run; None if the recipe does not say.
    """

    def __init__(
        self,
        recipe: Recipe,
        model: Any,
        link: LinkFigures | StorageFigures,
        step_s: float,
        regions: int,
        speeds: Speeds,
        network_rtt_s: float | None = None,
    ) -> None:
        self.recipe, self.model, self.link = recipe, model, link
        self.step_s, self.regions, self.speeds = step_s, regions, speeds
        steps = recipe.training.get("max_steps", -1)
        self.steps = steps if steps > 0 else None
        self.num_params = sum(param.numel() for param in model.parameters() if param.requires_grad)
        self.num_blocks = max(len(find_blocks(model)), 1)
        self._fragments: dict[tuple, tuple[Fragment, ...]] = {}
        self._courses: dict[tuple[str, float], Course] = {}
        self._conversations: dict[str, tuple[int, bool]] = {}
        regions_config = recipe.regions
        has_secret = regions_config.secret_file is not None or ENV_SECRET in os.environ
        given, asked = regions_config.rate_limit, regions_config.connections
        if isinstance(link, StorageFigures):
            self.carrier, self.why = STORAGE, "regions.coordinator is a URL"
            self.limit, self.connections = min(given or math.inf, link.up / 1e6) * 1e6 / 8, 1
            return
        self.carrier, self.why = expected(
            regions_config, has_secret, link.rtt_s if network_rtt_s is None else network_rtt_s
        )
        wanted = LIMIT * link.rate / 8
        if self.is_group:
            self.limit, self.connections = link.goodput, 1
        else:
            self.limit = wanted if given is None else min(given * 1e6 / 8, wanted)
            self.connections = asked if isinstance(asked, int) else wanted_connections(link, self.limit)

    @property
    def is_group(self) -> bool:
        """Whether payloads travel in a process group, which follows neither regions.connections nor regions.rate_limit."""
        return self.carrier in OF_GROUPS

    def fragments(self, config: OuterConfig, method: Method) -> tuple[Fragment, ...]:
        """The fragments of the model."""
        shown = settings(config)
        key = tuple(shown.get(name) for name in ("fragment_pattern", "num_fragments", "split_rows"))
        if key not in self._fragments:
            self._fragments[key] = method.fragments(self.model)
        return self._fragments[key]

    def course(self, config: OuterConfig, late: float = LATE) -> Course:
        """How a training with these settings goes; `late`: see `course`. Raises InputError if the settings conflict."""
        key = repr(config), late  # a search asks for a course again and again
        if key not in self._courses:
            self._courses[key] = self._play(config, late)
        return self._courses[key]

    def _play(self, config: OuterConfig, late: float) -> Course:
        method, shown = from_config(config), settings(config)
        codec = str(shown["codec"])
        if codec not in self._conversations:
            self._conversations[codec] = _conversation(config, self.regions)
        messages, scatters = self._conversations[codec]
        works, codes = [], {}
        for fragment in self.fragments(config, method):
            num_bytes = max(method.codec.wire_bytes(fragment, r, self.regions) for r in range(self.regions))
            encodes, decodes = (1 + 1 / self.regions, 2.0) if scatters else (1.0, float(self.regions))
            payload = num_bytes / max(self.regions - 1, 1) / messages / (2 if scatters else 1)
            codes[num_bytes] = Codes(
                messages=messages,
                scatters=scatters,
                encode_s=encodes * self.speeds.encode.get(codec, 0.0) * fragment.numel,
                decode_s=decodes * self.speeds.decode.get(codec, 0.0) * fragment.numel,
                piece_bytes=math.ceil(payload / num_frames(int(payload), self.connections)),
            )
            land_s = self.speeds.landing(method) * fragment.numel
            works.append(Work([Cargo(num_bytes)], self.speeds.send * fragment.numel, land_s))
        line = self._line(codes)
        rhythm = self._rhythm(method.schedule, shown, works, line, late)
        return course(rhythm, works, line, self.step_s, late)

    def _line(self, codes: dict[int, Codes]) -> TcpLine | StorageLine:
        if isinstance(self.link, StorageFigures):
            return StorageLine(self.link, self.regions, self.limit, codes)
        return TcpLine(self.link, self.connections, self.regions - 1, self.limit, codes)

    def _rhythm(
        self,
        schedule: Schedule,
        shown: Mapping[str, Any],
        works: Sequence[Work],
        line: TcpLine | StorageLine,
        late: float,
    ) -> Rhythm:
        """When a method sends. One that follows the link does so by the time of a transfer once connections are warm."""
        interval, overlap = int(shown["sync_interval"]), shown.get("overlap_steps", 0)
        if "sends_per_interval" not in shown:
            state = schedule.init(len(works))
            first, _ = schedule.events(schedule.next_event(0, state), AgreedStats(), state)
            together = sum(isinstance(event, Send) for event in first) == len(works)
            late_steps = interval if schedule.back_to_back else overlap
            return Rhythm(interval, 1 if together else len(works), together, late_steps)
        spacing_s = interval * self.step_s / len(works)
        for number in range(WARM_UP * len(works)):
            took_s = late * line.carry(works[number % len(works)].parts[0], number * spacing_s).link_s
        line.rest()
        sends = shown["sends_per_interval"]
        if sends is None:
            sends = max(len(works), math.floor(shown["utilization"] * interval * self.step_s / took_s + 1e-9))
        steps = min(max(1, math.ceil(took_s / self.step_s)), interval - 1)
        overlap = overlap if isinstance(overlap, int) else steps
        # a fragment that flies is not sent
        sends = min(interval // max(interval // sends, 1), max(len(works) * interval // max(overlap, 1), 1))
        return Rhythm(interval, sends, together=False, overlap=overlap)

    def forecast(self, config: OuterConfig) -> Forecast:
        """The forecast of a run with these settings."""
        method, found = from_config(config), self.course(config)
        home = Home(torch.device("meta"), rests_on_host=config.device == "host")
        memory = memory_of(self.fragments(config, method), method, self.regions, home)
        taken = {
            where: each.kept + each.per_transfer * found.in_flight + each.staged
            for where, each in memory.items()
        }
        on_host = taken.pop(HOST)
        return Forecast(config, settings(config), found, sum(taken.values()), on_host)

    def requests(self, config: OuterConfig) -> list[Counter[str]]:
        """What a region asks the storage for in an hour, by kind; first one that only stands by, then the one that serves."""
        assert isinstance(self.link, StorageFigures)
        found = self.course(config)
        messages, scatters = self._conversations[str(settings(config)["codec"])]
        trips = messages * (2 if scatters else 1)
        return [requests_an_hour(self.link, self.regions, found, trips, serves) for serves in (False, True)]

    def data_parallel(self) -> Course:
        """Data-parallel training over the same link at its best: fp32 gradients in a ring during the backward pass."""
        # no codec, no restart of connections
        num_bytes = data_parallel_bytes(self.num_params, 1, self.regions) / self.num_blocks
        layers = layered([range(self.num_blocks)], self.num_blocks, round(num_bytes), self.step_s)
        rate = self.link.goodput
        if self.link.rtt_s:
            rate = min(rate, self.connections * self.link.window_of_loss / self.link.rtt_s)
        latency_s = (self.regions - 1) * self.link.rtt_s
        return course(Rhythm(1), layers, SerialLine(rate, latency_s), self.step_s)


def _conversation(config: OuterConfig, regions: int) -> tuple[int, bool]:
    """Messages of a transfer, and whether they scatter; the codec itself says so about a small matrix."""
    changes = {"rank": _LOW_RANK} if settings(config)["codec"] == "lowrank" else {}
    codec = from_config(OuterConfig(**{**vars(config), **changes})).codec
    fragment = Fragment(0, ("matrix",), ((_SIDE, _SIDE),), _SIDE * _SIDE)
    values = torch.randn(fragment.numel, generator=torch.Generator(HOST).manual_seed(0), device=HOST)
    messages: list[Message] = []

    def answer(message: Message) -> Reply:
        messages.append(message)
        return Reply(message.values.clone(), message.values.clone)

    drive(codec.converse(values, fragment, codec.init(fragment)), answer)
    return len(messages), not all(swaps_whole(message.coder, regions) for message in messages)


def codecs_of(configs: Sequence[OuterConfig]) -> list[str]:
    """The codecs of these settings, each once."""
    return list(dict.fromkeys(str(settings(config)["codec"]) for config in configs))


def layered(groups: Iterable[Iterable[int]], num_layers: int, layer_bytes: int, step_s: float) -> list[Work]:
    """Fragments of layers, from 0. A layer leaves when its gradient is known, and is needed when its forward pass begins."""
    node_s = step_s / (3 * num_layers - 1)

    def part(layer: int) -> Cargo:
        later_nodes = 2 * layer - 1 if layer else 0  # two of each layer before it, and one of the first
        return Cargo(layer_bytes, early_s=later_nodes * node_s, late_s=layer * node_s)

    return [Work([part(layer) for layer in sorted(group, reverse=True)]) for group in groups]


class SerialLine:
    """Carries one part after the other at `rate` bytes per second; the next one does not wait `latency_s` for its arrival."""

    def __init__(self, rate: float, latency_s: float = 0.0) -> None:
        self._rate, self._latency_s = rate, latency_s
        self._free_s = 0.0

    def carry(self, part: Cargo, sent_s: float) -> Carried:
        begin = max(self._free_s, sent_s)
        self._free_s = begin + part.num_bytes / self._rate
        return Carried(self._free_s + self._latency_s, self._free_s + self._latency_s - begin)
