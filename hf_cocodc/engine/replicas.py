"""The engine of a region whose ranks hold the same parameters (DDP): the leader alone has one, and hands out what it writes.

The other ranks have neither global params nor outer state. All ranks count inner steps, and know before which one nothing
happens; until then none says anything. At a step with events the others wait while the leader holds them. Then it tells what
all must know, and the local params that were written go out in buckets, in their own type, over the region's process group.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from ..link.base import Link
from ..link.ranks import SharedLink
from ..link.records import NOTHING_TO_SAY, Word, Words, in_order
from ..methods import Method
from ..parts.deal import Portion
from ..parts.tensors.flat import contents, copy_all_, local_shard
from .account import Totals
from .footprint import Memory
from .fragment import FragmentFacts
from .local_params import Watch, local_kept
from .saved import laid_out
from .synchronizer import Synchronizer

T = TypeVar("T")

BUCKET = 64_000_000
"""Bytes that one broadcast has at most."""


class _Told(NamedTuple):
    """What the leader tells of its engine (JSON). `written`: fragments; `mended`: other tensors; `layout`: None as before."""

    inner_step: int
    next_event: int
    portion: list[int]
    num_params: int
    totals: dict[str, Any]
    report: dict[str, float]
    facts: list[list[Any]]
    layout: list[list[Any]] | None
    written: list[int]
    mended: list[str]


class Replicas:
    """What all ranks of the region use as their `Synchronizer`, whose methods these are; calls are collective, except where it
    is said. The constructor is one, too.

    Args:
        build: makes the engine on the leader, over the leader's own link.
        rest: where local params are kept while the model shows the global weights.
    """

    def __init__(
        self,
        build: Callable[[Link], Synchronizer],
        model: nn.Module,
        method: Method,
        link: SharedLink,
        rest: torch.device,
    ) -> None:
        self.method, self.link = method, link
        self._model, self._build, self._rest = model, build, rest
        self._engine: Synchronizer | None = None
        self.layout: list[list[Any]] = []
        self._lead(lambda engine: None, "the beginning of training")

    def memory(self) -> dict[torch.device, Memory]:
        """Of this rank: nothing if it has no engine."""
        return {} if self._engine is None else self._engine.memory()

    def step(
        self,
        inner_lr: float = 0.0,
        word: Word = NOTHING_TO_SAY,
        *,
        trained: bool = True,
        tokens: int | None = None,
    ) -> Words | None:
        def step(engine: Synchronizer) -> Words | None:
            return engine.step(inner_lr, word, trained=trained, tokens=tokens)

        self.inner_step += 1
        if self.inner_step >= self.next_event:
            return self._lead_words(step, f"the events of step {self.inner_step}")
        if self._engine is None:
            self._watch.notice()
        else:
            step(self._engine)
        return None

    def finish(self, word: Word = NOTHING_TO_SAY) -> Words | None:
        self.next_event = 0  # if this fails, all ranks ask the leader at the next step
        return self._lead_words(lambda engine: engine.finish(word), "the end of the run")

    @contextmanager
    def global_weights(self, averaged: bool = True, everywhere: bool = True) -> Iterator[None]:
        """If not `everywhere`, only the leader shows them, as is enough to save a model: no rank needs another for it."""
        with ExitStack() as block:

            def show(engine: Synchronizer) -> None:
                block.enter_context(engine.global_weights(averaged))

            if everywhere:
                if self._engine is None:
                    params = self._params(range(len(self.layout)))
                    block.enter_context(local_kept(self._model, params, self._rest))
                self._lead(show, "the global weights")
            elif self._engine is not None:
                show(self._engine)
                self._engine.take_written()  # the block's end takes it back
            yield

    def show_saved(self, state: dict[str, Any]) -> None:
        self._lead(lambda engine: engine.show_saved(state), "the saved weights")

    def global_digest(self) -> int:
        """The leader's."""
        self._lead(Synchronizer.global_digest, "a checksum", lambda found: found)
        return self._said

    def whole(self, what: str) -> AbstractContextManager[None]:
        """Not collective."""
        self.next_event = 0  # as in `finish`
        return nullcontext() if self._engine is None else self._engine.whole(what)

    def give_up_unsent(self) -> None:
        """Not collective."""
        if self._engine is not None:
            self._engine.give_up_unsent()

    def forgive(self, rounds: int) -> None:
        """Not collective."""
        if self._engine is not None:
            self._engine.forgive(rounds)

    def as_leader(self, value: bool) -> bool:
        self._lead(lambda engine: value, "a decision", lambda found: found)
        return self._said

    def wait_for_transfers(self) -> None:
        self._lead(Synchronizer.wait_for_transfers, "the transfers in flight")

    def begin_anew(self) -> None:
        self._lead(Synchronizer.begin_anew, "a fresh start")

    def state_dict(self) -> dict[str, Any]:
        """The leader's; empty on other ranks."""
        return self._lead(Synchronizer.state_dict, "what is saved") or {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._lead(lambda engine: engine.load_state_dict(state), "what was saved")

    def take_over(self, own: Totals | None = None) -> None:
        self._lead(lambda engine: engine.take_over(own), "another region's state")

    def catch_up(self, state: dict[str, Any], keep: bool) -> None:
        self._lead(lambda engine: engine.catch_up(state, keep), "another region's state")

    def _lead_words(self, call: Callable[[Synchronizer], Words | None], what: str) -> Words | None:
        """The words that `call` returns on the leader, in all ranks."""
        self._lead(call, what, lambda words: words and [[region, *word] for region, word in words.items()])
        if self._said is None:
            return None
        return {region: in_order(Word, numbers) for region, *numbers in self._said}

    def _lead(
        self, call: Callable[[Synchronizer], T], what: str, say: Callable[[T], Any] = lambda result: None
    ) -> T | None:
        """Let the leader call its engine, and bring to all ranks what it has written; returns None on the others. `say`: what
        all ranks hear of the result, as `_said` (JSON).
        """

        def lead(link: Link) -> T:
            if self._engine is None:
                self._engine = self._build(link)
            return call(self._engine)

        result = self.link.lead(lead, what, lambda result: [self._tell(), say(result)])
        told, self._said = self.link.heard
        if self._engine is None:
            self._hear(_Told(*told))
        else:
            with self._engine.held():
                self._hear(_Told(*told))
        return result

    def _tell(self) -> _Told:
        engine = self._engine
        assert engine is not None
        layout = engine.layout
        written, mended = engine.take_written()
        return _Told(
            inner_step=engine.inner_step,
            next_event=engine.next_event,
            portion=list(engine.portion),
            num_params=engine.num_params,
            totals=asdict(engine.totals),
            report=engine.report,
            facts=list(map(list, engine.facts)),
            layout=None if layout == self.layout else layout,
            written=written,
            mended=mended,
        )

    @torch.no_grad()
    def _hear(self, told: _Told) -> None:
        """Know what the leader has told, and have what it has written."""
        self.inner_step, self.next_event, self.num_params = told.inner_step, told.next_event, told.num_params
        self.portion = Portion(*told.portion)
        self.facts = tuple(FragmentFacts(*each) for each in told.facts)
        self.totals, self.report = Totals(**told.totals), told.report
        if self._engine is not None:  # which go on between its events
            self.totals, self.report = self._engine.totals, self._engine.report
        if told.layout is not None:
            self.layout = told.layout
            self._fragments = laid_out(told.layout)
            if self._engine is None:
                self._watch = Watch(self._model, self._fragments)
        others = contents(self._model) if told.mended else {}
        hand_out([*self._params(told.written), *(others[name].detach() for name in told.mended)], self.link)

    def _params(self, fragments: Sequence[int]) -> list[Tensor]:
        """This rank's local params of these fragments, as they lie in the model now."""
        shards = {name: local_shard(param) for name, param in self._model.named_parameters()}
        return [view for index in fragments for view in self._fragments[index].views_of(shards)]


Engine = Synchronizer | Replicas
"""What a rank trains with."""


def hand_out(tensors: Sequence[Tensor], link: SharedLink) -> None:
    """Overwrite tensors with the leader's values, in all ranks of the region."""
    for bucket in buckets(tensors):
        sizes = [part.numel() for part in bucket]
        if link.is_leader:
            flat = torch.cat([part.reshape(-1).to(link.device) for part in bucket])
        else:
            flat = torch.empty(sum(sizes), dtype=bucket[0].dtype, device=link.device)
        link.share(flat.view(torch.uint8))  # a process group need not know the type
        if not link.is_leader:
            values = zip(flat.split(sizes), bucket, strict=True)
            copy_all_(bucket, [each.view(part.shape) for each, part in values])


def buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Parts of tensors, in lists of one type and of at most `BUCKET` bytes; together they are all of their values."""
    by_type: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_type.setdefault(tensor.dtype, []).extend(_parts(tensor))
    for parts in by_type.values():
        bucket: list[Tensor] = []
        room = BUCKET
        for part in parts:
            if part.nbytes > room:
                yield bucket
                bucket, room = [], BUCKET
            bucket.append(part)
            room -= part.nbytes
        if bucket:
            yield bucket


def _parts(tensor: Tensor) -> list[Tensor]:
    """Views of a tensor, however it is strided, of at most `BUCKET` bytes each."""
    if tensor.nbytes <= BUCKET:
        return [tensor] if tensor.numel() else []
    longest = max(range(tensor.dim()), key=tensor.size)
    return [part for half in tensor.chunk(2, longest) for part in _parts(half)]
