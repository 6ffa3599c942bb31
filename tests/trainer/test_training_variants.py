"""What people train with: precisions, memory savers, ways to batch, kinds of data; two regions, each a real Trainer."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset, IterableDataset
from transformers import (
    AutoModelForCausalLM,
    DataCollatorWithFlattening,
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from hf_cocodc import CoCoDCCallback, OuterConfig, OuterOptimizer, region_shard, simulate
from hf_cocodc.link.base import Link
from hf_cocodc.run.journal import read
from hf_cocodc.snapshot.local_weights import weights_file
from tests.processes.worker import Tokens
from tests.run.test_resuming import config as config_of
from tests.toys import RECOMPUTING, VOCAB, llama

H, STEPS, OVERLAP = 4, 14, 2
CONFIG = OuterConfig(
    method="streaming", sync_interval=H, num_fragments=2, overlap_steps=OVERLAP, codec="fp32"
)
"""Its codec rounds nothing, so that a tolerance against a reference means something."""

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")


class Outcome(NamedTuple):
    """A region at the end of its run."""

    trainer: Trainer
    callback: CoCoDCCallback
    params: Tensor


def trained_params(model: nn.Module) -> Tensor:
    """All trainable parameters, flat."""
    return torch.cat([p.detach().reshape(-1) for p in model.parameters() if p.requires_grad])


def train(
    folder: Path,
    build: Callable[[int], nn.Module] = lambda region: llama(),
    data: Any = None,
    config: OuterConfig = CONFIG,
    prepare: Callable[[Trainer, int], None] = lambda trainer, region: None,
    through: Callable[[Link], Link] = lambda link: link,
    kind: type[Trainer] = Trainer,
    data_collator: Any = None,
    resume: bool = False,
    **more: Any,
) -> list[Outcome]:
    """Train two regions, each on its share of `data`, and check what has to hold after any run.

    Args:
        build: makes region r's model.
        prepare: what is done to a region's Trainer before it trains.
        through: what stands between a region and its link.
        more: TrainingArguments.
    """
    common = {"max_steps": STEPS, "per_device_train_batch_size": 2, "learning_rate": 1e-3, "seed": 3}
    common |= {"report_to": "none", "save_strategy": "no", "logging_steps": 5, "use_cpu": True}
    common |= {"dataloader_pin_memory": False, "disable_tqdm": True}

    def body(region: int, link: Link) -> Outcome:
        callback = CoCoDCCallback(config, link=through(link))
        trainer = kind(
            model=build(region),
            args=TrainingArguments(output_dir=str(folder), **(common | more)),
            train_dataset=region_shard(Tokens(64) if data is None else data, region, link.num_regions),
            data_collator=data_collator,
            callbacks=[callback],
        )
        prepare(trainer, region)
        trainer.train(resume_from_checkpoint=resume)
        return Outcome(trainer, callback, trained_params(trainer.model))

    outcomes = simulate(body, regions=2)
    assert torch.equal(outcomes[0].params, outcomes[1].params)
    assert outcomes[0].params.isfinite().all()
    for region, outcome in enumerate(outcomes):
        outer = outcome.callback.outer
        assert outer is not None
        assert outer.finished
        assert outer.inner_step == outcome.trainer.state.global_step == STEPS
        if config is CONFIG:
            journal = read(folder / f"region-{region}" / "cocodc" / "journal.jsonl")
            landings = [event for event in journal if event["kind"] == "land"]
            assert [e["step"] for e in landings] == [6, 8, 10, 12, 14, 14, 14]
            assert [e["staleness"] for e in landings] == [OVERLAP] * 5 + [0, 0]
    return outcomes


def with_dropout(region: int = 0) -> PreTrainedModel:
    """A Llama whose numbers depend on the random numbers of every step."""
    model = llama()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.2
    return model


def _sentences() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(4, 25, (64,), generator=generator).tolist()
    return [torch.randint(1, VOCAB, (length,), generator=generator).tolist() for length in lengths]


SENTENCES = _sentences()
"""Rows of 4 to 24 tokens."""
TABLE = datasets.Dataset.from_dict({"input_ids": SENTENCES})
WITH_LENGTHS = TABLE.add_column("length", [len(row) for row in SENTENCES])


class Rows(Dataset):
    """SENTENCES, by index."""

    def __len__(self) -> int:
        return len(SENTENCES)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return {"input_ids": SENTENCES[index]}


class Stream(IterableDataset):
    """SENTENCES, one after the other."""

    def __iter__(self) -> Iterator[dict[str, list[int]]]:
        return ({"input_ids": row} for row in SENTENCES)


def pad(features: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    """A batch, padded on the right; no loss on what no token of the row predicts, as where rows are packed."""
    rows = [feature["input_ids"] for feature in features]
    width = max(map(len, rows))
    return {
        "input_ids": torch.tensor([row + [0] * (width - len(row)) for row in rows]),
        "attention_mask": torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows]),
        "labels": torch.tensor([[-100, *row[1:]] + [-100] * (width - len(row)) for row in rows]),
    }


def scale_losses(trainer: Trainer, region: int) -> None:
    """What fp16 training does, which Accelerate refuses on CPUs: losses are scaled, steps whose gradients overflow skipped."""
    trainer.accelerator.scaler = GradScaler("cpu", init_scale=2.0**10, growth_interval=100)


class Variant(NamedTuple):
    """Arguments of `train`, those of the run that it has to equal (beside the common ones), and how closely."""

    run: dict[str, Any]
    reference: dict[str, Any]
    common: dict[str, Any] = {}
    atol: float = 0.0


GROUPED = {"train_sampling_strategy": "group_by_length", "data_collator": pad}
PADDED = {"data_collator": pad}
VARIANTS = {
    "gradient accumulation": Variant(
        {"gradient_accumulation_steps": 2}, {"per_device_train_batch_size": 4}, atol=2e-6
    ),
    "activation checkpointing": Variant({RECOMPUTING: True}, {}, {"build": with_dropout}),
    "torch_compile": Variant({"torch_compile": True, "torch_compile_backend": "aot_eager"}, {}, atol=2e-6),
    "loss scaling": Variant({"prepare": scale_losses}, {}, {"max_grad_norm": 0.0}),
    "workers": Variant({"dataloader_num_workers": 2}, {}, {"build": with_dropout}),
    "packing": Variant(
        {"data_collator": DataCollatorWithFlattening()},
        PADDED,
        {"data": TABLE, "per_device_train_batch_size": 4},
        atol=1e-5,
    ),
    "group_by_length": Variant({"data": WITH_LENGTHS}, {"data": TABLE}, GROUPED),
    "iterable": Variant(
        {"data": Stream()}, {"data": Rows(), "train_sampling_strategy": "sequential"}, PADDED
    ),
    "streaming": Variant(
        {"data": TABLE.to_iterable_dataset(num_shards=1)},
        {"data": TABLE, "train_sampling_strategy": "sequential"},
        PADDED,
    ),
}


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_workers")
@pytest.mark.parametrize("name", VARIANTS)
def test_a_way_to_train_changes_nothing(name: str, tmp_path: Path) -> None:
    """Regions end equal, with the weights of the run that does the same in the plain way; so does what they export."""
    variant = VARIANTS[name]
    saving = {"save_strategy": "steps", "save_steps": STEPS // 2}
    ours = train(tmp_path / "run", **variant.common, **variant.run, **saving)
    theirs = train(tmp_path / "reference", **variant.common, **variant.reference)
    torch.testing.assert_close(ours[0].params, theirs[0].params, rtol=0, atol=variant.atol)
    folders = [tmp_path / "run" / f"region-{region}" for region in range(2)]
    exported = [weights(folder / f"checkpoint-{STEPS // 2}" / "model.safetensors") for folder in folders]
    local = [weights(folder / f"checkpoint-{STEPS // 2}" / weights_file()) for folder in folders]
    assert torch.equal(exported[0], exported[1])
    assert not torch.equal(local[0], local[1])
    final = AutoModelForCausalLM.from_pretrained(folders[0] / f"checkpoint-{STEPS}")
    assert torch.equal(trained_params(final), ours[0].params)


def weights(file: Path) -> Tensor:
    """Everything in a file, flat."""
    return torch.cat([tensor.reshape(-1) for tensor in load_file(file).values()])


def test_rows_of_like_length_share_a_batch(tmp_path: Path) -> None:
    """group_by_length pads less than the rows in their own order need, in the region with random numbers of its own too."""
    widths: dict[int, list[list[int]]] = {0: [], 1: []}

    def note(trainer: Trainer, region: int) -> None:
        def collate(features: list[dict[str, list[int]]]) -> dict[str, Tensor]:
            widths[region].append([len(feature["input_ids"]) for feature in features])
            return pad(features)

        trainer.data_collator = collate

    def padding(batches: list[list[int]]) -> int:
        return sum(max(batch) * len(batch) - sum(batch) for batch in batches)

    grouped = {"train_sampling_strategy": "group_by_length", "per_device_train_batch_size": 4}
    train(tmp_path, data=TABLE, prepare=note, **grouped)
    in_order = [[len(row) for row in SENTENCES[start : start + 4]] for start in range(0, 4 * STEPS, 4)]
    for region in range(2):
        assert len(widths[region]) >= STEPS
        assert 0 < padding(widths[region][:STEPS]) < 0.75 * padding(in_order)


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_workers")
def test_a_stream_over_workers(tmp_path: Path) -> None:
    """Four files, two for each region, one for each of its workers."""
    files = TABLE.to_iterable_dataset(num_shards=4)
    train(tmp_path, data=files, data_collator=pad, dataloader_num_workers=2)


@pytest.mark.slow
def test_resuming_a_stream_that_has_come_round(tmp_path: Path) -> None:
    """Stopped in the second round of eight batches: Trainer skips ten in vain, and goes on with a round of its own."""
    stream = {"data": TABLE.to_iterable_dataset(num_shards=2), "data_collator": pad}
    more = {**stream, "per_device_train_batch_size": 4, "save_strategy": "steps", "save_steps": 10}
    train(tmp_path, **more)
    for region in range(2):
        shutil.rmtree(tmp_path / f"region-{region}" / f"checkpoint-{STEPS}")
    train(tmp_path, resume=True, **more)


def test_autocast(tmp_path: Path) -> None:
    """bf16=True: params and global params stay fp32, and come close to those of the run in fp32, but not equal."""
    start = trained_params(llama())
    plain, mixed = (train(tmp_path, bf16=bf16)[0] for bf16 in (False, True))
    assert mixed.params.dtype == torch.float32
    assert 0 < (mixed.params - plain.params).norm() < 0.1 * (plain.params - start).norm()


class TrainsAtFirst(Trainer):
    """Four inner steps, then a learning rate of zero."""

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> LambdaLR:
        self.lr_scheduler = LambdaLR(self.optimizer, lambda step: float(step < H))
        return self.lr_scheduler


def test_idle_regions_in_pure_bf16_do_not_drift(tmp_path: Path) -> None:
    """Once nobody trains, no landing moves fp32 global params, though no bf16 model can show them (law 4)."""
    shown: dict[int, list[Tensor]] = {0: [], 1: []}

    def record(trainer: Trainer, region: int) -> None:
        class Record(TrainerCallback):
            def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                shown[region].append(global_params(trainer))

        trainer.add_callback(Record())

    own = OuterConfig(**{**CONFIG.given(), "mixing_alpha": 0.0, "outer_momentum": 0.0}, method="streaming")
    outcomes = train(
        tmp_path,
        lambda region: llama(dtype=torch.bfloat16),
        config=own,
        kind=TrainsAtFirst,
        prepare=record,
        learning_rate=1e-2,
        save_strategy="steps",
        save_steps=STEPS,
    )
    for region, outcome in enumerate(outcomes):
        first, settled, *idle = shown[region][5], *shown[region][7:], global_params(outcome.trainer)
        assert settled.dtype == torch.float32
        assert not torch.equal(settled, first)
        assert not torch.equal(settled, settled.bfloat16().float())
        assert len(idle) == 7
        assert all(torch.equal(later, settled) for later in idle)
        assert outcome.params.dtype == torch.bfloat16
    final = AutoModelForCausalLM.from_pretrained(tmp_path / "region-1" / f"checkpoint-{STEPS}")
    assert torch.equal(trained_params(final), outcomes[0].params)


def global_params(trainer: Trainer) -> Tensor:
    """All global params of a Trainer's region, flat."""
    [callback] = [each for each in trainer.callback_handler.callbacks if isinstance(each, CoCoDCCallback)]
    assert callback.outer is not None
    return torch.cat([fragment.global_params for fragment in callback.outer.synchronizer.fragments])


