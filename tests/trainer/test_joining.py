"""A region that comes into a run, with what a script may ask of its Trainer: TrainingArguments, field by field."""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset
from transformers import EarlyStoppingCallback, TrainerCallback, TrainingArguments

from hf_cocodc import OuterConfig
from hf_cocodc.errors import InputError
from hf_cocodc.trainer import place
from tests.trainer.joining import COMMON, CONFIG, TIMEOUT_S, join

NAMES = {field.name for field in dataclasses.fields(TrainingArguments)}
BEST = {"eval_strategy": "steps", "metric_for_best_model": "loss", "greater_is_better": False}
SAVES = {"save_strategy": "steps", "save_steps": 2}

RUNS: dict[str, dict[str, Any]] = {
    "decides by evaluations": {
        **BEST,
        **SAVES,
        "eval_steps": 1,
        "eval_on_start": True,
        "load_best_model_at_end": True,
        "save_total_limit": 2,
        "save_on_each_node": True,
    },
    "a rate that follows the evaluation": {
        **BEST,
        "eval_steps": 2,
        "lr_scheduler_type": "reduce_lr_on_plateau",
        "lr_scheduler_kwargs": {"patience": 1},
        "learning_rate": 0.01,
    },
    "saves where an evaluation is the best": {**BEST, "save_strategy": "best", "eval_delay": 4},
    "epochs and a schedule": {
        "max_steps": -1,
        "num_train_epochs": 400,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 0.1,
        "dataloader_drop_last": True,
        "include_num_input_tokens_seen": "all",
        "logging_first_step": True,
    },
    "another optimizer, smoothing and noise": {
        "optim": "adafactor",
        "optim_args": "scale_parameter=False,relative_step=False",
        "label_smoothing_factor": 0.1,
        "neftune_noise_alpha": 5.0,
        "max_grad_norm": 0.0,
        "weight_decay": 0.1,
        "seed": 3,
        "data_seed": 4,
    },
    "half precision, activations anew": {
        "bf16": True,
        "bf16_full_eval": True,
        "activation_checkpointing": True,
        "eval_strategy": "steps",
    },
    "data from where it is, grouped by length": {
        "ignore_data_skip": True,
        "train_sampling_strategy": "group_by_length",
        "dataloader_num_workers": 1,
        "dataloader_persistent_workers": True,
        "dataloader_prefetch_factor": 1,
        "accelerator_config": {"use_seedable_sampler": False, "split_batches": True},
        "torch_empty_cache_steps": 2,
    },
    "Trainer's own way with callbacks": {
        **BEST,
        **SAVES,
        "restore_callback_states_from_checkpoint": True,
        "logging_strategy": "no",
        "logging_nan_inf_filter": False,
    },
    "evaluation in parts": {
        "eval_strategy": "steps",
        "per_device_eval_batch_size": 1,
        "eval_accumulation_steps": 1,
        "eval_do_concat_batches": False,
        "prediction_loss_only": True,
    },
}
"""Fields that matter where a region comes in: they say what regions do together, what a base holds, or which numbers follow."""
QUICK = list(RUNS)[:4]

COUNTS_ALIKE = "how a step is computed: nothing of it is in a base"
LOADS = "how batches are read: each region's own loader does, wherever the run is"
IN_REGION = "inside a region: no other region takes part"
SAYS = "what is said and shown: no number follows"
TO_HUB = "region 0 alone pushes, and a newcomer has its own folder"
REFUSED = "refused when the callback meets its Trainer (attaching.refuse_arguments)"
ANY_REGION = "where a region writes, or which program it is: it has its own"
REASONS = {
    **dict.fromkeys(("adam_beta1", "adam_beta2", "adam_epsilon", "optim_target_modules"), COUNTS_ALIKE),
    **dict.fromkeys(
        ("fp16", "fp16_full_eval", "tf32", "torch_compile", "torch_compile_backend"), COUNTS_ALIKE
    ),
    **dict.fromkeys(
        ("torch_compile_mode", "use_liger_kernel", "liger_kernel_config", "use_cache"), COUNTS_ALIKE
    ),
    **dict.fromkeys(("gradient_checkpointing", "activation_checkpointing_kwargs"), COUNTS_ALIKE),
    "gradient_checkpointing_kwargs": COUNTS_ALIKE,
    "full_determinism": f"{COUNTS_ALIKE} (and it changes all later tests)",
    **dict.fromkeys(("dataloader_pin_memory", "dataloader_multiprocessing_context"), LOADS),
    **dict.fromkeys(
        ("dataloader_in_order", "remove_unused_columns", "label_names", "length_column_name"), LOADS
    ),
    **dict.fromkeys(
        ("average_tokens_across_devices", "ddp_find_unused_parameters", "ddp_backend"), IN_REGION
    ),
    **dict.fromkeys(
        ("ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph", "ddp_timeout"), IN_REGION
    ),
    **dict.fromkeys(
        ("fsdp", "fsdp_config", "parallelism_config"), f"{IN_REGION} (tests/processes/test_sharded)"
    ),
    **dict.fromkeys(("local_rank", "eval_use_gather_object"), IN_REGION),
    **dict.fromkeys(("batch_eval_metrics", "include_for_metrics"), "what a region's own metrics read"),
    **dict.fromkeys(
        ("log_on_each_node", "log_level", "log_level_replica", "disable_tqdm", "report_to"), SAYS
    ),
    **dict.fromkeys(("run_name", "project", "trackio_space_id", "trackio_bucket_id"), SAYS),
    **dict.fromkeys(("trackio_static_space_id", "debug", "skip_memory_metrics"), SAYS),
    **dict.fromkeys(("push_to_hub", "hub_token", "hub_private_repo", "hub_model_id", "hub_strategy"), TO_HUB),
    **dict.fromkeys(("hub_always_push", "hub_revision"), TO_HUB),
    **dict.fromkeys(("auto_find_batch_size", "save_only_model", "deepspeed"), REFUSED),
    **dict.fromkeys(("output_dir", "use_cpu", "do_train", "do_eval", "do_predict"), ANY_REGION),
    "gradient_accumulation_steps": f"{COUNTS_ALIKE} (and two Trainers of one process would share Accelerate's count)",
    "resume_from_checkpoint": "read by scripts alone; a newcomer begins from a base",
    "enable_jit_checkpoint": "hears signals, in a main thread only: tests/run/test_resuming has it",
}
"""All other fields, and why a newcomer needs nothing for them."""


