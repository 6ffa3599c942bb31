"""Looks at a machine for a recipe, in the order in which a run would find out."""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator
from typing import Any

from ..errors import CocodcError, InputError
from ..meeting.secret import secret_of
from ..recipes.recipe import Recipe, facts_of_data
from ..resolve import settings
from ..run.samples import spread_samples
from ..training import building
from ..training.data import load_text
from ..training.preflight import on_meta, preflight
from . import facts, others, place, way
from .findings import OK, WRONG, Finding, unknown
from .needs import Needs, needs


@dataclasses.dataclass(frozen=True)
class Patient:
    """The part of a run that this machine will have.

    Attributes:
        recipe: the run; its regions section has the store, and the number of regions.
        region: that trains here; None if all do.
        run: name of the run.
        wait_s: seconds to wait for the doctors of other regions.
    """

    recipe: Recipe
    region: int | None
    run: str
    wait_s: float = 0.0

    @property
    def count(self) -> int:
        """Number of regions with which the run begins."""
        return self.recipe.regions.count or 1

    @property
    def regions_here(self) -> int:
        """Number of regions that train on this machine."""
        return self.count if self.region is None else 1


def examine(patient: Patient, tell: Callable[[str], None]) -> Iterator[Finding]:
    """All lines about this machine, as they are found.

    Args:
        patient: what shall run here.
        tell: called with a line of text before something that takes long.
    """
    recipe, here = patient.recipe, patient.regions_here
    use_cpu = bool(recipe.training.get("use_cpu"))
    machine = facts.machine()
    yield place.versions(machine)
    yield place.devices(machine, here, use_cpu)
    tell("building the model without its weights")
    data = None
    try:
        preflight(recipe, here)
    except InputError as error:
        yield Finding("recipe", WRONG, str(error))
    else:
        yield Finding("recipe", OK, "its model, tokenizer, arguments and trackers can be built")
        need = _needs(patient)
        yield from place.memory(machine, need, here, use_cpu)
        folder = building.output_dir(recipe)
        yield place.disk(facts.disk(folder), folder, need, here)
        tell("loading the data")
        line, data = dataset(recipe)
        yield line
    yield from _network(patient, machine, data, tell)


def _needs(patient: Patient) -> Needs | None:
    try:
        model = on_meta(patient.recipe)
    except InputError:
        return None
    return needs(patient.recipe, model, max(patient.count, patient.recipe.regions.max or 1))


def dataset(recipe: Recipe) -> tuple[Finding, str | None]:
    """The line about the training data; and words that are equal in two regions if the data is. None: there is no data."""
    data = recipe.data
    try:
        text: Any = load_text(
            data.builtin, data.path, data.name, data.split, data.text_column, data.streaming
        )
    except InputError as error:
        return Finding("data", WRONG, str(error)), None
    if data.streaming:
        return unknown("data", "a stream is not read: look that all regions name the same"), "a stream"
    words = f"{len(text)} documents, fingerprint {spread_samples(text)}"
    return Finding("data", OK, f"{words}: must be equal in all regions"), words


def _network(
    patient: Patient, machine: facts.Machine, data: str | None, tell: Callable[[str], None]
) -> Iterator[Finding]:
    regions = patient.recipe.regions
    if max(patient.count, regions.max or 1) == 1 or regions.store is None:
        yield from way.all_here()
        return
    try:
        keys = secret_of(regions)
        network = facts.network(regions.store, regions.interface)
    except CocodcError as error:
        yield Finding("network", WRONG, str(error))
        return
    except OSError as error:
        words = f"no way to the store at {regions.store}: {error.strerror or error}. Correct regions.store (--store)."
        yield Finding("network", WRONG, words, "ip route; resolvectl status")
        return
    yield way.interface(network, regions.interface)
    yield way.packets(network)
    yield way.ports(network)
    yield way.address(network, regions.store)
    yield way.congestion(network, regions.rate_limit)
    yield way.buffers(network)
    yield way.clock(network)
    tell("calling the store")
    found, store = others.reach(regions.store, regions, keys)
    yield from found
    if store is None or data is None or patient.region is None or network.address is None:
        return
    compared = {**settings(patient.recipe.outer), **facts_of_data(patient.recipe)}
    mine = {
        "versions": machine.versions,
        "settings": hashlib.sha256(json.dumps(compared, sort_keys=True).encode()).hexdigest()[:16],
        "data": data,
    }
    yield from others.compare(
        store, patient.run, patient.region, patient.count, mine, network.address, patient.wait_s, tell
    )
