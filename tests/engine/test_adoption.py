"""Parameters that are replaced, become trainable or are added while a run goes on: regions follow together, or stop."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_cocodc.engine.synchronizer import Synchronizer
from hf_cocodc.errors import CheckpointError, HandshakeError, InputError
from hf_cocodc.link.base import Link
from hf_cocodc.link.lockstep import run_in_lockstep
from hf_cocodc.link.records import Ending, Word
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
    settings = {} if name == "plain" else SETTINGS[name]
    return from_config(OuterConfig(method="diloco" if name == "plain" else name, sync_interval=6, **settings))


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

    def run(
        self, steps: int = STEPS, over: Callable[..., list[dict[str, Tensor]]] = run_in_lockstep
    ) -> list[dict[str, Tensor]]:
        """The parameters of each region at the end."""
        return over(2, lambda index, link: self._live(index, link, steps))

    def _live(self, index: int, link: Link, steps: int) -> dict[str, Tensor]:
        model = self.build()
        synchronizer = Synchronizer(
            model, method_of(self.name), link, digest_interval=2, record=self.record(index)
        )
        for step in range(1, steps + 1):
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


CHANGES = {"gradual": unfreeze((8, 1), (16, 2)), "LISA": switch(7), "fast LISA": switch(2)}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", SETTINGS)
def test_regions_adopt_what_becomes_trainable(name: str, change: str) -> None:
    """At one step, in regions that end with equal models; a block that was trained between two sends alone, too."""
    regions = Regions(name, CHANGES[change], lambda: frozen(0, 3))
    mine, theirs = regions.run()
    same(mine, theirs)
    for param, start in zip(mine.values(), [*START, EMBEDDING], strict=True):
        assert not torch.equal(param, start)
    adoptions = [[event for event in events if event["kind"] == "adopt"] for events in regions.events]
    assert adoptions[0] == adoptions[1] and adoptions[0][-1]["num_params"] == 97
    assert {name for event in adoptions[0] for name in event["averaged"]} == {"layers.1.0", "layers.2.0"}


@pytest.mark.parametrize("name", ["diloco", "streaming", "co2"])
def test_an_adoption_has_the_same_numbers_over_tcp(name: str) -> None:
    regions = Regions(name, CHANGES["LISA"], lambda: frozen(0, 3))
    expected = regions.run()
    for found, theirs in zip(regions.run(over=run_over_tcp), expected, strict=True):
        same(found, theirs)


def test_what_was_trained_before_it_is_adopted_counts() -> None:
    """It takes the mean over the regions; the rest goes on with its outer momentum: the numbers of DiLoCo by hand."""
    at = {}

    def note(model: nn.Module, index: int, step: int) -> None:
        unfreeze((8, 1))(model, index, step)
        at[index, step] = [param.detach().clone() for param in model.parameters()]

    Regions("plain", note, lambda: frozen(0, 3)).run(20)
    # just before step 13 the regions have adopted block 1 at the landing of step 12
    trained = []
    for index in (0, 1):
        model = Blocks(START)
        for param, value in zip(model.parameters(), at[index, 12], strict=False):
            param.data.copy_(value)
            param.requires_grad_(True)
        list(model.parameters())[2].requires_grad_(False)
        train(model, index, 12)
        trained.append([param.detach().clone() for param in model.parameters()])
    torch.testing.assert_close(at[0, 13][1], (trained[0][1] + trained[1][1]) / 2, rtol=0, atol=1e-7)
    # block 0: Nesterov from the start, with the momentum of the landing at step 6
    theta, buffer = START[0].clone(), torch.zeros_like(START[0])
    ends = {6: [], 12: [each[0] for each in trained], 18: []}
    for end in (6, 18):
        for index in (0, 1):
            model = Blocks(START)
            for block, (param, value) in enumerate(zip(model.parameters(), at[index, end], strict=False)):
                param.data.copy_(value)
                param.requires_grad_(block == 0 or (block == 1 and end == 18))
            train(model, index, end)
            ends[end].append(next(model.parameters()).detach().clone())
    for end in (6, 12, 18):
        grad = theta - (ends[end][0] + ends[end][1]) / 2
        buffer = 0.9 * buffer + grad
        theta = theta - 0.7 * (grad + 0.9 * buffer)
        torch.testing.assert_close(at[0, end + 1][0], theta, rtol=0, atol=1e-6)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", SETTINGS)
def test_a_resume_goes_on_with_what_is_adopted(name: str, change: str) -> None:
    """Saved at any step, in a model that is frozen as at the start of the run: the same numbers, to the bit."""
    regions = Regions(name, CHANGES[change], lambda: frozen(0, 3))

    def live(index: int, link: Link) -> None:
        model = regions.build()
        synchronizer = Synchronizer(model, method_of(name), link, digest_interval=2)
        kept = []
        for step in range(1, STEPS + 1):
            regions.step(model, synchronizer, index, step)
            shown = {key: param.detach().clone() for key, param in model.named_parameters()}
            state = copy.deepcopy(synchronizer.state_dict())
            kept.append((shown, state, [param.requires_grad for param in model.parameters()]))
        for saved_at in (5, 9, 13, 15, 17, 23):
            resumed = regions.build()
            shown, state, trainable = kept[saved_at - 1]
            resumed.load_state_dict(shown)
            again = Synchronizer(resumed, method_of(name), link, digest_interval=2, state=state)
            if change == "gradual":  # a user's callback looks at the step
                for param, is_trainable in zip(resumed.parameters(), trainable, strict=True):
                    param.requires_grad_(is_trainable)
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
    """Add an adapter, from random numbers that differ between regions."""
    if step == 8:
        generator = torch.Generator().manual_seed(index)
        model.adapter = nn.Parameter(torch.randn(5, generator=generator))


@pytest.mark.parametrize("name", ["diloco", "co2", "dilocox"])
def test_a_parameter_that_is_added_begins_with_region_0s_values(name: str) -> None:
    regions = Regions(name, add, Growing)
    mine, theirs = regions.run()
    same(mine, theirs)
    [adoption] = [event for event in regions.events[1] if event["kind"] == "adopt"]
    assert adoption["created"] == ["adapter"] and not adoption["averaged"]


@pytest.mark.parametrize("name", ["diloco", "streaming", "co2"])
def test_regions_that_change_at_different_steps_are_stopped(name: str) -> None:
    """Before anything more is trained on it, by the name of what only one has."""

    def change(model: nn.Module, index: int, step: int) -> None:
        if index == 1:
            unfreeze((8, 1))(model, index, step)

    with pytest.raises(
        HandshakeError, match=r"region 0 and region 1 do not train .* only region 1 has layers\.1\.0 \[3, 4\]"
    ):
        Regions(name, change, lambda: frozen(0, 2, 3)).run()


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


def test_what_is_unfrozen_after_the_last_send_is_adopted_at_the_end() -> None:
    regions = Regions("diloco", unfreeze((20, 1)), lambda: frozen(0, 3))
    mine, theirs = regions.run(21)
    same(mine, theirs)
    assert [event["kind"] for event in regions.events[0]][-2:] == ["adopt", "finish"]


def test_ranks_that_hold_the_same_parameters_are_not_followed() -> None:
    """DDP would not reduce the gradients of what is unfrozen later."""

    def live(index: int, link: Link) -> None:
        link.replicas = True
        model = frozen(0, 3)
        synchronizer = Synchronizer(model, method_of("diloco"), link)
        for step in range(1, 8):
            unfreeze((3, 1))(model, index, step)
            train(model, index, step)
            synchronizer.step()

    with pytest.raises(
        InputError, match=r"layers\.1\.0 has become trainable, but DDP reduces only gradients"
    ):
        run_in_lockstep(1, live)


def test_a_region_that_is_about_to_end_has_no_say() -> None:
    """It changes no parameters any more. What the others have unfrozen since is named at the end."""

    def live(index: int, link: Link) -> None:
        model = frozen(0, 3)
        synchronizer = Synchronizer(model, method_of("diloco"), link)
        for step in range(1, 19):
            ends = index == 1 and step > 3
            if not ends:
                unfreeze((8, 1))(model, index, step)
                train(model, index, step)
            word = Word(ending=Ending.DONE if ends else Ending.NO)
            synchronizer.step(0.05, word, trained=not ends)
        with pytest.raises(
            HandshakeError, match=r"differ at the end of the run in layers\.1\.0 \(region 1 and region 0\)"
        ):
            synchronizer.finish()

    run_in_lockstep(2, live)


@pytest.mark.parametrize("name", SETTINGS)
def test_a_region_that_leaves_adopts_what_it_had_told_the_others(name: str) -> None:
    """Its transfers in flight said so before: the others begin to adopt when these land, and need it for that."""

    def live(index: int, link: Link) -> int:
        model = frozen(0, 3)
        synchronizer = Synchronizer(model, method_of(name), link)
        for step in range(1, 20):
            leaves = index == 1 and step > 13
            if not leaves:
                unfreeze((8, 1))(model, index, step)
                train(model, index, step)
            word = Word(ending=Ending.INTERRUPTED if leaves else Ending.NO)
            synchronizer.step(0.05, word, trained=not leaves)
            if index == 1 and step == 13:
                synchronizer.give_up_unsent()
        synchronizer.state_dict()
        return synchronizer.num_params

    assert run_in_lockstep(2, live) == [90, 90]


def test_a_complex_parameter_is_refused_when_it_becomes_trainable() -> None:
    """Regions exchange real numbers: its imaginary part would be lost."""

    def build() -> nn.Module:
        model = frozen(0, 3)
        model.phase = nn.Parameter(torch.ones(2, dtype=torch.complex64), requires_grad=False)
        return model

    def change(model: nn.Module, index: int, step: int) -> None:
        model.phase.requires_grad_(step > 8)

    with pytest.raises(InputError, match="the parameter phase is complex"):
        Regions("diloco", change, build).run()


@pytest.mark.parametrize("name", ["diloco", "co2", "dilocox"])
def test_a_resume_knows_what_was_just_added(name: str) -> None:
    """Saved before the next send, at which it is noticed: it still begins with region 0's values."""
    regions = Regions(name, add, Growing)

    def live(index: int, link: Link) -> None:
        model = regions.build()
        synchronizer = Synchronizer(model, method_of(name), link)
        for step in range(1, 10):
            regions.step(model, synchronizer, index, step)
        state = copy.deepcopy(synchronizer.state_dict())
        resumed = copy.deepcopy(model)
        for step in range(10, STEPS + 1):
            regions.step(model, synchronizer, index, step)
        again = Synchronizer(resumed, method_of(name), link, state=state)
        for step in range(10, STEPS + 1):
            regions.step(resumed, again, index, step)
        same(dict(model.named_parameters()), dict(resumed.named_parameters()))

    run_in_lockstep(2, live)


