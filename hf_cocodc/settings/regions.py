"""The section `regions` of a recipe: which regions take part, and how they reach each other."""

import dataclasses
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import InputError, shown, spare_traceback
from .environment import (
    AUTO_LOSS,
    ENV_COORDINATOR,
    ENV_JOIN,
    ENV_ON_LOSS,
    ENV_REGION,
    ENV_REGIONS,
    ENV_RUN,
    ENV_SECRET,
    check_alone,
    check_split,
    from_env,
    warn_alone,
)
from .fields import Limit, Settings, among, check_host, documented, setting, within

WAIT_S = 3600.0
MOST_ADDRESSES = 16
MOST_REGIONS = 1024
HOW_LONG = "with regions.min after regions.wait_s, otherwise after regions.timeout_s"
"""When a region ends that waits to hear who goes on after a loss."""
OF_ELASTIC_RUNS = ("min", "max", "wait_s", "grace_s")
"""Fields that have a meaning only where a run goes on without a lost region."""
LOSSES = (AUTO_LOSS, "stop", "continue")
LINKS = ("auto", "tcp", "gloo", "nccl")
OF_GROUPS = ("gloo", "nccl")
"""Links whose payloads travel in a process group of torch.distributed: unencrypted, and not over our own connections."""
_SECONDS = "must be positive, and at most 1e6 (11 days)"
_TIME = Limit(lambda seconds: 0 < seconds <= 1e6, _SECONDS)
_COUNT = within(1, MOST_REGIONS)


