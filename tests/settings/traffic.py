"""What a recipe sends: its method's schedule, run on the exact lengths that its codec states. Nothing is trained for it."""

from __future__ import annotations

from typing import NamedTuple

from torch import nn

from hf_cocodc.methods import Method
from hf_cocodc.parts.schedules import AgreedStats, Land
from hf_cocodc.resolve import from_config, settings
from hf_cocodc.run.figures import data_parallel_bytes
from hf_cocodc.settings import OuterConfig

PEAK_SHARE = 0.4
"""Share of a GPU's peak that inner steps are assumed to reach."""


class Transfer(NamedTuple):
    """One landing: the inner steps of send and landing, and the payload bytes that the busiest region sent for it."""

    sent_at: int
    landed_at: int
    num_bytes: int


class Traffic(NamedTuple):
    """What the busiest region sends, payloads alone; it receives as much.

    Attributes:
        hourly_bytes: in an hour of training.
        times_less: how often that fits into what an fp32 all-reduce of the gradients in every inner step would send.
        largest_bytes: the longest single transfer.
        overlap_s: from its send to its landing; 0 where training waits for the link.
    """

    hourly_bytes: float
    times_less: float
    largest_bytes: int
    overlap_s: float


def landings(method: Method, model: nn.Module, num_regions: int, steps: int) -> list[Transfer]:
    """The transfers that land in the first `steps` inner steps, in order.

    Fragments are taken to change at equal rates, ranks to stay where they start, and times not to be measured.
    """
    fragments = method.fragments(model)
    sizes = [
        max(method.codec.wire_bytes(fragment, region, num_regions) for region in range(num_regions))
        for fragment in fragments
    ]
    stats = AgreedStats(change=(1.0,) * len(fragments))
    state = method.schedule.init(len(fragments))
    found = []
    for step in range(1, steps + 1):
        events, state = method.schedule.events(step, stats, state)
        landed = [event for event in events if isinstance(event, Land)]
        found += [Transfer(event.sent_at, step, sizes[event.fragment]) for event in landed]
    return found


def traffic(config: OuterConfig, model: nn.Module, num_regions: int, step_time_s: float) -> Traffic:
    """What training sends once it is under way, at `step_time_s` seconds an inner step."""
    interval = settings(config)["sync_interval"]
    assert isinstance(interval, int)
    begin, end = 10 * interval, 50 * interval
    steady = [t for t in landings(from_config(config), model, num_regions, end) if t.landed_at > begin]
    num_bytes = sum(transfer.num_bytes for transfer in steady)
    largest = max(steady, key=lambda transfer: transfer.num_bytes)
    params = sum(param.numel() for param in model.parameters() if param.requires_grad)
    return Traffic(
        hourly_bytes=num_bytes / (end - begin) / step_time_s * 3600,
        times_less=data_parallel_bytes(params, end - begin, num_regions) / num_bytes,
        largest_bytes=largest.num_bytes,
        overlap_s=(largest.landed_at - largest.sent_at) * step_time_s,
    )


def step_time_s(num_params: int, tokens: int, gpus: int, peak_tflops: float) -> float:
    """Seconds of an inner step: 6 floating-point operations a parameter and token, at PEAK_SHARE of the GPUs' peak."""
    return 6 * num_params * tokens / (gpus * peak_tflops * 1e12 * PEAK_SHARE)
