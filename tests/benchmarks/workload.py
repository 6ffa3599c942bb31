"""The training of every contestant: the same model, weights, batches and inner optimizer."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

H = 20
"""Inner steps between two synchronizations of a parameter."""
FRAGMENTS = 4
OVERLAP = 4
"""Inner steps of a transfer in Streaming DiLoCo; torchft allows fewer than H / FRAGMENTS."""
BATCH, BLOCK = 2, 64
HELD_OUT = 96
LEARNING_RATE, WARMUP_STEPS = 3e-3, 20
TRAINED = {"num_hidden_layers": 6, "intermediate_size": 344}
LARGE = {"num_hidden_layers": 32, "intermediate_size": 401}
"""A Llama of 291 tensors, 28.6 MB in all. Only for syncs, not for training."""
SEED = 1


@dataclass(frozen=True)
class Region:
    """The place of a process in a run."""

    region: int
    count: int
    folder: Path
    first: str
    """The address of region 0 on the link."""
    address: str
    port: int


def model_of(shape: dict[str, int]) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=2 * BLOCK,
        tie_word_embeddings=False,
        use_cache=False,
        **shape,
    )
    return LlamaForCausalLM(config)


def inner_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1)


def set_rate(optimizer: torch.optim.Optimizer, step: int) -> None:
    for group in optimizer.param_groups:
        group["lr"] = LEARNING_RATE * min(1.0, step / WARMUP_STEPS)


def write_text(folder: Path) -> None:
    """Write the source of Python's standard library to two files: training text and held-out text."""
    from hf_cocodc.training.data import python_stdlib

    for split in ("train", "test"):
        content = "\n".join(python_stdlib(split)["text"]).encode()
        (folder / f"{split}.bin").write_bytes(content)


class Text:
    """Blocks of bytes. A region draws its batches from its own part of the training text."""

    def __init__(self, place: Region) -> None:
        self._train = _bytes(place.folder / "train.bin")
        self._held_out = _bytes(place.folder / "test.bin")
        length = len(self._train) // place.count
        self._part = self._train[place.region * length : (place.region + 1) * length]
        self._region = place.region

    def batch(self, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(1_000_003 * (self._region + 1) + step)
        starts = torch.randint(len(self._part) - BLOCK, (BATCH,), generator=generator)
        return torch.stack([self._part[start : start + BLOCK] for start in starts.tolist()]).long()

    @torch.no_grad()
    def held_out_loss(self, model: nn.Module) -> float:
        """The mean loss over the same blocks for all contestants, in nats per byte."""
        starts = torch.linspace(0, len(self._held_out) - BLOCK, HELD_OUT).long().tolist()
        blocks = torch.stack([self._held_out[start : start + BLOCK] for start in starts]).long()
        losses = [model(input_ids=part, labels=part).loss.item() for part in blocks.split(24)]
        return sum(losses) / len(losses)


def _bytes(path: Path) -> Tensor:
    return torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
