"""A region's checkpoints among the other regions': which one to resume from, and how a region gets one that it lacks."""

import json
import logging
import re
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from transformers import Trainer, TrainerState, TrainingArguments

from .. import state
from ..agreement import newest_common
from ..codecs.base import State
from ..errors import CheckpointError, InputError
from ..links.base import Link, Trailer

logger = logging.getLogger(__name__)

JOINING = "joining"
"""A fact of a checkpoint that was taken over from another region."""
_CHUNK_BYTES = 1 << 26


class Saved(NamedTuple):
    """A checkpoint's part that is ours, as read."""

    state: State
    facts: dict[str, Any]


def agree(link: Link, accelerator: Accelerator, folder: Path) -> Path | None:
    """The checkpoint under `folder` that this region resumes from; None where no region has any. A collective call.

    It is the newest one that is complete in every region. A region that has none takes over another's.

    Raises:
        CheckpointError: the disk refuses.
    """
    own: list[int] = []
    num_writers = 0
    if accelerator.is_main_process:
        for step, path in state.checkpoints(folder).items():
            wrong = state.unusable(path)
            if wrong is None:
                own.append(step)
            else:
                logger.warning("region %d: %s is not used: %s.", link.region, path, wrong)
        num_writers = state.num_writers(folder / f"{state.PREFIX}{own[-1]}") if own else 0
    run = state.run_of(folder)
    if accelerator.num_processes > 1:
        own, run, num_writers = broadcast_object_list([own, run, num_writers])
    step, holders, chosen = newest_common(link, own, run, num_writers)
    if not step:
        return None
    checkpoint = folder / f"{state.PREFIX}{step}"
    if len(holders) < link.num_regions:
        if accelerator.is_main_process or link.num_lanes == 1:  # of several lanes one is enough
            _take_over(link, accelerator.is_main_process, checkpoint, holders, chosen)
        accelerator.wait_for_everyone()
    return checkpoint


def of_region(checkpoint: Path, region: int) -> Path:
    """This region's own checkpoint where `checkpoint` may be the one of another: a script has one path for all regions."""
    home = checkpoint.parent
    own = home.with_name(f"region-{region}") / checkpoint.name
    return own if re.fullmatch(r"region-\d+", home.name) and own.is_dir() else checkpoint


def give_up_later(folder: Path, step: int, region: int) -> None:
    """A run goes on from `step`: its later checkpoints in `folder` are no longer gone on from.

    Those of another run stay: its folder may have been given by mistake.
    """
    for later, path in state.checkpoints(folder).items():
        if later > step and state.unusable(path) is None:
            logger.warning(
                "region %d: checkpoint-%d is given up, for all regions go on from step %d, and may come by other numbers.",
                *(region, later, step),
            )
            (path / state.COMPLETE).unlink()


def has_finished(facts: dict[str, Any], args: TrainingArguments, checkpoint: Path) -> bool:
    """Whether the run of a checkpoint had finished, and no more steps or epochs are asked for now.

    Raises:
        InputError: it had not, but fewer steps are asked for than it has made.
    """
    if args.max_steps > 0:
        if facts["finished"] or facts["step"] < args.max_steps:
            return args.max_steps <= facts["step"]
        raise InputError(
            f"{checkpoint} is of step {facts['step']} of a run that was stopped, and max_steps={args.max_steps} leaves nothing "
            f"to train. Raise max_steps, or take the global model of that moment: {checkpoint / state.EXPORT}."
        )
    if not facts["finished"]:
        return False
    trained = TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
    return args.num_train_epochs <= trained.num_train_epochs


def check(saved: Saved, settings: dict[str, Any], link: Link) -> None:
    """Compare the run that a checkpoint was written by with this one; what cannot be exact is said. A collective call.

    Raises:
        CheckpointError: it is of another method, another region's too, or of regions with another number of lanes.
    """
    facts = saved.facts
    writer = -1 if facts.get(JOINING) else facts["region"]
    writers = [
        trailer.inner_step for trailer in link.gather(Trailer(inner_step=writer), "who wrote the checkpoints")
    ]
    # regions may have been numbered anew, but two that go on from one's local weights and random numbers train the same
    if writer not in (-1, link.region) and writers.count(writer) > 1:
        raise CheckpointError(
            f"the checkpoint is region {facts['region']}'s, and this is region {link.region}. Give every region its own, or let "
            "them find it: trainer.train(resume_from_checkpoint=True), or hf-cocodc train RECIPE --resume."
        )
    if facts["num_lanes"] != link.num_lanes:
        raise CheckpointError(
            f"the checkpoint was written by a region of {facts['num_lanes']} lane(s), this region has {link.num_lanes}. Launch "
            "it with as many ranks and the same sharding, or start anew from checkpoint-N/global."
        )
    theirs = facts["settings"]
    if theirs["method"] != settings["method"]:
        raise CheckpointError(
            f"the checkpoint was written by outer.method={theirs['method']}, this run has {settings['method']}. Resume with "
            "the method that wrote it, or start anew from its global model (checkpoint-N/global)."
        )
    changed = {name for name in theirs.keys() | settings.keys() if theirs.get(name) != settings.get(name)}
    for name in sorted(changed):
        logger.warning(
            "outer.%s was %r when the checkpoint was written and is %r now: the run goes on with the new value, and is not "
            "the one that was stopped.",
            *(name, theirs.get(name), settings.get(name)),
        )
    if facts["num_regions"] != link.num_regions:
        logger.warning(
            "resuming %d regions as %d: the data is shared out anew, so that some of it is seen twice and some not in this "
            "epoch; steps and residuals of regions that are gone are lost.",
            *(facts["num_regions"], link.num_regions),
        )
    if facts.get(JOINING):
        logger.warning(
            "region %d had no checkpoint of step %d: it goes on with the global params, outer state and inner optimizer of "
            "region %d, with random numbers and no residuals of its own.",
            *(link.region, facts["step"], facts["region"]),
        )


