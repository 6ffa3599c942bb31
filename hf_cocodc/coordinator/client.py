"""A region's connection to the coordinator, which it makes again when it ends; and what commands ask the coordinator."""

import asyncio
import concurrent.futures
import contextlib
import logging
from collections.abc import Callable
from typing import Any

from msgspec import structs

from ..errors import CocodcError, InputError, LinkError, MeetingError, RegionLostError, short
from ..net.addresses import Unreachable, is_url, parts_of
from ..net.awake import awake_s
from ..net.channel import object_of
from ..net.keys import Keys
from ..net.mailbox import mailbox
from ..net.members import Member
from ..net.pipe import SIZES, SWALLOWED
from ..net.storage import StorageError
from ..settings.regions import HOW_LONG
from .caller import (
    CONNECT_S,
    FIRST_WAIT_S,
    FLUSH_S,
    LONGEST_WAIT_S,
    ConnectionEnded,
    CoordinatorConnection,
    LoopThread,
    NobodyAnswers,
    OpenCall,
    cancel,
    connect,
    error_of,
)
from .messages import (
    Alive,
    Back,
    Beat,
    Bye,
    FromRegion,
    Hello,
    Refuse,
    Resumed,
    ToRegion,
    Waiting,
    Welcome,
    from_line,
)
from .standby import Standby

logger = logging.getLogger(__name__)

SILENT_S, _SILENT_PERIODS = 15.0, 8
"""The coordinator sends something every period: one that is silent for so long, and for so many, has gone, or the network has."""
_LOOK_S = 0.2
_BEAT_LOOK_S = 1.0
"""What a heartbeat says of who takes part is told after so many seconds, and need not wait for the next one."""


def status(
    address: str,
    keys: Keys | None,
    run: str | None = None,
    timeout_s: float = 5.0,
    look: Callable[[], None] = lambda: None,
) -> list[dict[str, Any]]:
    """The runs that these keys may see, or the one of this name (see `runs.overview`). `timeout_s` and `look`: see
    CoordinatorConnection, which also says what this raises.
    """
    with contextlib.closing(
        CoordinatorConnection(address, run or "", "status", keys, timeout_s, look)
    ) as connection:
        try:
            line = connection.receive_line(min(timeout_s, CONNECT_S))
        except ConnectionEnded as error:
            raise MeetingError(f"{error}.") from error
    answer = None if line is None else object_of(line)
    if answer is None:
        raise MeetingError(f"the coordinator at {address} does not answer within {timeout_s:g} s.")
    return list(answer["runs"])


def passes_large(address: str, keys: Keys | None, timeout_s: float = 5.0) -> bool:
    """Whether messages of `pipe.SIZES` pass to the coordinator and back, each in `timeout_s`. Raises like CoordinatorConnection,
    or ConnectionEnded.
    """
    with contextlib.closing(
        CoordinatorConnection(address, "", "echo", keys, timeout_s=timeout_s)
    ) as connection:
        for size in SIZES:
            connection.send({"large": "x" * size})
            if connection.receive_line(timeout_s) is None:
                return False
    return True


