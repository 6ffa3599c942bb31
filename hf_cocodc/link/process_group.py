"""Payloads of means in a process group of torch.distributed, for regions that are machines of one cluster.

Connections of our own resume after a break, keep a rate and seal what they carry. In a cluster nobody needs that: gloo moves
bytes without the interpreter, and NCCL from GPU to GPU. All else that regions say stays on their connections: trailers, which
also tell what each has of the group, records, votes, broadcasts and bases.

A group is made for the members of an attempt, and anew when they change or it has broken. Nothing of it says which region is
lost: connections and coordinator do. So a region that has an error aborts its group, and says so in the vote that ends an
attempt (`View.vote`). With gloo, an abort ends the waits of all others at once; with NCCL they may last `regions.timeout_s`. All
then make the attempt again with a new group; if that breaks, too, although every region lives, payloads travel over the
connections from then on.
"""

import contextlib
import hashlib
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import LinkError, RegionLostError, short
from ..net.addresses import listen_at
from ..net.members import Member
from ..net.view import View
from ..parts.tensors.memory import HOST
from ..settings.environment import ENV_LAUNCH
from ..threads import NativeThread
from .exchange import Lend, Rows, RowsOf, Sizes, WireRows
from .records import from_row, to_row

KINDS = "", "tcp", "gloo", "nccl"
"""How payloads travel: regions tell each other places in it. A newcomer, which has heard of none yet, says the first one."""
SHORT_S = 0.002
"""Round trips of one cluster are shorter."""
_MAKE = timedelta(seconds=10)
"""A group that is not made in this time is not made: its members have all come."""
_WHERE_BYTES = 320
_PHASES, _ROWS = 1 << 14, 1 << 16
"""Tags of gloo: of so many phases, with so many rows in each."""
_ROUNDS = 2
"""A group breaks at most so often in an attempt without a lost region."""
_POLL_S = 0.0002
_ABORT = (1 << 31) - 1
"""A tag that nobody sends with."""

SEALED = "a secret is set, and a process group does not encrypt"
REASONS = (
    "",
    SEALED,
    "regions.rate_limit is set",
    "regions.connections is set",
    "regions.congestion is set",
    "regions.announce is set",
    "a storage carries what it sends",
    "its torch has no gloo",
)
"""Why a region keeps "auto" from a process group; the first one means that it does not."""


class Circumstances(NamedTuple):
    """What a process tells the others at their meeting, from which they choose: numbers.

    Attributes:
        reason: place in `REASONS`.
        rtt_s: seconds of a round trip to the most distant region.
        launch: of which launch it is (`number_of`); 0 if it knows of none.
        gpu: its CUDA device, likewise; 0 if it has none that NCCL can use.
    """

    reason: int
    rtt_s: float
    launch: int
    gpu: int


def _read(row: Tensor, region: int) -> Circumstances:
    """What a region has told. Raises RegionLostError if no region of this version tells it."""
    said = from_row(Circumstances, row, region)
    if said.reason not in range(len(REASONS)):
        raise RegionLostError(
            region,
            f"region {region} has reason {said.reason} for its link, and there are {len(REASONS)}: what it sends cannot be "
            "believed. Look at its last output, and start it again.",
        )
    return said


class Carrier(NamedTuple):
    """How payloads travel, and why."""

    kind: str
    why: str


def choose(asked: str, regions: Sequence[int], said: Sequence[Circumstances]) -> Carrier:
    """What "auto", or another value of `regions.link`, means for these regions; equal in all of them.

    >>> choose("auto", (0, 1), [Circumstances(0, 0.0004, 0, 0)] * 2)
    Carrier(kind='gloo', why='round trips take 0.4 ms')
    """
    if asked != "auto":
        is_open = any(REASONS[each.reason] == SEALED for each in said)
        return Carrier(asked, f"regions.link={asked}{', although ' + SEALED if is_open else ''}")
    for region, each in zip(regions, said, strict=True):
        if each.reason:
            return Carrier("tcp", f"region {region}: {REASONS[each.reason]}")
    if len(said) == 1:
        return Carrier("tcp", "no other region is there, whose round trips could tell more")
    launches, gpus = {each.launch for each in said}, {each.gpu for each in said}
    if len(launches) == 1 and 0 not in launches | gpus and len(gpus) == len(said):
        return Carrier("nccl", "one launch has started all regions, and each has a GPU of its own")
    rtt_s = max(each.rtt_s for each in said)
    words = f"round trips take {float(f'{1000 * rtt_s:.2g}'):g} ms"
    if rtt_s < SHORT_S:
        return Carrier("gloo", words)
    return Carrier("tcp", f"{words}, and those of a cluster less than {1000 * SHORT_S:g} ms")


