"""The house rules of DESIGN: floors, exports, import cost, file sizes."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest
from torch.utils._device import _device_constructors

import hf_cocodc

PACKAGE = Path(hf_cocodc.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))
FLOORS = (
    ("errors", "threads", "status", "validation"),
    ("settings", "parts", "net"),
    ("methods", "coordinator"),
    ("link",),
    ("engine", "snapshot"),
    ("run",),
    ("trainer",),
    ("training",),
    ("tools",),
    ("cli",),
)
"""The folders of the package and the single modules beside them, from the ground up."""
ALIASES = {
    "newer": "methods",
    "resolve": "methods",
    "auto": "methods",
    "train": "training",
    "__main__": "cli",
    "__init__": "cli",
}
"""Single modules that stand where another place stands. Those of one place import each other as they like."""
FLOOR_OF = {name: floor for floor, names in enumerate(FLOORS) for name in names}
NO_TORCH = {"settings"}
ALGORITHMS = {"parts", "methods"}
DISTRIBUTED = ("torch.distributed", "accelerate", "transformers")


def place(module: Path) -> str:
    """The name in FLOORS that a file belongs to."""
    name = module.relative_to(PACKAGE).parts[0].removesuffix(".py")
    return ALIASES.get(name, name)


@functools.cache
def tree(module: Path) -> ast.Module:
    return ast.parse(module.read_text(encoding="utf-8"))


@functools.cache
def imports(module: Path) -> set[str]:
    """Absolute names of everything a file imports, wherever in the file."""
    package = ["hf_cocodc", *module.relative_to(PACKAGE).parts[:-1]]
    names: set[str] = set()
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            names.update(f"{stem}.{alias.name}" for alias in node.names)
    return names


def uses(module: Path) -> set[str]:
    """The other places of the package that a file imports from."""
    names = (name.split(".") for name in imports(module))
    places = {
        ALIASES.get(parts[1], parts[1]) for parts in names if parts[0] == "hf_cocodc" and len(parts) > 1
    }
    return places & FLOOR_OF.keys() - {place(module)}


def test_modules_import_from_lower_floors_only() -> None:
    """A module imports from its own folder and from lower floors; never from another place on its own floor."""
    for module in MODULES:
        own = FLOOR_OF[place(module)]
        wrong = {f"{other} (floor {FLOOR_OF[other]})" for other in uses(module) if FLOOR_OF[other] >= own}
        assert not wrong, f"{module} (floor {own}) imports them"


def test_algorithms_know_nothing_of_clusters() -> None:
    """Parts and methods import neither torch.distributed nor accelerate nor transformers; settings not even torch.

    Flat tensors alone know that a parameter may be a shard.
    """
    for module in MODULES:
        names = imports(module)
        if place(module) in ALGORITHMS and module.parent != PACKAGE / "parts" / "tensors":
            assert not {name for name in names if name.startswith(DISTRIBUTED)}, module
        if place(module) in NO_TORCH or module == PACKAGE / "parts" / "schedules.py":
            assert not {name for name in names if name.split(".")[0] == "torch"}, module


def test_only_the_trainer_and_what_stands_on_it_import_transformers() -> None:
    """Everything below `trainer/` works without Transformers' classes."""
    for module in MODULES:
        if FLOOR_OF[place(module)] < FLOOR_OF["trainer"]:
            assert not {name for name in imports(module) if name.split(".")[0] == "transformers"}, module


def test_the_command_line_alone_uses_the_tools() -> None:
    """What measures, forecasts, examines and draws can be removed without touching what trains."""
    assert {place(module) for module in MODULES if "tools" in uses(module)} == {"cli"}


def test_no_two_classes_have_one_name() -> None:
    names = [
        node.name for module in MODULES for node in ast.walk(tree(module)) if isinstance(node, ast.ClassDef)
    ]
    assert not {name for name in names if names.count(name) > 1}


