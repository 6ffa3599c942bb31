"""When each method sends its fragments and lands them: played by the package's own schedules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from canvas import BLUE, CELL, INK, MUTED, ORANGE, RULE, TEAL, WIDTH, Canvas

if TYPE_CHECKING:
    from hf_cocodc.methods import Method

FRAGMENTS = (BLUE, ORANGE, TEAL)

WHOLE_STEPS, LATENCY_STEPS = 2.4, 0.4
"""The link of the timelines: inner steps for the whole model in fp32, and for the latency."""
SIDE = 1024
RANKS = (64, 64, 64, 64, 64, 64, 48, 45, 38)
"""DiLoCoX: the rank of each transfer, the last one from then on. It cannot fall before five have landed."""
CHANGES = (1.0, 3.0, 2.0)
"""CoCoDC: how fast each fragment changes."""


@dataclass(frozen=True)
class Timeline:
    """What a timeline shows.

    Attributes:
        title: the method as its paper writes it.
        about: what happens, in a sentence.
        alt: what the picture shows.
        given: settings of the method.
        first, last: inner steps at the edges.
        notes: words at transfers, by fragment and number of the transfer.
        is_even: whether each round has `sync_interval` inner steps.
    """

    title: str
    about: str
    alt: str
    given: dict[str, Any]
    first: int = 0
    last: int = 40
    notes: dict[tuple[int, int], str] = field(default_factory=dict)
    is_even: bool = True


ONE = {"sync_interval": 12}
LATE = {(0, 0): "lands one round later"}
TIMELINES = {
    "diloco": Timeline(
        "DiLoCo",
        "Every 12 inner steps the whole model travels in fp32. Training waits for the mean.",
        "one bar after every 12 inner steps; training waits for each of them",
        ONE,
    ),
    "streaming": Timeline(
        "Streaming DiLoCo",
        "Fragments take turns. Each lands 2 inner steps after its send; training goes on meanwhile.",
        "three fragments, sent in turns every 4 inner steps; each lands 2 inner steps later, and training never waits",
        {"sync_interval": 12, "num_fragments": 3, "overlap_steps": 2},
        notes={(2, 0): "overlap_steps = 2"},
    ),
    "eager": Timeline(
        "Eager updates",
        "Each mean lands one round late. At its landing, a region replaces its own old share by a fresh one.",
        "one bar from each round's end to the end of the next one, back to back; training never waits",
        ONE,
        notes=LATE,
    ),
    "co2": Timeline(
        "CO2",
        "The mean of one round travels during the next round. Nothing lands at the end of the first round.",
        "one bar from each round's end to the end of the next one, back to back; training never waits",
        ONE,
        notes=LATE,
    ),
    "dilocox": Timeline(
        "DiLoCoX",
        "The mean lands one round late, at low rank in int4. When the rank falls, later rounds become shorter.",
        "bars from each round's end to the end of the next one; rounds shrink from 12 to 7 inner steps as the rank falls",
        ONE,
        first=76,
        last=134,
        notes={(0, number): f"rank {rank}" for number, rank in enumerate((*RANKS, *RANKS[-1:] * 3))},
        is_even=False,
    ),
    "cocodc": Timeline(
        "CoCoDC",
        "A fragment travels as often as the link allows. Once each was sent, the fastest changing one goes most often.",
        "three fragments, of which one is sent every 3 inner steps; transfers fly 4 inner steps at first, and 2 once times are "
        "measured; the fragment that changes fastest is sent most often",
        {"sync_interval": 12, "num_fragments": 3},
        notes={(2, 0): "overlap as measured: 2"},
        is_even=False,
    ),
    "sparseloco": Timeline(
        "SparseLoCo",
        "Every 12 inner steps the largest values travel, in two bits. Training waits for little but the latency.",
        "one short bar after every 12 inner steps; training waits for each of them, but briefly",
        ONE,
    ),
    "muloco": Timeline(
        "MuLoCo",
        "DiLoCo with Muon as the inner optimizer: 4-bit integers travel every 12 inner steps. The wait is short.",
        "one short bar after every 12 inner steps; training waits for each of them, but briefly",
        ONE,
    ),
}


class Flight(NamedTuple):
    """A transfer: the inner steps after which it was sent and landed, and its number among those of its fragment."""

    fragment: int
    sent: int
    landed: int
    number: int


class Played(NamedTuple):
    """A training: its transfers, and by inner step how long training waited after it, in inner steps."""

    flights: list[Flight]
    waits: dict[int, float]
    num_fragments: int


def play(method: Method, num_fragments: int, last: int) -> Played:
    """Play a method's schedule on the link of the timelines."""
    from hf_cocodc.parts.fragments import Fragment
    from hf_cocodc.parts.schedules import AgreedStats, Send

    shapes = ((SIDE, SIDE),) * (len(FRAGMENTS) // num_fragments)
    numel = len(shapes) * SIDE * SIDE
    fragment = Fragment(0, tuple(f"weight.{number}" for number in range(len(shapes))), shapes, numel)
    share = method.codec.wire_bytes(fragment, 0, 2) / (4 * len(FRAGMENTS) * SIDE * SIDE)
    takes = LATENCY_STEPS + WHOLE_STEPS * share

    schedule, stats = method.schedule, AgreedStats()
    state = schedule.init(num_fragments)
    now, counts = 0.0, [0] * num_fragments
    flying: dict[tuple[int, int], tuple[int, float]] = {}
    played = Played([], {}, num_fragments)
    for step in range(1, last + 1):
        now += 1
        events, state = schedule.events(step, stats, state)
        for event in events:
            if isinstance(event, Send):
                flying[event.fragment, step] = counts[event.fragment], now + takes
                counts[event.fragment] += 1
            elif event.sent_at:
                number, ready = flying.pop((event.fragment, event.sent_at))
                if ready > now + 1e-9:
                    played.waits[step] = played.waits.get(step, 0.0) + ready - now
                    now = ready
                played.flights.append(Flight(event.fragment, event.sent_at, step, number))
                changes = CHANGES[:num_fragments]
                stats = AgreedStats(1.0, takes, changes, RANKS[min(number, len(RANKS) - 1)] / RANKS[0])
    played.flights.extend(Flight(p, sent, last + 1, number) for (p, sent), (number, _) in flying.items())
    return played


def timeline(name: str) -> Canvas:
    """A method's transfers over inner steps."""
    from hf_cocodc.newer import known

    shown = TIMELINES[name]
    played = play(known()[name](**shown.given), shown.given.get("num_fragments", 1), shown.last)
    rows, row = played.num_fragments, 34
    train, height = 106, 24
    first_row = train + height + 16
    bottom = first_row + rows * row
    canvas = Canvas(bottom + 108, f"{shown.title}: {shown.alt}.")

    left, right = 112, WIDTH - 24
    inside = {step: wait for step, wait in played.waits.items() if shown.first <= step < shown.last}
    pitch = (right - left) / (shown.last - shown.first + sum(inside.values()))

    def place(step: int, waited: bool = False) -> float:
        """Where inner step `step` ends, or the waiting after it."""
        before = sum(wait for at, wait in inside.items() if at < step or (waited and at == step))
        return left + pitch * (min(max(step, shown.first), shown.last) - shown.first + before)

    canvas.text(24, 34, shown.title, size=18, bold=True)
    canvas.text(24, 56, shown.about, color=MUTED)
    _key(canvas, bool(played.waits))
    canvas.text(left - 12, train + 16, "training", anchor="end")
    for step in range(shown.first + 1, shown.last + 1):
        begin, end = place(step - 1, waited=True), place(step)
        canvas.box(begin + 0.8, train, end - begin - 1.6, height, CELL, rx=2)
    for step in inside:
        begin = place(step)
        canvas.hatched(begin + 0.8, train, max(place(step, waited=True) - begin - 1.6, 1.5), height)

    for p in range(rows):
        y = first_row + p * row
        canvas.text(left - 12, y + 18, f"fragment {p}" if rows > 1 else "whole model", anchor="end")
        canvas.line((left, y + row - 2), (right, y + row - 2), color=RULE, width=0.8)
    for flight in sorted(played.flights, key=lambda each: (-each.fragment, each.sent)):
        if flight.landed > shown.first and flight.sent < shown.last:
            _flight(canvas, shown, flight, place, (train + height, first_row + flight.fragment * row))
    _axis(canvas, shown, played, place, bottom)
    return canvas


def _key(canvas: Canvas, waits: bool) -> None:
    """What the shapes of a timeline mean."""
    y, x = 74, 112.0
    canvas.box(x, y, 12, 12, CELL, rx=2)
    canvas.small(x + 18, y + 10.5, "one inner step")
    x += 124
    canvas.box(x, y, 30, 12, BLUE, rx=3)
    canvas.small(x + 36, y + 10.5, "transfer, from its send to its landing")
    x += 264
    if waits:
        canvas.hatched(x, y, 20, 12)
        canvas.small(x + 26, y + 10.5, "training waits")


def _flight(
    canvas: Canvas, shown: Timeline, flight: Flight, place: Callable[..., float], tops: tuple[float, float]
) -> None:
    """The bar of a transfer, with a line from the training at its send and an arrow back at its landing."""
    train, y = tops
    color = FRAGMENTS[flight.fragment]
    begin, end = place(flight.sent), place(flight.landed, waited=True)
    canvas.box(begin + 1.5, y + 4, max(end - begin - 3, 2), 20, color, rx=3)
    if flight.sent >= shown.first:
        canvas.line((begin + 2.2, train), (begin + 2.2, y + 4), color=color, width=1.4)
    if flight.landed <= shown.last:
        canvas.arrow((end - 2.2, y + 4), (end - 2.2, train + 1), color=color, width=1.2)
    told = shown.notes.get((flight.fragment, flight.number))
    if told and 7 * len(told) < end - begin:
        canvas.text((begin + end) / 2, y + 18.5, told, color="#fff", anchor="middle")
    elif told and flight.landed <= shown.last:
        canvas.text(end + 6, y + 18.5, told, color=color)


def _axis(
    canvas: Canvas, shown: Timeline, played: Played, place: Callable[..., float], bottom: float
) -> None:
    """Lengths of rounds, and the numbers of inner steps."""
    y = bottom + 14
    flights = [each for each in played.flights if shown.first <= each.sent]
    sends = sorted({each.sent for each in flights if each.fragment == 0 or not shown.is_even})
    pairs = list(zip(sends, sends[1:], strict=False))
    for begin, end in pairs[:1] if shown.is_even else pairs:
        left, right = place(begin), place(end)
        for x in (left, right):
            canvas.line((x, y - 5), (x, y + 5), color=MUTED, width=1)
        canvas.line((left, y), (right, y), color=MUTED, width=1)
        told = f"sync_interval = {end - begin}" if shown.is_even else str(end - begin)
        canvas.small((left + right) / 2, y + 16, told, anchor="middle")
    if not shown.is_even:
        canvas.small(place(shown.first) - 12, y + 4, "between sends", anchor="end")
    y = bottom + 46
    canvas.line((place(shown.first), y), (place(shown.last), y), color=INK, width=1)
    for step in range(shown.first, shown.last + 1):
        size = 6 if step % 4 == 0 else 3
        canvas.line((place(step), y), (place(step), y + size), color=INK, width=1)
        if step % 4 == 0:
            canvas.text(place(step), y + 20, str(step), size=12, anchor="middle")
    canvas.text(place(shown.first) - 20, y + 20, "inner step", anchor="end")
    canvas.small(
        24,
        y + 48,
        f"Drawn for a link that carries the whole model in fp32 in the time of {WHOLE_STEPS:g} inner steps, "
        f"after a latency of {LATENCY_STEPS:g} inner steps.",
    )
