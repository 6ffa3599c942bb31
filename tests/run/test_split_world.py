"""Which region a process of a split launch is in, and what a split refuses."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
from accelerate import PartialState

from hf_cocodc import RegionConfig, region_shard, settings
from hf_cocodc.errors import InputError, LinkError
from hf_cocodc.run.split_world import placed, split_as_asked, split_world
from hf_cocodc.settings.environment import ENV_LAUNCH, ENV_REGION, ENV_REGIONS, ENV_SPLIT
from hf_cocodc.status import ENV_STATUS, heard


@pytest.fixture
def env() -> Iterator[dict[str, str]]:
    """The environment, without a launcher or settings of ours, as it is until the test ends."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("HF_COCODC")}
    with mock.patch.dict(os.environ, kept, clear=True):
        yield os.environ  # type: ignore[misc]


def launched(sizes: list[int], has_groups: bool = True) -> list[dict[str, str]]:
    """What a launcher tells each rank of machines with so many ranks."""
    ranks = [(machine, local) for machine, size in enumerate(sizes) for local in range(size)]
    told = []
    for rank, (machine, local) in enumerate(ranks):
        each: dict[str, object] = {"RANK": rank, "WORLD_SIZE": len(ranks), "MASTER_ADDR": "10.0.0.1"}
        each |= {"LOCAL_RANK": local, "LOCAL_WORLD_SIZE": sizes[machine], "MASTER_PORT": 29500}
        groups = {"GROUP_RANK": machine, "GROUP_WORLD_SIZE": len(sizes)}
        told.append({name: str(value) for name, value in (each | (groups if has_groups else {})).items()})
    return told


@pytest.mark.parametrize(
    ("sizes", "num_regions", "regions", "local", "slots"),
    [
        ([4], 2, [0, 0, 1, 1], [0, 1, 0, 1], ["0/2", "0/2", "1/2", "1/2"]),
        ([2, 2], 2, [0, 0, 1, 1], [0, 1, 0, 1], ["0/1"] * 4),
        ([2, 2], 1, [0, 0, 0, 0], [0, 1, 0, 1], ["0/1"] * 4),
        ([1, 1, 1, 1], 2, [0, 0, 1, 1], [0, 0, 0, 0], ["0/1"] * 4),
        ([2, 2], 4, [0, 1, 2, 3], [0, 0, 0, 0], ["0/2", "1/2", "0/2", "1/2"]),
        ([4, 2], 3, [0, 0, 1, 1, 2, 2], [0, 1, 0, 1, 0, 1], ["0/2"] * 2 + ["1/2"] * 2 + ["0/1"] * 2),
        ([1, 1, 2], 2, [0, 0, 1, 1], [0, 0, 0, 1], ["0/1"] * 4),
        ([2, 2], None, [0, 0, 1, 1], [0, 1, 0, 1], ["0/1"] * 4),
        ([3, 1], None, [0, 0, 0, 1], [0, 1, 2, 0], ["0/1"] * 4),
    ],
)
def test_consecutive_ranks_form_a_region(
    sizes: list[int], num_regions: int | None, regions: list[int], local: list[int], slots: list[str]
) -> None:
    """A region is one or more whole machines, or a machine one or more whole regions; None: a region for each machine."""
    found = [placed(num_regions, each, "a test") for each in launched(sizes)]
    assert [each.region for each in found] == regions
    assert [each.local_rank for each in found] == local
    assert [f"{each.slot}/{each.slots}" for each in found] == slots
    assert {each.num_regions for each in found} == {max(regions) + 1}
    for region in set(regions):
        ranks = [each for each in found if each.region == region]
        assert [each.rank for each in ranks] == list(range(len(ranks)))
        assert {each.size for each in ranks} == {len(ranks)}
        heads = [each for each in ranks if each.local_rank == 0]
        assert sum(each.local_size for each in heads) == len(ranks)
    if len(set(sizes)) == 1:
        assert found == [placed(num_regions, each, "a test") for each in launched(sizes, has_groups=False)]


@pytest.mark.parametrize(
    ("sizes", "num_regions", "message"),
    [
        ([3], 2, "3 processes cannot be divided into 2 regions of equal size. Launch a multiple of 2"),
        ([2], 4, "2 processes cannot be divided into 4 regions"),
        ([4, 4, 4], 4, "a region of 3 processes would begin or end in the middle of a machine, which has 4"),
        ([1, 3], 2, "a region of 2 processes would begin or end in the middle of a machine, which has 3"),
    ],
)
def test_a_launch_that_cannot_be_divided(sizes: list[int], num_regions: int, message: str) -> None:
    with pytest.raises(InputError, match=f"^HERE: {message}"):
        [placed(num_regions, each, "HERE") for each in launched(sizes)]


def test_machines_of_a_launcher_that_does_not_number_them() -> None:
    """Equal machines of consecutive ranks are found without GROUP_RANK; others are refused, and not guessed."""
    with pytest.raises(InputError, match="does not say which machine rank 2 of 4 is on. It must set GROUP_R"):
        placed(None, launched([1, 3], has_groups=False)[2], "HERE")
    round_robin = {**launched([2, 2], has_groups=False)[1], "LOCAL_RANK": "0"}
    with pytest.raises(InputError, match="which machine rank 1 of 4"):
        placed(None, round_robin, "HERE")
    with pytest.raises(InputError, match="HERE needs a launcher .*LOCAL_WORLD_SIZE is not set.*torchrun"):
        placed(None, dict.fromkeys(("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"), "1"), "HERE")


