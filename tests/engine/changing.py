"""Regions that come and go, in lockstep: who takes part in a call is written down beforehand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from hf_cocodc.errors import LeftBehind
from hf_cocodc.link.base import Arrival
from hf_cocodc.link.lockstep import LockstepHub, LockstepLink, VirtualLink, _Call
from hf_cocodc.link.process_state import process_state, set_process_state
from hf_cocodc.link.records import Record
from hf_cocodc.parts.codecs import without_residuals

T = TypeVar("T")
Sets = Callable[[int], Sequence[int]]
"""number of a call -> the regions that take part in it, ascending"""


class ChangingHub(LockstepHub):
    """A hub whose calls have members of their own. A region that is not among them follows: it gets what a member got."""

    def __init__(self, num_regions: int, sets: Sets, virtual: VirtualLink | None = None) -> None:
        super().__init__(num_regions, virtual)
        self._resolvers: dict[int, Any] = {}
        self.sets = sets
        self.links: list[LockstepLink] = [
            ChangingLink(self, region, num_regions) for region in range(num_regions)
        ]

    def bring(self, region: int, number: int, what: str, item: Any, resolve: Any) -> _Call:
        call = self._open_calls.setdefault(number, _Call(what))
        assert call.what == what, f"region {region} calls for {what}, another region for {call.what}"
        call.brought[region] = item
        self._resolvers[number] = resolve
        self.look(number)
        return call

    def look(self, number: int) -> None:
        """End a call if all its members, as they are known now, have made it."""
        call, members = self._open_calls[number], self.sets(number)
        if call.answers is None and call.brought.keys() >= set(members):
            found = self._resolvers[number]([call.brought[r] for r in members])
            call.members = members  # type: ignore[attr-defined]
            given = {r: told(answer, members) for r, answer in zip(members, found, strict=True)}
            lowest = given[members[0]]
            call.answers = [given.get(r, followed(lowest)) for r in range(len(self.links))]

    def lose(self) -> None:
        """A region was lost: calls that waited for it end without it."""
        for number in self._open_calls:
            self.look(number)


def told(answer: Any, members: Sequence[int]) -> Any:
    if isinstance(answer, tuple) and isinstance(answer[0], Arrival):
        arrival, at = answer
        return arrival._replace(members=tuple(members), changes=0), at
    return answer


def followed(answer: Any) -> Any:
    """What is in a log: of a codec's state, nothing that belongs to one region."""
    if isinstance(answer, tuple) and isinstance(answer[0], Arrival):
        arrival, at = answer
        result = arrival.result
        kept = result._replace(mean=result.mean.clone(), state=without_residuals(result.state))
        return arrival._replace(result=kept), at
    return answer


class ChangingLink(LockstepLink):
    """One region's side."""

    is_joining = is_out = follows = False
    _hub: ChangingHub

    def __init__(self, hub: ChangingHub, region: int, num_regions: int) -> None:
        super().__init__(hub, region, num_regions)
        self.is_elastic = True

    @property
    def members(self) -> tuple[int, ...]:
        return tuple(self._hub.sets(self._calls + 1))

    @property
    def parties(self) -> tuple[int, ...]:
        return (self.region,) if self.is_joining else tuple(self._hub.sets(self._calls))

    def takes_part(self) -> bool:
        return not self.follows or self.region in self.members

    def gather(self, record: Record, what: str) -> tuple[Record, ...]:
        return (record,) if self.is_joining else super().gather(record, what)

    def follow_from(self, calls: int) -> None:
        """A region that was `is_joining`, and reached nobody, follows the others from the call after this one on."""
        self.is_joining, self.follows, self._calls = False, True, calls

    def lose(self) -> None:
        """See `ChangingHub.lose`."""
        self._hub.lose()

    def answer(self, call: _Call) -> Any:
        if self.is_out and self.region not in getattr(call, "members", ()):
            raise LeftBehind("the others have gone on")
        return super().answer(call)

    def wait_until(self, ready: Callable[[], bool]) -> None:
        """Let the other regions run until something is so."""
        state = process_state()
        self._hub._waits[self.region] = ready
        self._hub._pass_the_turn(self.region)
        self._hub._turns[self.region].acquire()
        assert not self._hub._errors, "another region failed"
        self._hub._waits[self.region] = lambda: True
        set_process_state(state)

    @property
    def calls(self) -> int:
        return self._calls


def run_changing(
    num_regions: int, sets: Sets, body: Callable[[int, ChangingLink], T], virtual: VirtualLink | None = None
) -> list[T]:
    """`run_in_lockstep` for regions that come and go."""
    return ChangingHub(num_regions, sets, virtual).run(body)  # type: ignore[arg-type]
