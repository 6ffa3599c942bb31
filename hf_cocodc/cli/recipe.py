"""`hf-cocodc recipe`: write a first recipe, or list the keys of all."""

import argparse
import sys
from pathlib import Path
from typing import Any

from ..errors import InputError, shown
from ..newer import known
from .checks import check


def register(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "recipe",
        help="write a first recipe, or list all keys",
        description="Write a first recipe for a model and a data set, or list the keys that recipes may have.",
    )
    commands = parser.add_subparsers(required=True, metavar="new|keys")
    new = commands.add_parser(
        "new",
        help="write a recipe with a comment on each line",
        description="Write a recipe for a model and a data set, with a comment on each line. Batch, block size, learning rate "
        "and steps are first guesses: read it before you train. bf16 is true if this machine has a GPU for it.",
    )
    new.add_argument("file", help="file to write; - for the terminal")
    new.add_argument(
        "--model", required=True, help="trained weights with their tokenizer: a folder, or a name on the Hub"
    )
    new.add_argument(
        "--data",
        required=True,
        help="what datasets.load_dataset loads: a name on the Hub, or a folder of files; or python-stdlib",
    )
    new.add_argument("--data-name", help="configuration of the data set, for example wikitext-103-raw-v1")
    new.add_argument("--text-column", default="text", help="column with the text (default: text)")
    new.add_argument("--eval-split", default="test", help="held-out split (default: test)")
    new.add_argument(
        "--method", default="streaming", help=f"method: {', '.join(known())} (default: streaming)"
    )
    new.add_argument("--regions", type=int, default=2, help="number of regions (default: 2)")
    new.add_argument("--steps", type=int, default=1000, help="inner steps of each region (default: 1000)")
    new.add_argument("--lora", action="store_true", help="train an adapter instead of all parameters")
    new.set_defaults(run=_new, parser=new)
    keys = commands.add_parser(
        "keys",
        help="list all keys of a recipe",
        description="List all keys of a recipe, with the default or the kind of value, and the meaning, in Markdown.",
    )
    keys.set_defaults(run=_keys, parser=keys)


def _new(options: argparse.Namespace) -> int:
    check("--regions", options.regions, 1)
    check("--steps", options.steps, 1)
    path = Path(options.file)
    if options.file != "-" and path.exists():
        raise InputError(f"{shown(options.file)} exists already. Give another name, or remove it.")
    from ..training.starter import check_method, positions_of, starter

    check_method(options.method)  # before the Hub is asked for the model
    import torch  # takes seconds to import

    text = starter(
        options.model,
        options.data,
        data_name=options.data_name,
        text_column=options.text_column,
        eval_split=options.eval_split,
        method=options.method,
        num_regions=options.regions,
        max_steps=options.steps,
        lora=options.lora,
        positions=positions_of(options.model),
        bf16=torch.cuda.is_available() and torch.cuda.is_bf16_supported(),
    )
    if options.file == "-":
        sys.stdout.write(text)
        return 0
    with path.open("x", encoding="utf-8") as file:
        file.write(text)
    print(f"wrote {options.file}. Read it, then: hf-cocodc train {options.file}")
    return 0


def _keys(options: argparse.Namespace) -> int:
    from ..settings.reference import in_markdown

    print(in_markdown())
    return 0
