"""What must hold in every run, looked at all the time."""

from typing import TYPE_CHECKING, Any

from hf_cocodc.coordinator.messages import Decided
from hf_cocodc.link import rules
from hf_cocodc.link.part import Call, Part, Standing
from hf_cocodc.net.members import Member

if TYPE_CHECKING:
    from .process import Flight, Process
    from .shell import Result, Shell


class Violation(AssertionError):
    """Something holds no more that must hold in every run."""


class Checks:
    """Everything that must be equal in all processes of a run is compared with the first one that shows it."""

    def __init__(self) -> None:
        self._seen: dict[tuple[Any, ...], tuple[Any, str]] = {}
        self.num_completed = 0

    def _same(self, shell: "Shell", what: str, key: tuple[Any, ...], value: Any) -> None:
        assert shell.welcome is not None
        key = (shell.welcome.run, what, *key)
        first, by = self._seen.setdefault(key, (value, str(shell.me)))
        if first != value:
            raise Violation(f"{what} {key[2:]}: {by} has {first}, {shell.me} has {value}")

    def left_behind(self, process: "Process") -> None:
        """The others go on without a process only if something is wrong with it, or it came in a moment ago."""
        came_in = process.welcome is not None and process.welcome.joins
        if process.is_well and not came_in and process.terms.grace_s is None:
            raise Violation(f"the others go on without {process.me}, and nothing was wrong with it")

    def stepped(self, shell: "Shell", before: Part, event: rules.Event) -> None:
        """The rules have made a step."""
        after = shell.part
        if (after.changes, after.losses) < (before.changes, before.losses) or after.losses < before.losses:
            raise Violation(f"{shell.me} goes back at {event}: from {before} to {after}")
        if after.done > after.submitted:
            raise Violation(f"{shell.me} has completed a call that it has not made: {after}")

    def made(self, process: "Process", number: int, what: str) -> None:
        """The same call at the same step by the same members."""
        part = process.part
        self._same(process, "call", (number,), (what, process.step, part.changes))
        self._same(process, "members of call", (number, part.losses), part.members)
        if process.me not in part.roster:
            raise Violation(f"{process.me} makes call {number}, and is none of {part.roster}")

    def completed(self, shell: "Shell", call: Call, result: "Result") -> None:
        """One decision a call: the same parties, the same value."""
        self.num_completed += 1
        if shell.me not in call.parties:
            raise Violation(f"{shell.me} completes a call in which it takes no part: {call}")
        self._same(shell, "result of call", (call.number,), (result.digest, result.members, call.losses))
        self._same(shell, f"changes that all know by call, lane {shell.lane}", (call.number,), result.knows)

    def decided(self, shell: "Shell", decided: Decided) -> None:
        if shell.world.plan.loses_nobody:
            raise Violation(f"nothing was wrong, and {shell.me} hears {decided}")
        if decided.decision.number >= shell.part.losses:
            self._same(shell, "decision", (decided.decision.number,), decided.decision)

    def switched(self, shell: "Shell", joined: tuple[Member, ...], left: tuple[Member, ...]) -> None:
        """Changes count at the same step in all members."""
        for change in (*joined, *left):
            kind = "join of" if change in joined else "leave of"
            self._same(shell, kind, (change,), (shell.step, shell.part.submitted))

    def landed(self, process: "Process", flight: "Flight", value: int, result: "Result") -> None:
        """All land the same, at the same step, and hold the same global params then."""
        key = (flight.number,)
        self._same(
            process, "landing", key, (flight.fragment, flight.sent_at, process.step, value, result.digest)
        )

    def followed(self, process: "Process", asked: int, marker: rules.Marked) -> None:
        """A newcomer has made the calls of the members."""
        if asked != marker.submitted:
            raise Violation(f"{process.me} has followed {asked} calls of {marker.submitted}")

    def saved(self, process: "Process") -> None:
        """Where a loss ends the run, all who are left save the same, at the same step."""
        flights = tuple((each.number, process.results[each.number].digest) for each in process.flights)
        self._same(process, "checkpoint", (), (process.step, tuple(process.values), flights))

    def compared(self, process: "Process", number: int) -> None:
        self._same(process, "end", (), (number, tuple(process.values), process.step))
        if process.part.standing is Standing.MEMBER and number != process.part.submitted:
            raise Violation(f"{process.me} ends with {process.part}")

    def ended(self, processes: "list[Process]") -> None:
        """Who has finished has completed all that anybody has completed of that run."""
        most: dict[str, int] = {}
        for run, what, *key in self._seen:
            if what == "result of call":
                most[run] = max(most.get(run, 0), key[0])
        for process in processes:
            has_finished = process.how == "finished" and process.welcome is not None
            if has_finished and process.part.done != most[process.welcome.run]:  # type: ignore[union-attr]
                raise Violation(f"{process.me} has finished without the last calls: {process.part}")
