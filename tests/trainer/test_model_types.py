"""Every type of AutoModelForCausalLM over two regions: trained, stopped in the middle and resumed, exported.

What comes out is a list in docs/evidence/model-types.md. This command writes it, without it the test compares:

    python -m pytest tests/trainer/test_model_types.py -m slow --write-golden

The table is of one version of Transformers. The rule, for a newer release must not turn CI red where it is no fault of ours:

- A fault fails the test with every version and for every type, new ones too: weights that differ between regions, in a resumed
  run or in what was exported, or an error. A fault is ours unless Trainer has the same one without us, or the model cannot be
  built: that is a limit of Transformers, and stands in the type's row.
- Each row must be as in the table where the table is of this version. With another one, a warning names new types and other rows.
- All types take minutes. Without `--write-golden`, and where the table is of this version, every twelfth one is compared.
"""

from __future__ import annotations

import functools
import gc
import logging
import re
import shutil
import sys
import textwrap
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from itertools import groupby
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from hf_cocodc import CoCoDCCallback, OuterConfig, region_shard, simulate
from hf_cocodc.link.base import Link
from tests.processes.forks import PRELOADED
from tests.tiny_models import KINDS, causal_lm, more_inputs
from tests.toys import VOCAB

STEPS, SAVED_AT = 6, 3
CONFIG = OuterConfig(method="streaming", sync_interval=2, num_fragments=2, overlap_steps=1, codec="fp32")
"""A transfer is in flight at every inner step, also where a checkpoint is saved."""
QUICK = ("gemma3", "gpt_neox", "llama", "mamba2", "mixtral", "nemotron_h")
DOCUMENT = Path(__file__).parents[2] / "docs" / "evidence" / "model-types.md"
BEGIN, END = "<!-- model types -->", "<!-- /model types -->"
REWRITE = "python -m pytest tests/trainer/test_model_types.py -m slow --write-golden"
ROW = r"^- trains: (\w+), resumes exactly: (\w+), exports: ([\w ]+)(?: \((.*)\))?\. \d+ of them: (.*)$"
LIMITS = {
    "emu3": ("Unrecognized configuration", "only its own class loads it, with Transformers alone too"),
    "gemma3n": ("requires the timm library", "Transformers needs timm to build it"),
    "gemma4_assistant": ("hidden_size_per_layer_input", "drafts with the keys and values of another model"),
    "gemma4_unified_assistant": ("producing a cache", "drafts with the keys and values of another model"),
    "mllama": ("Unrecognized configuration", "only its own class loads it, with Transformers alone too"),
    "musicgen": ("no attribute 'dropout'", "AutoModelForCausalLM cannot build it from its config"),
    "musicgen_melody": ("no attribute 'dropout'", "AutoModelForCausalLM cannot build it from its config"),
    "reformer": ("", "draws new seeds in each layer: with Trainer alone, no two runs are equal either"),
}
"""What Transformers alone cannot do: a part of its message, and the same in our words."""

pytestmark = pytest.mark.filterwarnings("ignore", "default:the table of model types")
Build = Callable[[int], nn.Module]


class Outcome(NamedTuple):
    """What a type can do: one row of the table, and what must not be."""

    trains: str
    resumes: str
    exports: str
    why: str
    faults: tuple[str, ...] = ()

    @property
    def row(self) -> tuple[str, ...]:
        return self[:4]


class Region(NamedTuple):
    """A region at the end of its run."""

    model: nn.Module
    weights: dict[str, Tensor]
    """All parameters and buffers."""
    saved: dict[str, Tensor]
    """Global parameters, and buffers, when the first checkpoint was saved."""


class Rows(Dataset):
    """Fixed random tokens."""

    def __init__(self, kind: str) -> None:
        self.tokens = torch.randint(1, VOCAB, (24, 8), generator=torch.Generator().manual_seed(5))
        self.more = more_inputs(kind)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index], **self.more}

    def batch(self) -> dict[str, Tensor]:
        return {name: torch.stack([self[0][name], self[1][name]]) for name in self[0]}


def arguments(folder: Path) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        save_strategy="steps",
        save_steps=SAVED_AT,
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
        remove_unused_columns=False,
    )


