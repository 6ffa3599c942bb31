"""A study small enough for tests."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any

from tests.studies import spec

BASE: dict[str, Any] = {
    "model": {
        "config": {
            "model_type": "llama",
            "hidden_size": 8,
            "intermediate_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
            "max_position_embeddings": 16,
            "bos_token_id": 256,
            "eos_token_id": 256,
        }
    },
    "tokenizer": {"builtin": "bytes"},
    "data": {"builtin": "python-stdlib", "block_size": 16, "eval_blocks": 4},
    "training": {
        "max_steps": 8,
        "eval_steps": 4,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
    },
    "outer": {"method": "diloco", "sync_interval": 4, "outer_lr": 1.0, "outer_momentum": 0.0},
    "regions": {"count": 2},
    "study": {},
}


def settings(seed: int = 1, **changes: Any) -> dict[str, Any]:
    """The settings of a run; names are written with __ for the point."""
    return {
        **spec.changed(BASE, {name.replace("__", "."): value for name, value in changes.items()}),
        "seed": seed,
    }


def study(**changes: Any) -> spec.Study:
    """A study of two arms, whose sweep has two learning rates."""
    given: dict[str, Any] = {
        "name": "toy",
        "title": "A toy",
        "base": BASE,
        "arms": {"first": {}, "second": {"outer.codec": "int8"}},
        "cells": spec.WHOLE,
        "seeds": (1, 2),
        "sweep_seeds": (101,),
        "grid": {"outer.outer_lr": [0.5, 1.0]},
        "grids": {},
        "like": {},
        "sweep_in": {},
        "reference": "first",
        "common_loss": None,
        "confidence": 0.95,
        "notes": (),
    }
    return spec.Study(**{**given, **changes})


def result(loss: float | None, weights: str = "w", **more: Any) -> dict[str, Any]:
    """The result of a run that ends with a loss."""
    curve = [(4, 5.0), (8, loss), (8, loss)]
    return {
        "curve": curve,
        "bytes": 10,
        "weights": weights,
        "batches": ["b"],
        "trained": 1.0,
        "seconds": 0.1,
        **more,
    }


class Inline:
    """A pool of processes that are this one."""

    def __enter__(self) -> Inline:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def submit(self, call: Any, *given: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(call(*given))
        return future


def write_spec(folder: Path, text: str) -> Path:
    """A spec file next to a recipe of a tiny model."""
    import json

    (folder / "base.yaml").write_text(
        json.dumps({name: part for name, part in BASE.items() if name != "study"})
    )
    path = folder / "toy.yaml"
    path.write_text(text)
    return path
