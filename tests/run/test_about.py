"""What a region says of its training, and what a resumed run must have in common with it."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from accelerate import Accelerator
from torch.utils.data import IterableDataset
from transformers import Mamba2Config

from hf_cocodc.errors import CheckpointError
from hf_cocodc.run.about import About, function_of, jsonable, of_loop, refuse_another_run
from hf_cocodc.run.samples import first_samples
from tests.processes.worker import Tokens
from tests.toys import llama


def test_a_loop_shows_its_optimizer() -> None:
    """The first learning rate, not that of a warm-up's first step."""
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)
    facts = of_loop(Accelerator(cpu=True), model, optimizer).facts
    assert facts["training.learning_rate"] == [3e-3]
    assert facts["training.weight_decay"] == [0.1]
    assert facts["training.optimizer"] == "AdamW"


@pytest.mark.parametrize("rate", [None, 0.5, torch.tensor(0.5)])
def test_any_optimizer_can_be_shown(rate: Any) -> None:
    """A learning rate may be a tensor, or be left to the optimizer, as Adafactor's may."""

    class Optimizer(torch.optim.Optimizer):
        pass

    optimizer = Optimizer([torch.nn.Parameter(torch.zeros(1))], {"lr": rate, "eps": (1e-30, 1e-3)})
    facts = of_loop(Accelerator(cpu=True), torch.nn.Linear(1, 1), optimizer).facts
    assert facts["training.learning_rate"] == [None if rate is None else 0.5]
    assert facts["training.eps"] == [[1e-30, 1e-3]]


def test_the_function_of_a_model_has_no_names_and_paths() -> None:
    """What differs between machines without changing the function is left out; nested fields are there."""
    config = function_of(llama())
    assert config["model.config.rope_parameters.rope_theta"] == 10000.0
    assert not [name for name in config if "path" in name or "version" in name or "dtype" in name]
    assert function_of(torch.nn.Linear(2, 2)) == {}


def test_numbers_without_an_end_are_equal_to_themselves_and_can_be_saved() -> None:
    """Mamba 2 has an infinite limit in its config; a checkpoint's JSON has no such number, and NaN differs from itself."""
    model = torch.nn.Linear(2, 2)
    model.config = Mamba2Config()
    config = function_of(model)
    assert config["model.config.time_step_limit"] == [0.0, "inf"]
    json.dumps(config, allow_nan=False)
    strange = {"a": [float("nan"), {"b": float("-inf")}], "c": 1e300}
    assert jsonable(strange) == {"a": ["nan", {"b": "-inf"}], "c": 1e300}


def test_a_resumed_run_is_the_same_run() -> None:
    """Another function is refused, another learning rate unless it is allowed; what one run does not know is left alone."""
    model, facts = {"model.config.rope_theta": 1.0}, {"training.learning_rate": 0.1, "training.seed": 0}
    now = About(model={**model, "model.config.new": 1}, facts={**facts, "data.path": "x"})
    assert refuse_another_run(model, facts, now, []) == []
    assert refuse_another_run({}, {}, now, []) == []
    with pytest.raises(CheckpointError, match="written with model.config.rope_theta=2.0, this run has 1.0"):
        refuse_another_run({"model.config.rope_theta": 2.0}, facts, now, ["rope_theta"])
    other = {**facts, "training.learning_rate": 0.2}
    with pytest.raises(
        CheckpointError, match="training.learning_rate=0.2, this run has 0.1.*regions.may_differ=training.l"
    ):
        refuse_another_run(model, other, now, [])
    [note] = refuse_another_run(model, other, now, ["learning_rate"])
    assert note == "training.learning_rate was 0.2 when the checkpoint was written and is 0.1 now."


class Augmented(Tokens):
    """Samples that use all random generators."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        random.random(), np.random.rand(), torch.rand(1)
        return super().__getitem__(index)


class Once(IterableDataset):
    """Rows that are there only once."""

    def __init__(self) -> None:
        self.rows = ({"n": n} for n in range(4))

    def __iter__(self) -> Iterator[Any]:
        return self.rows

    # datasets names a generator by the hash of its pickle, and a generator has none
    def __reduce__(self) -> Any:
        return Once, ()


def test_samples_are_read_without_a_trace() -> None:
    """Random generators stand where they stood, and a stream that cannot be read twice keeps all its rows."""
    before = random.getstate(), np.random.get_state()[1].tobytes(), torch.get_rng_state()
    assert first_samples(Augmented(16))
    after = random.getstate(), np.random.get_state()[1].tobytes(), torch.get_rng_state()
    assert before[:2] == after[:2]
    assert torch.equal(before[2], after[2])


@pytest.mark.parametrize("wrapped", [False, True])
def test_no_stream_is_read(wrapped: bool) -> None:
    """What a stream gives may be gone afterwards, and its first sample may cost a shuffle buffer of thousands."""
    stream = Once()
    read = datasets.IterableDataset.from_generator(stream.__iter__) if wrapped else stream
    assert first_samples(read) == ""
    assert [row["n"] for row in read] == [0, 1, 2, 3]


def test_equal_samples_have_equal_digests() -> None:
    """The digest tells parts of a dataset apart, whatever holds them; what it cannot read has none."""
    assert first_samples(Tokens(16)) == first_samples(Tokens(16)) != first_samples(Tokens(16, seed=1))
    rows = datasets.Dataset.from_dict({"text": ["a", "b", "c"]})
    assert first_samples(rows) != first_samples(rows.select([1, 2]))
    assert first_samples([object()]) == first_samples(None) == first_samples([]) == ""
