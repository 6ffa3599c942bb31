"""A base travels to a newcomer, and after it the log."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from hf_cocodc.errors import CheckpointError, DonorLost
from hf_cocodc.links.log import Entry, Marker, to_plain
from hf_cocodc.links.records import ROW
from hf_cocodc.meeting.caller import Member
from hf_cocodc.meeting.channel import line_of
from hf_cocodc.meeting.cipher import Tagged
from hf_cocodc.meeting.proof import Proof
from hf_cocodc.meeting.secret import Keys
from hf_cocodc.run import base, donor, frames, greeting
from hf_cocodc.run import checkpoint as state
from hf_cocodc.run.base import Base, RunOver, receive
from hf_cocodc.run.donor import Donation, Inner, write_base
from hf_cocodc.run.local_weights import weights_file
from tests.run.test_checkpoints import FACTS
from tests.run.test_take_over import ADAM, same

RUN = 11
HOST = "127.0.0.1"
PATIENCE_S = 60.0
LARGEST = 1 << 20
OFFER = {"host": HOST, "port": 40, "secret": "s", "step": 3}
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
    epoch=1,
    members=(0, 2),
    rows=torch.arange(2.0 * ROW, dtype=torch.float64).view(2, ROW),
    values=torch.arange(7.0),
    state={"q": torch.ones(2, 3), "seed": 4, "nested": {}},
    seconds=0.5,
    square=float("inf"),
)
MARKER = Marker(5, 3, 1, 0, (Member(0, 4), Member(2, 9)), (9,))


class Net(nn.Module):
    """A model with a trained weight, a frozen one, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 3))
        self.frozen = nn.Parameter(torch.full((2,), 3.0), requires_grad=False)
        self.register_buffer("seen", torch.tensor(5.0))


@pytest.fixture
def donation(tmp_path: Path) -> Iterator[Donation]:
    """Of region 0, at step 3."""
    folder = tmp_path / "region-0" / "base"
    inner = Inner({"optimizer.pt": ADAM}, lambda path: (path / "trainer_state.json").write_text("{}"))
    write_base(folder, state.Saved(STATE, FACTS), 0, Net(), inner, STARTED)
    given = Donation(folder, HOST, 3, {"run": RUN}, "region 2", None)
    yield given
    given.close()
    given.join(10)
    assert given.over
    assert not folder.exists()


@contextlib.contextmanager
def received(
    donation: Donation, tmp_path: Path, timeout_s: float = PATIENCE_S, **changed: Any
) -> Iterator[Base]:
    def alive() -> None:
        if not [thread for thread in threading.enumerate() if thread.name == "hf_cocodc-donor"]:
            raise DonorLost("it is gone")

    found = receive(donation.offer._replace(**changed), tmp_path / "region-2", 2, 0, alive, timeout_s)
    yield found
    found.close()


def test_a_base_arrives_whole(donation: Donation, tmp_path: Path) -> None:
    """Its folder is no checkpoint of the run; it is whole, and says that another region wrote it."""
    with received(donation, tmp_path) as base:
        folder = base.received.folder
        assert base.received == (folder, 0, 3, RUN, STARTED)
        assert state.damage(folder) is None
        assert state.checkpoints(tmp_path / "region-2") == {}
        saved = state.read(folder)
        assert saved.facts.taken_over
        assert same(saved.state, STATE)
        assert same(torch.load(folder / "optimizer.pt", weights_only=True), ADAM)
        assert set(load_file(folder / weights_file())) == {"frozen", "seen"}
        assert json.loads((folder / "trainer_state.json").read_text()) == {}
        base.remove()
        assert not folder.exists()


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


