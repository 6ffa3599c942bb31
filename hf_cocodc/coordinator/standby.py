"""A coordinator without a machine of its own: where regions meet in a storage, one of them serves, and the others stand by.

If the process that serves is gone (`Mailbox.life`), another one goes on with the state, by writing its next object
(`StateInStorage`): only one can, and only if nobody has written one meanwhile. It then serves as any coordinator does that was
started again, but decides whoever calls it: no other one can.
"""

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping

from ..errors import CocodcError, InputError
from ..net.keys import Keys
from ..net.leftovers import Leftovers
from ..net.mailbox import Mailbox, has_died, mailbox
from .in_storage import KNOCK, SERVING, calls_of, serving_in
from .rules import CALL_S
from .server import Served, listen
from .state import StateInStorage, StateTaken, newest_state

logger = logging.getLogger(__name__)

LOOK_S, _LOOKS = 1.0, 2
"""Seconds between two looks at whoever serves; and how often it is found gone, or nobody: whoever has just written a state is
about to show itself.
"""
_SLOWER = 2.0
"""Where requests take long, for so many of them: whoever serves needs two to show itself."""
NEAR_S, FAR_S = 0.05, 1.0
"""Seconds between two looks for callers, in a folder and far away."""
_BUSY_S, _BUSY_LOOK_S = 10.0, 0.2
"""For so many seconds after a call, or after this process has begun to serve, others are likely; it looks for them more often."""
SURE_S = 5.0
"""Seconds after which a coordinator looks whether it still is the one that goes on; also if it stood still for so long."""
_CALLER_S, _CLEAR_S = 30.0, 1800.0
_LINGER_S = 5.0
"""Others may have something to say at the end of a run."""


class Standby:
    """Stands by in a thread of this process, and serves while nobody else does, until `close`. Raises like `Mailbox.begin`.

    Args:
        hears: called when another process serves than the one that this process has called; it may be this one.

    Attributes:
        serves: whether it serves now.
    """

    def __init__(self, url: str, keys: Keys | None, hears: Callable[[], object] = lambda: None) -> None:
        self._box, self._keys, self._hears = mailbox(url), keys, hears
        self._box.begin()
        self._closes, self.serves = threading.Event(), False
        self._thread = threading.Thread(target=self._work, name="hf_cocodc-standby", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Serve no more, once those who call have ended, or after some seconds. Another one takes over at once."""
        self._closes.set()
        self._thread.join()

    def _work(self) -> None:
        box, told, wait_s = self._box, "", LOOK_S
        seen, looks, number, found_at = "", 0, None, 0.0
        while True:
            began = time.monotonic()
            try:
                now = serving_in(box.storage)
                wait_s = max(LOOK_S, _SLOWER * (time.monotonic() - began))
                if not self._is_gone(now):
                    looks, number = 0, None
                    if now == seen != box.called:  # what is read may be old, but hardly twice
                        self._hears()
                elif now != seen or number is None:
                    looks, number, found_at = 0, newest_state(box.storage), began
                else:
                    looks += 1
                seen = now
                is_old = looks >= _LOOKS and began - found_at > box.storage.create_s
                if is_old or number == 0 and not now:
                    before, looks, number = number or 0, 0, None
                    self._serve(before, {now: CALL_S if has_died(now) else box.gone_s})
            except StateTaken:
                pass
            except CocodcError as error:
                if str(error) != told:
                    told = str(error)
                    logger.warning("this region cannot serve as coordinator: %s", told)
            except Exception as error:  # this process lives on: nobody else would take over
                if repr(error) != told:
                    told = repr(error)
                    logger.exception("this region cannot serve as coordinator. It tries again")
            if self._closes.wait(wait_s):
                return

    def _is_gone(self, process: str) -> bool:
        """Whether nobody serves, if this process says that it does."""
        if process in ("", self._box.process) or has_died(process):
            return True
        try:
            self._box.life(process)
        except ConnectionResetError:
            return True
        return False

    def _serve(self, number: int, silent: Mapping[str, float]) -> None:
        """Serve until the end, or until another one does. Raises StateTaken, or CocodcError. See `StateInStorage`."""
        box, failures = self._box, list[InputError]()
        state = StateInStorage(box.storage, self._keys, number, silent)
        listener = listen("127.0.0.1", 0)
        secrets = [] if self._keys is None else [self._keys]
        served = Served(
            listener,
            secrets,
            state,
            lambda line: logger.debug("coordinator: %s", line),
            failures.append,
            2 * box.period_s,
        )
        self.serves, box.serves_at = True, served.port
        logger.info("this region serves as coordinator in %s", box.storage.url)
        try:
            self._attend(box, served, state, failures)
        finally:
            self.serves, box.serves_at = False, None
            served.close()
        if not failures:
            with contextlib.suppress(CocodcError):
                if serving_in(box.storage) == box.process:
                    box.storage.remove(SERVING)

    def _attend(
        self, box: Mailbox, served: Served, state: StateInStorage, failures: list[InputError]
    ) -> None:
        """Let callers in. Raises StateTaken if another one serves, because this one stood still."""
        storage, calls = box.storage, calls_of(box.process)
        storage.put(SERVING, box.process.encode())
        self._hears()
        ends_at, knocked = 0.0, b""
        sure_at = cleared_at = called_at = time.monotonic()
        leftovers = Leftovers(box)
        while not failures:
            now = time.monotonic()
            if self._closes.is_set():
                ends_at = ends_at or now + _LINGER_S
                if now > ends_at or not served.num_callers:
                    return
            if now - sure_at >= SURE_S:
                if state.is_taken:
                    raise StateTaken
                if serving_in(storage) != box.process:  # one that stood still has shown itself since
                    storage.put(SERVING, box.process.encode())
                sure_at = now
            if now - cleared_at >= _CLEAR_S:
                cleared_at = now
                threading.Thread(target=leftovers.look, daemon=True).start()
            knocks = storage.get(f"{calls}/{KNOCK}") or b""
            names = set(storage.names(calls)) - {KNOCK} if knocks != knocked else ()
            for name in names:
                threading.Thread(target=_let_in, args=(box, name, served.port), daemon=True).start()
                storage.remove(f"{calls}/{name}")
                called_at = time.monotonic()
            knocked = knocks
            is_busy = time.monotonic() < called_at + _BUSY_S
            time.sleep(NEAR_S if storage.is_near else _BUSY_LOOK_S if is_busy else FAR_S)


def _let_in(box: Mailbox, name: str, port: int) -> None:
    try:
        box.connect(name, False, _CALLER_S, socket.create_connection(("127.0.0.1", port)))
    except (OSError, CocodcError) as error:
        logger.debug("a caller in %s has gone: %s", box.storage.url, error)
