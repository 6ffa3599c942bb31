"""One region of a run in which a number of region 1 goes wrong once: a plain loop, on tokens that tell the next ones."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from hf_cocodc import OuterConfig, OuterOptimizer, RegionConfig
from hf_cocodc.engine.shares import Shares
from hf_cocodc.link.base import Link
from hf_cocodc.link.exchange import Exchange
from hf_cocodc.net.pipe import Pipe
from tests.processes.coming_worker import take_time
from tests.toys import VOCAB, llama, params_of

STEPS, SYNC, LR = 120, 5, 1e-2
BAD_STEP = 55
"""Its transfer is the eleventh: the guard knows what is ordinary."""
HIGH, LOW = 0x40, 0x10
"""Bits of the last byte of an fp32 number, in its exponent: an outer gradient's value becomes 2**128 or 2**-32 times as large."""


def tokens(region: int, step: int, size: int = 4) -> Tensor:
    """Rows (size, 17) in which a token tells the next one, but for one in ten."""
    chance = torch.Generator().manual_seed(1000 * region + step)
    rows = [torch.randint(1, VOCAB, (size,), generator=chance)]
    for _ in range(16):
        noise = torch.randint(1, VOCAB, (size,), generator=chance)
        is_noise = torch.rand(size, generator=chance) < 0.1
        rows.append(torch.where(is_noise, noise, (5 * rows[-1] + 3) % (VOCAB - 1) + 1))
    return torch.stack(rows, dim=1)


def fill(model: torch.nn.Module, value: float) -> None:
    for param in model.parameters():
        param.detach().view(-1)[0] = value


def blow_up(outer: OuterOptimizer, factor: float) -> None:
    """Local params from which the outer gradient is so many times as large."""
    for fragment in outer.synchronizer.fragments:
        local = fragment.gather()
        fragment.show(local.sub_(fragment.global_params).mul_(factor).add_(fragment.global_params))


def lie(weight: float) -> None:
    """Say this weight with the next transfer."""
    share = Shares.share

    def told(self: Shares, *args: Any) -> float:
        Shares.share = share  # type: ignore[method-assign]
        return weight

    Shares.share = told  # type: ignore[method-assign]


def flip(last: int) -> None:
    """Alter the next payload on its way to one region: flip bits of its last byte."""
    send = Exchange._send

    @functools.wraps(send)
    def altered(self: Exchange, rows: Any, index: int, payload: Tensor, others: Sequence[int]) -> None:
        if others and payload.numel() > 1000:
            Exchange._send = send  # type: ignore[method-assign]
            wrong = payload.clone()
            wrong[-1] ^= last
            send(self, rows, index, wrong, others[:1])
            others = others[1:]
        send(self, rows, index, payload, others)

    Exchange._send = altered  # type: ignore[method-assign]


def flip_sealed() -> None:
    """Alter the next sealed payload on its way."""
    send = Pipe.send

    def altered(self: Pipe, header: bytes, content: bytes | memoryview = b"", flags: int = 0) -> None:
        ciphers = self._ciphers
        if ciphers is None or len(content) <= 1000:
            send(self, header, content, flags)
            return
        Pipe.send = send  # type: ignore[method-assign]
        seal = ciphers[0].seal

        def wrong(message: bytes | memoryview) -> bytes:
            sealed = seal(message)
            return sealed[:-1] + bytes([sealed[-1] ^ 1])

        self._ciphers = SimpleNamespace(seal=wrong), ciphers[1]  # type: ignore[assignment]
        try:
            send(self, header, content, flags)
        finally:
            self._ciphers = ciphers

    Pipe.send = altered  # type: ignore[method-assign]


def harm(fault: str | None, outer: OuterOptimizer, model: torch.nn.Module) -> None:
    """Let the number go wrong, after an inner step."""
    match fault:
        case "nan" | "inf":
            fill(model, float(fault))
        case "gradient":
            blow_up(outer, 1e6)
        case "weight":
            lie(1e6)
        case "range":
            flip(HIGH)
        case "value":
            flip(LOW)
        case "sealed":
            flip_sealed()


def live(
    folder: str,
    fault: str | None = None,
    *,
    link: Link | None = None,
    outer: dict[str, Any] | None = None,
    step_s: float = 0.0,
    **regions: Any,
) -> dict[str, Any]:
    """Train this region; region 1 suffers `fault`, and later steps take `step_s`. Writes and returns what it has at the end."""
    region = int(os.environ["HF_COCODC_REGION"]) if link is None else link.region
    accelerator = Accelerator(cpu=True)
    model = llama(layers=2)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=LR))
    config = OuterConfig(**{"sync_interval": SYNC, "outer_momentum": 0.5, **(outer or {})})
    home, where = Path(folder), RegionConfig(timeout_s=20.0, **regions)
    journal = home / f"region-{region}.jsonl"
    with OuterOptimizer(
        *(accelerator, model, optimizer, config, where), max_steps=STEPS, journal=journal, link=link
    ) as run:
        while run.inner_step < STEPS and not run.should_stop:
            optimizer.param_groups[0]["lr"] = LR * (1 - run.inner_step / STEPS)
            rows = tokens(region, run.inner_step)
            accelerator.backward(model(input_ids=rows, labels=rows).loss)
            optimizer.step()
            optimizer.zero_grad()
            if run.inner_step >= BAD_STEP:
                take_time(home, step_s)
            if region == 1 and run.inner_step + 1 == BAD_STEP:
                harm(fault, run, model)
            run.step()
    held_out = tokens(99, 0, size=64)
    with torch.no_grad():
        loss = float(model(input_ids=held_out, labels=held_out).loss)
    found = {"weights": params_of(accelerator.unwrap_model(model)), "loss": loss, "step": run.inner_step}
    torch.save(found, home / f"region-{region}.pt")
    return found
