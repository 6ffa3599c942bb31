"""Sockets through a storage that all regions reach, for machines that nobody can call.

All that regions and their coordinator say goes through sockets. Here the far end of a socket is a folder: what this end says
becomes objects there, numbered from 0, which the other end reads in order, and deletes. Nothing else changes: what is sealed
stays sealed, and whoever reads the storage sees how much was said, and when.

Two ends meet under a name that both know. Each writes a card with a number of its own (`Card`), reads that of the other end, and
begins. With its first words it writes on its card which number it has read. Nobody takes a card on which another number than its
own stands as read: it is of an earlier socket. Clocks are not compared. A process shows that it lives by a count that moves
(`Life`); one whose count stands still for a few looks is gone, and its sockets break as those of a machine without power do. If
another process of its machine finds that it has died, it says so there, and the sockets end as if its system had closed them.
Beside the count stands how many objects each of its sockets has written: what is not there to be read for so many counts is lost,
and the socket breaks.
"""

import atexit
import contextlib
import hashlib
import logging
import os
import select
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable
from functools import cache, partial
from itertools import takewhile
from pathlib import Path
from secrets import token_hex
from typing import NamedTuple

import msgspec

from ..errors import LinkError, short
from .addresses import listen_at
from .channel import keep_from_forks
from .storage import Storage, StorageError, price, together

logger = logging.getLogger(__name__)

PIECE = 4 << 20
PIECES = 4
"""So many pieces of what was said are written, or read, side by side."""
_SAID, _MORE, _END = b"\0", b"\1", b"\2"
"""The first byte of an object: the next one may take its time, or is there at once; or this end says no more."""
NEAR_S, FAR_S = (0.01, 0.25), (0.2, 2.0)
"""Seconds between two looks for an object: at first, and at most; in a folder, and far away. Far away, two objects of one socket
are begun as many seconds apart as two first looks, unless they are full.
"""
_YOUNG_S = 10.0
"""In its first seconds a socket far away is looked at as often as one in a folder: regions that meet say many short words."""
_FIRST_WORDS_S = 0.05
"""So long the card waits for the first words, with which it is written."""
PERIOD_S, _MISSES = (1.0, 5.0), (8, 4)
"""Near and far: seconds between two signs of life, and with how many of them an object may be found missing. Far away, how often
one may write is limited, or has a price.
"""
LIFE_LOOK_S, _LOOKS = (1.0, 2.5), 8
"""Seconds between two looks at the lives of others; and how often a process may be found without a new sign of life."""
_ASKED_S = 30.0
"""For so long a process is looked at after somebody has asked for it."""
_HEARD = 8
"""So many objects that were heard are deleted together."""
_BROKEN, _DIED = -1, -1
"""In the place of how much a socket has written: it says no more. In the place of a count: the process has died."""
_MEET_S, _SHOW_S = 10.0, 2.0
"""A card that is shown for a shorter time may be missed. It is written again after so many seconds: an earlier socket of its name
that breaks may have written to it, or removed it.
"""
_FLUSH_S = 15.0
"""A process that ends waits so long for what it has said to be written."""
_TELL_S = 600.0


class Card(msgspec.Struct, frozen=True):
    """What one end of a socket shows the other one.

    Attributes:
        number: of this end's try; no other try has it.
        process: whose count shows that this end lives.
        seen: the number on the other end's card, once this end has begun with it.
    """

    number: str
    process: str
    seen: str = ""


class Life(msgspec.Struct, frozen=True):
    """What a process shows.

    Attributes:
        count: moves; `_DIED` once the process is known to have died.
        said: by the number of its card, how many objects a socket has written; `_BROKEN` if it has broken.
    """

    count: int
    said: dict[str, int]


class Died(ConnectionResetError):
    """A process has died: another one of its machine has said so."""


class _Looks(NamedTuple):
    """What is known of a process: what it has shown, and how often since then it was found to show nothing new. `asked_at`: when
    somebody has asked for it.
    """

    life: Life | None = None
    looks: int = 0
    asked_at: float = 0.0


