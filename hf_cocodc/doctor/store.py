"""Lines about the store, and about the secret that it shares with the regions."""

import time

import torch.distributed as dist

from ..errors import CocodcError, InputError, LinkError
from ..meeting.addresses import is_loopback
from ..meeting.cipher import check_encryption
from ..meeting.sealed import check
from ..meeting.secret import Keys
from ..meeting.store import SteadyStore, StoreAwayError, connect_store, line_of_hosts
from ..settings import RegionConfig
from .facts import parts_of
from .findings import OK, WARN, WRONG, Finding

SLOW_S = 2.0
"""Seconds for a connection to the store after which doctor warns."""
NEW_SECRET = "openssl rand -hex 32 > secret; chmod 600 secret; export HF_COCODC_SECRET=$(cat secret)"


def begin(store: str) -> str:
    """The command that begins the store at an address."""
    host, port = parts_of(store)
    secret = "" if is_loopback(host) else " --secret-file secret"
    return f"hf-cocodc store --host {host} --port {port}{secret}    # there"


def reach(
    store: str, regions: RegionConfig, keys: Keys | None, timeout_s: float = 10.0
) -> tuple[list[Finding], SteadyStore | None]:
    """Whether the store answers and has the same secret; the lines, and the store if so."""
    found, steady = [secret(store, regions, keys)], SteadyStore(store, keys=keys)
    host, port = parts_of(store)
    began = time.monotonic()
    try:
        connect_store(store, timeout_s, keys)
        took_s = time.monotonic() - began
        other = steady.ask(_other_secret)
    except InputError as error:
        return [*found, Finding("store", WRONG, str(error), f"getent hosts {host}")], None
    except LinkError as error:
        command = f"{begin(store)}; try it from here: nc -vz {host} {port}"
        return [*found, Finding("store", WRONG, str(error), command)], None
    if other is not None:
        command = begin(store) + ", anew, with the secret of all regions"
        if keys is None:
            command = f"scp {host}:secret secret; export HF_COCODC_SECRET=$(cat secret)"
        return [*found, Finding("store", WRONG, str(other), command)], None
    if took_s > SLOW_S:
        words = f"answers at {store}, but a connection takes {took_s:.1f} s: torch first asks a name server for its name."
        command = f"echo '{line_of_hosts(host)}' | sudo tee -a /etc/hosts"
        return [*found, Finding("store", WARN, words, command)], steady
    return [*found, Finding("store", OK, f"answers at {store}")], steady


def _other_secret(store: dist.Store) -> LinkError | None:
    """Why this process must not use a store; None if it may."""
    try:
        check(store)
    except LinkError as error:
        return error
    return None


def gone(store: SteadyStore, error: StoreAwayError) -> Finding:
    """The line about a store that has answered before."""
    words = f"{error} It answered before: what it would say now was not looked at."
    return Finding("store", WRONG, words, begin(store.address))


def secret(store: str, regions: RegionConfig, keys: Keys | None) -> Finding:
    """Whether there is a secret where one is needed, and what encrypting needs."""
    if regions.encrypt:
        try:
            check_encryption(keys)
        except CocodcError as error:
            command = "pip install 'hf-cocodc[encrypt]'" if keys else NEW_SECRET
            return Finding("secret", WRONG, str(error), command)
    if keys is None and not is_loopback(parts_of(store)[0]):
        return Finding(
            "secret",
            WARN,
            "none: whoever reaches the store can end or change the run. Give every region and the store the same.",
            NEW_SECRET,
        )
    words = "none, and the store is on this machine" if keys is None else "given"
    return Finding("secret", OK, words + (", and regions encrypt" if regions.encrypt else ""))
