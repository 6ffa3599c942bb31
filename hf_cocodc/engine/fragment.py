"""The engine's state of one fragment and of its transfers in flight, and how a send and a landing change it."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple

import torch
from msgspec import Meta
from torch import Tensor, nn

from ..link.base import Arrival, Awaited, Handle, Link
from ..methods import Method
from ..parts.codecs.base import Result
from ..parts.fragments import Fragment
from ..parts.guard import LONGEST_HISTORY, Ordinary, Verdict, lower_median
from ..parts.info import MergeInfo, MergeSlice, OuterInfo, OuterSlice
from ..parts.merges import Merge
from ..parts.outer import OuterTransform
from ..parts.tensors.flat import digest, local_shard, mapped, tensors_in
from ..parts.tensors.memory import HOST, Departure, Home, aside, used_here
from ..parts.tensors.slices import square, squares
from ..validation import Count, Number, Size
from .local_params import LocalParams

_LONGEST = Meta(max_length=LONGEST_HISTORY)


class Trained(NamedTuple):
    """Inner steps and tokens that a region has trained since it started."""

    steps: Count = 0
    tokens: Count = 0


@dataclass
class Transfer:
    """An outer gradient on its way: one object from the send to the landing.

    Attributes:
        snapshot: local params at the send, flat; None if it lands in the same step: they still are the local params then.
        global_params: global params at the send, flat; shared with the fragment and with other transfers.
        lr_sum: sum of inner learning rates up to the send.
        outer_grad: this region's outer gradient, flat; zero if it does not count.
        square: sum of its squares over all its lanes, an fp64 scalar on the device; None for a transfer that was loaded.
        is_own: whether this region takes part in it; not if it was coming in at the send, or has the transfer from another one.
        taken: share with which a landing has taken in `outer_grad` before (eager updates); None if none has.
        judged: the ordinary norm that it was held against when it was taken in; 0 if it was not.
        norm: of this region's outer gradient; 0 if it has no weight. Known once the transfer has begun.
        ordinary: what was ordinary at the send (`parts.guard`).
        is_finite: whether this region's outer gradient was finite; known as `norm` is.
        trained: what this region had trained at the send before, so that later steps are carried; nothing if unknown.
        handle: waits for the mean; set at the send.
    """

    sent_at: int
    snapshot: Tensor | None
    global_params: Tensor
    lr_sum: float
    outer_grad: Tensor | None = None
    square: Tensor | None = None
    is_own: bool = True
    taken: Tensor | float | None = None
    judged: float = 0.0
    norm: float = 0.0
    ordinary: Ordinary = Ordinary()
    is_finite: bool = True
    trained: Trained = Trained()
    handle: Handle = field(init=False)


@dataclass(kw_only=True)
class KeptOfFragment:
    """What a checkpoint keeps of a fragment, beside its transfers in flight.

    Attributes:
        global_params: flat fp32.
        settled_at: inner step up to which local steps have entered the global params, or were discarded by a merge.
        sent_at, lr_sum: inner step of the last send, and the sum of inner learning rates up to it.
        norms, paces: of its last landings, oldest first: the agreed norm, and that norm / learning rate (`parts.guard.agreed`).
        losses: the median training losses of the regions, likewise.
        voids: landings in a row, up to the last one, whose mean was void.
        far_losses: landings in a row, up to the last one, with a loss far above the ordinary one (`parts.guard.is_far`).
        nonfinite_rounds: transfers in a row, up to the last one, in which this region did not count although it had trained.
        trained: what this region had trained at the last send; later steps are in no transfer yet.
    """

    global_params: Tensor
    outer: dict[str, Any] = field(default_factory=dict)
    codec: dict[str, Any] = field(default_factory=dict)
    num_sends: Count = 0
    settled_at: Count = 0
    sent_at: Count = 0
    lr_sum: Number = 0.0
    norms: Annotated[Sequence[Size], _LONGEST] = ()
    paces: Annotated[Sequence[Size], _LONGEST] = ()
    losses: Annotated[Sequence[Number], _LONGEST] = ()
    voids: Count = 0
    far_losses: Count = 0
    nonfinite_rounds: Count = 0
    trained: Trained = Trained()


@dataclass
class FragmentState(KeptOfFragment):
    """The engine's state of one fragment.

    Operations run on the device of the local params, slice by slice; flat tensors rest at `home`. Global params that a transfer
    still references are never overwritten.

    Attributes:
        in_flight: transfers that have not landed, oldest first.
        far_regions: those that were far out of the ordinary in the last landing.
        has_written: whether local params were written since somebody has asked (`Synchronizer.take_written`).
    """

    fragment: Fragment
    local: LocalParams
    home: Home
    in_flight: list[Transfer] = field(default_factory=list)
    far_regions: tuple[int, ...] = ()
    has_written: bool = False

    def move_to(self, shards: Mapping[str, Tensor]) -> None:
        """Use other memory for the local params: `shards` is what this rank holds now, by name."""
        self.local = LocalParams(self.fragment.views_of(shards), self.home.device)

    def gather(self) -> Tensor:
        """The local params in a flat tensor of their own."""
        return self.local.gather(self.home.take(self.fragment.numel), self.home)

    def show(self, flat: Tensor) -> None:
        """Copy a flat tensor into the local params."""
        self.local.show(flat, self.home)
        self.has_written = True

    def checksum(self) -> Callable[[], int]:
        """For the link's thread: computes the checksum of the present global params, once, because the tensor may change."""
        flat, departure = self.global_params, Departure(self.home.device)

        @functools.cache
        def compute() -> int:
            with aside(self.home.device):
                departure.wait(flat)
                self.home.finish_copies()
                return digest(flat)

        return compute

    def base(self) -> Tensor:
        """What the next outer gradient is measured from: the present global params, if a landing made them.

        If nothing has landed since the last send (a delay of one round, at its start), local params have gone on from its
        snapshot: measured from there, inner steps do not count twice.
        """
        last = self.in_flight[-1] if self.in_flight else None
        has_gone_on = last and last.is_own and last.global_params is self.global_params
        if not (last and has_gone_on):
            return self.global_params
        assert last.snapshot is not None, "what is in flight when a step ends has one"
        return last.snapshot

    def keep_snapshots(self) -> None:
        """Take the snapshots of transfers that were to land at once, and have not: training may go on."""
        for transfer in self.in_flight:
            if transfer.snapshot is None:
                transfer.snapshot = self.gather()

    def measure_own_steps(self, transfer: Transfer) -> None:
        """Let this region's own steps be measured from the snapshot of a transfer without it (`merges.follow`)."""
        assert transfer.snapshot is not None, "a region keeps it that has no part in the transfer"
        # that is the last send with own steps, else the global params, rounded as the model stores its params
        sent = [other.snapshot for other in self.in_flight if other.is_own and other.snapshot is not None]
        base = sent[-1] if sent else self.global_params
        pairs = zip(*map(self.local.split, (base, transfer.snapshot)), strict=True)
        for index, (part, into) in enumerate(pairs):
            into.copy_(self.local.rounded(index, self.home.visit(part)), non_blocking=True)

    def prepare(self, base: Tensor, keep: bool = False) -> tuple[Tensor | None, Tensor, Tensor]:
        """A snapshot of the local params if it is to `keep` one, the outer gradient (base - local params), and its sum of squares
        (fp64, on the device).
        """
        home, numel = self.home, self.fragment.numel
        outer_grad = home.take(numel)
        snapshot = home.take(numel) if keep else None
        kept = None if snapshot is None else self.local.split(snapshot)
        sums = [torch.zeros((), dtype=torch.float64, device=home.device)]
        for index, (grad, part) in enumerate(zip(*map(self.local.split, (outer_grad, base)), strict=True)):
            into = None if kept is None or home.is_apart else kept[index]
            local = self.local.read(index, into, spare=None if home.is_apart else grad)
            if kept is not None:
                home.store(kept[index], local)
            # against unrounded fp32, a bf16 model that stands still would seem to move, and idle regions would drift
            stored = self.local.rounded(index, home.visit(part))
            found = stored - local if home.is_apart else torch.sub(stored, local, out=grad)
            sums.append(square(found))
            home.store(grad, found)
        return snapshot, outer_grad, torch.stack(sums).sum()

    def clear_(self, outer_grad: Tensor, where: Tensor) -> None:
        """Set an outer gradient to zero where a scalar of the device is true."""
        if self.home.device == HOST and not where:
            return
        for part in self.local.split(outer_grad):
            self.home.store(part, self.home.visit(part).masked_fill_(where, 0.0))

    def land(
        self,
        transfer: Transfer,
        mean: Tensor,
        transform: OuterTransform,
        merge: Merge,
        outer_info: OuterInfo,
        info: MergeInfo,
        fresh: Tensor | None = None,
    ) -> None:
        """Take the outer step of a transfer, and merge its result into the local params; overwrites the mean.

        If the local params that a merge reads are not finite in any lane, they become the global ones. Reads no value of the
        device. `fresh`: the fresh outer gradient, for transforms that let regions differ.
        """
        used_here(mean)
        step, state = transform.begin(self.outer, outer_info)
        before = self.global_params
        after = self.home.take(self.fragment.numel) if self._is_held(before) else before
        here = _Slices(self, transfer, mean, before, after, state, fresh)
        scales: Sequence[Tensor] = ()
        if merge.measure is not None:
            for index in range(len(self.local.cuts)):
                here.step(step, index)
            scales = self._scales(merge, here, info)
        is_sound = self._is_sound(info) if merge.reads_local else None
        for index, cut in enumerate(self.local.cuts):
            new_global = here.step(step, index) if merge.measure is None else here.new_global(index)
            values = new_global
            if is_sound is not None:
                own = [scales[param] for param in cut.params] if scales else ()
                merged = merge.apply(here.merge(index, new_global)._replace(scales=own), info)
                values = torch.where(is_sound, merged, new_global)
            self.local.write(index, values)
        self.global_params, self.outer, self.has_written = after, state, True
        self.home.give(mean)
        self.drop(transfer, before)

    def _scales(self, merge: Merge, here: "_Slices", info: MergeInfo) -> Sequence[Tensor]:
        """What a merge makes of its norms, for each parameter: norms are over all slices, and all ranks that hold shards."""
        assert merge.measure is not None and merge.scales is not None
        count, device = len(self.local.params), self.home.device
        sums = torch.zeros(3, count, dtype=torch.float64, device=device)
        sums[2] = self.local.numels
        for index, cut in enumerate(self.local.cuts):
            measured = merge.measure(here.merge(index, here.new_global(index)), info)
            found = squares([view for values in measured for view in cut.views(values)]).view(2, -1)
            sums[:2, cut.params[0] : cut.params[-1] + 1].add_(_spread(found, cut.params))
        first, second, numels = info.total(sums.view(-1)).view(3, count).unbind()
        return merge.scales(first.sqrt(), second.sqrt(), numels, info).unbind()

    def _is_sound(self, info: MergeInfo) -> Tensor:
        """Whether the local params are finite, in all lanes: a scalar on the device."""
        total = torch.zeros((), dtype=torch.float32, device=self.home.device)
        for index in range(len(self.local.cuts)):
            total = total + self.local.read(index).sum()
        # a finite number minus itself is 0, any other is NaN
        return info.total((total - total).double().view(1)) == 0

    def transfer_of(self, sent_at: int) -> Transfer:
        """The transfer sent at this inner step: the oldest in flight, because they land in order. Step 0: one never sent."""
        if sent_at == 0:
            return self._nothing_sent()
        in_flight = [transfer.sent_at for transfer in self.in_flight]
        assert in_flight[:1] == [sent_at], (
            f"the transfer of step {sent_at} is to land, in flight are those of {in_flight}"
        )
        return self.in_flight[0]

    def _nothing_sent(self) -> Transfer:
        """A transfer of step 0, where local and global params are equal: its mean is zero."""
        home, numel = self.home, self.fragment.numel
        mean, outer_grad = (home.fill(home.take(numel), 0.0) for _ in range(2))
        handle = Awaited(
            lambda: Arrival(Result(mean, lambda: mean, self.codec), (), 0, 0.0, 0.0, (), Verdict(()))
        )
        snapshot = home.fill(home.take(numel), self.global_params)
        transfer = Transfer(0, snapshot, self.global_params, 0.0, outer_grad)
        transfer.handle = handle
        return transfer

    def drop(self, transfer: Transfer, *replaced: Tensor) -> None:
        """Return the memory of a transfer that is no longer in flight, and replaced global params, unless still referenced."""
        for own in (transfer.snapshot, transfer.outer_grad):
            if own is not None:
                self.home.give(own)
        for flat in {id(flat): flat for flat in (transfer.global_params, *replaced)}.values():
            if flat is not self.global_params and not self._is_held(flat):
                self.home.give(flat)

    def _is_held(self, flat: Tensor) -> bool:
        """Whether a transfer in flight references these global params."""
        return any(transfer.global_params is flat for transfer in self.in_flight)


