"""What else may happen to the members of a run: several losses, a region that leaves, too few regions, a late one."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_cocodc.errors import LeftBehind, LinkError
from hf_cocodc.links.base import Parcel
from hf_cocodc.links.elastic import ElasticLink
from hf_cocodc.links.log import Log
from hf_cocodc.links.spreading import spread, spread_all
from hf_cocodc.links.terms import AUTO_GRACE_S, State
from hf_cocodc.links.trailer import Ending, Trailer, Word
from hf_cocodc.parts.fragments import Fragment
from tests.links.memory import Died, Fault, Regions, wait_until
from tests.links.training import METHODS, Trained, check, method_of

STEPS = 9


@settings(max_examples=25, derandomize=True)
@given(
    name=st.sampled_from(sorted(METHODS)),
    faults=st.lists(
        st.builds(Fault, st.integers(0, 3), st.integers(1, 200), st.sampled_from(["dies", "freezes"])),
        max_size=3,
        unique_by=lambda fault: fault.region,
    ),
    leaver=st.one_of(st.none(), st.integers(0, 3)),
)
def test_whatever_happens_the_others_train_on(name: str, faults: list[Fault], leaver: int | None) -> None:
    """Of four regions some die, some freeze and are left behind, and one leaves: those that stay are equal."""
    regions = Regions(4, faults)
    hub, struck = regions.hub, {fault.region for fault in faults}
    leaves = leaver is not None and leaver not in struck

    def thaw() -> None:
        while not hub.ended:
            for fault in faults:
                if hub.is_frozen(fault.region) and any(
                    fault.region == member.region for decision in hub.decisions for member in decision.lost
                ):
                    hub.thaw(fault.region)
            time.sleep(0.002)

    threading.Thread(target=thaw, daemon=True).start()

    def body(region: int, link: ElasticLink) -> tuple[Trained, int]:
        try:
            trained = Trained(link, method_of(name))
            for step in range(1, STEPS + 1):
                leaving = leaves and region == leaver and step > 3
                words = trained.train(region, word=Word(ending=Ending.LEAVING if leaving else Ending.NO))
                if leaving and words is not None and words[region].ending is Ending.LEAVING:
                    link.close()
                    raise Died
            return trained, trained.finish()
        except LeftBehind:
            assert link.state is State.OUT and region in struck
            hub.kill(link._life.me)
            raise Died from None

    found = regions.run(body)
    assert set(range(4)) - struck - ({leaver} if leaves else set()) <= found.keys()
    check(name, found)
    lost = {member.region for decision in hub.decisions for member in decision.lost}
    assert not leaves or leaver not in lost, "a region that leaves in good order is not lost"


def test_members_that_are_too_few_call_the_roll() -> None:
    """A newcomer comes in while nobody trains; all know the same members afterwards."""
    regions = Regions(2)
    late = regions.newcomer(2)
    regions.links.append(late)

    def body(region: int, link: ElasticLink) -> tuple[int, ...]:
        if link is not late:
            link.tick(5)
            while len(present := link.roll_call()) < 3:
                time.sleep(0.01)
            assert link.gather(Trailer(loss=region), "afterwards")[2].loss == 2
            return present
        log = Log(1 << 20)
        regions.hub.presences[link._life.me].connect(regions.first)
        link.pair_with(regions.first)
        donor.log_to(log)
        link.follow(log)
        while not link.apply(marker := link.next_marker(20.0)):  # type: ignore[arg-type]
            pass
        assert marker is not None and marker.held and marker.step == 5
        link.gather(Trailer(loss=2), "afterwards")
        return tuple(member.region for member in marker.members)

    donor = regions.links[0]
    assert set(regions.run(body).values()) == {(0, 1, 2)}


def test_a_member_leaves_at_a_roll_call() -> None:
    """And takes part to its end in what was sent before; the others go on without it, and have lost nobody."""
    regions = Regions(3)

    def body(region: int, link: ElasticLink) -> tuple[int, ...]:
        link.tick(5)
        present = link.roll_call(leaves=region == 1)
        if region == 1:
            assert link.submitted == 1
            link.close()
        else:
            assert len(link.gather(Trailer(), "afterwards")) == 2
            assert [(kind, facts["step"]) for kind, facts in link.events] == [("left", 5), ("epoch", 5)]
        return present

    assert set(regions.run(body).values()) == {(0, 2)}
    assert not regions.hub.decisions


def test_texts_are_told_again_if_their_region_is_lost_meanwhile() -> None:
    """No survivor mixes what was told before the loss with what was told after it."""
    for at in range(1, 60, 4):
        regions = Regions(3, [Fault(2, at)])

        def body(region: int, link: ElasticLink) -> list[dict[int, bytes]]:
            told = [spread_all(link, b"region" * (region + 1), f"text {number}") for number in range(3)]
            spread(link, 2, b"source" * region, "one text")
            return told

        found = regions.run(body)
        assert found[0] == found[1]
        for told in found[0]:
            assert told in (
                {0: b"region", 1: b"region" * 2},
                {0: b"region", 1: b"region" * 2, 2: b"region" * 3},
            )


def in_background(call: Callable[[], object]) -> None:
    """Make a call that does not end before its test does."""

    def run() -> None:
        with contextlib.suppress(LinkError, Died):
            call()

    threading.Thread(target=run, daemon=True).start()


def test_grace_begins_with_the_wait_of_training() -> None:
    """ "auto": what the overlap hides is free, however long it is; then a late region has a few seconds more."""
    regions = Regions(2)
    link = regions.links[0]
    life, presence = link._life, regions.hub.presences[regions.first[0]]
    for grace_s, expected in ((None, None), (7.0, 7.0), (3, 3)):
        life._terms = life._terms._replace(grace_s=grace_s)
        assert life._grace() == expected
    life._terms = life._terms._replace(grace_s="auto")
    conversation = method_of("diloco").codec.converse
    fragment = Fragment(0, ("weight",), ((2,),), numel=2)
    converse = partial(conversation, torch.ones(2), fragment, {})
    handle = link.mean(Parcel(converse, 2, Trailer, "a transfer"))
    wait_until(lambda: presence.awaits == 1)
    presence._since -= 100.0  # the link's thread has waited for so long, and training not at all
    assert life._grace() is None
    in_background(handle.wait)
    wait_until(lambda: life.ops.awaited_s() is not None)
    found = life._grace()
    regions.hub.kill(regions.first[0])
    regions.hub.end()
    assert found == pytest.approx(100.0 + AUTO_GRACE_S, abs=2.0)


def test_nobody_becomes_late_while_a_decision_is_sought() -> None:
    """Presence waits for no member, as long as nothing is asked of any."""
    regions = Regions(2)
    life = regions.links[0]._life
    in_background(lambda: regions.links[0].gather(Trailer(), "something"))
    wait_until(lambda: life.presence.awaits == 1)
    life._freeze()
    awaits = life.presence.awaits
    regions.hub.kill(regions.first[0])
    regions.hub.end()
    assert awaits is None


def test_an_error_of_one_region_reaches_its_training_thread() -> None:
    """And the others go on without it."""
    regions = Regions(3)

    def body(region: int, link: ElasticLink) -> tuple[Trained, int]:
        trained = Trained(link, method_of("diloco"))
        for step in range(1, STEPS + 1):
            if region == 1 and step == 4:
                life = link._life
                op = life.ops.submit("broken", life.roster, 0, None, None)  # type: ignore[arg-type]
                with pytest.raises(AssertionError):
                    op.wait()
                link.close("it is broken")
                with pytest.raises((LinkError, AssertionError)):
                    link.gather(Trailer(), "more")
                raise Died
            trained.train(region)
        return trained, trained.finish()

    found = regions.run(body)
    assert found.keys() == {0, 2}
    check("diloco", found)
