"""A region breaks, finite but far too large: the others train on as if it had sat out, and it comes back by itself."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_cocodc.engine.saved import HISTORIES
from hf_cocodc.engine.saved import load as load_fragment
from hf_cocodc.engine.synchronizer import Synchronizer
from hf_cocodc.errors import CheckpointError
from hf_cocodc.link.base import Link
from hf_cocodc.link.lockstep import run_in_lockstep
from hf_cocodc.parts.guard import LONGEST_HISTORY, Guard
from hf_cocodc.resolve import from_config
from hf_cocodc.settings import OuterConfig
from tests.engine.test_landings import SETTINGS
from tests.processes.test_link import run_over_tcp
from tests.toys import Blocks, params_of

TARGET = torch.linspace(-1, 1, 48)
STEPS, BROKEN = 120, 75
GUARD = Guard()
Damage = Callable[[Tensor], Any]
DAMAGES: dict[str, Damage] = {
    "weights": lambda param: param.mul_(1e4).add_(1e4),
    "gradient": lambda param: param.sub_(1e6),
}
CASES = {**SETTINGS, "int8": {"method": "streaming", "num_fragments": 3, "overlap_steps": 3, "codec": "int8"}}
CASES["int8"] |= {"error_feedback": True}
CASES["sparseloco"] = {"outer_momentum": None, "top_k": 8}


def train(model: Blocks, region: int, step: int) -> None:
    """A step toward the target, with noise of the region and the step."""
    generator = torch.Generator().manual_seed(1000 * region + step)
    flat = params_of(model)
    grad = flat - TARGET + 0.1 * torch.randn(flat.shape, generator=generator)
    for param, part in zip(model.parameters(), (0.03 * grad).split(16), strict=True):
        param.detach().sub_(part)


def distance(model: Blocks) -> float:
    return float((params_of(model) - TARGET).square().mean())


def trained(
    case: str,
    damage: Damage | None,
    region: int,
    link: Link,
    guard: Guard | None = GUARD,
    cut: bool = False,
) -> tuple[list[tuple[str, dict[str, Any]]], Tensor, float, list[int]]:
    """Region 1 is damaged once; with `cut` all are saved and go on from there, soon after."""
    settings = {"method": case, "sync_interval": 6, "outer_momentum": 0.3} | CASES[case]
    method = from_config(OuterConfig(**settings))
    events: list[tuple[str, dict[str, Any]]] = []
    model, digests = Blocks(torch.zeros(48).split(16)), []

    def engine(state: dict[str, Any] | None) -> Synchronizer:
        note = lambda kind, **facts: events.append((kind, facts))  # noqa: E731
        return Synchronizer(model, method, link, digest_interval=1, record=note, guard=guard, state=state)

    sync = engine(None)
    for step in range(1, STEPS + 1):
        train(model, region, step)
        if step == BROKEN and region == 1 and damage is not None:
            for param in model.parameters():
                damage(param.detach())
        sync.step(0.03)
        digests.append(sync.global_digest())
        if cut and step in (BROKEN + 1, BROKEN + 4, BROKEN + 8):
            sync = engine(sync.state_dict())
    with sync.global_weights():
        reached = distance(model)
    sync.finish()
    return events, params_of(model), reached, digests


def run(case: str, damage: Damage | None, **changes: Any) -> list[Any]:
    return run_in_lockstep(3, lambda region, link: trained(case, damage, region, link, **changes))


@pytest.mark.parametrize("damage", ["weights", pytest.param("gradient", marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", CASES)
def test_a_broken_region_is_left_out(case: str, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    """All methods: as near to the target as undisturbed; all say the same of the same transfers; all end equal."""
    with caplog.at_level(logging.WARNING):
        found = run(case, DAMAGES[damage])
    [sound, *_] = run(case, None)
    told = [[facts for kind, facts in events if kind == "guard"] for events, *_ in found]
    assert told[0] and told[0] == told[1] == told[2]
    assert {fate for facts in told[0] for fate in facts["regions"].values()} == {"dropped"}
    assert {region for facts in told[0] for region in facts["regions"]} == {"1"}
    assert "outer.guard has dropped the outer gradient of region 1 for fragment" in caplog.text
    assert not [kind for kind, _ in sound[0] if kind == "guard"]
    landed = {(f["fragment"], f["sent_at"]): f["regions"] for kind, f in found[0][0] if kind == "land"}
    for facts in told[0]:
        assert landed[facts["fragment"], facts["sent_at"]] == 2
    assert max(landed) and all(regions == 3 for (_, sent), regions in landed.items() if sent > BROKEN + 24)
    for _, model, reached, _ in found:
        assert reached < 1.5 * sound[2] + 2e-3
        assert torch.equal(model, found[0][1])
    if case != "eager":
        assert found[0][3] == found[1][3] == found[2][3]


@pytest.mark.parametrize("case", ["eager", "int8", pytest.param("cocodc", marks=pytest.mark.slow)])
def test_a_resume_changes_nothing(case: str) -> None:
    """Saved and resumed in the middle of it, with transfers in flight: bit for bit. Without the guard it is ruined."""
    straight, cut = (run(case, DAMAGES["weights"], cut=cut) for cut in (False, True))
    for one, other in zip(straight, cut, strict=True):
        assert torch.equal(one[1], other[1])
        assert [e for e in one[0] if e[0] == "guard"] == [e for e in other[0] if e[0] == "guard"]
    ruined = run(case, DAMAGES["weights"], guard=None)[0]
    assert ruined[2] > 100 * straight[0][2]


def test_two_regions_over_tcp_judge_as_in_lockstep() -> None:
    """The same bits; with two, the smaller norm is the ordinary one."""

    def body(region: int, link: Link) -> Any:
        return trained("streaming", DAMAGES["weights"], region, link)

    for one, other in zip(run_over_tcp(2, body), run_in_lockstep(2, body), strict=True):
        assert torch.equal(one[1], other[1])
        assert [kind for kind, _ in one[0]].count("guard") > 0


def test_a_clipped_region_counts_less() -> None:
    """A spike of one region between clip and drop: its part has the norm of clip times the ordinary one, and is in the mean."""
    events, _, reached, _ = run("diloco", lambda param: param.sub_(0.2))[0]
    [facts] = [facts for kind, facts in events if kind == "guard"]
    assert facts["regions"] == {"1": "clipped"}
    assert facts["norms"][1] > 3 * facts["limit"]
    assert reached < 0.1


@pytest.mark.parametrize(("has_rate", "says"), [(True, False), (False, True)])
def test_a_fresh_outer_gradient_is_held_against_the_history(
    has_rate: bool, says: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """With eager updates. All regions go twenty times as fast from one round on: by their learning rate, or by a fault."""

    def live(guard: Guard | None, region: int, link: Link) -> tuple[list[tuple[str, dict[str, Any]]], Tensor]:
        method = from_config(OuterConfig(method="eager", sync_interval=3, outer_lr=0.4, outer_momentum=0.9))
        events: list[tuple[str, dict[str, Any]]] = []
        note = lambda kind, **facts: events.append((kind, facts))  # noqa: E731
        model = Blocks(torch.zeros(48).split(16))
        sync = Synchronizer(model, method, link, record=note, guard=guard)
        for step in range(45):
            pace = 20.0 if step // 3 > 12 else 1.0
            for param in model.parameters():
                param.detach().add_(0.01 * pace)
            sync.step(0.03 * (pace if has_rate else 1.0))
        return events, params_of(model)

    with caplog.at_level(logging.WARNING):
        events, params = run_in_lockstep(2, functools.partial(live, GUARD))[0]
    notes = [facts["message"] for kind, facts in events if kind == "note"]
    assert bool(notes) == says == ("the fresh outer gradient of region 0" in caplog.text)
    assert not [kind for kind, _ in events if kind == "guard"], "all regions do the same"
    assert says != torch.equal(params, run_in_lockstep(2, functools.partial(live, None))[0][1])


def test_what_all_regions_do_is_never_out_of_the_ordinary() -> None:
    """A learning rate a hundred times higher in all regions, for a round."""

    def body(region: int, link: Link) -> list[str]:
        method = from_config(OuterConfig(method="diloco", sync_interval=3))
        kinds: list[str] = []
        model = Blocks([torch.zeros(8)])
        sync = Synchronizer(
            model, method, link, guard=Guard(), record=lambda kind, **facts: kinds.append(kind)
        )
        for step in range(60):
            rate = 1.0 if 40 <= step < 43 else 0.01
            model.vectors()[0].data.add_(rate * torch.full((8,), 1.0 + region))
            sync.step(rate)
        return kinds

    for kinds in run_in_lockstep(2, body):
        assert "guard" not in kinds


def test_rounds_without_a_move_are_not_what_is_ordinary() -> None:
    """Both regions stand still, as a gradient scaler or a learning rate of zero lets them: such rounds do not count."""

    def body(region: int, link: Link) -> list[float]:
        model = Blocks([torch.zeros(8)])
        sync = Synchronizer(model, from_config(OuterConfig(sync_interval=2)), link, guard=GUARD)
        for step in range(60):
            if step < 20:
                train_one(model)
            sync.step(0.1)
        return list(sync.fragments[0].norms)

    for norms in run_in_lockstep(2, body):
        assert len(norms) == 10
        assert min(norms) > 0


def test_a_checkpoint_has_what_the_guard_remembers() -> None:
    """The agreed norms and paces of the last landings, as many as the guard asks for."""

    def body(region: int, link: Link) -> list[int]:
        method = from_config(OuterConfig(method="diloco", sync_interval=2))
        model = Blocks([torch.zeros(8)])
        sync = Synchronizer(model, method, link, guard=Guard(history=9))
        for _ in range(24):
            train_one(model)
            sync.step(0.1)
        state = sync.state_dict()
        [fragment] = state["fragments"]
        for name in HISTORIES:
            assert fragment[name] == list(getattr(sync.fragments[0], name))
        assert fragment["paces"] == pytest.approx([norm / 0.1 for norm in fragment["norms"]])
        resumed = Synchronizer(model, method, link, guard=Guard(history=9), state=state)
        for name in HISTORIES:
            assert fragment[name] == list(getattr(resumed.fragments[0], name))
        return [len(fragment[name]) for name in ("norms", "paces")]

    assert run_in_lockstep(2, body) == [[9, 9]] * 2


@pytest.mark.parametrize(
    "norms",
    [
        None,
        3.0,
        "abc",
        [1.0, math.nan],
        [math.inf],
        [-1.0],
        [True],
        ["1"],
        [[1.0]],
        [1.0] * (LONGEST_HISTORY + 1),
    ],
    ids=lambda norms: str(norms)[:12],
)
def test_a_history_that_no_region_has_is_refused(norms: Any) -> None:
    """A damaged checkpoint, whose hashes fit: what a guard would judge by is checked before it is believed."""

    def body(region: int, link: Link) -> None:
        method, model = from_config(OuterConfig(sync_interval=2)), Blocks([torch.zeros(8)])
        sync = Synchronizer(model, method, link, guard=GUARD)
        [fragment] = sync.state_dict()["fragments"]
        for found in (norms, [0.0, 1.0] * (LONGEST_HISTORY // 2), []):
            load = functools.partial(
                load_fragment, sync.fragments[0], {**fragment, "norms": found}, sync._traffic.judge
            )
            if found is norms:
                with pytest.raises(
                    CheckpointError, match=r"fragment 0: the checkpoint has what no run saves .*\$\.norms"
                ):
                    load()
            else:
                load()
                assert sync.fragments[0].norms == found

    run_in_lockstep(1, body)


@pytest.mark.parametrize("name", ["voids", "norms", "trained", "in_flight"])
def test_a_fragment_that_lacks_a_part_is_refused(name: str) -> None:
    """Nothing stands in for it: a run would go on with other numbers, and say nothing."""

    def body(region: int, link: Link) -> None:
        sync = Synchronizer(Blocks([torch.zeros(8)]), from_config(OuterConfig(sync_interval=2)), link)
        state = sync.state_dict()
        del state["fragments"][0][name]
        with pytest.raises(CheckpointError, match=rf"none that hf_cocodc saves \(KeyError: '{name}'\)"):
            sync.load_state_dict(state)

    run_in_lockstep(1, body)


@pytest.mark.parametrize("name", ["norm", "reference", "pace"])
def test_a_transfer_in_flight_with_a_norm_that_no_region_has_is_refused(name: str) -> None:
    """Likewise for what was ordinary when it was sent."""

    def body(region: int, link: Link) -> None:
        method = from_config(
            OuterConfig(method="streaming", sync_interval=4, num_fragments=1, overlap_steps=3)
        )
        model = Blocks([torch.zeros(8)])
        sync = Synchronizer(model, method, link, guard=GUARD)
        for _ in range(4):
            train_one(model)
            sync.step(0.1)
        [fragment] = sync.state_dict()["fragments"]
        [transfer] = fragment["in_flight"]
        for wrong in (math.nan, math.inf, -1.0, None, "1"):
            damaged = {**fragment, "in_flight": [{**transfer, name: wrong}]}
            with pytest.raises(
                CheckpointError, match=rf"the checkpoint has what no run saves .*\$\.in_flight\[0\]\.{name}"
            ):
                load_fragment(sync.fragments[0], damaged, sync._traffic.judge)

    run_in_lockstep(1, body)


def train_one(model: Blocks) -> None:
    model.vectors()[0].data.add_(0.1)
