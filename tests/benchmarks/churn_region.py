"""One region of a run of `churn`: Trainer over a tiny Llama. It writes how it has ended."""

from __future__ import annotations

import json
import os
import sys
import zlib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainingArguments

from hf_cocodc import CoCoDCCallback, OuterConfig, RegionConfig
from hf_cocodc.errors import CocodcError
from hf_cocodc.net.mailbox import mailbox
from tests.net.storages import Faulty
from tests.processes.coming_worker import Slow
from tests.processes.worker import Tokens
from tests.toys import llama, params_of

SAVE_EVERY = 10


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is equal in all regions of a run.

    Attributes:
        steps: inner steps of the run.
        step_s: seconds that each takes at least, until the run is to hurry.
        evals: inner steps between two evaluations; 0 for none.
        outer, regions: settings by name.
        faults: share of the requests to the storage in which regions meet that go wrong (`Faulty`).
    """

    steps: int
    step_s: float
    evals: int = 0
    outer: dict[str, Any] = field(default_factory=dict)
    regions: dict[str, Any] = field(default_factory=dict)
    faults: float = 0.0


@dataclass(frozen=True, kw_only=True)
class End:
    """How a process has ended.

    Attributes:
        error: name of the error that ended it, "" for none.
        text: of the error.
        step: inner steps made.
        digest: of the global weights.
    """

    error: str
    text: str
    step: int
    digest: int = 0


def live(folder: str, life: str, setting: Setting, start_timeout_s: float, resume: bool) -> None:
    """Train, and write the end to `life`-RANK.json, the weights to `life`-RANK.pt. Exits as a script would."""
    home, region = Path(folder), int(os.environ["HF_COCODC_REGION"])
    place = home / f"{life}-{os.environ.get('RANK', '0')}"
    if setting.faults:
        Faulty(
            mailbox(os.environ["HF_COCODC_COORDINATOR"]).storage,
            zlib.crc32(place.name.encode()),
            setting.faults,
        )
    callback = CoCoDCCallback(
        OuterConfig(**setting.outer),
        RegionConfig(run="churn", start_timeout_s=start_timeout_s, **setting.regions),
    )
    trainer = Trainer(
        model=llama(seed=region, layers=2),
        args=arguments(home, setting),
        train_dataset=Tokens(64 + 8 * region, seed=region),
        eval_dataset=Tokens(8),
        callbacks=[Slow(home, region, setting.step_s), callback],
    )
    try:
        trainer.train(resume_from_checkpoint=True if resume else None)
    except CocodcError as error:
        write(place, End(error=type(error).__name__, text=str(error), step=trainer.state.global_step))
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        sys.exit(error.exit_code)
    assert callback.outer is not None
    digest = callback.outer.synchronizer.global_digest()
    torch.save(params_of(trainer.model), place.with_suffix(".pt"))
    write(place, End(error="", text="", step=trainer.state.global_step, digest=digest))


def arguments(home: Path, setting: Setting) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(home / "out"),
        max_steps=setting.steps,
        per_device_train_batch_size=2 // int(os.environ.get("WORLD_SIZE", 1)),
        learning_rate=1e-3,
        save_strategy="steps",
        save_steps=SAVE_EVERY,
        eval_strategy="steps" if setting.evals else "no",
        eval_steps=setting.evals or None,
        logging_steps=SAVE_EVERY,
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        use_cpu=True,
    )


def write(place: Path, end: End) -> None:
    place.with_suffix(".json").write_text(json.dumps(asdict(end)))


def read(place: Path) -> End | None:
    """The end of a process; None if it has not told it."""
    path = place.with_suffix(".json")
    return End(**json.loads(path.read_text())) if path.is_file() else None
