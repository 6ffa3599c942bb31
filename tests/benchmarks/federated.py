"""NVFlare as it is deployed: a server, and sites with kits of their own, which only dial out.

Region 0 provisions the kits, and runs the server beside its site. Each site runs as a process, gets the job that region 0
submits, and starts a process for it; in there, `federated_site` runs the common loop over the Client API. The server's FedOpt
makes the outer step. All connections have mutual TLS, by default.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import nn

from . import workload
from .workload import Region, model_of

PATIENCE_S = 500
"""Seconds for a row: the processes take half a minute to start, on a machine that has nothing else to do."""
ROUNDS = 100_000
"""More than any row makes: the loop decides when the training has ended."""
ADMIN = "admin@here.org"
PREFIX = "net."
_SERVER = [
    "nvflare.private.fed.app.server.server_train",
    "-s",
    "fed_server.json",
    "--set",
    "secure_train=true",
]
_SITE = ["nvflare.private.fed.app.client.client_train", "-s", "fed_client.json", "--set", "secure_train=true"]


class ServerModel(nn.Module):
    """The model of the server: a class without arguments, as a job names it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = model_of(workload.TRAINED)


def run(place: Region, row: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """Train a row in this region, with processes of NVFlare. Returns what the region's site has found."""
    from .worker import Gate

    gate, kits = Gate(place, row["row"]), place.folder / f"{row['row']}.kits"
    spec = place.folder / f"{row['row']}.{place.region}.spec.json"
    spec.write_text(json.dumps({"place": {**vars(place), "folder": str(place.folder)}, "row": row}))
    processes: list[subprocess.Popen] = []
    try:
        if place.region == 0:
            _provision(place, kits)
            processes.append(_start(kits / "server", _SERVER))
        gate.meet("provisioned")
        processes.append(_start(kits / _site(place.region), [*_SITE, f"uid={_site(place.region)}"]))
        if place.region == 0:
            _submit(place, row, kits / ADMIN, settings)
        found = _awaited(place.folder / f"{row['row']}.{place.region}.found.json", processes)
        gate.meet("found")
        return found
    finally:
        _end(processes)


def _site(region: int) -> str:
    return f"site-{region}"


def region_of(site: str) -> int:
    """The region of a site."""
    return int(site.removeprefix("site-"))


def _provision(place: Region, kits: Path) -> None:
    """Make the kits: NVFlare's own command, with its default builders."""
    clients = [{"name": _site(region), "type": "client", "org": "here"} for region in range(place.count)]
    server = {
        "name": "server",
        "type": "server",
        "org": "here",
        "default_host": place.first,
        "fed_learn_port": place.port,
        "admin_port": place.port,
    }
    builders = ["workspace.Workspace", "static_file.StaticFile", "cert.Cert", "signature.Signature"]
    project: dict[str, Any] = {
        "api_version": 3,
        "name": "side_by_side",
        "description": "side by side",
        "participants": [
            server,
            *clients,
            {"name": ADMIN, "type": "admin", "org": "here", "role": "project_admin"},
        ],
        "builders": [{"path": f"nvflare.lighter.impl.{each}Builder", "args": {}} for each in builders],
    }
    project["builders"][1]["args"] = {"config_folder": "config", "scheme": "grpc"}
    made = kits.with_suffix(".made")
    made.mkdir()
    (made / "project.yml").write_text(json.dumps(project))
    command = [sys.executable, "-m", "nvflare.cli", "provision", "-p", "project.yml", "-w", str(made)]
    subprocess.run(command, cwd=made, check=True, timeout=PATIENCE_S)
    (made / "side_by_side" / "prod_00").rename(kits)
    for kit in kits.iterdir():
        (kit / "transfer").mkdir(exist_ok=True)
        resources = kit / "local" / "resources.json.default"
        own = resources.read_text().replace('"/tmp/nvflare/', f'"{kits}/')  # where the server keeps jobs
        resources.with_suffix("").write_text(own)


def _start(kit: Path, words: list[str]) -> subprocess.Popen:
    """What the kit's startup script runs."""
    module, *options = words
    command = [
        sys.executable,
        "-u",
        "-m",
        module,
        "-m",
        str(kit),
        *options,
        "org=here",
        "config_folder=config",
    ]
    return subprocess.Popen(command, cwd=kit)


def _submit(place: Region, row: dict[str, Any], kit: Path, settings: dict[str, Any]) -> None:
    """Submit the job, as soon as the server answers."""
    from nvflare.app_opt.pt.recipes.fedopt import FedOptRecipe
    from nvflare.recipe import ProdEnv

    optimizer = {
        "lr": settings["outer_lr"],
        "momentum": settings["outer_momentum"],
        "nesterov": settings["outer_momentum"] > 0,
    }
    recipe = FedOptRecipe(
        name=row["row"],
        model={"class_path": f"{__name__}.{ServerModel.__name__}", "args": {}},
        min_clients=place.count,
        num_rounds=ROUNDS,
        train_script=str(Path(__file__).with_name("federated_site.py")),
        train_args=str(place.folder / row["row"]),
        device="cpu",
        optimizer_args={"path": "torch.optim.SGD", "args": optimizer},
    )
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            recipe.execute(ProdEnv(str(kit), login_timeout=10.0, username=ADMIN))
            return
        except Exception:  # NVFlare raises a RuntimeError of any cause
            if time.monotonic() > deadline:
                raise
            time.sleep(1.0)


def _awaited(path: Path, processes: list[subprocess.Popen]) -> dict[str, Any]:
    deadline = time.monotonic() + PATIENCE_S
    while not path.exists():
        ended = [process.args for process in processes if process.poll() is not None]
        if ended or time.monotonic() > deadline:
            raise RuntimeError(
                f"NVFlare: {f'ended: {ended}' if ended else 'its site has found nothing in time'}"
            )
        time.sleep(0.05)
    found = json.loads(path.read_text())
    if "failed" in found:
        raise RuntimeError(found["failed"])
    return found


def _end(processes: list[subprocess.Popen]) -> None:
    """Kill the processes and those that they have started, in sessions of their own."""
    import psutil  # comes with NVFlare

    family = []
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            family += psutil.Process(process.pid).children(recursive=True)
        process.kill()
    for child in family:
        with suppress(psutil.NoSuchProcess):
            child.kill()
    for process in processes:
        process.wait()


def found_by(name: str, region: int, result: dict[str, Any]) -> None:
    """Write what a site has found; `name` is the folder and the row."""
    path = Path(f"{name}.{region}.found.json")
    unfinished = path.with_suffix(".new")
    unfinished.write_text(json.dumps(result))
    os.replace(unfinished, path)
