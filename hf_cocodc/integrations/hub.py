"""The Hub: region 0 alone creates a repository and uploads to it, and nothing of the run but its model."""

import contextlib
import functools
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback
from transformers import trainer as its_module

from ..run.checkpoint import PREFIX
from ..run.manifest import FOLDER

logger = logging.getLogger(__name__)

OURS = (f"{FOLDER}/*", f"{PREFIX}*", "region-*", "log.txt", "log.*.txt", "log-machine-*.txt")
"""Patterns of what is never uploaded: journal, checkpoints, folders of regions, and logs of `hf-cocodc train`."""

_WRAPPERS: set[Any] = set()
"""Our wrappers of `Trainer.init_hf_repo`; other packages may have wrapped it, too."""


def only_region_0_creates(kind: type[TrainerCallback]) -> None:
    """Let Trainers with a callback of type `kind` create a repository in region 0 alone, named after the run's folder.

    Trainer's constructor creates it before it tells any callback. Therefore this one method is wrapped in the class, and not in
    the object; for Trainers without our callback nothing changes. Calling this again does nothing.
    """
    create = Trainer.init_hf_repo
    if create in _WRAPPERS:
        return

    @functools.wraps(create)
    def init_hf_repo(self: Trainer, *args: Any, **kwargs: Any) -> None:
        ours = [each for each in self.callback_handler.callbacks if isinstance(each, kind)]
        if not ours:
            create(self, *args, **kwargs)
        elif ours[0].region:
            leave_to_region_0(ours[0].region)
        else:
            given, folder = self.args.hub_model_id, Path(self.args.output_dir or ".").absolute()
            if given is None and folder.name == "region-0":
                self.args.hub_model_id = folder.parent.name
            try:
                create(self, *args, **kwargs)
            finally:
                self.args.hub_model_id = given

    _WRAPPERS.add(init_hf_repo)
    Trainer.init_hf_repo = init_hf_repo


def leave_to_region_0(region: int) -> None:
    """Say why nothing is uploaded here."""
    logger.info("region %d leaves the Hub to region 0: all regions have the same global model.", region)


@contextlib.contextmanager
def only_the_model() -> Iterator[None]:
    """Inside the block, Trainer's uploads leave out what is `OURS`.

    Trainer uploads its whole folder, and takes no patterns.
    """
    # older versions of Transformers have no such object and call the function
    where: Any = its_module.hf_api() if hasattr(its_module, "hf_api") else its_module
    upload = where.upload_folder

    def upload_folder(*args: Any, ignore_patterns: Any = None, **kwargs: Any) -> Any:
        given = [ignore_patterns] if isinstance(ignore_patterns, str) else ignore_patterns or ()
        return upload(*args, ignore_patterns=[*given, *OURS], **kwargs)

    where.upload_folder = upload_folder
    try:
        yield
    finally:
        where.upload_folder = upload
