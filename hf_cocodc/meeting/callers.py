"""Connections of presence that belong to no member: those that greet, and those that are leaving."""

import contextlib
import logging
import math
import selectors
import socket
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

from ..errors import RegionLostError, short
from .caller import Caller, Member, member_in
from .channel import LONGEST_SEALED, Channel, keep_from_forks, line_of
from .handshake import PROTOCOL
from .heard import host_and_port
from .proof import Proof, Refused
from .secret import Keys

logger = logging.getLogger(__name__)

_GREET_S = 10.0
_AGAIN_S = 0.2
_FAREWELL_S = 1.0
_MOST = 128
"""Connections of others that belong to no member at most: for one more, the oldest that was not welcomed is closed."""
_TALKS = "came", "asks", "welcomed"
"""Stages in which the other end says something, one message in each."""
_WARN_S = 1.0
_LONGEST_REASON = 1000
_FIRST_LINE = 4 << 10
"""Bytes that a caller may say before it has greeted."""


class Callers:
    """All connections of no member. Only presence's thread uses it.

    Args:
        run, me, host: see Presence.
        selector: waits for all connections of presence.
        knows: whether a member is, or was, connected.
        judge: called with the hello of a newcomer; returns why it is refused, or None.
        adopt: called with a connection that is complete, the other's hello, and the messages that have come with it.
        keys, encrypt: see Presence.

    Attributes:
        address: where other members call.

    Raises:
        OSError: `host` is no address of this machine.
    """

    def __init__(
        self,
        run: str,
        me: Member,
        host: str,
        selector: selectors.BaseSelector,
        knows: Callable[[Member], bool],
        judge: Callable[[dict[str, Any]], str | None],
        adopt: Callable[[Caller, dict[str, Any], list[dict[str, Any]]], None],
        keys: Keys | None = None,
        encrypt: bool = False,
    ) -> None:
        self._keys, self._encrypt = keys, encrypt
        self._run, self._me, self._selector = run, me, selector
        self._knows, self._judge_newcomer, self._adopt = knows, judge, adopt
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=_MOST)
        self._listener.setblocking(False)
        keep_from_forks(self._listener)
        port = self._listener.getsockname()[1]
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._refused: dict[Member, str] = {}
        self._hello: dict[str, Any] = {}
        self._expected: dict[Member, str] | None = None  # None: we cannot judge those that call us yet
        self._calls: set[Member] = set()
        self._again_at: dict[Member, float] = {}
        self._all: list[Caller] = []
        self._warns_at = 0.0
        self._hears_at: float | None = 0.0  # it listens from then on; None: it does

    def expect(
        self, peers: Mapping[Member, str], hello: Mapping[str, Any] | None, refused: dict[Member, str]
    ) -> None:
        """Call these members, or expect their calls. A newcomer has a `hello`, and calls all. Notes in `refused` who refuses."""
        self._hello, self._refused = dict(hello or self._hello), refused
        self._expected = {**(self._expected or {}), **peers}
        self._calls |= {member for member in peers if hello is not None or self._me.calls(member)}
        for caller in list(self._all):
            if caller.stage == "waits":
                self._judge(caller)

    def give_up(self, peers: Collection[Member]) -> None:
        """Call these members no longer, and expect none of them."""
        self._expected = {each: at for each, at in (self._expected or {}).items() if each not in peers}
        for caller in list(self._all):
            if caller.member in peers and caller.stage in ("connects", "asks"):
                self._end(caller)

    def look_after(self) -> None:
        """Call whom we expect, again if need be, and close what has waited too long."""
        now = time.monotonic()
        if self._hears_at is not None and now >= self._hears_at:
            self._selector.register(self._listener, selectors.EVENT_READ)
            self._hears_at = None
        for caller in list(self._all):
            if now > caller.until:
                self._end(caller)
        called = {caller.member for caller in self._all if caller.stage != "leaves"}
        for member, address in (self._expected or {}).items():
            wanted = member in self._calls and member not in called and member not in self._refused
            if wanted and not self._knows(member) and now >= self._again_at.get(member, 0.0):
                self._again_at[member] = now + _AGAIN_S
                self._call(member, address)

    def serve(self, caller: Caller | None, events: int) -> None:
        """Something has happened to a connection, or someone has called (None)."""
        if caller is None:
            self._answer()
            return
        if caller not in self._all:  # closed, or complete, since the selector has looked
            return
        if caller.stage == "connects":
            if caller.channel.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                self._end(caller)
                return
            caller.stage, caller.until = "asks", math.inf
            assert caller.member is not None
            greeting = {"to": list(caller.member), **self._greeting()}
            caller.proof = self._proof(self._me, caller.member)
            caller.channel.write(line_of(caller.proof.say(greeting)))
        elif events & selectors.EVENT_READ:
            caller.channel.receive()
            if caller.channel.has_skipped and caller.stage == "came":
                self._end(caller)
                return
            while messages := caller.channel.take(1):  # who says too much is not heard
                if caller.stage in _TALKS:
                    self._hear(caller, messages[0])
                if caller not in self._all:
                    return
        if events & selectors.EVENT_WRITE:
            caller.channel.flush()
        if caller.channel.ended:
            self._end(caller)
        else:
            writes = selectors.EVENT_WRITE if caller.channel.unsent_since is not None else 0
            self._selector.modify(caller.channel.socket, selectors.EVENT_READ | writes, caller)

    def part_with(self, channel: Channel) -> None:
        """Let the other end take what it was told, for a moment; then close the connection."""
        caller = Caller(channel, None, "leaves", time.monotonic() + _FAREWELL_S)
        self._all.append(caller)
        self._selector.modify(channel.socket, selectors.EVENT_READ, caller)
        channel.finish()

    @property
    def some_leave(self) -> bool:
        """Whether a connection is still leaving."""
        return any(caller.stage == "leaves" for caller in self._all)

    def close(self) -> None:
        for caller in list(self._all):
            self._end(caller)
        self._listener.close()

    def not_reached(self, member: Member, address: str) -> RegionLostError:
        """The error for a member that was not reached in time."""
        return RegionLostError(
            member.region,
            f"region {self._me.region} could not connect to region {member.region} at {address} from its own address "
            f"{self.address}. Every region must reach every other region at its address: set regions.interface to the network "
            "interface of the link, and let no firewall keep them from each other.",
        )

    def _greeting(self) -> dict[str, Any]:
        return {
            "hf_cocodc": PROTOCOL,
            "run": self._run,
            "from": list(self._me),
            "address": self.address,
            "hello": self._hello,
        }

    def _call(self, member: Member, address: str) -> None:
        with contextlib.suppress(ValueError):
            host, port = host_and_port(address)
            connection = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
            self._begin_to_call(member, Channel(connection), (host, port))

    def _begin_to_call(self, member: Member, channel: Channel, address: tuple[str, int]) -> None:
        connection = channel.socket
        with contextlib.suppress(OSError, ValueError):
            connection.connect_ex(address)  # the error of an address without a host comes later
            caller = Caller(channel, member, "connects", time.monotonic() + _GREET_S)
            self._all.append(caller)
            self._selector.register(connection, selectors.EVENT_WRITE, caller)
            return
        channel.close()

    def _answer(self) -> None:
        """Accept all that have called."""
        for _ in range(_MOST):
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError:  # too many files are open: the listener would wake us again at once
                self._selector.unregister(self._listener)
                self._hears_at = time.monotonic() + 1.0
                return
            self._make_room()
            caller = Caller(Channel(connection), None, "came", time.monotonic() + _GREET_S, is_theirs=True)
            caller.channel.longest = _FIRST_LINE
            self._all.append(caller)
            self._selector.register(connection, selectors.EVENT_READ, caller)

    def _make_room(self) -> None:
        """Close the oldest caller that was not welcomed, if there are too many.

        A member that has waited for long calls again. One that was welcomed may believe that it is in, and would not.
        """
        theirs = [caller for caller in self._all if caller.is_theirs]
        if len(theirs) >= _MOST:
            self._end(min(theirs, key=lambda caller: caller.stage == "welcomed"))

    def _proof(self, caller: Member, callee: Member) -> Proof:
        about = {"for": "presence", "run": self._run, "from": caller, "to": callee}
        return Proof(self._keys, about, self._encrypt)

    def _hear(self, caller: Caller, said: dict[str, Any]) -> None:
        if caller.stage == "came":
            member = member_in(said.get("from"))
            if member is None or "hf_cocodc" not in said:  # a stranger
                self._end(caller)
                return
            caller.member, caller.greeting = member, said
            caller.stage, caller.until = "waits", math.inf
            self._judge(caller)
        elif caller.stage == "welcomed":
            assert caller.proof is not None
            try:
                caller.proof.hear(said)
            except Refused as error:
                self._warn(f"ends a call: {self._named(error, caller)}")
                self._end(caller)
            else:
                self._finish(caller)
        elif caller.stage == "asks" and caller.member is not None and caller.proof is not None:
            caller.greeting = said
            reason = said.get("refused")
            if reason is None and member_in(said.get("from")) != caller.member:
                reason = "what answers there is another member"
            if reason is None:
                try:
                    caller.proof.hear(said)
                except Refused as error:
                    named = self._named(error, caller)
                    reason = (
                        f"what answers there does not prove that it is region {caller.member.region}: {named}"
                    )
            if reason is None:
                caller.channel.write(line_of(caller.proof.say({"kind": "here"})))
                self._finish(caller)
            else:
                self._refused[caller.member] = short(reason, _LONGEST_REASON)
                self._end(caller)

    def _judge(self, caller: Caller) -> None:
        """Welcome a caller that has greeted, or refuse it; neither as long as we do not know whom we expect."""
        assert caller.member is not None
        reason = self._reason_to_refuse(caller, caller.member, caller.greeting)
        if reason is None and self._expected is None:
            return
        if reason is None:
            caller.stage, caller.until = "welcomed", time.monotonic() + _GREET_S
            # behind its last word may come what members tell each other
            caller.channel.longest = LONGEST_SEALED
            assert caller.proof is not None
            caller.channel.write(line_of(caller.proof.say(self._greeting())))
        else:
            self._warn(f"refuses a caller as region {caller.member.region}: {reason}")
            caller.channel.write(line_of({"refused": reason}))
            caller.stage, caller.until = "leaves", time.monotonic() + _FAREWELL_S
            caller.channel.finish()

    def _reason_to_refuse(self, caller: Caller, member: Member, said: dict[str, Any]) -> str | None:
        if said.get("hf_cocodc") != PROTOCOL:
            theirs = short(said.get("hf_cocodc"))
            return f"it speaks protocol {theirs}, this region {PROTOCOL}: use the same version everywhere"
        if said.get("run") != self._run or member_in(said.get("to")) != self._me:
            return "it calls another run, or another process of this run"
        try:
            if caller.proof is None:
                caller.proof = self._proof(member, self._me)
                caller.proof.hear(said)
        except Refused as error:
            return self._named(error, caller)
        # a member may call twice: this process stood still, and the member gave up its first call. The call that goes on counts
        if self._knows(member):
            return "it has been connected before"
        try:
            host_and_port(said.get("address"))
        except ValueError as error:
            return f"it gives no address at which it can be called: {error}"
        if self._expected is None or member in self._expected:
            return None
        try:
            return self._judge_newcomer(self._hello_in(said, member))
        except Exception as error:
            logger.exception("region %d cannot judge a newcomer", self._me.region)
            return f"{type(error).__name__}: {error}"

    def _named(self, error: Refused, caller: Caller) -> str:
        """Why a caller or callee is refused, with the numbers of both regions: the text is read in both."""
        assert caller.member is not None
        return error.naming(f"region {caller.member.region}", f"region {self._me.region}")

    def _finish(self, caller: Caller) -> None:
        assert caller.member is not None and caller.proof is not None
        if self._knows(caller.member):
            self._end(caller)
            return
        self._all.remove(caller)
        caller.channel.seal(caller.proof.ciphers())
        self._expected = {each: at for each, at in (self._expected or {}).items() if each != caller.member}
        self._adopt(caller, self._hello_in(caller.greeting, caller.member), caller.channel.take())

    def _hello_in(self, said: dict[str, Any], member: Member) -> dict[str, Any]:
        hello = said.get("hello")
        return {
            **(hello if isinstance(hello, dict) else {}),
            "region": member.region,
            "ticket": member.ticket,
            "address": str(said.get("address")),
        }

    def _warn(self, what: str) -> None:
        """Say what became of a caller; not of each, if there are many: strangers must not fill the log."""
        if time.monotonic() >= self._warns_at:
            self._warns_at = time.monotonic() + _WARN_S
            logger.warning("region %d %s", self._me.region, what)

    def _end(self, caller: Caller) -> None:
        self._all.remove(caller)
        self._selector.unregister(caller.channel.socket)
        caller.channel.close()
