"""What is found on a machine: one line for each thing that is looked at."""

import textwrap
from dataclasses import dataclass

OK, WARN, WRONG, UNKNOWN = "ok", "warn", "wrong", "-"
_WIDTH = 100
_TOPIC = 11
"""Width of a topic: lines are shown as they are found."""


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


def lines(finding: Finding) -> list[str]:
    """A finding as lines of text: the level, the topic, the words, and below them the command.

    >>> print("\\n".join(lines(Finding("clock", WARN, "not synchronised", "timedatectl set-ntp true"))))
    warn   clock        not synchronised
                        $ timedatectl set-ntp true
    """
    margin = " " * (7 + _TOPIC + 2)
    head = f"{finding.level:<7}{finding.topic:<{_TOPIC}}  "
    text = textwrap.wrap(
        finding.words, _WIDTH, initial_indent=head, subsequent_indent=margin, break_on_hyphens=False
    )
    return text + ([f"{margin}$ {finding.command}"] if finding.command else [])