class Mailbox:
    """This process's sockets through one storage. Raises InputError if no storage has such a URL.

    A process has one of each storage (`mailbox`). It writes nothing there before it begins (`begin`).

    Attributes:
        serves_at: the port of the coordinator that this process serves there.
        called: the process that serves, as far as this one has called it.
        period_s: seconds between two signs of life, of processes and of what they do.
    """

    serves_at: int | None = None
    called = ""

    def __init__(self, url: str) -> None:
        self.storage = Storage(url)
        paces = PERIOD_S, LIFE_LOOK_S, _MISSES
        self.period_s, self._look_s, self.misses = (each[not self.storage.is_near] for each in paces)
        self.process = f"{os.getpid()}-{_space()}-{token_hex(8)}"
        self._lives: dict[str, _Looks] = {}
        self._ways: set[_Way] = set()
        self._numbers: dict[str, str] = {}
        self._lock, self._has_begun = threading.Lock(), False
        self._count, self._told_at = 0, time.monotonic()

    def begin(self) -> None:
        """Show from now on that this process lives. Raises InputError if this machine cannot reach the storage, StorageError if
        it refuses.
        """
        if self._has_begun:
            return
        self._show_life()
        if self._life_of(self.process) is None:
            raise StorageError(
                f"{self.storage.url}: what this machine has written is not there to be read. Look at the storage: every region "
                "must write, read, list and delete there."
            )
        with self._lock:  # another thread may have been faster
            has_begun, self._has_begun = self._has_begun, True
        if has_begun:
            return
        for work in (self._show_lives, self._look_at_lives, self._tell_who_has_died):
            threading.Thread(target=work, name="hf_cocodc-mailbox", daemon=True).start()
        atexit.register(self.flush)

    def waits_s(self, since: float) -> tuple[float, float]:
        """Seconds between two looks for an object, at first and at most, on a socket that began then."""
        is_young = time.monotonic() < since + _YOUNG_S
        return NEAR_S if self.storage.is_near or is_young else FAR_S

    def meet(
        self, name: str, is_first: bool, timeout_s: float, look: Callable[[], object] = lambda: None
    ) -> socket.socket:
        """A socket (TCP, on this machine) to the other end of a name. Raises TimeoutError if it does not come in time.

        `look` is called now and then meanwhile, and may raise.
        """
        far, near = _joined_sockets()
        try:
            self.connect(name, is_first, timeout_s, far, look)
        except BaseException:
            far.close()
            near.close()
            raise
        return near

    def connect(
        self,
        name: str,
        is_first: bool,
        timeout_s: float,
        far: socket.socket,
        look: Callable[[], object] = lambda: None,
    ) -> None:
        """Let a socket of this process reach the other end of a name. See `meet`."""
        self.begin()
        card, other = self._meet(name, is_first, time.monotonic() + max(timeout_s, _MEET_S), look)
        for earlier in self._open_ways:
            if (earlier.name, earlier.is_first) == (name, is_first):
                earlier.end(ConnectionResetError("this end has begun again"))
        way = _Way(self, name, is_first, card, other, far)
        with self._lock:
            self._ways.add(way)

    @property
    def _open_ways(self) -> "list[_Way]":
        with self._lock:
            return [way for way in self._ways if not way.is_over]

    def _meet(self, name: str, is_first: bool, until: float, look: Callable[[], object]) -> tuple[Card, Card]:
        mine, theirs = (f"cards/{name}/{int(each)}" for each in (is_first, not is_first))
        with self._lock:  # the other end may have taken the card of a try that has ended meanwhile
            number = self._numbers.setdefault(mine, token_hex(8))
        card, began = Card(number, self.process), time.monotonic()
        show_at, wait_s = began, 0.0
        while True:
            requests: list[Callable[[], Card | None]] = [partial(self.card, theirs)]
            if time.monotonic() >= show_at:
                if show_at > began:
                    look()
                requests.append(partial(self.storage.put, mine, msgspec.json.encode(card)))
                show_at = time.monotonic() + _SHOW_S
            other = None
            try:
                other = together(requests)[0]
            except StorageError as error:  # it may be back before the time is over
                if not error.may_pass or time.monotonic() > until:
                    raise
            if other is not None:
                self.life(other.process, may_stop=True)
                if other.seen in ("", number):
                    with self._lock:
                        self._numbers.pop(mine, None)
                    return msgspec.structs.replace(card, seen=other.number), other
            if time.monotonic() > until:
                raise TimeoutError("the other end has not come")
            first_s, most_s = self.waits_s(began)
            wait_s = min(max(1.5 * wait_s, first_s), most_s)
            time.sleep(wait_s)

    def card(self, name: str) -> Card | None:
        content = self.storage.get(name)
        try:
            return None if content is None else msgspec.json.decode(content, type=Card)
        except msgspec.MsgspecError as error:
            raise StorageError(
                f"{self.storage.url}: {name!r} is nothing that this version writes ({error})."
            ) from error

    def _life_of(self, process: str) -> Life | None:
        content = self.storage.get(f"lives/{process}")
        with contextlib.suppress(msgspec.MsgspecError):  # it shows nothing that this process knows
            return None if content is None else msgspec.json.decode(content, type=Life)
        return None

    def life(self, process: str, may_stop: bool = False) -> Life | None:
        """What a process shows, if that has been read yet; it is from now on.

        Raises Died if it has died, and, unless it `may_stop`, ConnectionResetError if it shows nothing new any more.
        """
        with self._lock:
            seen = self._lives.get(process, _Looks())
            self._lives[process] = seen._replace(asked_at=time.monotonic())
        if seen.life is not None and seen.life.count == _DIED:
            raise Died("the process at the other end has died")
        if seen.looks >= _LOOKS and not may_stop:
            raise ConnectionResetError("the process at the other end has stopped")
        return seen.life

    def empty(self, folder: str) -> None:
        """Remove all objects of a folder. Raises StorageError."""
        self.storage.remove(*(f"{folder}/{name}" for name in self.storage.names(folder)))

    def flush(self, timeout_s: float = _FLUSH_S) -> None:
        """Wait until what was said on sockets is written."""
        until = time.monotonic() + timeout_s
        while self.says and time.monotonic() < until:
            time.sleep(0.02)

    @property
    def says(self) -> bool:
        """Whether something was said on a socket that is not written yet."""
        return any(way.says for way in self._open_ways)

    @property
    def gone_s(self) -> float:
        """Seconds for which a process has stood still that has stopped, as far as is known."""
        return _LOOKS * self._look_s

    def _show_life(self) -> None:
        self._count += 1
        with self._lock:
            for way in self._ways:
                way.shown += way.is_over
            said = {way.number: way.said for way in self._ways}
        self.storage.put(f"lives/{self.process}", msgspec.json.encode(Life(self._count, said)))

    def _show_lives(self) -> None:
        """Show that this process lives, as long as that matters to anybody."""
        while True:
            time.sleep(self.period_s)
            with contextlib.suppress(StorageError):  # whoever waits for an answer says so
                if self._ways or self.serves_at is not None:
                    self._show_life()

    def _look_at_lives(self) -> None:
        while True:
            time.sleep(self._look_s)
            since = time.monotonic() - _ASKED_S
            with self._lock:
                past = {way for way in self._ways if way.shown > _LOOKS}
                self._ways -= past
                self._lives = {each: seen for each, seen in self._lives.items() if seen.asked_at > since}
                known = [*self._lives]
            for process in known:
                with contextlib.suppress(StorageError):  # a look that failed counts for nothing
                    self._look_at_life(process)
            for way in past:
                with contextlib.suppress(StorageError):
                    way.clear()
            self._tell()

    def _look_at_life(self, process: str) -> None:
        now = self._life_of(process)
        with self._lock:
            seen = self._lives[process]
            has_moved = now is not None and (
                seen.life is None or now.count > seen.life.count or now.count == _DIED
            )
            looks = 0 if has_moved else seen.looks + 1
            self._lives[process] = seen._replace(life=now if has_moved else seen.life, looks=looks)

    def _tell_who_has_died(self) -> None:
        """Mark those of this machine that have."""
        died = Life(_DIED, {})
        with contextlib.suppress(StorageError):
            here = [each for each in self.storage.names("lives") if has_died(each)]
            lives = together([partial(self._life_of, each) for each in here])
            marks = {
                f"lives/{each}": msgspec.json.encode(died)
                for each, life in zip(here, lives, strict=True)
                if life != died
            }
            if marks:
                self.storage.put_all(marks)

    def _tell(self) -> None:
        """Log now and then what the storage has been asked for, and what that costs."""
        now = time.monotonic()
        hours = (now - self._told_at) / 3600
        if now - self._told_at < _TELL_S:
            return
        self._told_at = now
        requests, num_bytes = self.storage.requests.copy(), self.storage.num_bytes.copy()
        self.storage.requests.clear()
        self.storage.num_bytes.clear()
        kinds = ", ".join(f"{count / hours:.0f} to {kind}" for kind, count in sorted(requests.items()))
        written, read = (num_bytes[kind] / hours / 1e6 for kind in ("write", "read"))
        cost = price(self.storage.url, requests)
        words = (
            "" if cost is None else f"; the requests cost {cost[0] / hours:.3f} dollars an hour ({cost[1]})"
        )
        logger.info(
            "%s: requests an hour: %s; %.1f MB an hour written, %.1f read%s",
            *(self.storage.url, kinds, written, read, words),
        )


