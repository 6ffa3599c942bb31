"""The exceptions of this package.

::

    CocodcError                 exit code 1
    |-- InputError              exit code 2   a recipe, flag, argument or dataset that cannot work (also a ValueError)
    |   |-- HandshakeError      exit code 2   two regions differ in something that must be equal
    |   `-- CheckpointError     exit code 2   a checkpoint is damaged, incomplete or from another run
    |-- LinkError               exit code 1   link, coordinator or another region failed during the run (also a RuntimeError)
    |   |-- MeetingError        exit code 1   no coordinator answers, or it failed before regions had met; nothing was trained
    |   |   `-- MeetingRefused  exit code 2   what answers has another secret, another version, or is no coordinator
    |   |-- RegionLostError     exit code 1   one named region is gone or silent, or has not come
    |   |-- LeftBehind          exit code 1   the other regions have gone on without this one
    |   |-- RunOver             exit code 1   the run has ended: there is nothing to join, or to come back to
    |   |   `-- RunFinished     exit code 0   it has made all its steps: the others have the model
    |   `-- DonorLost           exit code 1   the region from which this one was to begin sends no more
    `-- RunStopped              exit code 3   all regions stopped together, with a checkpoint to resume from
        `-- RunLeft             exit code 0   this region has left in good order, and the others train on

Every message names the value, the rule and the way out. The command line prints it as one paragraph, without a traceback. A
script whose run has ended, and that does not catch RunStopped, RunLeft or RunFinished, ends with it and the exit code, too.
"""

import difflib
import os
import reprlib
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

_MOST_LISTED = 800
"""Characters of known names that a message lists; of more it gives only the number."""


class _Values(reprlib.Repr):
    def repr_int(self, x: int, level: int) -> str:
        """Python itself refuses to write out a number of more than 4300 digits."""
        return super().repr_int(x, level) if x.bit_length() < 10_000 else "<a number of thousands of digits>"


_VALUES = _Values()
_VALUES.maxlevel, _VALUES.maxstring, _VALUES.maxother, _VALUES.maxlong = 3, 80, 80, 40


class CocodcError(Exception):
    """Base of all exceptions of this package; the command line exits with `exit_code`."""

    exit_code = 1
    has_said_all = False
    """Whether a traceback would say nothing more, for example of a mistake in the environment."""


class InputError(CocodcError, ValueError):
    """An input from the user cannot work: a value, a file, or a disk that takes no more.

    Values are refused before anything is trained or written. After a full disk, a run resumes from its last checkpoint.
    """

    exit_code = 2


class HandshakeError(InputError):
    """Two regions differ in something that must be equal in all regions: before step 1, in what they train, or at the end."""


class CheckpointError(InputError):
    """A run cannot resume from a checkpoint. The message names what it contains and what was expected."""


class LinkError(CocodcError, RuntimeError):
    """A transfer, the coordinator or the meeting failed during the run."""


class MeetingError(LinkError):
    """Regions could not meet: the coordinator was away for too long, or failed. Nothing was trained or written. This may pass: a
    supervisor starts the region again.
    """


class MeetingRefused(MeetingError):
    """What answers has another secret, another version, or is no coordinator: another try ends alike."""

    exit_code = 2


class RegionLostError(LinkError):
    """A region, named in the message, closed its connection, was silent for longer than the timeout, or did not come. Once
    training has begun, the message says what the others have saved.
    """

    def __init__(self, region: int, message: str) -> None:
        super().__init__(message)
        self.region = region


class LeftBehind(LinkError):
    """The other regions have gone on without this one: it was late, or they could not reach it. It may come back."""


class RunOver(LinkError):
    """The run has ended: there is nothing to join, or to come back to."""


class RunFinished(RunOver):
    """The run had made all its steps before this region came in, came back, or resumed it. It says where the model is."""

    exit_code = 0


class DonorLost(LinkError):
    """The region that sent a base, or the log after it, sends no more: another one may.

    `is_unreached`: no connection to it has come about.
    """

    is_unreached = False


