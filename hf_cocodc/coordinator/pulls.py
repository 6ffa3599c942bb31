"""Callers that pull the newest global model of a run (`hf-cocodc pull`), and the bytes on their way to them.

A member is told who waits for its model (`Wanted`), and calls for each of them on a connection of its own; what it sends there is
passed on, at the pace of the slower end. Nothing of this reaches `rules.py`: a pull cannot change who takes part.
"""

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass

from .messages import Refuse, ToRegion, Waiting, Wanted
from .rules import end_in_words
from .runs import Hosted, phase

MOST_AT_ONCE = 4
"""Callers of one run that are served at the same time. Others wait."""
MOST_WAITING = 64
STALLED_S = 60.0
"""An end that sends, or takes, nothing for so long has gone."""
NOBODY_S = 60.0
"""How long a caller waits while no member is connected."""
_CHUNK = 1 << 18


@dataclass(eq=False)
class _Pull:
    """A caller. `name`: nobody but its donor is told it; `alone_at`: since when no member can give it anything."""

    who: int
    name: str
    hosted: Hosted
    writer: asyncio.StreamWriter
    alone_at: float
    told: str = ""
    passing: "asyncio.Task[None] | None" = None


class Pulls:
    """All callers of one coordinator, for the thread of its loop. `send` sends a message to a connection."""

    def __init__(self, send: Callable[[int, ToRegion], None]) -> None:
        self._send = send
        self._pulls: dict[int, _Pull] = {}  # in the order in which they came
        self._wanted: dict[int, tuple[str, ...]] = {}

    def come(self, who: int, hosted: Hosted, writer: asyncio.StreamWriter, now: float) -> None:
        """A caller has come."""
        if len(self._of(hosted)) >= MOST_WAITING:
            self._refuse(
                who, "MeetingError", f"{MOST_WAITING} others pull it already. Try again later.", hosted
            )
        elif who not in self._pulls:
            self._pulls[who] = _Pull(who, secrets.token_hex(16), hosted, writer, now)

    def waits(self, who: int) -> bool:
        """Whether a connection is of a caller to whom nothing is given yet."""
        return who in self._pulls and self._pulls[who].passing is None

    def ended(self, who: int) -> None:
        """A connection has ended."""
        pull = self._pulls.pop(who, None)
        if pull is not None and pull.passing is not None:
            pull.passing.cancel()  # ends the donor's connection

    def look_after(self, now: float) -> None:
        """Tell members who waits for them, and callers what they wait for. Call this several times a second."""
        wanted: dict[int, tuple[str, ...]] = {}
        for hosted in {id(each.hosted): each.hosted for each in self._pulls.values()}.values():
            self._deal(hosted, now, wanted)
        for who in self._wanted.keys() | wanted.keys():
            if wanted.get(who) != self._wanted.get(who):
                self._send(who, Wanted(pulls=wanted.get(who, ())))
        self._wanted = wanted

    def _deal(self, hosted: Hosted, now: float, wanted: dict[int, tuple[str, ...]]) -> None:
        state, mine = hosted.state, self._of(hosted)
        waiting = [each for each in mine if each.passing is None]
        if state.ended is not None and phase(state) == "ended":
            _, why = end_in_words(state.name, state.ended, "nothing more is given")
            for each in waiting:
                self._refuse(each.who, "RunOver", why)
            return
        seats = {
            seat.member: who
            for who, seat in state.seats.items()
            if state.trains and seat.member in state.members
        }
        room = MOST_AT_ONCE - (len(mine) - len(waiting))
        for each in waiting:
            if seats or state.hellos:
                each.alone_at = now
            if now - each.alone_at > NOBODY_S:
                why = f"no region that trains has been connected to the coordinator for {NOBODY_S:g} s."
                self._refuse(each.who, "MeetingError", why, hosted)
            elif not seats:
                self._tell(each, "no region that trains is connected to the coordinator yet")
            elif room <= 0:
                self._tell(each, f"{MOST_AT_ONCE} others pull it now")
            else:
                room -= 1
                donor = min(seats)  # one and the same, so that pulls hold training as little as they can
                self._tell(each, f"region {donor.region} gives it after its next landing, or before")
                wanted[seats[donor]] = (*wanted.get(seats[donor], ()), each.name)

    async def pass_on(self, name: str, reader: asyncio.StreamReader) -> None:
        """Pass on what a donor sends to the caller of this name, until one of them ends. Nobody may wait for it any more."""
        pull = next((each for each in self._pulls.values() if each.name == name), None)
        if pull is None or pull.passing is not None:
            return
        pull.passing = asyncio.current_task()
        try:
            while pull.who in self._pulls:  # before Python 3.12, wait_for may swallow that it is cancelled
                chunk = await asyncio.wait_for(reader.read(_CHUNK), STALLED_S)
                if not chunk:
                    break
                pull.writer.write(chunk)
                await asyncio.wait_for(pull.writer.drain(), STALLED_S)
        except asyncio.TimeoutError:
            pull.writer.transport.abort()
        except OSError:
            pass
        finally:
            pull.writer.close()

    def _of(self, hosted: Hosted) -> list[_Pull]:
        return [each for each in self._pulls.values() if each.hosted is hosted]

    def _tell(self, pull: _Pull, why: str) -> None:
        if why != pull.told:
            pull.told = why
            self._send(pull.who, Waiting(why=why))

    def _refuse(self, who: int, error: str, why: str, hosted: Hosted | None = None) -> None:
        self._pulls.pop(who, None)
        of = "" if hosted is None else f"the model of run {hosted.state.name!r} cannot be pulled: "
        self._send(who, Refuse(error=error, why=f"{of}{why}"))
