"""A type checker sees our types in a user's script."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CONFIG = """[mypy]
disallow_untyped_defs = true
[mypy-torch.*,transformers.*,accelerate.*,datasets.*,peft.*,evaluate.*,safetensors.*,ruamel.*,psutil.*,numpy.*,tokenizers.*]
follow_imports = skip
ignore_missing_imports = true
"""
"""Other packages take a minute to look at."""
SCRIPT = """import hf_cocodc
from hf_cocodc import OuterConfig, RegionConfig, simulate

reveal_type(OuterConfig(sync_interval=5).sync_interval)
reveal_type(RegionConfig().to_dict())
OuterConfig(sync_interval="five")
OuterConfig(sync_intervall=5)
hf_cocodc.OuterOptimzer
simulate(5)
"""


@pytest.mark.slow
def test_a_users_script_is_checked(tmp_path: Path) -> None:
    """Through the names of the top level, which are imported when they are used: right types, wrong ones, unknown names."""
    (tmp_path / "mypy.ini").write_text(CONFIG)
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "mypy", "--cache-dir", str(tmp_path / "cache"), "script.py"]
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True).stdout
    for line, words in (
        (4, 'note: Revealed type is "int | None"'),
        (5, 'note: Revealed type is "dict[str, Any]"'),
        (
            6,
            'error: Argument "sync_interval" to "OuterConfig" has incompatible type "str"; expected "int | None"',
        ),
        (7, 'error: Unexpected keyword argument "sync_intervall" for "OuterConfig"'),
        (8, 'error: Module has no attribute "OuterOptimzer"'),
        (9, "error: "),
    ):
        assert f"script.py:{line}: {words}" in said, said
