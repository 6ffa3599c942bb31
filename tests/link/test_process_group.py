"""Payloads in a process group: what is chosen, how regions agree on a group, and what happens when it breaks."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from hf_cocodc.errors import LinkError, RegionLostError
from hf_cocodc.link import process_group
from hf_cocodc.link.base import Arrival, MeanRequest
from hf_cocodc.link.process_group import (
    KINDS,
    REASONS,
    SEALED,
    Carrier,
    Circumstances,
    Group,
    GroupWord,
    NcclGroup,
    Payloads,
    Plan,
    choose,
    plan,
)
from hf_cocodc.link.records import Trailer, to_row
from hf_cocodc.link.tcp import TcpLink
from hf_cocodc.parts.codecs.base import Coder, Conversation, Message, Result
from hf_cocodc.parts.codecs.cast import Cast
from hf_cocodc.parts.tensors.memory import HOST, Home
from tests.link.memory import Regions, at_once

TCP, GLOO, NCCL = (KINDS.index(kind) for kind in ("tcp", "gloo", "nccl"))
NEAR, FAR = Circumstances(0, 0.0005, 0, 0), Circumstances(0, 0.03, 0, 0)


def test_auto_takes_what_the_slowest_round_trip_allows() -> None:
    assert choose("auto", (0, 1), [NEAR, NEAR]) == Carrier("gloo", "round trips take 0.5 ms")
    kind, why = choose("auto", (0, 1), [NEAR, FAR])
    assert kind == "tcp" and "30 ms" in why


@pytest.mark.parametrize("reason", range(1, len(REASONS)))
def test_auto_is_tcp_if_one_region_has_a_reason(reason: int) -> None:
    """Also where all have GPUs of one launch; the line names the region and the reason."""
    said = [Circumstances(0, 0.0005, 7, 1), Circumstances(reason, 0.0005, 7, 2)]
    assert choose("auto", (0, 3), said) == Carrier("tcp", f"region 3: {REASONS[reason]}")


@pytest.mark.parametrize(
    ("launches", "gpus", "kind"),
    [
        ((7, 7), (1, 2), "nccl"),
        ((7, 7), (1, 1), "gloo"),  # they share one
        ((7, 7), (1, 0), "gloo"),
        ((7, 8), (1, 2), "gloo"),
        ((0, 0), (1, 2), "gloo"),
    ],
)
def test_auto_is_nccl_for_gpus_of_one_launch(
    launches: tuple[int, int], gpus: tuple[int, int], kind: str
) -> None:
    said = [Circumstances(0, 0.0005, launch, gpu) for launch, gpu in zip(launches, gpus, strict=True)]
    assert choose("auto", (0, 1), said).kind == kind


def test_a_link_that_is_named_is_taken() -> None:
    """Whatever the round trips are; with a secret, the line says what that means."""
    assert choose("gloo", (0, 1), [FAR, FAR]) == Carrier("gloo", "regions.link=gloo")
    sealed = choose("gloo", (0, 1), [Circumstances(REASONS.index(SEALED), 0.03, 0, 0)] * 2)
    assert sealed.kind == "gloo" and "does not encrypt" in sealed.why


def test_regions_keep_a_group_only_if_all_have_it() -> None:
    has = GroupWord(GLOO, 4, 4)
    assert plan([has, has]) == Plan("gloo", 4)
    assert plan([has, GroupWord(GLOO, 0, 6)]) == Plan("gloo", 7, is_new=True)
    assert plan([has, GroupWord(GLOO, 3, 4)]) == Plan("gloo", 5, is_new=True)
    assert plan([has, GroupWord(0, 0, 0)]) == Plan("gloo", 5, is_new=True)  # a newcomer
    assert plan([has, GroupWord(TCP, 0, 4)]) == Plan("tcp")
    assert plan([has, GroupWord(NCCL, 4, 4)]) == Plan("tcp")


@pytest.mark.parametrize("wrong", [-1.0, float("nan"), float("inf"), 1e300, 17.0])
def test_a_word_that_nobody_sends_is_that_of_a_newcomer(wrong: float) -> None:
    row = to_row(Trailer(), (wrong, 0.0, 4.0))
    assert GroupWord.read(row) == GroupWord(0, 0, 4)


@pytest.mark.parametrize(
    "wrong",
    [{"reason": 99}, {"reason": -1}, {"reason": 0.5}, {"launch": float("nan")}, {"gpu": float("inf")}],
)
def test_circumstances_that_nobody_tells_are_their_regions_fault(wrong: dict[str, Any]) -> None:
    told = to_row(Circumstances(0, 0.001, 0, 0)._replace(**wrong))
    with pytest.raises(RegionLostError, match="region 3 .* cannot be believed"):
        process_group._read(told, 3)


class Runs:
    """Links of a run, whose payloads travel as `asked`, for models on these devices."""

    def __init__(self, count: int, asked: str = "gloo", devices: Sequence[torch.device] = ()) -> None:
        self._devices = devices or [HOST] * count
        self.regions = Regions(
            count, payloads=lambda region: Payloads(asked, self._devices[region], timeout_s=20.0)
        )

    def mean(self, *regions: int, coder: Coder | None = None, step: int = 0) -> list[Arrival]:
        """The mean of what all regions bring, or those that are named."""
        links = [link for link in self.regions.links if not regions or link.region in regions]
        coder = coder or Cast(torch.float32)
        return at_once(*(partial(mean, link, coder, step, self._devices[link.region]) for link in links))

    def __enter__(self) -> Runs:
        return self

    def __exit__(self, *error: object) -> None:
        self.regions.end()


def values_of(region: int, step: int) -> Tensor:
    return torch.randn(5_000, generator=torch.Generator().manual_seed(100 * step + region))


def mean(link: TcpLink, coder: Coder, step: int, device: torch.device) -> Arrival:
    values = values_of(link.region, step).to(device)

    def converse() -> Conversation:
        reply = yield Message(values, coder)
        return Result(reply.mean, reply.own, {})

    trailer = Trailer(fragment=0, inner_step=step)
    what = f"fragment 0 sent at step {step}"
    request = MeanRequest(converse, values.numel(), lambda: trailer, what, home=Home(device))
    return link.mean(request).wait()


def kinds(run: Runs) -> set[str]:
    return {link._payloads.kind for link in run.regions.links}


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("coder", [Cast(torch.float32), Cast(torch.bfloat16)])
def test_gloo_gives_the_bits_of_tcp(count: int, coder: Coder) -> None:
    """And sends as many bytes."""
    found = []
    for asked in ("gloo", "tcp"):
        with Runs(count, asked) as run:
            found.append([run.mean(coder=coder, step=step) for step in range(3)])
            assert kinds(run) == {asked}
    for over_gloo, over_tcp in zip(*found, strict=True):
        for one, other in zip(over_gloo, over_tcp, strict=True):
            assert torch.equal(one.result.mean, other.result.mean)
            assert one.bytes_sent == other.bytes_sent > 0
            assert one.square == other.square


def test_auto_is_gloo_on_loopback() -> None:
    with Runs(2, "auto") as run:
        run.mean()
        assert kinds(run) == {"gloo"}


def expected(regions: Sequence[int], step: int) -> Tensor:
    return sum(values_of(region, step) for region in regions) / len(regions)  # type: ignore[return-value]


def test_a_group_is_made_anew_without_a_lost_region() -> None:
    with Runs(3) as run:
        run.mean()
        links = run.regions.links
        links[2].part_with()
        for arrival in run.mean(0, 1, step=1):
            torch.testing.assert_close(arrival.result.mean, expected((0, 1), 1))
        assert [link._payloads._group.members for link in links[:2]] == [links[0]._part.members] * 2  # type: ignore[union-attr]
        assert {link._payloads._newest for link in links[:2]} == {2}


def broken(times: int, at: str, region: int = 1) -> Any:
    """Let the group of one region fail so often: when it is made, when it sends or when it waits."""
    left = iter([True] * times)
    method = getattr(Group, at)

    def fails(self: Group, *arguments: Any) -> Any:
        if getattr(self, "rank", None) == region and self.number > 0 and next(left, False):
            raise RuntimeError("the network is gone")
        return method(self, *arguments)

    return patch.object(Group, at, fails)


@pytest.mark.parametrize("at", ["send", "receive", "wait"])
def test_a_group_that_breaks_though_all_live_is_made_anew(at: str) -> None:
    """The attempt is made again, and gives what it would have given."""
    with Runs(3) as run:
        with broken(1, at):
            arrivals = run.mean()
        for arrival in arrivals:
            torch.testing.assert_close(arrival.result.mean, expected(range(3), 0))
        assert kinds(run) == {"gloo"}
        assert {link._payloads._newest for link in run.regions.links} == {2}


def test_a_group_that_breaks_again_gives_way_to_tcp(caplog: pytest.LogCaptureFixture) -> None:
    """No run ends with it, and the log says it in each region."""
    with Runs(2) as run:
        with broken(2, "wait"):
            arrivals = run.mean()
        assert kinds(run) == {"tcp"}
        assert (
            caplog.text.count(
                "payloads of means travel over tcp from now on: its process group broke 2 times"
            )
            == 2
        )
        assert "the network is gone" in caplog.text
        for arrival in [*arrivals, *run.mean(step=1)]:
            torch.testing.assert_close(arrival.result.mean, expected((0, 1), arrival.trailers[0].inner_step))


def test_one_that_has_gone_over_to_tcp_takes_the_others_with_it() -> None:
    """A vote that a decision has cut off may have reached only some."""
    with Runs(2) as run:
        run.regions.links[1]._payloads.kind = "tcp"
        run.mean()
        assert kinds(run) == {"tcp"}


def unmade(rank: int) -> Any:
    """No group can be made in one region."""
    make = Group._make

    def fails(self: Group, store: Any, view: Any, *rest: Any) -> Any:
        if view.region == rank:
            raise RuntimeError("no way")
        return make(self, store, view, *rest)

    return patch.object(Group, "_make", fails)


@pytest.fixture
def soon() -> Iterator[None]:
    """A group that cannot be made is given up after a second."""
    with patch.object(process_group, "_MAKE", process_group.timedelta(seconds=1)):
        yield


def test_auto_goes_back_to_tcp_where_no_group_can_be_made(soon: None) -> None:
    with unmade(1), Runs(2, "auto") as run:
        assert kinds(run) == {"tcp"}
        run.mean()


def test_a_group_that_is_named_and_cannot_be_made_is_an_error(soon: None) -> None:
    """In all regions, before anything is trained."""
    with (
        unmade(1),
        pytest.raises(LinkError, match=r"regions\.link=gloo, and no gloo group could be made.*link=tcp"),
    ):
        Runs(2, "gloo")


def test_nccl_needs_a_gpu(soon: None) -> None:
    with pytest.raises(LinkError, match="the model is on cpu"):
        Runs(2, "nccl")


def test_a_wait_ends_when_the_attempt_is_void() -> None:
    """An operation whose other end never comes: `abort` ends it, in the thread that waits and at the other regions."""
    with Runs(2) as run:
        run.mean()
        groups = [link._payloads._group for link in run.regions.links]
        works = [
            group.receive(torch.empty(1 << 20, dtype=torch.uint8), 1 - group.rank, 5) for group in groups
        ]  # type: ignore[union-attr]
        ended = [threading.Event(), threading.Event()]

        def wait(place: int) -> None:
            with pytest.raises(RuntimeError):
                works[place].wait()
            ended[place].set()

        threads = [threading.Thread(target=wait, args=(place,)) for place in range(2)]
        for thread in threads:
            thread.start()
        run.regions.links[0]._payloads.abort()
        assert all(each.wait(10) for each in ended)
        for thread in threads:
            thread.join()
        for arrival in run.mean(step=1):  # the one that has aborted has none: a new one is made
            torch.testing.assert_close(arrival.result.mean, expected((0, 1), 1))


def test_every_region_that_aborts_ends_the_waits_for_it() -> None:
    """Also one whose group has failed because another region had aborted before it."""
    with Runs(3) as run:
        run.mean()
        first, second, third = (link._payloads._group for link in run.regions.links)
        assert first is not None and second is not None and third is not None
        broken = first.receive(torch.empty(1, dtype=torch.uint8), 1, 5)
        waiting = third.receive(torch.empty(1, dtype=torch.uint8), 0, 5)
        second.abort()
        with pytest.raises(RuntimeError):
            broken.wait()
        first.abort()
        ended = threading.Thread(target=lambda: ends_with_an_error(waiting))
        ended.start()
        ended.join(10)
        assert not ended.is_alive()


def ends_with_an_error(work: Any) -> None:
    with pytest.raises(RuntimeError):
        work.wait()


@pytest.mark.parametrize("count", [2, 3])
def test_what_has_landed_keeps_no_group(count: int) -> None:
    """Nor what came from others: over NCCL that lies on the GPU."""
    with Runs(count) as run:
        arrivals = run.mean()
        groups = [weakref.ref(link._payloads._group) for link in run.regions.links]
        for link in run.regions.links:
            link._payloads.abort()
        gc.collect()
        assert [group() for group in groups] == [None] * count
        for region, arrival in enumerate(arrivals):
            assert torch.equal(arrival.result.own(), values_of(region, 0))


def test_what_a_region_has_said_counts_for_its_attempt() -> None:
    """Its choice may change meanwhile, by a thread that was left alone: it does not wait for payloads where nobody sends any."""
    with Runs(2) as run:
        payloads = run.regions.links[1]._payloads
        say = payloads.word

        def word(members: Any) -> GroupWord:
            said = say(members)
            payloads.kind = "tcp"
            return said

        with patch.object(payloads, "word", word):
            for arrival in run.mean():
                torch.testing.assert_close(arrival.result.mean, expected((0, 1), 0))
        run.mean(step=1)


def test_a_thread_that_was_left_alone_leaves_the_group_alone() -> None:
    """It neither brings its own back, nor ends that of its successor."""
    with Runs(2) as run:
        payloads, view = run.regions.links[0]._payloads, run.regions.links[0].view
        group = payloads._group
        view.revoke()
        with (
            pytest.raises(LinkError),
            payloads.opened(view, (), [to_row(Trailer(), GroupWord(GLOO, 0, 0))] * 2),
        ):
            pass
        with pytest.raises(LinkError):
            payloads.has_broken(view, 2, "it was")
        assert payloads._group is group is not None
        assert kinds(run) == {"gloo"}


class FakeNccl:
    """What torch 2.13 does, as far as an error goes: `is_success` of a work is none of it any more."""

    def __init__(self, fails: bool = False) -> None:
        self.fails, self.is_open, self.began = fails, False, 0

    def _start_coalescing(self) -> None:
        assert not self.is_open
        self.is_open = True

    def _end_coalescing(self) -> FakeNccl:
        self.is_open = False
        return self

    def send(self, tensors: list[Tensor], other: int, tag: int) -> None:
        assert self.is_open
        self.began += 1
        if self.fails:
            raise RuntimeError("NCCL error: remote process exited")

    recv = send

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        raise NotImplementedError("WorkNCCL::isSuccess() is deprecated")

    def wait(self) -> None:
        if self.fails:
            raise RuntimeError("NCCL error: remote process exited")

    def abort(self) -> None:
        pass


@pytest.fixture
def nccl(request: pytest.FixtureRequest) -> tuple[NcclGroup, FakeNccl]:
    """A group over NCCL, or what stands for it."""
    fake = FakeNccl(getattr(request, "param", False))
    with patch.object(NcclGroup, "_make", lambda self, *arguments: fake):
        view = SimpleNamespace(region=0, num_regions=2, others=[1])
        return NcclGroup(None, view, "", HOST, 20.0), fake  # type: ignore[arg-type]


def row(group: NcclGroup) -> Any:
    group.begin()
    group.receive(torch.empty(1, dtype=torch.uint8), 1, 0)
    group.send(torch.empty(1, dtype=torch.uint8), 1, 0)
    return group.end()


def test_a_row_over_nccl_is_one_operation(nccl: tuple[NcclGroup, FakeNccl]) -> None:
    group, fake = nccl
    group.begin()
    assert group.end() is None  # a region may have nothing in a row
    work = row(group)
    assert fake.began == 2 and not fake.is_open
    group.wait(work, Any)


@pytest.mark.parametrize("nccl", [True], indirect=True)
def test_a_row_over_nccl_that_fails_is_ended(nccl: tuple[NcclGroup, FakeNccl]) -> None:
    """Or the thread's later groups would be part of it."""
    group, fake = nccl
    for _ in range(2):
        with pytest.raises(RuntimeError, match="remote process"):
            row(group)
        assert not fake.is_open
    with pytest.raises(RuntimeError, match="remote process"):
        group.wait(fake, Any)


def test_what_an_abort_of_nccl_completes_has_not_come(nccl: tuple[NcclGroup, FakeNccl]) -> None:
    group, _ = nccl
    work = row(group)
    group.abort()
    with pytest.raises(RuntimeError, match="aborted"):
        group.wait(work, Any)