class FragmentFacts(NamedTuple):
    """A fragment after the last events. JSON keeps it.

    Attributes:
        in_flight_since: inner step at which the oldest transfer in flight was sent; None if there is none.
        ordinary_loss: the median of its `losses`; NaN if there are none.

    The others are those of `FragmentState`.
    """

    numel: int
    sent_at: int
    in_flight_since: int | None
    nonfinite_rounds: int
    voids: int
    far_losses: int
    ordinary_loss: float
    far_regions: Sequence[int]

    @classmethod
    def of(cls, fragment: FragmentState) -> "FragmentFacts":
        return cls(
            numel=fragment.fragment.numel,
            sent_at=fragment.sent_at,
            in_flight_since=fragment.in_flight[0].sent_at if fragment.in_flight else None,
            nonfinite_rounds=fragment.nonfinite_rounds,
            voids=fragment.voids,
            far_losses=fragment.far_losses,
            ordinary_loss=lower_median(fragment.losses) if fragment.losses else math.nan,
            far_regions=list(fragment.far_regions),
        )


class _Slices:
    """The flat tensors of one landing, slice by slice on the device."""

    def __init__(
        self,
        fragment: FragmentState,
        transfer: Transfer,
        mean: Tensor,
        before: Tensor,
        after: Tensor,
        state: dict[str, Any],
        fresh: Tensor | None,
    ) -> None:
        self._local, self._home = fragment.local, fragment.home
        self._mean, self._before, self._after = map(self._local.split, (mean, before, after))
        self._snapshot = None if transfer.snapshot is None else self._local.split(transfer.snapshot)
        self._own = (
            None if fresh is None or transfer.outer_grad is None else self._local.split(transfer.outer_grad)
        )
        self._fresh = None if fresh is None else self._local.split(fresh)
        numel, self._state = fragment.fragment.numel, state
        # cut once: to cut it for each slice takes the square of their number
        self._parts = {
            id(each): self._local.split(each) for each in tensors_in(state) if each.shape == (numel,)
        }

    def step(self, step: Callable[[Tensor, OuterSlice], Tensor], index: int) -> Tensor:
        """Take the outer step of a slice; returns its new global params."""
        home, parts = self._home, self._parts
        kept = mapped(self._state, lambda each: parts[id(each)][index] if id(each) in parts else each)
        here = OuterSlice(
            mapped(kept, home.visit),
            None if self._own is None else home.visit(self._own[index]),
            None if self._fresh is None else home.visit(self._fresh[index]),
        )
        moved_by = step(home.visit(self._mean[index]), here)
        after = self._after[index]
        old = home.visit(self._before[index])
        new = old - moved_by if home.is_apart else torch.sub(old, moved_by, out=after)
        home.store(after, new)
        _store(home, kept, here.state)
        return new

    def new_global(self, index: int) -> Tensor:
        """The new global params of a slice that has made its step."""
        return self._home.visit(self._after[index])

    def merge(self, index: int, new_global: Tensor) -> MergeSlice:
        local = self._local.read(index)
        snapshot = local if self._snapshot is None else self._home.visit(self._snapshot[index])
        return MergeSlice(local, new_global, snapshot, self._local.cuts[index].sizes)


