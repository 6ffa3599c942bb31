"""What a command knows of a split launch before it starts it, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hf_cocodc.errors import InputError
from hf_cocodc.run.split_world import placed
from hf_cocodc.training.split import split_of
from tests.run.test_split_world import launched


@pytest.fixture(autouse=True)
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where accelerate looks for the user's configuration, which is not there."""
    from accelerate.commands import launch as accelerate
    from accelerate.commands.config import config_args

    path = tmp_path / "default_config.yaml"
    for module in (accelerate, config_args):
        monkeypatch.setattr(module, "default_config_file", str(path))
    return path


def on(machine: int, machines: int, processes: int) -> list[str]:
    return [
        *("--multi_gpu", "--num_machines", str(machines), "--num_processes", str(processes)),
        *("--machine_rank", str(machine), "--main_process_ip", "10.0.0.5"),
    ]


@pytest.mark.parametrize(
    ("wish", "machines", "local"),
    [("machines", 3, 2), ("machines", 2, 1), ("2", 4, 1), ("2", 2, 4), ("6", 3, 4), ("1", 2, 2)],
)
def test_a_command_knows_the_regions_that_its_processes_will_find(
    wish: str, machines: int, local: int
) -> None:
    """On every machine: by the rule of the processes, from what a launcher tells them."""
    num_regions = None if wish == "machines" else int(wish)
    processes = [placed(num_regions, env, "HERE") for env in launched([local] * machines)]
    for machine in range(machines):
        found = split_of(wish, "HERE", on(machine, machines, machines * local))
        here = processes[machine * local : (machine + 1) * local]
        assert list(found.regions) == sorted({each.region for each in here})
        assert found.count == here[0].num_regions
        assert found.has_rank_0 == (machine == 0)
        assert found.host == "10.0.0.5"
        writers = [each for each in here if each.rank == 0]
        assert (found.machine == 0) == bool(writers), "the region's machine 0 writes its journal"


def test_what_accelerate_config_has_written_counts(config: Path) -> None:
    config.write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nmixed_precision: bf16\nuse_cpu: false\ndebug: false\n"
        "num_machines: 2\nnum_processes: 16\nmachine_rank: 1\nmain_process_ip: 10.0.0.5\nmain_process_port: 29500\n"
    )
    found = split_of("machines", "HERE", [])
    assert (found.count, list(found.regions), found.has_rank_0, found.host) == (2, [1], False, "10.0.0.5")
    found = split_of("4", "HERE", ["--machine_rank", "0"])
    assert (found.count, list(found.regions), found.has_rank_0) == (4, [0, 1], True)


def test_by_default_each_gpu_has_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    found = split_of("2", "HERE", [])
    assert (found.count, list(found.regions), found.machine, found.host) == (2, [0, 1], 0, None)


@pytest.mark.parametrize(
    ("wish", "launcher", "message"),
    [
        ("two", on(0, 2, 2), "HERE must be `machines` .* or a whole number from 1"),
        ("2", ["--num_processes", "1"], "HERE divides one launch of several processes, and .* start 1 on 1"),
        ("3", on(0, 2, 4), "HERE: 4 processes cannot be divided into 3 regions"),
        ("machines", on(2, 2, 4), "0 to 1 .here 2."),
        ("machines", on(0, 2, 4)[:-2], "--main_process_ip .here None."),
        ("machines", [*on(0, 2, 4), "--rdzv_backend", "c10d"], "Remove --rdzv_backend"),
        (
            "2",
            [*on(0, 1, 4), "--max_restarts", "1"],
            "begin and end together, and --max_restarts 1 .* --resume",
        ),
    ],
)
def test_a_launch_that_cannot_be_split_is_refused_before_it_starts(
    wish: str, launcher: list[str], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        split_of(wish, "HERE", launcher)