def test_every_field_of_training_arguments_has_its_place() -> None:
    """A field of a newer Transformers fails here: give it a run, or the reason why it needs none."""
    run = {name for arguments in (COMMON, *RUNS.values()) for name in arguments}
    assert sorted(NAMES - run - REASONS.keys()) == []
    assert sorted(run & REASONS.keys() - COMMON.keys()) == []


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in RUNS]
)
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_join(name: str, tmp_path: Path) -> None:
    """Both regions end at one step with equal models, learning rates and best metrics."""
    one, other = join(tmp_path, **{field: value for field, value in RUNS[name].items() if field in NAMES})
    ours, theirs = one.state, other.state
    assert (ours.best_metric, ours.best_global_step) == (theirs.best_metric, theirs.best_global_step)
    assert (ours.best_metric is None) == ("metric_for_best_model" not in RUNS[name])
    assert one.lr_scheduler.get_last_lr() == other.lr_scheduler.get_last_lr()


@pytest.mark.slow
def test_a_join_with_eager_updates(tmp_path: Path) -> None:
    """Every evaluation shows the mean of all regions' weights, for which they need each other."""
    config = OuterConfig(method="eager", sync_interval=4)
    join(tmp_path, config=config, eval_on_start=True, eval_strategy="steps", eval_steps=1)


@pytest.mark.slow
def test_early_stopping_ends_both(tmp_path: Path) -> None:
    """A newcomer takes over how long the others have waited; it does not count the evaluations that it stands in for."""
    patience = [EarlyStoppingCallback(10, early_stopping_threshold=100.0) for _ in range(2)]
    join(tmp_path, callbacks=lambda region: [patience[region]], **BEST, eval_steps=2)
    one, other = (each.early_stopping_patience_counter for each in patience)
    assert one >= other > 0


@pytest.mark.parametrize("name", ["save_strategy", "eval_strategy"])
def test_epochs_are_refused(name: str, tmp_path: Path) -> None:
    """A newcomer counts no whole epochs."""
    with pytest.raises(InputError, match=f"regions.on_loss=continue.*: training.{name}=epoch"):
        join(tmp_path, **{name: "epoch"})


class Rows(IterableDataset[Any]):
    """A stream without an end; `meets(number)` is called before each of its rows."""

    def __init__(self, meets: Callable[[int], None] = lambda number: None) -> None:
        self.meets = meets
        self.read: list[int] = []

    def __iter__(self) -> Iterator[Any]:
        for number in itertools.count():
            self.meets(number)
            self.read.append(number)
            ids = torch.tensor([number % 60 + 1, 2, 3, 4])
            yield {"input_ids": ids, "labels": ids}


class Few(Rows):
    """A stream of four batches."""

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(super().__iter__(), 8)


def test_a_newcomer_whose_pass_is_over_begins_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own last checkpoint may be of the last batch of a pass over its stream."""
    (tmp_path / place.FILE).write_text('{"pass": 2, "batches": 4, "accumulate": 1, "state": null}')
    monkeypatch.setattr(place, "usable", lambda folder, run: {4: tmp_path})
    streams = [Rows(), Few()]
    join(tmp_path, data=lambda region: streams[region])
    assert len(streams[1].read) > 8


class Signal(TrainerCallback):
    """Says when a Trainer has made some more steps than when it was told to look."""

    def __init__(self, looks: threading.Event, made: threading.Event, steps: int) -> None:
        self._looks, self._made, self._steps = looks, made, steps
        self._from = -1

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._looks.is_set() and self._from < 0:
            self._from = state.global_step
        if self._from >= 0 and state.global_step >= self._from + self._steps:
            self._made.set()


def test_a_stream_skips_nothing_and_lets_nobody_wait(tmp_path: Path) -> None:
    """A newcomer reads its stream from its beginning, and is a member only when its first batch is there: until then the other
    region makes more steps than it could beside a member that does not train.
    """
    looks, made = threading.Event(), threading.Event()

    def waits(number: int) -> None:
        if number == 0:
            looks.set()
            assert made.wait(TIMEOUT_S), "the other region waits"

    streams = [Rows(), Rows(waits)]
    one, other = join(
        tmp_path,
        data=lambda region: streams[region],
        callbacks=lambda region: [] if region else [Signal(looks, made, 5 * CONFIG.sync_interval)],
    )
    trained = 2 * (other.state.global_step - other._initial_global_step)
    assert len(streams[1].read) in range(trained, trained + 5)  # a batch is read ahead
    assert one.state.global_step > other.state.global_step - other._initial_global_step + 5 * 4
