"""What the ranks of a region tell each other, as JSON or text in tensors. Nothing is pickled."""

import json
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast, gather


def from_main(accelerator: Accelerator, value: Any) -> Any:
    """The main process's `value`, which JSON can express, in all ranks of the region. A collective call."""
    if accelerator.num_processes == 1:
        return value
    told = json.dumps(value).encode() if accelerator.is_main_process else b""
    size = broadcast(torch.tensor([len(told)], device=accelerator.device))
    text = torch.zeros(int(size), dtype=torch.uint8)
    if accelerator.is_main_process:
        text = torch.frombuffer(bytearray(told), dtype=torch.uint8)
    return json.loads(bytes(broadcast(text.to(accelerator.device)).tolist()))


def of_all(accelerator: Accelerator, text: str) -> list[str]:
    """The texts of all ranks of the region, in their order. All have the same length in bytes. A collective call."""
    own = torch.tensor(list(text.encode()), dtype=torch.uint8, device=accelerator.device)
    told = bytes(gather(own).tolist())
    return [told[start : start + len(own)].decode() for start in range(0, len(told), len(own))]
