"""Regions that meet in a storage, as real processes: they find what they find over TCP, also when one of them is killed."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hf_cocodc.coordinator.in_storage import serving_in
from hf_cocodc.net.storage import Storage
from tests.benchmarks.storage import asked_of_the_hub
from tests.net.storages import folder_url
from tests.processes.coming_worker import events, loop
from tests.processes.pages import begin, prepare, shown
from tests.processes.test_coming_and_going import Run
from tests.processes.test_elastic import Three

PATIENCE_S = 300


@dataclass
class InStorage:
    """The coordinator of regions that meet in a storage: one of them."""

    address: str


def three(folder: Path, name: str, url: str = "") -> Three:
    folder.mkdir()
    return Three(folder, name, coordinator=InStorage(url)) if url else Three(folder, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["diloco", "streaming"])
def test_regions_in_a_storage_find_what_they_find_over_tcp(name: str, tmp_path: Path) -> None:
    """Every bit of the global params, after every step."""
    ends = []
    for place, url in (("over tcp", ""), ("in a storage", folder_url(tmp_path / "storage"))):
        regions = three(tmp_path / place, name, url)
        try:
            ends.append([(each["digests"], each["end"]) for each in regions.found(0, 1, 2)])
        finally:
            regions.end()
    assert ends[0] == ends[1]


@pytest.mark.slow
def test_two_notebooks_and_one_bucket_train_by_the_six_lines_of_the_readme(tmp_path: Path) -> None:
    """With a folder in the place of the bucket."""
    install, make_secret, export_secret, export_url, *trains = shown("README.md", "notebooks")
    assert install == "pip install '.[s3]'" and len(trains) == 2
    export_url = export_url.replace("s3://bucket", folder_url(tmp_path))
    places = [tmp_path / name for name in ("first", "second")]
    for place in places:
        prepare(place, steps=60)
    assert begin(make_secret, places[0], tmp_path / "secret").wait(PATIENCE_S) == 0
    shutil.copy(places[0] / "secret", places[1])
    exports = f"{export_secret} && {export_url}"
    logs = [tmp_path / f"log-{place.name}" for place in places]
    runs = [
        begin(f"{exports} && exec {words}", place, log)
        for words, place, log in zip(trains, places, logs, strict=True)
    ]
    try:
        for run, log in zip(runs, logs, strict=True):
            assert run.wait(PATIENCE_S) == 0, log.read_text()[-4000:]
    finally:
        for run in runs:
            run.kill()
            run.wait()
    models = [
        load_file(place / "out" / f"region-{number}" / "model.safetensors")
        for number, place in enumerate(places)
    ]
    assert all(each.equal(models[1][name]) for name, each in models[0].items())


@pytest.mark.slow
@pytest.mark.parametrize("serves", [True, False])
def test_a_region_that_is_killed_and_started_again_comes_back(serves: bool, tmp_path: Path) -> None:
    """The others train on meanwhile; all end with equal weights. Also if it was the one that served as coordinator.

    Nobody waits for a time-out: its new process knows that the earlier one has died.
    """
    url = folder_url(tmp_path / "storage")
    run = Run(
        tmp_path, 3, loop, 400, 0.1, "streaming", 1, coordinator=InStorage(url), timeout_s=2.0 * PATIENCE_S
    )
    try:
        run.wait_for_step(2, 9)
        pids = {process.pid: region for region, process in run.processes.items()}
        serving = pids[_served_by(Storage(url))]
        victim = serving if serves else (serving + 1) % 3
        rest = [region for region in range(3) if region != victim]
        run.kill(victim)
        run.start(victim)
        run.wait_for_join(victim)
        found = run.results(0, 1, 2)
    finally:
        for region in run.processes:
            run.kill(region)
    assert all(torch.equal(found[0]["weights"], each["weights"]) for each in found[1:])
    assert found[victim]["began_at"] > 0
    epochs = [event["members"] for event in events(tmp_path, rest[0], "epoch")]
    assert epochs == [[0, 1, 2], rest, [0, 1, 2]]


@pytest.mark.slow
def test_two_regions_of_one_account_ask_the_hub_less_than_it_allows() -> None:
    """They made 3,500 requests to its API in five minutes, where a write is two: they trained for a minute."""
    api, reads = asked_of_the_hub()
    assert 200 < api < 1000 and 200 < reads < 5000


def _served_by(objects: Storage) -> int:
    """The process that serves, or has served last."""
    return int(serving_in(objects).partition("-")[0])
