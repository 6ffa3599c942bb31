"""Regions that die, come back and join, as processes of their own."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_cocodc.coordinator.client import status
from hf_cocodc.coordinator.messages import AskLeave
from hf_cocodc.coordinator.server import serve_in_thread
from hf_cocodc.errors import InputError
from hf_cocodc.net.keys import Keys
from hf_cocodc.tools.report.runs import read_run
from tests.coordinator.regions import ask
from tests.processes.coming_worker import HURRY, dealt, events, loop, step_of, trainer
from tests.processes.donor_worker import silent
from tests.processes.forks import Process, fork, rank_env, region_env, torch_master, wait_until
from tests.processes.pausing_worker import pausing
from tests.secret import secret

TIMEOUT_S = 90


class Run:
    """The regions of an elastic run.

    Args:
        folder: theirs.
        count: how many begin.
        body: of the worker.
        arguments: for it.
        secrets: of the coordinator.
        ranks: of each region, unless `start` says otherwise.
        more: for the body.
        coordinator: another one than one in a thread.
    """

    def __init__(
        self,
        folder: Path,
        count: int,
        body: Callable[..., None],
        *arguments: Any,
        secrets: Sequence[Keys] = (),
        coordinator: Any = None,
        ranks: int = 1,
        **more: Any,
    ) -> None:
        self.folder, self._count, self._num_ranks = folder, count, ranks
        self._body, self._arguments = partial(body, **more) if more else body, arguments
        self.coordinator = coordinator or serve_in_thread(secrets=secrets)
        self._masters: list[Any] = []
        self.processes: dict[int, Process] = {}
        self._ranks: dict[int, list[Process]] = {}
        for region in range(count):
            self.start(region)

    def start(self, region: int, ranks: int = 0, join: bool = False) -> None:
        """Start a region, for the first time or again."""
        ranks = ranks or self._num_ranks
        env, master = region_env(self.coordinator, region, self._count), torch_master()
        env |= {"HF_COCODC_JOIN": "1"} if join else {}
        whole = (self._body, str(self.folder), *self._arguments)
        self._ranks[region] = [
            fork(*whole, log=self.log(region), **env, **rank_env(master, rank, ranks))
            for rank in range(ranks)
        ]
        self._masters.append(master)
        self.processes[region] = self._ranks[region][0]

    def log(self, region: int) -> Path:
        return self.folder / f"log-{region}.txt"

    def wait_for_step(self, region: int, step: int) -> None:
        """Until a region has begun this inner step."""
        wait_until(lambda: step_of(self.folder, region) >= step, self.processes[region], self.log(region))

    def wait_for_join(self, region: int, times: int = 1) -> None:
        """Until a region knows that it has come in, so often."""
        wait_until(
            lambda: len(events(self.folder, region, "join")) >= times,
            *(self.processes[region], self.log(region)),
        )

    def kill(self, region: int) -> None:
        for process in self._ranks[region]:
            process.kill()
            process.join()

    def send(self, region: int, number: int) -> None:
        """Send a signal to all processes of a region."""
        for process in self._ranks[region]:
            assert process.pid is not None
            os.kill(process.pid, number)

    def wait_until_shown(self, samples: int) -> None:
        """Until `hf-cocodc status` shows shares that add up to so many samples, and how regions agree."""

        def is_shown() -> bool:
            [state] = status(self.coordinator.address, None, None, 5.0)
            return (
                state["cosine"] is not None
                and sum(each["samples"] or 0 for each in state["members"]) == samples
            )

        wait_until(is_shown, self.processes[0], self.log(0))

    def wait_until_members(self, members: list[int], region: int) -> None:
        """Until these regions take part, as this one sees it."""
        wait_until(
            lambda: [each["members"] for each in events(self.folder, region, "epoch")][-1:] == [members],
            *(self.processes[region], self.log(region)),
        )

    def wait_until_it_waits(self, region: int) -> None:
        """Until a region waits for more regions."""
        wait_until(
            lambda: "training waits at step" in self.log(region).read_text(),
            *(self.processes[region], self.log(region)),
        )

    def lose(self, region: int) -> int:
        """Kill a region, and wait until region 0 waits for more regions. Returns the inner step that it has begun."""
        self.wait_for_step(region, 9)
        self.kill(region)
        self.wait_until_it_waits(0)
        return step_of(self.folder, 0)

    def ask_to_leave(self, region: int) -> None:
        """As `hf-cocodc leave` does."""
        ask(self.coordinator.address, "elastic", AskLeave(region=region), TIMEOUT_S)

    def results(self, *regions: int) -> list[dict[str, Any]]:
        """What these regions, which hurry from now on, have at the end."""
        (self.folder / HURRY).touch()
        found = []
        for region in regions:
            for process in self._ranks[region]:
                process.join(TIMEOUT_S)
                assert process.exitcode == 0, self.log(region).read_text()[-6000:]
            found.append(torch.load(self.folder / f"region-{region}.pt", weights_only=False))
        return found

    def results_once_it_is_back(self, region: int) -> list[dict[str, Any]]:
        """What all have at the end, after the others have gone on without a stopped region, and it has come back."""
        others = [each for each in self.processes if each != region]
        self.wait_until_members(others, others[0])
        self.send(region, signal.SIGCONT)
        self.wait_for_join(region)
        found = self.results(*self.processes)
        assert all(torch.equal(found[0]["weights"], each["weights"]) for each in found)
        return found


BODIES = [loop, trainer]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "method"),
    [(partial(loop), "a fragment every step"), (trainer, "streaming")],
    ids=["loop, encrypted", "trainer"],
)
def test_a_region_that_is_started_again_comes_back(
    body: Callable[..., None], method: str, tmp_path: Path
) -> None:
    """With the same command, while the others train; all end with equal weights and learning rates."""
    secrets = []
    if isinstance(body, partial):
        secrets.append(Keys.from_secret(secret()))
        (tmp_path / "secret").write_text(secret())
        (tmp_path / "secret").chmod(0o600)
        body = partial(body, secret_file=str(tmp_path / "secret"))
    run = Run(tmp_path, 3, body, 250, 0.1, method, 1, secrets=secrets)
    run.wait_for_step(2, 9)
    run.kill(2)
    run.wait_for_step(0, 14)
    run.start(2)
    run.wait_for_join(2)
    first, second, third = run.results(0, 1, 2)
    assert torch.equal(first["weights"], second["weights"])
    assert torch.equal(first["weights"], third["weights"])
    assert first["lr"] == third["lr"]
    assert 14 <= third["began_at"] < 250
    [came] = events(tmp_path, 2, "join")
    assert came["base"] <= came["step"] == third["began_at"]
    epochs = [event["members"] for event in events(tmp_path, 0, "epoch")]
    assert epochs == [[0, 1, 2], [0, 1], [0, 1, 2]]
    assert {event["step"] for region in range(3) for event in events(tmp_path, region, "epoch")[-1:]} == {
        came["step"]
    }
    whole = read_run("run", [tmp_path / f"region-{region}.jsonl" for region in range(3)])
    assert whole.trained[2][-1] == (came["step"], 250)
    assert events(tmp_path, 2, "epoch")[-1]["why"] == "region 2 has come in"


@pytest.mark.slow
@pytest.mark.parametrize("method", ["diloco", "eager"])
def test_too_few_regions_wait_for_one_that_comes_back(method: str, tmp_path: Path) -> None:
    """Of two regions with regions.min=2 the one that is left makes no step alone.

    With eager updates one more transfer of a single region lands once the other is back. Nothing waits then.
    """
    run = Run(tmp_path, 2, loop, 60, 0.05, method, 2)
    held_at = run.lose(1)
    run.start(1)
    first, second = run.results(0, 1)
    assert torch.equal(first["weights"], second["weights"])
    assert second["began_at"] <= held_at + 2
    begun = events(tmp_path, 1, "start", "resume")
    assert [(event["kind"], event.get("from_region")) for event in begun][-1] == ("resume", 0)
    said = run.log(0).read_text() + run.log(1).read_text()
    assert "only 1 of at least 2 regions (regions.min) take part: training waits" in said
    assert "only 2 of at least 2 regions" not in said


@pytest.mark.slow
def test_a_region_that_was_stopped_for_too_long_comes_back(tmp_path: Path) -> None:
    """In the same process: the others have gone on without it."""
    run = Run(tmp_path, 3, partial(loop, timeout_s=4.0), 200, 0.1, "streaming", 1)
    run.wait_for_step(2, 9)
    run.send(2, signal.SIGSTOP)
    first, _, third = run.results_once_it_is_back(2)
    assert first["lr"] == third["lr"]
    assert third["began_at"] == 0
    [away], [join] = events(tmp_path, 2, "away"), events(tmp_path, 2, "join")
    assert away["time_s"] < join["time_s"] and away["step"] < join["step"] and away["held_s"] >= 0


SPARED = [(loop, 1, ["a checkpoint of step 7"]), (trainer, 2, ["the mean of eval_loss", "checkpoint-10"])]


@pytest.mark.slow
@pytest.mark.parametrize(("body", "number", "spared"), SPARED)
def test_a_region_that_is_left_behind_before_a_save_comes_back(
    body: Callable[..., None], number: int, spared: list[str], tmp_path: Path
) -> None:
    """And before an evaluation: it does without, and takes part again."""
    more = {"saves": 7} if body is loop else {}
    run = Run(
        tmp_path, 3, partial(pausing, body, "send", number, grace_s=4.0, **more), 120, 0.1, "streaming", 1
    )
    wait_until((tmp_path / "paused").exists, run.processes[2], run.log(2))
    first, _, third = run.results_once_it_is_back(2)
    said = run.log(2).read_text()
    assert all(f"region 2 goes without {what}, and comes back" in said for what in spared)
    assert body is loop or first["best"] == third["best"]
    assert events(tmp_path, 0, "late") + events(tmp_path, 1, "late"), "whoever waits first says so"


@pytest.mark.slow
def test_a_region_that_is_left_behind_at_the_end_says_where_the_model_is(tmp_path: Path) -> None:
    run = Run(tmp_path, 3, partial(pausing, loop, "end", 1, grace_s=4.0), 20, 0.05, "streaming", 1)
    wait_until((tmp_path / "paused").exists, run.processes[2], run.log(2))
    run.results(0, 1)
    run.send(2, signal.SIGCONT)
    run.processes[2].join(TIMEOUT_S)
    assert run.processes[2].exitcode == 1
    said = run.log(2).read_text().splitlines()[-1]
    assert "region 2 came to its end at step 20, but the other regions had gone on without it" in said
    assert "take the model from the folder of another region" in said


@pytest.mark.slow
@pytest.mark.parametrize("body", BODIES)
def test_a_region_that_is_asked_to_leave_does(body: Callable[..., None], tmp_path: Path) -> None:
    """In good order, and the others train on without it."""
    run = Run(tmp_path, 3, body, 60, 0.1, "streaming", 1)
    run.wait_for_step(2, 9)
    run.ask_to_leave(2)
    run.processes[2].join(TIMEOUT_S)
    said = run.log(2).read_text()
    assert "region 2 leaves (hf-cocodc leave): the others go on without it." in said
    first, second = run.results(0, 1)
    assert torch.equal(first["weights"], second["weights"])
    [left] = events(tmp_path, 0, "left")
    assert left["region"] == 2
    [trained] = [
        event["step"] for event in events(tmp_path, 2, "note") if "region 2 leaves" in event["message"]
    ]
    whole = read_run("run", [tmp_path / f"region-{region}.jsonl" for region in range(3)])
    assert whole.trained[2] == [(0, trained)]
    assert run.processes[2].exitcode == 0, said[-4000:]
    if body is loop:
        assert torch.load(tmp_path / "region-2.pt", weights_only=False)["verdict"] == "leave"
    else:
        assert said.splitlines()[-1].startswith("region 2 has left the run")


@pytest.mark.slow
def test_a_region_leaves_where_all_evaluate(tmp_path: Path) -> None:
    """The others decide by the mean of all metrics there, and need it. It had skipped this, and all ended with an error."""
    run = Run(tmp_path, 3, partial(trainer, eval_every=1), 60, 0.1, "diloco", 1)
    run.wait_for_step(2, 9)
    run.ask_to_leave(2)
    run.processes[2].join(TIMEOUT_S)
    first, second = run.results(0, 1)
    assert torch.equal(first["weights"], second["weights"])
    assert run.log(2).read_text().splitlines()[-1].startswith("region 2 has left the run")


@pytest.mark.slow
def test_a_region_leaves_while_too_few_wait_for_more(tmp_path: Path) -> None:
    """The others wait on, and train with it and the one that was lost when they come back."""
    run = Run(tmp_path, 3, loop, 60, 0.05, "streaming", 3)
    held_at = run.lose(2)
    run.ask_to_leave(1)
    run.processes[1].join(TIMEOUT_S)
    assert run.processes[1].exitcode == 0, run.log(1).read_text()[-4000:]
    left = torch.load(tmp_path / "region-1.pt", weights_only=False)
    assert (left["verdict"], left["inner_step"]) == ("leave", held_at + 1)
    assert "the others get nothing of what this region has trained since step" in run.log(1).read_text()
    run.wait_until_members([0], 0)
    run.start(1)
    run.start(2)
    first, *others = run.results(0, 1, 2)
    assert all(torch.equal(first["weights"], each["weights"]) for each in others)
    assert min(each["began_at"] for each in others) >= held_at
    [gone] = events(tmp_path, 0, "left")
    assert gone["region"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["auto", "continue"])
def test_regions_that_wait_for_more_stop_with_a_checkpoint_at_a_signal(policy: str, tmp_path: Path) -> None:
    """They make no step that could tell of it. With "continue" the last one is interrupted: nobody stays."""
    run = Run(tmp_path, 3, partial(trainer, when_one_ends=policy), 60, 0.05, "diloco", 3)
    held_at = run.lose(2) + 1
    for region, number in ((1, signal.SIGTERM), (0, signal.SIGINT)):
        if region == 1 or policy == "continue":
            run.send(region, number)
        run.processes[region].join(TIMEOUT_S)
        said = run.log(region).read_text()
        last = said.splitlines()[-1]
        if (region, policy) == (1, "continue"):
            assert run.processes[region].exitcode == 0
            assert last.startswith("region 1 has left the run")
        else:
            assert run.processes[region].exitcode == 3
            assert last.startswith(f"all regions stopped at step {held_at}")
            assert f"This region has saved checkpoint-{held_at}" in said
            assert (tmp_path / "out" / f"region-{region}" / f"checkpoint-{held_at}").is_dir()


@pytest.mark.slow
def test_a_newcomer_whose_donor_falls_silent_as_it_comes_in_begins_anew(tmp_path: Path) -> None:
    """It does not know that it is in, and the others must not wait for it: they lose it, and it comes in again by another."""
    run = Run(tmp_path, 3, partial(silent, timeout_s=3.0), 200, 0.1, "streaming", 1)
    run.wait_for_step(2, 9)
    run.kill(2)
    run.wait_for_step(0, 14)
    run._body = partial(loop, timeout_s=3.0)
    run.start(2)
    wait_until((tmp_path / "admitted").exists, run.processes[0], run.log(0))
    run.wait_for_join(2)
    first, second = run.results(1, 2)
    assert torch.equal(first["weights"], second["weights"])
    epochs = [event["members"] for event in events(tmp_path, 1, "epoch")]
    assert epochs[-1] == [0, 1, 2]
    assert "It begins once more with another base." in run.log(2).read_text()
    [came] = events(tmp_path, 2, "join")
    assert came["donor"] == 1


@pytest.mark.slow
def test_a_resumed_run_says_who_takes_part(tmp_path: Path) -> None:
    """Its journal has the new members, from which the summary and the picture follow."""
    for count, steps in ((2, 10), (3, 20)):
        Run(tmp_path, count, trainer, steps, 0.0, "diloco", 1, True).results(*range(count))
    epochs = [event["members"] for event in events(tmp_path, 0, "epoch")]
    assert epochs == [[0, 1], [0, 1, 2]]


@pytest.mark.slow
def test_a_region_of_several_ranks_joins_and_comes_back(tmp_path: Path) -> None:
    """Its ranks do it together: they join, begin anew as their donor dies, stand still, and come back."""
    run = Run(tmp_path, 3, partial(silent, grace_s=4.0), 250, 0.1, "streaming", 1)
    run.wait_for_step(2, 9)
    run.kill(2)
    run.wait_for_step(0, 14)
    run._body = partial(loop, grace_s=4.0)
    run.start(2, ranks=2)
    wait_until((tmp_path / "admitted").exists, run.processes[0], run.log(0))
    run.kill(0)
    run.wait_for_join(2)
    run.wait_until_members([1, 2], 1)
    run.send(2, signal.SIGSTOP)
    run.wait_until_members([1], 1)
    run.send(2, signal.SIGCONT)
    run.wait_for_join(2, times=2)
    first, second = run.results(1, 2)
    assert torch.equal(first["weights"], second["weights"])
    other = torch.load(tmp_path / "region-2-rank-1.pt", weights_only=False)
    assert torch.equal(first["weights"], other["weights"])
    assert first["lr"] == second["lr"] == other["lr"]
    assert events(tmp_path, 1, "epoch")[-1]["members"] == [1, 2]
    assert "It begins once more with another base." in run.log(2).read_text()
    assert events(tmp_path, 2, "join")[0]["donor"] == 1


@pytest.mark.slow
def test_all_ranks_of_a_region_leave_at_one_step(tmp_path: Path) -> None:
    """The leader alone is asked to, and knows what is in flight."""
    run = Run(tmp_path, 3, loop, 400, 0.1, "streaming", 1)
    run.wait_for_step(2, 3)
    run.kill(2)
    run.start(2, ranks=2)
    run.wait_for_join(2)

    def is_asked() -> bool:
        try:
            run.ask_to_leave(2)
        except InputError:  # the coordinator has not heard yet that it takes part
            return False
        return True

    wait_until(is_asked, run.processes[2], run.log(2))
    for process in run._ranks[2]:
        process.join(TIMEOUT_S)
        assert process.exitcode == 0, run.log(2).read_text()[-4000:]
    names = ("region-2.pt", "region-2-rank-1.pt")
    found = [torch.load(tmp_path / name, weights_only=False) for name in names]
    assert [each["verdict"] for each in found] == ["leave", "leave"]
    assert found[0]["inner_step"] == found[1]["inner_step"]
    assert torch.equal(found[0]["weights"], found[1]["weights"])
    first, second = run.results(0, 1)
    assert torch.equal(first["weights"], second["weights"])


def check_shards(run: Run, found: list[dict[str, Any]]) -> None:
    """All ranks of all regions have the same whole model."""
    for region in run.processes:
        for rank in range(2):
            name = f"region-{region}" + (f"-rank-{rank}" if rank else "")
            weights = torch.load(run.folder / f"{name}.pt", weights_only=False)["weights"]
            assert torch.equal(weights, found[0]["weights"]), name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "method"),
    [(loop, "diloco"), (trainer, "streaming")],
    ids=["diloco", "trainer"],
)
def test_a_sharded_region_that_was_killed_comes_back(
    body: Callable[..., None], method: str, tmp_path: Path
) -> None:
    """Two regions of two ranks with FSDP2: one is killed, the other trains on; started again, it comes in, and both end with the
    same bits, in every rank."""
    run = Run(tmp_path, 2, body, 60, 0.1, method, 1, ranks=2, is_sharded=True)
    run.wait_for_step(1, 9)
    run.kill(1)
    run.wait_until_members([0], 0)
    run.start(1, join=True)
    run.wait_for_join(1)
    check_shards(run, run.results(0, 1))
    assert [each["members"] for each in events(tmp_path, 0, "epoch")] == [[0, 1], [0], [0, 1]]


@pytest.mark.slow
def test_a_sharded_region_that_was_stopped_for_too_long_comes_back(tmp_path: Path) -> None:
    """All its ranks together, in the same processes."""
    run = Run(
        tmp_path, 2, loop, 250, 0.1, "streaming", 1, ranks=2, is_sharded=True, timeout_s=4.0, grace_s=2.0
    )
    run.wait_for_step(1, 9)
    run.send(1, signal.SIGSTOP)
    check_shards(run, run.results_once_it_is_back(1))
    assert len(events(tmp_path, 1, "join")) == 1


@pytest.mark.slow
def test_too_few_sharded_regions_wait_for_one_that_comes_back(tmp_path: Path) -> None:
    run = Run(tmp_path, 2, loop, 60, 0.05, "diloco", 2, ranks=2, is_sharded=True)
    held_at = run.lose(1)
    run.start(1)
    found = run.results(0, 1)
    check_shards(run, found)
    assert found[1]["began_at"] <= held_at + 2


@pytest.mark.slow
def test_a_sharded_region_leaves_in_good_order(tmp_path: Path) -> None:
    run = Run(tmp_path, 2, loop, 100, 0.1, "streaming", 1, ranks=2, is_sharded=True, when_one_ends="continue")
    run.wait_for_step(1, 9)
    run.ask_to_leave(1)
    first, second = run.results(0, 1)
    assert (first["inner_step"], first["verdict"]) == (100, None)
    assert second["verdict"] == "leave" and second["inner_step"] < 100
    [gone] = events(tmp_path, 0, "left")
    assert gone["region"] == 1


@pytest.mark.slow
def test_a_sharded_region_without_a_checkpoint_takes_over_another_ones(tmp_path: Path) -> None:
    """Its leader alone asks the others for it; all ranks go on from there, with as many calls behind them."""
    for count, steps in ((2, 10), (3, 20)):
        run = Run(tmp_path, count, trainer, steps, 0.0, "diloco", 1, True, ranks=2, is_sharded=True)
        check_shards(run, run.results(*range(count)))
    epochs = [event["members"] for event in events(tmp_path, 0, "epoch")]
    assert epochs == [[0, 1], [0, 1, 2]]


@pytest.mark.slow
def test_a_sharded_region_ends_with_any_of_its_ranks(tmp_path: Path) -> None:
    """No rank trains on without the others, and none of the other region waits for them."""
    run = Run(tmp_path, 2, loop, 60, 0.1, "streaming", 1, ranks=2, is_sharded=True)
    run.wait_for_step(1, 9)
    leader, other = run._ranks[1]
    other.kill()
    leader.join(TIMEOUT_S)
    assert leader.exitcode == 1, run.log(1).read_text()[-4000:]
    run.wait_until_members([0], 0)
    [first] = run.results(0)
    assert first["inner_step"] == 60


@pytest.mark.slow
def test_a_fixed_run_of_sharded_regions_ends_with_one_of_them(tmp_path: Path) -> None:
    """Soon, in all ranks. Whoever hears of it first names the region that was lost; the other one may name its rank."""
    run = Run(tmp_path, 2, loop, 60, 0.1, "streaming", None, ranks=2, is_sharded=True)
    run.wait_for_step(1, 9)
    run.kill(1)
    for process in run._ranks[0]:
        process.join(TIMEOUT_S)
        assert process.exitcode == 1
    assert run.log(0).read_text().count("RegionLostError: region 1 is lost: ") == 2


def lose_and_bring_back(run: Run, *regions: int) -> None:
    """Kill regions at once, let the others train without them for some rounds, and start them again, one after the other."""
    others = [each for each in run.processes if each not in regions]
    for region in regions:
        run.wait_for_step(region, step_of(run.folder, region) + 2)
        run.kill(region)
    run.wait_until_members(others, others[0])
    run.wait_for_step(others[0], step_of(run.folder, others[0]) + 9)
    for region in regions:
        before = len(events(run.folder, region, "join"))
        run.start(region)
        run.wait_for_join(region, before + 1)
        run.wait_for_step(others[0], step_of(run.folder, others[0]) + 9)


CHURNED = [(False, 1, False), (True, 1, False), (False, 2, True)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("has_trainer", "ranks", "is_sharded"), CHURNED, ids=["loop", "trainer", "loop-fsdp2"]
)
def test_every_row_is_read_once_whatever_regions_come_and_go(
    has_trainer: bool, ranks: int, is_sharded: bool, tmp_path: Path
) -> None:
    """Regions of different speed share a global batch, and 150 rows, pass after pass. They are killed, two of three at once, and
    come back. Counted is what they have really trained, micro-batch by micro-batch.

    No row that is dealt is trained twice in a pass. In each round all that is dealt lands, but for the share of a region that is
    lost in it: between its last send that landed and the first landing without it. What a region trains before its first landing
    it draws itself, and others train it, too.
    """
    interval, rows = 4, 150
    regions, losses = (2, [(1,), (0,)]) if is_sharded else (3, [(2,), (0, 1)])
    how = {"has_trainer": has_trainer, "is_sharded": is_sharded}
    run = Run(tmp_path, regions, dealt, 1000, rows, (3.0, 1.0, 2.0), 1, ranks=ranks, **how)
    for lost in losses:
        lose_and_bring_back(run, *lost)
    run.wait_until_shown(4 * ranks * regions)
    for region in range(regions):
        run.kill(region)
    landings = {
        event["step"]: set(event["members"])
        for region in range(regions)
        for event in events(tmp_path, region, "land")
    }
    batch = 4 * ranks * regions
    trained, landed, shares, drawn = list[int](), Counter[int](), dict[tuple[int, int], int](), Counter[int]()
    for region in range(regions):
        for line in (tmp_path / f"samples-{region}.txt").read_text().splitlines():
            step, first, own, stride, index = map(int, line.split())
            end = -(-step // interval) * interval
            if first < 0:
                drawn[region, end] += 1
                continue
            assert stride == batch
            number = first + (index - first) % rows
            trained.append(number)
            if region in landings.get(end, ()):
                landed[number] += 1
                shares[region, end] = own
    assert len(trained) == len(set(trained))
    assert set(landed.values()) == {1}
    num_lost, last = 0, max(landings)
    missing = set(range(last * batch)) - set(landed)
    for end, members in landings.items():
        lost = landings.get(end - interval, set(range(regions))) - members
        num_lost += len(lost)
        share = sum(own for (_, each), own in shares.items() if each == end)
        unread = sum((end - interval) * batch <= number < end * batch for number in missing)
        assert unread == interval * (batch - share)
        assert bool(lost) == bool(unread), (end, members)
    assert num_lost >= sum(map(len, losses))
    assert {end for _, end in drawn} <= {*landings, last + interval}
    passes = last * batch // rows
    assert passes >= 3
    for number in range(passes):
        read = {each % rows for each in landed if each // rows == number}
        assert len(read) == rows - sum(each // rows == number for each in missing)
    deals = [event["samples"] for region in range(regions) for event in events(tmp_path, region, "deal")]
    assert all(sum(each.values()) == batch for each in deals)
    assert len({tuple(each) for each in deals}) > len(losses)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("has_trainer", "is_sharded"), [(False, False), (True, True)], ids=["loop-ddp", "trainer-fsdp2"]
)
def test_ranks_of_a_region_share_what_it_is_dealt(
    has_trainer: bool, is_sharded: bool, tmp_path: Path
) -> None:
    """Two regions of two ranks, one much faster: every sample is trained once."""
    how = {"has_trainer": has_trainer, "is_sharded": is_sharded}
    run = Run(tmp_path, 2, dealt, 16, 4000, (8.0, 0.25), 1, ranks=2, **how)
    for region in range(2):
        for process in run._ranks[region]:
            process.join(TIMEOUT_S)
            assert process.exitcode == 0, run.log(region).read_text()[-6000:]
    check_shards(run, [torch.load(tmp_path / "region-0.pt")])
    deals = [event["samples"] for event in events(tmp_path, 0, "deal")]
    assert deals, "speeds are far enough apart on any machine"
    assert all(sum(each.values()) == 16 for each in deals)
    lines = [path.read_text().splitlines() for path in tmp_path.glob("samples-*.txt")]
    trained = sorted(int(number) for each in lines for line in each for number in line.split()[4:])
    assert trained == list(range(16 * 16))
