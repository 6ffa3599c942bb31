"""What a run will take: memory of the device and of the host, and disk space."""

import math
from dataclasses import dataclass
from typing import Any

import torch

from ...engine.footprint import memory as memory_of
from ...methods import Method
from ...parts.schedules import AgreedStats, Land, Send
from ...parts.tensors.flat import tensors_in
from ...parts.tensors.memory import HOST, Home
from ...resolve import from_config
from ...run.supported import rests_on_host
from ...settings.recipe import Recipe

_EVENTS = 400
_META = torch.device("meta")


@dataclass(frozen=True)
class Needs:
    """Bytes that a region of one rank takes, at least: a batch comes on top.

    Attributes:
        params: number of trained parameters.
        training: weights, gradients and, with Adam, the state of the inner optimizer.
        outer_on_device, outer_on_host: outer state and transfers, on the model's device and in host memory.
        checkpoint: one checkpoint on disk.
        checkpoints: how many there are at once; None if unknown.
    """

    params: int
    training: int
    outer_on_device: int
    outer_on_host: int
    checkpoint: int
    checkpoints: int | None


def needs(recipe: Recipe, model: Any, num_regions: int) -> Needs:
    """What the run of a recipe takes."""
    method = from_config(recipe.outer)
    fragments = method.fragments(model)
    trained = [param for param in model.parameters() if param.requires_grad]
    size, params = sum(param.nbytes for param in trained), sum(param.numel() for param in trained)
    has_gpu = torch.cuda.is_available() and not recipe.training.get("use_cpu")
    room = torch.cuda.get_device_properties(0).total_memory if has_gpu else None
    home = Home(_META, rests_on_host(recipe.outer, params, room)) if has_gpu else Home()
    memory = memory_of(fragments, method, num_regions, home)
    flying = most_in_flight(method, len(fragments))
    outer = {where: each.kept + each.per_transfer * flying + each.staged for where, each in memory.items()}
    weights = sum(param.nbytes for param in model.parameters())
    optim = str(recipe.training.get("optim", "adamw_torch"))
    has_adam = "adam" in optim or "muon" in optim  # Muon has half of it
    states = 1 + sum(each.dim() for each in tensors_in(method.outer.init(torch.zeros(1, device=HOST))))
    return Needs(
        params=params,
        training=weights + size * (3 if has_adam else 1),
        outer_on_device=outer.get(_META, 0),
        outer_on_host=outer.get(HOST, 0),
        # the local weights, the inner optimizer's state, the global params with the outer state, the global model
        checkpoint=size + (2 * size if has_adam else 0) + 4 * params * states + size,
        checkpoints=_checkpoints(recipe),
    )


def most_in_flight(method: Method, num_fragments: int) -> int:
    """Most transfers in flight at the same time, as long as the schedule has no measured times.

    >>> from hf_cocodc.settings import OuterConfig
    >>> most_in_flight(from_config(OuterConfig(method="streaming", overlap_steps=30)), 4)
    2
    """
    state, step, flying, most = method.schedule.init(num_fragments), 0, 0, 0
    for _ in range(_EVENTS):
        step = method.schedule.next_event(step, state)
        events, state = method.schedule.events(step, AgreedStats(), state)
        flying += sum(isinstance(event, Send) for event in events)
        most = max(most, flying)
        flying -= sum(isinstance(event, Land) and event.sent_at > 0 for event in events)
    return most


def _checkpoints(recipe: Recipe) -> int | None:
    """Checkpoints that a region keeps at once, including the one that it is writing."""
    training = recipe.training
    if training.get("save_strategy", "steps") == "no":
        return 0
    limit, steps = training.get("save_total_limit"), training.get("max_steps", -1)
    every = training.get("save_steps", 500)
    saves = None
    if training.get("save_strategy", "steps") == "steps" and steps > 0:
        if 0 < every < 1:  # a share of the run
            every = math.ceil(steps * every)
        saves = math.ceil(steps / every) if every > 0 else 1  # the last step is always saved
    if limit:
        return limit + 1 if saves is None else min(limit + 1, saves)
    return saves
