"""Schedules, outer transforms, journal, summary, pictures: small parts on their own."""

from __future__ import annotations

import dataclasses
import json
import logging
from functools import partial
from pathlib import Path

import pytest
import torch

from hf_cocodc.errors import LinkError
from hf_cocodc.link.lockstep import LockstepLink, VirtualLink, run_in_lockstep
from hf_cocodc.parts import outer, schedules
from hf_cocodc.parts.info import OuterInfo, OuterSlice
from hf_cocodc.parts.schedules import AgreedStats, Land, Send
from hf_cocodc.run.figures import data_parallel_bytes
from hf_cocodc.run.journal import Journal, read
from hf_cocodc.settings import OuterConfig
from hf_cocodc.tools.report.runs import read_run
from hf_cocodc.tools.report.summary import summarize
from tests.toys import Region, llama, llama_adamw, params_of, run, train_llama


def events(schedule: schedules.Schedule, num_fragments: int, steps: int) -> dict[int, tuple]:
    """Events of the steps that have any."""
    state, found = schedule.init(num_fragments), {}
    for step in range(1, steps + 1):
        due, state = schedule.events(step, AgreedStats(), state)
        if due:
            found[step] = due
    return found


def test_staggered_is_the_papers_example() -> None:
    """H = 100, P = 2: fragment 0 at 100, 200, ...; fragment 1 at 150, 250, ...; each lands tau later."""
    found = events(schedules.staggered(100, 5), 2, 260)
    sends = {step: due for step, due in found.items() if isinstance(due[0], Send)}
    assert sends == {100: (Send(0),), 150: (Send(1),), 200: (Send(0),), 250: (Send(1),)}
    assert found[105] == (Land(0, 100),)


def test_a_delay_of_one_round_sends_before_it_lands() -> None:
    """At equal steps the send comes first; the other order would make every outer gradient zero."""
    found = events(schedules.every(4, 4), 1, 12)
    assert found == {4: (Send(0),), 8: (Send(0), Land(0, 4)), 12: (Send(0), Land(0, 8))}


def test_nesterov_is_torch_sgd() -> None:
    """chain(nesterov, scale) moves parameters as torch.optim.SGD(nesterov=True) does, state keyed by name."""
    transform = outer.chain(nesterov=outer.nesterov(0.9), lr=outer.scale(0.7))
    ours = torch.randn(50, generator=torch.Generator().manual_seed(0))
    theirs = torch.nn.Parameter(ours.clone())
    sgd = torch.optim.SGD([theirs], lr=0.7, momentum=0.9, nesterov=True)
    state = transform.init(ours)
    info = OuterInfo(**dict.fromkeys(field.name for field in dataclasses.fields(OuterInfo)))  # type: ignore[arg-type]
    for seed in range(1, 6):
        grad = torch.randn(50, generator=torch.Generator().manual_seed(seed))
        step, state = transform.begin(state, info)
        ours = ours - step(grad.clone(), OuterSlice(state))
        theirs.grad = grad
        sgd.step()
        torch.testing.assert_close(ours, theirs.detach())
    assert list(state) == ["nesterov", "lr"]


def test_lockstep_reports_who_fails() -> None:
    """An exception in one region ends all and is the one that is raised; waiting for nobody is an error."""

    def one_fails(region: int, link: LockstepLink) -> None:
        if region == 1:
            raise KeyError("mine")
        link.broadcast(torch.zeros(1), "x")
        link.gather(None, "y")  # type: ignore[arg-type]

    with pytest.raises(KeyError, match="mine"):
        run_in_lockstep(2, one_fails)

    def one_leaves(region: int, link: LockstepLink) -> None:
        if region == 0:
            link.gather(None, "y")  # type: ignore[arg-type]

    with pytest.raises(LinkError, match="every region waits for another"):
        run_in_lockstep(2, one_leaves)


def test_random_numbers_belong_to_a_region() -> None:
    """Regions that take turns draw the numbers that they would draw alone."""

    def draw(region: int, link: LockstepLink) -> list[float]:
        torch.manual_seed(region)
        drawn = []
        for _ in range(3):
            drawn.append(float(torch.rand(1)))
            link.gather(None, "turn")  # type: ignore[arg-type]
        return drawn

    alone = []
    for region in (0, 1):
        torch.manual_seed(region)
        alone.append([float(torch.rand(1)) for _ in range(3)])
    assert run_in_lockstep(2, draw) == alone