def train(kind: str, build: Build, folder: Path, resume: bool = False) -> list[Region]:
    """Two regions, from their start to the end; or from the checkpoint in the middle, with other weights before it is loaded.

    Args:
        kind: the type.
        build: makes a model whose random weights have the given seed.
        folder: of the run.
        resume: whether to resume.
    """

    def body(region: int, link: Link) -> Region:
        callback = CoCoDCCallback(CONFIG, link=link)
        saved: dict[int, dict[str, Tensor]] = {}

        class Watch(TrainerCallback):
            def on_save(self, args: Any, state: Any, control: Any, model: Any, **kwargs: Any) -> None:
                assert callback.outer is not None
                with callback.outer.global_weights():
                    saved[state.global_step] = weights(model)

        trainer = Trainer(
            model=build(1 if resume else 0),
            args=arguments(folder),
            train_dataset=region_shard(Rows(kind), region, link.num_regions),
            callbacks=[callback, Watch()],
        )
        checkpoint = folder / f"region-{region}" / f"checkpoint-{SAVED_AT}"
        trainer.train(resume_from_checkpoint=str(checkpoint) if resume else None)
        if not resume:
            trainer.save_model()
        return Region(trainer.model, weights(trainer.model), saved.get(SAVED_AT, {}))

    return simulate(body, regions=2)


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Copies of all parameters and buffers."""
    return {name: each.detach().clone() for name, each in (*model.named_parameters(), *model.named_buffers())}


def differences(one: dict[str, Tensor], other: dict[str, Tensor]) -> str:
    """Names of tensors whose bits differ, or that only one side has; empty if there are none."""
    names = sorted(one.keys() | other.keys())
    wrong = [name for name in names if name not in one or name not in other]
    wrong += [name for name in names if name not in wrong and not same_bits(one[name], other[name])]
    return f"{len(wrong)} of {len(names)} tensors differ, for example {wrong[0]}" if wrong else ""


def same_bits(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    first, second = (each.contiguous().reshape(-1).view(torch.uint8) for each in (one, other))
    return torch.equal(first, second)


def outcome(kind: str, folder: Path) -> Outcome:
    """Train, resume and export a type; everything below `folder` is removed again."""
    try:
        causal_lm(kind)(**Rows(kind).batch(), use_cache=False).loss.backward()
    except Exception as error:  # ours has no part in it
        return Outcome("no", "no", "no", limit(kind, error))
    found: dict[str, str] = {}
    whys: list[str] = []
    faults: dict[str, str] = {}

    def note(name: str, wrong: str) -> None:
        found[name] = "no" if wrong else "yes"
        faults.update({name: wrong} if wrong else {})

    try:
        whole = train(kind, functools.partial(causal_lm, kind), folder / kind)
        note("trains", differences(whole[0].weights, whole[1].weights))
        how, wrong, why = exports(kind, folder / kind / "region-0", whole[0])
        note("exports", wrong)
        found["exports"] = "no" if wrong else how
        whys.extend([why] if why else [])
        again = train(kind, functools.partial(causal_lm, kind), folder / kind, resume=True)
        pairs = zip(whole, again, strict=True)
        note("resumes", " | ".join(filter(None, (differences(a.weights, b.weights) for a, b in pairs))))
    except Exception as error:
        faults["ends"] = f"{type(error).__name__}: {error}"
    try:
        limits = without_us(kind, folder / kind) if faults else {}
    finally:
        shutil.rmtree(folder / kind, ignore_errors=True)
    whys.extend(limit(kind, limits[name]) for name in faults if name in limits)
    ours = [f"{kind} {name}: {wrong}" for name, wrong in faults.items() if name not in limits]
    columns = (found.get(name, "no") for name in ("trains", "resumes", "exports"))
    return Outcome(*columns, "; ".join(whys), tuple(ours))


def limit(kind: str, error: Exception | str) -> str:
    """What Transformers alone cannot do, in our words; in its own where it says something new."""
    message, words = LIMITS.get(kind, ("(unknown)", ""))
    return words if message in str(error) else str(error).strip().splitlines()[-1]


def exports(kind: str, folder: Path, region: Region) -> tuple[str, str, str]:
    """Load what was saved in the middle and at the end as any user does. Returns what comes of it, a fault, and a limit."""
    how, why, load = "yes", "", AutoModelForCausalLM.from_pretrained
    try:
        middle = load(folder / f"checkpoint-{SAVED_AT}")
    except ValueError as error:
        region.model.save_pretrained(folder / "alone")
        with pytest.raises(ValueError):
            load(folder / "alone")
        how, why, load = "by its own class", limit(kind, error), type(region.model).from_pretrained
        middle = load(folder / f"checkpoint-{SAVED_AT}")
    final = load(folder)
    wrong = differences(region.saved, weights(middle)) or differences(region.weights, weights(final))
    if not wrong:
        # from_pretrained may lay the same bits out otherwise in memory, and products of matrices then round otherwise
        difference = (logits(kind, region.model) - logits(kind, final)).abs().max()
        wrong = "" if difference <= 1e-5 else f"logits differ by {difference}"
    return how, wrong, why


@torch.no_grad()
def logits(kind: str, model: nn.Module) -> Tensor:
    torch.manual_seed(0)
    return model.eval()(**Rows(kind).batch(), use_cache=False).logits


def without_us(kind: str, folder: Path) -> dict[str, str]:
    """What is wrong where Trainer alone trains, resumes and saves a type, and its class loads it; by the names of our faults."""

    def run(seed: int, resume: str | None = None) -> Trainer:
        trainer = Trainer(
            model=causal_lm(kind, seed), args=arguments(folder / "alone"), train_dataset=Rows(kind)
        )
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    try:
        whole = run(0)
        whole.save_model()
        loaded = type(whole.model).from_pretrained(folder / "alone")
        again = run(1, str(folder / "alone" / f"checkpoint-{SAVED_AT}"))
    except Exception as error:
        return {"ends": f"{type(error).__name__}: {error}"}
    wrong = {"resumes": again.model, "exports": loaded}
    wrong = {name: differences(weights(whole.model), weights(other)) for name, other in wrong.items()}
    return {name: each for name, each in wrong.items() if each}


def quiet() -> None:
    """Prepare a process that handles many types: no threads on models this small, and less for gc to look at."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    gc.collect()
    gc.freeze()


