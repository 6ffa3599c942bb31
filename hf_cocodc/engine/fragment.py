"""What the engine keeps of one fragment, and what a send and a landing do to it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..links.base import Arrival, Link
from ..methods import Method
from ..parts.codecs.base import Codec, Conversation, Result, State
from ..parts.fragments import Fragment
from ..parts.info import SyncInfo
from ..parts.merges import Merge
from ..parts.outer import Step
from ..tensors.departures import Departure
from ..tensors.flat import copy_all_, digest, flat_zeros, is_finite
from ..tensors.pieces import PIECE, Cut, cuts, in_this_thread
from ..tensors.pools import HOST, Pool
from ..tensors.sharding import local_shard
from .compatibility import same_structure
from .landing import Landing
from .transfer import KEPT_OF_A_TRANSFER, Here, Transfer


@dataclass
class FragmentState:
    """What the engine keeps of one fragment; `params` are this rank's own tensors, written in place.

    What is done to every value at a send or a landing is done on the device where the outer state is kept; on the host
    piece by piece, so that memory is read and written once. `land` never writes to `global_params` that a transfer holds
    on to.

    Attributes:
        buffers: memory on that device.
        host: memory for what the link reads.
    """

    fragment: Fragment
    params: list[Tensor]
    global_params: Tensor
    outer: State
    codec: State
    codec_remembers: bool
    buffers: Pool
    host: Pool
    in_flight: list[Transfer] = field(default_factory=list)
    num_sends: int = 0
    settled_at: int = 0
    """Inner step up to which local steps have entered the global params (or were thrown away by a merge)."""
    sent_at: int = 0
    """Inner step of the last send."""
    lr_sum: float = 0.0
    """Sum of learning rates at the last send."""

    def __post_init__(self) -> None:
        self._on_host = self.buffers.device == HOST
        # another device has no use for pieces: its memory is as fast as its cache is here
        piece = PIECE if self._on_host else max(self.fragment.numel, 1)
        self._cuts = cuts([param.numel() for param in self.params], piece)
        self._lengths = [sum(cut.sizes) for cut in self._cuts]
        self._stored_rounded = any(param.dtype != torch.float32 for param in self.params)
        in_place = self._on_host and all(p.device == HOST and p.is_contiguous() for p in self.params)
        self._own = self._own_pieces() if in_place else None
        """The parameters themselves, piece by piece, where they can be read and written as they are."""

    def take(self) -> Tensor:
        """A buffer of the fragment's length with anything in it."""
        return self.buffers.take(self.fragment.numel)

    def retire(self, transfer: Transfer) -> None:
        """Take back the buffers of a transfer that has landed."""
        self.buffers.give(transfer.snapshot, transfer.outer_grad)
        if transfer.departure is not None:
            transfer.departure.end()
        if not self._is_held(transfer.global_params) and transfer.global_params is not self.global_params:
            self.buffers.give(transfer.global_params)

    def converse(self, codec: Codec, flat: Tensor, state: State) -> tuple[Conversation, Departure]:
        """A codec's conversation about a flat tensor of this fragment, and how that leaves the device where it lies."""
        departure = Departure(flat, self.host)

        def conversation() -> Conversation:
            return (yield from codec.converse(departure.fetch(), self.fragment, state))

        return conversation(), departure

    def checksum(self) -> Callable[[], int]:
        """What finds the checksum of the global params as they are now, for the link's thread: it takes time."""
        departure = Departure(self.global_params, self.host)

        def find() -> int:
            found = digest(departure.fetch())
            departure.end()
            return found

        return find

    def cut(self, flat: Tensor) -> Sequence[Tensor]:
        """A flat tensor of this fragment, piece by piece."""
        return flat.split_with_sizes(self._lengths)

    def gather(self) -> Tensor:
        """The local params as one flat buffer of their own."""
        return gather(self.fragment, self.params, self.take())

    def show(self, flat: Tensor) -> None:
        """Make a flat tensor the local params."""
        scatter(flat, self.fragment, self.params)

    def prepare(self) -> tuple[Tensor, Tensor, bool]:
        """For a send: a snapshot of the local params, the outer gradient, and whether that is finite.

        The outer gradient is global minus local, the global params rounded as the model stores them. Against unrounded
        fp32 a bf16 model that does not move would seem to, and idle regions would drift.
        """
        snapshot, outer_grad = self.take(), self.take()
        if self._own is None:
            gather(self.fragment, self.params, snapshot)
        finite = True
        pieces = zip(*map(self.cut, (snapshot, outer_grad, self.global_params)), strict=True)
        with in_this_thread():
            for index, (local, grad, shown) in enumerate(pieces):
                if self._own is not None:
                    copy_all_(self._cuts[index].views(local), self._own[index])
                if self._stored_rounded:
                    shown = self._rounded(shown, self._cuts[index], grad)
                torch.sub(shown, local, out=grad)
                finite = finite and is_finite(grad)
        return snapshot, outer_grad, finite

    def land(self, mean: Tensor, step: Step, merge: Merge, snapshot: Tensor, info: SyncInfo) -> bool:
        """Let the outer step move the global params, and the merge the local ones; overwrites `mean`.

        Returns:
            Whether the local params were finite, as far as the merge reads them.
        """
        before, after = self.global_params, self.global_params
        if self._is_held(before):
            after = self.take()
        local, stand_in = self._own, None
        if self._own is None and merge.reads_local:  # params that cannot be written piece by piece
            stand_in = self.gather()
            local = [(piece,) for piece in self.cut(stand_in)]
        grad = mean if mean.device == before.device else self.take().copy_(mean)
        finite = Landing(
            self._cuts,
            local,
            before=before,
            after=after,
            grad=grad,
            step=step,
            merge=merge,
            snapshot=snapshot,
            info=info,
            num_params=len(self.params),
        ).run()
        self.global_params = after
        if self._own is None:
            self.show(after if stand_in is None else stand_in)
        self.buffers.give(*(each for each in (stand_in, grad) if each is not None and each is not mean))
        return finite

    def _is_held(self, flat: Tensor) -> bool:
        """Whether a transfer in flight holds on to these global params."""
        return any(transfer.global_params is flat for transfer in self.in_flight)

    def _rounded(self, piece: Tensor, cut: Cut, into: Tensor) -> Tensor:
        """A piece of the global params as the model stores them."""
        parts = zip(cut.views(piece), cut.params, strict=True)
        copy_all_(cut.views(into), [part.to(self.params[param].dtype) for part, param in parts])
        return into

    def _own_pieces(self) -> list[Sequence[Tensor]]:
        rest = [param.view(-1) for param in self.params]
        found: list[Sequence[Tensor]] = []
        for cut in self._cuts:
            found.append([rest[param][:size] for param, size in zip(cut.params, cut.sizes, strict=True)])
            for param, size in zip(cut.params, cut.sizes, strict=True):
                rest[param] = rest[param][size:]
        return found

    def nothing_sent(self) -> Transfer:
        """The transfer of step 0, which is never sent: local and global params are equal, so its mean is zero."""
        mean = flat_zeros(self.fragment.numel)
        handle = Here(Arrival(Result(mean, lambda: mean, self.codec), (), 0, 0.0, 0.0))
        snapshot, outer_grad = self.take().copy_(self.global_params), self.take().zero_()
        return Transfer(0, snapshot, outer_grad, self.global_params, 0.0, handle)

    def state_dict(self) -> State:
        """Everything but the local params, which are the model's; waits for what is in flight."""
        kept = {name: getattr(self, name) for name in _KEPT_OF_A_FRAGMENT}
        return kept | {"in_flight": [transfer.state_dict() for transfer in self.in_flight]}

    def load_state_dict(self, state: State) -> None:
        """Take over what `state_dict` gave; what is in flight, of steps that are taken back, is waited for and given up.

        Raises:
            CheckpointError: it belongs to another outer optimizer or codec.
        """
        index = self.fragment.index
        for part in ("outer", "codec", "global_params"):
            same_structure(state[part], getattr(self, part), f"the {part} state of fragment {index}")
        moved: dict[int, Tensor] = {}  # what is shared stays so

        def here(value: Any) -> Any:
            if isinstance(value, dict):
                return {key: here(each) for key, each in value.items()}
            if not isinstance(value, Tensor):
                return value
            if id(value) not in moved:
                moved[id(value)] = value.to(self.buffers.device)
            return moved[id(value)]

        while self.in_flight:
            transfer = self.in_flight.pop()
            transfer.handle.wait()
            self.retire(transfer)
        for name in _KEPT_OF_A_FRAGMENT:
            setattr(self, name, state[name] if name == "codec" else here(state[name]))
        for saved in state["in_flight"]:
            kept = {name: here(saved[name]) for name in (*KEPT_OF_A_TRANSFER, "mean")}
            self.in_flight.append(Transfer.from_state({**saved, **kept}))


