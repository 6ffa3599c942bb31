"""`hf-cocodc launch` of TRL's own script, with one line more: killed, it comes back and ends with one model."""

from __future__ import annotations

import importlib.util
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from hf_cocodc.run.journal import read
from hf_cocodc.snapshot.folders import usable
from hf_cocodc.training.data import byte_tokenizer
from tests.processes.launching import environment
from tests.processes.test_failures import said_by_now, training_processes

TIMEOUT_S = 240
LINE = "trainer.add_callback(__import__('hf_cocodc').CoCoDCCallback('diloco', sync_interval=10))\n    "
"""All that a script needs."""
FLAGS = (
    "--model_name_or_path model --dataset_name data --output_dir out --save_steps 10 --use_cpu --bf16 false --report_to none "
    "--max_length 32 --per_device_train_batch_size 2 --learning_rate 1e-3"
)


def write_script(folder: Path) -> None:
    """TRL's script, a model with a tokenizer, and data for it."""
    package = importlib.util.find_spec("trl")
    assert package is not None and package.origin is not None
    own = (Path(package.origin).parent / "scripts" / "sft.py").read_text(encoding="utf-8")
    assert own.count("trainer.train(") == 1
    (folder / "sft.py").write_text(own.replace("trainer.train(", f"{LINE}trainer.train("), encoding="utf-8")
    tokenizer = byte_tokenizer()
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    ends = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": None}
    config = LlamaConfig(
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=64, **sizes, **ends
    )
    for each in (LlamaForCausalLM(config), tokenizer):
        each.save_pretrained(folder / "model")
    (folder / "data").mkdir()
    sums = [{"text": f"{a} and {b} is {a + b}"} for a in range(15) for b in range(15)]
    (folder / "data" / "train.jsonl").write_text("\n".join(map(json.dumps, sums)))


def start(folder: Path, *options: str, steps: int) -> subprocess.Popen:
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "hf_cocodc",
            "launch",
            *options,
            "sft.py",
            *FLAGS.split(),
            "--max_steps",
            str(steps),
        ],
        env=environment(HF_DATASETS_CACHE=str(folder / "cache")),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
    )


def journals(folder: Path) -> list[Path]:
    return [folder / "out" / f"region-{region}" / "cocodc" / "journal.jsonl" for region in (0, 1)]


@pytest.mark.slow
def test_a_script_that_knows_nothing_of_it_is_killed_and_comes_back(tmp_path: Path) -> None:
    """SIGKILL of region 1: region 0 trains on; the command names who was killed. With --resume both go on, and end with equal
    models and a summary.
    """
    write_script(tmp_path)
    run = start(tmp_path, "--regions", "2", steps=100_000)
    deadline = time.monotonic() + TIMEOUT_S
    while not all(
        each.is_file() and any(e.get("step", 0) >= 20 for e in read(each)) for each in journals(tmp_path)
    ):
        assert run.poll() is None and time.monotonic() < deadline, run.communicate(timeout=5)
        time.sleep(0.05)
    training_processes(run.pid)[1].send_signal(signal.SIGKILL)
    while not any(each["kind"] == "epoch" and each["losses"] for each in read(journals(tmp_path)[0])):
        assert run.poll() is None and time.monotonic() < deadline, run.communicate(timeout=5)
        time.sleep(0.05)
    assert run.stdout is not None
    said = said_by_now(run.stdout, "To bring it back:") + run.stdout.readline()
    run.send_signal(signal.SIGINT)
    run.communicate(timeout=TIMEOUT_S)
    assert run.returncode == 130
    assert "region 1 is lost (killed, " in said and "To bring it back:\n    hf-cocodc launch " in said

    stopped = max(usable(tmp_path / "out" / "region-0"))
    run = start(tmp_path, "--regions", "2", "--resume", steps=stopped + 20)
    everyone = psutil.Process(run.pid)
    said, errors = run.communicate(timeout=TIMEOUT_S)
    assert run.returncode == 0, errors + (tmp_path / "runs/sft/region-0/log.txt").read_text()[-3000:]
    assert not everyone.is_running()
    assert f"resumed from step {stopped}" in said
    assert "\ninner steps " in said and "\nglobal model " in said
    ends = [next(e for e in reversed(read(each)) if e["kind"] == "finish") for each in journals(tmp_path)]
    assert [each["step"] for each in ends] == [stopped + 20] * 2
    models = [load_file(tmp_path / "out" / f"region-{region}" / "model.safetensors") for region in (0, 1)]
    assert all(bool((models[0][name] == models[1][name]).all()) for name in models[0])
