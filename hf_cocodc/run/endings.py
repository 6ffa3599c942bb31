"""How a run ends early: what all regions do when one of them ends."""

from collections.abc import Callable, Sequence

from ..links.trailer import Ending

_WORDS = {Ending.DONE: "has completed its training", Ending.INTERRUPTED: "was interrupted"}


def verdict(endings: Sequence[Ending], policy: str) -> str | None:
    """What all regions do now: "finish", "stop" (with a checkpoint, to be resumed), or None, to train on.

    Args:
        endings: what each region said about its end, with one transfer.
        policy: `regions.when_one_ends`.

    >>> verdict([Ending.NO, Ending.DONE], "auto"), verdict([Ending.NO, Ending.INTERRUPTED], "auto")
    ('finish', 'stop')
    """
    if Ending.INTERRUPTED in endings:
        return "finish" if policy == "finish" else "stop"
    if Ending.DONE not in endings or (policy == "continue" and Ending.NO in endings):
        return None
    return "stop" if policy == "stop" else "finish"


def reasons(endings: Sequence[Ending], note_of: Callable[[int], str | None]) -> str:
    """Which regions ended, and why, in words.

    Args:
        endings: see `verdict`.
        note_of: returns the note that a region left, if any.
    """
    said = []
    for region, ending in enumerate(endings):
        if ending is not Ending.NO:
            note = note_of(region)
            said.append(f"region {region} {_WORDS[ending]}" + (f" ({note})" if note else ""))
    return "; ".join(said)


def announcement(verdict: str, why: str, step: int, policy: str) -> str:
    """The sentence that tells of a verdict."""
    do = "finish" if verdict == "finish" else "stop, to be resumed from a checkpoint,"
    return f"{why}: all regions {do} here, at step {step} (regions.when_one_ends={policy})."
