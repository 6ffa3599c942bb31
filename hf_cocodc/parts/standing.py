"""Where one of our schedules stands: a check of its state, which comes from a checkpoint or from another region."""

from typing import Any, Protocol


class _Ours(Protocol):
    def init(self, num_fragments: int, inner_step: int = 0) -> dict[str, Any]: ...

    def next_event(self, inner_step: int, state: dict[str, Any]) -> int: ...


def sound(schedule: _Ours, state: dict[str, Any], num_fragments: int) -> None:
    """Check a state with the keys of a fresh one: `in_flight` lists [fragment, inner step, ...], all else is as long as there.

    Raises:
        TypeError, ValueError: the schedule never has it with so many fragments.
    """
    fresh = schedule.init(num_fragments)
    flying = state.get("in_flight", [])
    is_sound = state.get("num_fragments", num_fragments) == num_fragments
    is_sound &= all(_alike(state[name], fresh[name]) for name in fresh if name != "in_flight")
    is_sound &= all(_alike(each, [0] * max(len(each), 2)) and each[0] < num_fragments for each in flying)
    if not is_sound:
        raise ValueError(f"the schedule's state is not one of {num_fragments} fragments")
    schedule.next_event(0, state)  # reads what is in flight


def _alike(found: Any, form: Any) -> bool:
    """Whether something is a count where `form` has one, and a list as long as there."""
    if not isinstance(form, list):
        return type(found) is int and found >= 0
    return isinstance(found, list) and len(found) == len(form) and all(map(_alike, found, form))
