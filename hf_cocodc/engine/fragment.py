"""The engine's state of one fragment, and how a send and a landing change it."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..link.base import Arrival, ArrivedHandle, Link
from ..methods import Method
from ..parts.codecs.base import Conversation, Result
from ..parts.fragments import Fragment
from ..parts.info import MergeInfo, OuterInfo
from ..parts.merges import Merge
from ..parts.outer import OuterTransform
from ..parts.tensors.flat import copy_all_, digest, flat_zeros, local_shard, tensors_in
from ..parts.tensors.memory import HOST, Departure, Pool, shared_lengths
from ..parts.tensors.pieces import PIECE, Cut, HostThreads, cuts, divide
from .compatibility import form_of
from .landing import Flats, Landing
from .local_params import LocalParams
from .outer_step import OuterStep
from .transfer import Trained, Transfer


@dataclass
class FragmentState:
    """The engine's state of one fragment.

    Operations on all values run on the device of the outer state. On the host they run piece by piece, so that memory is read
    and written once. Global params that a transfer still references are never overwritten.

    Attributes:
        global_params: flat fp32.
        codec_form: the codec's state without values: all that ranks outside the conversations know of it.
        pool, host: memory on the device of the outer state, and for the link.
        in_flight: transfers that have not landed, oldest first.
        settled_at: inner step up to which local steps have entered the global params, or were discarded by a merge.
        sent_at, lr_sum: inner step of the last send, and the sum of inner learning rates up to it.
        norms, paces: of its last landings, oldest first: the agreed norm, and that norm / learning rate (`parts.guard.agreed`).
        losses: the median training losses of the regions, likewise.
        voids: landings in a row, up to the last one, whose mean was void.
        far_regions: those that were far out of the ordinary in the last one.
        far_losses: landings in a row, up to the last one, with a loss far above the ordinary one (`parts.guard.is_far`).
        nonfinite_rounds: transfers in a row, up to the last one, in which this region did not count although it had trained.
        trained: what this region had trained at the last send; later steps are in no transfer yet.
    """

    fragment: Fragment
    cuts: Sequence[Cut]
    local: LocalParams
    global_params: Tensor
    outer: dict[str, Any]
    codec: dict[str, Any]
    codec_form: dict[str, Any]
    pool: Pool
    host: Pool
    threads: HostThreads
    in_flight: list[Transfer] = field(default_factory=list)
    num_sends: int = 0
    settled_at: int = 0
    sent_at: int = 0
    lr_sum: float = 0.0
    norms: Sequence[float] = ()
    paces: Sequence[float] = ()
    losses: Sequence[float] = ()
    voids: int = 0
    far_regions: tuple[int, ...] = ()
    far_losses: int = 0
    nonfinite_rounds: int = 0
    trained: Trained = Trained()

    def __post_init__(self) -> None:
        self._lengths = [sum(cut.sizes) for cut in self.cuts]

    @property
    def codec_remembers(self) -> bool:
        """Whether a transfer must start from the codec's state at the end of the one before."""
        return bool(self.codec_form)

    def take(self) -> Tensor:
        """A buffer of the fragment's length with undefined values."""
        return self.pool.take(self.fragment.numel)

    def cut(self, flat: Tensor) -> Sequence[Tensor]:
        """A flat tensor of this fragment, piece by piece."""
        return flat.split_with_sizes(self._lengths)

    def move_to(self, shards: Mapping[str, Tensor]) -> None:
        """Use other memory for the local params: `shards` is what this rank holds now, by name."""
        self.local = LocalParams(self.fragment, self.fragment.views_of(shards), self.cuts)

    def gather(self) -> Tensor:
        """The local params in a flat buffer of their own."""
        return self.local.gather(self.take())

    def converse(
        self, conversation: Callable[[Tensor], Conversation], flat: Tensor
    ) -> tuple[Callable[[], Conversation], Departure]:
        """A function that begins conversations about a flat tensor, and the departure that takes the tensor to the link."""
        departure = Departure(flat, self.host)

        def converse() -> Conversation:
            return (yield from conversation(departure.fetch()))

        return converse, departure

    def checksum(self) -> Callable[[], int]:
        """For the link's thread: computes the checksum of the present global params, once, because the tensor may change."""
        departure = Departure(self.global_params, self.host)

        @functools.cache
        def compute() -> int:
            checksum = digest(departure.fetch())
            departure.end()
            return checksum

        return compute

    def base(self) -> Tensor:
        """What the next outer gradient is measured from: the present global params, if a landing made them.

        If nothing has landed since the last send (a delay of one round, at its start), local params have gone on from its
        snapshot: measured from there, inner steps do not count twice.
        """
        last = self.in_flight[-1] if self.in_flight else None
        has_gone_on = last and last.is_own and last.global_params is self.global_params
        return last.snapshot if last and has_gone_on else self.global_params

    def measure_own_steps(self, transfer: Transfer) -> None:
        """Let this region's own steps be measured from the snapshot of a transfer without it (`merges.follow`)."""
        # that is the last send with own steps, else the global params, rounded as the model stores its params
        sent = [other.snapshot for other in self.in_flight if other.is_own]
        base = sent[-1] if sent else self.global_params
        transfer.snapshot.copy_(base)
        if self.local.is_rounded:
            for index, (piece, into) in enumerate(
                zip(self.cut(base), self.cut(transfer.snapshot), strict=True)
            ):
                self.local.rounded(piece, index, into)

    def prepare(self, base: Tensor) -> tuple[Tensor, Tensor, float]:
        """A snapshot of the local params, the outer gradient (base - snapshot), and its sum of squares."""
        snapshot, outer_grad = self.take(), self.take()
        pieces = self.local.pieces if self.pool.device == HOST else None
        if pieces is None:
            self.local.gather(snapshot)
        locals_, grads, bases = map(self.cut, (snapshot, outer_grad, base))

        def work(part: range) -> list[float]:
            lengths = []
            for index in part:
                if pieces is not None:
                    copy_all_(self.cuts[index].views(locals_[index]), pieces[index])
                self._subtract(locals_[index], bases[index], index, grads[index])
                lengths.append(float(torch.linalg.vector_norm(grads[index])))
            return lengths

        norms = divide(work, len(self.cuts), self.threads.in_training())
        return snapshot, outer_grad, sum(length**2 for part in norms for length in part)

    def _subtract(self, local: Tensor, base: Tensor, index: int, into: Tensor) -> None:
        """Outer gradient of a piece: base minus local, the base rounded as the model stores its params."""
        # against unrounded fp32, a bf16 model that stands still would seem to move, and idle regions would drift
        if self.local.is_rounded:
            base = self.local.rounded(base, index, into)
        torch.sub(base, local, out=into)

    def step_now(self, transform: OuterTransform, mean: Tensor, info: OuterInfo) -> OuterStep:
        """The outer step of a transfer that lands now: in place, unless a transfer still references the global params."""
        before = self.global_params
        after = self.take() if self._is_held(before) else before
        here = mean if mean.device == before.device else self.take().copy_(mean)
        return OuterStep(transform, here, self.outer, info, after)

    def land(self, transfer: Transfer, mean: Tensor, step: OuterStep, merge: Merge, info: MergeInfo) -> bool:
        """Replace the global params with the result of an outer step, and merge it into the local params; overwrites the mean.

        The step was taken ahead, or is from `step_now` and taken here. Returns whether the local params that the merge reads
        were finite.
        """
        is_ahead = step is transfer.step
        after = self.cut(step.global_params)
        room = mean if is_ahead else step.mean
        pieces = self.local.pieces if self.pool.device == HOST else None
        stand_in = None
        if pieces is None and merge.reads_local:
            stand_in = self.gather()
            pieces = [(piece,) for piece in self.cut(stand_in)]
        finite = Landing(
            self.cuts,
            Flats(pieces, self.cut(transfer.snapshot), self.cut(room)),
            after.__getitem__ if is_ahead else step.move,
            merge,
            info,
            len(self.local.params),
            self.threads.in_training(),
        ).run()
        before, old = self.global_params, tensors_in(self.outer)
        self.global_params, self.outer = step.global_params, step.state
        if stand_in is not None or pieces is None:
            self.local.show(self.global_params if stand_in is None else stand_in)
        kept = {id(tensor) for tensor in (mean, *tensors_in(self.outer))}
        self.pool.give(
            *(each for each in (*old, room, stand_in) if each is not None and id(each) not in kept)
        )
        self._retire(transfer, before)
        return finite

    def drop(self, transfer: Transfer) -> None:
        """Return the memory of a transfer that has ended, is no longer in flight and will not land."""
        self.forget_step(transfer)
        self._retire(transfer)

    def forget_step(self, transfer: Transfer) -> None:
        """Give up the step of a transfer that was taken ahead, if there is one."""
        step, transfer.step = transfer.step, None
        if step is not None:
            self.pool.give(step.global_params, *tensors_in(step.state))

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
        mean = flat_zeros(self.fragment.numel)
        handle = ArrivedHandle(Arrival(Result(mean, lambda: mean, self.codec), (), 0, 0.0, 0.0, ()))
        snapshot, outer_grad = self.take().copy_(self.global_params), self.take().zero_()
        transfer = Transfer(0, snapshot, self.global_params, 0.0, outer_grad)
        transfer.handle = handle
        return transfer

    def _retire(self, transfer: Transfer, *replaced: Tensor) -> None:
        """Return the memory of a transfer, and replaced global params, unless they are still referenced."""
        self.pool.give(transfer.snapshot)
        if transfer.outer_grad is not None:
            self.pool.give(transfer.outer_grad)
        if transfer.departure is not None:
            transfer.departure.end()
        for flat in {id(flat): flat for flat in (transfer.global_params, *replaced)}.values():
            if flat is not self.global_params and not self._is_held(flat):
                self.pool.give(flat)

    def _is_held(self, flat: Tensor) -> bool:
        """Whether a transfer in flight references these global params."""
        return any(transfer.global_params is flat for transfer in self.in_flight)