LONG = {
    "coordinator/rules.py": "all that a coordinator decides",
    "link/rules.py": "all that a member decides",
    "link/tcp.py": "one link, and its state",
}


def test_files_stay_short() -> None:
    """A module of more than 600 lines is one where somebody has asked, and found one concept."""
    lines = {
        str(module.relative_to(PACKAGE)): module.read_text(encoding="utf-8").count("\n") for module in MODULES
    }
    assert {name for name, count in lines.items() if count > 600} == LONG.keys()


PICKLES = {
    "run/loop.py": ("torch.load",),
    "snapshot/files.py": ("torch.load", "dcp_to_torch_save", "torch_save_to_dcp"),
    "trainer/loop.py": ("torch.load",),
}
"""Where a pickle is read: with `weights_only`, or this region's own."""


def test_nothing_runs_code_that_others_send() -> None:
    """No module reads pickles but those with `weights_only`, or a region's own."""
    readers = ("pickle.load", "pickle.loads", "torch.load", "dcp_to_torch_save", "torch_save_to_dcp")
    objects = ("broadcast_object_list", "gather_object", "all_gather_object", "scatter_object_list")
    for module in MODULES:
        calls = [node for node in ast.walk(tree(module)) if isinstance(node, ast.Call)]
        names = {ast.unparse(call.func) for call in calls}
        used = {name for name in names if name in readers or name.rpartition(".")[2] in objects}
        assert used == set(PICKLES.get(str(module.relative_to(PACKAGE)), ())), module
        loads = [call for call in calls if ast.unparse(call.func) == "torch.load"]
        assert all("weights_only=True" in map(ast.unparse, call.keywords) for call in loads), module


def test_public_names() -> None:
    """The public face is the contract, sorted, and every name is there."""
    contract = [
        "CheckpointError",
        "CoCoDCCallback",
        *("CocodcError", "DonorLost", "HandshakeError", "InputError", "LeftBehind", "LinkError"),
        *("MeetingError", "MeetingRefused", "Method"),
        "OuterConfig",
        "OuterOptimizer",
        "Recipe",
        "RegionConfig",
        *("RegionLostError", "RunFinished", "RunLeft", "RunOver", "RunStopped"),
        "muon",
        "region_shard",
        "script_parser",
        "simulate",
        "split_world",
    ]
    assert hf_cocodc.__all__ == contract == sorted(contract)
    for name in contract:
        assert getattr(hf_cocodc, name).__name__ == name


@pytest.mark.parametrize("module", ["hf_cocodc", "hf_cocodc.resolve", "hf_cocodc.training.precheck"])
def test_importing_the_package_is_free(module: str) -> None:
    """Neither the package nor the rules for settings import torch, transformers or datasets."""
    code = f"import sys, {module}; print([m for m in ('torch', 'transformers', 'datasets', 'accelerate') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_every_tensor_is_made_on_a_named_device() -> None:
    """People set `torch.set_default_device`, and mean their model: no factory here follows it.

    Memory that is described otherwise (`frombuffer`, `x.new_zeros`, `zeros_like`) has its device already.
    """
    factories = {each.__name__ for each in _device_constructors()}
    found = []
    for module in MODULES:
        for node in ast.walk(tree(module)):
            if not isinstance(node, ast.Call) or not ast.unparse(node.func).startswith("torch."):
                continue
            name, keywords = ast.unparse(node.func), {each.arg for each in node.keywords}
            is_free = name.removeprefix("torch.") in factories and "device" not in keywords
            if is_free or (name == "torch.Generator" and not (node.args or keywords)):
                found.append(f"{module.relative_to(PACKAGE)}:{node.lineno}: {ast.unparse(node)}")
    assert not found


def test_factories_are_called_by_their_full_names() -> None:
    """So that the test above sees them."""
    factories = {each.__name__ for each in _device_constructors()}
    for module in MODULES:
        names = {name.removeprefix("torch.") for name in imports(module) if name.startswith("torch.")}
        assert not names & factories, module