def export(trainer: Trainer, folder: str) -> None:
    """Save the model as it is; also where Trainer itself would save shards alone."""
    if not trainer.is_fsdp_enabled:
        trainer.save_model(folder, _internal_call=True)
        return
    weights = trainer.accelerator.get_state_dict(trainer.model)
    if trainer.args.should_save:
        trainer._save(folder, state_dict=weights)


def _take_over(link: Link, is_main: bool, checkpoint: Path, holders: list[int], run: int) -> None:
    """Send a checkpoint from the first region that holds it to those that do not; all regions have to call."""
    source = min(holders)
    lacking = link.region not in holders
    writes = lacking and is_main
    if lacking:
        logger.warning(
            "region %d has no complete checkpoint of step %s: taking region %d's.",
            *(link.region, checkpoint.name.removeprefix(state.PREFIX), source),
        )
    files = _shared_files(checkpoint) if link.region == source else {}
    listed = _spread(link, source, json.dumps(files).encode(), "the list of files of its checkpoint")
    half = checkpoint.with_name(f"{checkpoint.name}.{JOINING}")
    if writes:
        shutil.rmtree(half, ignore_errors=True)
    for name, size in json.loads(listed).items():
        if writes:
            (half / name).parent.mkdir(parents=True, exist_ok=True)
        for start in range(0, size, _CHUNK_BYTES):
            chunk = b""
            if link.region == source:
                with (checkpoint / name).open("rb") as file:
                    file.seek(start)
                    chunk = file.read(_CHUNK_BYTES)
            chunk = _spread(link, source, chunk, f"{name} of its checkpoint")
            if writes:
                with (half / name).open("ab") as file:
                    file.write(chunk)
    if writes:
        _make_own(half)
        if state.damage(checkpoint) is None:
            aside = checkpoint.with_name(f"{checkpoint.name}.run{state.run_of(checkpoint.parent)}")
            logger.warning("%s is of another run: it is now %s.", checkpoint, aside)
            shutil.rmtree(aside, ignore_errors=True)
            checkpoint.rename(aside)
        shutil.rmtree(checkpoint, ignore_errors=True)
        half.rename(checkpoint)
        state.begin_run(checkpoint.parent, run)
        state.seal(checkpoint)


def _shared_files(checkpoint: Path) -> dict[str, int]:
    """Files that another region can go on from, with their sizes: not the local weights nor the random numbers."""
    exported = {path.name for path in (checkpoint / state.EXPORT).iterdir()}
    names = {
        path.relative_to(checkpoint).as_posix(): path.stat().st_size
        for path in sorted(checkpoint.rglob("*"))
        if path.is_file()
    }
    return {
        name: size
        for name, size in names.items()
        if name not in exported and name != state.COMPLETE and not name.startswith("rng_state")
    }


def _make_own(checkpoint: Path) -> None:
    """Turn what was received into a checkpoint: the global weights are the local ones of a region that joins."""
    for path in (checkpoint / state.EXPORT).iterdir():
        shutil.copyfile(path, checkpoint / path.name)
    for path in (checkpoint / state.FOLDER).glob("state*.json"):
        facts = json.loads(path.read_text(encoding="utf-8"))
        path.write_text(json.dumps({**facts, JOINING: True}), encoding="utf-8")


def _spread(link: Link, source: int, data: bytes, what: str) -> bytes:
    """Bytes of region `source`, in every region."""
    what = f"region {source}'s {what}"
    length = torch.tensor([len(data)], dtype=torch.int64)
    link.broadcast(length.view(torch.float32), f"the length of {what}", source)
    size = int(length)
    padded = bytearray(data if link.region == source else size)
    padded += bytes(-size % 4)
    if not padded:
        return b""
    flat = torch.frombuffer(padded, dtype=torch.float32)
    link.broadcast(flat, what, source)
    return bytes(padded[:size])
