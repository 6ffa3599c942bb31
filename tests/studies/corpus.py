"""A real text of hundreds of megabytes without a download: what the packages and manuals of this machine bring along.

Source files and documentation are read in UTF-8; a file that is there twice counts once. They are sorted by the SHA-256 of
their contents: the order does not depend on where they lie, and every part of it is a fair sample. The first hundredth is held
out. A byte-level BPE is trained on the beginning of the rest.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import site
import sys
import sysconfig
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from hf_cocodc.errors import InputError

from .text import Tokens

SUFFIXES = frozenset(
    [
        ".py",
        ".pyi",
        ".pyx",
        ".rst",
        ".md",
        ".txt",
        ".html",
        ".h",
        ".hpp",
        ".cuh",
        ".c",
        ".cc",
        ".cpp",
        ".cu",
        ".js",
    ]
)
"""Of text in packages. In folders of manuals every file may be text."""
MANUALS = ("/usr/share/doc", "/usr/share/man/man", "/usr/share/info")
"""Beginnings of the names of their folders; pages of manuals in other languages lie beside `man/man1`."""
SHORTEST, LONGEST = 256, 2**20
"""Bytes of a document: shorter ones say nothing, longer ones are mostly tables that a program has written."""
HELD_OUT = 100
"""One byte in so many is held out."""
END = "<|end|>"
"""The token after each document."""
AT_ONCE = 500
"""Documents that the tokenizer gets in one call."""


class Documents(NamedTuple):
    """What has been found.

    Attributes:
        train, held_out: the documents.
        digest: SHA-256 of the SHA-256 of all of them, in their order.
        found: bytes of all different documents, also of those beyond the size that was wanted.
    """

    train: list[str]
    held_out: list[str]
    digest: str
    found: int

    @property
    def size(self) -> int:
        """Characters of the text."""
        return sum(map(len, self.train)) + sum(map(len, self.held_out))


class Corpus(NamedTuple):
    """A text in tokens, and what says which one it is.

    Attributes:
        tokens: the text.
        digest: of its documents.
        tokens_digest: CRC-32 of the tokens: it differs where another version of `tokenizers` cuts the same documents otherwise.
        num_characters: of the documents.
    """

    tokens: Tokens
    digest: str
    tokens_digest: str
    num_characters: int


def standard_library() -> list[Path]:
    """The folder of Python's own modules."""
    return [Path(sysconfig.get_path("stdlib"))]


def machine() -> list[Path]:
    """The folders of Python's own modules, of all packages that this process could import, and of the machine's manuals."""
    packages = [*site.getsitepackages(), *filter(None, sys.path)]
    named = [Path(each) for each in packages if Path(each).name in ("site-packages", "dist-packages")]
    return [
        *standard_library(),
        *dict.fromkeys([*named, Path("/usr/lib/python3/dist-packages")]),
        *_manuals(),
    ]


def _manuals() -> list[Path]:
    return [
        path
        for start in MANUALS
        for path in sorted(Path(start).parent.glob(f"{Path(start).name}*"))
        if path.is_dir()
    ]


def documents(folders: Iterable[Path], least: int, most: int) -> Documents:
    """The text in folders, at most `most` bytes of it.

    Raises:
        InputError: there are fewer than `least` bytes.
    """
    folders, kept = list(folders), {}
    for path in _files(folders):
        content = _content(path)
        if content is not None:
            kept[hashlib.sha256(content).digest()] = content
    found = sum(map(len, kept.values()))
    if found < least:
        raise InputError(
            f"{found / 1e6:.0f} MB of different text in {', '.join(map(str, folders))}: this size needs {least / 1e6:.0f} MB. "
            "Name more folders with --text, or install packages that bring source and documentation."
        )
    digest, taken = hashlib.sha256(), 0
    parts: tuple[list[str], list[str]] = ([], [])
    for key in sorted(kept):
        content = kept[key]
        if taken + len(content) > most:
            break
        digest.update(key)
        parts[taken * HELD_OUT < min(found, most)].append(content.decode())
        taken += len(content)
    return Documents(*parts, digest.hexdigest(), found)


