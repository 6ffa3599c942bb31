"""Findings about the coordinator, and about the secret that it shares with the regions."""

import time

from ...coordinator.caller import ConnectionEnded, NobodyAnswers
from ...coordinator.client import passes_large, status
from ...errors import CocodcError, InputError, MeetingError
from ...net.addresses import is_loopback, is_url, parts_of
from ...net.keys import Keys
from ...net.pipe import MEND, SWALLOWED
from .facts import OK, WARN, WRONG, Finding

SLOW_S = 2.0
"""Seconds for a connection to the coordinator after which doctor warns."""
NEW_SECRET = "hf-cocodc secret new secret; export HF_COCODC_SECRET=$(cat secret)"


def begin(address: str) -> str:
    """The command that starts the coordinator at an address; in a storage, a region that trains serves as one."""
    if is_url(address):
        return f"hf-cocodc train RECIPE --region N --coordinator {address}"
    host, port = parts_of(address)
    secret = "" if is_loopback(host) else " --secret-file secret"
    return f"hf-cocodc coordinator --host {host} --port {port}{secret}    # there"


def reach(address: str, keys: Keys | None, timeout_s: float = 10.0) -> list[Finding]:
    """Whether there is a secret, and whether the coordinator answers and has the same one."""
    return [secret(address, keys), _answer(address, keys, timeout_s)]


def _answer(address: str, keys: Keys | None, timeout_s: float) -> Finding:
    host, port = parts_of(address)
    began = time.monotonic()
    try:
        status(address, keys, timeout_s=timeout_s)
        took_s = time.monotonic() - began
        if not passes_large(address, keys, timeout_s):
            return Finding("coordinator", WRONG, f"answers at {address}, but {SWALLOWED}.", MEND)
    except ConnectionEnded as error:
        return gone(address, error)
    except InputError as error:
        return Finding("coordinator", WRONG, str(error), f"getent hosts {host}")
    except NobodyAnswers as error:
        return Finding(
            "coordinator", WRONG, str(error), f"{begin(address)}; try it from here: nc -vz {host} {port}"
        )
    except MeetingError as error:  # another secret, or another version
        command = begin(address) + ", anew, with the secret of all regions"
        if keys is None:
            command = f"scp {host}:secret secret; export HF_COCODC_SECRET=$(cat secret)"
        return Finding("coordinator", WRONG, str(error), command)
    if took_s > SLOW_S:
        words = f"answers at {address}, but only after {took_s:.1f} s: its machine or the way there is busy."
        return Finding("coordinator", WARN, words, f"ping {host}")
    return Finding("coordinator", OK, f"answers at {address} in {1000 * took_s:.3g} ms")


def gone(address: str, error: CocodcError) -> Finding:
    """The finding about a coordinator that answered before."""
    words = f"{error} It answered before: what it would say now was not looked at."
    return Finding("coordinator", WRONG, words, begin(address))


def secret(address: str, keys: Keys | None) -> Finding:
    """Whether there is a secret where one is needed."""
    if keys is None and not is_loopback(parts_of(address)[0]):
        return Finding(
            "secret",
            WARN,
            "none: whoever reaches the coordinator can end or change the run. Give every region and the coordinator the same.",
            NEW_SECRET,
        )
    words = (
        "none, and the coordinator is on this machine"
        if keys is None
        else "given: all that is sent is encrypted"
    )
    return Finding("secret", OK, words)