def number_of(name: str) -> int:
    """A number from 1 that other names do not have, and that a float holds exactly; 0 for no name."""
    return 1 + int.from_bytes(hashlib.sha256(name.encode()).digest()[:6]) if name else 0


def gpu_of(device: torch.device) -> int:
    """The number of a GPU that NCCL can use; 0 of another device."""
    if device.type != "cuda" or not dist.is_nccl_available() or torch.version.hip is not None:
        return 0
    return number_of(f"{torch.cuda.get_device_properties(device).uuid}")


class GroupWord(NamedTuple):
    """What a process tells with each trailer: how it knows payloads to travel, and the number of its group.

    Attributes:
        kind: place in `KINDS`.
        number: of the group that it has for these regions; 0 if there is none.
        newest: the highest number of a group that it knows.
    """

    kind: int
    number: int
    newest: int

    @classmethod
    def read(cls, row: Tensor) -> "GroupWord":
        """From the end of a row. What no process sends counts as a word of one that knows nothing."""
        numbers = [int(each) if 0 <= each < 2**53 else 0 for each in row.tolist()[-len(cls._fields) :]]
        return cls(numbers[0] if numbers[0] < len(KINDS) else 0, *numbers[1:])

    @property
    def must_hear(self) -> bool:
        """Whether the payloads of who says it may leave only once the words of all have come."""
        return KINDS[self.kind] != "tcp"


class Plan(NamedTuple):
    """What words come to: how payloads travel, and the number of the group; `is_new` if it is to be made."""

    kind: str
    number: int = 0
    is_new: bool = False


def plan(words: Sequence[GroupWord]) -> Plan:
    """The same in all regions that have heard these words. One that has gone over to TCP takes the others with it.

    >>> plan([GroupWord(2, 4, 4), GroupWord(2, 4, 4)])
    Plan(kind='gloo', number=4, is_new=False)
    >>> plan([GroupWord(2, 4, 4), GroupWord(0, 0, 0)])
    Plan(kind='gloo', number=5, is_new=True)
    >>> plan([GroupWord(2, 4, 4), GroupWord(1, 0, 3)])
    Plan(kind='tcp', number=0, is_new=False)
    """
    kinds = {word.kind for word in words} - {0}
    if len(kinds) != 1 or kinds == {1}:
        return Plan("tcp")
    [kind] = kinds
    first = words[0].number
    if first and all(word.number == first for word in words):
        return Plan(KINDS[kind], first)
    return Plan(KINDS[kind], 1 + max(word.newest for word in words), is_new=True)


class GroupBroken(LinkError):
    """A process group has failed, or was not made. It does not say which region is to blame."""


def _broken(error: Exception) -> GroupBroken:
    """In one line: what follows in torch's messages are places in its source."""
    return GroupBroken(short(str(error).partition("\n")[0].rstrip(". "), 300))


