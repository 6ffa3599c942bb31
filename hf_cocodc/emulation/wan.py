"""A WAN between regions, on one Linux machine: real TCP over an emulated distance.

Every region is a network namespace with one TUN device, `wan0`. A hub process reads the packets that leave one region,
holds them back as a long link would (a buffer that drains at the link's rate, losses, a delay) and hands them to the
other. The TCP stacks at both ends are the kernel's own, so that windows, slow start, congestion control and retransmits
are those of a real link. No route leads out of the namespaces. It needs root, but no kernel module such as netem::

    with Wan(2, rtt_s=0.1, rate=1e9, congestion="cubic") as wan:
        server = wan.popen(0, [sys.executable, "server.py", wan.address(0)])
        client = wan.popen(1, [sys.executable, "client.py", wan.address(0)], env={"OMP_NUM_THREADS": "1"})
        client.wait()
        print(wan.counters()[1, 0])     # what region 1 has sent to region 0

Nothing is left behind, not even where the process that uses it is killed: the namespaces have no name, so that they
vanish with the processes in them; and the hub, which hears that its parent has gone, kills those.

Segmentation offload (GSO) lets the hub handle up to 64 KB at a time, hence 1 Gbit/s on a fraction of a core. Losses and
a full buffer still take single segments: a bundle that loses some is cut into those that remain. Measured on two cores: a
round trip takes 0.3 to 0.8 ms more than asked for, TCP's goodput is 96.5 % of the rate (the rest are headers) from 50 Mbit/s
to 1 Gbit/s, and the hub needs a tenth of a core for 100 Mbit/s, a quarter for 1 Gbit/s one way.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from ..errors import InputError, LinkError
from . import hub
from .hub import INTERFACE, SYSCTL, TUN, Counters

MOST_REGIONS = 100
GRACE_S = 3.0
CAP_NET_ADMIN, CAP_SYS_ADMIN = 12, 21  # <linux/capability.h>


def obstacle() -> str | None:
    """Why this machine cannot emulate a WAN now, and the way out; None where it can."""
    if not sys.platform.startswith("linux"):
        return (
            "an emulated WAN is made of Linux network namespaces. Run it on Linux, in a virtual machine say."
        )
    if os.geteuid() != 0:
        return "an emulated WAN needs root, to make network namespaces. Use sudo, or `unshare -Urn` before the command."
    if not _may_administer():
        return "an emulated WAN needs a root with CAP_SYS_ADMIN and CAP_NET_ADMIN. Give a container --privileged."
    if not os.path.exists(TUN):
        return f"an emulated WAN needs {TUN}, which is not here. Try `modprobe tun`; give a container --device {TUN}."
    for tool, package in (("ip", "iproute2"), ("nsenter", "util-linux")):
        if shutil.which(tool) is None:
            return f"an emulated WAN needs the command {tool!r}, which is not here. Install {package}."
    return None


def _may_administer() -> bool:
    """Whether this process has the capabilities to make namespaces and network devices."""
    status = Path("/proc/self/status").read_text()
    effective = int(status.partition("CapEff:")[2].split()[0], 16)
    return all(effective >> capability & 1 for capability in (CAP_NET_ADMIN, CAP_SYS_ADMIN))


class Wan:
    """`regions` network namespaces, every pair joined by a link of its own.

    Args:
        regions: number of regions, 2 .. 100.
        rtt_s: seconds of a round trip without load; half of it each way.
        rate: bits per second of each pair and direction, IP headers included; None for no limit.
        loss: probability that a packet gets lost on the way.
        congestion: TCP congestion control in the regions, such as "cubic" or "bbr"; None takes this machine's, which the
            attribute of that name tells afterwards. Always tell it with the figures: on a long link it decides.
        queue_s: what the buffer before each link holds, in seconds at `rate`; by default a round trip, but at least 50 ms.

    Socket buffers (`tcp_rmem`, `tcp_wmem`) are the machine's. Connections remember nothing of earlier ones.

    Raises:
        InputError: a value that cannot be, or something that this machine lacks (see `obstacle`).
        LinkError: the kernel refuses.
    """

    def __init__(
        self,
        regions: int,
        *,
        rtt_s: float = 0.0,
        rate: float | None = None,
        loss: float = 0.0,
        congestion: str | None = None,
        queue_s: float | None = None,
    ) -> None:
        if not 2 <= regions <= MOST_REGIONS:
            raise InputError(f"regions={regions} must lie in 2 .. {MOST_REGIONS}.")
        if not 0 <= rtt_s <= 60:
            raise InputError(f"rtt_s={rtt_s} must lie in 0 .. 60 seconds.")
        if rate is not None and not 1e4 <= rate <= 1e11:
            raise InputError(
                f"rate={rate:g} must lie in 1e4 .. 1e11 bits per second, or be None for no limit."
            )
        if not 0 <= loss < 1:
            raise InputError(f"loss={loss} must be a probability, at least 0 and less than 1.")
        if queue_s is not None and not queue_s > 0:
            raise InputError(f"queue_s={queue_s} must be positive.")
        self.regions, self.rtt_s, self.rate, self.loss = regions, rtt_s, rate, loss
        self.queue_s = max(0.05, rtt_s) if queue_s is None else queue_s
        self._route = congestion
        self.congestion = congestion or ""
        self._hub: subprocess.Popen[str] | None = None
        self._namespaces: list[str] = []
        self._processes: list[subprocess.Popen] = []

    def __enter__(self) -> "Wan":
        missing = obstacle()
        if missing is not None:
            raise InputError(missing)
        available = (SYSCTL / "tcp_available_congestion_control").read_text().split()
        self.congestion = self._route or (SYSCTL / "tcp_congestion_control").read_text().strip()
        if self.congestion not in available:
            raise InputError(
                f"congestion={self.congestion!r} is not among what this kernel has: {', '.join(available)}. Try `modprobe "
                f"tcp_{self.congestion}`, or take one of those."
            )
        spec = {
            "regions": self.regions,
            "delay_s": self.rtt_s / 2,
            "rate": self.rate,
            "loss": self.loss,
            "congestion": self._route,
            "queue_s": self.queue_s,
        }
        # In a session of its own Ctrl-C does not reach it: it has to outlive the parent, to clean up.
        self._hub = subprocess.Popen(
            [sys.executable, "-m", hub.__name__, json.dumps(spec)],
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
        self._namespaces = [f"/proc/{self._hub.pid}/fd/{number}" for number in answer["namespaces"]]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def address(self, region: int) -> str:
        """IPv4 address by which the other regions reach `region`."""
        return hub.address(region)

    def popen(
        self, region: int, command: Sequence[str], env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen:
        """Start a command inside a region.

        Args:
            region: which, from 0.
            command: program and arguments; a path or a name on PATH, no shell.
            env: variables set besides those of this process, and besides GLOO_SOCKET_IFNAME, which is `wan0`.
            options: of `subprocess.Popen`.

        Raises:
            LinkError: the emulated WAN is not up, or no longer.
        """
        if self._hub is None or self._hub.poll() is not None:
            raise LinkError("the emulated WAN is not up: use it in its with block.")
        entered = ["nsenter", f"--net={self._namespaces[region]}", "--", *command]
        variables = {**os.environ, "GLOO_SOCKET_IFNAME": INTERFACE, **(env or {})}
        process = subprocess.Popen(entered, env=variables, **options)
        self._processes.append(process)
        return process

    def counters(self) -> dict[tuple[int, int], Counters]:
        """What has been sent until now, by (from, to).

        Raises:
            LinkError: the hub has died.
        """
        return {(i, j): Counters(**found) for i, j, found in self._ask()["pairs"]}

    def hub_cpu_s(self) -> float:
        """Seconds of a core that the emulation itself has used until now; raises LinkError as `counters` does."""
        return self._ask()["cpu_s"]

    def close(self) -> None:
        """End what still runs in the regions, and the regions; calling it again does nothing."""
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
                self._hub.stdin.close()  # its word to kill what is left and to go
            self._hub.wait()
            self._hub.stdout.close()
            self._hub = None
        for process in self._processes:
            process.wait()
        self._processes.clear()

    def _ask(self) -> dict[str, Any]:
        if self._hub is None:
            raise LinkError("the emulated WAN is not up: use it in its with block.")
        assert self._hub.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._hub.stdin.write("\n")
            self._hub.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._hub is not None and self._hub.stdout is not None
        line = self._hub.stdout.readline()
        if not line:
            raise LinkError(f"the hub of the emulated WAN has ended, with exit code {self._hub.wait()}.")
        return json.loads(line)
