"""The page of a script of one's own: its script, started by its commands, ends with one model on both machines."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.listening import free_port
from tests.processes.launching import ROOT, environment

PAGE = (ROOT / "docs" / "start" / "own-script.md").read_text(encoding="utf-8")
ADDRESS = "198.18.0.1:29650"
TIMEOUT_S = 240


def commands(word: str) -> list[list[str]]:
    """The words of the lines of the page that begin with this command."""
    lines = re.findall(rf"^hf-cocodc {word} .*$", PAGE, flags=re.MULTILINE)
    return [shlex.split(line, comments=True)[1:] for line in lines]


@pytest.mark.slow
def test_the_script_of_the_page_ends_with_one_model(tmp_path: Path) -> None:
    """Two folders stand for two machines. The summary that the page shows is printed, and the files are the same bytes."""
    [script] = re.findall(r"<!-- my_script.py -->\n```python\n(.*?)```", PAGE, flags=re.DOTALL)
    short = script.replace("max_steps=200", "max_steps=12, use_cpu=True")
    assert short != script
    port, env = free_port(), environment(OMP_NUM_THREADS="1")

    def start(words: list[str], folder: Path) -> subprocess.Popen:
        folder.mkdir(exist_ok=True)
        (folder / "my_script.py").write_text(short, encoding="utf-8")
        words = [
            word.replace(ADDRESS, f"127.0.0.1:{port}").replace("198.18.0.1", "127.0.0.1") for word in words
        ]
        return subprocess.Popen(
            [sys.executable, "-m", "hf_cocodc", *words],
            env=env,
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    [coordinator] = commands("coordinator")
    serving = start([*coordinator, "--port", str(port)], tmp_path / "0")
    try:
        launches = commands("launch")
        assert [words[words.index("--region") + 1] for words in launches] == ["0", "1"]
        runs = [start(words, tmp_path / str(region)) for region, words in enumerate(launches)]
        said = [run.communicate(timeout=TIMEOUT_S)[0] for run in runs]
        assert [run.returncode for run in runs] == [0, 0], "\n".join(said)
    finally:
        serving.terminate()
        serving.communicate(timeout=TIMEOUT_S)
    models = [tmp_path / str(r) / f"runs/mine/region-{r}/model.safetensors" for r in (0, 1)]
    assert models[0].read_bytes() == models[1].read_bytes()
    shown = PAGE.partition("(shortened;")[2].partition("```\n")[2].partition("```")[0]
    labels = [line[:22].strip() for line in shown.splitlines()[1:]]
    assert {"inner steps", "sent by a region", "global model"} <= {*labels}
    for each in said:
        assert all(f"\n{label} " in each for label in labels), each
