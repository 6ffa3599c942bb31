"""How a region meets the other regions, and which of its ranks connect to them."""

import atexit
import json
import logging
import os
import secrets
import sys
import time
import weakref
from pathlib import Path

from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn

from ..errors import InputError
from ..links.base import Link
from ..links.gloo import GlooLink
from ..links.lanes import LaneLink
from ..links.lockstep import LockstepLink, loopback
from ..links.ranks import SharedLink
from ..links.spreading import spread_all
from ..meeting.addresses import own_address
from ..meeting.cipher import check_encryption
from ..meeting.handshake import compare, frozen_digest
from ..meeting.region_store import RegionStore
from ..meeting.rendezvous import rendezvous
from ..meeting.sealed import check, within
from ..meeting.secret import Keys, secret_of
from ..meeting.stopping import PATIENCE_S, Circle, StopAgreement
from ..meeting.store import connect_store, serve_store
from ..settings import ENV_REGION, OuterConfig, RegionConfig
from .about import About
from .base import largest_base
from .company import Company
from .hellos import own_hello, show_differences
from .place import Place, RunTrains, find, watch
from .ranks import from_main, of_all
from .status import tell
from .supported import is_sharded, lanes_of, refuse_fixed
from .waiting import Waiting, announce

logger = logging.getLogger(__name__)

_GLOO_END_S = 0.1
_NOTHING = About()
_COMPANIES: "weakref.WeakKeyDictionary[Link, Company]" = weakref.WeakKeyDictionary()
_COMPARED: "weakref.WeakSet[Link]" = weakref.WeakSet()
"""Links over which nothing has been trained since their regions compared what they are."""


def _let_gloo_end() -> None:
    """Give gloo's threads a moment to end before the interpreter exits.

    A thread that still has to release the tensors of a collective call needs the interpreter. Without it the thread aborts
    the process: a successful run would fail (pytorch/pytorch#190489). Destroying the group does not help while a model
    references it.
    """
    time.sleep(_GLOO_END_S)


def connect(
    accelerator: Accelerator,
    model: nn.Module,
    config: OuterConfig,
    regions: RegionConfig,
    max_steps: int | None,
    stage: tuple[int, int] | None = None,
    about: About = _NOTHING,
) -> Link:
    """Meet the other regions, compare settings and connect.

    If all ranks hold the same parameters, only the leader connects. A rank that holds shards (FSDP2) or a stage of its own
    connects to the same rank of every other region.

    Raises:
        InputError: settings that cannot work.
        HandshakeError: regions disagree.
        LinkError: the store or a region cannot be reached in time.
    """
    regions = regions.resolved()
    region, count = regions.region, regions.count
    assert count is not None
    rank, num_ranks, device = accelerator.process_index, accelerator.num_processes, accelerator.device
    sharded = accelerator.distributed_type is DistributedType.FSDP
    lane, num_lanes = lanes_of(accelerator, model, stage)
    if num_ranks > 1:
        atexit.unregister(_let_gloo_end)
        atexit.register(_let_gloo_end)
    keys = secret_of(regions) if count > 1 or num_ranks > 1 or regions.elastic else None
    if regions.encrypt and (count > 1 or regions.elastic):
        check_encryption(keys)
    inside = _region_store(accelerator, keys) if stage is None else None
    if regions.elastic and regions.max != 1:
        refuse_fixed(sharded, stage)
        return _connect_elastic(accelerator, model, config, regions, max_steps, about, inside, keys)

    assert region is not None

    def agreement(met: str | None) -> StopAgreement | None:
        """How this rank agrees with the others on a step to stop at; `met` is known to ranks that reach other regions."""
        if stage is not None or count == num_ranks == 1:
            return None
        leaders = None
        if met is not None and rank == 0:
            assert regions.store is not None
            store = connect_store(regions.store, PATIENCE_S, keys)
            leaders = Circle(within(f"{met}/stop", store), region, count)
        return StopAgreement(leaders, inside)

    if count == 1:
        alone = loopback()
        alone.lane, alone.num_lanes = lane, num_lanes
        link: LaneLink | LockstepLink = LaneLink(alone, rank, num_ranks, device, inside) if sharded else alone
        link.agreement = agreement(None)
        return link

    # of shards, each rank has its own; before the model is sharded, the leader has all of it
    frozen = " ".join(of_all(accelerator, frozen_digest(model))) if sharded and is_sharded(model) else None

    def meet() -> str:
        assert regions.store is not None
        mine = own_hello(accelerator, model, config, regions, max_steps, about, num_lanes, frozen)
        store = connect_store(regions.store, regions.timeout_s, keys)
        check(store)
        name = _name_of(regions, about)
        name = name if stage is None else f"{name}, stage {lane}"
        wait_s = regions.start_timeout_s
        waiting = Waiting(region, name, regions.store, wait_s)
        roster = rendezvous(store, name, region, count, mine, wait_s, waiting)
        hosts = ", ".join(str(each.get("host")) for each in roster.hellos)
        announce("all %d regions of run %r have met: %s", count, name, hosts)
        show_differences(roster.hellos)
        return roster.run

    def reach(met: str | None) -> GlooLink:
        assert met is not None and regions.store is not None
        store = connect_store(regions.store, regions.timeout_s, keys)
        link = GlooLink(
            store,
            f"{met}/lane{lane}",
            region,
            count,
            connections=regions.connections if isinstance(regions.connections, int) else None,
            address=own_address(regions.store, regions.interface),
            timeout_s=regions.timeout_s,
            stuck_timeout_s=regions.stuck_timeout_s,
            rate_limit=None if regions.rate_limit is None else regions.rate_limit * 1e6 / 8,
            num_lanes=num_lanes,
            pin_memory=device.type == "cuda",
            keys=keys,
            encrypt=bool(regions.encrypt),
        )
        logger.info(
            "%d connections to each other region, round trip %.1f ms",
            *(link.view.connections, 1000 * link.view.rtt_s),
        )
        link.lane = lane
        return link

    what = "the meeting of the regions"
    met: str | None
    if inside is None:
        met = meet()
        found: Link = reach(met)
    elif sharded:
        inside.lead(meet, what, lambda run: run)
        met = inside.heard
        found = LaneLink(reach(met), lane, num_lanes, device, inside)
    else:
        met = inside.lead(meet, what)
        leader_link = inside.lead(lambda: reach(met), "the connections between the regions")
        found = SharedLink(leader_link, region, count, device, inside)
    found.agreement = agreement(met)
    _COMPARED.add(found)
    return found