class _Way:
    """A socket of this process, and the objects by which it reaches the other end. Two threads carry what is said.

    Attributes:
        number: of its card.
        is_over: whether nothing is carried any more, in either direction.
        shown: how often this process has shown since that it is over.
    """

    def __init__(
        self, box: Mailbox, name: str, is_first: bool, card: Card, other: Card, near: socket.socket
    ) -> None:
        self._box, self._storage, self._socket = box, box.storage, near
        self.name, self.is_first, self.number, self.other = name, is_first, card.number, other
        first, second = (card, other) if is_first else (other, card)
        both = f"{first.number}-{second.number}"
        self._out, self._in = (f"said/{each.process}/{both}-{int(each is first)}" for each in (card, other))
        self._card, self._shown_card = f"cards/{name}/{int(is_first)}", msgspec.json.encode(card)
        self._began = time.monotonic()
        self._written = self.shown = 0
        self._missed, self._missed_at = 0, -1
        self._is_broken = self._has_died = self._has_said_all = self._holds = False
        self._open = 2
        self._lock = threading.Lock()
        near.setblocking(True)
        keep_from_forks(near)
        for work in (self._say, self._hear):
            threading.Thread(target=self._carry, args=(work,), name="hf_cocodc-mailbox", daemon=True).start()

    @property
    def is_over(self) -> bool:
        return not self._open

    @property
    def said(self) -> int:
        """How many objects are written; `_BROKEN` if no more come."""
        return _BROKEN if self._is_broken else self._written

    @property
    def says(self) -> bool:
        """Whether something was said on the socket that is not written yet."""
        if self._has_said_all or self._is_broken:
            return False
        try:
            return self._holds or _is_ready(self._socket, select.POLLIN, 0.0)
        except (OSError, ValueError):
            return False

    def _carry(self, work: Callable[[], None]) -> None:
        try:
            work()
        except (OSError, LinkError) as error:
            self.end(error)
        except Exception as error:
            logger.exception("a socket through %s has failed", self._storage.url)
            self.end(error)
        with self._lock:
            self._open -= 1
            is_last = not self._open
        if is_last:
            with contextlib.suppress(OSError):
                while self._has_died and self._socket.recv(1 << 16):
                    pass  # what is unread would reset it
            self._socket.close()

    def _say(self) -> None:
        began, objects = 0.0, {self._card: self._shown_card}
        if not _is_ready(self._socket, select.POLLIN, _FIRST_WORDS_S):
            self._storage.put_all(objects)
            objects = {}
        while not self._is_broken:
            _is_ready(self._socket, select.POLLIN)
            self._holds = True
            try:
                if self._is_broken:
                    return
                gather_s = 0.0 if self._storage.is_near else self._box.waits_s(self._began)[0]
                said = self._gathered(began + gather_s)
                began = time.monotonic()
                pieces = [said[at : at + PIECE] for at in range(0, len(said), PIECE)]
                contents = [(_SAID if piece is pieces[-1] else _MORE) + piece for piece in pieces] or [_END]
                objects |= {f"{self._out}/{at}": each for at, each in enumerate(contents, self._written)}
                self._storage.put_all(objects)
                self._written, objects = self._written + len(contents), {}
                if not pieces:
                    self._has_said_all = True
                    return
            finally:
                self._holds = False

    def _gathered(self, until: float) -> bytes:
        """What the socket says until then, or as much as is written side by side; empty at its end."""
        said = bytearray()
        while len(said) < PIECES * PIECE:
            wait_s = max(until - time.monotonic(), 0.0)
            if said and not _is_ready(self._socket, select.POLLIN, wait_s):
                break
            chunk = self._socket.recv(PIECES * PIECE - len(said))
            if not chunk:
                break  # the end is read again, by itself
            said += chunk
        return bytes(said)

    def _hear(self) -> None:
        number, wait_s, at_once = 0, 0.0, 1
        heard: list[str] = []
        while not self._is_broken:
            names = [f"{self._in}/{number + place}" for place in range(at_once)]
            requests: list[Callable[[], bytes | None]] = [partial(self._storage.get, name) for name in names]
            if len(heard) >= _HEARD:
                requests.append(partial(self._storage.remove, *heard))
                heard = []
            found = together(requests)[: len(names)]
            said = [content for content in takewhile(bool, found) if content]
            heard += names[: len(said)]
            for content in said:
                self._pass_on(memoryview(content)[1:])
            if said:
                kind, number = said[-1][:1], number + len(said)
                wait_s, self._missed, at_once = 0.0, 0, PIECES if kind == _MORE else 1
                if kind == _END:
                    self._storage.remove(*heard)
                    self._socket.shutdown(socket.SHUT_WR)
                    return
            if len(said) < len(names):
                self._look_at_other(number)
                first_s, most_s = self._box.waits_s(self._began)
                wait_s, at_once = min(max(1.5 * wait_s, first_s), most_s), 1
                time.sleep(wait_s)

    def _look_at_other(self, number: int) -> None:
        """Raise ConnectionResetError if an object of the other end will not come any more."""
        life = self._box.life(self.other.process)
        if life is None or life.count == self._missed_at:
            return
        said = life.said.get(self.other.number)
        if said == _BROKEN:
            raise ConnectionResetError("the other end has broken")
        if said is None or said > number:
            self._missed, self._missed_at = self._missed + 1, life.count
        if self._missed > self._box.misses:
            raise ConnectionResetError(f"object {number} of the other end is not there")

    def clear(self) -> None:
        """Remove what is left once the other end knows that it is over. Raises StorageError."""
        mine = self._box.card(self._card)
        if mine is not None and mine.number == self.number:
            self._storage.remove(self._card)
        # what the other end may not have heard yet is left to it, unless nobody hears it any more
        for folder in (self._in, self._out) if self._is_broken else (self._in,):
            self._box.empty(folder)

    def end(self, error: BaseException) -> None:
        """Break. The other end finds that on the life of this process."""
        if self._is_broken:
            return
        self._is_broken, self._has_died = True, isinstance(error, Died)
        logger.debug("a socket through %s breaks: %s", self._storage.url, short(error, 300))
        with contextlib.suppress(OSError):
            if self._has_died:
                self._socket.shutdown(socket.SHUT_WR)
            else:  # once closed, it is reset: nobody has closed it in good order
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self._socket.shutdown(socket.SHUT_RD)

    def _pass_on(self, said: memoryview) -> None:
        """Let the user of the socket have it, as soon as it takes it."""
        while said:
            if self._is_broken:
                raise ConnectionResetError("it has broken meanwhile")
            if _is_ready(self._socket, select.POLLOUT, PERIOD_S[0]):
                said = said[self._socket.send(said) :]


