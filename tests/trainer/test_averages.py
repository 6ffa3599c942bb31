"""A callback that keeps a moving average of the weights, and puts it into the model at the end of training."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_cocodc import CoCoDCCallback, OuterConfig, simulate
from hf_cocodc.link.base import Link
from tests.processes.worker import Tokens
from tests.toys import llama, params_of

STEPS = 11  # the last round is cut short
METHODS: dict[str, dict[str, Any]] = {
    "diloco": {},
    "streaming": {"num_fragments": 2, "overlap_steps": 1},
    "eager": {},
}


class Average(TrainerCallback):
    """As many scripts have it: an average over inner steps, of global or local weights."""

    def __init__(self, ours: CoCoDCCallback, of_global: bool) -> None:
        self.ours, self.of_global, self.kept = ours, of_global, dict[str, Tensor]()

    def _weights(self) -> AbstractContextManager[None]:
        assert self.ours.outer is not None
        return self.ours.outer.global_weights() if self.of_global else nullcontext()

    @torch.no_grad()
    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        with self._weights():
            for name, param in model.named_parameters():
                self.kept.setdefault(name, param.clone()).lerp_(param, 0.1)

    @torch.no_grad()
    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        for name, param in model.named_parameters():
            param.copy_(self.kept[name])


def averages(folder: Path, method: str, of_global: bool, comes_first: bool) -> list[Tensor]:
    """What the models of two regions hold after training."""

    def body(region: int, link: Link) -> Tensor:
        ours = CoCoDCCallback(OuterConfig(method=method, sync_interval=4, **METHODS[method]), link=link)
        own = Average(ours, of_global)
        args = TrainingArguments(
            output_dir=str(folder),
            max_steps=STEPS,
            per_device_train_batch_size=2,
            learning_rate=1e-2,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=False,
            use_cpu=True,
        )
        callbacks = [own, ours] if comes_first else [ours, own]
        trainer = Trainer(llama(), args, train_dataset=Tokens(16, seed=region), callbacks=callbacks)
        trainer.train()
        end = params_of(trainer.model)
        link.mean = None  # the link is closed: nothing can be asked of the others any more
        assert ours.outer is not None
        with ours.outer.global_weights():
            assert torch.equal(params_of(trainer.model), end)
        return end

    return simulate(body, regions=2)


@pytest.mark.parametrize("comes_first", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_an_average_of_global_weights_is_equal_in_all_regions(
    method: str, comes_first: bool, tmp_path: Path
) -> None:
    """Whichever callback Trainer calls first, also after the run has finished in the last step."""
    first, second = averages(tmp_path, method, True, comes_first)
    assert torch.equal(first, second)


def test_an_average_of_local_weights_is_each_regions_own(tmp_path: Path) -> None:
    first, second = averages(tmp_path, "diloco", False, False)
    assert not torch.equal(first, second)
