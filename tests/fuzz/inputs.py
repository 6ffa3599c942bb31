"""Wrong inputs, each made from its number alone: recipes that are damaged, values for --set, and arguments."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").rglob("*.yaml"))
QUICKSTARTS = [path for path in RECIPES if path.parent.name == "quickstart"]
[BASE] = [path for path in QUICKSTARTS if path.name == "diloco.yaml"]

Case = tuple[list[str], dict[str, str]]
"""Arguments of hf-cocodc, and changes of the environment."""

_ADDRESSES = ["h:1", "h:0", "h:99999", "[::1]:5", "a..b:1", "127.0.0.1:29650"]
VALUES = [
    *("", "~", "null", "true", "no", "on", "[]", "{}", "''", "[a, b]", "[1, 2.5, null]", "{a: 1}", "{1: 2}"),
    *(
        "0",
        "1",
        "-1",
        "2",
        "3",
        "7",
        "100",
        "010",
        "0o17",
        "0x1F",
        "0b11",
        "1_000",
        "4096",
        "1.5",
        "-0.0",
        "+",
    ),
    *("1e-3", "1e309", "1e-400", ".inf", "-.inf", ".nan", "0x", "1:30", "2024-02-30", "99999999", "9" * 30),
    *("9" * 5000, "-" + "9" * 19, "0x" + "f" * 5000, "!!int x", "!!float y", "!!bool z", "!!timestamp t"),
    *(
        "!!binary '**'",
        "!!set {a}",
        "!!python/object:os.system x",
        "!mine 5",
        "!!str 5",
        "!!map [1]",
        "!!null 5",
    ),
    *(
        "&a [*a]",
        "*a",
        "&a 5",
        "{<<: 5}",
        "{<<: [1]}",
        "{<<: {a: 1}}",
        "<<",
        "=",
        "{? [1] : 2}",
        "{a: 1, a: 2}",
    ),
    *(
        "[" * 1500,
        "[" * 60 + "]" * 60,
        "{a: " * 40 + "1" + "}" * 40,
        "[" + "1, " * 12_000 + "1]",
        "x" * 50_000,
    ),
    *(
        "'unclosed",
        '"unclosed',
        "[1, 2",
        "{a: 1",
        "|\n    text",
        "- 1\n- 2",
        "a: b: c",
        "@x",
        "`x`",
        "%x",
        "#x",
        "---",
    ),
    *(
        '"\\0"',
        '"\\x7f"',
        "\x85",
        "\u2028",
        "\ufeff",
        "\U0001f642",
        "\x1b[0m",
        "a\tb",
        "../../etc",
        "/nowhere",
        "a/b/c",
    ),
    *(
        "auto",
        "none",
        "gap",
        "cpu",
        "llama",
        "gpt2",
        "bert",
        "mamba",
        "bytes",
        "python-stdlib",
        "float16",
        "bfloat16",
    ),
    *(
        "diloco",
        "streaming",
        "eager",
        "co2",
        "dilocox",
        "cocodc",
        "fp32",
        "int8",
        "fp4",
        "topk",
        "lowrank",
        "steps",
    ),
    *(
        "whole",
        "strided",
        "sequential",
        "replace",
        "mix",
        "additive",
        "compensate",
        "adaptive",
        "host",
        "model",
        "epoch",
    ),
    *(
        "linear",
        "cosine_with_restarts",
        "adafactor",
        "adamw_8bit",
        "sgd",
        "wandb",
        "all",
        "all-linear",
        "[q_proj]",
    ),
    *_ADDRESSES,
    *(
        "wg0",
        "global",
        "[perplexity]",
        "{r: 4}",
    ),
]
DIRECTIVES = [
    *(
        "%YAML 1.2",
        "%YAML 1.1",
        "%YAML 1.3",
        "%YAML 1.0",
        "%YAML 9.9",
        "%YAML 0.1",
        "%YAML 1",
        "%YAML",
        "%YAML x",
    ),
    *(
        "%YAML 1." + "9" * 5000,
        "%YAML 1.2 1.3",
        "%YAML 1.2\n%YAML 1.2",
        "%YAML 1.2 # a comment",
        "%YAML -1.2",
    ),
    *(
        "%TAG ! x:",
        "%TAG !! x:",
        "%TAG !e! tag:x,2000:",
        "%TAG ! " + "x" * 60_000,
        "%TAG ! a\n%TAG ! b",
        "%TAG",
    ),
    *(
        "%TAG ! x:\n%YAML 1.3",
        "%FOO bar",
        "%",
        "%" + "x" * 60_000,
        "\ufeff%YAML 1.3",
        "...",
        "...\n%YAML 1.3",
    ),
]
"""Lines before a document in YAML."""
ENVIRONMENTS = [
    {},
    {"HF_COCODC_REGION": "0"},
    {"HF_COCODC_REGION": "9" * 5000},
    {"HF_COCODC_REGION": "-1", "HF_COCODC_REGIONS": "2"},
    {"HF_COCODC_REGIONS": "x"},
    {"HF_COCODC_REGION": "1", "HF_COCODC_REGIONS": "2", "HF_COCODC_COORDINATOR": "nowhere"},
    {"HF_COCODC_REGION": "1", "HF_COCODC_REGIONS": "2", "HF_COCODC_COORDINATOR": "127.0.0.1:1"},
    {"HF_COCODC_COORDINATOR": "h:99999"},
    {"HF_COCODC_RUN": "r" * 60_000},
    {"HF_COCODC_COORDINATOR": "h" * 60_000},
    {"HF_COCODC_SECRET": "short"},
]
WORDS = [
    *(
        "train",
        "simulate",
        "coordinator",
        "bench",
        "outer",
        "--help",
        "-h",
        "--version",
        "--",
        "-",
        "--fast",
        "-x",
    ),
    *(
        "--set=outer.rank=5",
        "--region=1",
        "--resume",
        "-5",
        "nan",
        "inf",
        "missing.yaml",
        ".",
        "/dev/null",
        "/dev/zero",
    ),
    *(
        "a" * 60_000,
        "--" + "a" * 60_000,
        "\udcff",
        "",
        " ",
        "a.b",
        "=",
        "training.=5",
        ".=",
        "..",
        "--num_processes",
        "--port",
        "--json",
    ),
]
NUMBERS = [
    *(
        "0",
        "1",
        "2",
        "3",
        "5",
        "-1",
        "100",
        "99999",
        "1e9",
        "1e-9",
        "0.5",
        "nan",
        "inf",
        "-inf",
        "1e400",
        "010",
        "1_000",
    ),
    *("9" * 30, "9" * 5000, "9" * 60_000, "", "x", "0x10", "\u0663"),
]
ADDRESSES = [
    *_ADDRESSES,
    "nowhere",
    ":5",
    "h:",
    "a" * 300 + ":1",
    "",
]
FILES = [
    "out.json",
    "-",
    "x" * 60_000,
    "no/such/folder/x.json",
    ".",
    "/proc/x",
    "/dev/full",
    "a" * 300,
    "",
    "\udcff",
]
NAMES = ["fp32", "int8", "lowrank", "topk", "diloco", "co2", "wg0", "bbr", "auto", "many", "", "x" * 60_000]
_BENCH = {"--json": FILES, "--repeat": NUMBERS}
OPTIONS: dict[str, dict[str, list[str]]] = {
    "train": {
        **{"--region": NUMBERS, "--coordinator": ADDRESSES, "--resume": [], "--join": [], "--run": NAMES},
        **{"--secret-file": FILES, "--dry-run": []},
    },
    "plan": {
        **dict.fromkeys(
            ("--rtt-ms", "--rate-mbit", "--loss", "--step-s", "--regions", "--target"),
            [*NUMBERS, "1", "1", "1"],
        ),
        **dict.fromkeys(
            ("--down-mbit", "--steps", "--gpus", "--usd-per-gb", "--usd-per-gpu-hour", "--params"), NUMBERS
        ),
        **{"--link": FILES, "--json": FILES, "--write": FILES, "--congestion": NAMES, "--prices": NAMES},
    },
    "status": {"--coordinator": ADDRESSES, "--run": NAMES, "--secret-file": FILES, "--json": FILES},
    "leave": {"--coordinator": ADDRESSES, "--run": NAMES, "--secret-file": FILES, "--region": NUMBERS},
    "doctor": {
        **{"--region": NUMBERS, "--coordinator": ADDRESSES, "--run": NAMES, "--wait": NUMBERS},
        **{"--secret-file": FILES, "--json": FILES},
    },
    "simulate": {
        **dict.fromkeys(("--regions", "--step-s", "--rtt-ms", "--rate-mbit", "--latency"), NUMBERS),
        **{"--json": FILES},
    },
    "coordinator": {
        **{"--host": [*ADDRESSES, "0.0.0.0", "::1", "a" * 70], "--port": NUMBERS},
        **{"--secret-file": FILES, "--insecure": [], "--state": FILES},
    },
    "bench link": {
        **_BENCH,
        **dict.fromkeys(("--megabytes", "--regions", "--region", "--rate-mbit", "--rate-limit"), NUMBERS),
        **dict.fromkeys(("--codec", "--interface", "--run"), NAMES),
        **{"--connections": [*NUMBERS, "auto"], "--coordinator": ADDRESSES, "--secret-file": FILES},
        "--link": [*NAMES, "tcp", "gloo"],
    },
}


_WITH_RECIPE = ("train", "plan", "doctor", "simulate")


def damaged_recipe(number: int) -> Case:
    """A recipe with one to four damages to its bytes, lines or values; or a good one that extends such a recipe."""
    chance = random.Random(f"recipe {number}")
    for path in QUICKSTARTS:  # beside each other: one extends another
        Path(path.name).write_bytes(path.read_bytes())
    path = chance.choice((*QUICKSTARTS, BASE, BASE, BASE) if chance.random() < 0.8 else RECIPES)
    content = path.read_bytes()
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        content = chance.choice((_damage_bytes, _damage_lines, _damage_values, _damage_values))(
            content, chance
        )
    file = Path(path.name if path == BASE else "mutant.yaml")
    file.write_bytes(content)
    started = chance.choice(QUICKSTARTS).name if path == BASE and chance.random() < 0.5 else str(file)
    return ["simulate" if chance.random() < 0.1 else "train", started], {}


def wrong_set(number: int) -> Case:
    """A good recipe, with one to three --set of which most are wrong."""
    chance = random.Random(f"set {number}")
    words = ["train", str(chance.choice(QUICKSTARTS))]
    for _ in range(chance.choice((1, 1, 2, 3))):
        words += _set(chance)
    return words, {}


def wrong_arguments(number: int) -> Case:
    """A command with right and wrong options, right and wrong values, and some nonsense."""
    chance = random.Random(f"arguments {number}")
    command = chance.choice(list(OPTIONS))
    words = command.split() if chance.random() < 0.95 else [chance.choice(WORDS)]
    if command in _WITH_RECIPE and chance.random() < 0.9:
        words.append(str(chance.choice(QUICKSTARTS)))
    for _ in range(chance.choice((0, 1, 1, 2, 3, 6))):
        if chance.random() < 0.1:
            words.append(chance.choice(WORDS))
        elif command in _WITH_RECIPE and chance.random() < 0.3:
            words += _set(chance)
        else:
            option, values = chance.choice(list(OPTIONS[command].items()))
            words += (
                [option, chance.choice(VALUES if chance.random() < 0.1 else values)] if values else [option]
            )
    words = [word.replace("\0", "") for word in words]  # no operating system passes on a zero byte
    return words, chance.choice(ENVIRONMENTS) if chance.random() < 0.3 else {}


def _set(chance: random.Random) -> list[str]:
    """A --set, sometimes with a value that is an argument of its own."""
    key = chance.choice(_keys())
    if chance.random() < 0.1:
        key = _damage_bytes(key.encode(), chance).decode("utf-8", "surrogateescape")
    equals = chance.choice(("=", "=", "=", "=", "=", "", " = "))
    value = chance.choice(NUMBERS if chance.random() < 0.3 else VALUES)
    if chance.random() < 0.1:
        value = f"{chance.choice(DIRECTIVES)}\n---\n{value}"
    return ["--set", key, value] if chance.random() < 0.05 else ["--set", key + equals + value]


KINDS: dict[str, tuple[Callable[[int], Case], int]] = {
    "recipes": (damaged_recipe, 10_000),
    "sets": (wrong_set, 3_000),
    "arguments": (wrong_arguments, 1_000),
}
"""What makes a case, and how many cases are a full run."""


def _damage_bytes(content: bytes, chance: random.Random) -> bytes:
    at = chance.randrange(len(content) + 1)
    to = min(len(content), at + chance.choice((1, 2, 20, 200)))
    how = chance.randrange(6)
    if how == 0:
        return (
            content[:at]
            + bytes(chance.randrange(256) for _ in range(chance.choice((1, 3, 30))))
            + content[at:]
        )
    if how == 1:
        return content[:at] + content[to:]
    if how == 2:
        return content[:at] + content[at:to] * chance.choice((2, 50)) + content[to:]
    if how == 3:
        return content[:at]
    if how == 4:
        return (
            content[:at] + bytes(byte ^ (1 << chance.randrange(8)) for byte in content[at:to]) + content[to:]
        )
    return content[:at] + chance.choice(VALUES).encode("utf-8", "surrogateescape") + content[at:]


def _damage_lines(content: bytes, chance: random.Random) -> bytes:
    lines = content.split(b"\n")
    at, other = chance.randrange(len(lines)), chance.randrange(len(lines))
    how = chance.randrange(7)
    if how == 0:
        del lines[at]
    elif how == 1:
        lines.insert(other, lines[at])
    elif how == 2:
        lines[at], lines[other] = lines[other], lines[at]
    elif how == 3:
        lines[at] = b" " * chance.choice((1, 2, 40)) + lines[at]
    elif how == 4:
        lines[at] = lines[at].lstrip()
    elif how == 5:
        directive = chance.choice(DIRECTIVES).encode()
        lines.insert(0 if chance.random() < 0.8 else at, directive + chance.choice((b"", b"\n---", b"\n---")))
    else:
        key = chance.choice(_keys()).rpartition(".")[2]
        indent = chance.choice(("", "  ", "  ", "  "))
        lines.insert(at, f"{indent}{key}: {chance.choice(VALUES)}".encode("utf-8", "surrogateescape"))
    return b"\n".join(lines)


def _damage_values(content: bytes, chance: random.Random) -> bytes:
    lines = content.split(b"\n")
    at = chance.choice([place for place, line in enumerate(lines) if b":" in line] or [0])
    key, _, value = lines[at].partition(b":")
    new = chance.choice(NUMBERS if value.strip()[:1].isdigit() and chance.random() < 0.6 else VALUES)
    if chance.random() < 0.1:
        key = key[: len(key) - len(key.lstrip())] + new.encode("utf-8", "surrogateescape")
    else:
        value = b" " + new.encode("utf-8", "surrogateescape")
    lines[at] = key + b":" + value
    return b"\n".join(lines)


@cache
def _keys() -> Sequence[str]:
    """All keys of a recipe; those that a quickstart holds are there more often."""
    from peft import LoraConfig
    from transformers import LlamaConfig, TrainingArguments

    from hf_cocodc.settings import OuterConfig, RegionConfig
    from hf_cocodc.settings.recipe import DataSection, EvaluationSection, ModelSection, TokenizerSection

    sections = {
        **{"model": ModelSection, "tokenizer": TokenizerSection, "data": DataSection, "outer": OuterConfig},
        **{
            "regions": RegionConfig,
            "evaluation": EvaluationSection,
            "training": TrainingArguments,
            "peft": LoraConfig,
        },
    }
    keys = [f"{name}.{each.name}" for name, kind in sections.items() for each in dataclasses.fields(kind)]
    keys += [
        f"model.config.{key}" for key in (*LlamaConfig().to_dict(), "model_type") if not key.startswith("_")
    ]
    often = [key for key in keys if key.partition(".")[0] not in ("training", "peft")]
    return (
        keys
        + 2 * often
        + ["model", "outer", "training.a.b.c", "data..", "nowhere.x", "peft", "extends", "extends.x"]
    )