def _is_ready(waits: socket.socket, event: int, timeout_s: float | None = None) -> bool:
    """Whether a socket can be read, or written, in time; also if it has ended."""
    poll = select.poll()  # unlike `select`, it takes any number of open files
    poll.register(waits, event)
    return bool(poll.poll(None if timeout_s is None else 1000 * timeout_s))


def _joined_sockets() -> tuple[socket.socket, socket.socket]:
    """Both ends of a TCP connection within this machine."""
    with listen_at("127.0.0.1", 0, 1) as listener:
        one = socket.create_connection(listener.getsockname()[:2])
        while True:
            other, where = listener.accept()
            if where == one.getsockname():
                return other, one
            other.close()  # somebody else was faster


@cache
def _space() -> str:
    """Names what numbers this process: the system, since its start, or a container."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        space = f"{boot}{os.readlink('/proc/self/ns/pid')}{_machine()}"
    except OSError:
        return token_hex(6)
    return hashlib.sha256(space.encode()).hexdigest()[:12]


def _machine() -> str:
    """Random words in a file that stays on this machine: sandboxes may emulate a system, and all say the same of it."""
    path = Path(tempfile.gettempdir(), f"hf_cocodc-machine-{os.getuid()}")
    new = path.with_name(f"{path.name}-{token_hex(6)}")
    try:
        new.write_text(token_hex(16))
        with contextlib.suppress(FileExistsError):
            os.link(new, path)
    finally:
        new.unlink(missing_ok=True)
    return path.read_text()


def has_died(process: str) -> bool:
    """Whether a process of this machine, as its mailbox names it, lives no more; False if this machine cannot know."""
    number, space = [*process.split("-"), ""][:2]
    if space != _space() or not number.isdecimal():
        return False
    try:
        os.kill(int(number), 0)
    except (OSError, OverflowError) as error:  # it may be another user's
        return isinstance(error, ProcessLookupError)
    return False


@cache
def _of_process(url: str, process: int) -> Mailbox:
    return Mailbox(url)


def mailbox(url: str) -> Mailbox:
    """This process's mailbox in a storage. Raises like `Mailbox`."""
    return _of_process(url.rstrip("/"), os.getpid())
