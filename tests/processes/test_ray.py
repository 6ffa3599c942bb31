"""The recipe for Ray Train, in a small Ray of its own on this machine."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_cocodc.run.journal import read
from tests.listening import free_port
from tests.processes.launching import ROOT, environment

SCRIPT = ROOT / "recipes" / "launch" / "ray" / "regions.py"
SMALL = f"""
import functools, runpy, sys
import ray
limits = {{"num_cpus": 4, "object_store_memory": 80 * 2**20, "include_dashboard": False}}
ray.init = functools.partial(ray.init, **limits)
sys.argv[0] = {str(SCRIPT)!r}
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="ray is not installed: pip install 'hf-cocodc[ray]'"
)
def test_a_trainer_of_ray_is_a_region(tmp_path: Path) -> None:
    """Two regions of two workers each: four processes of Ray, two worlds, one model in the end."""
    options = ["--steps", "25", "--port", str(free_port()), "--output", str(tmp_path)]
    ended = subprocess.run(
        [sys.executable, "-c", SMALL, *options],
        env=environment(HF_COCODC_SECRET="5e" * 32),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, (ended.stdout + ended.stderr)[-4000:]
    folders = [tmp_path / f"region-{region}" for region in (0, 1)]
    for folder in folders:
        events = read(folder / "cocodc" / "journal.jsonl")
        assert [event["step"] for event in events if event["kind"] == "land"] == [10, 20, 25]
    first, second = (AutoModelForCausalLM.from_pretrained(folder).parameters() for folder in folders)
    assert all(torch.equal(*pair) for pair in zip(first, second, strict=True))