def _connect_elastic(
    accelerator: Accelerator,
    model: nn.Module,
    config: OuterConfig,
    regions: RegionConfig,
    max_steps: int | None,
    about: About,
    inside: RegionStore | None,
    keys: Keys | None,
) -> Link:
    """Meet the other regions of a run whose regions come and go, or join it if it trains already."""
    region, count = regions.region, regions.count
    assert count is not None and regions.store is not None
    if region is None:
        raise InputError(
            f"this region is to join a run, and has no number. Set {ENV_REGION}, or use `hf-cocodc train RECIPE --join`, which "
            "finds a free one."
        )
    name = _name_of(regions, about)

    def enter() -> Company:
        assert regions.store is not None and region is not None
        place = Place(
            region=region,
            regions=regions,
            name=name,
            hello=own_hello(accelerator, model, config, regions, max_steps, about, 1, None),
            host=own_address(regions.store, regions.interface),
            pin_memory=accelerator.device.type == "cuda",
            keys=keys,
            largest_base=largest_base(model),
        )
        check(place.store())
        record, roster = find(place), None
        if record is None:
            hello, wait_s = dict(place.hello), regions.start_timeout_s
            waiting = Waiting(region, name, regions.store, wait_s)
            try:
                roster = rendezvous(
                    *(place.store(), name, region, count, hello, wait_s, waiting, watch(place))
                )
            except RunTrains as found:
                record = found.record
        if record is not None:
            words = f"joins run {name!r}, which trains at step {max(each.step for each in record.members)}"
            announce("region %d %s", region, words)
            tell("joining the run", news=words)
            return Company.joined(place, record)
        assert roster is not None
        announce("all %d regions of run %r have met", count, name)
        show_differences(roster.hellos)
        return Company.met(place, roster.run)

    company = enter() if inside is None else inside.lead(enter, "the meeting of the regions")
    link: Link
    if inside is None:
        assert company is not None
        link = company.link
    else:
        leader_link = None if company is None else company.link
        link = SharedLink(leader_link, region, count, accelerator.device, inside, is_elastic=True)
    if company is not None:
        _COMPANIES[link] = company
    _COMPARED.add(link)
    return link


def company_of(link: Link) -> Company | None:
    """On the leader: its side of an elastic run; None elsewhere."""
    return _COMPANIES.get(link)


def _name_of(regions: RegionConfig, about: About) -> str:
    return regions.run or about.run or Path(sys.argv[0]).stem or "script"


def meet(
    link: Link | None,
    accelerator: Accelerator,
    model: nn.Module,
    config: OuterConfig,
    regions: RegionConfig,
    max_steps: int | None,
    stage: tuple[int, int] | None = None,
    about: About = _NOTHING,
) -> Link:
    """Meet the other regions over a link that is given (`simulate`), or else `connect`.

    Regions compare over a given link what they compare at the store, once before each training (`begin_over`).

    Raises:
        InputError, HandshakeError, LinkError: see `connect`.
    """
    if link is None:
        return connect(accelerator, model, config, regions, max_steps, stage, about)
    if link in _COMPARED or link.num_regions == 1:
        return link
    mine = own_hello(accelerator, model, config, regions, max_steps, about, link.num_lanes, None)
    told = json.dumps(mine).encode()
    hellos = [json.loads(each) for each in spread_all(link, told, "what it is").values()]
    link.count_broadcasts()  # what crosses a store does not count either
    compare(hellos)
    show_differences(hellos)
    _COMPARED.add(link)
    return link


def begin_over(link: Link) -> None:
    """A training over `link` begins: before the next one regions compare anew."""
    _COMPARED.discard(link)


def _region_store(accelerator: Accelerator, keys: Keys | None) -> RegionStore | None:
    """The store that a region of several ranks has for itself. A collective call of its ranks."""
    num_ranks = accelerator.num_processes
    if num_ranks == 1:
        return None
    host = os.environ.get("MASTER_ADDR", "127.0.0.1")
    if os.environ.get("LOCAL_WORLD_SIZE") == str(num_ranks):
        host = "127.0.0.1"  # nobody else need reach the store
    everywhere, here = ("::", "::1") if ":" in host else ("0.0.0.0", "127.0.0.1")
    server = None
    if accelerator.is_main_process:
        server = serve_store(here if host == here else everywhere)
        host = here
    port, token = from_main(accelerator, server and (server.port, secrets.token_hex(16)))
    inside = None if keys is None else keys.of("inside", token)  # no other region and no other run has these
    return RegionStore(f"[{host}]:{port}", accelerator.process_index, num_ranks, server, inside)
