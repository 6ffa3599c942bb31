"""How a plain loop ends: complete, stopped and known to be so, or with an error; never as if it were well."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor

from hf_cocodc import OuterConfig, OuterOptimizer
from hf_cocodc.errors import InputError, RunLeft, RunStopped
from hf_cocodc.link.base import Link
from hf_cocodc.link.lockstep import loopback, run_in_lockstep
from hf_cocodc.run import inner_optimizer, outer_optimizer
from tests.toys import batch, llama, params_of

CONFIG = OuterConfig(sync_interval=2, outer_lr=0.7, outer_momentum=0.0)
Then = Callable[[Accelerator, OuterOptimizer], object]


def documented(link: Link, steps: int, then: Then, ends: Then, max_steps: int | None = None) -> Tensor:
    """The loop of the documentation; `then` comes after each inner step, `ends` after the loop, inside the block."""
    accelerator, model = Accelerator(cpu=True), llama(layers=1)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    with OuterOptimizer(accelerator, model, optimizer, CONFIG, max_steps=max_steps, link=link) as outer:
        for step in range(steps):
            tokens = batch(link.region, step)
            accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
            optimizer.step()
            optimizer.zero_grad()
            outer.step()
            then(accelerator, outer)
            if outer.should_stop:
                break
        ends(accelerator, outer)
    assert not accelerator._save_model_state_pre_hook
    return params_of(model)


def nothing(accelerator: Accelerator, outer: OuterOptimizer) -> None:
    pass


def interrupted(accelerator: Accelerator, outer: OuterOptimizer) -> None:
    if outer.link.region == 1 and outer.inner_step == 3:
        outer.ask_to_stop("SIGTERM")


def both(**more: Any) -> list[Tensor]:
    return run_in_lockstep(2, lambda region, link: documented(link, 9, interrupted, **more))


def test_a_loop_that_does_not_notice_that_it_was_stopped_raises() -> None:
    """Region 1 is interrupted, all stop, and nothing was saved: no script may go on as if the run were complete."""
    with pytest.raises(
        RunStopped, match=r"stopped at step 4: region 1 was .*saved no checkpoint of this step"
    ):
        both(ends=nothing)


def test_a_loop_that_has_read_the_verdict_ends_as_it_chooses() -> None:
    verdicts = []
    both(ends=lambda accelerator, outer: verdicts.append(outer.verdict))
    assert verdicts == ["stop", "stop"]


@pytest.mark.parametrize("at", [4, 3])
def test_a_loop_that_has_saved_where_it_stopped_has_lost_nothing(at: int, tmp_path: Path) -> None:
    def saves(accelerator: Accelerator, outer: OuterOptimizer) -> None:
        interrupted(accelerator, outer)
        if outer.inner_step == at:
            accelerator.save_state(str(tmp_path / str(outer.link.region)))

    def live(region: int, link: Link) -> None:
        documented(link, 9, saves, nothing)

    if at == 4:
        run_in_lockstep(2, live)
        return
    with pytest.raises(RunStopped, match="saved no checkpoint of this step"):
        run_in_lockstep(2, live)


def test_a_region_that_ends_first_hears_while_it_coasts_that_all_stop() -> None:
    """It has no more data, and learns only in `finish` that the other was interrupted."""

    def live(region: int, link: Link) -> None:
        documented(link, 9 if region else 3, interrupted, nothing)

    with pytest.raises(RunStopped, match="region 1 was interrupted"):
        run_in_lockstep(2, live)


def test_a_region_that_has_left_does_not_end_as_if_the_run_were_complete() -> None:
    def leaves(accelerator: Accelerator, outer: OuterOptimizer) -> None:
        outer.training.endings.end("leave", "SIGTERM")

    with pytest.raises(RunLeft, match=r"has left the run at step 1: SIGTERM\. The others train on"):
        documented(loopback(), 9, leaves, nothing)


def test_a_loop_of_max_steps_ends_there() -> None:
    """However long it would go on, and though one region looks at nothing else than `should_stop`."""
    ended = []

    def counts(accelerator: Accelerator, outer: OuterOptimizer) -> None:
        ended.append((outer.inner_step, outer.should_stop))

    def live(region: int, link: Link) -> Tensor:
        return documented(link, 9 if region else 7, nothing, counts, max_steps=5)

    first, second = run_in_lockstep(2, live)
    assert ended == [(5, True), (5, True)]
    assert torch.equal(first, second)


def test_a_step_after_max_steps_is_refused() -> None:
    def goes_on(accelerator: Accelerator, outer: OuterOptimizer) -> None:
        outer.step()

    with pytest.raises(InputError, match=r"ended at step 5 \(max_steps=5\)\. Leave the loop when"):
        documented(loopback(), 9, nothing, goes_on, max_steps=5)


@pytest.mark.parametrize("max_steps", [0, -1, 2.5, "8", True])
def test_a_length_that_is_none_is_refused(max_steps: Any) -> None:
    with pytest.raises(InputError, match=r"max_steps=.* must be (a whole number|at least 1)"):
        documented(loopback(), 9, nothing, nothing, max_steps=max_steps)


def loop(optimizers: Callable[[Any], list[Any]], body: Callable[..., object], **more: Any) -> None:
    """A loop of one region whose `body` gets the outer optimizer, the accelerator, and a function that makes gradients."""
    accelerator, model = Accelerator(cpu=True, **more), llama(layers=1)
    made = [accelerator.prepare(each) for each in optimizers(model)]

    def gradients(step: int = 0) -> None:
        tokens = batch(0, step)
        accelerator.backward(model(input_ids=tokens, labels=tokens).loss)

    with OuterOptimizer(accelerator, model, made, CONFIG, link=loopback()) as outer:
        body(outer, accelerator, gradients, made, model)


def adamw(model: Any) -> list[Any]:
    return [torch.optim.AdamW(model.parameters(), lr=1e-3)]


class Derived(torch.optim.AdamW):
    """Its step calls that of its class, for which PyTorch calls the hooks once more."""

    def step(self, closure: Any = None) -> None:
        super().step()


def halves(model: Any) -> list[Any]:
    params = list(model.parameters())
    return [torch.optim.SGD(params[:4], lr=1e-3), torch.optim.AdamW(params[4:], lr=1e-3)]


@pytest.mark.parametrize("steps", [1, 6])
@pytest.mark.parametrize("optimizers", [adamw, halves])
def test_a_forgotten_outer_step_is_an_error_that_names_the_line(steps: int, optimizers: Any) -> None:
    """`finish` would put the untrained global weights back."""

    def body(outer: Any, accelerator: Any, gradients: Any, made: list[Any], model: Any) -> None:
        for _ in range(steps):
            gradients()
            for each in made:
                each.step()

    with pytest.raises(
        InputError, match=r"AdamW has made .* Add the line `outer.step\(\)` behind `optimizer"
    ):
        loop(optimizers, body)


def test_a_checkpoint_in_the_middle_of_an_inner_step_is_refused(tmp_path: Path) -> None:
    """Its weights would be one step ahead of the number that it says, and a resumed run would make one step more."""

    def body(outer: Any, accelerator: Any, gradients: Any, made: list[Any], model: Any) -> None:
        for step in range(4):
            gradients()
            made[0].step()
            if step == 2:
                accelerator.save_state(str(tmp_path / "saved"))
            outer.step()

    with pytest.raises(InputError, match=r"in the middle of inner step 3.*Call `outer\.step\(\)` before"):
        loop(adamw, body)
    assert not (tmp_path / "saved").exists()


def test_an_outer_step_for_every_second_step_is_refused() -> None:
    def body(outer: Any, accelerator: Any, gradients: Any, made: list[Any], model: Any) -> None:
        for step in range(4):
            gradients()
            made[0].step()
            if step % 2:
                outer.step()

    with pytest.raises(InputError, match="AdamW has made 2 steps without a call of `outer"):
        loop(adamw, body)


def test_accumulated_gradients_and_optimizers_in_turns_are_no_forgotten_steps() -> None:
    """Nor is a last step behind which the loop breaks, before `outer.step()`."""

    def accumulates(outer: Any, accelerator: Any, gradients: Any, made: list[Any], model: Any) -> None:
        for step in range(8):
            with accelerator.accumulate(model):
                gradients(step)
                made[0].step()
                made[0].zero_grad()
                outer.step()
        assert outer.inner_step == 2

    loop(adamw, accumulates, gradient_accumulation_steps=4)

    def in_turns(outer: Any, accelerator: Any, gradients: Any, made: list[Any], model: Any) -> None:
        for step in range(4):
            for each in (made[0], made[0], made[0], made[1]):
                gradients(step)
                each.step()
            outer.step()
        gradients()
        made[1].step()

    loop(halves, in_turns)

    def derived(outer: Any, accelerator: Any, gradients: Any, made: list[Any], model: Any) -> None:
        for step in range(4):
            gradients(step)
            made[0].step()
            outer.step()

    torch.optim.AdamW([torch.zeros(1)])  # the first of its class lets PyTorch wrap its step
    loop(lambda model: [Derived(model.parameters())], derived)


def test_steps_that_a_graph_captures_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture runs PyTorch's hooks and no step, a replay makes a step and runs no hooks."""
    capturing = [False]
    for module in (inner_optimizer, outer_optimizer):
        monkeypatch.setattr(module, "is_capturing", lambda: capturing[0])

    def capture(made: list[Any]) -> None:
        capturing[0] = True
        made[0].step()  # without gradients it changes nothing
        capturing[0] = False

    def replay(model: Any) -> None:
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(0.99)

    def replays(outer: Any, accelerator: Any, gradients: Any, made: list[Any], model: Any) -> None:
        for _ in range(3):  # one for each shape of a batch
            capture(made)
        for _ in range(4):
            replay(model)
            outer.step()
        capturing[0] = True
        try:
            with pytest.raises(InputError, match=r"Call outer.step\(\) after each graph.replay\(\)"):
                outer.step()
        finally:
            capturing[0] = False
        assert outer.inner_step == 4

    loop(adamw, replays)

    def forgets(outer: Any, accelerator: Any, gradients: Any, made: list[Any], model: Any) -> None:
        capture(made)
        replay(model)

    with pytest.raises(InputError, match=r"AdamW trains have changed, and nobody has .* after each replay"):
        loop(adamw, forgets)

    # nothing was to be done: the run was resumed at its end
    loop(adamw, lambda outer, accelerator, gradients, made, model: capture(made))
