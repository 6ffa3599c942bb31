"""Lines about the way to the other regions: interface, packets, ports, address, TCP and clock."""

from ..coordinator.addresses import is_loopback
from ..links.pacing import NOT_KEPT
from .facts import Network, is_private, parts_of
from .findings import OK, WARN, WRONG, Finding, unknown

_SMALL_BUFFER = 4 << 20
_PACKET = 1500
_FEW_PORTS = 200
_LONG_S = 0.005
"""Round trips below this belong to one site: there every congestion control and every buffer will do."""


def all_here() -> list[Finding]:
    """Of a run whose regions all train on this machine: nothing of this counts."""
    return [Finding("network", OK, "all regions train on this machine, over the loopback")]


def interface(network: Network, wanted: str | None) -> Finding:
    """Whether the interface of the link is there, and up."""
    if network.interface is None:
        return unknown("interface")
    chosen = "regions.interface" if wanted is not None else "the way to the coordinator"
    words = f"{network.interface} ({network.address}), by {chosen}"
    if network.is_up is False:
        return Finding("interface", WRONG, f"{words}: it is down.", f"ip link set {network.interface} up")
    return Finding("interface", OK, words)


def packets(network: Network) -> Finding:
    """Whether large packets go through."""
    if network.mtu is None:
        return unknown("MTU")
    words = f"{network.mtu} bytes on {network.interface}"
    path = network.path_mtu
    if path is not None and path < min(network.mtu, 65_535):
        words += f", {path} on the way to the coordinator"
        if network.probes_mtu is False:
            return Finding(
                "MTU",
                WARN,
                f"{words}: a path that swallows large packets without a word stops transfers.",
                "sysctl -w net.ipv4.tcp_mtu_probing=1",
            )
    tunnel = (network.interface or "").startswith(("wg", "tun", "tailscale", "zt"))
    if tunnel and network.mtu >= _PACKET:
        return Finding(
            "MTU",
            WARN,
            f"{words}: a tunnel adds 60 to 80 bytes to each packet, which then has to be cut in two.",
            f"ip link set {network.interface} mtu 1420",
        )
    return Finding("MTU", OK, words)


def ports(network: Network) -> Finding:
    """From which range the kernel takes the two ports of every region."""
    if network.ports is None:
        return unknown("ports")
    first, last = network.ports
    words = f"every rank that talks listens in {first} .. {last}: a firewall must let other regions in there"
    if last - first + 1 < _FEW_PORTS:
        return Finding(
            "ports",
            WARN,
            f"{words}. These are only {last - first + 1}, which all connections of this machine share.",
            'sysctl -w net.ipv4.ip_local_port_range="29700 29999"',
        )
    return Finding("ports", OK, words)


def address(network: Network, coordinator: str) -> Finding:
    """Whether other regions can reach the address that this machine announces."""
    host = parts_of(coordinator)[0]
    if network.address is None:
        return unknown("NAT")
    if is_loopback(network.address) and not is_loopback(host):
        return Finding(
            "NAT",
            WRONG,
            f"this machine would announce {network.address}, which no other machine reaches. Name the interface that they reach.",
            "hf-cocodc train RECIPE --set regions.interface=NAME    # ip -brief address",
        )
    if is_loopback(network.address):
        return Finding("NAT", OK, f"announces {network.address}: all regions must run on this machine")
    if is_private(network.address) and not is_private(host) and not is_loopback(host):
        return Finding(
            "NAT",
            WARN,
            f"this machine announces {network.address}, a private address, but the coordinator is at {host}: behind NAT other "
            "regions cannot call it. Put a VPN under the link (WireGuard), and name its interface.",
            "hf-cocodc train RECIPE --set regions.interface=wg0",
        )
    return Finding("NAT", OK, f"announces {network.address}")


def congestion(network: Network, rate_limit: float | None) -> Finding:
    """Whether TCP keeps a long link full after a loss."""
    topic = "congestion"
    if network.congestion is None:
        return unknown(topic)
    words = f"TCP {network.congestion}"
    if rate_limit is not None:
        words += f", with regions.rate_limit={rate_limit:g} Mbit/s"
        if network.paces is False:
            return Finding(topic, WARN, f"{words}; {NOT_KEPT}")
        return Finding(topic, OK, words)
    if network.congestion == "bbr":
        return Finding(topic, OK, words)
    if network.rtt_s is not None and network.rtt_s < _LONG_S:
        return Finding(topic, OK, f"{words}; a round trip is short ({1000 * network.rtt_s:.1f} ms)")
    load = "" if "bbr" in network.known else "modprobe tcp_bbr; "
    return Finding(
        topic,
        WARN,
        f"{words} needs seconds to recover from a loss on a long link: bbr does not. Or set regions.rate_limit to nine tenths of "
        "the link's rate.",
        f"{load}sysctl -w net.ipv4.tcp_congestion_control=bbr",
    )


def buffers(network: Network) -> Finding:
    """Whether a connection can keep enough bytes on the way."""
    topic = "buffers"
    if network.send_buffer is None or network.receive_buffer is None:
        return unknown(topic)
    least = min(network.send_buffer, network.receive_buffer)
    words = f"sockets send up to {network.send_buffer / 1e6:.3g} MB, receive up to {network.receive_buffer / 1e6:.3g} MB"
    if network.rtt_s:
        words += f"; a round trip to the coordinator takes {1000 * network.rtt_s:.3g} ms"
    if network.rtt_s and network.rtt_s >= _LONG_S:
        words += f", so a connection carries at most {8e-6 * least / 2 / network.rtt_s:.3g} Mbit/s"
    is_long = network.rtt_s is None or network.rtt_s >= _LONG_S
    if least < _SMALL_BUFFER and is_long:
        return Finding(
            topic,
            WARN,
            f"{words}. More connections make up for it in part.",
            "sysctl -w net.ipv4.tcp_wmem='4096 65536 16777216' net.ipv4.tcp_rmem='4096 131072 16777216'",
        )
    return Finding(topic, OK, words)


def clock(network: Network) -> Finding:
    """Whether the clock of this machine is right: the journals of regions are laid side by side."""
    if network.is_synchronised is None:
        return unknown("clock")
    if not network.is_synchronised:
        return Finding(
            "clock",
            WARN,
            "the kernel says that nobody keeps it right. Training does not need it, but times in journals and logs do.",
            "timedatectl set-ntp true    # or run chronyd",
        )
    return Finding("clock", OK, "synchronised")
