"""Commands that a page shows, as they stand there, and a small run for them."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.processes.launching import ROOT, environment

SMALL = """
model:
  config: {model_type: llama, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 2,
    num_key_value_heads: 2}
tokenizer: {builtin: bytes}
data: {path: texts, block_size: 32}
training: {max_steps: STEPS, lr_scheduler_type: constant, learning_rate: 0.001, per_device_train_batch_size: 2, use_cpu: true,
  save_strategy: 'no', output_dir: out}
"""
"""A recipe's model, data and `STEPS` of training."""
RECIPE = f"""{SMALL}
outer: {{method: streaming, sync_interval: 10, num_fragments: 2, overlap_steps: 2}}
regions: {{count: 2, run: mine}}
"""


def shown(page: str, mark: str) -> list[str]:
    """The commands behind `<!-- mark -->`, without comments."""
    text = (ROOT / page).read_text(encoding="utf-8")
    [block] = re.findall(rf"<!-- {mark} -->\n```bash\n(.*?)```", text, flags=re.DOTALL)
    return [line.partition("  #")[0].rstrip() for line in block.replace("\\\n", " ").splitlines()]


def prepare(machine: Path, steps: int) -> None:
    """Make a machine's folder, with a recipe of two regions and its text."""
    (machine / "texts").mkdir(parents=True)
    (machine / "texts" / "train.txt").write_text(Path(argparse.__file__).read_text(encoding="utf-8"))
    (machine / "recipe.yaml").write_text(RECIPE.replace("STEPS", str(steps)))


def begin(
    words: str, machine: Path, log: Path, into: Sequence[str] = (), **env: str
) -> subprocess.Popen[bytes]:
    """Start commands as their user types them there. What they say goes to a file. `into`: words that lead to the machine."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    with log.open("wb") as said:
        return subprocess.Popen(
            [*into, "sh", "-c", words],
            cwd=machine,
            env=environment(PATH=path, **env),
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=subprocess.STDOUT,
        )
