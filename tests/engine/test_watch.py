"""Parameters that are replaced, frozen, unfrozen or added while a run goes on: regions follow, or stop."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_cocodc.engine.synchronizer import Synchronizer
from hf_cocodc.errors import CheckpointError, InputError
from hf_cocodc.link.base import Link
from hf_cocodc.link.lockstep import run_in_lockstep
from hf_cocodc.link.records import Ending, Word
from hf_cocodc.methods import METHODS
from hf_cocodc.resolve import from_config
from hf_cocodc.settings import OuterConfig
from tests.methods import small
from tests.processes.test_link import run_over_tcp
from tests.toys import Blocks

SETTINGS = small(
    {
        "diloco": {"codec": "int8", "error_feedback": True},
        "streaming": {"num_fragments": 2, "overlap_steps": 3},
        "eager": {"num_fragments": 2, "fragment_pattern": "strided"},
        "co2": {"outer_momentum": 0.3},
        "dilocox": {"rank": 2},
        "cocodc": {"num_fragments": 2, "overlap_steps": 3, "sends_per_interval": 4},
    }
)
START = [
    torch.linspace(-1, 1, 24).view(4, 6),
    torch.linspace(0, 1, 12).view(3, 4),
    torch.linspace(-2, 0, 7),
    torch.linspace(1, 2, 6).view(2, 3),
]
EMBEDDING = torch.linspace(-2, 2, 48).view(16, 3)
STEPS = 31
Change = Callable[[nn.Module, int, int], None]
"""(model, region, inner step) -> what the user's code does before the inner step."""


def method_of(name: str) -> Any:
    return from_config(OuterConfig(method=name, sync_interval=6, **SETTINGS[name]))


def train(model: nn.Module, index: int, step: int) -> None:
    """One inner step, of the parameters that are trainable now."""
    for seed, (_, param) in enumerate(sorted(model.named_parameters())):
        if param.requires_grad:
            generator = torch.Generator().manual_seed(1000 * index + 10 * step + seed)
            with torch.no_grad():
                param.copy_(param - 0.05 * (param + torch.randn(param.shape, generator=generator)))


def frozen(*trainable: int) -> Blocks:
    """Four blocks of which these are trainable, and an embedding, which CoCoDC splits by rows."""
    model = Blocks(START)
    for index, param in enumerate(model.parameters()):
        param.requires_grad_(index in trainable)
    model.rest = nn.ParameterList([EMBEDDING.clone()])
    return model


class Regions:
    """Two regions that train while `change` does what a user's code does."""

    def __init__(
        self, name: str, change: Change, build: Callable[[], nn.Module] = lambda: frozen(0, 1, 2, 3)
    ) -> None:
        self.name, self.change, self.build = name, change, build
        self.events: list[list[dict[str, Any]]] = [[], []]

    def run(self) -> list[dict[str, Tensor]]:
        """The parameters of each region at the end."""
        return run_in_lockstep(2, self._live)

    def _live(self, index: int, link: Link) -> dict[str, Tensor]:
        model = self.build()
        synchronizer = Synchronizer(
            model, method_of(self.name), link, digest_interval=2, record=self.record(index)
        )
        for step in range(1, STEPS + 1):
            self.step(model, synchronizer, index, step)
        synchronizer.finish()
        return {name: param.detach().clone() for name, param in model.named_parameters()}

    def step(self, model: nn.Module, synchronizer: Synchronizer, index: int, step: int) -> None:
        self.change(model, index, step)
        train(model, index, step)
        synchronizer.step(0.05)

    def record(self, index: int) -> Callable[..., None]:
        return lambda kind, **facts: self.events[index].append({"kind": kind, **facts})


def nothing(model: nn.Module, index: int, step: int) -> None:
    """A user's code that changes no parameter."""