@pytest.mark.parametrize("value", ["0", "x", "", "-1", "2.0", "Machines", " 2"])
def test_what_the_variable_may_be(value: str, env: dict[str, str]) -> None:
    env |= launched([2])[0] | {ENV_SPLIT: value}
    with pytest.raises(
        InputError, match=f"HF_COCODC_SPLIT='{value}' must be `machines` .* or a whole number"
    ):
        split_as_asked()


def test_a_launch_is_split_once(env: dict[str, str]) -> None:
    """The variable and a call that say the same split once; its name and the region stay, also for a child process."""
    env |= launched([1])[0] | {ENV_SPLIT: "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    assert split_world(1) == 0
    made = dict(env)
    assert (made[ENV_REGION], made[ENV_REGIONS]) == ("0", "1")
    assert made[ENV_SPLIT] == "1" and len(made[ENV_LAUNCH]) == 16
    assert split_world(1) == 0
    assert dict(env) == made
    with pytest.raises(
        InputError, match=r"split_world\(2\): .* already split into 1 .* by HF_COCODC_SPLIT=1"
    ):
        split_world(2)


def test_a_command_hears_why_a_launch_is_not_split(env: dict[str, str], tmp_path: Path) -> None:
    env |= launched([1, 1, 1])[0] | {ENV_SPLIT: "2", ENV_STATUS: str(tmp_path / "region-0.json")}
    with pytest.raises(InputError) as caught:
        split_as_asked()
    told = heard(tmp_path / "region-0.json")
    assert (told["error"], told["exit_code"]) == (str(caught.value), 2)


def test_a_process_that_takes_no_part_is_missed(env: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 waits for what rank 0 tells, for as long as torch waits at a store, and says what is missing."""
    store = torch.distributed.HashStore()
    store.set_timeout(timedelta(milliseconds=1))
    monkeypatch.setattr("hf_cocodc.run.split_world._launcher_store", lambda *_: store)
    env |= launched([2])[1]
    with pytest.raises(
        LinkError, match="a process of the launch does not take part .* must import hf_cocodc"
    ):
        split_world(2)
    assert ENV_LAUNCH not in env


def test_regions_that_are_numbered_twice(env: dict[str, str]) -> None:
    """What the split would set is not set before."""
    env |= launched([2])[0] | {ENV_SPLIT: "2", ENV_REGION: "1"}
    with pytest.raises(InputError, match="HF_COCODC_SPLIT='2' numbers .* but HF_COCODC_REGION=1 is set, too"):
        split_as_asked()


@pytest.mark.parametrize("late", ["an Accelerator or TrainingArguments", "a process group", "a CUDA context"])
def test_a_split_that_comes_too_late_names_the_line_to_move(
    late: str, env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    env |= launched([2])[0]
    if late == "an Accelerator or TrainingArguments":
        monkeypatch.setattr(PartialState, "_shared_state", {"device": "cpu"})
    elif late == "a process group":
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    else:
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    line = sys._getframe().f_lineno + 2
    with pytest.raises(InputError, match=f"too late: {late} exists already") as caught:
        split_world(2)
    assert f"Move line {line} of {__file__} to the beginning" in str(caught.value)


def test_a_process_that_is_not_split_says_so_before_it_trains(env: dict[str, str]) -> None:
    """Without a launcher the import does nothing, for commands and children; whoever trains then is told."""
    env[ENV_SPLIT] = "2"
    for train in (lambda: RegionConfig().resolved(), lambda: region_shard([1, 2])):
        with pytest.raises(InputError, match="HF_COCODC_SPLIT='2' .* no launcher of several processes"):
            train()
    env |= launched([2])[0]
    with pytest.raises(InputError, match=r"after the import of hf_cocodc. Call split_world\(N\) first"):
        RegionConfig(count=2).resolved()


IMPORT = "import sys, hf_cocodc; print('torch' in sys.modules)"
CHILD = f"""
import os, multiprocessing
def body():
    {IMPORT}
if __name__ == "__main__":
    child = multiprocessing.get_context("fork").Process(target=body)
    child.start(), child.join()
"""


@pytest.mark.parametrize(
    ("code", "told"),
    [
        (IMPORT, {}),
        (IMPORT, {ENV_SPLIT: "2"}),
        (IMPORT, {**launched([2])[0]}),
        (IMPORT, {**launched([2])[0], ENV_SPLIT: "2", ENV_LAUNCH: "given"}),
        (CHILD, {**launched([2])[0], ENV_SPLIT: "2"}),
    ],
    ids=["nothing", "no launcher", "no variable", "already split", "a child"],
)
def test_an_import_that_splits_nothing_is_free(code: str, told: dict[str, str], env: dict[str, str]) -> None:
    """The package imports no torch for the variable where there is nothing to split."""
    found = subprocess.run(
        [sys.executable, "-c", code], env={**env, **told}, capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "False"


def test_a_single_region_on_several_machines_is_told_of_the_variable(
    env: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    """One line, by rank 0; none where one region is what the user asked for, or on one machine."""
    for rank in (1, 0):
        settings.environment.warn_alone.cache_clear()
        with mock.patch.dict(os.environ, launched([1, 1])[rank]):
            RegionConfig(count=1).resolved()
            assert not caplog.records
            for _ in range(2):
                RegionConfig().resolved()
    [record] = caplog.records
    assert "HF_COCODC_SPLIT=machines" in record.getMessage()
    assert "\n" not in record.getMessage()
