"""Faults planted in the rules: the simulation finds each of them within a bounded number of random plans."""

import inspect
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest

from hf_cocodc.coordinator import rules as coordinator
from hf_cocodc.coordinator import verdict
from hf_cocodc.link import rules as link
from hf_cocodc.link import voice

from .schedules import random_plan, run
from .test_named import PLANS as NAMED
from .test_random import lane_plan
from .world import Plan

PLANS = 1000
"""Random ones, after the named ones."""

MUTATIONS: list[tuple[str, ModuleType, str, str, str]] = [
    ("a loss is not reported", link, "_MemberWork",
     "self.change(missed={**self.state.missed, member: why})\n        self.report()",
     "self.change(missed={**self.state.missed, member: why})"),
    ("a question is not answered", link, "_MemberWork",
     "self.freeze()\n                self.report()", "self.freeze()"),
    ("nobody freezes", link, "_MemberWork",
     "if not self.state.frozen:\n            self.change(frozen=True)", "if False:\n            self.change(frozen=True)"),
    ("a void call keeps its result", link, "_MemberWork",
     "if call.number > decision.done:", "if call.number > decision.done + 1:"),
    ("a void call is not begun again", link, "_MemberWork",
     "call = replace(call, begun=False, has=False, stands=False)", "call = replace(call, has=False, stands=False)"),
    ("a result that stands does not count", link, "_MemberWork",
     "call = replace(call, stands=True)", "call = replace(call, stands=False)"),
    ("lost members take part again", link, "_MemberWork",
     "parties = state.without_lost(call.members)", "parties = call.members"),
    ("a change counts before all know it", link, "_MemberWork",
     "due=max(state.due, min(known, state.knows))", "due=max(state.due, state.knows)"),
    ("a region that has left stays", link, "_MemberWork",
     "*joined} - {*left}", "*joined}"),
    ("a call completes with the first have", link, "_MemberWork",
     "self.head(has=True)\n", "self.head(has=True)\n                    self.complete()\n"),
    ("a killed process that has unread bytes is waited for", link, "why_lost",
     "if is_refused and is_closed:", "if False:"),
    ("a transfer that stands is void", verdict, "settle",
     "if hold_next and all(hold_next):", "if hold_next and not all(hold_next):"),
    ("a result that one alone holds stands", verdict, "settle",
     "if hold_next and all(hold_next):", "if hold_next and any(hold_next):"),
    ("what somebody has completed is void", verdict, "settle",
     "done = max(completed,", "done = min(completed,"),
    ("the first report decides", coordinator, "_Work",
     "if self.now < self.waits_until(member, member in missed):\n                return", "if self.now < self.waits_until(member, member in missed):\n                break"),
    ("a loss that is decided stays open", coordinator, "_Work",
     "missed={},\n            asked_at=None,", "missed={},"),
    ("a stop is answered before all have promised", coordinator, "_Work",
     "set(state.expected) <= state.question.steps.keys()", "state.question.steps"),
    ("a decision is not counted", link, "_MemberWork",
     "losses=decision.number + 1", "losses=decision.number"),
    ("a decision counts twice", link, "_MemberWork",
     "if decision.number < state.losses:", "if decision.number < state.losses - 1:"),
    ("a call in flight is forgotten", link, "_MemberWork",
     "calls=(*state.calls, call))", "calls=(call,))"),
    ("the smallest promise counts", coordinator, "_Work",
     "self.answer(max(", "self.answer(min("),
    ("a call completes once one rank holds it", voice, "_held",
     "len(ranks) < voice.num_ranks and", "len(ranks) < 1 and"),
    ("a region reports once its leader has", voice, "_reported",
     "if len(voice.reports) == voice.num_ranks:", "if rank == LEADER:"),
]  # fmt: skip


def plans(module: ModuleType) -> Iterator[Plan]:
    if module is voice:
        yield from map(lane_plan, range(PLANS))
        return
    yield from (replace(plan, seed=seed) for seed in range(4) for plan in NAMED.values())
    yield from map(random_plan, range(PLANS))


def plans_until_caught(module: ModuleType, name: str, old: str, new: str) -> int | None:
    """The number of the first plan that finds it; None if none does."""
    original: Any = getattr(module, name)
    source = inspect.getsource(original)
    assert source.count(old) == 1, f"{old!r} is {source.count(old)} times in {name}"
    users = [user for user in (module, coordinator) if getattr(user, name, None) is original]
    space = dict(vars(module))
    exec(compile(source.replace(old, new), f"mutated {module.__name__}", "exec"), space)
    try:
        for user in users:
            setattr(user, name, space[name])
        return next(
            (number for number, plan in enumerate(plans(module)) if run(plan).failure is not None), None
        )
    finally:
        for user in users:
            setattr(user, name, original)


@pytest.mark.slow
@pytest.mark.parametrize("mutation", MUTATIONS, ids=[each[0] for each in MUTATIONS])
def test_mutation_is_caught(mutation: tuple[str, ModuleType, str, str, str]) -> None:
    _, module, name, old, new = mutation
    found = plans_until_caught(module, name, old, new)
    assert found is not None, "no plan finds it"
    print(f"found by plan {found}")  # noqa: T201
