"""Both ends of a new connection prove to each other that they have the run's secret, before anything else is said on it.

gloo takes whoever connects first and says a small number. With a secret such a connection is found out, and made once more.
"""

import json
import logging
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING

import torch

from ..coordinator.proof import Proof, Refused
from ..errors import LinkError, short

if TYPE_CHECKING:
    from .pairs import Connection

logger = logging.getLogger(__name__)

PROOF_S = 10.0
"""Seconds in which the other end says the next message: it has connected at the same time."""
_TRIES = 10
_TAG = (1 << 30) + (1 << 20)
"""No other message has it."""
_ROOM = 1024
"""Bytes of a message: about 250 are needed."""


def proven(
    connect: Callable[[int], "Connection"], prove: Callable[[int], Proof], calls: bool
) -> tuple["Connection", Proof]:
    """Connect until the other end proves itself; both ends try equally often.

    Args:
        connect: makes the connection for a try.
        prove: makes this end of the conversation on it.
        calls: whether this end speaks first.

    Raises:
        LinkError: the other end has not proven itself in any try.
        RuntimeError: nobody has answered.
    """
    for number in range(_TRIES):
        connection, proof = connect(number), prove(number)
        try:
            _talk(connection, proof, calls)
        except RuntimeError as error:
            why = short(error, 200)
            if not isinstance(error, Refused):
                why = f"it was silent for {PROOF_S:g} s, or has closed the connection: {why}"
            logger.warning(
                "the other end of a connection has not proven that it is of this run: the connection is made once more (%s)",
                why,
            )
            connection.close()
        else:
            return connection, proof
    raise LinkError(
        f"what answers does not prove that it has the secret of the run, in {_TRIES} tries: {why}"
    )


def _talk(connection: "Connection", proof: Proof, calls: bool) -> None:
    for turn in range(3):
        if calls == (turn % 2 == 0):
            said = json.dumps(proof.say({})).encode()
            memory = torch.frombuffer(bytearray(said.ljust(_ROOM)), dtype=torch.uint8)
            _wait(connection, "send", memory)
        else:
            memory = torch.zeros(_ROOM, dtype=torch.uint8)
            _wait(connection, "recv", memory)
            try:
                heard = json.loads(memory.numpy().tobytes())
            except (ValueError, RecursionError):
                heard = None
            proof.hear(heard if isinstance(heard, dict) else {})


def _wait(connection: "Connection", operation: str, memory: torch.Tensor) -> None:
    pending = connection.start(operation, memory, _TAG)
    try:
        connection.wait(pending.work, timedelta(seconds=PROOF_S))
    except RuntimeError:
        connection.keep(pending)
        raise
