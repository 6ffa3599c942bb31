"""A WAN between regions on one Linux machine: real TCP over an emulated distance.

Each region is a network namespace with one TUN device, `wan0`. A hub process reads the packets that leave one region,
holds them back as a long link would (a buffer that drains at the link's rate, losses, a delay) and writes them to the
other region. Both ends use the kernel's TCP: windows, slow start, congestion control and retransmits behave as on a real
link. No route leads out of the namespaces. No kernel module such as netem is needed::

    with Wan(2, rtt_s=0.1, rate=1e9, congestion="cubic") as wan:
        server = wan.popen(0, [sys.executable, "server.py", wan.address(0)])
        client = wan.popen(1, [sys.executable, "client.py", wan.address(0)], env={"OMP_NUM_THREADS": "1"})
        client.wait()
        print(wan.counters()[1, 0])     # traffic from region 1 to region 0

It needs root, or a kernel that lets other users make user namespaces. Without root the hub starts in a new user namespace,
which owns the regions (see `privileges`). The hub then has normal priority instead of the highest; on a busy machine packets
may arrive later.

Nothing is left behind, even if the process that uses the WAN is killed. The namespaces have no name and vanish with the
processes in them. The hub notices that its parent has gone, and kills these processes.

Segmentation offload (GSO) lets the hub handle up to 64 KB at a time, so that 1 Gbit/s takes a fraction of a core. Losses and
a full buffer still affect single segments: the hub cuts a bundle that loses some into the parts that remain. Measured on two
cores: a round trip takes 0.3 to 0.8 ms more than `rtt_s`; TCP's goodput is 96.5 % of the rate (the rest is headers) from
50 Mbit/s to 1 Gbit/s; the hub needs a tenth of a core for 100 Mbit/s, a quarter for 1 Gbit/s in one direction.
"""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from hf_cocodc.errors import InputError, LinkError

from . import hub
from .hub import INTERFACE, SYSCTL, Counters
from .privileges import as_administrator, inside, obstacle

MOST_REGIONS = 100
GRACE_S = 3.0