def table_text() -> str:
    """What stands between the marks."""
    return DOCUMENT.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]


def table() -> tuple[str, dict[str, tuple[str, ...]]]:
    """The version of Transformers that the table names, and the row of every type."""
    rows: dict[str, tuple[str, ...]] = {}
    for *row, kinds in re.findall(ROW, table_text().replace("\n  ", " "), re.MULTILINE):
        rows |= dict.fromkeys(kinds.split(", "), tuple(row))
    version = re.search(r"Transformers (\S+) ", table_text())
    return "" if version is None else version[1], rows


def written(outcomes: dict[str, Outcome]) -> str:
    """The table, as it stands between its marks."""
    cells = {kind: ([cell != "yes" for cell in found.row[:3]], found.row) for kind, found in outcomes.items()}
    by_row = sorted(outcomes, key=lambda kind: (cells[kind], kind))
    lines = [
        f"Transformers {transformers.__version__} has {len(outcomes)} types for `AutoModelForCausalLM`.",
        "",
    ]
    for row, group in groupby(by_row, key=lambda kind: outcomes[kind].row):
        kinds = list(group)
        trains, resumes, exports, why = row
        said = f"- trains: {trains}, resumes exactly: {resumes}, exports: {exports}{f' ({why})' if why else ''}. "
        said += f"{len(kinds)} of them: {', '.join(kinds)}"
        lines.append(textwrap.fill(said, 110, subsequent_indent="  ", break_on_hyphens=False))
    return "\n".join(["", *lines, ""])


def faults_of(outcomes: dict[str, Outcome]) -> list[str]:
    return [fault for found in outcomes.values() for fault in found.faults]


def compare(outcomes: dict[str, Outcome]) -> None:
    """Fail for what must not be, by the module's rule, and warn of the rest."""
    assert not faults_of(outcomes)
    version, rows = table()
    changed = {kind: found.row for kind, found in outcomes.items() if rows.get(kind) != found.row}
    if version == transformers.__version__:
        assert not changed, f"if this is right: {REWRITE}"
    elif changed:
        warnings.warn(f"the table of model types is of {version}; otherwise or new: {changed}", stacklevel=2)


