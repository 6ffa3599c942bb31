"""The exceptions this package raises on purpose.

::

    CocodcError                 exit code 1
    |-- InputError              exit code 2   a recipe, flag, argument or dataset that cannot work (also a ValueError)
    |   |-- HandshakeError      exit code 2   two regions were started with settings that must agree and do not
    |   `-- CheckpointError     exit code 2   a checkpoint is damaged, incomplete, or of another run
    |-- LinkError              exit code 1   the link, the store or another region failed while running (also a RuntimeError)
    |   `-- RegionLostError      exit code 1   one named region is gone or silent
    `-- RunStopped             exit code 3   all regions stopped together, with a checkpoint to go on from

Every message names the value, the rule and the way out; the command line prints it as one paragraph, without a traceback.
"""

import difflib
from collections.abc import Sequence


class CocodcError(Exception):
    """Base of everything raised on purpose here; `exit_code` is what the command line ends with."""

    exit_code = 1


class InputError(CocodcError, ValueError):
    """Something the user wrote cannot work; nothing has been trained or written yet."""

    exit_code = 2


class HandshakeError(InputError):
    """Two regions disagree on something that must be equal everywhere before step 1."""


class CheckpointError(InputError):
    """A checkpoint cannot be resumed from; the message says what was found and what was expected."""


class LinkError(CocodcError, RuntimeError):
    """A transfer, the store or the rendezvous failed while running."""


class RegionLostError(LinkError):
    """A named region closed its connection or stayed silent past the deadline."""

    def __init__(self, region: int, message: str) -> None:
        super().__init__(message)
        self.region = region


class RunStopped(CocodcError):
    """A region was interrupted, and all have stopped at the same step with a checkpoint to go on from."""

    exit_code = 3


def nearest(name: str, known: Sequence[str]) -> str:
    """ " Did you mean ...? Known: ..." for an unknown name."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return (f" Did you mean {close[0]!r}?" if close else "") + f" Known: {', '.join(sorted(known))}."
