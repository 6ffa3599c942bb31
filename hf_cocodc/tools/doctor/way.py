"""Findings about the way to the other regions: address, port and congestion control."""

from collections.abc import Sequence

from ...link.backends import why_tcp
from ...net.addresses import is_loopback, parts_of
from ...net.pacing import NOT_KEPT
from ...settings import RegionConfig
from ...settings.regions import OF_GROUPS
from .facts import OK, WARN, WRONG, Finding, Network, is_private, unknown

_LONG_S = 0.005
"""Round trips below this stay within one site, where any congestion control and any buffer will do."""

TCP = "hf-cocodc train RECIPE --set regions.link=tcp    # in every region"
ANNOUNCE = "hf-cocodc train RECIPE --set regions.port=29700 --set regions.announce=HOST:29700    # HOST: its public address"


def all_here() -> list[Finding]:
    """The only finding if all regions train on this machine."""
    return [Finding("network", OK, "all regions train on this machine, over the loopback")]


def port(network: Network, chosen: int | None) -> Finding:
    """Where this region listens."""
    if chosen is not None:
        return Finding(
            "port", OK, f"listens on {chosen}: a firewall must let other regions in there, or theirs this one"
        )
    if network.ports is None:
        return unknown("port")
    first, last = network.ports
    words = (
        f"listens on any free port of {first} .. {last}; regions.port chooses one, for a firewall or a router"
    )
    return Finding("port", OK, words)


def address(network: Network, coordinator: str, announced: Sequence[str] = ()) -> Finding:
    """Whether other regions can reach the address that this machine announces."""
    topic, host = "address", parts_of(coordinator)[0]
    if network.address is None:
        return unknown(topic)
    on = "" if network.interface is None else f" on {network.interface}"
    if network.is_up is False:
        command = f"ip link set {network.interface} up"
        return Finding(topic, WRONG, f"{network.address}{on}: the interface is down.", command)
    if announced:
        return Finding(topic, OK, f"announces {', '.join(announced)} (regions.announce)")
    if is_loopback(network.address) and not is_loopback(host):
        return Finding(
            topic,
            WRONG,
            f"this machine would announce {network.address}, which no other machine reaches. Name the interface that they reach.",
            "hf-cocodc train RECIPE --set regions.interface=NAME    # ip -brief address",
        )
    if is_loopback(network.address):
        return Finding(topic, OK, f"announces {network.address}: all regions must run on this machine")
    if is_private(network.address) and not is_private(host) and not is_loopback(host):
        return Finding(
            topic,
            WARN,
            f"this machine announces {network.address}, a private address, but the coordinator is at {host}: behind NAT it can "
            "call other regions, and they cannot call it. One way is enough; where another region is behind NAT too, map a port "
            "in the router of one of them, and announce it.",
            ANNOUNCE,
        )
    return Finding(topic, OK, f"announces {network.address}{on}")


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


def link(regions: RegionConfig, has_secret: bool, no_gloo: str | None) -> Finding:
    """What carries the payloads of means, and why, as far as one machine knows: the rest is found when regions meet. `no_gloo`
    says why there can be no gloo group on this machine.
    """
    topic, named = "link", regions.link
    if named == "gloo" and no_gloo is not None:
        return Finding(topic, WRONG, f"regions.link=gloo, but {no_gloo}", TCP)
    if named in OF_GROUPS:
        words = f"{named}, by regions.link: it takes any free ports between the machines"
        if has_secret:
            words += ", and does not encrypt payloads of means. Only all else is encrypted with your secret"
        elif regions.announced:
            words += ", and not the addresses of regions.announce"
        else:
            return Finding(topic, OK, words)
        return Finding(topic, WARN, f"{words}.", TCP)
    if named == "tcp":
        return Finding(topic, OK, "tcp, by regions.link")
    if why := why_tcp(regions, has_secret) or no_gloo:
        return Finding(topic, OK, f"tcp: {why}")
    return Finding(topic, OK, "tcp, gloo or nccl: regions choose by round trips and devices when they meet")
