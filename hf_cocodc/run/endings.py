"""How a run ends early: what all regions do when some of them come to their end."""

from collections.abc import Sequence

from ..links.trailer import Ending


def verdict(endings: Sequence[int], policy: str) -> str | None:
    """What all regions do now: "finish", "stop" (with a checkpoint, to be resumed), or None, to go on.

    Args:
        endings: every region's word, as it rode on one transfer.
        policy: `regions.when_one_ends`.
    """
    if Ending.INTERRUPTED in endings:
        return "finish" if policy == "finish" else "stop"
    if Ending.DONE not in endings or (policy == "continue" and Ending.NO in endings):
        return None
    return "stop" if policy == "stop" else "finish"
