"""The ranks of a region act as one: they wait for their leader without a time-out.

Accelerate's process group ends a collective call after 10 or 30 minutes. A leader may have to wait longer for another region,
which is late but alive. So the other ranks wait in a gloo group of their own, which has no such limit.

A rank that dies closes its connections. If ranks passed values on, only its neighbors would notice, and the others would wait
for these. So every rank hears directly from those for which it waits.
"""

import contextlib
import json
import logging
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState
from torch import Tensor

from ..errors import CocodcError, LinkError, error_named, short
from ..parts.tensors.memory import HOST

if TYPE_CHECKING:
    from .base import Link

T = TypeVar("T")

logger = logging.getLogger(__name__)

_NO_LIMIT = timedelta(days=365)
_LOOK = timedelta(seconds=0.2)
"""How often a rank that waits runs the handlers of signals."""
_LAST_MOMENT_S = 2.0
_LATE_S = 60.0
"""After so long, a rank that speaks says that the others do not listen."""


class RegionGroup:
    """One rank's side. Making it is a collective call of the region's ranks, as are its methods.

    Only the main thread may call it: gloo matches the calls of all ranks by their order. `heard` is what the leader has told
    with its last call. Raises LinkError if the ranks cannot connect to each other.
    """

    def __init__(self) -> None:
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        try:
            self._group: Any = dist.new_group(backend="gloo")  # connecting has gloo's usual limit
        except RuntimeError as error:
            raise LinkError(
                f"rank {self.rank} of this region cannot connect to the other ranks over gloo: {short(error, 300)}. Set "
                "GLOO_SOCKET_IFNAME to the network interface that reaches them, in all ranks."
            ) from error
        self.heard: Any = None

    def lead(
        self, call: Callable[[], T], what: str, news: Callable[[T], Any] = lambda result: None
    ) -> T | None:
        """Run `call` on the leader, while the other ranks wait until it has ended, however long it takes; they return None.

        Args:
            news: (result of the call) -> what the leader tells the other ranks; JSON.

        Raises:
            CocodcError: `call` has failed on the leader; or the leader has died.
        """
        if self.rank:
            answer = self.say(0, None, what)
            if "failure" in answer:
                raise error_of(answer["failure"])
            self.heard = answer["news"]
            return None
        try:
            result = call()
            self.heard = news(result)
        except BaseException as error:
            with contextlib.suppress(LinkError):
                self._say(0, {"failure": failure_of(error)}, what, _LAST_MOMENT_S)
            raise
        self.say(0, {"news": self.heard}, what)
        return result

    def say(self, rank: int, message: Any, what: str) -> Any:
        """The message of `rank`, as JSON has it, in all ranks. Raises LinkError if a rank has died."""
        return json.loads(self._say(rank, message, what))

    def of_all(self, own: Any, what: str) -> list[Any]:
        """What every rank says, in their order, in all ranks. Raises LinkError if a rank has died."""
        return [self.say(rank, own, what) for rank in range(self.num_ranks)]

    def together(self, attempt: Callable[[], T], what: str) -> T:
        """What `attempt` returns here, if it fails in no rank. A collective call. Raises what it has raised here or, as
        `error_of`, in another rank.
        """
        failed: Exception | None = None
        try:
            result = attempt()
        except Exception as error:
            failed = error
        try:
            failures = [each for each in self.of_all(failed and failure_of(failed), what) if each is not None]
        except LinkError as error:
            raise failed or error from None
        if failed is not None:
            raise failed
        if failures:
            raise error_of(failures[0])
        return result

    def begin_largest(self, numbers: Sequence[int], what: str) -> "Largest":
        """Begin to find the largest of each number, over all ranks."""
        own = torch.tensor([list(numbers)] * self.num_ranks, device=HOST)
        of_all, options = torch.empty_like(own), dist.AllToAllOptions()
        options.timeout = _NO_LIMIT
        return Largest(self, self._group.alltoall_base(of_all, own, [], [], options), of_all, what)

    def finish(self, work: Any, what: str, limit_s: float = math.inf, speaker: int | None = None) -> None:
        """Wait for an operation, for `limit_s` at most. Raises LinkError if a rank, or the one that speaks, has died."""
        until = time.monotonic() + limit_s
        warns_at = time.monotonic() + _LATE_S if speaker in (None, self.rank) else math.inf
        while not work.is_completed():
            if time.monotonic() > until:
                return
            if time.monotonic() > warns_at:
                warns_at = math.inf
                logger.warning(
                    "rank %d has waited %g s for other ranks of its region to come to %s. All ranks must make the same calls, "
                    "and equally many steps: outer.global_weights(), for example, must not stand below `if "
                    "accelerator.is_main_process`, and a loader that gives some ranks more batches than others "
                    "(even_batches=False) keeps these waiting.",
                    *(self.rank, _LATE_S, what),
                )
            with contextlib.suppress(RuntimeError):  # it goes on, or it has failed and says so below
                work.wait(_LOOK)
        try:
            work.wait()
        except RuntimeError as error:
            leader = "the leader (rank 0)" if speaker == 0 else f"rank {speaker}"
            whom = "another rank" if speaker in (None, self.rank) else leader
            raise LinkError(
                f"{whom} of this region has ended while rank {self.rank} waited for {what}. Look at its last output."
            ) from error

    def _say(self, rank: int, message: Any, what: str, limit_s: float = math.inf) -> bytes:
        """The message of `rank` as JSON; a rank that does not listen within `limit_s` hears it later."""
        if rank == self.rank:
            text = json.dumps(message).encode()
            content = torch.frombuffer(bytearray(text), dtype=torch.uint8)
            size = torch.tensor([len(text)], device=HOST)
            for work in [self._scatter(rank, each) for each in (size, content)]:
                self.finish(work, what, limit_s, rank)
            return text
        size = torch.zeros(1, dtype=torch.int64, device=HOST)
        self.finish(self._scatter(rank, size), what, speaker=rank)
        content = torch.empty(int(size), dtype=torch.uint8, device=HOST)
        self.finish(self._scatter(rank, content), what, speaker=rank)
        return bytes(content.tolist())

    def _scatter(self, rank: int, tensor: Tensor) -> Any:
        """Begin to bring what `rank` has in `tensor` to all others: in gloo's broadcast, ranks pass it on."""
        options = dist.ScatterOptions()
        options.rootRank, options.timeout = rank, _NO_LIMIT
        if rank != self.rank:
            return self._group.scatter([tensor], [], options)
        return self._group.scatter([torch.empty_like(tensor)], [[tensor] * self.num_ranks], options)