class Payloads:
    """How the payloads of a link travel.

    Args:
        asked: `regions.link`.
        device: of the model.
        host: the address of this machine that the others reach.
        timeout_s: seconds in which one payload must have come, once all regions are there.
        reason: why "auto" must not choose a process group here: one of `REASONS`.

    Attributes:
        tell: called with every choice.
    """

    def __init__(
        self,
        asked: str = "tcp",
        device: torch.device = HOST,
        host: str = "127.0.0.1",
        timeout_s: float = 120.0,
        reason: str = "",
    ) -> None:
        self.asked, self._device, self._host, self._timeout_s = asked, device, host, timeout_s
        self._reason = reason if reason or dist.is_gloo_available() else REASONS[-1]
        self.kind = asked if asked != "auto" else ""
        self.tell: Callable[[Carrier], None] = lambda choice: None
        self._lock = threading.Lock()
        self._group: Group | None = None
        self._newest = 0

    def settle(self, view: View, members: tuple[Member, ...], in_storage: bool) -> None:
        """Choose with all regions of a view, at their first meeting, and make the first group. TCP that is named is no choice.

        Raises LinkError if the group that `regions.link` names cannot be made. With "auto" it is TCP then.
        """
        if self.asked == "tcp":
            return
        reason = self._reason or ("a storage carries what it sends" if in_storage else "")
        launch, gpu = number_of(os.environ.get(ENV_LAUNCH, "")), gpu_of(self._device)
        own = Circumstances(REASONS.index(reason), view.network_rtt_s, launch, gpu)
        rows = view.swap(to_row(own), "the choice of a link")
        said = [_read(row, region) for region, row in zip(view.regions, rows, strict=True)]
        choice = choose(self.asked, view.regions, said)
        failure: GroupBroken | None = None
        if choice.kind != "tcp" and view.num_regions > 1:
            try:
                self._make(view, Plan(choice.kind, 1, is_new=True), members)
            except GroupBroken as error:
                failure = error
            if not view.vote(failure is None, "the first process group"):
                why = f"no {choice.kind} group could be made: {failure or 'another region says why'}"
                self.abort()
                if self.asked != "auto":
                    raise LinkError(
                        f"regions.link={self.asked}, and {why}. gloo and NCCL listen on ports that the system chooses: all "
                        "machines must reach each other on all of them. Set regions.link=tcp if they do not."
                    )
                choice = Carrier("tcp", f"{choice.why}, but {why}")
        self._take(*choice)

    def word(self, members: tuple[Member, ...]) -> GroupWord:
        """What this process tells the others with its trailer, for an attempt of these members."""
        with self._lock:
            group = self._group
            has = group is not None and group.members == members and not group.is_busy
            number = group.number if group is not None and has else 0
            return GroupWord(KINDS.index(self.kind), number, self._newest)

    @contextlib.contextmanager
    def opened(self, view: View, members: tuple[Member, ...], rows: Sequence[Tensor]) -> Iterator[RowsOf]:
        """Inside the block, what makes the way of payloads between the regions of a view. Raises GroupBroken if their group
        cannot be made.

        `rows`: end with the words of all; those of others are here if the own one says that this process `must_hear` them.
        After an error the group is aborted.
        """
        if not GroupWord.read(rows[view.region]).must_hear or view.num_regions == 1:
            yield WireRows
            return
        agreed = plan([GroupWord.read(row) for row in rows])
        if agreed.kind != self.kind:
            self._take(agreed.kind, "so the other regions say")
        if agreed.kind == "tcp":
            yield WireRows
            return
        try:
            group = self._make(view, agreed, members) if agreed.is_new else self._group
            if group is None or group.number != agreed.number:
                raise GroupBroken("it was aborted")
            group.is_busy = True
            yield partial(GroupRows, group)
            group.is_busy = False  # after an error it stays busy: nobody uses it again
        except GroupBroken:
            self.abort(view)
            raise

    def has_broken(self, view: View, rounds: int, why: str) -> None:
        """The group has broken so often in this attempt, here or in another region, and no region is lost."""
        self.abort(view)
        if rounds >= _ROUNDS and self.kind != "tcp":
            self._take("tcp", f"its process group broke {rounds} times although every region lives: {why}")

    def abort(self, view: View | None = None) -> None:
        """End what is under way in the group, here and in the others. It is not used again.

        `view`: of the thread that asks for it. Raises Revoked if that was left alone: the group may be its successor's.
        """
        with self._lock:
            if view is not None:
                view.check()
            group, self._group = self._group, None
        if group is not None:
            group.abort()

    def _take(self, kind: str, why: str) -> None:
        self.kind = kind
        self.tell(Carrier(kind, why))

    def _make(self, view: View, agreed: Plan, members: tuple[Member, ...]) -> "Group":
        """Make the group of all regions of a view. Raises GroupBroken, in each region that fails."""
        self.abort(view)
        own, where = offer_store(self._host, not view.region)
        [told, *_] = view.swap(where, "the store of a process group")
        try:
            store = own or reach_store(told)
            named = dist.PrefixStore(f"hf_cocodc/{agreed.number}", store)
            group = _GROUPS[agreed.kind](named, view, self._host, self._device, self._timeout_s)
        except (OSError, RuntimeError, ValueError) as error:
            raise _broken(error) from error
        group.number, group.members, group.store = agreed.number, members, store
        with self._lock:
            view.check()  # a thread that was left alone must not bring its group back
            self._group, self._newest = group, agreed.number
        return group


