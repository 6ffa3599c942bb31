"""The house rules of DESIGN: floors, exports, import cost, file sizes."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import hf_cocodc

PACKAGE = Path(hf_cocodc.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))
FLOORS = {
    "errors": 0,
    "sync_info": 0,
    "tensors": 0,
    "buffers": 0,
    "fragments": 1,
    "schedules": 1,
    "codecs": 1,
    "outer": 1,
    "merges": 1,
    "config": 1,
    "methods": 2,
    "landing": 2,
    "links": 3,
    "regions": 3,
    "lanes": 3,
    "handshake": 3,
    "agreement": 3,
    "synchronizer": 4,
    "journal": 4,
    "state": 4,
    "transfers": 4,
    "integrations": 5,
    "data": 5,
    "metrics": 5,
    "train": 6,
    "simulation": 6,
    "launch": 6,
    "summary": 6,
    "plots": 6,
    "bench": 6,
    "cli": 7,
}
SHARED = {
    ("codecs", "fragments"),
    ("regions", "links"),
    ("lanes", "links"),
    ("agreement", "links"),
    ("synchronizer", "journal"),
    ("synchronizer", "transfers"),
    ("simulation", "train"),
    ("launch", "train"),
}
"""Imports between modules of one floor that are meant: a common base, or a layer inside the floor."""
NO_TORCH = {"config", "schedules"}
ALGORITHMS = {"fragments", "schedules", "codecs", "outer", "merges", "methods"}
DISTRIBUTED = {"torch.distributed", "accelerate", "transformers"}


def place(module: Path) -> str:
    """The name in FLOORS that a file belongs to."""
    return module.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(module: Path) -> set[str]:
    """Absolute names of everything a file imports, wherever in the file."""
    package = ["hf_cocodc", *module.relative_to(PACKAGE).parts[:-1]]
    names: set[str] = set()
    for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            names.update(f"{stem}.{alias.name}" for alias in node.names)
    return names


@pytest.mark.parametrize("module", MODULES, ids=lambda m: str(m.relative_to(PACKAGE)))
def test_modules_import_from_lower_floors_only(module: Path) -> None:
    """A module imports from lower floors; on its own floor only the bases named above."""
    own = place(module)
    if own == "__init__":
        return
    for name in imports(module):
        parts = name.split(".")
        if parts[0] != "hf_cocodc" or len(parts) < 2 or parts[1] in (own, "__version__"):
            continue
        other = parts[1]
        lower = FLOORS[other] < FLOORS[own]
        assert lower or (own, other) in SHARED, (
            f"{own} (floor {FLOORS[own]}) imports {name} (floor {FLOORS[other]})"
        )


@pytest.mark.parametrize("module", MODULES, ids=lambda m: str(m.relative_to(PACKAGE)))
def test_algorithms_know_nothing_of_clusters(module: Path) -> None:
    """F1 and F2 import neither torch.distributed nor accelerate nor transformers; config and schedules not even torch."""
    found = imports(module)
    if place(module) in ALGORITHMS:
        assert not {name for name in found if any(name.startswith(banned) for banned in DISTRIBUTED)}
    if place(module) in NO_TORCH:
        assert not {name for name in found if name.split(".")[0] == "torch"}


@pytest.mark.parametrize("module", MODULES, ids=lambda m: str(m.relative_to(PACKAGE)))
def test_files_stay_short(module: Path) -> None:
    """No module is longer than 450 lines."""
    assert len(module.read_text(encoding="utf-8").splitlines()) <= 450


def test_public_names() -> None:
    """The public face is the contract, sorted, and every name is there."""
    contract = [
        "CoCoDCCallback",
        "OuterConfig",
        "OuterOptimizer",
        "Recipe",
        "RegionConfig",
        "region_shard",
        "simulate",
        "split_world",
    ]
    assert hf_cocodc.__all__ == contract == sorted(contract)
    for name in contract:
        assert getattr(hf_cocodc, name).__name__ == name


def test_importing_the_package_is_free() -> None:
    """`import hf_cocodc` imports neither torch nor transformers nor datasets; each is loaded when first used."""
    code = "import sys, hf_cocodc; print([m for m in ('torch', 'transformers', 'datasets', 'accelerate') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