class RunStopped(CocodcError):
    """A region was interrupted. All regions have stopped at the same step, with a checkpoint to resume from.

    If nobody catches it after a run has stopped, the script ends with the message and `exit_code`, without a traceback.
    """

    exit_code = 3


class RunLeft(RunStopped):
    """This region has left the run in good order. The others train on, and have what it has trained."""

    exit_code = 0


def error_named(kind: str, message: str, default: type[CocodcError]) -> CocodcError:
    """An error whose class has this name, if that is ours and takes a message alone; else one of the default class."""
    todo: list[type[CocodcError]] = [CocodcError]
    for each in todo:
        todo += each.__subclasses__()
        if each.__name__ == kind and "__init__" not in vars(each):
            return each(message)
    return default(message)


def spare_traceback(error: CocodcError | None = None) -> None:
    """Let the interpreter end with the message and the exit code of a RunStopped or RunFinished that nobody catches, or of this
    `error`. Only a run that has ended calls this, or has not begun: it changes `sys.excepthook`.
    """
    if error is not None:
        error.has_said_all = True
    before = sys.excepthook
    if getattr(before, "spares_traceback", False):
        return

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not (isinstance(error, RunStopped | RunFinished) or getattr(error, "has_said_all", False)):
            before(kind, error, trace)
            return
        sys.stderr.write(f"{error}\n")
        assert isinstance(error, CocodcError)
        # the interpreter takes the exit code of a SystemExit that its hook raises
        raise SystemExit(error.exit_code)

    hook.spares_traceback = True  # type: ignore[attr-defined]
    sys.excepthook = hook


def nearest(name: str, known: Sequence[str]) -> str:
    """The end of a message about an unknown name: the closest known name, and all known names if they are few.

    >>> nearest("dilcoo", ["diloco", "streaming"])
    " Did you mean 'diloco'? Known: diloco, streaming."
    >>> nearest("lama", ["llama", *(f"model_{number}" for number in range(300))])
    " Did you mean 'llama'? There are 301 known names."
    """
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    names = ", ".join(sorted(known))
    listed = f"Known: {names}." if len(names) <= _MOST_LISTED else f"There are {len(known)} known names."
    return (f" Did you mean {close[0]!r}?" if close else "") + f" {listed}"


def shown(value: Any) -> str:
    """A value from the user as a message shows it: its repr, cut if it is long or deeply nested.

    >>> shown("abc"), shown([1, 2, 3, 4, 5, 6, 7, 8]), len(shown("a" * 10**6))
    ("'abc'", '[1, 2, 3, 4, 5, 6, ...]', 80)
    """
    return _VALUES.repr(value)


def short(text: object, limit: int = 80) -> str:
    """A name, or the words of another library, as a message shows them: one line without its middle if it is long.

    >>> short("sync_interval"), short("a" * 50 + "b" * 50, 11)
    ('sync_interval', 'aaaa...bbbb')
    """
    line = "".join(each if each.isprintable() else ascii(each)[1:-1] for each in " ".join(str(text).split()))
    kept = (limit - 3) // 2
    return line if len(line) <= limit else f"{line[:kept]}...{line[-kept:]}"


def expanded(path: str | os.PathLike[str]) -> Path:
    """A path from the user, with the home folder in the place of ~. Raises InputError if nothing says where that is."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise InputError(
            f"{shown(str(path))}: nothing says where the home folder is: HOME is not set, and this machine has no entry for user "
            f"{os.getuid()}. Set HOME to a folder that you may write to."
        ) from None


def reason(error: BaseException) -> str:
    """What an exception of another library says, as part of a message: its first sentence, without the full stop.

    >>> reason(ValueError("wrong value:\\n  it is 5\\nSee also ..."))
    'wrong value: it is 5'
    """
    if isinstance(error, KeyError):  # says only the key
        return short(f"{error} is not known", 400)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    last = next((place for place, line in enumerate(lines) if not line.endswith(":")), len(lines) - 1)
    return short(" ".join(lines[: last + 1]), 400).rstrip(". ")
