"""Checks a machine for a recipe, in the order in which a run would find out."""

import dataclasses
import json
import re
import shlex
from collections.abc import Callable, Generator, Iterator
from typing import Any

from ...coordinator.hello import may_differ
from ...coordinator.secret import secret_of
from ...errors import CocodcError, InputError, shown
from ...link.backends import refuse_backend, why_no_gloo
from ...net.keys import Keys
from ...net.pacing import congestion_of
from ...resolve import settings
from ...run.about import About, function_of
from ...run.connect import hello
from ...run.samples import spread_samples
from ...settings.recipe import Recipe, facts_of_data
from ...trainer.callback import COMPARED
from ...training import building
from ...training.preflight import on_meta, preflight
from ...training.train import text_of
from . import coordinator, facts, others, place, storage, way
from .facts import OK, WRONG, Finding, unknown
from .needs import needs


@dataclasses.dataclass(frozen=True)
class Patient:
    """The part of a run that this machine will have.

    Attributes:
        recipe: the run; its regions section names the coordinator and the number of regions.
        region: the one that trains here; None if all do.
        wait_s: seconds to wait for the doctors of other regions, to meet them; 0 meets nobody.
    """

    recipe: Recipe
    region: int | None
    run: str
    wait_s: float = 0.0

    @property
    def count(self) -> int:
        """Number of regions that start the run."""
        return self.recipe.regions.count or 1

    @property
    def regions_here(self) -> int:
        """Number of regions that train on this machine."""
        return self.count if self.region is None else 1


def examine(patient: Patient, tell: Callable[[str], None]) -> Iterator[Finding]:
    """All findings about this machine, as they become known; `tell` gets a line of text before each slow step."""
    machine = facts.machine()
    yield place.versions(machine)
    yield place.devices(machine, patient.regions_here, bool(patient.recipe.training.get("use_cpu")))
    model = data = None
    if None in machine.unmet.values():
        yield unknown("recipe", "not looked at: packages are missing")
    else:
        model, data = yield from _recipe(patient, machine, tell)
    yield from _network(patient, model, data, tell)


def _recipe(
    patient: Patient, machine: facts.Machine, tell: Callable[[str], None]
) -> Generator[Finding, None, tuple[Any, str | None]]:
    """Findings about what the recipe builds and loads; returns the model on the meta device, and what the data is, as `dataset`
    does; None for what is not known.
    """
    recipe, here = patient.recipe, patient.regions_here
    tell("building the model without its weights")
    try:
        preflight(recipe, tries=True)
    except InputError as error:
        yield Finding("recipe", WRONG, str(error), _mended(str(error)))
        return None, None
    yield Finding("recipe", OK, "its model, tokenizer, arguments and trackers can be built")
    model = _model(recipe)
    most = max(patient.count, recipe.regions.max or 1)
    need = None if model is None else needs(recipe, model, most)
    yield from place.memory(machine, need, here, bool(recipe.training.get("use_cpu")))
    folder = building.output_dir(recipe)
    yield place.disk(facts.disk(folder), folder, need, here)
    tell("loading the data")
    line, data = dataset(recipe)
    yield line
    yield from held_out(recipe)
    return model, data


def _mended(message: str) -> str:
    """The command that mends a recipe, with the first --set that a message names: the simplest of several ways out."""
    named = re.search(r"--set [\w.]+=[\w.-]*\w", message)
    if named is not None:
        return f"hf-cocodc train RECIPE {named[0]}"
    return "hf-cocodc recipe keys    # then correct the recipe, or add --set KEY=VALUE"


def _model(recipe: Recipe) -> Any:
    """The model of a recipe, without its weights; None if it is not known before it is loaded."""
    try:
        return on_meta(recipe)
    except InputError:
        return None


def dataset(recipe: Recipe) -> tuple[Finding, str | None]:
    """The finding about the training data, and a description that is equal in two regions if the data is; None without data."""
    try:
        text = text_of(recipe, recipe.data.split)
    except InputError as error:
        return Finding("data", WRONG, str(error), _splits(recipe, "data.split")), None
    if recipe.data.streaming:
        return unknown("data", "a stream is not read: look that all regions name the same"), "a stream"
    words = f"{len(text)} documents, fingerprint {spread_samples(text)}"
    return Finding("data", OK, f"{words}: must be equal in all regions"), words


def held_out(recipe: Recipe) -> list[Finding]:
    """A finding if the run's held-out text is missing: a region would notice only after it has packed the training data."""
    strategy = recipe.training.get("eval_strategy", "no")
    if strategy == "no" and not recipe.training.get("eval_on_start"):
        return []
    try:
        text_of(recipe, recipe.data.eval_split)
    except InputError as error:
        words = f"data.eval_split={shown(recipe.data.eval_split)}, on which the run evaluates: {error}"
        command = _splits(recipe, "data.eval_split")
        return [Finding("data", WRONG, words, f"{command}, or training.eval_strategy=no")]
    return []


