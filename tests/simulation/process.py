"""A region's process: the training loop, as far as others see it. It yields what it waits for.

It makes inner steps, sends and lands fragments, leaves, stops, finishes; it comes in as a newcomer, and gives newcomers a base.
"""

from collections.abc import Callable, Generator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from hf_cocodc.coordinator.messages import Bye, Hello, Leave, Post, Ready
from hf_cocodc.link import rules
from hf_cocodc.link.part import Standing
from hf_cocodc.net.members import Member
from tests.listening import lanes

from .network import Connection
from .shell import LeftBehind, Lost, Result, Shell, Undecided

if TYPE_CHECKING:
    from .world import World

START_S, BASE_S, LET_IN_S = 60.0, 8.0, 30.0
_FOREVER = float("inf")


class Flight(NamedTuple):
    """A transfer in flight. `leaves`: whether its trailer says that this region leaves."""

    fragment: int
    sent_at: int
    number: int
    leaves: bool


class Finished(Exception):
    """This process ends: how, and why."""


class DonorLost(Exception):
    """The log of another member has ended."""


class Process(Shell):
    """Args:
    join: whether it enters a run that trains.

    Attributes:
        how: how it has ended: a word of `Bye`, "over" or "killed"; None while it runs.
        why: the reason, in words.
        is_well: whether no fault has concerned it; `disturbed_until`: until when the last one has.
        takes_part: whether this is a member, or was one when it failed.
    """

    def __init__(self, world: "World", region: int, join: bool, ranks: list["Process"]) -> None:
        super().__init__(world, region, ranks)
        self.join, self.why, self.is_well, self.times_kept_out = join, "", True, 0
        self.disturbed_until = 0.0
        self.step, self.number = 0, world.next_number()
        # a newcomer's own weights differ from everybody's: they must never reach a mean
        self.values = [self.number if join else 0] * world.plan.fragments
        self.flights: list[Flight] = []
        self.sent_at = [0] * world.plan.fragments
        self.forget()
        self._holds: Callable[[], bool] = lambda: True
        self._until_at = 0.0
        self._blocked_at: float | None = None
        self._story = self._live()
        self._is_poking = False
        self.later(0.0, self.poke)

    def forget(self) -> None:
        super().forget()
        self.takes_part, self.met_at = False, self.network.now
        self._log: Connection | None = None
        self._log_ended = False
        self._base: Any = None
        self._markers: list[Any] = []
        self._asked = 0
        self._admitted_at: int | None = None
        self._has_left = False
        self.num_landed = self.world.plan.regions

    def poke(self) -> None:
        """Go on with the training loop, as far as it need not wait."""
        if self.how is not None or self._is_poking:
            return
        self._is_poking = True
        try:
            while self.how is None and (self._holds() or self.network.now >= self._until_at - 1e-9):
                self._holds, self._until_at = next(self._story)
                if self._until_at < _FOREVER:
                    self.network.at(self._until_at, self, self.poke)
        except StopIteration:
            pass
        finally:
            self._is_poking = False

    def kill(self) -> None:
        super().kill()
        if self.how is None:
            self.how = "killed"

    def end(self, how: str, why: str) -> None:
        self.how, self.why = how, why
        if how == "finished":
            for log in self.sinks:
                log.send(self, ("over",))
        self.part_with(Bye(how="failed" if how in ("over", "undecided") else how, step=self.step))
        self.world.tell(self, f"ends: {how} {why}")
        self.world.has_ended(self)

    @property
    def blocked_s(self) -> float | None:
        return None if self._blocked_at is None else self.time - self._blocked_at

    # ---- the story ----------------------------------------------------------------------------------------------------

    def _until(self, holds: Callable[[], bool], seconds: float = _FOREVER) -> Generator[Any, None, bool]:
        """Wait; returns whether it holds. Raises the failure of the link."""
        self._blocked_at = self.time
        yield (lambda: self.failure is not None or holds()), self.network.now + seconds
        self._blocked_at = None
        if self.failure is not None:
            raise self.failure
        return holds()

    def _sleep(self, seconds: float) -> Generator[Any, None, None]:
        yield (lambda: False), self.network.now + seconds

    def _live(self) -> Generator[Any, None, None]:
        try:
            yield from self._meet(self.join)
            assert self.welcome is not None
            if self.welcome.joins:
                yield from self._come_in()
            while True:
                try:
                    yield from self._train()
                except LeftBehind as error:
                    if self.leaves:
                        raise Finished("left", "the others have gone on") from None
                    if not self.terms.is_open:
                        self.world.checks.left_behind(self)
                        raise Finished("over", f"the others have ended without it: {error}") from None
                    self.world.tell(self, f"is left behind: {error}")
                    self.world.checks.left_behind(self)
                    if len(self.ranks) > 1:
                        raise Finished("over", "the ranks of a region come back together") from None
                    yield from self._come_back()
                    yield from self._come_in()
        except Finished as error:
            self.end(*error.args)
        except Undecided as error:
            self.end("undecided", str(error))
        except (LeftBehind, DonorLost, Lost) as error:
            self.end("failed", str(error))

    def _meet(self, join: bool) -> Generator[Any, None, None]:
        """Meet the others, or join the run that trains."""
        if self.lane:
            leader = self.ranks[0]
            yield from self._until(lambda: 0 in self.lines or leader.how is not None, 2 * START_S)
            if leader.how is not None:
                raise Finished("over", "its leader has ended")
            self.welcome = leader.welcome
        else:
            yield from self._call_coordinator(join)
        assert self.welcome is not None
        self.enter(self.welcome)
        others = [place.member for place in self.welcome.members if place.member != self.me]
        if not self.welcome.joins and not (
            yield from self._until(lambda: all(each in self.pairs for each in others), BASE_S)
        ):
            raise Finished("failed", "it cannot be connected")
        self.takes_part, self.met_at = not self.welcome.joins, self.network.now

    def _call_coordinator(self, join: bool) -> Generator[Any, None, None]:
        until = self.network.now + 15.0
        while (coordinator := self.world.reachable(self)) is None:
            if self.network.now > until:
                raise Finished("failed", "no coordinator answers")
            yield from self._sleep(1.0)
        self.connection = Connection("coordinator", self, coordinator, "run")
        token = str(self.world.next_number())
        hello = Hello(
            region=self.region,
            join=join,
            lanes=lanes(str(self.region)),
            machine="",
            token=token,
            terms=self.terms,
            compared={},
        )
        self.send(hello)
        yield from self._until(
            lambda: self.welcome is not None or self.refused is not None or self.connection is None, START_S
        )
        if self.refused is not None:
            raise Finished(
                "over" if self.refused.error in ("RunOver", "RunFinished") else "failed", self.refused.why
            )
        if self.welcome is None:
            self.world.not_met(self)
            raise Finished("failed", "it has not met the others")

    def _train(self) -> Generator[Any, None, None]:
        plan = self.world.plan
        while self.step < plan.steps:
            yield from self._sleep(plan.step_s * (0.5 + self.network.random.random()))
            yield from self._inner_step()
            yield from self._after()
        yield from self._finish()

    def _inner_step(self) -> Generator[Any, None, None]:
        plan = self.world.plan
        self._tick()
        self.step += 1
        self._has_left = False
        for fragment in range(plan.fragments):
            if plan.overlap and plan.sends(fragment, self.step - plan.overlap):
                yield from self._land(fragment)
            if plan.sends(fragment, self.step):
                self._send(fragment)
                if not plan.overlap:
                    yield from self._land(fragment)

    def _tick(self) -> None:
        """Changes count from the next inner step on; the log has all up to the one before."""
        if self.part.standing is Standing.MEMBER:
            admitted = self.feed(rules.Ticked())
            if self.has_moved or admitted:
                self.has_moved = False
                self._write_marker(list(self.sinks), admitted)

    def _write_marker(self, logs: list[Connection], admitted: tuple[int, ...] = ()) -> None:
        part, lost = self.part, tuple(sorted(self.part.lost))
        marked = rules.Marked(part.submitted, part.changes, part.losses, lost, part.roster, False)
        for log in logs:
            log.send(self, ("marker", self.step, marked, admitted))

    def _send(self, fragment: int) -> None:
        self.flights.append(Flight(fragment, self.step, self._call(f"fragment {fragment}"), self.leaves))
        self.sent_at[fragment] = self.step

    def _land(self, fragment: int) -> Generator[Any, None, None]:
        flight = next((each for each in self.flights if each.fragment == fragment), None)
        if flight is None:
            return  # nothing was sent before the run began
        result = yield from self._result(flight.number)
        if len(self.ranks) > 1:  # they settle what they know
            yield from self._until(lambda: all(flight.number in each.results for each in self.ranks))
            result = result._replace(knows=min(each.results[flight.number].knows for each in self.ranks))
        self.flights.remove(flight)
        self.num_landed = len(result.members)
        self.values[fragment] = hash((self.values[fragment], result.digest))
        self.world.checks.landed(self, flight, self.values[fragment], result)
        if self.part.standing is Standing.MEMBER:
            self.feed(rules.Landed(result.knows, result.changes))
            self.has_moved = True
        self._has_left = flight.leaves and self.part.is_leaving

    def _result(self, number: int) -> Generator[Any, None, Result]:
        follows = self.part.standing is Standing.FOLLOWING or number < self.part.first
        yield from self._until(lambda: number in self.results or (follows and self._log_ended))
        if number not in self.results and self.part.standing is Standing.FOLLOWING:
            raise DonorLost("the log has ended")
        if number not in self.results:
            self.fail(LeftBehind("it has not received all that was sent before it came in"))
            raise LeftBehind("the log has ended")
        return self.results[number]

    def _call(self, what: str) -> int:
        """Make a call; returns its number."""
        if self.part.standing is Standing.FOLLOWING:
            self._asked += 1
            return self._asked
        if self.failure is not None:
            raise self.failure
        number = self.part.submitted + 1
        self.feed(rules.Made(what))
        self.world.checks.made(self, number, what)
        return number

    def _after(self) -> Generator[Any, None, None]:
        """What comes after the events of an inner step."""
        since = self._admitted_at
        if since is not None and all(flight.sent_at > since for flight in self.flights):
            self._admitted_at = None
            self._end_log()
        yield from self._stop_if_agreed()
        if self.step >= self.world.plan.steps:
            return
        yield from self._stop_if_too_few()
        if not self.terms.is_open:
            return
        while self.wants:
            yield from self._give_base(self.wants.pop(0))
        if self.asks_to_leave and not self.leaves:
            yield from self._leave()

    def _leave(self) -> Generator[Any, None, None]:
        plan, since = self.world.plan, self.step
        if len(self.part.members) == 1:
            for flight in self.flights:
                yield from self._result(flight.number)
            raise Finished("stopped", "alone")
        while self.step < plan.steps and any(sent_at <= since for sent_at in self.sent_at):
            yield from self._coast()
        self.leaves = True
        self.send(Leave())
        while self.step < plan.steps and not self._has_left:
            yield from self._coast()
        if self.step >= plan.steps:  # a change counts from the next step on, and there is none
            yield from self._finish()
        for flight in self.flights:
            yield from self._result(flight.number)
        self._tick()
        raise Finished("left", "as asked")

    def _coast(self) -> Generator[Any, None, None]:
        """Make an inner step without training."""
        self.coasts = True
        yield from self._inner_step()
        yield from self._stop_if_agreed()

    def _stop_if_agreed(self) -> Generator[Any, None, None]:
        """Stop where all do. If this step was promised, wait for the coordinator's answer."""
        self.ask_to_stop()
        if self._promised is not None and self.step >= self._promised:
            left_s = max(self._promised_until - self.time, 0.0)
            yield from self._until(lambda: self._promised is None or self.stop_at != 0, left_s)
            self._promised = None
        if self.stop_at == self.step:
            if not self.takes_part:
                raise Finished("over", "the others stop")
            for flight in self.flights:
                yield from self._result(flight.number)
            raise Finished("stopped", "as asked")
        self.passed = self.step

    def _stop_if_too_few(self) -> Generator[Any, None, None]:
        """Stop with a checkpoint where a landing shows that too few are left, and nobody may come in."""
        if self.terms.is_open or self.num_landed >= self.terms.least:
            return
        for flight in self.flights:
            yield from self._result(flight.number)
        self.world.checks.saved(self)
        raise Finished("stopped", "a region is lost")

    def _finish(self) -> Generator[Any, None, None]:
        """The end of the run: land all, send and land once more, and compare."""
        for flight in list(self.flights):
            yield from self._land(flight.fragment)
        for fragment in range(self.world.plan.fragments):
            self._send(fragment)
            yield from self._land(fragment)
        yield from self._stop_if_too_few()
        number = self._call("comparison")
        yield from self._result(number)
        self.world.checks.compared(self, number)
        self.feed(rules.NoMoreCalls())
        yield from self._until(lambda: not self.part.calls)
        raise Finished("finished", "")

    # ---- newcomers, and their donors ------------------------------------------------------------------------------------

    def _come_in(self) -> Generator[Any, None, None]:
        """Get a base, and follow the log after it until this process is a member."""
        while True:
            try:
                yield from self._get_base()
                yield from self._follow()
                return
            except (DonorLost, LeftBehind) as error:
                self.world.tell(self, f"begins once more with another base: {error}")
                yield from self._come_back()

    def _come_back(self) -> Generator[Any, None, None]:
        self.part_with(Bye(how="left"))
        self.forget()
        self.flights = []
        yield from self._meet(join=True)
        assert self.welcome is not None
        if not self.welcome.joins:
            raise Finished("failed", "it has met others for a new run")

    def _get_base(self) -> Generator[Any, None, None]:
        until = self.network.now + START_S
        while self.network.now < until:
            for donor in self._donors():
                self._log_ended, self._base = False, None
                self.send(Post(to=donor, topic="base", content={}))
                yield from self._until(lambda: self._base is not None or self._log_ended or self.over, BASE_S)
                if self.over:
                    raise Finished("over", "the run is over")
                if self._base is not None and not self._log_ended:
                    self.step, values, flights, sent_at, self._asked, results = self._base
                    self.values, self.flights, self.sent_at = list(values), list(flights), list(sent_at)
                    self.results.update(results)
                    self.feed(rules.Followed())
                    return
            if not self._donors():
                yield from self._come_back()
            yield from self._sleep(0.5)
        raise Finished("failed", "no base in time")

    def _donors(self) -> list[Member]:
        assert self.welcome is not None
        known = {*(place.member for place in self.welcome.members), *self.part.roster} - {self.me}
        return [each for each in sorted(known) if self.is_there(each)]

    def _follow(self) -> Generator[Any, None, None]:
        ready_at = _FOREVER
        while True:
            yield from self._until(lambda: bool(self._markers) or self._log_ended or self.over, BASE_S)
            if not self._markers:
                if self.over:
                    raise Finished("over", "the run is over")
                if (
                    self._log_ended
                    or self._log is None
                    or not self.network.reaches(self, self._log.other[self])
                ):
                    raise DonorLost("the log has ended")
                continue
            step, marker, admitted = self._markers.pop(0)
            while self.step < step:
                yield from self._inner_step()
                yield from self._stop_if_agreed()
            if self.failure is not None:
                raise self.failure
            self.world.checks.followed(self, self._asked, marker)
            is_in = self.me.ticket in admitted
            self.feed(replace(marker, is_in=is_in))
            if self.failure is not None:
                raise self.failure
            if is_in:
                self._admitted_at, self.takes_part = self.step, True
                self.world.tell(self, f"is a member from step {self.step + 1} on")
                return
            self.send(Ready())
            if not self.part.answers or any(each.member == self.me for each in self.part.announced):
                ready_at = _FOREVER
            ready_at = min(ready_at, self.network.now)
            if self.network.now - ready_at > LET_IN_S:
                self.world.kept_out(self)
                raise LeftBehind("nobody lets it in")

    def hear_log(self, connection: Connection, item: Any) -> None:
        if connection.about != getattr(self, "me", None) or connection in self.sinks:
            self.sinks.pop(connection, None)
            connection.close(self)
            return
        match item:
            case ("base", base) if self.part.standing is Standing.JOINING and self._base is None:
                self._log, self._base, self._markers = connection, base, []
            case _ if connection is not self._log:
                connection.close(self)
            case None:
                self._log_ended = True
            case ("entry", number, _) if self.part.standing is Standing.MEMBER and number >= self.part.first:
                pass  # it takes part in this call itself
            case ("entry", number, result):
                self.results[number] = result._replace(changes=-1)
            case ("marker", *marker):
                self._markers.append(marker)
            case ("over",):
                self.over = True

    def refuse_base(self) -> None:
        self._log_ended = True

    def _end_log(self) -> None:
        if self._log is not None:
            self._log.close(self)
            self._log = None

    def _give_base(self, member: Member) -> Generator[Any, None, None]:
        """Give a newcomer a base of this moment, and the log from now on."""
        for flight in self.flights:
            yield from self._result(flight.number)
        newcomer = self.world.process_of(member)
        if newcomer is None or not self.is_there(member) or not self.network.reaches(self, newcomer):
            return
        log = Connection("log", self, newcomer, member)
        results = {each.number: self.results[each.number]._replace(changes=-1) for each in self.flights}
        flights = [each._replace(leaves=False) for each in self.flights]
        base = (self.step, self.values[:], flights, self.sent_at[:], self.part.submitted, results)
        log.send(self, ("base", base))
        self.sinks[log] = self.part.submitted + 1
        self._write_marker([log])