OVERFLOWS = {0: (1, 8), 1: (3, 4, 5, 6, 7)}
"""Inner steps whose gradients overflow in each region: the first one, and more than a whole round."""


def overflow(trainer: Trainer, region: int) -> None:
    scale_losses(trainer, region)

    class Overflow(TrainerCallback):
        def on_pre_optimizer_step(
            self, args: Any, state: Any, control: Any, model: Any, **kwargs: Any
        ) -> None:
            if state.global_step + 1 in OVERFLOWS[region]:
                next(model.parameters()).grad.view(-1)[0] = torch.inf

    trainer.add_callback(Overflow())


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused"])
def test_scalers_that_skip_at_different_steps(optim: str, tmp_path: Path) -> None:
    """Every step counts, skipped or not: no region waits for another, whether the optimizer or its kernel skips."""
    for region, outcome in enumerate(train(tmp_path, prepare=overflow, optim=optim, max_grad_norm=0.0)):
        scale = outcome.trainer.accelerator.scaler.get_scale()
        assert scale == 2.0 ** (10 - len(OVERFLOWS[region]))


@pytest.mark.parametrize("name", ["diloco", "eager", "co2", "dilocox", "cocodc"])
def test_every_method_takes_skipped_steps(name: str, tmp_path: Path) -> None:
    """Regions end equal with every method where steps are skipped, and learning rates come apart."""
    train(tmp_path, config=config_of(name), prepare=overflow, optim="adamw_torch", max_grad_norm=0.0)


@pytest.mark.parametrize("num_regions", [1, 2])
def test_a_plain_loop_whose_last_accumulation_is_short(num_regions: int) -> None:
    """Five batches by twos: the fifth is a step of its own, in every region."""

    def loop(region: int, link: Link) -> list[int]:
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        model = llama()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        loader = DataLoader(Tokens(10), batch_size=2)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        steps = []
        config = OuterConfig(method="diloco", sync_interval=1)
        with OuterOptimizer(accelerator, model, optimizer, config, link=link) as outer:
            for number, batch in enumerate(loader, start=1):
                with accelerator.accumulate(model):
                    accelerator.backward(model(**batch).loss)
                    optimizer.step()
                    optimizer.zero_grad()
                    outer.step()
                steps += [number] if accelerator.sync_gradients else []
        return steps

    assert simulate(loop, regions=num_regions) == [[2, 4, 5]] * num_regions