def offer_store(host: str, serves: bool) -> tuple[dist.TCPStore | None, Tensor]:
    """A store that listens at this address, and where, to be told to the others; neither if it `serves` not, or cannot."""
    store, where = None, b""
    if serves:
        with contextlib.suppress(OSError, RuntimeError), listen_at(host, 0) as listening:
            port = listening.getsockname()[1]
            fd = listening.detach()
            store = dist.TCPStore(host, port, None, True, _MAKE, wait_for_workers=False, master_listen_fd=fd)
            where = f"{host}:{port}".encode()
    told = torch.zeros(_WHERE_BYTES, dtype=torch.uint8, device=HOST)
    told[: len(where)] = torch.tensor(list(where), dtype=torch.uint8, device=HOST)
    return store, told


def reach_store(told: Tensor) -> dist.TCPStore:
    """The store that another region has told of. Raises RuntimeError and ValueError if there is none."""
    host, _, port = bytes(told.tolist()).rstrip(b"\0").decode().rpartition(":")
    return dist.TCPStore(host, int(port), timeout=_MAKE, wait_for_workers=False)


class Group:
    """A process group of the regions of a view, over gloo: it carries bytes of the host. Raises RuntimeError if it is not made
    in time.
    """

    device = HOST
    store: dist.TCPStore
    members: tuple[Member, ...]
    number = 0
    is_busy = False

    def __init__(
        self, store: dist.Store, view: View, host: str, device: torch.device, timeout_s: float
    ) -> None:
        self.rank, self._others, self._timeout = view.region, view.others, timedelta(seconds=timeout_s)
        self._phases = itertools.count()
        self._made = self._make(store, view, host, device)

    def _make(self, store: dist.Store, view: View, host: str, device: torch.device) -> Any:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices, options._threads = [dist.ProcessGroupGloo.create_device(hostname=host)], 1
        options._timeout = _MAKE
        return dist.ProcessGroupGloo(store, view.region, view.num_regions, options)

    def tag(self) -> int:
        """For the rows of one phase, from which their own tags count; equal in all regions."""
        return next(self._phases) % _PHASES * _ROWS

    def begin(self) -> None:
        """What follows up to `end` travels as one operation, where the backend needs that."""

    def end(self) -> Any:
        """The operation; None if each send and each receive is one."""
        return None

    def send(self, payload: Tensor, other: int, tag: int) -> Any:
        return self._made.send([payload], other, tag)

    def receive(self, buffer: Tensor, other: int, tag: int) -> Any:
        return self._made.recv([buffer], other, tag)

    def wait(self, work: Any, view: View) -> None:
        """Wait for an operation. Raises RuntimeError if it has failed, or does not end in time."""
        work.wait(self._timeout)

    def abort(self) -> None:
        """End all operations, here and in the others: one that is not in time closes all connections of a gloo group.

        One with a region that has closed its connection before fails at once, and closes nothing.
        """
        nothing = torch.empty(1, dtype=torch.uint8, device=HOST)
        for other in self._others:
            with contextlib.suppress(RuntimeError):
                self._made.recv([nothing], other, _ABORT).wait(timedelta(milliseconds=1))


