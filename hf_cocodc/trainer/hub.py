"""The Hub: region 0 alone creates a repository and uploads to it, and nothing of the run but its model."""

import contextlib
import inspect
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard
from transformers import Trainer
from transformers import trainer as its_module

from ..resolve import SOURCE, paper_of
from ..run.figures import outer_steps
from ..run.outer_optimizer import OuterOptimizer
from ..snapshot.folders import PREFIX
from ..snapshot.manifest import FOLDER

logger = logging.getLogger(__name__)

TAG = "hf-cocodc"
HEADING = "## Trained across regions"
README = "README.md"
_TEMPLATE = Path(__file__).with_name("card.md.j2")
_UNKNOWN = {
    "This model is a fine-tuned version of [](https://huggingface.co/) on ": "This model was trained from scratch on ",
    " on the None dataset.": " on an unknown dataset.",
}
"""What Trainer's draft says of a model and of a dataset that have no name, and what is meant; none of its arguments says so."""

OURS = (f"{FOLDER}/*", f"{PREFIX}*", "region-*", "log.txt", "log.*.txt", "log-machine-*.txt")
"""Patterns of what is never uploaded: journal, checkpoints, folders of regions, and logs of `hf-cocodc train`."""


def section(outer: OuterOptimizer, best: tuple[int, float] | None = None) -> dict[str, Any]:
    """What the card's section says, by the names of the template. `best`: inner step and metric of the weights, if they are not
    the last ones.
    """
    settings, synchronizer = outer.settings, outer.synchronizer
    interval = settings.get("sync_interval")  # a method of a user's own need not have one
    steps, landings, fragments = (
        synchronizer.inner_step,
        synchronizer.totals.landings,
        len(synchronizer.facts),
    )
    rows = {
        "method": settings["method"],
        "regions": synchronizer.link.num_regions,
        **({"H (sync_interval)": f"{interval} inner steps"} if interval else {}),
        **({"codec": settings["codec"]} if "codec" in settings else {}),
        "inner steps in each region": steps,
        "outer steps": outer_steps(landings, fragments),
        "inner steps between two landings of a fragment": f"{steps * fragments / max(landings, 1):.3g} on average",
        "sent by this region": f"{synchronizer.totals.bytes_sent:,} bytes",
        "parameters synchronized": f"{synchronizer.num_params:,}",
    }
    if best is not None:
        rows["weights"] = (
            f"the best of the run: of step {best[0]}, where the mean metric of the regions was {best[1]:.6g}"
        )
    others = ", ".join(
        f"{name}={value}"
        for name, value in settings.items()
        if name not in ("method", "sync_interval", "codec", "num_fragments", "digest_interval")
        and not name.startswith(SOURCE)
    )
    return {
        "rows": rows,
        "others": others,
        "paper": paper_of(str(settings["method"])),
        "regions_agree": synchronizer.method.outer.regions_agree,
    }


def draft(folder: Path, section: dict[str, Any], create: Callable, /, *args: Any, **kwargs: Any) -> None:
    """Let the trainer's method `create` draft the card, named after the folder of the run and not after a region's, and add our
    section.
    """
    takes = inspect.signature(create)
    given = takes.bind(*args, **kwargs)
    if "model_name" in takes.parameters and given.arguments.get("model_name") in (None, folder.name):
        given.arguments["model_name"] = folder.absolute().parent.name or None
    create(*given.args, **given.kwargs)
    if (folder / README).is_file():
        write(folder, section)


def write(folder: Path, section: dict[str, Any]) -> None:
    """Put the section at the end of the folder's README.md, in the place of an earlier one."""
    path = folder / README
    card = (
        ModelCard.load(path, ignore_metadata_errors=True) if path.is_file() else ModelCard("---\n{}\n---\n")
    )
    text = card.text.partition(HEADING)[0].strip()
    for phrase, meant in _UNKNOWN.items():
        text = text.replace(phrase, meant)
    data: Any = card.data
    tags = list(data.get("tags") or [])
    data["tags"] = [*tags, *([] if TAG in tags else [TAG])]
    ModelCard.from_template(data, template_path=str(_TEMPLATE), draft=text, **section).save(path)


def create_repository(trainer: Trainer, region: int, create: Callable[[], None]) -> None:
    """Let Trainer create its repository in region 0 alone, named after the run's folder."""
    if region:
        leave_to_region_0(region)
        return
    given, folder = trainer.args.hub_model_id, Path(trainer.args.output_dir or ".").absolute()
    if given is None and folder.name == "region-0":
        trainer.args.hub_model_id = folder.parent.name
    try:
        create()
    finally:
        trainer.args.hub_model_id = given


def leave_to_region_0(region: int) -> None:
    """Say why nothing is uploaded here."""
    logger.info("region %d leaves the Hub to region 0: all regions have the same global model.", region)


_turn = threading.RLock()


@contextlib.contextmanager
def only_the_model() -> Iterator[None]:
    """Inside the block, Trainer's uploads leave out what is `OURS`: it uploads its whole folder, and takes no patterns. Uploads
    of other threads stay as they are.
    """
    # older versions of Transformers have no such object and call the function
    where: Any = its_module.hf_api() if hasattr(its_module, "hf_api") else its_module
    thread = threading.get_ident()

    def upload_folder(*args: Any, ignore_patterns: Any = None, **kwargs: Any) -> Any:
        if threading.get_ident() != thread:
            return upload(*args, ignore_patterns=ignore_patterns, **kwargs)
        given = [ignore_patterns] if isinstance(ignore_patterns, str) else ignore_patterns or ()
        return upload(*args, ignore_patterns=[*given, *OURS], **kwargs)

    with _turn:  # else one would put back what another has put there
        upload, where.upload_folder = where.upload_folder, upload_folder
        try:
            yield
        finally:
            where.upload_folder = upload
