"""Pairs of regions: the TCP connections to one other region. Each pair fails alone.

Both regions hear of the coordinator where the other one listens, and both try to reach it: one way is enough.
"""

import contextlib
import functools
import math
import socket
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from ..errors import LinkError, short
from ..threads import NativeThread, side_by_side
from .addresses import is_from, is_url, named
from .awake import awake_s
from .connection import ANSWER_S, Connection, ConnectionLost
from .keys import Ciphers, Keys, ciphers
from .mailbox import Died, mailbox
from .pipe import CiphersFor, Seen
from .port import Port
from .reaching import REACH_S, NotReached, Search
from .recovery import Denied, Recovery, stream_verdict

MAX_CONNECTIONS = 16
MAX_SOCKETS = 512
"""Sockets that a process opens for its pairs; with many regions, each pair has fewer connections. Most systems allow 1024."""
ASSUMED_RATE = 125e6
"""Bytes per second that a region plans for without a rate limit: 1 Gbit/s."""
_USABLE = 0.25
"""Share of a socket's buffer that counts as bytes in flight. The kernel's book-keeping takes a third of the buffer, and a
connection that was idle or has lost a packet starts with far less."""
_LINE = 64
"""The number of the connection on which nobody sends anything."""
STREAMS = 65, 255
"""The smallest and the largest number of a stream. Smaller ones are of the connections that a pair always has."""
_LOOK_S = 0.2
_RECALL_S = 2.0


