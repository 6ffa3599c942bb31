"""The model card of a model trained across regions: method, settings, cost and paper."""

from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData

from ..run.outer_optimizer import OuterOptimizer

TAG = "hf-cocodc"
PAPERS = {
    "diloco": ("DiLoCo: Distributed Low-Communication Training of Language Models", "2311.08105"),
    "streaming": (
        "Streaming DiLoCo with overlapping communication: Towards a Distributed Free Lunch",
        "2501.18512",
    ),
    "eager": ("Eager Updates For Overlapped Communication and Computation in DiLoCo", "2502.12996"),
    "co2": ("CO2: Efficient Distributed Training with Full Communication-Computation Overlap", "2401.16265"),
    "dilocox": (
        "DiLoCoX: A Low-Communication Large-Scale Training Framework for Decentralized Cluster",
        "2506.21263",
    ),
    "cocodc": (
        "Cross-region Model Training with Communication-Computation Overlapping and Delay Compensation",
        "2504.17672",
    ),
}
_HEADING = "## Trained across regions"
_EAGER = " With eager updates, every region has its own global weights until the run ends. A checkpoint contains this region's."


def section(outer: OuterOptimizer) -> str:
    """The card's section, in Markdown."""
    settings, synchronizer = outer.settings, outer.synchronizer
    paper = PAPERS.get(str(settings["method"]))  # a method of a user's own may have none
    rows = {
        "method": settings["method"],
        "regions": synchronizer.link.num_regions,
        "H, inner steps between two transfers of a fragment": settings["sync_interval"],
        "fragments": len(synchronizer.fragments),
        "codec": settings["codec"],
        "inner steps in each region": synchronizer.inner_step,
        "sent by this region": f"{synchronizer.totals.bytes_sent:,} bytes",
        "parameters synchronised": f"{synchronizer.num_params:,}",
    }
    others = ", ".join(
        f"{name}={value}"
        for name, value in settings.items()
        if name not in ("method", "sync_interval", "codec", "num_fragments", "digest_interval")
    )
    own = "" if synchronizer.method.outer.regions_agree else _EAGER
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    return (
        f"{_HEADING}\n\nThese are the global weights of a run with hf_cocodc. Every region trained its own copy of the model, "
        f"and an outer optimizer combined the copies over slow links.{own}\n\n| | |\n|---|---|\n{table}\n\n"
        f"Other settings: {others}.\n"
        + (f"\nPaper: [{paper[0]}](https://arxiv.org/abs/{paper[1]}).\n" if paper else "")
    )


def write(folder: Path, text: str) -> None:
    """Append the section to the folder's README.md; replaces an earlier section."""
    path = folder / "README.md"
    card = (
        ModelCard.load(path, ignore_metadata_errors=True)
        if path.is_file()
        else ModelCard.from_template(ModelCardData(), template_str="---\n{{ card_data }}\n---\n")
    )
    card.text = f"{card.text.split(_HEADING)[0].rstrip()}\n\n{text}".lstrip()
    tags = list(card.data.get("tags") or [])
    card.data["tags"] = [*tags, *([] if TAG in tags else [TAG])]
    card.save(path)