def a_run(path: Path, region: int) -> Path:
    journal = Journal(path / f"{region}.jsonl")
    outer_settings = {"method": "diloco", "sync_interval": 2, "digest_interval": 10}
    journal.write(
        "start",
        step=0,
        region=region,
        num_regions=2,
        num_params=10,
        num_fragments=1,
        max_steps=4,
        outer=outer_settings,
        run="a",
    )
    journal.write("evaluate", step=0, eval_loss=5.0, eval_perplexity=148.4)
    for step in (2, 4):
        journal.write("log", step=step, loss=float("nan") if step == 2 else 1.5)
        journal.write("send", step=step, fragment=0)
        journal.write("land", step=step, fragment=0, sent_at=step, blocked_s=0.5, bytes_sent=40)
    journal.write("finish", step=4, blocked_s=1.0, bytes_sent=80)
    journal.write("evaluate", step=4, eval_loss=1.0, eval_perplexity=2.718)
    assert journal.path is not None
    return journal.path


def test_the_summary_reads_the_journals(tmp_path: Path) -> None:
    """Perplexities, steps, bytes and the data-parallel comparison come from the journals alone."""
    summary = summarize(read_run("run", [a_run(tmp_path, 0), a_run(tmp_path, 1)]))
    assert (summary.perplexity_before, summary.perplexity_after) == (148.4, 2.718)
    assert (summary.inner_steps, summary.outer_steps, summary.bytes_sent) == (4, (2,), 80)
    assert summary.data_parallel_bytes == data_parallel_bytes(10, 4, 2) == 4 * 10 * 4


@pytest.mark.parametrize(
    ("steps", "words"), [((2,), "2"), ((7, 7), "14, each of one of 2 fragments (of each 7)")]
)
def test_the_summary_counts_outer_steps(steps: tuple[int, ...], words: str, tmp_path: Path) -> None:
    """As they were made, fragment by fragment; nothing is divided."""
    summary = dataclasses.replace(summarize(read_run("run", [a_run(tmp_path, 0)])), outer_steps=steps)
    assert f"outer steps           {words}" in summary.lines(tmp_path, [])
    uneven = dataclasses.replace(summary, outer_steps=(3, 9, 4)).lines(tmp_path, [])
    assert "outer steps           16, each of one of 3 fragments (of each 3 to 9)" in uneven


def test_the_summary_says_which_outer_steps_there_were_not(tmp_path: Path) -> None:
    """Their means could not be believed: a run that is well has no such line."""
    path = a_run(tmp_path, 0)
    assert "changed nothing" not in "".join(summarize(read_run("run", [path])).lines(tmp_path, []))
    with path.open("a") as file:
        file.write(json.dumps({"kind": "void", "time_s": 1.0, "step": 4, "fragment": 0, "sent_at": 4}) + "\n")
    assert "void                  1 of 3 transfers changed nothing (see the log)" in summarize(
        read_run("run", [path])
    ).lines(tmp_path, [])


def test_the_summary_says_what_was_measured_and_when(tmp_path: Path) -> None:
    """Not before step 1: not "before"; and on which weights."""
    journal = a_run(tmp_path, 0)
    events = [event for event in read(journal) if event["kind"] != "evaluate" or event["step"]]
    events[-1]["weights"] = "local"
    journal.write_text("".join(json.dumps(event) + "\n" for event in events))
    line = summarize(read_run("run", [journal])).lines(tmp_path, [journal])[0]
    assert line.split() == ["held-out", "perplexity", "2.718", "after", "(local", "weights)"]