class NcclGroup(Group):
    """The same over NCCL: payloads stay on the GPU."""

    _is_aborted = False
    _row: list[Callable[[], Any]]

    def _make(self, store: dist.Store, view: View, host: str, device: torch.device) -> Any:
        if device.type != "cuda" or not dist.is_nccl_available():
            raise RuntimeError(f"the model is on {device.type}, or this torch has no NCCL")
        self.device = torch.empty(0, device=device).device  # with its index
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = _MAKE
        # without it, torch watches the group in threads of its own, which end the process after an error
        with _environment(TORCH_NCCL_BLOCKING_WAIT="1"):
            made = dist.ProcessGroupNCCL(store, view.region, view.num_regions, options)
        # who has failed does not come, and NCCL would wait for it without end
        store.set(f"here/{view.region}", "")
        store.wait([f"here/{region}" for region in range(view.num_regions)], _MAKE)
        made.eager_connect_single_device(self.device)
        return made

    def begin(self) -> None:
        self._row = []

    def end(self) -> Any:
        row, self._row = self._row, []
        if not row:
            return None
        self._made._start_coalescing()
        try:
            for begin in row:
                begin()
        finally:  # or what this thread asks of NCCL later would wait for the end
            work = self._made._end_coalescing()
        return work

    def send(self, payload: Tensor, other: int, tag: int) -> Any:
        self._row.append(partial(self._made.send, [payload], other, tag))

    def receive(self, buffer: Tensor, other: int, tag: int) -> Any:
        self._row.append(partial(self._made.recv, [buffer], other, tag))

    def wait(self, work: Any, view: View) -> None:
        until = time.monotonic() + self._timeout.total_seconds()
        while not work.is_completed():
            view.check()
            if time.monotonic() > until:
                raise RuntimeError(
                    f"nothing came within {self._timeout.total_seconds():g} s (regions.timeout_s)"
                )
            time.sleep(_POLL_S)
        if self._is_aborted:  # that completes what is under way, too
            raise RuntimeError("it was aborted")
        work.wait()  # the current stream does; raises how NCCL has failed

    def abort(self) -> None:
        """NCCL may take its time for it: nobody waits."""
        self._is_aborted = True
        NativeThread(self._abort, "hf_cocodc-abort").start()

    def _abort(self) -> None:
        with contextlib.suppress(RuntimeError):
            self._made.abort()


_GROUPS = {"gloo": Group, "nccl": NcclGroup}


class GroupRows(Rows):
    """Rows of payloads over a process group. Raises GroupBroken."""

    def __init__(self, group: Group, view: View, sizes: Sizes, lend: Lend, what: str) -> None:
        self._group, self._view, self._sizes, self._lend, self._what = group, view, sizes, lend, what
        self.device, self._tag = group.device, group.tag()
        self._row: tuple[int, list[tuple[int, Any]]] = 0, []
        self._coming: dict[tuple[int, int], Tensor] = {}
        self._works: dict[tuple[int, int], Any] = {}
        self._sent: list[tuple[int, Any]] = []

    def begin(self, index: int) -> None:
        self._row = index, []
        with self._naming():
            self._group.begin()
            for other, size in self._sizes[index].items():
                buffer = self._coming[index, other] = self._lend(size, self.device)
                self._works[index, other] = self._group.receive(buffer, other, self._tag + index)

    def send(self, index: int, payload: Tensor, others: Sequence[int]) -> None:
        with self._naming():
            for other in others:
                self._row[1].append((other, self._group.send(payload, other, self._tag + index)))

    def end(self) -> None:
        with self._naming():
            work = self._group.end()
        index, sent = self._row
        if work is not None:
            self._works.update(((index, other), work) for other in self._sizes[index])
            sent = [(self._view.others[0], work)]
        self._sent += sent

    def take(self, index: int, other: int) -> Tensor:
        self._wait(other, self._works[index, other])
        return self._coming[index, other]

    def finish(self) -> None:
        for other, work in self._sent:
            self._wait(other, work)

    def _wait(self, other: int, work: Any) -> None:
        with self._view.awaiting(self._view.regions[other], self._what), self._naming():
            self._group.wait(work, self._view)

    @contextlib.contextmanager
    def _naming(self) -> Iterator[None]:
        """Inside the block, errors of the process group become ours."""
        try:
            yield
        except LinkError:
            raise
        except RuntimeError as error:
            self._view.check()
            raise _broken(error) from error


@contextlib.contextmanager
def _environment(**values: str) -> Iterator[None]:
    """Inside the block, the environment has these values."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