class Client:
    """A region's one connection to the coordinator, remade whenever it ends. `meet` sets `me` and `welcome`.

    `period_s`: seconds between two heartbeats, and half of those between two signs of life of the coordinator.
    """

    me: Member
    welcome: Welcome

    def __init__(self, address: str, run: str, keys: Keys | None = None, period_s: float = 1.0) -> None:
        self._address, self._run, self._keys = address, run, keys
        self._period_s, self._silent_s = period_s, max(SILENT_S, _SILENT_PERIODS * period_s)
        self._look_s = min(period_s, _BEAT_LOOK_S)
        self._call: OpenCall | None = None
        self._standby: Standby | None = None
        self._is_over = False
        self._thread: LoopThread | None = None
        self._working: asyncio.Task[None] | None = None
        self.is_connected, self._heard_at = False, awake_s()
        self._told: tuple[Any, ...] = ()
        self._beat_at = 0.0
        self._is_away = False  # since the connection went, until a coordinator goes on with the run
        self._wait_s = FIRST_WAIT_S

    @property
    def host(self) -> str:
        """The coordinator's host; the URL if it is in a storage."""
        return parts_of(self._address)[0]

    def meet(
        self,
        hello: Hello,
        wait_s: float,
        waiting: Callable[[Waiting], None] = lambda news: None,
        look: Callable[[], None] = lambda: None,
    ) -> Welcome:
        """Meet the other regions, or join the run that trains. If this fails, the client is closed.

        Args:
            waiting: called in the client's thread with what the region waits for, whenever that changes.
            look: called several times a second; what it raises goes to the caller.

        Raises:
            CocodcError: the error that the coordinator's refusal names.
            RegionLostError: regions have not come within `wait_s`.
            MeetingError: there is no run to join; or the coordinator has not been reached for so long, or has failed.
            MeetingRefused: what answers is no coordinator of this run.
        """
        self._thread = LoopThread()
        try:
            if is_url(self._address):
                leader, *others = hello.lanes
                leader = leader._replace(process=mailbox(self._address).process)
                hello = structs.replace(hello, lanes=(leader, *others))
            self._call = self._thread.wait_for(self._meet(hello, wait_s, waiting), look)
        except BaseException:
            self.close()
            raise
        self.me, self.is_connected = self.welcome.me, True
        return self.welcome

    async def _meet(self, hello: Hello, wait_s: float, waiting: Callable[[Waiting], None]) -> OpenCall:
        until = awake_s() + wait_s
        while True:
            call: OpenCall | None = None
            try:
                await self._stand_by()
                left_s = max(until - awake_s(), 0.0)
                call = await connect(self._address, self._run, "region", self._keys, min(left_s, CONNECT_S))
                call.say(hello)
                self.welcome = await self._await_welcome(call, hello, wait_s, until, waiting)
                return call
            except BaseException as error:
                if call is not None:
                    call.drop()
                if not isinstance(error, CocodcError) or not _may_pass(error):
                    raise
                if awake_s() + LONGEST_WAIT_S > until:
                    raise self._not_reached(hello, wait_s, error) from error
                waiting(Waiting(why=f"{str(error).rstrip('.')}. It tries again."))
            await asyncio.sleep(FIRST_WAIT_S)

    async def _stand_by(self) -> None:
        """Stand by as coordinator, once the storage is there in which regions meet. Raises like `Mailbox.begin`."""
        if self._standby is None and is_url(self._address):
            box = mailbox(self._address)
            await asyncio.get_running_loop().run_in_executor(None, box.begin)
            self._standby = Standby(self._address, self._keys, self._call_another)

    def _not_reached(self, hello: Hello, wait_s: float, error: CocodcError) -> MeetingError:
        return MeetingError(
            f"region {hello.region} of run {self._run!r} has tried for {wait_s:g} s (regions.start_timeout_s) to take part: "
            f"{str(error).rstrip('.')}. Nothing was trained."
        )

    async def _await_welcome(
        self,
        call: OpenCall,
        hello: Hello,
        wait_s: float,
        until: float,
        waiting: Callable[[Waiting], None],
    ) -> Welcome:
        last = Waiting()
        began = heard_at = awake_s()
        while (left_s := until - awake_s()) > 0:
            try:
                message = from_line(await asyncio.wait_for(call.hear(), min(_LOOK_S, left_s)))
            except asyncio.TimeoutError:
                if awake_s() - heard_at > 2 * SILENT_S:
                    raise ConnectionEnded(
                        f"the coordinator at {self._address} has been silent for {2 * SILENT_S:g} s: try hf-cocodc doctor"
                    ) from None
                continue
            heard_at = awake_s()
            if isinstance(message, Alive) and last == Waiting() and awake_s() - began > SILENT_S:
                last = Waiting(
                    why=f"the coordinator at {self._address} hears this region, and does not answer what it has said of itself. "
                    f"Perhaps {SWALLOWED}. hf-cocodc doctor proves it"
                )
                waiting(last)
            match message:
                case Welcome():
                    return message
                case Refuse():
                    raise error_of(message)
                case Waiting():
                    last = message
                    waiting(message)
        raise self._not_met(hello, wait_s, last)

    def _not_met(self, hello: Hello, wait_s: float, last: Waiting) -> CocodcError:
        """The error of a region that has waited for `wait_s`."""
        if hello.join or not last.absent:
            return MeetingError(
                f"region {hello.region} could not take part in run {self._run!r} at the coordinator {self._address} within "
                f"{wait_s:g} s (regions.start_timeout_s): {last.why or 'it does not say why'}."
            )
        names = " and ".join(f"region {region}" for region in last.absent)
        return RegionLostError(
            last.absent[0],
            f"{names} did not arrive within {wait_s:g} s (regions.start_timeout_s). Region {hello.region} of "
            f"{hello.terms.count} of run {self._run!r} is waiting at the coordinator {self._address}. Start every missing region "
            f"with the same recipe and coordinator, or raise regions.start_timeout_s.{f' {last.why}' if last.why else ''}",
        )

    def start(
        self,
        on: Callable[[ToRegion], None],
        beat: Callable[[], Beat],
        back: Callable[[], Back],
        away: Callable[[], None] = lambda: None,
    ) -> None:
        """From now on, hear the coordinator in a thread of its own; call it again whenever the connection has ended.

        Args:
            on: called in the thread with each message after `Welcome`, in order.
            beat: returns this region's heartbeat; also called now and then while there is no connection.
            back: returns what this region says after a new connection.
            away: called when the connection has ended, unless that is by a refusal.
        """
        self._on, self._beat, self._back, self._tell_away = on, beat, back, away
        assert self._thread is not None, "start follows meet"
        self._thread.soon(self._begin)

    def send(self, message: FromRegion) -> None:
        """Send a message soon; it is dropped while there is no connection. Any thread or signal handler may call this."""
        if self._thread is not None and self.is_connected:
            self._thread.soon(self._say, message)

    def hang_up(self, why: str) -> None:
        """End this connection, and call again. To be called by `on`."""
        if self._call is not None:
            self._drop(self._call, why)

    def _call_another(self) -> None:
        """Another process serves: this one's connection may not have ended yet. Any thread may call this."""
        thread = self._thread
        if thread is not None and self.is_connected:
            thread.soon(self.hang_up, "another one serves by now")

    def close(self, bye: Bye | None = None) -> None:
        """Say `bye`, then end the connection and the thread, within about a second."""
        if bye is not None:
            self.send(bye)
        thread, self._thread = self._thread, None
        if thread is not None:
            parting = asyncio.run_coroutine_threadsafe(self._part(), thread.loop)
            concurrent.futures.wait((parting,), 2 * FLUSH_S)  # it may wait for a name server
            thread.end()
        self.is_connected, self._call = False, None
        standby, self._standby = self._standby, None
        if standby is not None:
            standby.close()

    # -- in the thread

    def _begin(self) -> None:
        self._working = asyncio.ensure_future(self._work())

    async def _part(self) -> None:
        if self._working is not None:
            await cancel(self._working)
        call, self._call = self._call, None  # nothing is said any more
        if call is not None:
            await call.finish()

    async def _work(self) -> None:
        while not self._is_over:
            if self._call is None:
                await self._come_back()
            else:
                await self._serve(self._call)
        while True:  # nobody hears it, but the region looks after its own waits
            await asyncio.sleep(self._look_s)
            self._say_beat()

    async def _serve(self, call: OpenCall) -> None:
        """Hear and speak until the connection ends."""
        self._heard_at, self._told = awake_s(), ()
        hearing = asyncio.ensure_future(self._hear_all(call))
        try:
            while not hearing.done() and awake_s() < self._heard_at + self._silent_s:
                self._say_beat()
                await asyncio.wait({hearing}, timeout=self._look_s)
        finally:
            await cancel(hearing)
        if call is self._call:
            silent = f"it has been silent for {self._silent_s:g} s"
            self._drop(call, silent if hearing.cancelled() else "the connection has ended")

    def _say(self, message: FromRegion) -> None:
        if self._call is not None:
            try:
                self._call.say(message)
            except InputError as error:
                logger.warning("%s", error)

    def _say_beat(self) -> None:
        try:
            beat = self._beat()
            told, now = (beat.changes, beat.losses, beat.members), awake_s()
            if told != self._told or now >= self._beat_at:
                self._say(beat)
                self._told, self._beat_at = told, now + self._period_s - self._look_s / 2
        except Exception:
            logger.exception("a heartbeat cannot be sent")

    async def _hear_all(self, call: OpenCall) -> None:
        while call is self._call and not self._is_over:
            try:
                message = from_line(await call.hear())
            except ConnectionEnded:
                return
            except LinkError as error:
                logger.warning("the coordinator at %s: %s", self._address, error)
                continue
            self._heard_at = awake_s()
            if isinstance(message, Alive):
                continue
            self._is_over = self._is_over or isinstance(message, Refuse)
            if isinstance(message, Resumed):
                self._wait_s = FIRST_WAIT_S
            try:
                self._on(message)
            except Exception:
                logger.exception("a message of the coordinator cannot be heeded: %r", short(message, 200))
                continue
            if isinstance(message, Waiting):
                self._is_away = True
                logger.warning(
                    "the coordinator at %s decides nothing for region %d: %s. Training goes on; once a loss is to be decided, "
                    f"the region waits for that, then ends ({HOW_LONG})",
                    *(self._address, self.me.region, message.why),
                )
            if isinstance(message, Resumed) and self._is_away and call is self._call:
                self._is_away = False
                logger.info("the coordinator at %s is back", self._address)

    def _drop(self, call: OpenCall, why: str) -> None:
        """End a connection, and say so unless that is known."""
        self.is_connected, self._call = False, None
        call.drop()
        if self._is_over:  # the refusal has said why nothing more is decided
            return
        self._tell_away()
        if not self._is_away:
            self._is_away = True
            logger.warning(
                "the coordinator at %s does not answer (%s): training goes on; what only it decides waits until it is "
                "back",
                self._address,
                why,
            )

    async def _come_back(self) -> None:
        """Connect again, and say who comes back."""
        # an older coordinator answers at once, and again
        await asyncio.sleep(self._wait_s)
        with contextlib.suppress(CocodcError):  # the region looks after its own waits then
            self._beat()
        self._wait_s = min(2 * self._wait_s, LONGEST_WAIT_S)
        try:
            call = await connect(self._address, self._run, "region", self._keys, SILENT_S)
            call.say(self._back())
            self._call, self.is_connected = call, True
        except Exception as error:
            if not isinstance(error, CocodcError):
                logger.exception("this region cannot come back to the coordinator at %s", self._address)
            logger.debug("the coordinator at %s: %s", self._address, error)


def _may_pass(error: CocodcError) -> bool:
    """Whether a region that starts waits for the end of this."""
    if isinstance(error, StorageError):
        return error.may_pass
    return isinstance(error, NobodyAnswers | Unreachable | ConnectionEnded)
