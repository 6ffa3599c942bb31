"""The figures of a run in words. The summaries of a command and of a script, the report and the model card all say them so."""

from collections.abc import Iterable, Mapping

_MOST_SHARES = 8


def outer_steps(total: int, fragments: int, times: str = "") -> str:
    """How many outer steps there were; `times`: how many of each fragment, if that is known.

    >>> outer_steps(7, 1), outer_steps(7, 2, "3 to 4")
    ('7', '7, each of one of 2 fragments (of each 3 to 4)')
    """
    if fragments == 1:
        return str(total)
    return f"{total}, each of one of {fragments} fragments" + (f" (of each {times})" if times else "")


def blocked(blocked_s: float, training_s: float, unit: str = "s") -> str:
    """For how long sends and landings held training.

    >>> blocked(1.5, 30.0)
    '1.50 s of 30.0 s (5 %)'
    """
    return f"{blocked_s:.2f} s of {training_s:.1f} {unit} ({100 * blocked_s / max(training_s, 1e-9):.0f} %)"


def sent(own: float, data_parallel: float) -> str:
    """What a region has sent, and what it would have with data-parallel training, if that is known.

    >>> sent(2e6, 3e7)
    '2 MB; data-parallel training would have sent 30 MB (15 times as much)'
    >>> sent(3e6, 4e6)
    '3 MB; data-parallel training would have sent 4 MB (1.3 times as much)'
    """
    if not data_parallel:
        return amount(own)
    more = f"; data-parallel training would have sent {amount(data_parallel)}"
    if own:  # one that was alone has sent nothing
        ratio = data_parallel / own
        more += f" ({ratio:.{0 if ratio >= 10 else 1}f} times as much)"
    return amount(own) + more


def shares(samples: Mapping[int, int], speeds: Mapping[int, float] | None = None) -> str:
    """What each region has of a global batch, and how many samples a second it makes, if that is known; of many, the first ones.

    >>> shares({0: 12, 1: 4}, {0: 3.0, 1: 1.0})
    'region 0: 12 (3 a second), region 1: 4 (1 a second)'
    """
    parts = [f"region {region}: {count}" for region, count in samples.items()][:_MOST_SHARES]
    if speeds is not None:
        named = zip(parts, samples, strict=False)
        parts = [f"{part} ({speeds[region]:.3g} a second)" for part, region in named]
    more = len(samples) - len(parts)
    return ", ".join([*parts, f"and {more} more regions the rest"] if more else parts)


def data_parallel_bytes(num_params: int, steps: int, num_regions: int) -> int:
    """Bytes that a region would have sent with an fp32 gradient all-reduce over all regions at each step."""
    return 2 * (num_regions - 1) * 4 * num_params * steps // num_regions


def amount(count: float) -> str:
    """Bytes, with a unit.

    >>> amount(1234567)
    '1.235 MB'
    """
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.4g} {unit}"
        count /= 1000
    return f"{count:.4g} TB"


def lines(rows: Iterable[tuple[str, str]]) -> list[str]:
    """Names and values, as lines of text."""
    return [f"{name:<22}{value}" for name, value in rows]
