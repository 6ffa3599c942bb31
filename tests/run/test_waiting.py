"""What a script sees while its region waits for others, and when they have met."""

from __future__ import annotations

import errno
import logging
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from textwrap import dedent

import pytest
import torch
from accelerate import Accelerator

from hf_cocodc import OuterConfig, RegionConfig
from hf_cocodc.coordinator.messages import Waiting
from hf_cocodc.coordinator.server import serve_in_thread
from hf_cocodc.errors import MeetingError, RegionLostError
from hf_cocodc.net import storage
from hf_cocodc.net.addresses import Unreachable
from hf_cocodc.net.storage import StorageError
from hf_cocodc.run import session as waiting
from hf_cocodc.run.connect import connect
from tests.net.storages import folder_url
from tests.processes.launching import environment


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "FIRST_S", 0.0)
    monkeypatch.setattr(waiting, "AGAIN_S", 0.0)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.name == waiting.__name__]


@pytest.mark.parametrize("more", [{}, {"min": 1}], ids=["fixed", "elastic"])
def test_a_region_says_again_and_again_for_whom_it_waits(
    more: dict, soon: None, caplog: pytest.LogCaptureFixture
) -> None:
    served = serve_in_thread()
    address = f"127.0.0.1:{served.port}"
    regions = RegionConfig(region=0, count=3, coordinator=address, run="mine", start_timeout_s=2.0, **more)
    with pytest.raises(RegionLostError, match="region 1 and region 2 did not arrive within 2 s"):
        connect(Accelerator(cpu=True), torch.nn.Linear(2, 2), OuterConfig(), regions, None)
    said = warnings(caplog)
    assert len(said) > 1
    for line in said:
        assert re.fullmatch(
            rf"region 0 has waited \d s for region 1 and region 2 \(run 'mine' at the coordinator {address}\)\. "
            r"It waits \d s more \(regions.start_timeout_s\)\.",
            line,
        )


@pytest.mark.parametrize(
    ("number", "ends_with", "says"),
    [
        (errno.EIO, RegionLostError, "region 1 did not arrive within 3 s"),
        (errno.EACCES, StorageError, "Permission denied. Give this machine the credentials of the storage"),
    ],
)
def test_a_region_that_starts_waits_for_a_storage_that_is_away(
    number: int,
    ends_with: type[Exception],
    says: str,
    soon: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As for a coordinator. What waiting cannot mend ends it at once."""
    monkeypatch.setattr(storage, "_FIRST_WAIT_S", 0.001)
    write, began = storage._Folder.write, time.monotonic()

    def away(folder: storage._Folder, name: str, content: bytes) -> None:
        if time.monotonic() < began + 0.5:
            raise OSError(number, os.strerror(number))
        write(folder, name, content)

    monkeypatch.setattr(storage._Folder, "write", away)
    regions = RegionConfig(
        region=0, count=2, coordinator=folder_url(tmp_path), run="mine", start_timeout_s=3.0
    )
    with pytest.raises(ends_with, match=says):
        connect(Accelerator(cpu=True), torch.nn.Linear(2, 2), OuterConfig(), regions, None)
    told = f"region 0 waits, for 3 s at most: {folder_url(tmp_path)}: cannot write 'lives/.*It tries again"
    assert any(re.match(told, line) for line in warnings(caplog)) == (number == errno.EIO)
    assert (time.monotonic() < began + 0.5) == (number == errno.EACCES)


def test_a_region_that_is_to_join_says_that_there_is_no_run(
    soon: None, caplog: pytest.LogCaptureFixture
) -> None:
    served = serve_in_thread()
    address = f"127.0.0.1:{served.port}"
    regions = RegionConfig(
        region=1, count=2, coordinator=address, run="mine", start_timeout_s=1.0, min=1, join=True
    )
    with pytest.raises(MeetingError, match="no run 'mine' trains"):
        connect(Accelerator(cpu=True), torch.nn.Linear(2, 2), OuterConfig(), regions, None)
    first, second = warnings(caplog)[:2]
    assert first == "region 1 waits, for 1 s at most: no run 'mine' trains here"
    assert second.startswith(
        "region 1 has waited 0 s: no run 'mine' trains here (run 'mine' at the coordinator"
    )


def test_a_reason_is_told_once_although_regions_come_meanwhile(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[str] = []
    for name in ("tell", "say"):
        monkeypatch.setattr(waiting, name, told.append)
    words = waiting.WaitingWords(0, "mine", "here", 600.0)
    for absent, why in (((1, 2), "ended"), ((2,), "ended"), ((), "full")):
        words.news = Waiting(absent=absent, why=why)
        words.look()
    assert told == [
        "waiting for region 1 and region 2",
        "region 0 waits for 600 s at most: ended",
        "waiting for region 2",
        "waiting for its place",
        "region 0 waits for 600 s at most: full",
    ]


MEETS = """
    import logging, sys, threading, torch
    from accelerate import Accelerator
    from hf_cocodc import OuterConfig, RegionConfig
    from hf_cocodc.coordinator.server import serve_in_thread
    from hf_cocodc.run.connect import connect

    {setting}
    served = serve_in_thread()
    accelerator = Accelerator(cpu=True)

    def meet(region):
        regions = RegionConfig(region=region, count=2, coordinator=f"127.0.0.1:{{served.port}}", run="mine")
        links.append(connect(accelerator, torch.nn.Linear(2, 2), OuterConfig(), regions, None))

    links = []
    other = threading.Thread(target=meet, args=(1,))
    other.start()
    meet(0)
    other.join()
    for link in links:
        link.close("enough")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setting", "is_seen"),
    [
        ("", True),
        ("logging.basicConfig(level=logging.WARNING)", False),
        ("logging.basicConfig(level=20)", True),
    ],
    ids=["no logging", "warnings only", "information"],
)
def test_a_script_sees_that_its_regions_have_met(setting: str, is_seen: bool) -> None:
    """Without any set-up of logging; who has set it up sees what he asked for."""
    script = [sys.executable, "-c", dedent(MEETS).format(setting=setting)]
    ended = subprocess.run(script, env=environment(), capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert ("all 2 regions of run 'mine' have met: " in ended.stderr) == is_seen
    assert ("payloads of means travel over gloo: round trips take " in ended.stderr) == is_seen


def test_a_region_waits_for_a_name_that_is_not_known_yet(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[str] = []

    def own(address: str, interface: str | None) -> str:
        asked.append(address)
        if len(asked) < 3:
            raise Unreachable("the coordinator's host 'c' has no address.")
        return "10.0.0.7"

    monkeypatch.setattr(waiting, "own_address", own)
    regions = RegionConfig(region=0, count=2, coordinator="c:29650")
    with caplog.at_level(logging.WARNING):
        assert waiting.own_address_of(regions, "run") == "10.0.0.7"
    [line] = caplog.messages
    assert "host 'c' has no address" in line and "waits" in line
    monkeypatch.setattr(waiting, "own_address", lambda *args: own("", asked.clear()))
    with pytest.raises(MeetingError, match="has no address"):
        waiting.own_address_of(
            RegionConfig(region=0, count=2, coordinator="c:29650", start_timeout_s=0.2), "run"
        )
