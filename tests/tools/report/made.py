"""Journals as runs write them, made in a moment: regions that wait for each other, without a model."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any


def a_run(
    folder: Path,
    *,
    regions: int = 2,
    fragments: int = 2,
    steps: int = 80,
    interval: int = 20,
    overlap: int = 2,
    step_s: float = 0.5,
    link_s: float = 0.3,
    late: int = 1,
    method: str = "streaming",
    skew_s: float = 1000.0,
    until: int | None = None,
    seed: int = 0,
    **start: Any,
) -> list[Path]:
    """A run of regions of which `late` makes every fifth step slower; each has a clock of its own, `skew_s` apart.

    The mean of a transfer is here `link_s` after the last region has sent it. With `until` the run has come to this step only.
    """
    chance = random.Random(seed)
    events: list[list[dict[str, Any]]] = [[] for _ in range(regions)]
    now, blocked, sent_bytes = [0.0] * regions, [0.0] * regions, 0
    settings = {
        "method": method,
        "sync_interval": interval,
        "num_fragments": fragments,
        "overlap_steps": overlap,
    }
    for region in range(regions):
        begin = {"region": region, "num_regions": regions, "num_params": 1000, "num_fragments": fragments}
        begin["run"] = f"run-{seed}"
        training = {"batch": 4, "data.block_size": 128, "training.learning_rate": 0.003}
        more = {
            "max_steps": steps,
            "timing": "measured",
            "bytes_sent": 0,
            "outer": settings,
            "training": training,
        }
        more |= {"at": 1.79e9 + skew_s * region, "versions": {"hf_cocodc": "0.1.0", "torch": "2.13.0"}}
        _add(events[region], "start", 0.0, 0, **{**begin, **more, **start})
    flying: dict[tuple[int, int], tuple[float, list[float]]] = {}
    for step in range(1, (until or steps) + 1):
        for region in range(regions):
            slow = 3.0 if region == late and step % 5 == 0 else 1.0
            now[region] += step_s * slow * (1 + 0.1 * chance.random())
            if step % 10 == 0:
                loss = 2.5 + 3 * 0.99**step + 0.05 * chance.random()
                _add(events[region], "log", now[region], step, loss=loss)
        for fragment in range(fragments):
            if step % interval == (fragment * interval // fragments) % interval and step + overlap <= steps:
                norms = [1 + 0.1 * chance.random() for _ in range(regions)]
                flying[fragment, step] = (max(now) + link_s, norms)
                for region in range(regions):
                    now[region] += 0.002
                    _add(events[region], "send", now[region], step, fragment=fragment, numel=500, blocked_s=0.0,
                         took_s=0.002, norm=norms[region])  # fmt: skip
        for (fragment, sent_at), (arrived, norms) in list(flying.items()):
            if step < sent_at + overlap:
                continue
            del flying[fragment, sent_at]
            sent_bytes += 250
            for region in range(regions):
                waited = max(arrived - now[region], 0.0)
                blocked[region] += waited
                now[region] += waited + 0.004
                times = {"blocked_s": waited, "took_s": waited + 0.004, "rested_s": now[region] - arrived}
                _add(events[region], "land", now[region], step, fragment=fragment, sent_at=sent_at, transfer_s=link_s,
                     staleness=step - sent_at, bytes_sent=250, outer_grad_norm=sum(norms) / regions, regions=regions,
                     members=list(range(regions)), norms=norms, **times)  # fmt: skip
        if step % 40 == 0:
            for region in range(regions):
                now[region] += 1.5
                loss = 2.4 + 3 * 0.99**step
                facts = {"eval_loss": loss, "eval_perplexity": 2.718**loss, "took_s": 1.5, "blocked_s": 0.0}
                _add(events[region], "evaluate", now[region], step, **facts)
                now[region] += 0.5
                _add(events[region], "save", now[region], step, took_s=0.5, blocked_s=0.0)
    if until is None:
        for region in range(regions):
            _add(
                events[region], "finish", now[region], steps, blocked_s=blocked[region], bytes_sent=sent_bytes
            )
    return [write(folder / f"region-{region}", own) for region, own in enumerate(events)]


def a_resumed_run(folder: Path, first: int, then: int, at: int = 40, steps: int = 80) -> list[Path]:
    """A run that `first` regions begin, and that `then` regions resume at step `at`. It would end with a lost region.

    Each time that regions meet they agree on another name. The last ones before `at` had trained on for 7 steps.
    """
    paths = []
    for region in range(max(first, then)):
        events: list[dict[str, Any]] = []
        sections = [("start", 0, first, at if region < then else at + 7), ("resume", at, then, steps)]
        for place, (kind, since, count, until) in enumerate(sections):
            if region >= count:
                continue
            begin = {"region": region, "num_regions": count, "num_params": 1000, "num_fragments": 1}
            more = {"outer": {"method": "diloco"}, "training": {"batch": 4, "data.block_size": 128}}
            _add(events, kind, 0.5 * since, since, **begin, **more, run=f"run-{place}")
            for step in range(since + 10, until + 1, 10):
                _add(events, "send", 0.5 * step, step, fragment=0, norm=1.0)
                landed = {"fragment": 0, "sent_at": step, "blocked_s": 0.0, "bytes_sent": 100}
                _add(events, "land", 0.5 * step + 0.1, step, **landed, outer_grad_norm=1.0 + count)
            _add(events, "log", 0.5 * until + 0.1, until, loss=2.0)
        if region < then:
            _add(events, "finish", 0.5 * steps + 0.2, steps, blocked_s=0.0, bytes_sent=800)
        paths.append(write(folder / f"region-{region}", events))
    return paths


def an_elastic_run(
    folder: Path,
    there: dict[int, list[tuple[int, int]]],
    *,
    trained_to: dict[int, int] | None = None,
    fails: tuple[int, int, float] | None = None,
    steps: int = 60,
) -> list[Path]:
    """A run that goes on without a lost region. Each process has a clock of its own; an inner step takes 0.5 s.

    A transfer of 100 bytes lands at every tenth step; training waits 0.1 s for it. Region 0 sends 5,000 bytes more at the end.

    Args:
        folder: of the run.
        there: the inner steps from which, and to which, each region takes part. One that comes later joins.
        trained_to: the last inner step of regions that leave, by number: they only keep step from there on.
        fails: a region that tries to join: its number, from which step on, and for how many seconds.
        steps: of the run.
    """
    trained_to = trained_to or {}
    members = {
        step: [r for r, spans in there.items() if any(a < step <= b for a, b in spans)]
        for step in range(1, steps + 1)
    }
    paths = []
    for region, spans in there.items():
        events: list[dict[str, Any]] = []
        ended_s = 0.0
        for since, until in spans:
            joins, began_s = since > 0, 0.5 * since
            _begin(events, region, since, ended_s, began_s, from_region=0 if joins else None)
            if joins:
                _add(events, "join", ended_s, since, epoch=1, region=region, donor=0, base=since)
            for step in range(since + 1, until + 1):
                now = ended_s + 0.5 * step - began_s
                if step == since + 1 or members[step] != members[step - 1]:
                    changes = sum(members[each] != members[each - 1] for each in range(2, step + 1))
                    _add(events, "epoch", now - 0.4, step - 1, epoch=changes, members=members[step], why="")
                if step % 10:
                    continue
                coasted = {
                    str(r): last for r, last in trained_to.items() if r in members[step] and last < step
                }
                if not coasted.get(str(region)):
                    _add(events, "log", now - 0.2, step, loss=2.0)
                sent = {
                    "fragment": 0,
                    "sent_at": step,
                    "members": members[step],
                    "blocked_s": 0.1,
                    "bytes_sent": 100,
                }
                _add(events, "land", now, step, **sent, **({"coasted": coasted} if coasted else {}))
            ended_s = events[-1]["time_s"]
        if spans[-1][1] == steps:
            waited = 0.1 * sum(event["kind"] == "land" for event in events)
            sent_bytes = sum(event.get("bytes_sent", 0) for event in events) + 5000 * (not region)
            _add(events, "finish", ended_s, steps, blocked_s=waited, bytes_sent=sent_bytes)
        paths.append(write(folder / f"region-{region}", events))
    if fails is not None:
        region, since, seconds = fails
        events = []
        _begin(events, region, since, 0.0, 0.5 * since, from_region=0)
        _add(
            events,
            "land",
            1.0,
            since + 10,
            fragment=0,
            sent_at=since + 10,
            members=[0, 1],
            blocked_s=9.0,
            bytes_sent=9999,
        )
        _add(events, "error", seconds, since + 10, message="the run has ended", exit_code=1)
        write(folder / f"region-{region}", events)
    return paths


def _begin(
    events: list[dict[str, Any]], region: int, step: int, time_s: float, at: float, from_region: int | None
) -> None:
    kind = "start" if from_region is None else "resume"
    more: dict[str, Any] = {} if from_region is None else {"from_region": from_region, "joins": True}
    _add(events, kind, time_s, step, region=region, num_regions=3, num_params=1000, num_fragments=1, bytes_sent=0,
         timing="measured", outer={"method": "diloco"}, training={"batch": 4, "data.block_size": 128}, run="elastic",
         at=1.79e9 + at, **more)  # fmt: skip


def write(region_folder: Path, events: list[dict[str, Any]], name: str = "journal.jsonl") -> Path:
    path = region_folder / "cocodc" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    return path


def _add(events: list[dict[str, Any]], kind: str, time_s: float, step: int, **facts: Any) -> None:
    events.append({"kind": kind, "time_s": round(time_s, 4), "step": step, **facts})


def a_cut_run(
    folder: Path, *, steps: int = 200, cut: tuple[int, int] = (50, 150), tokens: bool = True
) -> list[Path]:
    """A run of two regions, an inner step a second, of which region 1 is cut off for a time and comes back in its process.

    It waits from the second `cut[0]` on, notices it 5 s before `cut[1]`, follows the others, and is a member at `cut[1]` again.
    """
    training = {"batch": 4, **({"data.block_size": 128} if tokens else {})}
    paths = []
    for region in (0, 1):
        events: list[dict[str, Any]] = []
        _add(events, "start", 0.0, 0, region=region, num_regions=2, num_params=1000, num_fragments=1, bytes_sent=0,
             timing="measured", outer={"method": "diloco"}, training=training, run="elastic", at=1.79e9)  # fmt: skip
        _add(events, "epoch", 0.0, 0, epoch=0, members=[0, 1], why="")
        for step in range(1, steps + 1):
            is_cut = cut[0] < step < cut[1]
            now = float(step)
            if region == 1 and is_cut:
                if step == cut[1] - 1:
                    _add(
                        events,
                        "away",
                        now - 4,
                        cut[0],
                        held_s=now - 4 - cut[0],
                        why="no way to the coordinator",
                    )
                    for late in range(cut[0] + 10, step, 10):
                        _add(
                            events,
                            "land",
                            now - 1 + late / 1e4,
                            late,
                            fragment=0,
                            sent_at=late - 2,
                            blocked_s=0.0,
                        )
                continue
            if step == cut[0] + 10:
                _add(events, "epoch", now, step, epoch=1, members=[0], why="region 1 is lost")
            if step == cut[1]:
                if region == 1:
                    _add(events, "join", now, step, epoch=2, region=1, donor=0, base=cut[1] - 10)
                _add(events, "epoch", now, step, epoch=2, members=[0, 1], why="region 1 has come in")
            if step % 5 == 0:
                _add(events, "log", now, step, loss=3 - step / 100)
            if step % 10 == 0 and step != cut[1]:
                _add(events, "send", now, step, fragment=0)
                _add(events, "land", now + 0.5, step + 1, fragment=0, sent_at=step, blocked_s=0.4, took_s=0.5,
                     transfer_s=0.4, bytes_sent=100, members=[0] if is_cut else [0, 1])  # fmt: skip
        _add(events, "finish", steps + 0.6, steps, blocked_s=4.0, bytes_sent=1000)
        paths.append(write(folder / f"region-{region}", events))
    return paths