class Pair:
    """This region's end of the connections to one other region, which may call from now on. Both ends make the same calls.

    Args:
        addresses: of this end; `theirs`: of the other one.
        agreed: keys that only the two processes have; see `Share`.
        timeout_s: seconds after which a connection counts as failed, if the other end does not answer.
        own: the address of this machine to call from; empty for any.
        keys: of the run's secret: with them, all that the two send each other is sealed.
        storage: the URL of the one in which the two may meet; empty if there is none.
        judge: the error if the other region is lost, from when a connection broke, whether its machine denies new ones, and
            whether it has closed one in good order; None while it may come back.

    Attributes:
        control: the connection for control messages; None before `meet`.
        bulk: the connections for payloads.
        rtt_s: seconds of a round trip, set by the wire.
        way: "direct" if the region with the lower number calls the other one, "reversed" if that calls, "storage" if they meet
            in one.
    """

    def __init__(
        self,
        region: int,
        other: int,
        port: Port,
        addresses: Sequence[tuple[str, int]],
        theirs: Sequence[tuple[str, int]],
        agreed: Keys,
        timeout_s: float,
        own: str = "",
        keys: Keys | None = None,
        judge: Callable[[float, bool, bool], ConnectionLost | None] = lambda *facts: None,
        storage: str = "",
    ) -> None:
        self._ids, self._agreed, self._keys = (region, other), agreed, keys
        self._port, self._addresses, self._theirs = port, addresses, theirs
        self._timeout_s, self._own = timeout_s, own
        self.region = other
        self.control: Connection | None = None
        self.bulk: list[Connection] = []
        self.rtt_s = 0.0
        self.way = ""
        self._called: tuple[str, int] | None = None
        self._callers: list[tuple[str, int]] = []
        self._token = self._resumes = b""
        self._sealing: Keys | None = None
        self._congestion: str | None = None
        self._line: Connection | None = None
        self._recovery = Recovery(
            self._call_again,
            lambda broken_at, is_denied: judge(broken_at, is_denied, self._has_closed_one),
            self._end,
        )
        self._stream_recovery = Recovery(self._call_again, self._judge_stream)
        self._came: dict[int, socket.socket] = {}
        self._streams: dict[int, Connection] = {}
        self._changed = threading.Condition()
        self._is_closed = False
        self._storage = storage
        self._search = Search(region < other, timeout_s, own, storage)
        self._port.expect(self._first_token(region), self._search.take)

    def close(self) -> None:
        """Close all connections. Streams end with what is said on them, or with the other region."""
        self._is_closed = True
        for token in (self._first_token(self._ids[0]), self._token, self._resumes):
            self._port.forget(token)
        self._search.close()
        with self._changed:
            came, self._came = self._came, {}
        for connection in self._lasting:
            connection.close()
        for unclaimed in came.values():
            unclaimed.close()

    def _look_whether_closed(self) -> None:
        """Close what was made while another thread has closed the pair: what follows then fails."""
        if self._is_closed:
            self.close()

    def _first_token(self, called: int) -> bytes:
        """What one of the two regions says when it calls the other one for the first time."""
        return self._agreed.of("meet", called).raw

    @property
    def has_no_address(self) -> bool:
        """Whether a storage is the only way there may be."""
        return bool(self._storage) and not self._addresses and not self._theirs

    def meet_in_storage(self, count: int, look: Callable[[], object] = lambda: None) -> None:
        """Make the control connection and `count` for payloads, all at once. Raises like `meet`.

        No earlier connection is in the way, as on the network: a mailbox tells them apart.
        """
        self.way, self._called = "storage", (self._storage, 0)
        self._begin(b"")
        self.control = self._connection(0, str(self.region))
        self.bulk = [self._connection(number + 1, f"{self.region}-{number}") for number in range(count)]
        self._look_whether_closed()

        def look_for_both() -> None:
            if self._is_closed:
                raise LinkError(f"the connections to region {self.region} are closed.")
            look()

        def make(number: int, connection: Connection) -> None:
            timeout_s = min(REACH_S, self._timeout_s)
            try:
                opened = self._search.call((self._storage, 0), self._token, number, timeout_s, look_for_both)
            except OSError as error:
                raise self._not_reached(f"{self._storage} ({short(error.strerror or error, 300)})") from error
            self._attach(connection, opened)

        side_by_side([partial(make, number, each) for number, each in enumerate(self.connections)], count + 1)
        # a message is written and read, and so is its answer
        self.rtt_s = 4 * mailbox(self._storage).storage.fastest_s

    def _begin(self, words: bytes) -> None:
        """Make the keys of this meeting: what was said in an earlier one of the two does not count here."""
        fresh = self._agreed.of("pair", words.hex())
        self._sealing = None if self._keys is None else fresh
        # who listens on the way cannot make the keys, and so no token that has not been said
        self._token, self._resumes = (fresh.of(what).raw for what in ("payloads", "again"))

    def _not_reached(self, why: object) -> LinkError:
        region, other = self._ids
        return LinkError(
            f"region {region} and region {other} do not reach each other through the storage: {why}. Look at both: hf-cocodc "
            "doctor RECIPE --region N --coordinator URL."
        )

    def meet(self, look: Callable[[], object] = lambda: None) -> None:
        """Make the control connection. Raises LinkError if the other end comes too late, or neither end reaches the other.

        `look` is called several times a second while this end searches, and may raise.
        """
        region, other = self._ids
        try:
            connection, self._called, words = self._search.run(
                self._theirs, self._first_token(other), self._agreed.of("storage").raw, look
            )
        except NotReached as error:
            if not self._addresses:
                raise self._not_reached(error) from error
            raise LinkError(
                f"region {region}, which listens at {' and '.join(named(*each) for each in self._addresses)}, and region {other} "
                f"do not reach each other: {error}. One of them must reach the other one: open its port in the firewall "
                "(regions.port), or name the address at which it is reached (regions.announce). If both are behind NAT, forward "
                "a port of one of them (ssh -R), use a VPN (regions.interface), or let all regions meet in a storage "
                "(--coordinator URL, such as s3://BUCKET/FOLDER)."
            ) from error
        finally:
            self._port.forget(self._first_token(region))
        self.way = "direct" if (self._called is not None) == (region < other) else "reversed"
        self._begin(words)
        if self._called is not None and is_url(self._called[0]):
            self.way = "storage"
        if self._called is None:
            self._callers = [each for each in self._theirs if is_from(connection, each[0])]
            self._port.expect(self._token, self._arrive)
            self._port.expect(self._resumes, self._come_back)
        self.control = self._connection(0, str(other))
        self._look_whether_closed()
        self._attach(self.control, connection)

    def widen(self, count: int, congestion: str | None = None) -> None:
        """Make payload connections; the end that made the first call makes all. Raises LinkError if they cannot be made.

        The system of a process that is killed resets the connections that have unread bytes, and closes the others in good
        order. So there is one more, on which nobody sends anything.
        """
        numbers = range(1, count + 1)
        self._congestion = congestion
        self.bulk = [
            self._connection(number, f"{self.region}-{number - 1}", congestion) for number in numbers
        ]
        self._look_whether_closed()

        def make(number: int) -> None:
            if number == _LINE:
                self._line = self.stream(number, self._timeout_s)
                self._look_whether_closed()
            else:
                self._attach(self.bulk[number - 1], self._open(number, self._timeout_s))

        lines = () if self.way == "storage" else (_LINE,)
        side_by_side([partial(make, number) for number in (*numbers, *lines)], count + 1)

    def stream(self, number: int, timeout_s: float, look: Callable[[], object] = lambda: None) -> Connection:
        """Open a stream: a connection for one long conversation, beside the transfers. Whoever has opened it closes it.

        Both ends do, with a number that no other stream has: see `STREAMS`. It comes back if it breaks. `look` is called
        several times a second while this end waits, and may raise. Raises LinkError if the other end cannot be reached, or has
        not called in time.
        """
        opened = self._open(number, timeout_s, look)
        connection = Connection(
            f"{self.region}-stream",
            self._stream_recovery.begin,
            self._congestion,
            self._ciphers_for(number),
            self.way != "storage",
        )
        with self._changed:
            self._streams = {key: each for key, each in self._streams.items() if math.isinf(each.lost_at)}
            self._streams[number] = connection

        def attach() -> None:  # the other end may not have opened it yet
            try:
                connection.attach(opened, timeout_s)
            except OSError:
                self._stream_recovery.begin(connection)
            except ConnectionLost:  # it is closed
                pass

        NativeThread(attach, "hf_cocodc-connect").start()
        return connection

    def _attach(self, connection: Connection, opened: socket.socket) -> None:
        """Let a new connection begin on a socket. Raises LinkError, and ends it, if that fails."""
        try:
            connection.attach(opened, self._timeout_s)
        except (OSError, ConnectionLost) as error:
            connection.close()
            why = short(getattr(error, "strerror", None) or error, 300)
            raise LinkError(
                f"region {self._ids[0]} and region {self.region} reach each other, and cannot speak to each other: {why}."
            ) from error

    def _ciphers_for(self, number: int) -> CiphersFor | None:
        """Makes the ciphers for the sockets of connection `number`."""
        if self._sealing is None:
            return None
        keys, is_first = self._sealing, self._ids[0] < self._ids[1]

        def make(own: bytes, theirs: bytes) -> Ciphers:
            both = (own, theirs) if is_first else (theirs, own)
            return ciphers(keys.of("socket", number, *(each.hex() for each in both)), is_first)

        return make

    def _open(
        self, number: int, timeout_s: float, look: Callable[[], object] = lambda: None
    ) -> socket.socket:
        """One more socket that both ends hold. See `stream`."""
        region, other = self._ids
        if self._called is not None:
            try:
                return self._search.call(self._called, self._token, number, timeout_s, look)
            except OSError as error:
                why = short(error.strerror or error, 200)
                raise LinkError(
                    f"region {other} cannot be reached any more at {named(*self._called)}: {why}."
                ) from error
        until = awake_s() + timeout_s
        while True:
            with self._changed:
                if self._changed.wait_for(lambda: number in self._came, _LOOK_S):
                    return self._came.pop(number)
            look()
            if awake_s() > until:
                raise LinkError(f"region {other} has not called region {region} within {timeout_s:g} s.")

    def _arrive(self, connection: socket.socket, number: int) -> None:
        """The other end has called for one more connection."""
        with self._changed:
            taken = self._streams.get(number)
            # the other end has heard the same offer twice
            if taken is not None and math.isinf(taken.lost_at):
                connection.close()
                return
            earlier = self._came.pop(number, None)
            self._came[number] = connection
            self._changed.notify_all()
        if earlier is not None:
            earlier.close()

    def _connection(self, number: int, name: str, congestion: str | None = None) -> Connection:
        is_storage = self.way == "storage"
        return Connection(name, self._recovery.begin, congestion, self._ciphers_for(number), not is_storage)

    def _call_again(self, connection: Connection) -> None:
        """Call for a broken connection; or look whether the region is there, if it calls."""
        try:
            if self._called is not None:
                number = next(key for key, each in self._numbered().items() if each is connection)
                # a mailbox tells two sockets of a name apart, and finds there whose earlier one it was
                token = self._token if self.way == "storage" else self._resumes
                opened = self._search.call(self._called, token, number, _RECALL_S)
                connection.attach(opened, REACH_S if self.way == "storage" else ANSWER_S)
                return
            # not its own addresses: behind a router, they may be those of other machines here
            for address in self._callers:
                socket.create_connection(address, _RECALL_S, (self._own, 0) if self._own else None).close()
        except (ConnectionRefusedError, ConnectionResetError) as error:
            # what else a storage does says nothing of the region
            if self.way != "storage" or isinstance(error, Died):
                raise Denied(short(error.strerror or error, 200)) from error

    def _come_back(self, connected: socket.socket, number: int) -> None:
        """The other end has called for a broken connection."""
        connection = self._numbered().get(number)
        if connection is None:
            connected.close()
            return

        def attach() -> None:
            with contextlib.suppress(OSError, ConnectionLost):  # it calls again
                connection.attach(connected)

        NativeThread(attach, "hf_cocodc-connect").start()

    def _judge_stream(self, broken_at: float, is_denied: bool) -> ConnectionLost | None:
        """What becomes of a stream never ends the pair: transfers go on without it."""
        assert self.control is not None
        whole_since = self.control.whole_since if math.isinf(self.control.broken_at) else math.inf
        has_control = math.isinf(self.control.lost_at)
        return stream_verdict(awake_s(), broken_at, whole_since, has_control)

    def _end(self, error: ConnectionLost) -> None:
        """The other region is lost."""
        for connection in self._numbered().values():
            connection.end(error)

    def _numbered(self) -> dict[int, Connection]:
        """All connections, by the numbers that both ends call them."""
        return dict(enumerate(self.connections)) | self._streams

    def revoke(self, order: int, error: Exception) -> None:
        """See `Connection.revoke`."""
        for connection in self.connections:
            connection.revoke(order, error)

    def look(self) -> Seen:
        """See `Connection.look`: of all connections."""
        return functools.reduce(Seen.plus, (each.look() for each in self._numbered().values()), Seen())

    def pace(self, rate: float) -> bool:
        """Let the kernel send at most `rate` bytes per second on each connection. Returns whether it does."""
        return all(each.pace(rate) for each in self.connections)

    @property
    def network_rtt_s(self) -> float:
        """Like `rtt_s`, without the time that the two processes take, where the kernel says it."""
        known = None if self.control is None else self.control.rtt_s
        return self.rtt_s if known is None else min(known, self.rtt_s)

    @property
    def lost_at(self) -> float:
        """When one of the connections has ended; infinite before."""
        return min(each.lost_at for each in self.connections)

    def connection(self, index: int | None) -> Connection:
        """Payload connection `index`, or the control connection."""
        assert self.control is not None
        return self.control if index is None else self.bulk[index % len(self.bulk)]

    @property
    def _lasting(self) -> list[Connection]:
        return self.connections if self._line is None else [*self.connections, self._line]

    @property
    def _has_closed_one(self) -> bool:
        """Whether the other end has closed a connection in good order that may come back, and has not."""
        return any(each.is_closed and math.isinf(each.lost_at) for each in self._lasting)

    @property
    def connections(self) -> list[Connection]:
        """All but streams, the control connection first."""
        return self.bulk if self.control is None else [self.control, *self.bulk]


def connections_for(rtt_s: float, rate: float = ASSUMED_RATE, window: int | None = None) -> int:
    """The number of connections that keep a link busy: rtt_s x rate bytes in flight, of which each may have `_USABLE` x window.

    `rate`: bytes per second. `window`: bytes of a socket's buffer; by default what this machine's kernel allows senders.
    """
    window = _send_buffer() if window is None else window
    wanted = math.ceil(rtt_s * rate / (_USABLE * window))
    return min(max(wanted, 1), MAX_CONNECTIONS)


def _send_buffer() -> int:
    """The largest TCP send buffer, in bytes, that this machine's kernel allows; Linux's default if it does not say."""
    limits = Path("/proc/sys/net/ipv4/tcp_wmem")
    return int(limits.read_text().split()[2]) if limits.is_file() else 4 << 20