def adopt(
    fragments: Sequence[Fragment],
    model: nn.Module,
    method: Method,
    link: Link,
    device: torch.device,
    start: bool,
    steps_ahead: bool,
) -> list[FragmentState]:
    """The engine's state of each fragment on `device`; at the `start` of a run, all regions take region 0's parameters."""
    named = dict(model.named_parameters())
    shards = {name: local_shard(named[name]) for fragment in fragments for name in fragment.names}
    longest = max(fragment.numel for fragment in fragments)
    # results of steps ahead stay in use: buffers much longer than the fragment would waste memory for the whole run
    lengths = shared_lengths(fragment.numel for fragment in fragments) if steps_ahead else [longest]
    host = Pool(HOST, lengths, pinned=any(shard.is_cuda for shard in shards.values()))
    pool = host if device == HOST else Pool(device, lengths)
    threads = HostThreads(all(shard.device == HOST for shard in shards.values()))
    adopted = []
    for fragment in fragments:
        flat = torch.zeros(fragment.numel, dtype=torch.float32, pin_memory=host.pinned)
        state = hold(fragment, shards, pool, host, threads, flat)
        if start:
            link.broadcast(flat, f"the first parameters of fragment {fragment.index} from region 0")
            state.local.show(flat)
        state.global_params = flat.to(device)
        state.codec, state.outer = method.codec.init(fragment), method.outer.init(state.global_params)
        state.codec_form = form_of(state.codec)
        adopted.append(state)
    return adopted


def hold(
    fragment: Fragment,
    shards: Mapping[str, Tensor],
    pool: Pool,
    host: Pool,
    threads: HostThreads,
    flat: Tensor,
) -> FragmentState:
    """The state of a fragment whose global params are the present local ones, copied to `flat`; without outer state."""
    params = fragment.views_of(shards)
    # other devices need no pieces: their memory is as fast as the cache of the host
    piece = PIECE if pool.device == HOST else max(fragment.numel, 1)
    pieces = cuts([param.numel() for param in params], piece)
    local = LocalParams(fragment, params, pieces)
    return FragmentState(fragment, pieces, local, local.gather(flat), {}, {}, {}, pool, host, threads)
