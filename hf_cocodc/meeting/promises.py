"""What members tell each other to agree on the step at which they stop; it is checked before it is believed."""

from typing import Any

from ..errors import short
from .heard import whole
from .values import foreign, read_json, text_of

NO: dict[str, Any] = {"step": 0, "reasons": []}
"""The decision not to stop."""
_LONGEST = 200


def reason_in(found: bytes, key: str) -> str:
    return short(text_of(found, key), _LONGEST)


def promise_in(found: bytes, key: str) -> dict[str, Any]:
    told = read_json(found, key)
    if not isinstance(told, dict) or not isinstance(told.get("reason"), str):
        raise foreign(key, found)
    return {"step": _step_in(told, found, key), "reason": short(told["reason"], _LONGEST)}


def decision_in(found: bytes, key: str) -> dict[str, Any]:
    told = read_json(found, key)
    reasons = told.get("reasons") if isinstance(told, dict) else None
    if not isinstance(reasons, list) or not all(isinstance(reason, str) for reason in reasons):
        raise foreign(key, found)
    return {"step": _step_in(told, found, key), "reasons": [short(reason, _LONGEST) for reason in reasons]}


def _step_in(told: dict[str, Any], found: bytes, key: str) -> int:
    try:
        return whole(told.get("step"))
    except ValueError:
        raise foreign(key, found) from None


def decision_of(told: list[dict[str, Any]] | None) -> dict[str, Any]:
    """What all do after these promises; not to stop, if promises are missing."""
    if told is None:
        return NO
    return {"step": max(each["step"] for each in told), "reasons": [each["reason"] for each in told]}