def test_a_donor_with_nothing_to_send_gives_signs_of_life(
    donation: Donation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A newcomer waits for it for longer than for one that is silent."""
    monkeypatch.setattr(donor, "SIGN_S", 0.05)
    monkeypatch.setattr(base, "SIGN_S", 0.05)
    monkeypatch.setattr(frames, "_POLL_S", 0.1)
    with received(donation, tmp_path, timeout_s=0.3) as found:
        late = threading.Timer(0.8, donation.log, [MARKER])
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


def test_only_who_knows_the_secret_gets_the_base(donation: Donation, tmp_path: Path) -> None:
    """And somebody else does not keep the newcomer from it."""
    with (
        pytest.raises(DonorLost, match="the other end has closed the connection"),
        received(donation, tmp_path, secret="guess"),
    ):
        pass
    with received(donation, tmp_path) as base:
        assert base.received.run == RUN


def test_callers_that_say_nothing_do_not_delay_the_newcomer(
    donation: Donation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More of them than may wait, garbage, and a line without an end. Nothing here ends by itself."""
    monkeypatch.setattr(greeting, "GREET_S", float("inf"))
    monkeypatch.setattr(donor, "_CALLED_WITHIN_S", 10.0)
    with contextlib.ExitStack() as kept:
        for says in [b""] * greeting.MOST + [
            b"{}\n",
            b"[" * 4000 + b"\n",
            b"\xff\n",
            b"x" * 9000,
            b'"s"\n',
            b"{",
        ]:
            stranger = kept.enter_context(socket.create_connection((HOST, donation.offer.port)))
            with contextlib.suppress(OSError):
                stranger.sendall(says)
        with received(donation, tmp_path) as base:
            assert base.received.run == RUN


KEYS = Keys.from_secret("a long secret of ours")


def test_callers_that_say_nothing_end_no_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many come between two messages of it."""
    monkeypatch.setattr(greeting, "GREET_S", float("inf"))
    with socket.create_server((HOST, 0)) as listener, contextlib.ExitStack() as kept:

        def caller() -> socket.socket:
            return kept.enter_context(socket.create_connection(listener.getsockname(), timeout=10.0))

        def find() -> None:
            until = time.monotonic() + 10.0
            about = listener, "", lambda: time.monotonic() < until
            found.append(greeting.who_knows(*about, lambda: Proof(KEYS, {"for": "base"})))

        found: list[Any] = []
        finding = threading.Thread(target=find)
        finding.start()
        proof, newcomer = Proof(KEYS, {"for": "base"}), caller()
        newcomer.sendall(line_of(proof.say({})))
        proof.hear(json.loads(newcomer.makefile().readline()))
        silent = [caller() for _ in range(greeting.MOST)]
        assert silent[0].recv(1) == b"", "the oldest of those is closed"
        newcomer.sendall(line_of(proof.say({})))
        finding.join()
        assert found[0] is not None
        kept.enter_context(found[0][0])


@pytest.mark.parametrize("encrypt", [False, True])
def test_with_a_secret_of_the_run_both_ends_prove_themselves(tmp_path: Path, encrypt: bool) -> None:
    """Then base and log are sealed. Who knows the offer but not the run's secret gets nothing, and who repeats what the
    newcomer has said keeps it from nothing."""

    def prove(offer: donor.Offer, keys: Keys = KEYS) -> Proof:
        return Proof(keys, {"for": "base", **offer._asdict()}, encrypt)

    folder = tmp_path / "region-0" / "base"
    inner = Inner({"optimizer.pt": ADAM}, lambda path: None)
    write_base(folder, state.Saved(STATE, FACTS), 0, Net(), inner, STARTED)
    given = Donation(folder, HOST, 3, {"run": RUN}, "region 2", None, prove)

    def get(proof: Proof | None) -> Base:
        return receive(given.offer, tmp_path / "region-2", 2, 0, lambda: None, PATIENCE_S, proof=proof)

    for wrong in (prove(given.offer, KEYS.of("others")), prove(given.offer._replace(secret="other")), None):
        with pytest.raises(DonorLost):
            get(wrong)
    with socket.create_connection((HOST, given.offer.port)) as stranger:
        stranger.sendall(line_of(prove(given.offer).say({"kind": "hello"})))
        assert b"proof" in stranger.recv(4096)
        given.log(ENTRY)
        base = get(prove(given.offer))
        with contextlib.suppress(OSError):
            stranger.sendall(b"{}\n")
    assert state.damage(base.received.folder) is None
    assert same(to_plain(next(base.items)), to_plain(ENTRY))
    given.close("in", "it is in the run")
    assert list(base.items) == []
    base.close()
    given.join(10)


def test_an_altered_record_is_refused() -> None:
    end, other = pair()
    end.seal((Tagged(KEYS, in_order=True), Tagged(KEYS, in_order=True)))
    other.sendall((30).to_bytes(4, "big") + bytes(30) + (1 << 20).to_bytes(4, "big"))
    with pytest.raises(frames.LinkError, match="altered"):
        end.receive()
    with pytest.raises(frames.LinkError, match="a record of 1048576 bytes"):
        end.receive()
    other.close()
    end.close()


@pytest.mark.parametrize("encrypt", [False, True])
def test_nothing_that_comes_with_the_proof_is_believed(encrypt: bool) -> None:
    """Somebody on the way can append to the last message that is not sealed yet."""
    end, other = pair()

    def donate() -> None:
        proof, lines = Proof(KEYS, {"for": "base"}, encrypt), other.makefile("rb")
        proof.hear(json.loads(lines.readline()))
        other.sendall(line_of(proof.say({"kind": "here"})) + line_of({"kind": "base", "run": 7}))
        lines.readline()

    donor_thread = threading.Thread(target=donate)
    donor_thread.start()
    with pytest.raises(frames.LinkError, match="not sealed"):
        end.prove(Proof(KEYS, {"for": "base"}, encrypt))
    donor_thread.join(10)
    other.close()
    end.close()


def test_a_newcomer_that_comes_too_late_is_told(donation: Donation, tmp_path: Path) -> None:
    donation.close()
    donation.join(10)
    with pytest.raises(DonorLost, match="nobody answers"), received(donation, tmp_path):
        pass


def served(lines: list[bytes], is_silent: bool = False) -> donor.Offer:
    """A donor that says these lines, and no more; it ends the connection, or `is_silent`."""
    listener = socket.create_server((HOST, 0))

    def say() -> None:
        with listener, listener.accept()[0] as connection, contextlib.suppress(OSError):
            for line in lines:
                connection.sendall(line)
            if not is_silent:
                connection.shutdown(socket.SHUT_WR)
            while connection.recv(1 << 16):
                pass

    threading.Thread(target=say, name="hf_cocodc-test-donor", daemon=True).start()
    return donor.Offer(HOST, listener.getsockname()[1], "secret", 3)


def test_an_offer_leads_to_the_member_that_made_it() -> None:
    """Not to another machine; and its numbers are numbers."""
    assert donor.offered(OFFER, f"{HOST}:9") == donor.Offer(**OFFER)
    assert donor.offered({**OFFER, "host": "::1"}, "[::1]:9").host == "::1"
    for wrong in (
        {"host": "10.0.0.9"},
        {"port": 0},
        {"port": "40"},
        {"step": -1},
        {"step": 1 << 60},
        {"secret": 3},
    ):
        with pytest.raises(ValueError, match="."):
            donor.offered({**OFFER, **wrong}, f"{HOST}:9")


NAMES = ["../evil.json", "/tmp/evil.json", "optimizer.pt", "cocodc/COMPLETE", "trees/x.json"]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_no_base_has_is_refused(name: str, tmp_path: Path) -> None:
    """Nothing is written."""
    line = json.dumps({"kind": "base", "run": RUN, "files": {name: 1}}).encode() + b"\nx"
    with pytest.raises(CheckpointError, match="which no checkpoint has: it is not written"):
        receive(served([line]), tmp_path / "region-2", 2, 0, lambda: None, PATIENCE_S)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def files(**sizes: Any) -> bytes:
    return (
        json.dumps({"kind": "base", "run": RUN, "files": {f"cocodc/{n}.json": s for n, s in sizes.items()}})
        + "\n"
    ).encode()


BROKEN = {
    "a file that has changed": [files(state=2), b'{}{"kind": "sha256", "value": "0"}\n'],
    "half a file": [files(state=200), b"{}"],
    "a size that is none": [files(state=-1)],
    "a size that no file has": [files(state=1 << 70)],
    "a size that is no number": [files(state=True)],
    "no list": [b'{"kind": "base"}\n'],
    "no JSON": [b"GET / HTTP/1.1\n"],
    "no line": [b"x" * (frames._MAX_LINE + 10)],
}


@pytest.mark.parametrize("lines", BROKEN.values(), ids=BROKEN)
def test_what_is_no_base_is_refused(lines: list[bytes], tmp_path: Path) -> None:
    """And no folder looks like one."""
    with pytest.raises(DonorLost):
        receive(served(lines), tmp_path / "region-2", 2, 0, lambda: None, PATIENCE_S)
    assert not [path for path in (tmp_path / "region-2").glob("*") if path.name.endswith(".base")]


def test_a_donor_that_falls_silent_in_the_middle_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though its process lives."""
    monkeypatch.setattr(frames, "_POLL_S", 0.05)
    monkeypatch.setattr(base, "SIGN_S", 0.02)
    offer = served([files(state=200), b"{}"], is_silent=True)
    with pytest.raises(
        DonorLost, match="region 0 sends its base no more: the other end has sent nothing for"
    ):
        receive(offer, tmp_path / "region-2", 2, 0, lambda: None, 0.2)


def test_a_base_that_is_larger_than_the_model_is_refused(tmp_path: Path) -> None:
    """Before anything is written: one file, or many."""
    for sizes in ({"state": LARGEST + 1}, {f"state-lane{i}": 1 << 18 for i in range(5)}, {"state": 1 << 49}):
        rule = rf"{sum(sizes.values())} bytes, more than the {LARGEST} .* resume them together"
        with pytest.raises(DonorLost, match=rule):
            receive(
                served([files(**sizes)]), tmp_path / "region-2", 2, 0, lambda: None, PATIENCE_S, most=LARGEST
            )
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_the_log_brings_no_more_at_once_than_the_base_allows(
    donation: Donation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An item is at most twice as large as the base, and some."""
    monkeypatch.setattr(base, "_ITEM_MARGIN", 0)
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
    "a float that is none": {"tree": {"$float": "1e"}, "tensors": {}},
    "a tensor without a name": {"tree": {"$tensor": []}, "tensors": {}},
    "too many tensors": {"tree": {}, "tensors": {str(i): ["float32", [0]] for i in range(200_000)}},
}


def pair() -> tuple[frames.Frames, socket.socket]:
    """Both ends of a connection."""
    with socket.create_server((HOST, 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        return frames.Frames(one, rate=1000.0), listener.accept()[0]


@pytest.mark.parametrize("line", ITEMS.values(), ids=ITEMS)
def test_what_is_no_value_is_refused(line: dict[str, Any]) -> None:
    end, other = pair()
    with pytest.raises(frames.LinkError, match="what is no value of ours"):
        end.receive_tree(line, 1 << 20)
    other.close()
    end.close()


def test_a_rate_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many seconds of waiting as the bytes need."""
    slept: list[float] = []
    now = [0.0]

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    monkeypatch.setattr(frames.time, "sleep", sleep)
    monkeypatch.setattr(frames.time, "monotonic", lambda: now[0])
    end, other = pair()
    end.send_bytes(bytes(2000))
    assert len(other.recv(2000, socket.MSG_WAITALL)) == 2000
    assert sum(slept) == pytest.approx(1.5)
    other.close()
    end.close()
