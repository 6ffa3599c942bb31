"""Findings about the other regions: their doctors meet, compare and connect by the run's own code, and part again.

They do so under a name of their own. So they neither disturb a run that trains at the coordinator, nor become its members.
"""

import contextlib
import dataclasses
import platform
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ...coordinator.messages import Bye, host_of
from ...errors import CocodcError, HandshakeError, InputError, RegionLostError, short
from ...link.spreading import spread_all
from ...link.tcp import TcpLink
from ...net.keys import Keys
from ...net.pipe import MEND, SWALLOWED
from ...run.session import RegionContext
from ...settings import RegionConfig
from .coordinator import gone
from .facts import OK, WARN, WRONG, Finding
from .way import ANNOUNCE

_REACH_S = 30.0
"""Seconds in which doctors that have met connect."""
_LONGEST = 200
_MOST_BYTES = 1 << 16
_ALL_AT_ONCE = (
    "hf-cocodc doctor RECIPE --region N --coordinator HOST:PORT --wait 300    # in all regions at once"
)
_SAME = "scp RECIPE HOST:    # one recipe for all regions, and the same data and versions"
_ELSEWHERE = (
    "hf-cocodc train RECIPE --set regions.interface=NAME    # ip -brief address; or another regions.port"
)
_WAYS = {
    "direct": "reached directly",
    "reversed": "reached directly",
    "storage": "neither calls the other one: the storage carries what they send",
}


def name_of_meeting(run: str) -> str:
    """The name under which the doctors of a run meet.

    >>> name_of_meeting("llama")
    'llama (doctor)'
    """
    return f"{run} (doctor)"


def meet(
    regions: RegionConfig,
    run: str,
    compared: Mapping[str, Any],
    address: str,
    keys: Keys | None,
    tell: Callable[[str], None],
) -> Iterator[Finding]:
    """Meet the doctors of the other regions for `regions.start_timeout_s`, and yield findings as they become known.

    Args:
        regions: resolved, with the number of this region.
        compared: what this region tells the others of itself (`run.connect.hello`).
        address: where the others reach this machine.
    """
    assert regions.region is not None and regions.coordinator is not None
    context = RegionContext(
        region=regions.region,
        regions=dataclasses.replace(regions, timeout_s=min(regions.timeout_s, _REACH_S)),
        name=name_of_meeting(run),
        compared=compared,
        host=address,
        keys=keys,
    )
    tell(f"waits for the doctors of the other regions, for {regions.start_timeout_s:g} s at most (--wait)")
    try:
        wire = context.wire()
        client = context.meet(False, wire)
    except RegionLostError as error:
        late = str(error).partition(" (")[0]
        yield Finding("regions", WARN, f"{late} (--wait): nothing was compared.", _ALL_AT_ONCE)
        return
    except (HandshakeError, InputError) as error:
        yield Finding(
            "regions", WRONG, _clean(error), _SAME if isinstance(error, HandshakeError) else _ELSEWHERE
        )
        return
    except CocodcError as error:
        yield gone(regions.coordinator, error)
        return
    welcome = client.welcome
    yield from (Finding("regions", WARN, short(each, _LONGEST)) for each in welcome.differences)
    tell("connects to the other regions")
    try:
        link = context.link(client, wire)
        with contextlib.closing(link):
            link.ending = Bye(how="stopped")
            # nobody parts before all are connected
            names = spread_all(link, platform.node().encode(), "the name of its machine", _MOST_BYTES)
            hosts = {place.member.region: host_of(place.lanes) for place in welcome.members}
            found = [*_about(link, names, hosts)]
    except CocodcError as error:
        words = _clean(error)
        yield Finding("regions", WRONG, words, MEND if SWALLOWED in words else ANNOUNCE)
        return
    yield from found


def _about(link: TcpLink, names: Mapping[int, bytes], hosts: Mapping[int, str]) -> Iterator[Finding]:
    """The lines about regions that have met, and are connected."""
    for other, way in link.wire.ways.items():
        name = short(names[other].decode(errors="replace"), _LONGEST)
        words = f"{name} at {hosts[other]}: same versions, settings, model and data; {_WAYS[way]}"
        yield Finding(f"region {other}", OK, words)
    number = link.wire.connections
    how = f"{number} connection{'' if number == 1 else 's'} to each other region, round trip {1000 * link.view.rtt_s:.3g} ms"
    if link.carrier is not None:
        how += f"; {link.carrier.kind} would carry payloads: {link.carrier.why}"
    yield Finding("regions", OK, how)


def _clean(error: CocodcError) -> str:
    """The words of an error, which may quote another region, on one line."""
    return short(str(error), 4 * _LONGEST)
