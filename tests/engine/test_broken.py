"""An error in the middle of a landing or of a send: what the region holds then is not shown, trained or saved."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_cocodc.engine import fragment, synchronizer
from hf_cocodc.engine.synchronizer import Synchronizer
from hf_cocodc.errors import CocodcError, HandshakeError, LinkError
from hf_cocodc.link.base import Awaited
from hf_cocodc.link.lockstep import loopback
from hf_cocodc.methods import METHODS
from hf_cocodc.parts.tensors import slices
from tests.engine.test_landings import START, method_of, train
from tests.toys import Blocks, params_of

SAVED_AT, LAST = 7, 30


class Runs:
    """A region alone."""

    def __init__(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(slices, "ON_HOST", 8)
        self.model = Blocks(START)
        self.sync = Synchronizer(self.model, method_of(name), loopback())
        self._patch = monkeypatch

    def to(self, step: int) -> None:
        while self.sync.inner_step < step:
            train(self.model, 0, self.sync.inner_step + 1)
            self.sync.step(0.05)

    @contextmanager
    def hurt(self, name: str, at: int, error: BaseException) -> Iterator[None]:
        """Let a method of the local params raise the error at its call `at`."""
        sound, calls = getattr(fragment.LocalParams, name), []

        def hurt(*args: Any, **named: Any) -> Any:
            calls.append(name)
            if len(calls) == at:
                raise error
            return sound(*args, **named)

        with self._patch.context() as patch:
            patch.setattr(fragment.LocalParams, name, hurt)
            yield

    def values(self) -> list[Tensor]:
        return [params_of(self.model), *(each.global_params.clone() for each in self.sync.fragments)]


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("out of memory"), KeyboardInterrupt()])
@pytest.mark.parametrize("name", METHODS)
def test_half_a_landing_is_remembered(
    name: str, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing goes on from it but a state that was saved before."""
    expected = Runs(name, monkeypatch)
    expected.to(LAST)
    region = Runs(name, monkeypatch)
    region.to(SAVED_AT)
    kept = copy.deepcopy(region.sync.state_dict()), [each.clone() for each in region.model.parameters()]
    with region.hurt("write", 2, error), pytest.raises(type(error)):
        region.to(LAST)
    step = region.sync.inner_step
    words = (
        rf"a landing of fragment \d at step {step} failed halfway: {type(error).__name__}.*last checkpoint"
    )
    calls: list[Callable[[], Any]] = [
        region.sync.state_dict,
        region.sync.step,
        region.sync.finish,
        region.sync.global_weights().__enter__,
        region.sync.begin_anew,
    ]
    for call in calls:
        with pytest.raises(CocodcError, match=words):
            call()
    assert region.sync.inner_step == step
    with torch.no_grad():
        for param, saved in zip(region.model.parameters(), kept[1], strict=True):
            param.copy_(saved)
    region.sync.load_state_dict(kept[0])
    region.to(LAST)
    for ours, theirs in zip(region.values(), expected.values(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_send_that_failed_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The schedule counts it as made."""
    region = Runs("diloco", monkeypatch)
    error = torch.OutOfMemoryError("out of memory")
    with region.hurt("read", 2, error), pytest.raises(torch.OutOfMemoryError):
        region.to(LAST)
    words = f"a send of fragment 0 at step {region.sync.inner_step} failed halfway: OutOfMemoryError: out of memory"
    with pytest.raises(CocodcError, match=re.escape(words)):
        region.sync.state_dict()


def test_events_after_one_that_failed_are_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """The landing is whole, but the schedule has counted what was to follow."""

    region = Runs("streaming", monkeypatch)
    region.to(SAVED_AT)

    def record(kind: str, **facts: Any) -> None:
        if kind == "land":
            raise OSError("no space left on the disk")

    monkeypatch.setattr(region.sync.account, "_record", record)
    with pytest.raises(OSError, match="no space left"):
        region.to(LAST)
    words = (
        f"what was due at step {region.sync.inner_step} failed halfway: OSError: no space left on the disk"
    )
    with pytest.raises(CocodcError, match=words):
        region.sync.state_dict()


def test_a_run_that_has_failed_at_its_end_is_not_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    """All has landed, and the schedule counts transfers in flight."""
    runs = Runs("streaming", monkeypatch)
    runs.to(SAVED_AT)

    def differ(*_: Any) -> None:
        raise HandshakeError("the regions hold different models")

    with runs._patch.context() as patch:
        patch.setattr(synchronizer, "check_same_end", differ)
        with pytest.raises(HandshakeError):
            runs.sync.finish()
    with pytest.raises(CocodcError, match="the end of the run at step 7 failed halfway: HandshakeError"):
        runs.sync.state_dict()


def test_a_landing_out_of_step_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The link is well and the mean is here, but the schedule counts a landing that was not made: a state saved now would have
    one transfer too many."""
    region = Runs("streaming", monkeypatch)
    region.to(SAVED_AT)
    [transfer] = [each for fragment in region.sync.fragments for each in fragment.in_flight]
    arrival = transfer.handle.wait()
    trailers = tuple(each._replace(inner_step=each.inner_step + 1) for each in arrival.trailers)
    transfer.handle = Awaited(lambda: arrival._replace(trailers=trailers))
    with pytest.raises(
        LinkError, match="regions are out of step: .* with eager updates the same evaluations"
    ):
        region.to(LAST)
    words = rf"a landing of fragment \d at step {region.sync.inner_step} failed halfway: LinkError: regions are out of step"
    with pytest.raises(CocodcError, match=words):
        region.sync.state_dict()
