"""What a region does for callers that pull its model, without a network."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from torch import nn

from hf_cocodc.coordinator.messages import Given, Refuse
from hf_cocodc.errors import InputError
from hf_cocodc.run import giving
from hf_cocodc.run.giving import Giving

Answers = list[tuple[tuple[str, ...], Given | Refuse]]


class OneRank:
    """A rank that trains, alone in its region, as far as `Giving` sees it. `pulls`: callers that wait."""

    def __init__(
        self, num_processes: int = 1, has_stages: bool = False, error: Exception | None = None
    ) -> None:
        self.has_stages, self.inner_step, self.model, self.saved = has_stages, 7, nn.Linear(8, 8), 0
        self.journal_lines: list[str] = []
        self.error = error
        context = SimpleNamespace(region=0, name="run", terms=SimpleNamespace(grace_s=None))
        self.session: Any = SimpleNamespace(pulls=(), context=context)
        self.accelerator = SimpleNamespace(num_processes=num_processes, is_main_process=True)
        self.engine = SimpleNamespace(totals=SimpleNamespace(landings=2), facts=[None])
        self.link = SimpleNamespace(region=0, members=(0, 1))
        self.loop = SimpleNamespace(save_model=self._save)
        self.journal = SimpleNamespace(write=lambda kind, **facts: self.journal_lines.append(kind))

    def timer(self) -> Any:
        return dict

    def say(self, call: Any, what: str) -> Any:
        return call(self.session)

    def _save(self, folder: Path, model: Any) -> None:
        self.saved += 1
        if self.error is not None:
            raise self.error
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Answers:
    """What is sent, and to whom."""
    sent: Answers = []
    monkeypatch.setattr(giving, "main_says", lambda link, accelerator, find, what: True)
    monkeypatch.setattr(
        Giving, "_start", lambda self, session, names, folder, answer: sent.append((tuple(names), answer))
    )
    return sent


@contextlib.contextmanager
def shown(everywhere: bool = True) -> Iterator[None]:
    """The model holds the global weights: in the leader, which is enough."""
    assert not everywhere
    yield


def made(rank: OneRank, home: Path) -> Giving:
    return Giving(cast(Any, rank), cast(Any, shown), home, "here")


def test_all_that_wait_get_one_copy_and_later_ones_wait_their_turn(
    answers: Answers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A region saves for 5 % of its time at most, however often it is asked."""
    rank, now = OneRank(), [100.0]
    monkeypatch.setattr(giving.time, "monotonic", lambda: now[0])
    save = rank.loop.save_model

    def take_two_seconds(*given: Any) -> None:
        save(*given)
        now[0] += 2.0

    rank.loop.save_model = take_two_seconds
    part = made(rank, tmp_path)
    part.after_step()
    assert not rank.saved
    rank.session.pulls = ("a", "b")
    for _ in range(3):
        part.after_step()
    assert rank.saved == 1
    rank.session.pulls = ("b", "c")
    now[0] += 37.9
    part.after_step()
    assert rank.saved == 1
    now[0] += 0.2
    part.after_step()
    assert [names for names, _ in answers] == [("a", "b"), ("c",)]
    assert rank.journal_lines == ["pull", "pull"]
    first = answers[0][1]
    assert first == Given(
        run="run",
        region=0,
        step=7,
        landings=2,
        fragments=1,
        regions=(0, 1),
        place="here",
        files={"config.json": 2},
    )


def test_ranks_that_speak_at_landings_give_the_model_then(answers: Answers, tmp_path: Path) -> None:
    rank = OneRank(num_processes=2)
    part = made(rank, tmp_path)
    part.after_step()
    rank.session.pulls = ("a",)
    part.after_step()
    assert not answers
    rank.engine.totals.landings += 1
    part.after_step()
    assert [names for names, _ in answers] == [("a",)]


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (OSError(28, "No space left on device"), "No space left"),
        (InputError("it has no save_pretrained."), "it has no"),
    ],
)
def test_a_model_that_cannot_be_saved_is_refused_and_training_goes_on(
    error: Exception, why: str, answers: Answers, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rank = OneRank(error=error)
    rank.session.pulls = ("a",)
    with caplog.at_level(logging.WARNING):
        made(rank, tmp_path).after_step()
    [(names, answer)] = answers
    assert (
        isinstance(answer, Refuse) and "region 0 cannot give its model: " in answer.why and why in answer.why
    )
    assert names == ("a",) and why in caplog.text


def test_a_pipeline_stage_refuses(answers: Answers, tmp_path: Path) -> None:
    rank = OneRank(has_stages=True)
    part = made(rank, tmp_path)
    rank.session.pulls = ("a",)
    for _ in range(2):
        part.after_step()
    [(names, answer)] = answers
    assert isinstance(answer, Refuse) and "pipeline stages" in answer.why and names == ("a",)
    assert not rank.saved


def test_a_region_that_would_be_left_behind_meanwhile_refuses(
    answers: Answers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `regions.grace_s`; the time to save is that of a slow disk. A model of 288 bytes may go."""
    rank = OneRank()
    part = made(rank, tmp_path)
    rank.session.context.terms.grace_s = 2.0
    rank.session.pulls = ("a",)
    part.after_step()
    assert rank.saved == 1
    monkeypatch.setattr(giving, "_SLOWEST_DISK", 100.0)
    part = made(rank, tmp_path / "other")
    for _ in range(2):
        part.after_step()
    assert rank.saved == 1
    (_, answer) = answers[-1]
    assert len(answers) == 2 and isinstance(answer, Refuse)
    assert "it may take 3 s" in answer.why and "late for 2 s (regions.grace_s)" in answer.why


def test_an_error_at_the_end_of_what_is_shown_ends_the_run(answers: Answers, tmp_path: Path) -> None:
    """The local weights would be lost, and training would go on with others."""

    @contextlib.contextmanager
    def broken(everywhere: bool = True) -> Iterator[None]:
        yield
        raise RuntimeError("the device is lost")

    rank = OneRank()
    rank.session.pulls = ("a",)
    part = Giving(cast(Any, rank), cast(Any, broken), tmp_path, "here")
    with pytest.raises(RuntimeError, match="the device is lost"):
        part.after_step()


def test_copies_that_a_killed_process_has_left_are_removed(answers: Answers, tmp_path: Path) -> None:
    for name in ("pulled-0-3", "pulled-1-1"):
        (tmp_path / name).mkdir()
    rank = OneRank()
    rank.session.pulls = ("a",)
    made(rank, tmp_path).after_step()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pulled-0-1", "pulled-1-1"]
