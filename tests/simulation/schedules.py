"""Random plans, how to run one, and the smallest one that still fails."""

import random
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from .world import Fault, Plan, World

_OFTEN = "kill", "restart", "freeze", "cut", "leave", "join", "kill_coordinator"
_SELDOM = "freeze_coordinator", "second_coordinator", "twins", "crash", "flap", "stop"
_KINDS = (*(kind for kind in _OFTEN for _ in range(2)), *_SELDOM)


class Outcome(NamedTuple):
    """What came of a plan. `failure`: what went wrong, in words; None if nothing did."""

    failure: str | None
    num_events: int
    num_calls: int
    seconds: float


def run(plan: Plan, say: Callable[[str], None] | None = None) -> Outcome:
    """Let a plan happen."""
    began = time.perf_counter()
    world = World(plan, say)
    failure = None
    try:
        world.run()
    except AssertionError as error:
        failure = f"{type(error).__name__}: {error}"
        if say is not None:
            say(traceback.format_exc())
    except Exception:
        failure = traceback.format_exc()
    return Outcome(failure, world.network.num_events, world.checks.num_completed, time.perf_counter() - began)


def random_plan(seed: int) -> Plan:
    """A plan of up to six members and up to six faults."""
    draw = random.Random(seed)
    regions = draw.choice((2, 2, 3, 3, 3, 4, 5))
    interval = draw.choice((2, 3, 4))
    fragments = draw.choice((1, 1, 2))
    steps = draw.choice((6, 9, 12))
    step_s = draw.choice((0.4, 1.0))
    is_long = draw.random() < 0.1
    if is_long:  # newcomers have time to come in after the last fault
        steps, step_s = 60, 2.5
    faults: list[Fault] = []
    length_s = 25.0 if is_long else 1.2 * steps * step_s + 1.0
    # faults that come close to each other, or to the end, find more
    first_s, last_s = draw.choice(
        ((0.0, length_s), (0.0, length_s), (0.4 * length_s, 0.6 * length_s), (0.8 * length_s, length_s))
    )
    for _ in range(draw.choice((1, 1, 2, 2, 3, 4, 6))):
        faults += random_fault(draw, regions, first_s, last_s)
    return Plan(
        seed=seed,
        regions=regions,
        elastic=draw.random() < 0.9,
        steps=steps,
        interval=interval,
        fragments=fragments,
        overlap=draw.randrange(interval + 1),
        step_s=step_s,
        grace_s=draw.choice((None, None, None, 3.0)),
        grace_is_auto=seed % 2 == 1,
        faults=tuple(sorted(faults)),
    )


def random_fault(draw: random.Random, regions: int, first_s: float, last_s: float) -> list[Fault]:
    """A fault, or several that belong together."""
    at = round(draw.uniform(first_s, last_s), 2)
    region, other = draw.sample(range(-1, regions), 2)
    if region < 0:
        region, other = other, region
    seconds = round(draw.choice((0.5, 2.0, 4.0, 9.0, 14.0)) * (0.5 + draw.random()), 2)
    way = draw.randrange(3)
    kind = draw.choice(_KINDS)
    match kind:
        case "restart":
            return [Fault(at, "kill", region), Fault(round(at + seconds, 2), "start", region, way=way % 2)]
        case "flap":
            times = [round(at + 3.0 * number, 2) for number in range(3)]
            return [Fault(each, kind, region, way=1) for each in times for kind in ("kill", "start")]
        case "join":
            new = 5 if draw.random() < 0.7 else 4
            return [Fault(at, "start", new, way=1)]
        case "kill" | "leave" | "stop":
            return [Fault(at, kind, region)]
        case "crash":
            return [Fault(at, kind, seconds=seconds)]
        case "kill_coordinator":  # most keep their file
            return [Fault(at, kind, seconds=seconds, way=draw.choice((0, 0, 0, 0, 1, 2)))]
        case _:
            return [Fault(at, kind, region, other, seconds, way)]


def shrink(plan: Plan, fails: Callable[[Plan], bool] = lambda plan: run(plan).failure is not None) -> Plan:
    """The plan without all that is not needed for it to fail."""
    changed = True
    while changed:
        changed = False
        for number in range(len(plan.faults)):
            smaller = replace(plan, faults=plan.faults[:number] + plan.faults[number + 1 :])
            if fails(smaller):
                plan, changed = smaller, True
                break
        simpler = (
            {"grace_s": None},
            {"fragments": 1},
            {"overlap": 1},
            *({"regions": number} for number in range(2, plan.regions)),
            *({"steps": number} for number in (3, 6, 9) if number < plan.steps),
        )
        for news in simpler:
            smaller = replace(plan, **news)  # type: ignore[arg-type]
            needed = max(
                (max(each.region, each.other) for each in plan.faults if each.kind != "start"), default=0
            )
            if smaller != plan and smaller.regions > needed and fails(smaller):
                plan, changed = smaller, True
    return plan


def shown(plan: Plan) -> str:
    """A plan as one can read and paste it."""
    rest = ", ".join(
        f"{name}={value!r}"
        for name, value in vars(plan).items()
        if name != "faults" and value != getattr(Plan(seed=0), name)
    )
    faults = "".join(f"\n    {fault!r}," for fault in plan.faults)
    return f"Plan({rest}, faults=({faults}\n))"
