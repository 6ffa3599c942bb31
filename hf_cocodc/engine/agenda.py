"""When a fragment is due: a method's schedule, and where it stands."""

from ..parts.schedules import AgreedStats, Land, Schedule, ScheduleState, Send
from .compatibility import same_structure


class Agenda:
    """Follows a schedule.

    Attributes:
        state: the schedule's, for a checkpoint.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self.state: ScheduleState = {}
        self._next_event = self._num_fragments = 0

    def begin(self, num_fragments: int, inner_step: int) -> None:
        """From now on there are so many fragments, and none is in flight."""
        self._num_fragments = num_fragments
        self._continue_from(self._schedule.init(num_fragments, inner_step))

    def events(self, inner_step: int, stats: AgreedStats) -> tuple[Send | Land, ...]:
        """The events of this inner step. Nearly free if there are none; called once for each step."""
        if inner_step < self._next_event:
            return ()
        found, self.state = self._schedule.events(inner_step, stats, self.state)
        self._next_event = self._schedule.next_event(inner_step, self.state)
        return found

    def load(self, state: ScheduleState) -> None:
        """Continue from a saved state.

        Raises:
            CheckpointError: it is another schedule's.
            TypeError, ValueError: the schedule says that it never has it.
        """
        same_structure(state, dict.fromkeys(self.state), "the schedule's state")
        sound = getattr(self._schedule, "sound", None)
        if sound is not None:
            sound(state, self._num_fragments)
        self._continue_from(state)

    def _continue_from(self, state: ScheduleState) -> None:
        self.state, self._next_event = state, 0  # no inner step before this one has events