def _files(folders: Iterable[Path]) -> Iterator[Path]:
    for folder in folders:
        every = str(folder).startswith(MANUALS)
        for place, subfolders, names in os.walk(folder):
            if not place.endswith(("site-packages", "dist-packages")) or Path(place) == folder:
                yield from (Path(place, name) for name in names if every or Path(name).suffix in SUFFIXES)
            else:
                subfolders.clear()  # a folder of packages inside another one is named itself, if its packages are to be read


def _content(path: Path) -> bytes | None:
    """The text of a file, in UTF-8; None if it is none, or too short or long."""
    try:
        if not path.is_file():  # a pipe would never end
            return None
        if path.suffix == ".gz":
            with gzip.open(path) as packed:
                content = packed.read(LONGEST + 1)
        elif path.stat().st_size <= LONGEST:
            content = path.read_bytes()
        else:
            return None
        content.decode()
    except (OSError, EOFError, zlib.error, UnicodeDecodeError):
        return None
    return content if SHORTEST <= len(content) <= LONGEST and b"\0" not in content else None


def tokenizer_of(texts: Sequence[str], vocabulary: int, characters: int) -> Any:
    """A byte-level BPE of `vocabulary` tokens, from the first `characters` of texts. The same texts give the same one."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_first(texts, characters), trainer)
    return tokenizer


def _first(texts: Iterable[str], characters: int) -> Iterator[str]:
    for each in texts:
        if characters <= 0:
            return
        characters -= len(each)
        yield each


def _ids(tokenizer: Any, texts: Sequence[str], say: Callable[[str], object]) -> torch.Tensor:
    """The tokens (int16, one-dimensional) of texts in a row, `END` after each; a line every so many texts."""
    end, parts = np.array([tokenizer.token_to_id(END)], np.int16), []
    for first in range(0, len(texts), AT_ONCE):
        for encoding in tokenizer.encode_batch_fast(texts[first : first + AT_ONCE], add_special_tokens=False):
            parts += [np.array(encoding.ids, np.int16), end]
        if first and first % (10 * AT_ONCE) == 0:
            say(f"{first} of {len(texts)} documents are tokens")
    return torch.from_numpy(np.concatenate(parts))


def corpus_of(
    found: Documents, vocabulary: int, trained_on: int, kept_in: Path, say: Callable[[str], object]
) -> Corpus:
    """The tokens of documents; they are kept in a folder, for the next time.

    Args:
        found: the documents.
        vocabulary: tokens that there can be, at most 2^15.
        trained_on: characters from which the tokenizer is made.
        kept_in: the folder.
        say: takes a line for what takes long.
    """
    import tokenizers

    name = f"{found.digest}-{vocabulary}-{trained_on}-{tokenizers.__version__}"
    path = kept_in / f"corpus-{hashlib.sha256(name.encode()).hexdigest()[:16]}.npz"
    if not path.is_file():
        say(
            f"making a tokenizer of {vocabulary} tokens, and cutting {found.size / 1e6:.0f}M characters into tokens"
        )
        tokenizer = tokenizer_of(found.train, vocabulary, trained_on)
        kept_in.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".new.npz")
        train, held_out = (_ids(tokenizer, texts, say).numpy() for texts in (found.train, found.held_out))
        np.savez(unfinished, train=train, held_out=held_out)
        unfinished.rename(path)
    with np.load(path) as arrays:
        tokens = Tokens(torch.from_numpy(arrays["train"]), torch.from_numpy(arrays["held_out"]), vocabulary)
    crc = zlib.crc32(tokens.held_out.numpy(), zlib.crc32(tokens.train.numpy()))
    return Corpus(tokens, found.digest, f"{crc:08x}", found.size)