class Wan:
    """`regions` network namespaces; a separate link joins each pair.

    Args:
        regions: number of regions, 2 .. 100.
        rtt_s: seconds of a round trip without load; half of it in each direction.
        rate: bits per second of each pair and direction, including IP headers; None for no limit. Of several, each is that at
            which one region sends to each other one: their uplinks differ.
        loss: probability that a packet gets lost.
        congestion: TCP congestion control in the regions, such as "cubic" or "bbr". None takes this machine's default; the
            attribute `congestion` names it inside the with block. Report it with every figure: it decides on a long link.
        queue_s: capacity of the buffer before each link, in seconds at `rate`; by default a round trip, at least 50 ms.

    Socket buffers (`tcp_rmem`, `tcp_wmem`) have the machine's sizes. Connections keep no metrics of earlier ones.

    Raises:
        InputError: a value is out of range, or this machine lacks something (see `privileges.obstacle`).
        LinkError: the kernel refuses.
    """

    def __init__(
        self,
        regions: int,
        *,
        rtt_s: float = 0.0,
        rate: float | Sequence[float] | None = None,
        loss: float = 0.0,
        congestion: str | None = None,
        queue_s: float | None = None,
    ) -> None:
        if not 2 <= regions <= MOST_REGIONS:
            raise InputError(f"regions={regions} must lie in 2 .. {MOST_REGIONS}.")
        if not 0 <= rtt_s <= 60:
            raise InputError(f"rtt_s={rtt_s} must lie in 0 .. 60 seconds.")
        rates = [rate] * regions if rate is None or isinstance(rate, int | float) else list(rate)
        if len(rates) != regions:
            raise InputError(f"rate={rate} must be one number, or one for each of {regions} regions.")
        for each in rates:
            if each is not None and not 1e4 <= each <= 1e11:
                raise InputError(
                    f"rate={each:g} must lie in 1e4 .. 1e11 bits per second, or be None for no limit."
                )
        if not 0 <= loss < 1:
            raise InputError(f"loss={loss} must be a probability, at least 0 and less than 1.")
        if queue_s is not None and not queue_s > 0:
            raise InputError(f"queue_s={queue_s} must be positive.")
        self.regions, self.rtt_s, self.rates, self.loss = regions, rtt_s, rates, loss
        self.queue_s = max(0.05, rtt_s) if queue_s is None else queue_s
        self._route = congestion
        self.congestion = congestion or ""
        self._hub: subprocess.Popen[str] | None = None
        self._namespaces: list[int] = []
        self._processes: list[subprocess.Popen] = []

    def __enter__(self) -> "Wan":
        missing = obstacle()
        if missing is not None:
            raise InputError(missing)
        available = (SYSCTL / "tcp_available_congestion_control").read_text().split()
        self.congestion = self._route or (SYSCTL / "tcp_congestion_control").read_text().strip()
        if self.congestion not in available:
            raise InputError(
                f"congestion={self.congestion!r} is not available in this kernel, only {', '.join(available)}. Run "
                f"`sudo modprobe tcp_{self.congestion}`, or take one of these."
            )
        spec = {
            "regions": self.regions,
            "delay_s": self.rtt_s / 2,
            "rates": self.rates,
            "loss": self.loss,
            "congestion": self._route,
            "queue_s": self.queue_s,
        }
        # A new session keeps Ctrl-C from the hub: it must outlive its parent to clean up.
        self._hub = subprocess.Popen(
            as_administrator([sys.executable, str(Path(hub.__file__)), json.dumps(spec)]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            answer = self._answer()
            if "error" in answer:
                raise LinkError(f"cannot make the regions of an emulated WAN: {answer['error']}")
        except BaseException:
            self.close()
            raise
        self._namespaces = answer["namespaces"]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def address(self, region: int) -> str:
        """The IPv4 address at which the other regions reach `region`."""
        return hub.address(region)

    def popen(
        self, region: int, command: Sequence[str], env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen:
        """Start a command inside a region.

        Args:
            region: its number, from 0.
            command: program and arguments; the program is a path or a name on PATH; no shell.
            env: variables in addition to this process's own and GLOO_SOCKET_IFNAME (`wan0`).
            options: options of `subprocess.Popen`.

        Raises:
            LinkError: the emulated WAN is not up.
        """
        if self._hub is None or self._hub.poll() is not None:
            raise LinkError("the emulated WAN is not up. Use it inside its with block.")
        entered = inside(self._hub.pid, self._namespaces[region], command)
        variables = {**os.environ, "GLOO_SOCKET_IFNAME": INTERFACE, **(env or {})}
        process = subprocess.Popen(entered, env=variables, **options)
        self._processes.append(process)
        return process

    def counters(self) -> dict[tuple[int, int], Counters]:
        """The traffic until now, by (from, to).

        Raises:
            LinkError: the WAN is not up, or the hub has died.
        """
        return {(i, j): Counters(**found) for i, j, found in self._ask()["pairs"]}

    def hub_cpu_s(self) -> float:
        """CPU seconds that the hub has used until now; raises LinkError as `counters` does."""
        return self._ask()["cpu_s"]

    def close(self) -> None:
        """End the processes in the regions, then the regions; a second call does nothing."""
        for process in self._processes:
            if process.poll() is None:
                process.terminate()
        deadline = time.monotonic() + GRACE_S
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(deadline - time.monotonic(), 0))
        if self._hub is not None:
            assert self._hub.stdin is not None and self._hub.stdout is not None
            with contextlib.suppress(BrokenPipeError):
                self._hub.stdin.close()  # tells the hub to kill the remaining processes and to exit
            self._hub.wait()
            self._hub.stdout.close()
            self._hub = None
        for process in self._processes:
            process.wait()
        self._processes.clear()

    def _ask(self) -> dict[str, Any]:
        if self._hub is None:
            raise LinkError("the emulated WAN is not up. Use it inside its with block.")
        assert self._hub.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._hub.stdin.write("\n")
            self._hub.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._hub is not None and self._hub.stdout is not None
        line = self._hub.stdout.readline()
        if not line:
            raise LinkError(f"the hub of the emulated WAN has ended with exit code {self._hub.wait()}.")
        return json.loads(line)
