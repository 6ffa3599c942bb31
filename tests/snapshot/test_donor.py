"""A base travels to a newcomer, and after it the log."""

from __future__ import annotations

import contextlib
import json
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from hf_cocodc.errors import CheckpointError, DonorLost, LinkError, RunOver
from hf_cocodc.link.log import Entry, Marker, to_plain
from hf_cocodc.link.records import ROW
from hf_cocodc.net.connection import Connection
from hf_cocodc.net.keys import Keys
from hf_cocodc.net.members import Member
from hf_cocodc.snapshot import checkpoint as state
from hf_cocodc.snapshot import donor, folders
from hf_cocodc.snapshot import receive as receiving
from hf_cocodc.snapshot.donor import Donation, Inner, Offer, write_base
from hf_cocodc.snapshot.local_weights import weights_file
from hf_cocodc.snapshot.receive import Base, Donors, receive
from tests.net.ends import ends_on
from tests.net.test_recovery import routed
from tests.secret import secret
from tests.snapshot.test_checkpoints import FACTS
from tests.snapshot.test_take_over import ADAM, same

RUN = 11
PATIENCE_S = 60.0
LARGEST = 1 << 20
OFFER: dict[str, Any] = {"number": 70, "step": 3}
KEYS = Keys.from_secret(secret("a long secret of ours"))
SEALED = [None, KEYS]
SEALED_NAMES = ["open", "sealed"]
STATE = {
    "tensor": torch.arange(5.0),
    "half": torch.ones(3, dtype=torch.bfloat16),
    "layout": [[["weight", [2, 3]]]],
}
STARTED = {"Beginning": [100.0, 0.0, 7.0]}
ENTRY = Entry(
    op=3,
    kind="mean",
    what="fragment 0 sent at step 4",
    members=(0, 2),
    rows=torch.arange(2.0 * ROW, dtype=torch.float64).view(2, ROW),
    values=torch.arange(7.0),
    state={"q": torch.ones(2, 3), "seed": 4, "nested": {}},
    seconds=0.5,
    square=float("inf"),
)
MARKER = Marker(5, 3, 1, 0, (Member(0, 4), Member(2, 9)), (9,))


def streams(keys: Keys | None = None) -> tuple[Connection, Connection]:
    """Both ends of one."""
    one, other = ends_on(socket.socketpair(), (keys, keys))
    return one, other


class Opening:
    """Opens both ends of a stream, once the newcomer wants its own."""

    def __init__(self, keys: Keys | None = None) -> None:
        self._keys, self._ends = keys, queue.SimpleQueue[Connection]()
        self._wanted = threading.Event()

    def of_donor(self, number: int, timeout_s: float, look: Callable[[], object]) -> Connection:
        assert number == OFFER["number"]
        while not self._wanted.wait(0.05):
            look()
        mine, theirs = streams(self._keys)
        self._ends.put(theirs)
        return mine

    def of_newcomer(self, number: int, timeout_s: float, look: Callable[[], object]) -> Connection:
        assert number == OFFER["number"]
        self._wanted.set()
        return self._ends.get(timeout=timeout_s)


STREAMS: dict[int, Opening] = {}
"""By the numbers of the offers."""


