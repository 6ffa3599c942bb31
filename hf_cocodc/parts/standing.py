"""The checks of a schedule's state that comes from a checkpoint or from another region."""

from typing import Any, Protocol


class _Ours(Protocol):
    def init(self, num_fragments: int, inner_step: int = 0) -> dict[str, Any]: ...

    def next_event(self, inner_step: int, state: dict[str, Any]) -> int: ...


def sound(schedule: _Ours, state: dict[str, Any], num_fragments: int) -> None:
    """Check a state against a fresh one: keys and lengths are the same; `in_flight` lists [fragment, inner step, ...].

    Raises TypeError or ValueError if the schedule never has it with so many fragments.
    """
    fresh = schedule.init(num_fragments)
    flying = state.get("in_flight", [])
    is_sound = state.get("num_fragments", num_fragments) == num_fragments
    is_sound &= all(_alike(state[name], fresh[name]) for name in fresh if name != "in_flight")
    is_sound &= all(_alike(each, [0] * max(len(each), 2)) and each[0] < num_fragments for each in flying)
    if not is_sound:
        raise ValueError(f"the schedule's state is not one of {num_fragments} fragments")
    schedule.next_event(0, state)  # reads what is in flight


def _alike(value: Any, form: Any) -> bool:
    """Whether `value` has a count where `form` has one, and lists as long."""
    if not isinstance(form, list):
        return type(value) is int and value >= 0
    return isinstance(value, list) and len(value) == len(form) and all(map(_alike, value, form))