def _store(home: Home, kept: Mapping[str, Any], changed: Mapping[str, Any]) -> None:
    """Bring the tensors of a slice back to where they rest."""
    for name, value in kept.items():
        if isinstance(value, Mapping):
            _store(home, value, changed[name])
        elif isinstance(value, Tensor) and value.dim():
            home.store(value, changed[name])


def _spread(values: Tensor, params: Sequence[int]) -> Tensor:
    """Columns of some parameters, at their places among all from the first to the last; others have none in this slice."""
    if len(params) == params[-1] - params[0] + 1:
        return values
    spread = values.new_zeros(len(values), params[-1] - params[0] + 1)
    for place, value in zip(params, values.unbind(1), strict=True):
        spread[:, place - params[0]] = value
    return spread


def adopt(
    fragments: Sequence[Fragment], model: nn.Module, method: Method, link: Link, home: Home, start: bool
) -> list[FragmentState]:
    """The engine's state of each fragment; at the `start` of a run, all regions take region 0's parameters."""
    named = dict(model.named_parameters())
    shards = {name: local_shard(named[name]) for fragment in fragments for name in fragment.names}
    adopted = []
    for fragment in fragments:
        state = hold(fragment, shards, home)
        if start:
            home.settle()
            flat = state.global_params.to(HOST)
            link.broadcast(flat, f"the first parameters of fragment {fragment.index} from region 0")
            state.global_params.copy_(flat)
            state.show(state.global_params)
        state.outer = home.kept(method.outer.init(state.global_params))
        state.codec = home.kept(method.codec.init(fragment))
        adopted.append(state)
    return adopted


def hold(fragment: Fragment, shards: Mapping[str, Tensor], home: Home) -> FragmentState:
    """The state of a fragment whose global params are the present local ones; without outer state."""
    local = LocalParams(fragment.views_of(shards), home.device)
    return FragmentState(fragment, local, home, global_params=local.gather(home.take(fragment.numel), home))