class Net(nn.Module):
    """A model with a trained weight, a frozen one, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 3))
        self.frozen = nn.Parameter(torch.full((2,), 3.0), requires_grad=False)
        self.register_buffer("seen", torch.tensor(5.0))


def given(tmp_path: Path, rate: float | None = None, keys: Keys | None = None) -> Donation:
    """By region 0, at step 3."""
    folder = tmp_path / "region-0" / "base"
    inner = Inner({"optimizer.pt": ADAM}, lambda path: (path / "trainer_state.json").write_text("{}"))
    write_base(folder, state.Saved(STATE, FACTS), 0, Net(), inner)
    stream = Opening(keys)
    offer = Offer(OFFER["number"], 3)
    found = Donation(folder, offer, stream.of_donor, {"run": RUN, "started": STARTED}, "region 2", rate)
    STREAMS[found.offer.number] = stream
    return found


def ended(donation: Donation, tmp_path: Path) -> None:
    """It sends nothing more, and has left nothing."""
    donation.close()
    donation.join(10)
    assert donation.over
    assert not (tmp_path / "region-0" / "base").exists()


@pytest.fixture
def donation(tmp_path: Path) -> Iterator[Donation]:
    """Without a secret of the run."""
    found = given(tmp_path)
    yield found
    ended(found, tmp_path)


@pytest.fixture(params=SEALED, ids=SEALED_NAMES)
def sealed(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Donation]:
    """Without a secret of the run, and with one."""
    found = given(tmp_path, None, request.param)
    yield found
    ended(found, tmp_path)


@contextlib.contextmanager
def received(
    donation: Donation, tmp_path: Path, timeout_s: float = PATIENCE_S, offer: Offer | None = None, **how: Any
) -> Iterator[Base]:
    def alive() -> None:
        if donation.over:
            raise DonorLost("it is gone")

    stream = STREAMS[donation.offer.number].of_newcomer
    found = receive(offer or donation.offer, stream, tmp_path / "region-2", 2, 0, alive, timeout_s, **how)
    yield found
    found.close()


def test_a_base_arrives_whole(sealed: Donation, tmp_path: Path) -> None:
    """Its folder is no checkpoint of the run, and says that another region wrote it. The log follows."""
    sealed.log(ENTRY)
    with received(sealed, tmp_path) as base:
        folder = base.received.folder
        assert base.received == (folder, 0, 3, RUN, STARTED)
        assert folders.checkpoints(tmp_path / "region-2") == {}
        saved = state.read(folder)
        assert saved.facts.taken_over
        assert same(saved.state, STATE)
        assert same(torch.load(folder / "optimizer.pt", weights_only=True), ADAM)
        assert set(load_file(folder / weights_file())) == {"frozen", "seen"}
        assert json.loads((folder / "trainer_state.json").read_text()) == {}
        base.remove()
        assert not folder.exists()
        assert same(to_plain(next(base.items)), to_plain(ENTRY))


def test_the_log_comes_after_it(donation: Donation, tmp_path: Path) -> None:
    """Entries with all their bits, in order; it ends when the newcomer is in the run."""
    donation.log(ENTRY)
    with received(donation, tmp_path) as base:
        assert same(to_plain(next(base.items)), to_plain(ENTRY))
        donation.log(MARKER)
        assert next(base.items) == MARKER
        donation.close("in", "it is in the run")
        assert list(base.items) == []


def test_the_end_of_the_run_is_told(donation: Donation, tmp_path: Path) -> None:
    with received(donation, tmp_path) as base:
        donation.close("over", "all steps are made")
        with pytest.raises(RunOver, match="all steps are made"):
            next(base.items)


def test_the_first_reason_to_end_counts(
    donation: Donation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A region leaves a run that is over, before it has sent what is in the log: the newcomer hears that the run is over."""
    has_left = threading.Event()

    def slowly(quiet_s: float) -> Iterator[None]:
        has_left.wait(PATIENCE_S)
        return iter(())

    monkeypatch.setattr(donation.log, "items", slowly)
    with received(donation, tmp_path) as base:
        donation.close("over", "all steps are made")
        donation.close()
        has_left.set()
        with pytest.raises(RunOver, match="all steps are made"):
            next(base.items)


def test_a_donor_that_leaves_is_named(donation: Donation, tmp_path: Path) -> None:
    with received(donation, tmp_path) as base:
        donation.close()
        with pytest.raises(DonorLost, match="region 0 sends its log no more"):
            next(base.items)