@documented
@dataclass(frozen=True, kw_only=True)
class RegionConfig(Settings):
    """Which region this is, and how it reaches the others. Fields that are None take the value from the environment."""

    SECTION = "regions"

    region: int | None = setting(
        f"Number of this region, from 0 (environment {ENV_REGION}).",
        within(0, MOST_REGIONS - 1),
    )
    count: int | None = setting(
        f"M: number of regions with which the run starts (environment {ENV_REGIONS}).", _COUNT
    )
    coordinator: str | None = setting(
        f"HOST:PORT of the coordinator that all regions reach (environment {ENV_COORDINATOR}). Or the URL of a storage that all "
        "reach, where they then meet without an open port: file:///FOLDER, s3://, gs://, hf://buckets/, ssh://."
    )
    run: str | None = setting(
        f"Name of the run, equal in all its regions. Runs with different names can share a coordinator (environment {ENV_RUN}). "
        "By default the name of the output folder, or of the script if there is no output folder.",
        Limit(lambda name: 0 < len(name) <= 100, "must have 1 .. 100 characters"),
    )
    secret_file: str | None = setting(
        "File with the secret that the run's regions and their coordinator share (hf-cocodc secret new FILE); or the secret "
        f"itself in the environment ({ENV_SECRET}). Strangers can then neither take part, nor read or alter what regions and "
        "coordinator send each other (TLS 1.3, AES-256-GCM)."
    )
    interface: str | None = setting(
        "Network interface of the link, for example wg0; by default the interface that reaches the coordinator."
    )
    port: int | None = setting(
        "TCP port on which this region listens for the other regions: the one to open in a firewall. Each further rank that "
        "connects (FSDP2) uses the next port. By default any free port.",
        within(1, 65_535),
    )
    announce: list[str] | str | None = setting(
        "HOST or HOST:PORT at which other regions reach this one, if that is not its own address and port: behind a router, in a "
        "container, on a rented machine. A list, or separated by commas; IPv6 in brackets. Of any two regions, one must reach "
        "the other."
    )
    link: str = setting(
        "What carries the payloads of means: tcp (connections of our own), or gloo or nccl (a process group of torch.distributed "
        "inside a cluster, which does not encrypt; all else stays on our own connections). auto: nccl if every process that "
        "connects has a CUDA device of its own and one launch started all; else gloo if round trips are below 2 ms, and neither "
        "a secret, an announced address, a storage nor a setting of TCP asks for our own connections; else tcp.",
        among(*LINKS),
        default="auto",
    )
    connections: int | str | None = setting(
        "TCP connections to each other region; auto chooses the number by the round-trip time.",
        Limit(
            lambda number: number == "auto" or (isinstance(number, int) and 1 <= number <= 64),
            "must lie in 1 .. 64, or be auto",
        ),
        default="auto",
    )
    rate_limit: float | None = setting(
        "Highest rate in Mbit/s at which this region sends, divided equally among the other regions: nine tenths of the link's "
        "rate, or less to leave room on a shared link. By default there is no limit, and packets may be lost before the link.",
        Limit(lambda rate: rate > 0, "must be positive"),
    )
    congestion: str = setting(
        "TCP congestion control of the connections that carry transfers. auto: bbr over long distances, if the kernel lets this "
        "process use it; bbr keeps a link full even if it loses packets, and takes more than its share from other traffic. "
        "system: the machine's own. Or the name of one.",
        Limit(lambda name: 0 < len(name) < 16, "must be auto, system, or a name like bbr"),
        default="auto",
    )
    start_timeout_s: float = setting(
        "Seconds to wait at the start until all regions are there, or until the run that this region joins is training.",
        _TIME,
        default=600.0,
    )
    timeout_s: float = setting(
        "A region is lost after this many seconds without a heartbeat.", _TIME, default=120.0
    )
    stuck_timeout_s: float = setting(
        "A region that is alive but makes no inner step is lost after this many seconds.",
        _TIME,
        default=1200.0,
    )
    may_differ: list[str] | str | None = setting(
        "Names of training and data settings that may differ between regions, and change at a resume: a list, or separated "
        "by commas. For example learning_rate,batch."
    )
    when_one_ends: str = setting(
        "What the others do when one region ends before them. auto: they finish with it if it has reached its end, and stop with "
        "a checkpoint if it was interrupted. finish, or stop: they do that in both cases. continue: they train on if it has "
        "reached its end; unless on_loss is stop, also if it was interrupted.",
        among("auto", "finish", "stop", "continue"),
        default="auto",
    )
    on_loss: str | None = setting(
        "What the others do when a region is lost: stop at one step with a checkpoint, from which all resume, or continue "
        "without it until it comes back. auto: continue, but stop where a run cannot (pipeline stages, saving or evaluating "
        "every epoch). By default continue if min, max, wait_s, grace_s or join is given; else as the environment says "
        f"({ENV_ON_LOSS}), which is auto in hf-cocodc train and launch; else stop.",
        among(*LOSSES),
    )
    min: int | str | None = setting(
        "Smallest number of regions that train on; fewer wait for others (wait_s). auto, the default: the majority of count, and "
        "of two regions one. Not with on_loss=stop.",
        Limit(
            lambda least: least == "auto" or (isinstance(least, int) and _COUNT.holds(least)),
            f"{_COUNT.words}, or be auto",
        ),
    )
    max: int | None = setting(
        "Largest number of regions, including those that join; by default count. They are numbered 0 .. max - 1. Not "
        "with on_loss=stop.",
        _COUNT,
    )
    wait_s: float | None = setting(
        "Seconds that fewer regions than min wait for others before they stop with a checkpoint and exit code 3; "
        f"{WAIT_S:g} by default. Not with on_loss=stop.",
        _TIME,
    )
    grace_s: float | str | None = setting(
        "Seconds that the others wait for a straggler before they go on without it until it has caught up; auto: as long as the "
        "overlap hides the delay. By default they wait as long as it is alive. Not with on_loss=stop.",
        Limit(
            lambda seconds: seconds == "auto" or (not isinstance(seconds, str) and 0 < seconds <= 1e6),
            f"{_SECONDS}, or be auto",
        ),
    )
    balance: str = setting(
        "equal: every region keeps its own batch. auto: regions share the global batch of an inner step by their measured "
        "speeds, in whole micro-batches (gradient accumulation), so that all are ready at about the same time; a region then "
        "counts by the samples that it has trained on (with outer.weights=tokens by the tokens).",
        among("equal", "auto"),
        default="equal",
    )
    balance_batch: str = setting(
        "With balance=auto, where regions come or go. fixed: the global batch stays what it was at the start, and those that are "
        "there share it. per_region: it grows and shrinks with the batches of the regions.",
        among("fixed", "per_region"),
        default="fixed",
    )
    shards: str = setting(
        "fixed: each number of a region has its own part of the training data, which nobody reads while it is away. dealt: "
        "every region has all of the training data (map-style), and in each inner step samples are dealt to the regions that "
        "are there: each is read once in a pass, whatever comes and goes.",
        among("fixed", "dealt"),
        default="fixed",
    )
    report_regions: str = setting(
        "Which regions report to trackers (training.report_to): first, region 0 for all; or all, each as a run of its own, "
        "with W&B and trackio in one group. In a simulation always first.",
        among("first", "all"),
        default="first",
    )
    join: bool | None = setting(
        f"Join or rejoin a run that is training, as a new or a returning region (environment {ENV_JOIN}=1). Not with "
        "on_loss=stop."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.announced) > MOST_ADDRESSES:
            raise InputError(
                f"regions.announce: {len(self.announced)} addresses, and others take at most {MOST_ADDRESSES} of a region. "
                "Announce fewer."
            )
        for address in self.announced:
            address_parts(address)
        if self.coordinator is not None and not self.in_storage:
            host_port = _split(self.coordinator)
            if host_port is None or host_port[1] is None:
                raise InputError(
                    f"regions.coordinator={shown(self.coordinator)} must be HOST:PORT, for example 10.0.0.1:29650, with a "
                    "port in 1 .. 65535; or the URL of a storage that all regions reach, for example s3://bucket/run7."
                )
            check_host("regions.coordinator", host_port[0])
        self._check_balance()
        self._check_link()
        self._check_elastic()

    @property
    def rule_of_batch(self) -> str | None:
        """What happens to the global batch where regions come or go (`parts.deal.after`); None if that concerns nobody."""
        if self.balance == "auto":
            return self.balance_batch
        return "own" if self.shards == "dealt" else None

    def _check_balance(self) -> None:
        """Raise InputError if a setting would have no effect."""
        if self.balance == "equal" and self.balance_batch != "fixed":
            raise InputError(
                f"regions.balance_batch={self.balance_batch} has no meaning where every region keeps its own batch. Set "
                "regions.balance=auto, or remove regions.balance_batch."
            )

    def _check_link(self) -> None:
        """Check that nothing is set that the link would ignore. Raises InputError."""
        if self.link not in OF_GROUPS:
            return
        for name, ignored in self.of_tcp.items():
            raise InputError(
                f"regions.link={self.link} with regions.{name}={shown(ignored)}: this setting is for connections of our own, and "
                f"payloads would travel over those of {self.link}. Remove regions.{name}, or set regions.link=tcp."
            )

    def _check_elastic(self) -> None:
        """Check the settings of a run that outlives lost regions. Raises InputError if they conflict."""
        if self.join and self.on_loss == "stop":
            raise InputError(
                f"this region is to join a run (--join, {ENV_JOIN}=1 or regions.join=true), but by regions.on_loss=stop the run "
                "ends when a region is lost. Nobody can join such a run. If the regions that train have another "
                "regions.on_loss, give this one the same. If not, stop them (Ctrl-C), remove regions.on_loss=stop in all, and "
                "start all with --resume."
            )
        for name in OF_ELASTIC_RUNS:
            value = getattr(self, name)
            if value is not None and self.on_loss == "stop":
                raise InputError(
                    f"regions.{name}={shown(value)} has no meaning where a lost region ends the run (regions.on_loss=stop). "
                    f"Remove one of the two in every region."
                )
        least = self.min if isinstance(self.min, int) else 1
        if self.max is not None and least > self.max:
            raise InputError(
                f"regions.min={self.min} is larger than regions.max={self.max}. Lower min or raise max."
            )
        if self.count is None:
            return
        if least > self.count:
            raise InputError(
                f"regions.min={self.min} is larger than regions.count={self.count}, with which the run begins. Lower min or "
                f"raise count ({ENV_REGIONS})."
            )
        if self.max is not None and self.max < self.count:
            raise InputError(
                f"regions.max={self.max} is smaller than regions.count={self.count}, with which the run begins. Raise max or "
                f"lower count ({ENV_REGIONS})."
            )

    @property
    def announced(self) -> list[str]:
        """The addresses in `announce`."""
        addresses = self.announce.split(",") if isinstance(self.announce, str) else self.announce or []
        return [address.strip() for address in addresses]

    def addresses(self, port: int, lane: int) -> tuple[tuple[str, int], ...]:
        """Of `announce`: pairs of a host and a port at which others reach a lane of this region, which listens on `port`. A
        port that is announced is that of lane 0. Raises InputError if the lane has no port.
        """
        pairs = [address_parts(address) for address in self.announced]
        ports = [port if there is None else there + lane for _, there in pairs]
        if max(ports, default=0) > 65_535:
            raise InputError(
                f"regions.announce: rank {lane} has a port that is {lane} higher, {max(ports)}, and the highest is 65535. "
                "Announce lower ones."
            )
        return tuple((host, each) for (host, _), each in zip(pairs, ports, strict=True))

    @property
    def in_storage(self) -> bool:
        """Whether the regions meet in a storage."""
        return self.coordinator is not None and "://" in self.coordinator

    @property
    def announces(self) -> bool:
        """Whether `addresses` are all at which others reach this region; in a storage nobody needs to."""
        return bool(self.announced) or self.in_storage

    @property
    def of_tcp(self) -> dict[str, Any]:
        """The settings that only our own connections follow, as far as they are set."""
        asked = {name: getattr(self, name) for name in ("rate_limit", "connections", "congestion")}
        return {name: value for name, value in asked.items() if value not in (None, "auto")}

    @property
    def elastic(self) -> bool:
        """Whether the run goes on without a region that is lost, and others may join it, as far as these settings say."""
        if self.on_loss is None:
            return bool(self.join) or any(getattr(self, name) is not None for name in OF_ELASTIC_RUNS)
        return self.on_loss != "stop"

    @property
    def least(self) -> int:
        """The smallest number of regions that train on, once this is `resolved`: all, where a lost region ends the run."""
        return self.min if isinstance(self.min, int) else self.count or 1

    def least_of(self, count: int) -> int:
        """The smallest number of regions that train on in an elastic run that begins with `count`."""
        return self.min if isinstance(self.min, int) else majority(count)

    @property
    def leaves_alone(self) -> bool:
        """Whether a region that is interrupted leaves the run, and the others train on."""
        return self.elastic and self.when_one_ends == "continue"

    @property
    def allowed(self) -> list[str]:
        """The names in `may_differ`, sorted."""
        names = self.may_differ.split(",") if isinstance(self.may_differ, str) else self.may_differ or []
        return sorted({name.strip() for name in names} - {""})

    @property
    def compared(self) -> dict[str, Any]:
        """The settings that must be equal in all regions, once they are `resolved`."""
        names = ["link", "connections", "timeout_s", "when_one_ends", "balance", "balance_batch", "shards"]
        names += ["on_loss", *OF_ELASTIC_RUNS] if self.elastic else []
        return {name: getattr(self, name) for name in names}

    def resolved(self, env: Mapping[str, str] | None = None) -> "RegionConfig":
        """A checked copy in which the environment, or a default, fills the fields that are None.

        A single region needs no coordinator. In a run that ends with a lost region the fields that only other runs have stay
        None.

        Raises:
            InputError: a value contradicts the environment, or a needed value is missing.
        """
        try:
            return self._resolved(os.environ if env is None else env)
        except InputError as error:
            spare_traceback(error)  # no line of a script is to blame
            raise

    def _resolved(self, env: Mapping[str, str]) -> "RegionConfig":
        check_split(env)
        region = from_env(self.region, env, ENV_REGION, "regions.region")
        count = from_env(self.count, env, ENV_REGIONS, "regions.count")
        coordinator = self.coordinator or env.get(ENV_COORDINATOR)
        join = self.joins(env)
        if count is None:
            check_alone(region, coordinator)
            warn_alone()
            count = 1
        filled = dataclasses.replace(
            self, region=region, count=count, coordinator=coordinator, join=join, run=self.name_of_run(env)
        )
        if filled.on_loss is None:
            by_default = env.get(ENV_ON_LOSS, "stop")
            if by_default not in LOSSES:
                raise InputError(f"{ENV_ON_LOSS}={shown(by_default)} must be one of {', '.join(LOSSES)}.")
            filled = dataclasses.replace(filled, on_loss="continue" if filled.elastic else by_default)
        if filled.elastic:
            filled = dataclasses.replace(
                filled,
                min=self.least_of(count),
                max=count if self.max is None else self.max,
                wait_s=WAIT_S if self.wait_s is None else self.wait_s,
            )
        else:
            filled = dataclasses.replace(filled, join=None)
        filled = filled.numbered()
        most = filled.max or count
        if most > 1 and coordinator is None:
            raise InputError(
                f"{most} regions need a coordinator to find each other. Start one with `hf-cocodc coordinator` on a "
                f"machine that all regions can reach, and set {ENV_COORDINATOR}=HOST:PORT (regions.coordinator, --coordinator)."
            )
        return filled

    def settled(self, why_fixed: str) -> "RegionConfig":
        """A copy of `resolved` settings in which `on_loss` is no longer auto.

        `why_fixed`: why this run cannot go on without a lost region, a sentence; empty if it can. Raises InputError if it is to
        go on, and cannot.
        """
        if not self.elastic or self.max == 1:
            return self if self.on_loss != AUTO_LOSS else self._fixed()
        if not why_fixed:
            return dataclasses.replace(self, on_loss="continue")
        if self.on_loss == AUTO_LOSS:
            return self._fixed()
        raise InputError(
            f"the other regions are to go on without one that is lost (regions.on_loss=continue), and cannot: {why_fixed} Or set "
            f"regions.on_loss=stop, without regions.{', '.join(OF_ELASTIC_RUNS)}."
        )

    def _fixed(self) -> "RegionConfig":
        nothing: dict[str, Any] = dict.fromkeys(OF_ELASTIC_RUNS)
        return dataclasses.replace(self, on_loss="stop", **nothing)

    def numbered(self) -> "RegionConfig":
        """A copy, of settings with a count, with this region's number. Raises InputError if there is no such region."""
        assert self.count is not None
        numbered = self
        if self.region is None:
            if self.join:
                raise InputError(
                    f"this process joins a run, but does not know as which region. Set {ENV_REGION}, or start it with `hf-cocodc "
                    "train RECIPE --join`, which takes the lowest number that is free."
                )
            if self.count > 1:
                raise InputError(
                    f"regions.count={self.count} but this process does not know which region it is. Set {ENV_REGION} to "
                    f"0 .. {self.count - 1} (hf-cocodc train and launch set it for you)."
                )
            numbered = dataclasses.replace(self, region=0)
        assert numbered.region is not None
        if numbered.region >= (self.max or self.count if self.join else self.count):
            raise InputError(f"region {numbered.region} of {self.count}: {self._numbers()}")
        return numbered

    def _numbers(self) -> str:
        """Which numbers regions have, and the way out for one that has another."""
        assert self.count is not None
        if self.join:
            return (
                f"regions that join are numbered 0 .. {(self.max or self.count) - 1}. Lower {ENV_REGION}, or raise regions.max "
                "in every region."
            )
        higher = (
            f" A region with a higher number joins: {ENV_JOIN}=1 (--join)."
            if self.max is not None and self.max > self.count
            else ""
        )
        return f"regions are numbered 0 .. {self.count - 1}. Lower {ENV_REGION} or raise {ENV_REGIONS} (regions.count).{higher}"

    def joins(self, env: Mapping[str, str]) -> bool:
        """Whether this region enters a run that is training. Raises InputError like `from_env`."""
        return bool(from_env(self.join, env, ENV_JOIN, "regions.join", bool))

    def name_of_run(self, env: Mapping[str, str]) -> str | None:
        """`run`, or the name in the environment if it is None. Raises InputError like `from_env`."""
        name: str | None = from_env(self.run, env, ENV_RUN, "regions.run", str)
        return name


def majority(count: int) -> int:
    """The least number of regions that is more than half of `count`; of two regions one.

    >>> [majority(count) for count in (1, 2, 3, 4, 5)]
    [1, 1, 2, 3, 3]
    """
    return 1 if count == 2 else count // 2 + 1


def address_parts(address: str) -> tuple[str, int | None]:
    """Host and port of an address as in `announce`; without a port, None. Raises InputError if it is no address."""
    parts = _split(address)
    if parts is None:
        raise InputError(
            f"regions.announce: {shown(address)} must be HOST or HOST:PORT, for example 203.0.113.7:29700 or "
            "[2001:db8::7]:29700, with a port in 1 .. 65535."
        )
    check_host("regions.announce", parts[0])
    return parts


def _split(address: str) -> tuple[str, int | None] | None:
    """Host and port of HOST or HOST:PORT, IPv6 in brackets; None if it is neither."""
    match = re.fullmatch(r"(\[[^\]]+\]|[^:\[\]]+)(?::(\d{1,5}))?", address)
    if match is None or not 1 <= int(match[2] or 1) <= 65_535:
        return None
    return match[1].strip("[]"), None if match[2] is None else int(match[2])