def test_the_summary_speaks_of_the_best_model(tmp_path: Path) -> None:
    """Where a run ended with weights of an earlier step: their perplexity, and their step. A later end without them counts."""
    path = a_run(tmp_path, 0)
    events = read(path)
    events.insert(-2, {"kind": "evaluate", "time_s": 1.0, "step": 2, "eval_perplexity": 2.5})
    events.append({"kind": "best", "time_s": 1.0, "step": 2, "metric": "eval_loss", "value": 0.9})
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    line = summarize(read_run("run", [path])).lines(tmp_path, [])[0]
    assert line.endswith("148.40 before, 2.500 after (global weights, the best: of step 2)")
    with path.open("a") as file:
        file.write(
            json.dumps({"kind": "finish", "step": 4, "blocked_s": 1.0, "bytes_sent": 80, "time_s": 1.0})
        )
        file.write("\n")
    assert summarize(read_run("run", [path])).best_step is None


def test_a_journal_that_was_cut_off_is_read_up_to_there(tmp_path: Path) -> None:
    """A crash in the middle of a line loses that line only."""
    path = a_run(tmp_path, 0)
    whole = read(path)
    path.write_text(path.read_text()[:-9])
    assert read(path) == whole[:-1]


@pytest.mark.parametrize("num_regions", [2, 3])
def test_simulated_time_decides_when_transfers_arrive(num_regions: int) -> None:
    """DiLoCo is blocked for latency plus bytes over bandwidth each round; CoCoDC's overlap follows the same link and hides
    it; no number changes with the link where the schedule does not follow it."""

    def train(region: Region, steps: int = 24) -> tuple[float, list[int], torch.Tensor]:
        staleness = []
        for step in range(steps):
            train_llama(region, step)
            staleness.append(int(region.synchronizer.account.report.get("staleness", 0)))
        totals = region.synchronizer.totals
        return totals.blocked_s, staleness, params_of(region.model)

    diloco = OuterConfig(method="diloco", sync_interval=8)
    payload = 4 * sum(p.numel() for p in llama().parameters())
    trips, sent = (1, payload) if num_regions == 2 else (2, payload * 2 * (num_regions - 1) / num_regions)
    link = VirtualLink(step_time_s=1.0, latency_s=0.25, bandwidth=payload)
    slow = run(num_regions, diloco, llama_adamw(), train, link)
    assert slow[0][0] == pytest.approx(3 * (trips * 0.25 + sent / payload), rel=1e-3)
    fast = run(num_regions, diloco, llama_adamw(), train)
    assert torch.equal(slow[1][2], fast[1][2]), "a slow link changes no number, only times"
    cocodc = OuterConfig(method="cocodc", sync_interval=16, num_fragments=2)
    half = VirtualLink(step_time_s=1.0, latency_s=1.7, bandwidth=payload)
    for blocked_s, staleness, _ in run(num_regions, cocodc, llama_adamw(), partial(train, steps=64), half):
        assert staleness[-1] == (
            3 if num_regions == 2 else 5
        )  # ceil(trips * 1.7 s + half a payload, over 1 s)
        assert blocked_s == 0


def test_rates_of_sends_count_from_the_step_where_the_schedule_began() -> None:
    """CoCoDC begins at any inner step as at the start of a run."""
    schedule, stats = schedules.adaptive(100, 1, sends_per_interval=10), AgreedStats(change=(2.0, 3.0))
    sent: dict[int, list[int]] = {0: [], 1000: []}
    for start, fragments in sent.items():
        state = schedule.init(2, start)
        for step in range(start + 1, start + 100):
            events, state = schedule.events(step, stats, state)
            fragments += [event.fragment for event in events if isinstance(event, schedules.Send)]
    assert sent[0] == sent[1000]


def test_a_link_that_cannot_carry_every_fragment_in_time_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """CoCoDC, measured: 4 transfers of 15 s do not fit in 0.4 x 20 steps of 1 s; once, with the interval that would do."""
    caplog.set_level(logging.WARNING, "hf_cocodc.parts.schedules")  # hf-cocodc plan turns it off
    schedule, stats = schedules.adaptive(20), AgreedStats(step_time_s=1.0, sync_time_s=15.0)
    state = schedule.init(4)
    for step in range(1, 100):
        _, state = schedule.events(step, stats, state)
    assert caplog.text.count("the link cannot carry all 4 fragments in sync_interval=20") == 1
    assert "Set sync_interval=150" in caplog.text
    caplog.clear()
    schedule = schedules.adaptive(150)
    schedule.events(149, stats, {**schedule.init(4), "next": 149})
    assert not caplog.text
