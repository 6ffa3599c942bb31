"""Two regions of a run never save into one folder."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from typing import Any

import pytest

from hf_cocodc import simulate
from hf_cocodc.errors import CheckpointError
from hf_cocodc.link.base import Link
from hf_cocodc.snapshot import checkpoint as state
from hf_cocodc.snapshot import manifest
from hf_cocodc.snapshot.folders import claim
from tests.run.test_loaded import Loop


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("named", [True, False], ids=["a path", "Accelerate's names"])
def test_two_regions_do_not_save_into_one_folder(named: bool, first: int, tmp_path: Path) -> None:
    """Whichever comes first; what it has saved stays as it is."""
    folder, said = tmp_path / "ck", {}

    def body(region: int, link: Link) -> None:
        naming = {} if named else {"project_dir": str(folder), "automatic_checkpoint_naming": True}
        loop = Loop(link, **naming)
        loop.begin()

        def save(step: int) -> None:
            if step == (2 if region == first else 9):
                try:
                    loop.accelerator.save_state(str(folder) if named else None)
                except CheckpointError as error:
                    said[region] = str(error)

        loop.train(until=9, then=save)

    simulate(body, regions=2)
    own = folder / f"region-{1 - first}"
    assert said == {
        1
        - first: f"region {1 - first} is to save into {folder}, where region {first} of this run saves: they would overwrite "
        f"each other. Nothing was written. Give every region a folder of its own, for example {own}."
    }
    checkpoint = folder if named else folder / "checkpoints" / "checkpoint_0"
    assert manifest.damage(checkpoint) is None
    assert state.facts_of(checkpoint).region == first


def test_a_region_saves_again_into_its_folder_and_later_runs_do(tmp_path: Path) -> None:
    """Also where regions have other numbers then: machines may be numbered anew."""

    def body(region: int, link: Link, place: int) -> None:
        loop, home = Loop(link), tmp_path / f"machine-{place}"
        loop.begin()
        loop.train(4, lambda step: step > 2 and loop.accelerator.save_state(str(home)))
        assert state.facts_of(home).region == region
        assert len(list((home / "cocodc").glob("saved-by-*"))) == 1

    simulate(lambda region, link: body(region, link, region), regions=2)
    simulate(lambda region, link: body(region, link, 1 - region), regions=2)


def test_of_regions_that_save_at_once_one_does(tmp_path: Path) -> None:
    for trial in range(50):
        folder, barrier, own = tmp_path / f"{trial}", threading.Barrier(4), []

        def save(region: int, folder: Path = folder, barrier: Any = barrier, own: list = own) -> None:
            barrier.wait()
            with contextlib.suppress(CheckpointError):
                claim(folder, 7, region, range(4))
                own.append(region)

        threads = [threading.Thread(target=save, args=(region,)) for region in range(4)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        assert len(own) == 1


def test_the_folder_of_a_region_that_has_left_is_free(tmp_path: Path) -> None:
    claim(tmp_path, 7, 2, [0, 1, 2])
    claim(tmp_path, 7, 1, [0, 1])
    with pytest.raises(CheckpointError, match="where region 1 of this run saves"):
        claim(tmp_path, 7, 2, [0, 1, 2])
