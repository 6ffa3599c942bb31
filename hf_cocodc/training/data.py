"""The text of a recipe: load it, tokenize it and pack it into blocks; and a corpus that needs no download.

This module does not import torch, datasets or transformers: each function imports the libraries that it uses.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InputError, shown

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

PACKED_TOGETHER = 1000  # documents
TOKENIZED_TOGETHER = (
    16  # documents; until the result is converted, a tokenizer holds about 100 bytes per token
)
# Not in every installation: third-party code, caches, and tests, which many distributions remove.
LEFT_OUT = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}


def python_stdlib(split: str) -> datasets.Dataset:
    """Source of the running interpreter's standard library: about 10 MB, one document per file, in path order.

    It excludes tests, third-party packages, duplicates, empty files and files that are not UTF-8. A hash of the path decides
    the split ("train", or "test" for 1 file in 20), so a file has the same split in every Python version. Raises InputError if
    the split does not exist, or the interpreter has no source files.
    """
    if split not in ("train", "test"):
        raise InputError(f"data.split={shown(split)} does not exist in python-stdlib. Use 'train' or 'test'.")
    import datasets

    root = Path(sysconfig.get_paths()["stdlib"])
    paths: list[str] = []
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in LEFT_OUT]
        paths += [Path(folder, name).relative_to(root).as_posix() for name in files if name.endswith(".py")]
    texts: dict[str, list[str]] = {"train": [], "test": []}
    seen = {""}  # across both splits: the test split must not hold a copy of a training document
    for path in sorted(paths):
        with contextlib.suppress(UnicodeDecodeError):
            text = (root / path).read_bytes().decode("utf-8")
            if text not in seen:
                seen.add(text)
                held_out = int(hashlib.sha256(path.encode()).hexdigest(), 16) % 20 == 0
                texts["test" if held_out else "train"].append(text)
    if not texts[split]:
        rule = "the standard library must be there as .py files, not zipped or compiled."
        raise InputError(f"No Python sources in {root}: {rule} Set data.path instead of data.builtin.")
    return datasets.Dataset.from_dict({"text": texts[split]})


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of 257 tokens: the 256 bytes, and 256 = <|endoftext|> as bos, eos and pad."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # ByteLevel writes a printable Latin-1 byte as itself. It numbers the other bytes in order, starting at 256.
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = itertools.count(256)
    vocab = {chr(byte if byte in printable else next(others)): byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    # Without merges, word boundaries do not matter. Not searching for words halves the time.
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = dict.fromkeys(("bos_token", "eos_token", "pad_token"), "<|endoftext|>")
    exact = {"clean_up_tokenization_spaces": False, "model_max_length": 10**30}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special, **exact)


def load_text(
    builtin: str | None, path: str | None, name: str | None, split: str, text_column: str, streaming: bool
) -> datasets.Dataset | datasets.IterableDataset:
    """Load the dataset of a recipe's section `data`, which has checked that it names one: `builtin`, or `path` (on the Hub, or a
    local folder). Raises InputError unless dataset, split and column exist.
    """
    import datasets

    from .building import cache_trouble

    if builtin:
        dataset: Any = python_stdlib(split)
        dataset = dataset.to_iterable_dataset() if streaming else dataset
    else:
        try:
            dataset = datasets.load_dataset(path, name, split=split, streaming=streaming)
            _columns_of(dataset)  # the first read of a stream
        except (OSError, ValueError, StopIteration, datasets.exceptions.DatasetsError) as error:
            what = f"data.path={shown(path)}, data.name={shown(name)}, data.split={shown(split)}"
            if trouble := cache_trouble(error):
                raise InputError(f"{what}: {trouble}.") from error
            # datasets wraps the real error in a vaguer one
            reason = str(error.__cause__ or error).rstrip(". ") or "there is no row"
            raise InputError(
                f"{what}: {reason}. Name a dataset on the Hub or a folder of non-empty data files."
            ) from error
    _columns(dataset, text_column)
    return dataset


NO_EOS = (
    "the tokenizer has no eos token to put between documents. Name another one (tokenizer.name_or_path), or give it one: load it "
    "in Python, set its attribute eos_token, and save it in a folder."
)


def pack(
    dataset: Any,
    tokenizer: PreTrainedTokenizerBase,
    block_size: int,
    text_column: str = "text",
    num_proc: int = 1,
) -> Any:
    """Tokenize documents, add an eos token after each, but no other special one, join them, and cut them into equal blocks.

    Packs 1000 documents at a time and drops their tokens after the last full block. `input_ids` and `labels`, equal, each
    (block_size,) and int32, replace all columns. A stream stays a stream, but its first block is read, to fail now and not
    after the model has been built. `num_proc` processes pack what is no stream. Raises InputError if the tokenizer has no eos
    token, the column or documents are missing, or the text is shorter than one block.
    """
    if block_size < 2:
        raise InputError(f"block_size={block_size} must be at least 2: a token and the next one. Raise it.")
    if tokenizer.eos_token_id is None:
        raise InputError(NO_EOS)
    import datasets

    columns = _columns(dataset, text_column)
    ids = datasets.List(datasets.Value("int32"))
    features = datasets.Features({"input_ids": ids, "labels": ids})
    task = {"tokenizer": tokenizer, "block_size": block_size, "text_column": text_column}
    shape = {"batched": True, "batch_size": PACKED_TOGETHER, "remove_columns": columns, "features": features}
    if num_proc > 1 and not isinstance(dataset, datasets.IterableDataset):
        shape["num_proc"] = min(num_proc, len(dataset))  # datasets would make one process for 1, too
    # Hide progress bars, which are on by default, unless the user has set HF_DATASETS_DISABLE_PROGRESS_BARS=0.
    chosen = datasets.config.HF_DATASETS_DISABLE_PROGRESS_BARS is not None
    hide = not (chosen or datasets.are_progress_bars_disabled())
    if hide:
        datasets.disable_progress_bars()
    try:
        blocks = dataset.map(_pack_batch, fn_kwargs=task, **shape)
    finally:
        if hide:
            datasets.enable_progress_bars()
    if next(iter(blocks), None) is None:
        counts = [len(tokenizer(row[text_column], add_special_tokens=False).input_ids) + 1 for row in dataset]
        amount = f"{len(counts)} documents with {sum(counts)} tokens, packed {PACKED_TOGETHER} documents at a time,"
        raise InputError(f"{amount} do not fill one block of {block_size=}. Use more text or smaller blocks.")
    return blocks


def _pack_batch(batch: Any, tokenizer: Any, block_size: int, text_column: str) -> dict[str, Any]:
    import numpy as np

    # verbose=False: a document longer than the model's context needs no warning, because packing cuts it.
    options = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}
    documents = []
    for start in range(0, len(batch[text_column]), TOKENIZED_TOGETHER):
        encoded = tokenizer(batch[text_column][start : start + TOKENIZED_TOGETHER], **options)
        documents += [np.array([*ids, tokenizer.eos_token_id]) for ids in encoded["input_ids"]]
    tokens = np.concatenate(documents)
    blocks = tokens[: len(tokens) // block_size * block_size].reshape(-1, block_size)
    return {"input_ids": blocks, "labels": blocks}


def _columns_of(dataset: Any) -> list[str]:
    """A stream may know its columns only from its first sample."""
    return dataset.column_names or list(next(iter(dataset), {}))


def _columns(dataset: Any, text_column: str) -> list[str]:
    """The columns, `text_column` among them."""
    columns = _columns_of(dataset)
    if not columns:
        raise InputError(
            "0 documents in the dataset: it must have at least one. Correct data.path or data.split."
        )
    if text_column not in columns:
        known = ", ".join(columns)
        raise InputError(
            f"data.text_column={shown(text_column)} is not in the dataset. Set it to one of {known}."
        )
    return columns