@pytest.mark.slow
def test_every_type(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """No type ends with other weights than it should; what each does is what the table says."""
    write = request.config.getoption("--write-golden")
    is_known = table()[0] == transformers.__version__ and not write
    kinds = KINDS[::12] if is_known else KINDS
    context = get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with ProcessPoolExecutor(2, mp_context=context, initializer=quiet) as pool:
        outcomes = dict(zip(kinds, pool.map(functools.partial(outcome, folder=tmp_path), kinds), strict=True))
    if write:
        assert not faults_of(outcomes)
        before, _, rest = DOCUMENT.read_text(encoding="utf-8").partition(BEGIN)
        text = f"{before}{BEGIN}{written(outcomes)}{END}{rest.partition(END)[2]}"
        DOCUMENT.write_text(text, encoding="utf-8")
        return
    compare(outcomes)
    if is_known:
        assert set(table()[1]) == set(KINDS), f"if this is right: {REWRITE}"


@pytest.mark.parametrize("kind", QUICK)
def test_a_type(kind: str, tmp_path: Path) -> None:
    """One of each family: dense, renamed at saving, a mixture of experts, state space, hybrid, with a part for images."""
    if kind not in KINDS:
        pytest.skip(f"Transformers {transformers.__version__} has no {kind}")
    found = outcome(kind, tmp_path)
    compare({kind: found})


@pytest.mark.parametrize("version", [transformers.__version__, "0.0.1"])
def test_a_fault_is_ours_unless_trainer_has_it_too(
    version: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whoever has it: an error as a model is saved. With a table of another version, what is not ours is a warning."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("of no use")

    module = sys.modules[__name__]
    monkeypatch.setattr(module, "table", lambda: (version, {"llama": ("yes", "yes", "yes", "")}))
    with monkeypatch.context() as patches:
        patches.setattr(LlamaForCausalLM, "save_pretrained", refuse)
        theirs = outcome("llama", tmp_path)
    assert theirs == ("no", "no", "no", "RuntimeError: of no use", ())
    is_table = version == transformers.__version__
    with (
        pytest.raises(AssertionError, match="if this is right")
        if is_table
        else pytest.warns(match="of no use")
    ):
        compare({"llama": theirs})
    monkeypatch.setattr(CoCoDCCallback, "on_save", refuse)
    ours = outcome("llama", tmp_path)
    assert ours.faults == ("llama ends: RuntimeError: of no use",)
    with pytest.raises(AssertionError, match="of no use"):
        compare({"llama": ours})


def test_the_methods_page_has_the_figures_of_the_table() -> None:
    """How many types there are, and how many train and export; the version."""
    version, rows = table()
    trained = [row for row in rows.values() if row[0] == "yes"]
    assert all(row[2] != "no" for row in trained)
    assert [row[1] for row in trained].count("yes") == len(trained) - 1
    said = f"Of the {len(rows)} types of causal LMs in Transformers {version.rpartition('.')[0]}, {len(trained)} can be built"
    assert said in (DOCUMENT.parents[1] / "methods" / "index.md").read_text(encoding="utf-8")


def with_adapter(kind: str, seed: int) -> nn.Module:
    """A LoRA with random weights on the type's model of seed 0."""
    model = causal_lm(kind)
    torch.manual_seed(seed)
    everywhere = LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    return get_peft_model(model, everywhere)


def with_frozen_embedding(kind: str, seed: int) -> nn.Module:
    model = causal_lm(kind, seed)
    model.get_input_embeddings().weight.requires_grad_(False)
    return model


CHANGED = [
    (with_adapter, "gemma3"),
    (with_adapter, "mixtral"),
    (with_adapter, "qwen3_next"),
    (with_frozen_embedding, "gpt_neox"),
    (with_frozen_embedding, "qwen3_moe"),
    (with_frozen_embedding, "zamba2"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("change", "kind"), CHANGED)
def test_a_type_of_which_a_part_is_frozen(
    change: Callable[[str, int], nn.Module], kind: str, tmp_path: Path
) -> None:
    """All-linear adapters on a frozen base, or a frozen embedding: resumed and exported to the bit, frozen parts too."""
    build = functools.partial(change, kind)
    whole = train(kind, build, tmp_path)
    folder = tmp_path / "region-0" / f"checkpoint-{SAVED_AT}"
    if change is with_adapter:
        exported = PeftModel.from_pretrained(causal_lm(kind), folder)
    else:
        exported = AutoModelForCausalLM.from_pretrained(folder)
    assert not differences(whole[0].saved, weights(exported))
    again = train(kind, build, tmp_path, resume=True)
    for other in (whole[1], *again):
        assert not differences(whole[0].weights, other.weights)
