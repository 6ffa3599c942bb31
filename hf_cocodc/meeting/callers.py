"""Connections of presence that belong to no member: those that greet, and those that are leaving."""

import contextlib
import logging
import math
import selectors
import socket
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..errors import RegionLostError
from .channel import Channel, keep_from_forks, line_of
from .handshake import PROTOCOL

logger = logging.getLogger(__name__)

_GREET_S = 10.0
_AGAIN_S = 0.2
_FAREWELL_S = 1.0
_MOST = 128
"""More connections that have not greeted are closed at once."""


class Member(NamedTuple):
    """A process of a region that takes part.

    Attributes:
        region: the region's id.
        ticket: a number that no other process of this run has.
    """

    region: int
    ticket: int

    def calls(self, other: "Member") -> bool:
        """Whether this member calls the other one, and not the other this one."""
        return (self.ticket, self.region) > (other.ticket, other.region)


@dataclass
class Caller:
    """A connection of no member.

    Attributes:
        member: whom we call, or who has called us; None before it has greeted.
        stage: "connects" and "asks" if we call; "came", "waits" and "welcomed" if we are called; "leaves".
        until: it is closed then.
        greeting: what it has said, once it has.
    """

    channel: Channel
    member: Member | None
    stage: str
    until: float
    greeting: dict[str, Any] = field(default_factory=dict)


class Callers:
    """All connections of no member. Only presence's thread uses it.

    Args:
        run, me, host: see Presence.
        selector: waits for all connections of presence.
        knows: whether a member is, or was, connected.
        judge: called with the hello of a newcomer; returns why it is refused, or None.
        adopt: called with a connection that is complete, the other's hello, and the messages that have come with it.

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
    ) -> None:
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
        self._again_at: dict[Member, float] = {}
        self._all: list[Caller] = []
        self._hears_at: float | None = 0.0  # it listens from then on; None: it does

    def expect(self, peers: Mapping[Member, str], hello: dict[str, Any], refused: dict[Member, str]) -> None:
        """Call these members, or expect that they call, and say `hello` to each. Who refuses is noted in `refused`."""
        self._hello, self._refused = hello or self._hello, refused
        self._expected = {**(self._expected or {}), **peers}
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
            wanted = self._me.calls(member) and member not in called and member not in self._refused
            if wanted and not self._knows(member) and now >= self._again_at.get(member, 0.0):
                self._again_at[member] = now + _AGAIN_S
                self._call(member, address)

    def serve(self, caller: Caller | None, events: int) -> None:
        """Something has happened to a connection, or someone has called (None)."""
        if caller is None:
            self._answer()
            return
        if caller.stage == "connects":
            if caller.channel.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                self._end(caller)
                return
            caller.stage, caller.until = "asks", math.inf
            greeting = {"to": list(caller.member or ()), **self._greeting()}
            caller.channel.write(line_of(greeting))
        elif events & selectors.EVENT_READ:
            messages = caller.channel.read()
            if messages and caller.stage != "leaves":
                self._hear(caller, messages)
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
        host, _, port = address.rpartition(":")
        host = host.strip("[]")
        connection = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        channel = Channel(connection)
        with contextlib.suppress(OSError, ValueError):
            connection.connect_ex((host, int(port)))  # the error of an address without a host comes later
            caller = Caller(channel, member, "connects", time.monotonic() + _GREET_S)
            self._all.append(caller)
            self._selector.register(connection, selectors.EVENT_WRITE, caller)
            return
        channel.close()

    def _answer(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError:  # too many files are open: the listener would wake us again at once
            self._selector.unregister(self._listener)
            self._hears_at = time.monotonic() + 1.0
            return
        if sum(caller.stage == "came" for caller in self._all) >= _MOST:
            connection.close()
            return
        caller = Caller(Channel(connection), None, "came", time.monotonic() + _GREET_S)
        self._all.append(caller)
        self._selector.register(connection, selectors.EVENT_READ, caller)

    def _hear(self, caller: Caller, messages: list[dict[str, Any]]) -> None:
        first, *rest = messages
        if caller.stage == "came":
            member = _member(first.get("from"))
            if member is None or "hf_cocodc" not in first:  # a stranger
                self._end(caller)
                return
            caller.member, caller.greeting = member, first
            caller.stage, caller.until = "waits", math.inf
            self._judge(caller)
        elif caller.stage == "welcomed":
            self._finish(caller, messages)
        elif caller.stage == "asks" and caller.member is not None:
            caller.greeting = first
            if first.get("refused") is None and _member(first.get("from")) == caller.member:
                caller.channel.write(line_of({"kind": "here"}))
                self._finish(caller, rest)
            else:
                self._refused[caller.member] = str(
                    first.get("refused") or "what answers there is another member"
                )
                self._end(caller)

    def _judge(self, caller: Caller) -> None:
        """Welcome a caller that has greeted, or refuse it; neither as long as we do not know whom we expect."""
        assert caller.member is not None
        reason = self._reason_to_refuse(caller.member, caller.greeting)
        if reason is None and self._expected is None:
            return
        if reason is None:
            caller.stage, caller.until = "welcomed", time.monotonic() + _GREET_S
            caller.channel.write(line_of(self._greeting()))
        else:
            logger.warning(
                "region %d refuses a caller as region %d: %s", *self._me[:1], caller.member.region, reason
            )
            caller.channel.write(line_of({"refused": reason}))
            caller.stage, caller.until = "leaves", time.monotonic() + _FAREWELL_S
            caller.channel.finish()

    def _reason_to_refuse(self, member: Member, said: dict[str, Any]) -> str | None:
        if said.get("hf_cocodc") != PROTOCOL:
            return f"it speaks protocol {said.get('hf_cocodc')}, this region {PROTOCOL}: use the same version everywhere"
        if said.get("run") != self._run or _member(said.get("to")) != self._me:
            return "it calls another run, or another process of this run"
        if self._knows(member) or any(c.member == member and c.stage == "welcomed" for c in self._all):
            return "it has been connected before"
        if self._expected is None or member in self._expected:
            return None
        try:
            return self._judge_newcomer(self._hello_in(said, member))
        except Exception as error:
            logger.exception("region %d cannot judge a newcomer", self._me.region)
            return f"{type(error).__name__}: {error}"

    def _finish(self, caller: Caller, messages: list[dict[str, Any]]) -> None:
        assert caller.member is not None
        if self._knows(caller.member):
            self._end(caller)
            return
        self._all.remove(caller)
        self._expected = {each: at for each, at in (self._expected or {}).items() if each != caller.member}
        self._adopt(caller, self._hello_in(caller.greeting, caller.member), messages)

    def _hello_in(self, said: dict[str, Any], member: Member) -> dict[str, Any]:
        hello = said.get("hello")
        return {
            **(hello if isinstance(hello, dict) else {}),
            "region": member.region,
            "ticket": member.ticket,
            "address": str(said.get("address")),
        }

    def _end(self, caller: Caller) -> None:
        self._all.remove(caller)
        self._selector.unregister(caller.channel.socket)
        caller.channel.close()


def _member(said: Any) -> Member | None:
    """The member that a message names, if it is one."""
    if isinstance(said, list) and len(said) == 2 and all(type(each) is int for each in said):
        return Member(*said)
    return None