def test_a_donor_with_nothing_to_send_gives_heartbeats(
    donation: Donation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A newcomer waits for it for longer than for one that is silent."""
    monkeypatch.setattr(donor, "HEARTBEAT_S", 0.05)
    monkeypatch.setattr(receiving, "HEARTBEAT_S", 0.05)
    monkeypatch.setattr(donor, "_POLL_S", 0.1)
    with received(donation, tmp_path, timeout_s=1.0) as found:
        late = threading.Timer(1.5, donation.log, [MARKER])
        late.start()
        assert next(found.items) == MARKER
        late.join()


def test_a_log_that_grows_too_long_ends(
    donation: Donation, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Both ends say it."""
    large = Entry(**{**vars(ENTRY), "values": torch.zeros(donor._LEAST_LOG_BYTES // 4)})
    assert not donation.log(large)
    with (
        received(donation, tmp_path) as base,
        pytest.raises(DonorLost, match="the log has outgrown its bound"),
    ):
        next(base.items)
    assert "region 2 is so far behind" in caplog.text


def test_a_donor_that_dies_in_the_middle_is_named(
    sealed: Donation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what has come of its base is removed."""

    def die(donation: Donation, to: donor.Frames) -> None:
        to.send("base", run=RUN, started=STARTED, files={"cocodc/state.json": 200})
        to.send_bytes(b"{}" * 50)
        raise OSError("killed")

    monkeypatch.setattr(Donation, "_send", die)
    with (
        pytest.raises(DonorLost, match="region 0 sends its base no more: the other end has closed"),
        received(sealed, tmp_path),
    ):
        pass
    assert not list((tmp_path / "region-2").iterdir())


@pytest.mark.parametrize("keys", SEALED, ids=SEALED_NAMES)
@pytest.mark.parametrize("caller", [0, 1], ids=["the donor calls", "the newcomer calls"])
def test_a_base_survives_broken_connections(caller: int, keys: Keys | None, tmp_path: Path) -> None:
    """It goes on where it was, and so does the log: over a bad network a newcomer need not begin again and again."""
    folder = tmp_path / "region-0" / "base"
    model = Net()
    model.register_buffer("large", torch.randn(700_000))
    write_base(folder, state.Saved(STATE, FACTS), 0, model, Inner({}))
    with routed(caller=caller, keys=keys) as both:
        zero, two = both.wires
        giving = Donation(
            folder,
            Offer(OFFER["number"], 3),
            partial(zero.stream, 1),
            {"run": RUN, "started": STARTED},
            "region 1",
            rate=2e6,
        )
        cutting = threading.Event()

        def cut() -> None:
            while not cutting.wait(0.2):
                both.router.cut()

        thread = threading.Thread(target=cut)
        thread.start()
        try:
            stream = partial(two.stream, 0)
            base = receive(giving.offer, stream, tmp_path / "region-1", 1, 0, lambda: None, PATIENCE_S)
            for _ in range(20):
                giving.log(ENTRY)
            giving.close("in", "it is in the run")
            assert [same(to_plain(item), to_plain(ENTRY)) for item in base.items] == [True] * 20
        finally:
            cutting.set()
            thread.join()
        giving.join(10)
        assert both.router.num_cut > 5, "nothing was cut"
        weights = load_file(base.received.folder / weights_file())
        assert torch.equal(weights["large"], model.large)


def test_a_donor_that_leaves_sends_no_more_of_its_base(tmp_path: Path) -> None:
    """Without the log it is of no use: a region that leaves does not wait until all of it is sent."""
    donation = given(tmp_path, rate=2000.0)
    leaving = threading.Timer(0.5, donation.close)
    leaving.start()
    with (
        pytest.raises(DonorLost, match="region 0 sends its base no more: the other end has closed"),
        received(donation, tmp_path),
    ):
        pass
    leaving.join()
    assert not list((tmp_path / "region-2").iterdir())
    ended(donation, tmp_path)


def test_a_newcomer_that_is_frozen_keeps_nobody(
    donation: Donation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the log grows, it may take nothing: it is busy. Once the log has ended, the donor does not wait for it."""
    monkeypatch.setattr(donor, "_POLL_S", 0.05)
    monkeypatch.setattr(donor, "_TAKEN_WITHIN_S", 0.3)
    with received(donation, tmp_path) as base:
        large = Entry(**{**vars(ENTRY), "values": torch.zeros(donor._LEAST_LOG_BYTES // 4 - 1000)})
        assert donation.log(large)
        donation.join(1.0)
        assert not donation.over
        while donation.log(large):
            pass
        donation.join(10.0)
        assert donation.over and donation.log.overflowed
        # on a busy machine, it looks after the donor before it has read what came
        with pytest.raises(DonorLost, match="region 0 sends its log no more|it is gone"):
            next(base.items)


def test_a_newcomer_that_is_not_reached_is_told(donation: Donation, tmp_path: Path) -> None:
    """And one whose donor is gone meanwhile."""

    def fails(number: int, timeout_s: float, look: Callable[[], object]) -> Connection:
        raise LinkError("region 0 has not called region 2 within 20 s.")

    with pytest.raises(DonorLost, match="offered a base, and is not reached: region 0 has not called"):
        receive(donation.offer, fails, tmp_path / "region-2", *REST)

    def gone() -> None:
        raise DonorLost("it is lost")

    def looks(number: int, timeout_s: float, look: Callable[[], object]) -> Connection:
        look()
        raise AssertionError

    with pytest.raises(DonorLost, match="^it is lost$"):
        receive(donation.offer, looks, tmp_path / "region-2", 2, 0, gone, PATIENCE_S)


REST: tuple[Any, ...] = (2, 0, lambda: None, PATIENCE_S)
"""The last arguments of `receive`."""


def served(messages: list[bytes], is_silent: bool = False) -> tuple[Offer, donor.OpenStream]:
    """The offer of a donor that says these messages, and no more; it ends the stream, or `is_silent`."""
    theirs, ours = streams()

    def say() -> None:
        end = donor.Frames(ours)
        with contextlib.suppress(LinkError):
            for message in messages:
                end._send(message)
            if not is_silent:
                end.drain(PATIENCE_S)
                end.close()

    threading.Thread(target=say, name="hf_cocodc-test-donor", daemon=True).start()
    return Offer(**OFFER), lambda *arguments: theirs


def test_an_offer_has_numbers() -> None:
    assert donor.offered(OFFER) == Offer(**OFFER)
    wrong: list[dict[str, Any]] = [{"number": 64}, {"number": 256}, {"number": "70"}]
    wrong += [{"step": -1}, {"step": 1 << 60}]
    for each in wrong:
        with pytest.raises(ValueError, match="."):
            donor.offered({**OFFER, **each})


class Post:
    """The coordinator between a newcomer and the members 0 and 1, which answer at once."""

    def __init__(self, **answers: dict[str, Any]) -> None:
        self.donors = Donors(2, self.post, self.is_there, self.stream)
        self.answers, self.posted = answers, list[tuple[Member, str]]()
        self.there = {ZERO, ONE}

    def post(self, member: Member, topic: str) -> None:
        self.posted.append((member, topic))
        for each, content in self.answers.items():
            self.donors.hear(ZERO, each, content)

    def is_there(self, member: Member) -> bool:
        return member in self.there

    def stream(self, member: Member, *arguments: Any) -> Connection:
        assert member == ZERO
        return STREAMS[self.answers["offer"]["number"]].of_newcomer(*arguments)

    def base_of(self, member: Member, tmp_path: Path) -> Base:
        return self.donors.base_of(member, tmp_path / "region-2", stuck_timeout_s=0.3, timeout_s=PATIENCE_S)


ZERO, ONE = Member(0, 4), Member(1, 9)


def test_a_newcomer_asks_a_member(donation: Donation, tmp_path: Path) -> None:
    post = Post(offer=donation.offer._asdict(), other={})
    base = post.base_of(ZERO, tmp_path)
    assert base.received[1:4] == (0, 3, RUN) and post.posted == [(ZERO, "base")]
    base.close()


def test_a_member_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What travels while the coordinator is away is lost."""
    monkeypatch.setattr(receiving, "_AGAIN_S", 0.1)
    post = Post()
    with pytest.raises(DonorLost, match="has offered no base"):
        post.base_of(ZERO, tmp_path)
    assert len(post.posted) > 1


def test_a_member_that_gives_no_base_is_named(tmp_path: Path) -> None:
    """It says why, offers what is none, is lost, or is silent. What another member says is no answer of it."""
    for answer, why in (
        ({"no_base": {"why": "it leaves"}}, "it leaves"),
        ({"offer": {**OFFER, "number": 3}}, "what is no base"),
        ({"offer": {}}, "what is no base"),
        ({}, "region 0 has offered no base for 0.3 s"),
    ):
        with pytest.raises(DonorLost, match=why):
            Post(**answer).base_of(ZERO, tmp_path)
    with pytest.raises(DonorLost, match="region 1 has offered no base"):
        Post(offer=OFFER).base_of(ONE, tmp_path)
    lost = Post()
    lost.there = {ONE}
    with pytest.raises(DonorLost, match="region 0 is lost"):
        lost.base_of(ZERO, tmp_path)


NAMES = ["../evil.json", "/tmp/evil.json", "optimizer.pkl", "cocodc/COMPLETE", "rng_state.pth"]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_no_base_has_is_refused(name: str, tmp_path: Path) -> None:
    """Nothing is written."""
    line = json.dumps({"kind": "base", "run": RUN, "started": STARTED, "files": {name: 1}}).encode()
    with pytest.raises(CheckpointError, match="which no checkpoint has: it is not written"):
        receive(*served([line]), tmp_path / "region-2", *REST)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize(
    "about", [{}, {"run": RUN}, {"run": -1, "started": {}}, {"run": RUN, "started": [1]}]
)
def test_a_base_without_its_run_is_refused(about: dict[str, Any], tmp_path: Path) -> None:
    line = json.dumps({"kind": "base", "files": {}, **about}).encode()
    with pytest.raises(CheckpointError, match="the base that another region sent is not whole"):
        receive(*served([line]), tmp_path / "region-2", *REST)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def files(**sizes: Any) -> bytes:
    named = {f"cocodc/{name}.json": size for name, size in sizes.items()}
    return json.dumps({"kind": "base", "run": RUN, "files": named}).encode()


BROKEN = {
    "a file that has changed": [files(state=2), b"{}", b'{"kind": "sha256", "value": "0"}'],
    "half a file": [files(state=200), b"{}"],
    "more than the file": [files(state=1), b"{}"],
    "a size that is none": [files(state=-1)],
    "a size that no file has": [files(state=1 << 70)],
    "a size that is no number": [files(state=True)],
    "no list": [b'{"kind": "base"}'],
    "no JSON": [b"GET / HTTP/1.1\n"],
    "too long a message": [b"x" * (donor._LONGEST + 10)],
}


@pytest.mark.parametrize("lines", BROKEN.values(), ids=BROKEN)
def test_what_is_no_base_is_refused(lines: list[bytes], tmp_path: Path) -> None:
    """And no folder looks like one."""
    with pytest.raises(DonorLost):
        receive(*served(lines), tmp_path / "region-2", *REST)
    assert not [path for path in (tmp_path / "region-2").glob("*") if path.name.endswith(".base")]


def test_a_donor_that_falls_silent_in_the_middle_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though its process lives."""
    monkeypatch.setattr(donor, "_POLL_S", 0.05)
    monkeypatch.setattr(receiving, "HEARTBEAT_S", 0.02)
    offer = served([files(state=200), b"{}"], is_silent=True)
    with pytest.raises(
        DonorLost, match="region 0 sends its base no more: the other end has sent nothing for"
    ):
        receive(*offer, tmp_path / "region-2", 2, 0, lambda: None, 0.2)


def test_a_base_that_is_larger_than_the_model_is_refused(tmp_path: Path) -> None:
    """Before anything is written: one file, or many."""
    for sizes in ({"state": LARGEST + 1}, {f"state-lane{i}": 1 << 18 for i in range(5)}, {"state": 1 << 49}):
        rule = rf"{sum(sizes.values())} bytes, more than the {LARGEST} .* resume them together"
        with pytest.raises(DonorLost, match=rule):
            receive(*served([files(**sizes)]), tmp_path / "region-2", *REST, most=LARGEST)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_the_log_brings_no_more_at_once_than_the_base_allows(
    donation: Donation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An item is at most twice as large as the base, and some."""
    monkeypatch.setattr(receiving, "_ITEM_MARGIN", 0)
    donation.log(ENTRY)
    with received(donation, tmp_path) as found:
        assert next(found.items)
        donation.log(Entry(**{**vars(ENTRY), "values": torch.zeros(1 << 16)}))
        with pytest.raises(DonorLost, match="bytes, more than"):
            next(found.items)


DEEP: list = []
for _ in range(100):
    DEEP = [DEEP]
ITEMS: dict[str, Any] = {
    "a negative length": {"tree": {}, "tensors": {"x": ["float32", [-1]]}},
    "more bytes than may come": {"tree": {}, "tensors": {"x": ["float32", [1 << 60]]}},
    "an unknown type": {"tree": {}, "tensors": {"x": ["complex64", [1]]}},
    "a tensor that is not there": {"tree": {"a": {"$tensor": "x"}}, "tensors": {}},
    "no tensors": {"tree": {}},
    "a length that no tensor has": {"tree": {}, "tensors": {"x": ["float32", [0, 1 << 70]]}},
    "too many dimensions": {"tree": {}, "tensors": {"x": ["float32", [1] * 100]}},
    "a length that is no number": {"tree": {}, "tensors": {"x": ["float32", [True]]}},
    "a tree that is too deep": {"tree": DEEP, "tensors": {}},
    "a tensor without a name": {"tree": {"$tensor": []}, "tensors": {}},
    "too many tensors": {"tree": {}, "tensors": {str(i): ["float32", [0]] for i in range(200_000)}},
}


@pytest.mark.parametrize("line", ITEMS.values(), ids=ITEMS)
def test_what_is_no_value_is_refused(line: dict[str, Any]) -> None:
    one, other = streams()
    with pytest.raises(LinkError, match="what is no value of ours"):
        donor.Frames(one).receive_tree(line, 1 << 20)
    for each in (one, other):
        each.close()


def test_a_rate_is_kept() -> None:
    """What is sent waits for the bytes before it."""
    one, other = streams()
    end, there = donor.Frames(one, rate=10_000.0), donor.Frames(other)
    began = time.monotonic()
    end.send_bytes(bytes(6000))
    assert b"".join(there.receive_bytes(6000)) == bytes(6000)
    assert time.monotonic() - began > 0.45
    for each in (end, there):
        each.close()
