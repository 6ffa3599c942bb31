"""One launch that HF_COCODC_SPLIT makes regions of, on one or several machines."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hf_cocodc.errors import InputError
from hf_cocodc.run.split_world import split_as_asked
from hf_cocodc.settings.environment import ENV_COORDINATOR, ENV_LAUNCH, ENV_REGION, ENV_SPLIT
from hf_cocodc.status import ENV_LOG, ENV_STATUS, heard, tell
from tests.listening import free_port
from tests.processes.forks import TIMEOUT_S, fork, rank_env, torch_master
from tests.processes.launching import ROOT, WORKER, accelerate, accelerate_on, environment, outcomes, run_all
from tests.processes.test_regions import CONFIG, assert_all_ranks_equal

TOLD = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", ENV_REGION, ENV_LAUNCH, ENV_COORDINATOR)


def meet_in_region(path: str) -> None:
    """The body of a rank: split, add up what the ranks of its region have, and tell."""
    rank = int(os.environ["RANK"])
    split_as_asked()
    dist.init_process_group("gloo")
    total = torch.tensor([rank])
    dist.all_reduce(total)
    told = {name: os.environ[name] for name in TOLD}
    Path(path, f"{rank}.json").write_text(json.dumps({**told, "total": total.item()}))
    dist.barrier()  # a store closes with the process that serves it
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("wish", "local", "regions", "totals"),
    [
        ("2", 4, "0011", [1, 1, 5, 5]),
        ("machines", 2, "0011", [1, 1, 5, 5]),
        ("2", 1, "0011", [1, 1, 5, 5]),
        ("4", 2, "0123", [0, 1, 2, 3]),
    ],
)
def test_each_region_is_a_world_and_the_launch_has_a_name(
    wish: str, local: int, regions: str, totals: list[int], tmp_path: Path
) -> None:
    """Four ranks, `local` on each machine: ranks of a region reach each other, and no others; two launches differ in name."""
    masters, log, ranks = [torch_master() for _ in range(2)], tmp_path / "log.txt", []
    for launch, master in enumerate(masters):
        folder = tmp_path / str(launch)
        folder.mkdir()
        for rank in range(4):
            env = rank_env(master, rank, 4) | {"LOCAL_RANK": str(rank % local)}
            env |= {"LOCAL_WORLD_SIZE": str(local), ENV_SPLIT: wish}
            if rank >= local:  # other machines have another address for the first one
                env |= {"MASTER_ADDR": "127.0.0.2"}
            ranks.append(fork(meet_in_region, str(folder), log=log, **env))
    for each in ranks:
        each.join(TIMEOUT_S)
        assert each.exitcode == 0, log.read_text()[-4000:]
    told = [[json.loads((tmp_path / f"{k}/{rank}.json").read_text()) for rank in range(4)] for k in (0, 1)]
    for found in told:
        assert "".join(each[ENV_REGION] for each in found) == regions
        assert [each["total"] for each in found] == totals
        assert {each["WORLD_SIZE"] for each in found} == {str(regions.count("0"))}
        assert len({(each[ENV_LAUNCH], each[ENV_COORDINATOR]) for each in found}) == 1
        assert found[0][ENV_COORDINATOR].startswith("127.0.0.1:" if local == 4 else "127.0.0.2:")
    assert told[0][0][ENV_LAUNCH] != told[1][0][ENV_LAUNCH]


def refused() -> None:
    """The body of a rank of the second machine, which is told something else than the first."""
    with pytest.raises(
        InputError, match="'4' makes 4 .* of this launch, and where rank 0 is they are 2. Say the same"
    ):
        split_as_asked()


def test_machines_that_divide_one_launch_differently_are_refused(tmp_path: Path) -> None:
    """They once waited for regions that nobody was in."""
    master, log = torch_master(), tmp_path / "log.txt"
    ranks = []
    for rank in range(4):
        env = rank_env(master, rank, 4) | {"LOCAL_RANK": str(rank % 2), "LOCAL_WORLD_SIZE": "2"}
        body, wish = (refused, "4") if rank >= 2 else (split_as_asked, "2")
        ranks.append(fork(body, log=log, **env, **{ENV_SPLIT: wish}))
    for each in ranks:
        each.join(TIMEOUT_S)
        assert each.exitcode == 0, log.read_text()[-4000:]


def speak_in_region() -> None:
    """The body of a rank that a command listens to."""
    split_as_asked()
    os.write(1, os.environ[ENV_COORDINATOR].encode())
    tell("here")


def test_a_command_has_a_log_and_a_status_of_each_region_and_serves_their_coordinator(tmp_path: Path) -> None:
    """It names the file and the log of its first region; the other one takes its own, beside them, from the split on."""
    for region in (0, 1):
        (tmp_path / f"region-{region}").mkdir()
    env = {ENV_SPLIT: "2", ENV_STATUS: str(tmp_path / "region-0.json"), ENV_COORDINATOR: "127.0.0.1:4711"}
    env[ENV_LOG] = str(tmp_path / "region-0" / "log.txt")
    master, log = torch_master(), tmp_path / "log.txt"
    ranks = [fork(speak_in_region, log=log, **rank_env(master, rank, 4), **env) for rank in range(4)]
    for each in ranks:
        each.join(TIMEOUT_S)
        assert each.exitcode == 0, log.read_text()[-4000:]
    for region in (0, 1):
        assert (tmp_path / f"region-{region}" / "log.txt").read_text() == 2 * "127.0.0.1:4711"
        assert heard(tmp_path / f"region-{region}.json")["doing"] == "here"


@pytest.mark.slow
def test_machines_of_two_ranks_each(tmp_path: Path) -> None:
    """Two machines x two ranks (DDP inside), Trainer with the callback, and nothing else: all four end with one model."""
    port = free_port()
    worker = [WORKER, "trainer", str(tmp_path), json.dumps(CONFIG)]
    env = environment(HF_COCODC_SPLIT="machines")
    run_all([([*accelerate_on(each, 2, 4, port), *worker], env) for each in (0, 1)])
    assert_all_ranks_equal(outcomes(tmp_path))


LATE = """
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
import hf_cocodc
"""


@pytest.mark.slow
def test_a_launch_that_is_split_too_late_ends(tmp_path: Path) -> None:
    """At the import, with an error that names the way out; both ranks end."""
    script = tmp_path / "late.py"
    script.write_text(LATE)
    ended = subprocess.run(
        [*accelerate(2), str(script)],
        env=environment(HF_COCODC_SPLIT="2"),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert ended.returncode != 0
    said = "HF_COCODC_SPLIT='2' comes too late: an Accelerator or TrainingArguments exists already"
    assert said in ended.stderr
    assert f"Move line 4 of {script} to the beginning of the script" in ended.stderr