class Largest:
    """The largest of each number over all ranks, under way."""

    def __init__(self, group: RegionGroup, work: Any, of_all: Tensor, what: str) -> None:
        self._group, self._work, self._of_all, self._what = group, work, of_all, what

    def wait(self) -> list[int]:
        """Raises LinkError if a rank has died."""
        self._group.finish(self._work, self._what)
        return self._of_all.amax(0).tolist()

    def abandon(self, limit_s: float) -> None:
        """Nobody asks for it any more; give it so long to end."""
        with contextlib.suppress(LinkError):
            self._group.finish(self._work, self._what, limit_s)


def failure_of(error: BaseException) -> dict[str, str]:
    """An error that another rank raises as `error_of`."""
    kind = type(error).__name__
    message = str(error) if isinstance(error, CocodcError) else f"{kind}: {error}"
    return {"kind": kind, "message": message}


def error_of(failure: dict[str, str]) -> CocodcError:
    """The failure of another rank, here: of its kind if that is ours and takes a message, else a LinkError."""
    return error_named(failure["kind"], failure["message"], LinkError)


_group: tuple[Any, RegionGroup] | None = None
"""The group of this region's ranks, beside the default process group for which it was made."""


def ranks_of_region() -> RegionGroup:
    """The group in which this region's ranks wait for each other without a time-out. The first call is a collective one."""
    global _group
    if _group is None or _group[0] is not dist.group.WORLD:
        _group = dist.group.WORLD, RegionGroup()
    return _group[1]


def wait_for_ranks(accelerator: Accelerator | PartialState, what: str) -> None:
    """Wait until all ranks of the region have come here, however long one of them writes or reads: `wait_for_everyone` ends a
    run after NCCL's 10 minutes. A collective call. Raises LinkError if a rank has died.
    """
    if accelerator.num_processes > 1:
        ranks_of_region().begin_largest((0,), what).wait()


def from_main(accelerator: Accelerator, value: Any) -> Any:
    """The main process's `value`, which JSON can express, in all ranks of the region. A collective call."""
    if accelerator.num_processes == 1:
        return value
    return ranks_of_region().say(0, value, "what the main process knows")


def main_says(
    link: "Link",
    accelerator: Accelerator,
    find: Callable[[], T],
    what: str,
    kind: Any = Any,
) -> T:
    """What `find` returns in the region's main process, in all of its ranks. A collective call of the region's ranks.

    `find` may take longer than a collective call may: the other ranks wait for it without a time-out. `kind` is the value's
    type, by which these make it again from JSON. Raises what `find` has raised, in the main process; in the other ranks an
    error of the same kind, or LinkError.
    """
    outcome: Future[T] = Future()

    def attempt(_: "Link") -> None:
        if accelerator.is_main_process:  # every pipeline stage leads itself
            try:
                outcome.set_result(find())
            except Exception as error:
                outcome.set_exception(error)

    link.lead(attempt, what)
    if accelerator.num_processes > 1:
        group = ranks_of_region()
        group.lead(outcome.result, what, _plain)
        if not accelerator.is_main_process:
            return msgspec.convert(group.heard, kind, str_keys=True, dec_hook=lambda type, value: type(value))
    return outcome.result()


def _plain(value: Any) -> Any:
    """A value as JSON expresses it: a path as its name."""
    return msgspec.to_builtins(value, str_keys=True, enc_hook=str)
