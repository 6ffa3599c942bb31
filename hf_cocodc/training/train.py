"""Train one region of a recipe: each rank runs this once, started by `accelerate launch` or forked by `hf-cocodc train`."""

import argparse
import contextlib
import logging
import os
from collections.abc import Iterator, Sequence
from typing import Any

from ..run.lock import hold, region_lock
from ..settings.environment import AUTO_LOSS, ENV_LAUNCH, ENV_ON_LOSS
from ..settings.handed import handed_over
from ..settings.recipe import Recipe, add_recipe, facts_of_data
from ..status import tell
from . import building
from .preflight import check, preflight
from .region import live


def run(recipe: Recipe, link: Any = None) -> Any:
    """Train one region of the recipe; return its Trainer, whose model holds the global weights.

    `link` is by default made from `recipe.regions` and the environment. Raises CocodcError (see errors.py).
    """
    from transformers import TrainingArguments

    from ..trainer.callback import CoCoDCCallback

    check(recipe)
    facts = facts_of_data(recipe) | ({"training.optim": building.MUON} if building.has_muon(recipe) else {})
    callback = CoCoDCCallback(
        recipe.outer, recipe.regions, evaluate_on=recipe.evaluation.on, link=link, facts=facts
    )
    args = building.arguments(recipe, TrainingArguments)
    if link is None:
        callback.recipe = handed_over(recipe, callback.regions, building.batch_of(args))
    is_writer = os.environ.get("RANK", "0") == "0"
    folder = building.output_dir(recipe) / f"region-{callback.region}"
    with hold(region_lock(folder)) if is_writer else contextlib.nullcontext():
        return _train(recipe, args, callback)


def _train(recipe: Recipe, args: Any, callback: Any) -> Any:
    """Build everything, train and save; return the Trainer."""
    from transformers import Trainer, default_data_collator, set_seed

    from ..run.shards import num_shards, region_shard
    from .data import pack
    from .metrics import causal_lm_metrics

    set_seed(args.seed)
    tell("loading the model")
    tokenizer = building.tokenizer(recipe)
    model = building.model(recipe, len(tokenizer))
    tell("loading the text")
    text = text_of(recipe, recipe.data.split)
    text = text.shuffle(seed=args.seed) if not recipe.data.streaming else text
    packs = building.at_most_cores("data.num_proc", recipe.data.num_proc or 1)

    def packed(text: Any, what: str) -> Any:
        tell(f"packing the {what}")
        with _main_first(f"the packed {what}"):
            return pack(text, tokenizer, recipe.data.block_size, recipe.data.text_column, packs)

    shards = num_shards(callback.num_regions, callback.regions.max)
    is_dealt = callback.regions.shards == "dealt"  # then every region has all of the text
    train_dataset = packed(text if is_dealt else region_shard(text, callback.region, shards), "text")
    eval_dataset = None
    if args.eval_strategy != "no" or args.eval_on_start:
        eval_dataset = packed(text_of(recipe, recipe.data.eval_split), "held-out text")
        if recipe.data.eval_blocks is not None:
            eval_dataset = _first(eval_dataset, recipe.data.eval_blocks)
    compute_metrics, preprocess_logits = causal_lm_metrics(recipe.evaluation.metrics)
    with building.blaming("training"):
        trainer = Trainer(
            model=model,
            args=args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=tokenizer,
            data_collator=default_data_collator,
            compute_metrics=compute_metrics,
            preprocess_logits_for_metrics=preprocess_logits,
            callbacks=[callback],
            optimizers=(building.inner_optimizer(recipe, args, model), None),
        )
    tell(tokens_per_step=building.batch_of(args) * recipe.data.block_size)
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    tell("saving the model")
    trainer.save_model()
    trainer.create_model_card(dataset=recipe.data.builtin or recipe.data.path)
    return trainer


@contextlib.contextmanager
def _main_first(what: str) -> Iterator[None]:
    """Lets one rank of each machine work first; the others then find the result in the cache of datasets, or fail alike."""
    from accelerate import PartialState

    from ..link.group import wait_for_ranks

    state = PartialState()
    if not state.is_local_main_process:
        wait_for_ranks(state, what)
    try:
        yield
    finally:
        if state.is_local_main_process:
            wait_for_ranks(state, what)


def text_of(recipe: Recipe, split: str) -> Any:
    """The text of one split. Raises InputError like `load_text`."""
    from .data import load_text

    data = recipe.data
    return load_text(data.builtin, data.path, data.name, split, data.text_column, data.streaming)


def _first(dataset: Any, blocks: int) -> Any:
    if hasattr(dataset, "select"):
        return dataset.select(range(min(blocks, len(dataset))))
    return dataset.take(blocks)


def main(argv: Sequence[str] | None = None) -> int:
    """Train one region. An error of this package becomes one paragraph and an exit code, never a traceback."""
    parser = argparse.ArgumentParser(prog="hf_cocodc.train", description=__doc__, allow_abbrev=False)
    add_recipe(parser)
    options = parser.parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("hf_cocodc").setLevel(logging.INFO)

    if ENV_LAUNCH not in os.environ:  # regions of one launch end together
        os.environ.setdefault(ENV_ON_LOSS, AUTO_LOSS)

    def train() -> None:
        recipe = Recipe.load(options.recipe, options.overrides)
        tell("checking the recipe")
        preflight(recipe)
        run(recipe)

    return live(train)