def test_what_was_noticed_after_a_checkpoint_does_not_count_when_it_is_loaded() -> None:
    """Nor what is trainable until the user's code looks at the step."""

    def live(index: int, link: Link) -> None:
        model = frozen(0, 3)
        block = list(model.parameters())[1]
        synchronizer = Synchronizer(model, method_of("diloco"), link)
        state = copy.deepcopy(synchronizer.state_dict())
        block.requires_grad_(True)
        synchronizer.step()
        synchronizer.load_state_dict(state)
        block.requires_grad_(False)
        for _ in range(7):
            synchronizer.step()
        assert "layers.1.0" not in {name for each in synchronizer.fragments for name in each.fragment.names}

    run_in_lockstep(2, live)


@pytest.mark.parametrize(
    ("name", "where"), [("layers.1.0", "any region"), ("adapter", "region 0")], ids=["mean", "region 0"]
)
def test_values_that_are_not_finite_are_not_adopted(name: str, where: str) -> None:
    """They would be zeros, or what no later round can mend, in every region."""

    def change(model: nn.Module, index: int, step: int) -> None:
        (add if name == "adapter" else unfreeze((8, 1)))(model, index, step)
        if step == 10:
            model.get_parameter(name).data.fill_(float("nan"))

    with pytest.raises(InputError, match=rf"{name} cannot be synchronized after step 12: .* in {where}"):
        Regions("diloco", change, lambda: frozen(0, 3)).run()