_KEPT_OF_A_FRAGMENT = (
    *("global_params", "outer", "codec"),
    *("num_sends", "settled_at", "sent_at", "lr_sum"),
)


def adopt(
    fragments: Sequence[Fragment],
    model: nn.Module,
    method: Method,
    link: Link,
    device: torch.device,
    start: bool,
) -> list[FragmentState]:
    """The fragments as training begins, with outer state on `device`; at the start of a run with region 0's parameters."""
    named = dict(model.named_parameters())
    longest = max(fragment.numel for fragment in fragments)
    host = Pool(longest, pinned=any(local_shard(param).is_cuda for param in named.values()))
    buffers = host if device == HOST else Pool(longest, device)
    adopted = []
    for fragment in fragments:
        params = [local_shard(named[name]) for name in fragment.names]
        flat = gather(fragment, params, flat_zeros(fragment.numel))
        if start:
            link.broadcast(flat, f"the first parameters of fragment {fragment.index} from region 0")
            scatter(flat, fragment, params)
        flat = flat.to(device)
        codec = method.codec.init(fragment)
        outer = method.outer.init(flat)
        adopted.append(FragmentState(fragment, params, flat, outer, codec, bool(codec), buffers, host))
    return adopted


def gather(fragment: Fragment, params: Sequence[Tensor], into: Tensor) -> Tensor:
    """Parameters in the flat buffer `into`; from device to device in one transfer, not in one a parameter."""
    device = params[0].device
    flat = into if device == into.device else torch.empty_like(into, device=device)
    copy_all_(fragment.views(flat), params)
    return into if flat is into else into.copy_(flat)


def scatter(flat: Tensor, fragment: Fragment, params: Sequence[Tensor]) -> None:
    """Write a flat buffer into the parameters; to a device in one transfer."""
    copy_all_(params, fragment.views(flat.to(params[0].device)))


@dataclass
class Totals:
    """Counters of a run on this rank."""

    sends: int = 0
    landings: int = 0
    bytes_sent: int = 0
    blocked_s: float = 0.0