def same(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert mine.keys() == theirs.keys()
    for name in mine:
        assert torch.equal(mine[name], theirs[name]), name


@pytest.mark.parametrize("at", [8, 12])
@pytest.mark.parametrize("name", SETTINGS)
def test_replaced_memory_changes_no_number(name: str, at: int) -> None:
    """`p.data = ...` and a module of equal shape in the place of another, also while a transfer is in flight."""

    def replace(model: nn.Module, index: int, step: int) -> None:
        if step == at:
            for param in model.parameters():
                param.data = param.data.clone()
            first = model.get_submodule("layers.0")
            model.layers[0] = nn.ParameterList([nn.Parameter(first[0].detach().clone())])

    mine, theirs = Regions(name, replace).run()
    same(mine, theirs)
    same(mine, Regions(name, nothing).run()[0])


def unfreeze(*at: tuple[int, int]) -> Change:
    """Unfreezes blocks: (inner step, block)."""

    def change(model: nn.Module, index: int, step: int) -> None:
        for when, block in at:
            if step == when:
                list(model.parameters())[block].requires_grad_(True)

    return change


def switch(every: int) -> Change:
    """LISA: another block is trainable every few inner steps, and all others are frozen."""

    def change(model: nn.Module, index: int, step: int) -> None:
        for block, param in enumerate(model.get_submodule("layers").parameters()):
            param.requires_grad_(block == step // every % 4)

    return change


@pytest.mark.parametrize("every", [7, 2])
@pytest.mark.parametrize("name", SETTINGS)
def test_what_is_frozen_stays_synchronized(name: str, every: int) -> None:
    """LISA, in a model that is trainable when the run begins: also a block that is trained between two sends alone."""
    mine, theirs = Regions(name, switch(every)).run()
    same(mine, theirs)
    for param, start in zip(mine.values(), [*START, EMBEDDING], strict=True):
        assert not torch.equal(param, start)


@pytest.mark.parametrize("every", [7, 2])
@pytest.mark.parametrize("name", SETTINGS)
def test_a_resume_goes_on_with_what_is_frozen(name: str, every: int) -> None:
    """Saved at any step, in a model where other parameters are frozen: the same numbers, to the bit."""
    regions = Regions(name, switch(every))

    def live(index: int, link: Link) -> None:
        model = regions.build()
        synchronizer = Synchronizer(model, method_of(name), link, digest_interval=2)
        kept = []
        for step in range(1, STEPS + 1):
            regions.step(model, synchronizer, index, step)
            shown = {key: param.detach().clone() for key, param in model.named_parameters()}
            kept.append((shown, copy.deepcopy(synchronizer.state_dict())))
        for saved_at in (5, 9, 13, 15, 17, 23):
            resumed = frozen(0, 3)
            shown, state = kept[saved_at - 1]
            resumed.load_state_dict(shown)
            again = Synchronizer(resumed, method_of(name), link, digest_interval=2, state=state)
            for step in range(saved_at + 1, STEPS + 1):
                regions.step(resumed, again, index, step)
                for key, param in resumed.named_parameters():
                    assert torch.equal(param, kept[step - 1][0][key]), (saved_at, step, key)

    run_in_lockstep(2, live)


class Growing(nn.Module):
    """A model that gets an adapter later."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.ParameterList([START[0].clone()])


def add(model: nn.Module, index: int, step: int) -> None:
    """Add an adapter."""
    if step == 8:
        model.adapter = nn.Parameter(torch.ones(5))


@pytest.mark.parametrize("name", ["diloco", "streaming"])
def test_a_frozen_parameter_that_becomes_trainable_is_refused_at_once(name: str) -> None:
    """By its name, with the way out; in the inner step that trained it, before any send."""
    regions = Regions(name, unfreeze((8, 1)), lambda: frozen(0, 3))
    with pytest.raises(
        InputError,
        match=r"layers\.1\.0 \[3, 4\] float32 is trainable now, .*before the run .*learning rate of 0",
    ):
        regions.run()
    assert max(event["step"] for events in regions.events for event in events) < 8


def test_a_parameter_that_is_added_is_refused_at_the_next_event() -> None:
    regions = Regions("diloco", add, Growing)
    with pytest.raises(InputError, match=r"adapter \[5\] float32 is trainable now"):
        regions.run()
    assert [event["step"] for event in regions.events[0] if event["kind"] == "send"] == [6]


@pytest.mark.parametrize("when", ["finish", "evaluation"])
def test_a_parameter_that_is_added_after_the_last_event_is_refused(when: str) -> None:
    def live(index: int, link: Link) -> None:
        model = Growing()
        synchronizer = Synchronizer(model, method_of("diloco"), link)
        add(model, 0, 8)
        call = synchronizer.finish if when == "finish" else synchronizer.global_weights().__enter__
        with pytest.raises(InputError, match=r"adapter \[5\] float32 is trainable now"):
            call()

    run_in_lockstep(2, live)


def test_a_frozen_parameter_may_be_added() -> None:
    """And a trainable one in the memory of another, as the adapters of tied layers are."""

    def grow(model: nn.Module, index: int, step: int) -> None:
        if step == 8:
            model.fixed = nn.Parameter(torch.ones(5), requires_grad=False)
            model.tied = nn.Parameter(model.get_parameter("base.0").data)

    def live(index: int, link: Link) -> Tensor:
        model = Growing()
        synchronizer = Synchronizer(model, method_of("diloco"), link)
        for step in range(1, 14):
            grow(model, index, step)
            with torch.no_grad():
                model.get_parameter("base.0").add_(0.1 * index)
            synchronizer.step(0.05)
        return model.get_parameter("base.0").detach().clone()

    mine, theirs = run_in_lockstep(2, live)
    assert not torch.equal(mine, START[0]) and torch.allclose(mine + 0.1, theirs)


def test_a_region_that_leaves_is_not_refused() -> None:
    """It has ended for a reason of its own, which it must still tell the others."""

    def live(index: int, link: Link) -> None:
        model = frozen(0, 3)
        synchronizer = Synchronizer(model, method_of("diloco"), link)
        for step in range(1, 14):
            leaves = index == 1 and step > 7
            if leaves:
                model.requires_grad_(True)
                synchronizer.give_up_unsent()
            else:
                train(model, index, step)
            word = Word(ending=Ending.INTERRUPTED if leaves else Ending.NO)
            synchronizer.step(0.05, word, trained=not leaves)

    run_in_lockstep(2, live)


def test_what_is_gone_or_has_another_form_stops_the_run() -> None:
    def remove(model: nn.Module, index: int, step: int) -> None:
        if step == 8:
            del model.layers[3]

    def cast(model: nn.Module, index: int, step: int) -> None:
        if step == 8:
            model.bfloat16()

    def tie(model: nn.Module, index: int, step: int) -> None:
        if step == 8:
            model.layers[1][0] = model.layers[0][0]

    def share(model: nn.Module, index: int, step: int) -> None:
        if step == 8:
            model.layers[1][0].data = model.layers[0][0].data

    def overlap(model: nn.Module, index: int, step: int) -> None:
        if step == 8:
            model.layers[1][0].data = model.layers[0][0].data.view(-1)[:12].view(3, 4)

    with pytest.raises(InputError, match=r"layers\.0\.0 .* and layers\.1\.0 .* share a part"):
        Regions("diloco", overlap).run()
    with pytest.raises(
        InputError, match=r"layers\.3\.0 \[2, 3\] float32 is synchronized .* no longer in the model"
    ):
        Regions("diloco", remove).run()
    with pytest.raises(
        InputError, match=r"layers\.0\.0 \[4, 6\] float32 .* is layers\.0\.0 \[4, 6\] bfloat16 now"
    ):
        Regions("diloco", cast).run()
    with pytest.raises(InputError, match=r"layers\.1\.0 \[3, 4\] float32 .* is tied"):
        Regions("diloco", tie).run()
    with pytest.raises(
        InputError, match=r"layers\.1\.0 \[2\] float32 .* is in the memory of layers\.0\.0 now"
    ):
        Regions("diloco", share, lambda: Blocks([torch.zeros(2), torch.ones(2)])).run()


def test_a_checkpoint_with_a_parameter_that_the_model_lacks_is_refused() -> None:
    def live(index: int, link: Link) -> None:
        model = Growing()
        add(model, 0, 8)
        state = Synchronizer(model, method_of("diloco"), link).state_dict()
        with pytest.raises(CheckpointError, match=r"the checkpoint has the parameter .*adapter"):
            Synchronizer(Growing(), method_of("diloco"), link, state=state)

    run_in_lockstep(2, live)


def test_a_resume_with_more_trainable_parameters_is_refused() -> None:
    def live(index: int, link: Link) -> None:
        state = Synchronizer(frozen(0, 3), method_of("diloco"), link).state_dict()
        with pytest.raises(InputError, match=r"layers\.1\.0 .* from the global model of a checkpoint"):
            Synchronizer(frozen(0, 1, 3), method_of("diloco"), link, state=state)

    run_in_lockstep(2, live)


def test_a_state_of_a_version_that_adopted_parameters_is_loaded() -> None:
    """What it had noticed does not count."""

    def live(index: int, link: Link) -> None:
        model = frozen(0, 3)
        state = Synchronizer(model, method_of("diloco"), link).state_dict()
        watch = {"noticed": {"layers.1.0": True}, "proposals": [[7, ["layers.1.0"]]], "added": []}
        again = Synchronizer(model, method_of("diloco"), link, state={**state, "watch": watch})
        assert "layers.1.0" not in {name for each in again.fragments for name in each.fragment.names}

    run_in_lockstep(2, live)


@pytest.mark.parametrize("over", [run_in_lockstep, run_over_tcp])
@pytest.mark.parametrize(
    "name", [name for name in METHODS if "num_fragments" in inspect.signature(METHODS[name]).parameters]
)
def test_a_block_without_values_is_trained_with_the_others(name: str, over: Callable[..., list[Any]]) -> None:
    """Its fragment would have no length to divide by."""

    def live(index: int, link: Link) -> dict[str, Tensor]:
        model = Blocks([START[0], START[1], torch.zeros(0)])
        settings = {**SETTINGS[name], "fragment_pattern": "sequential", "num_fragments": 2}
        synchronizer = Synchronizer(
            model, from_config(OuterConfig(method=name, sync_interval=6, **settings)), link
        )
        for step in range(1, 14):
            train(model, index, step)
            synchronizer.step(0.05)
        synchronizer.finish()
        return {name: param.detach().clone() for name, param in model.named_parameters()}

    mine, theirs = over(2, live)
    same(mine, theirs)
    assert not torch.equal(mine["layers.0.0"], START[0])