def _splits(recipe: Recipe, key: str) -> str:
    """The command that shows which splits there are."""
    data = recipe.data
    names = [shlex.quote(each) for each in (data.path, data.name) if each is not None]
    show = "import sys, datasets; print(datasets.get_dataset_split_names(*sys.argv[1:]))"
    listed = f'python -c "{show}" {" ".join(names)}    # then ' if names else ""
    return f"{listed}hf-cocodc train RECIPE --set {key}=SPLIT"


def _network(
    patient: Patient, model: Any, data: str | None, tell: Callable[[str], None]
) -> Iterator[Finding]:
    regions = patient.recipe.regions
    if max(patient.count, regions.max or 1) == 1:
        yield from way.all_here()
        return
    try:
        keys = secret_of(regions)
    except InputError as error:
        yield Finding("secret", WRONG, str(error), coordinator.NEW_SECRET)
        return
    if regions.coordinator is None:
        yield from way.all_here()
        yield _link(patient, "127.0.0.1", keys is not None)
        return
    if regions.in_storage:
        tell("asking the storage")
        findings = storage.examine(regions.coordinator, keys)
        yield from findings
        if all(each.level != WRONG for each in findings):
            yield from _others(patient, model, data, "127.0.0.1", keys, tell)
        return
    try:
        network = facts.network(regions.coordinator, regions.interface)
    except CocodcError as error:
        yield Finding("network", WRONG, str(error), "ip -brief address; ip route; resolvectl status")
        return
    yield way.address(network, regions.coordinator, regions.announced)
    yield way.port(network, regions.port)
    try:
        chosen = congestion_of(regions.congestion) or network.congestion
        yield way.congestion(dataclasses.replace(network, congestion=chosen), regions.rate_limit)
    except InputError as error:
        yield Finding("congestion", WRONG, str(error), "sysctl net.ipv4.tcp_allowed_congestion_control")
    yield _link(patient, network.address or "127.0.0.1", keys is not None)
    tell("calling the coordinator")
    findings = coordinator.reach(regions.coordinator, keys)
    yield from findings
    if network.address is not None and all(each.level != WRONG for each in findings):
        yield from _others(patient, model, data, network.address, keys, tell)


def _others(
    patient: Patient, model: Any, data: str | None, host: str, keys: Keys | None, tell: Callable[[str], None]
) -> Iterator[Finding]:
    """What the doctors of other regions find otherwise there. `host`: address of this machine that the others reach."""
    region, regions = patient.region, patient.recipe.regions
    if model is None or data is None or region is None:
        return
    if region >= patient.count:
        yield unknown("regions", f"region {region} joins later: its doctor does not meet those of the others")
    elif patient.wait_s:
        # what regions compare does not depend on the environment
        alike = dataclasses.replace(regions, region=region, join=None, start_timeout_s=patient.wait_s)
        # a process group of CUDA devices would take memory beside what trains there
        link = "tcp" if regions.link == "nccl" else regions.link
        resolved = dataclasses.replace(alike.resolved({}), link=link)
        told = _told(patient.recipe, model, data)
        yield from others.meet(resolved, patient.run, told, host, keys, tell)


def _told(recipe: Recipe, model: Any, data: str) -> dict[str, Any]:
    """What a doctor tells the others of the recipe and the data: what its region would, as far as one knows it before weights
    and data are loaded.
    """
    alike = dataclasses.replace(recipe.regions, region=0, join=None).resolved({})
    facts = facts_of_data(recipe)
    facts |= {f"training.{name}": recipe.training[name] for name in COMPARED if name in recipe.training}
    if not any(may_differ(name, alike.allowed) for name in facts_of_data(recipe)):
        facts["data"] = data
    return hello(
        model,
        {**settings(recipe.outer), **alike.compared},
        recipe.training.get("max_steps"),
        num_lanes=1,
        about=About(model=function_of(model), facts=json.loads(json.dumps(facts, default=str))),
    )


def _link(patient: Patient, host: str, has_secret: bool) -> Finding:
    """What would carry the payloads of means."""
    regions, use_cpu = patient.recipe.regions, bool(patient.recipe.training.get("use_cpu"))
    try:
        refuse_backend(regions.link, "cpu" if use_cpu else "cuda", patient.regions_here)
    except InputError as error:
        return Finding("link", WRONG, str(error), way.TCP)
    return way.link(regions, has_secret, why_no_gloo(host))
