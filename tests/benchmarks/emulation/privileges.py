"""The needs of an emulated WAN: Linux, three commands, root or a user namespace, and a TUN device.

A process needs CAP_SYS_ADMIN and CAP_NET_ADMIN to make network namespaces and devices. Root has both. Any other user gets
both in a new user namespace, if the kernel allows one. They are valid only inside that namespace.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from .hub import TUN

CAP_NET_ADMIN, CAP_SYS_ADMIN = 12, 21  # <linux/capability.h>

_TOOLS = {"ip": "iproute2", "nsenter": "util-linux", "unshare": "util-linux"}
# With a network namespace: the hub returns to its first one, which the user namespace must own.
_USER_NAMESPACE = ("unshare", "--user", "--map-root-user", "--net", "--")
_AS_ROOT = 'run the command as root (`sudo env PATH="$PATH" python -m tests.benchmarks.plan ...`)'
_KERNEL = Path("/proc/sys")
_SWITCHES = (
    ("kernel/unprivileged_userns_clone", "0", "1"),  # Debian
    ("user/max_user_namespaces", "0", "10000"),
    ("user/max_net_namespaces", "0", "10000"),
    ("kernel/apparmor_restrict_unprivileged_userns", "1", "0"),  # Ubuntu
)
"""Kernel settings that can forbid it: a file in _KERNEL, the value that forbids, a value that allows."""


def obstacle() -> str | None:
    """Why this machine cannot emulate a WAN now, and the way out; None if it can."""
    if not sys.platform.startswith("linux"):
        return "an emulated WAN needs Linux network namespaces. Run it on Linux, for example in a virtual machine."
    for tool, package in _TOOLS.items():
        if shutil.which(tool) is None:
            return f"an emulated WAN needs the command {tool!r}, which is not on PATH. Install {package}."
    missing = None if may_administer() else _user_namespace_obstacle()
    if missing is not None:
        return missing
    if not os.path.exists(TUN):
        return f"an emulated WAN needs {TUN}, which does not exist. Run `sudo modprobe tun`; give a container --device {TUN}."
    try:
        os.close(os.open(TUN, os.O_RDWR))
    except OSError as error:
        return (
            f"an emulated WAN needs {TUN}, and this user cannot open it: {error.strerror}. Run `sudo chmod 0666 {TUN}` "
            f"(the usual mode; the device alone gives no rights), or {_AS_ROOT}; give a container --device {TUN}."
        )
    return None


def may_administer() -> bool:
    """Whether this process itself has the capabilities to make network namespaces and devices."""
    status = Path("/proc/self/status").read_text()
    effective = int(status.partition("CapEff:")[2].split()[0], 16)
    return all(effective >> capability & 1 for capability in (CAP_NET_ADMIN, CAP_SYS_ADMIN))


def as_administrator(command: Sequence[str]) -> list[str]:
    """The command, as root of a new user namespace if this process lacks the capabilities.

    The command gets the process id that `subprocess.Popen` returns, because `unshare` does not fork.
    """
    return [*command] if may_administer() else [*_USER_NAMESPACE, *command]


def inside(owner: int, descriptor: int, command: Sequence[str]) -> list[str]:
    """The command, inside a network namespace that another process has open.

    Args:
        owner: id of that process, which was started with `as_administrator`.
        descriptor: the network namespace, as a file descriptor of that process.
        command: program and arguments.
    """
    # The kernel lets the creator of a user namespace enter it, but refuses setgroups(), which nsenter calls by default.
    user = [] if may_administer() else [f"--user=/proc/{owner}/ns/user", "--preserve-credentials"]
    return ["nsenter", *user, f"--net=/proc/{owner}/fd/{descriptor}", "--", *command]


def _user_namespace_obstacle() -> str | None:
    """Why a user namespace cannot make network namespaces here, and the way out; None if it can.

    Only a trial tells: AppArmor may allow a user namespace, but no capability in it.
    """
    trial = [*_USER_NAMESPACE, "unshare", "--net", "--", "ip", "link", "set", "lo", "up"]
    done = subprocess.run(trial, capture_output=True, text=True)
    if done.returncode == 0:
        return None
    need = "an emulated WAN needs root, or a user namespace (`unshare --user --map-root-user --net`)"
    for file, forbids, allows in _SWITCHES:
        path = _KERNEL / file
        if path.is_file() and path.read_text().strip() == forbids:
            switch = f"{file.replace('/', '.')}={allows}"
            return f"{need}, but {path} is {forbids}, which forbids it. Run `sudo sysctl {switch}`, or {_AS_ROOT}."
    return (
        f"{need}, but the kernel refuses it: {' '.join(done.stderr.split())}. Start a container with --privileged (its root user "
        f"needs CAP_SYS_ADMIN and CAP_NET_ADMIN); elsewhere {_AS_ROOT}."
    )
