"""What is found on a machine: one line for each thing that is looked at."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

OK, WARN, WRONG, UNKNOWN = "ok", "warn", "wrong", "-"
_WIDTH = 120


@dataclass(frozen=True)
class Finding:
    """One line.

    Attributes:
        topic: what was looked at.
        level: OK; WARN: the run may work, but not well; WRONG: it cannot work; UNKNOWN: this machine does not say.
        words: what was found.
        command: a command that mends it.
    """

    topic: str
    level: str
    words: str
    command: str | None = None


def unknown(topic: str, why: str = "not known here") -> Finding:
    """A line about something that this machine does not say."""
    return Finding(topic, UNKNOWN, why)


def lines(findings: Sequence[Finding]) -> list[str]:
    """The findings as lines of text: the level, the topic, the words, and below them the command.

    >>> print("\\n".join(lines([Finding("clock", WARN, "not synchronised", "timedatectl set-ntp true")])))
    warn   clock  not synchronised
                  $ timedatectl set-ntp true
    """
    width = max((len(each.topic) for each in findings), default=0)
    found = []
    for each in findings:
        margin = " " * (7 + width + 2)
        head = f"{each.level:<7}{each.topic:<{width}}  "
        found += textwrap.wrap(
            each.words, _WIDTH, initial_indent=head, subsequent_indent=margin, break_on_hyphens=False
        )
        found += [f"{margin}$ {each.command}"] if each.command else []
    return found
