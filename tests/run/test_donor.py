"""A base travels to a newcomer, and after it the log."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
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
from hf_cocodc.meeting.callers import Member
from hf_cocodc.run import base, donor, frames
from hf_cocodc.run import checkpoint as state
from hf_cocodc.run.base import Base, RunOver, receive
from hf_cocodc.run.donor import Donation, Inner, write_base
from hf_cocodc.run.local_weights import weights_file
from tests.run.test_checkpoints import FACTS
from tests.run.test_take_over import ADAM, same

RUN = 11
HOST = "127.0.0.1"
PATIENCE_S = 60.0
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


ITEMS: dict[str, Any] = {
    "a negative length": {"tree": {}, "tensors": {"x": ["float32", [-1]]}},
    "more bytes than may come": {"tree": {}, "tensors": {"x": ["float32", [1 << 60]]}},
    "an unknown type": {"tree": {}, "tensors": {"x": ["complex64", [1]]}},
    "a tensor that is not there": {"tree": {"a": {"$tensor": "x"}}, "tensors": {}},
    "no tensors": {"tree": {}},
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
