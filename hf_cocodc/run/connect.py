"""How a region meets the other regions, and which of its ranks connect to them."""

import atexit
import hashlib
import json
import logging
import platform
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from msgspec import structs
from torch import nn

from .. import __version__
from ..coordinator.client import Client
from ..coordinator.hello import (
    DIGEST,
    FROZEN,
    RECIPE,
    check_allowed,
    compare,
    in_recipe,
    packed,
    side_by_side,
)
from ..coordinator.messages import PROTOCOL, Stop, Welcome, host_of
from ..coordinator.secret import secret_of
from ..errors import InputError, RunFinished, spare_traceback
from ..link.backends import refuse_backend
from ..link.base import Link
from ..link.group import RegionGroup, ranks_of_region
from ..link.lanes import LaneLink
from ..link.lockstep import loopback
from ..link.ranks import SharedLink
from ..link.speaking import AnyClient, LeaderClient, RankClient, lines_of
from ..link.spreading import spread_all
from ..link.stopping import StopAgreement
from ..link.tcp import TcpLink
from ..link.voice import LEADER
from ..net.addresses import parts_of
from ..net.members import Whereabouts
from ..net.pacing import congestion_of
from ..net.wire import Wire
from ..parts.tensors.flat import contents, digests, offloaded
from ..resolve import settings
from ..settings import OuterConfig, RegionConfig
from ..settings.environment import AUTO_LOSS, ENV_REGION
from ..snapshot.receive import largest_base
from ..status import say, tell
from .about import About
from .progress import announce, in_advance
from .session import (
    RegionContext,
    RegionSession,
    own_address_of,
    session_of,
)
from .supported import OF_STAGES, is_sharded, lanes_of, refuse_uneven

logger = logging.getLogger(__name__)

_MAY_DIFFER = ("auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision")
_GLOO_END_S = 0.1
_NOTHING = About()


def show_differences(sentences: Sequence[str]) -> None:
    """Say what regions have otherwise than the others, in the log and to a command."""
    for sentence in sentences:
        logger.warning(sentence)
        say(sentence, once=sentence)


