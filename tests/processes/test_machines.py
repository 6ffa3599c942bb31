"""A region of two machines: two commands, two launchers, one voice. Real processes on this machine."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from hf_cocodc.coordinator.server import serve_in_thread
from hf_cocodc.run.journal import read
from tests.listening import free_port
from tests.processes.test_failures import TIMEOUT_S, start

STEPS = 12


@pytest.mark.slow
def test_a_region_of_two_machines_speaks_with_one_voice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Machine 0 writes the journal, the summary and the picture; machine 1 only a log of its own. An earlier log stays."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    text = tmp_path / "text"
    text.mkdir()
    (text / "train.txt").write_text(Path(socket.__file__).read_text()[:9000])
    coordinator = serve_in_thread()
    folder = tmp_path / "region-0"
    folder.mkdir()
    for name in ("log.txt", "log-machine-1.txt"):
        (folder / name).write_text("of an earlier run\n")
    try:
        common = [
            "--coordinator",
            coordinator.address,
            "--set",
            f"training.max_steps={STEPS}",
            "--set",
            "outer.sync_interval=4",
        ]
        common += ["--set", "training.logging_steps=4"]
        common += ["--set", "data.builtin=null", "--set", f"data.path={text}", "--set", "data.block_size=32"]
        batch = "training.per_device_train_batch_size"
        port = str(free_port())
        machines = [
            start(
                tmp_path,
                *("--region", "0", *common, "--set", f"{batch}=2"),
                *(
                    "--",
                    "--multi_gpu",
                    "--num_machines",
                    "2",
                    "--num_processes",
                    "2",
                    "--mixed_precision",
                    "no",
                ),
                *("--dynamo_backend", "no", "--main_process_ip", "127.0.0.1", "--main_process_port", port),
                *("--machine_rank", str(machine)),
            )
            for machine in (0, 1)
        ]
        other = start(tmp_path, "--region", "1", *common, "--set", f"{batch}=4")
        (first, said), (second, also), (third, errors) = (
            run.communicate(timeout=2 * TIMEOUT_S) for run in (*machines, other)
        )
    finally:
        coordinator.close()
    assert [run.returncode for run in (*machines, other)] == [0, 0, 0], (said, also, errors)
    events = read(folder / "cocodc" / "journal.jsonl")
    assert [event["kind"] for event in events].count("start") == 1
    assert [event["step"] for event in events if event["kind"] == "land"] == [4, 8, 12]
    assert f"inner steps           {STEPS} in each of 2" in first
    assert "inner steps" not in second
    assert "machine 1 of region 0 has ended" in second
    assert f"inner steps           {STEPS} in each of 2" in third
    for name in ("log", "log-machine-1"):
        assert (folder / f"{name}.1.txt").read_text() == "of an earlier run\n"
        assert "of an earlier run" not in (folder / f"{name}.txt").read_text()
    assert not list(folder.glob("cocodc/journal.*.jsonl"))
