"""Numbers that go wrong in one region: what the others see, and what it costs them. Real processes over real sockets."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_cocodc.coordinator.server import serve_in_thread
from hf_cocodc.link.lockstep import run_in_lockstep
from hf_cocodc.net.keys import Keys
from hf_cocodc.run.journal import read
from tests.processes.coming_worker import HURRY, events
from tests.processes.forks import TIMEOUT_S, fork, region_env, wait_until
from tests.processes.numbers_worker import BAD_STEP, STEPS, live
from tests.secret import secret

SECRET = secret()
STREAMING = {"method": "streaming", "num_fragments": 2, "overlap_steps": 2, "sync_interval": 5}
STREAMING |= {"outer_lr": 1.0, "mixing_alpha": 0.0}
SEEN = {
    "nan": ("sit_out", 1, "region 1 sat out fragment 0 sent at step 55"),
    "inf": ("sit_out", 1, "region 1 sat out fragment 0 sent at step 55"),
    "gradient": (
        "guard",
        0,
        "outer.guard has dropped the outer gradient of region 1 for fragment 0 sent at step 55",
    ),
    "weight": ("", 0, "region 1 sent the weight 1e+06 with fragment 0 of step 55"),
    "range": ("void", 0, "sent at step 55 is not finite, or far larger than what the regions sent"),
    "value": ("", 0, "the global params of fragment 0 differ between regions: all regions take region 0's"),
}
"""The kind of event, in whose journal, and words in the log of region 0."""


class Found:
    """What the regions of a run have left: exit codes, logs, journals, and what they have at the end."""

    def __init__(self, folder: Path, exit_codes: list[int | None]) -> None:
        self._folder, self.exit_codes = folder, exit_codes

    def log(self, region: int) -> str:
        return (self._folder / f"log-{region}.txt").read_text(errors="replace")

    def kinds(self, region: int) -> list[str]:
        return [event["kind"] for event in self.events(region)]

    def events(self, region: int, kind: str | None = None) -> list[dict[str, Any]]:
        found = read(self._folder / f"region-{region}.jsonl")
        return [event for event in found if kind in (None, event["kind"])]

    def ends(self) -> list[dict[str, Any]]:
        return [torch.load(self._folder / f"region-{r}.pt") for r in range(len(self.exit_codes))]


def trained(
    folder: Path, fault: str | None, count: int, seals: bool = False, num_epochs: int = 0, **changes: Any
) -> Found:
    """A run of so many regions, in which region 1 suffers a fault; they hurry once they have seen so many epochs."""
    coordinator = serve_in_thread(secrets=[Keys.from_secret(SECRET)] if seals else [])
    env = {"HF_COCODC_SECRET": SECRET} if seals else {}
    body = functools.partial(live, **changes)
    processes = [
        fork(
            body, str(folder), fault, log=folder / f"log-{r}.txt", **region_env(coordinator, r, count), **env
        )
        for r in range(count)
    ]
    wait_until(lambda: len(events(folder, 0, "epoch")) >= num_epochs, processes[0], folder / "log-0.txt")
    (folder / HURRY).touch()
    for process in processes:
        process.join(TIMEOUT_S)
    return Found(folder, [process.exitcode for process in processes])


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What regions come to in which nothing goes wrong: by their number, and by the settings of the outer optimizer."""
    kept: dict[Any, dict[str, Any]] = {}

    def found(count: int, **outer: Any) -> dict[str, Any]:
        key = (count, *outer.items())
        if key not in kept:
            home = str(tmp_path_factory.mktemp("undisturbed"))
            kept[key] = run_in_lockstep(count, lambda region, link: live(home, link=link, outer=outer))[0]
        return kept[key]

    return found


@pytest.mark.parametrize(
    ("fault", "count", "outer", "within"),
    [
        ("gradient", 2, {}, 0.01),
        pytest.param("gradient", 3, STREAMING, 0.05, marks=pytest.mark.slow),
        pytest.param("nan", 3, {}, 0.01, marks=pytest.mark.slow),
        pytest.param("inf", 2, STREAMING, 0.03, marks=pytest.mark.slow),
        pytest.param("weight", 2, {}, 0.0, marks=pytest.mark.slow),
        pytest.param("range", 3, {}, 0.01, marks=pytest.mark.slow),
        pytest.param("range", 2, {"digest_interval": 1}, 0.01, marks=pytest.mark.slow),
        pytest.param("value", 2, {"digest_interval": 1}, 0.01, marks=pytest.mark.slow),
    ],
)
def test_the_others_train_on(
    fault: str, count: int, outer: dict[str, Any], within: float, undisturbed: Any, tmp_path: Path
) -> None:
    """They say what they saw, end with exit code 0 and equal weights, and their loss is that of a run without it.

    A region that sits out trains nothing for three rounds, of which the loss of two regions tells.
    """
    found = trained(tmp_path, fault, count, outer=outer)
    assert found.exit_codes == [0] * count, found.log(0)[-3000:]
    [alone, ends] = undisturbed(count, **outer), found.ends()
    kind, of, words = SEEN[fault]
    assert words in found.log(0)
    seen = [event for event in found.events(of) if event["kind"] == kind]
    if kind:
        assert [event.get("sent_at", event["step"]) for event in seen][0] == BAD_STEP
    for end in ends:
        assert end["step"] == STEPS
        assert torch.equal(end["weights"], ends[0]["weights"])
        assert abs(end["loss"] / alone["loss"] - 1) <= within
    assert torch.equal(ends[0]["weights"], alone["weights"]) == (not within)


def test_altered_bits_of_what_is_encrypted_come_again(undisturbed: Any, tmp_path: Path) -> None:
    """They cost a socket: no region, and no bit."""
    found = trained(tmp_path, "sealed", 2, seals=True)
    assert found.exit_codes == [0, 0], found.log(0)[-3000:]
    assert "altered on its way" in found.log(0) + found.log(1)
    for end in found.ends():
        assert torch.equal(end["weights"], undisturbed(2)["weights"])