def hello(
    model: nn.Module,
    settings: Mapping[str, Any],
    max_steps: int | None,
    num_lanes: int,
    about: About = _NOTHING,
    allowed: Sequence[str] = (),
    frozen: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Describe this region (JSON-able). Raises InputError if `allowed` names no fact.

    Args:
        model: unwrapped. The hello lists its trainable parameters.
        settings: of the method and the link, by their names in OuterConfig and RegionConfig.
        about: the rest of the training.
        allowed: names of facts that may differ (`regions.may_differ`).
        frozen: lines about the rest of the model, of all ranks if they hold shards; by default `frozen_tensors` of `model`.
    """
    facts = {"torch": torch.__version__.split("+")[0], **about.facts}
    check_allowed(allowed, facts)
    trainable = {name: param for name, param in model.named_parameters() if param.requires_grad}
    tensors = frozen_tensors(model) if frozen is None else frozen
    return {
        "protocol": PROTOCOL,
        "hf_cocodc": __version__,
        "byte order": sys.byteorder,
        **{in_recipe(name): value for name, value in settings.items()},
        "regions.may_differ": list(allowed),
        "max_steps": max_steps,
        "lanes": num_lanes,
        "model": dict(about.model),
        "facts": facts,
        "trainable parameters": [f"{name} {list(p.shape)} {p.dtype}" for name, p in trainable.items()],
        DIGEST: hashlib.sha256("\n".join(tensors).encode()).hexdigest()[:16],
        FROZEN: packed(tensors),
        "adapter settings": _adapter_settings(model),
        "first samples": about.first_samples,
        "versions": {name: version(name) for name in ("transformers", "accelerate")},
        "host": platform.node(),
        **({} if about.recipe is None else {RECIPE: dict(about.recipe)}),
    }


def _adapter_settings(model: nn.Module) -> list[str]:
    """PEFT settings that the parameters do not show (LoRA alpha), except the path of the base model."""
    entries = []
    for name, config in getattr(model, "peft_config", {}).items():
        for key, value in sorted(config.to_dict().items()):
            if key not in _MAY_DIFFER:
                entries.append(f"{name}.{key}={sorted(value) if isinstance(value, set) else value}")
    return entries


def frozen_tensors(model: nn.Module) -> list[str]:
    """Name, form and checksum of each tensor that regions do not synchronize but must have equal: frozen parameters and saved
    buffers. Of a sharded tensor, only this rank's shard.
    """
    held = {name: tensor for name, tensor in contents(model).items() if not tensor.requires_grad}
    return [f"{name} {line}" for name, line in digests(held, offloaded(model)).items()]


def _let_gloo_end() -> None:
    """Give gloo's threads a moment to end. A thread that still has to release the tensors of a collective call when the
    interpreter has exited aborts the process, and a successful run fails (pytorch/pytorch#190489). Destroying the group does
    not help while a model references it.
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
    """Meet the other regions, compare settings and connect; or join them, if they train already.

    If all ranks hold the same parameters, only the leader connects. A rank that holds shards (FSDP2) or a stage of its own
    connects to the same rank of every other region. The leader speaks for all shards (`link.voice`); each stage is a run of its
    own at the coordinator.

    Raises:
        InputError: settings that cannot work.
        HandshakeError: regions disagree.
        LinkError: the coordinator or a region cannot be reached in time.
    """
    why_fixed = about.why_fixed if stage is None else OF_STAGES
    asked = regions.resolved()
    regions = asked.settled(why_fixed)
    count = regions.count
    assert count is not None
    tell(rules={name: getattr(regions, name) for name in ("on_loss", "when_one_ends", "timeout_s")})
    rank, num_ranks, device = accelerator.process_index, accelerator.num_processes, accelerator.device
    sharded = accelerator.distributed_type is DistributedType.FSDP
    lane, num_lanes = lanes_of(accelerator, model, stage)
    if num_ranks > 1:
        atexit.unregister(_let_gloo_end)
        atexit.register(_let_gloo_end)
    is_elastic = regions.elastic and regions.max != 1
    group = ranks_of_region() if num_ranks > 1 and stage is None else None
    if group is not None:
        refuse_uneven(group, max_steps)
    if count == 1 and not is_elastic:
        alone = loopback()
        alone.lane, alone.num_lanes = lane, num_lanes
        link: Link = alone
        if sharded:
            link = LaneLink(alone, rank, num_ranks, device, group)
        elif group is not None:
            link = SharedLink(None if rank else alone, alone.region, 1, device, group)
        link.agreement = None if group is None else StopAgreement(group, None)
        return link
    if regions.region is None:
        raise InputError(
            f"this region is to join a run, and has no number. Set {ENV_REGION}, or use `hf-cocodc train RECIPE --join`, which "
            "finds a free one."
        )
    keys = secret_of(regions)
    congestion_of(regions.congestion)  # refused before anybody waits
    refuse_backend(regions.link, accelerator.device.type)
    name = regions.run or about.run or Path(sys.argv[0]).stem or "script"
    # of shards, each rank has its own; before the model is sharded, the leader has all of it
    frozen: list[str] | None = None
    if sharded and is_sharded(model):
        of_ranks = ranks_of_region().of_all(frozen_tensors(model), "the frozen tensors of each rank")
        frozen = [
            " ".join([first, *(line[-8:] for line in rest)]) for first, *rest in zip(*of_ranks, strict=True)
        ]

    told = {**settings(config), **regions.compared, **about.together}

    def mine() -> RegionContext:
        run = name if stage is None else f"{name}, stage {lane}"
        assert regions.region is not None
        return RegionContext(
            region=regions.region,
            regions=regions,
            name=run,
            compared=hello(model, told, max_steps, num_lanes, about, regions.allowed, frozen),
            host=own_address_of(regions, run),
            keys=keys,
            largest_base=largest_base(model),
            num_lanes=num_lanes,
            lane=lane,
            is_one_voice=sharded and group is not None,
            device=device,
        )

    def meet() -> TcpLink:
        context = mine()
        wire = context.wire()
        return _enter(context, _meet(context, bool(regions.join), wire), wire)

    what = "the meeting of the regions"
    own: TcpLink | None
    if group is None:
        link = own = meet()
    elif sharded:
        own = _connect_lane(group, mine, what)
        link = LaneLink(own, lane, num_lanes, device, group)
    else:
        own = group.lead(meet, what)  # None on the other ranks
        link = SharedLink(own, regions.region, count, device, group, is_elastic)
    if stage is None and not regions.leaves_alone:
        request = None if own is None or lane else lambda why: own.send(Stop(why=why))
        agreement = StopAgreement(group, request)
        link.agreement = agreement
        if own is not None and not lane:
            own.agreement = agreement
    elif group is not None:
        link.agreement = StopAgreement(group, None, decides=False)
    if session_of(link) is not None:
        line = in_advance(regions, why_fixed if asked.on_loss == AUTO_LOSS else "", stage is not None)
        announce("%s", line)
        say(line, once="a loss")
    return link


def _connect_lane(group: RegionGroup, mine: Callable[[], RegionContext], what: str) -> TcpLink:
    """Let a rank meet the other regions whose region has a lane in each: its leader meets them for all. A collective call."""
    context = mine()
    client, wire = _client_of_rank(group, context, bool(context.regions.join), what)
    links: list[TcpLink] = []
    try:
        group.together(
            lambda: links.append(_enter(context, client, wire)), "the connections to the other regions"
        )
    except BaseException as error:
        for link in links:
            link.close(str(error))
        raise
    return links[0]


def _client_of_rank(
    group: RegionGroup, context: RegionContext, join: bool, what: str
) -> tuple[AnyClient, Wire]:
    """The client and the wire of this rank, once the leader has met the other regions. A collective call."""
    lines = lines_of(group)
    wires: list[Wire] = []
    try:
        group.together(lambda: wires.append(context.wire()), "the ports of all ranks")
        told = group.of_all(msgspec.to_builtins(wires[0].whereabouts), "where all ranks listen")
        lanes = msgspec.convert(told, list[Whereabouts])
        client = group.lead(
            lambda: _meet(context, join, wires[0], lanes),
            what,
            lambda client: msgspec.to_builtins(structs.replace(client.welcome, differences=())),
        )
    except BaseException:
        for wire in wires:
            wire.close()
        raise
    if client is not None:
        return LeaderClient(client, lines), wires[0]
    assert context.regions.coordinator is not None
    host = parts_of(context.regions.coordinator)[0]
    return RankClient(msgspec.convert(group.heard, Welcome), host, lines[LEADER]), wires[0]


def meet_again(group: RegionGroup, lane: RegionSession) -> None:
    """Let all ranks of a region that have a lane each be a newcomer, after the others have gone on without them. A collective
    call. Raises LinkError if there is no run to come back to, or it cannot be reached.
    """
    lane.part_with()
    client, wire = _client_of_rank(group, lane.context, True, "the way back")
    group.together(lambda: lane.link.begin_again(client, wire), "the way back in each rank")


def _meet(context: RegionContext, join: bool, wire: Wire, lanes: Sequence[Whereabouts] = ()) -> Client:
    tell("meeting the other regions")
    client = context.meet(join, wire, lanes)
    welcome = client.welcome
    if welcome.joins:
        line = f"region {context.region} joins run {context.name!r}, which trains at step {welcome.step}"
        announce(line)
        say(line)
        tell("joining the run")
        show_differences(welcome.differences)
    else:
        hosts = ", ".join(host_of(place.lanes) for place in welcome.members)
        announce("all %d regions of run %r have met: %s", len(welcome.members), context.name, hosts)
        show_differences(welcome.differences)
    return client


def _enter(context: RegionContext, client: AnyClient, wire: Wire) -> TcpLink:
    """Connect to the regions that have met."""
    link = context.link(client, wire)
    if not client.welcome.joins:
        ways = ", ".join(f"region {region} {way}" for region, way in link.wire.ways.items())
        logger.info(
            "%d connections to each other region, round trip %.1f ms (%s)",
            *(link.wire.connections, 1000 * link.view.rtt_s, ways),
        )
        if link.carrier is not None and not isinstance(client, RankClient):
            announce("payloads of means travel over %s: %s", *link.carrier)
    if isinstance(client, RankClient):
        link.events = deque(maxlen=0)  # the leader keeps the journal
    link.session = RegionSession(context, link)
    return link


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
    """Meet the other regions over a link that is given (`simulate`), or else `connect`. Raises like `connect`.

    Regions compare over a given link what they compare at the coordinator.
    """
    if link is None:
        try:
            return connect(accelerator, model, config, regions, max_steps, stage, about)
        except RunFinished:
            spare_traceback()
            raise
    if link.num_regions == 1:
        return link
    told = {**settings(config), **regions.compared, **about.together}
    mine = hello(model, told, max_steps, link.num_lanes, about, regions.allowed)
    text = json.dumps(mine).encode()
    hellos = [json.loads(each) for each in spread_all(link, text, "what it is").values()]
    link.count_broadcasts()  # what crosses the coordinator does not count either
    compare(hellos)
    show_differences(side_by_side(hellos))
    return link
