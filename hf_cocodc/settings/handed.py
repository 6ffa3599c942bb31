"""A run's recipe for machines that join without one: what a region tells the coordinator."""

import dataclasses
import re
from typing import Any

from .fields import Settings
from .reading import read_yaml, yaml_of
from .recipe import Recipe
from .regions import RegionConfig

MOST_BYTES = 64 << 10
_OF_A_MACHINE = {
    "training": ("output_dir", "resume_from_checkpoint", "push_to_hub", "disable_tqdm", "local_rank"),
    "regions": ("region", "coordinator", "run", "secret_file", "interface", "port", "announce", "join"),
}
"""Keys that say nothing of the run elsewhere; so do those of training with these beginnings, among them tokens:"""
_OF_AN_ACCOUNT = ("hub_", "trackio_")
_SECRETS = re.compile(r"\bhf_[A-Za-z0-9]{20,}|://[^/\s@]*:[^/\s@]*@")
"""A token of the Hub, and a URL with a password."""


def handed_over(recipe: Recipe, regions: RegionConfig, run: str) -> dict[str, str]:
    """What a region tells the coordinator of its recipe: its `text`, in YAML, or `why` there is none.

    `regions`: its section, resolved: the recipe need not have the number of regions. `run`: the name of the run.
    """
    content = content_of(dataclasses.replace(recipe, regions=regions))
    for section, names in _OF_A_MACHINE.items():
        content[section] = {
            key: value
            for key, value in content[section].items()
            if not (key in names or (section == "training" and key.startswith(_OF_AN_ACCOUNT)))
        }
    content["training"]["output_dir"], content["regions"]["run"] = f"runs/{run}", run
    try:
        text = yaml_of(content)
        is_same = read_yaml(text, "recipe") == content
    except Exception:  # values that a script has put there may be anything
        is_same = False
    if not is_same:
        return {"why": "it has values that YAML cannot express"}
    if len(text.encode()) > MOST_BYTES:
        return {"why": f"it has {len(text.encode())} bytes, and a run keeps at most {MOST_BYTES}"}
    if _SECRETS.search(text):
        return {"why": "it holds a token, or an address with a password, which only its own machine may know"}
    return {"text": text}


def content_of(settings: Settings) -> dict[str, Any]:
    """The keys of a recipe or of a section that are not at their default: what a file of it holds."""
    content = {}
    for each in dataclasses.fields(settings):  # type: ignore[arg-type]
        value, default = getattr(settings, each.name), each.default
        if each.default_factory is not dataclasses.MISSING:
            default = each.default_factory()
        if value != default or each.name == "method":
            content[each.name] = content_of(value) if isinstance(value, Settings) else value
    return content
