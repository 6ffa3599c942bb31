"""Lines about a machine: each from facts that are given."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hf_cocodc.tools.doctor import facts, place
from hf_cocodc.tools.doctor.facts import OK, UNKNOWN, WARN, WRONG, Device, Disk, Machine
from hf_cocodc.tools.doctor.needs import Needs

GB = 10**9
HERE = Machine(versions={"torch": "2.13.0"}, available=16 * GB, total=32 * GB, cores=8)
GPU = Device("a GPU", 70 * GB, 80 * GB)
WITH_GPU = replace(HERE, devices=(GPU, GPU))
ROOMY = replace(HERE, available=900 * GB, total=900 * GB, devices=(replace(GPU, free=76 * GB),) * 2)
UNEVEN = replace(ROOMY, devices=(GPU, replace(GPU, free=12 * GB)))
NEEDS = Needs(10**9, 8 * GB, 1 * GB, 4 * GB, 10 * GB, 3)
DISK = Disk(folder=Path("/data"), is_writable=True, free=100 * GB, total=500 * GB)


def test_versions() -> None:
    """A package that is missing or too old is wrong, with the command that installs it."""
    assert place.versions(HERE).level == OK
    old = place.versions(replace(HERE, unmet={"torch>=2.10": "2.4.0", "peft>=0.19": None}))
    assert old.level == WRONG
    assert "needs torch>=2.10, has 2.4.0; needs peft>=0.19, has none" in old.words
    assert old.command == "pip install 'torch>=2.10' 'peft>=0.19'"


@pytest.mark.parametrize(
    ("machine", "regions", "use_cpu", "level", "words"),
    [
        (HERE, 2, False, OK, "no GPU: trains on the CPU (8 cores)"),
        (WITH_GPU, 2, False, OK, "a GPU (80 GB), a GPU (80 GB)"),
        (WITH_GPU, 3, False, WARN, "3 regions share 2 GPU(s): an inner step takes up to 2 times as long"),
        (WITH_GPU, 3, True, OK, "training.use_cpu"),
        (replace(HERE, accelerator="mps"), 1, False, OK, "mps; its memory is not known here"),
        (replace(HERE, unused=8), 1, False, WRONG, "the driver has 8 GPU(s), and torch 2.13.0 can use none"),
    ],
)
def test_devices(machine: Machine, regions: int, use_cpu: bool, level: str, words: str) -> None:
    """Each region needs a device that torch can use, where the machine has any."""
    line = place.devices(machine, regions, use_cpu)
    assert line.level == level and words in line.words
    assert (line.command is not None) == (level != OK)


@pytest.mark.parametrize(
    ("machine", "needs", "regions", "levels"),
    [
        (replace(HERE, available=15 * GB), NEEDS, 1, {"memory": WARN}),  # 13 of 15 GB
        (HERE, NEEDS, 2, {"memory": WRONG}),  # 26 of 16 GB
        (replace(HERE, available=31 * GB), NEEDS, 1, {"memory": OK}),
        (WITH_GPU, NEEDS, 2, {"GPU memory": OK, "memory": OK}),  # 9 of 70 GB, and 8 of 16 GB
        (WITH_GPU, replace(NEEDS, training=75 * GB), 1, {"GPU memory": WRONG, "memory": OK}),
        (WITH_GPU, replace(NEEDS, training=65 * GB), 1, {"GPU memory": WARN, "memory": OK}),
        (WITH_GPU, replace(NEEDS, outer_on_host=40 * GB), 1, {"GPU memory": OK, "memory": WRONG}),
        (ROOMY, NEEDS, 14, {"GPU memory": OK, "memory": OK}),  # 7 times 9 of 76 GB on each
        (ROOMY, NEEDS, 15, {"GPU memory": WARN, "memory": OK}),  # 8 times 9 of 76 GB on one
        (ROOMY, NEEDS, 17, {"GPU memory": WRONG, "memory": OK}),  # 9 times 9
        (UNEVEN, NEEDS, 2, {"GPU memory": OK, "memory": OK}),
        (UNEVEN, NEEDS, 3, {"GPU memory": OK, "memory": OK}),  # two where there is room
        (UNEVEN, NEEDS, 4, {"GPU memory": WRONG, "memory": OK}),
        (HERE, None, 1, {"memory": UNKNOWN}),
    ],
)
def test_memory(machine: Machine, needs: Needs | None, regions: int, levels: dict[str, str]) -> None:
    """What a run takes, against what is free: on the device, and on the host."""
    lines = place.memory(machine, needs, regions, use_cpu=False)
    assert {each.topic: each.level for each in lines} == levels


def test_a_gpu_that_regions_share_holds_them_all() -> None:
    """The one where it is tightest is named, with what all its regions take."""
    line = place.memory(UNEVEN, NEEDS, 4, use_cpu=False)[0]
    assert "a GPU, which 2 regions share: weights" in line.words
    assert "at least 18 GB, 12 GB of 80 GB are free" in line.words and "or fewer regions here" in line.words


def test_what_can_never_fit_has_no_command() -> None:
    """More than there is: to end other processes does not help."""
    [line] = place.memory(HERE, replace(NEEDS, training=50 * GB), 1, use_cpu=False)
    assert line.level == WRONG and "cannot fit: take a smaller model" in line.words and line.command is None


@pytest.mark.parametrize(
    ("disk", "needs", "regions", "level", "words"),
    [
        (DISK, NEEDS, 1, OK, "a checkpoint takes about 10 GB, at most 3 at once"),
        (DISK, NEEDS, 4, WARN, "a checkpoint takes about 40 GB in 4 regions, at most 3 at once"),
        (replace(DISK, free=9 * GB), NEEDS, 1, WRONG, "; 9 GB of 500 GB are free at /data"),
        (replace(DISK, is_writable=False), NEEDS, 1, WRONG, "/data cannot be written to"),
        (DISK, replace(NEEDS, checkpoints=None), 1, OK, "nothing limits them"),
        (DISK, replace(NEEDS, checkpoints=None), 2, WARN, "nothing limits them"),
        (DISK, replace(NEEDS, checkpoints=0), 1, OK, "none is kept"),
        (DISK, None, 1, OK, "the size of a checkpoint is not known"),
    ],
)
def test_disk(disk: Disk, needs: Needs | None, regions: int, level: str, words: str) -> None:
    """Room for the checkpoints that a run keeps, of all regions on this machine."""
    line = place.disk(disk, Path("/data/runs"), needs, regions)
    assert line.level == level and words in line.words
    assert (line.command is not None) == (level in (WARN, WRONG))


@pytest.mark.parametrize(("hidden", "unused"), [("", 0), ("-1", 0), ("0", 2)])
def test_cards_that_are_hidden_on_purpose_are_not_missed(
    hidden: str, unused: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    monkeypatch.setattr(facts.torch.accelerator, "current_accelerator", lambda: None)
    monkeypatch.setattr(
        facts.Path, "glob", lambda path, pattern: iter([Path("/dev/nvidia0"), Path("/dev/nvidia1")])
    )
    assert facts.machine().unused == unused


def test_facts_of_this_machine(tmp_path: Path) -> None:
    """What is read here can be: the disk of a folder that does not exist yet is that of the nearest one."""
    found = facts.machine()
    assert not found.unmet and found.versions["torch"] and 0 < found.available <= found.total
    there = facts.disk(tmp_path / "a" / "b")
    assert there.folder == tmp_path and there.is_writable and 0 < there.free <= there.total
