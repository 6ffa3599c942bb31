"""`output_dir/checkpoint-N` points to `output_dir/region-R/checkpoint-N`: scripts look for checkpoints in their own `output_dir`.

Transformers' `get_last_checkpoint(output_dir)` finds the newest of these links. Regions that share a disk share the links: each
makes those that are missing, and removes those to its own folder that no longer lead to a complete checkpoint.
"""

import logging
import os
import re
from pathlib import Path

from . import checkpoint as disk
from . import manifest

logger = logging.getLogger(__name__)

_REGION = re.compile(r"region-\d+")


def point(folder: Path) -> None:
    """Bring the links beside a region's folder in line with the complete checkpoints of its run.

    Args:
        folder: `output_dir/region-R`. For a folder of another name nothing is done.
    """
    if not _REGION.fullmatch(folder.name):
        return
    good = {
        path.name for path in disk.checkpoints(folder).values() if disk.unusable(path, hashes=False) is None
    }
    try:
        for name in good:
            link = folder.parent / name
            if not link.exists():
                half = folder.parent / f".{name}.{folder.name}"
                half.unlink(missing_ok=True)
                half.symlink_to(Path(folder.name) / name, target_is_directory=True)
                os.replace(half, link)
        for link in folder.parent.glob(f"{disk.PREFIX}*"):
            if link.name not in good and target(link) == folder.name:
                link.unlink(missing_ok=True)
    except OSError as error:
        logger.warning(
            "no link to the checkpoints in %s can be made in %s (%s): get_last_checkpoint does not find them there. Resume with "
            "trainer.train(resume_from_checkpoint=True), which needs no link.",
            *(folder, folder.parent, error),
        )


def target(path: Path) -> str | None:
    """Name of the region's folder to which a link of ours points; None if `path` is something else."""
    if not path.is_symlink():
        return None
    home, name = os.path.split(os.readlink(path))
    return home if name == path.name and _REGION.fullmatch(home) else None


def is_pointer(path: Path, folder: Path) -> bool:
    """Whether a path is one of the links beside a region's folder, or has the place of one that is not there.

    A copy of the output folder may have copies of checkpoints in place of links.
    """
    known = re.fullmatch(rf"{disk.PREFIX}\d+", path.name) and _REGION.fullmatch(folder.name)
    beside = path.parent.absolute().resolve() == folder.absolute().parent.resolve()
    if not known or not beside:
        return False
    copied = manifest.is_sealed(path) and any(path.parent.glob(f"region-*/{path.name}"))
    return target(path) is not None or copied or not os.path.lexists(path)
