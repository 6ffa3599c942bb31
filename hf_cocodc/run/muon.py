"""Muon for the matrices inside a model's blocks and AdamW for all other parameters, as one optimizer."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..errors import InputError
from ..parts.blocks import find_blocks
from ..settings.fields import Limit, at_least, converted

BETAS = (0.9, 0.99)
"""Of AdamW beside Muon, as MuLoCo's authors have them."""
_SHARE = Limit(lambda share: 0 <= share < 1, "must lie in [0, 1)")


class MuonAdamW(torch.optim.Optimizer):
    """One optimizer of two: `torch.optim.Muon` for matrices, `torch.optim.AdamW` for the rest. See `muon`.

    It has one state and one list of parameter groups, as any optimizer of PyTorch, so that schedules, checkpoints, Accelerate
    and Trainer need to know nothing of the two. A group says in "kind" whose it is.

    Args:
        matrices: groups for Muon; their parameters have two dimensions.
        others: groups for AdamW.
        lr: of all groups.
        weight_decay: of groups that have none of their own.
        momentum, nesterov: of Muon.
        betas, eps: of AdamW.
    """

    def __init__(
        self,
        matrices: Sequence[dict[str, Any]],
        others: Sequence[dict[str, Any]],
        *,
        lr: float,
        weight_decay: float = 0.1,
        momentum: float = 0.9,
        nesterov: bool = False,
        betas: tuple[float, float] = BETAS,
        eps: float = 1e-8,
    ) -> None:
        self._parts: dict[str, torch.optim.Optimizer] = {}
        if matrices:
            self._parts["muon"] = torch.optim.Muon(
                [*matrices],
                lr=lr,
                weight_decay=weight_decay,
                momentum=momentum,
                nesterov=nesterov,
                adjust_lr_fn="match_rms_adamw",
            )
        if others:
            self._parts["adamw"] = torch.optim.AdamW(
                [*others], lr=lr, betas=betas, eps=eps, weight_decay=weight_decay
            )
        groups = [{**each, "kind": kind} for kind, part in self._parts.items() for each in part.param_groups]
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay})

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_parts": self._parts}  # what a copy needs, too

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step of both; `closure` computes the loss anew, once. Raises InputError if a matrix is sharded."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for kind, part in self._parts.items():
            # a loaded state, or FSDP2, has replaced what the part has had
            part.state, part.param_groups = (
                self.state,
                [each for each in self.param_groups if each["kind"] == kind],
            )
            if kind == "muon":
                _refuse_shards(part.param_groups)
            part.step()
        return loss


def muon(
    model: nn.Module,
    *,
    lr: float,
    weight_decay: float = 0.1,
    momentum: float = 0.9,
    nesterov: bool = False,
    betas: tuple[float, float] = BETAS,
    eps: float = 1e-8,
) -> MuonAdamW:
    """The inner optimizer of MuLoCo (2505.23725): Muon inside a model's blocks, AdamW for embeddings, head, norms and biases.

    ::

        B <- mu B + (1 - mu) G ;  O = orthogonalize(B) ;  W <- (1 - lr wd) W - 0.2 lr sqrt(max(a, b)) O

    for each matrix W (a, b) with the gradient G; mu is `momentum`, wd is `weight_decay`. The factor 0.2 sqrt(max(a, b)) makes a
    step as large as one of AdamW (2502.16982): one `lr` and one `weight_decay`, those that you would take for AdamW, serve
    both. Norms and biases have no weight decay. With `nesterov`, O = orthogonalize((1 - mu) G + mu B).

    Momentum and betas are those of MuLoCo's authors, which our study found better than 0.95 with a Nesterov step and 0.95
    (docs/methods/muloco.md).

    Give it to `Trainer(optimizers=(muon(model, lr=...), None))`, or prepare it and give it to `OuterOptimizer`. A recipe writes
    `training: {optim: muon}`, and what it needs of `optim_args: "momentum=0.95,nesterov=true"` and `adam_beta2` beside it.

    Differs from the paper: its learning rate is scaled by sqrt(a / b), and is about 0.02. Experts that are stacked in one tensor
    of three dimensions are left to AdamW; routers inside blocks are not.

    Args:
        model: before `accelerator.prepare`; only parameters with requires_grad are trained.
        lr, weight_decay: of both.
        momentum, nesterov: of Muon.
        betas, eps: of AdamW.

    Raises:
        InputError: a setting that cannot be, or no block of the model has a trainable matrix.
    """
    given = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "eps": eps}
    for name, value in given.items():
        limit = _SHARE if name == "momentum" else at_least(0)
        limit.check(f"muon: {name}", converted(value, float, f"muon: {name}"))
    converted(nesterov, bool, "muon: nesterov")
    converted(betas, tuple[float, float], "muon: betas")
    embeddings = {id(each.weight) for each in model.modules() if isinstance(each, nn.Embedding)}
    blocks = tuple(f"{name}." for block in find_blocks(model) for name in block)
    trained = {name: param for name, param in model.named_parameters() if param.requires_grad}
    inside = [
        param
        for name, param in trained.items()
        if param.ndim == 2 and name.startswith(blocks) and id(param) not in embeddings
    ]
    if not inside:
        raise InputError(
            f"Muon trains matrices inside a model's blocks, and {type(model).__name__} has none that can be trained. Use another "
            "optimizer, for example optim=adamw_torch."
        )
    taken = {id(param) for param in inside}
    rest = [param for param in trained.values() if id(param) not in taken]
    others: list[dict[str, Any]] = [
        {"params": [param for param in rest if param.ndim > 1]},
        {"params": [param for param in rest if param.ndim <= 1], "weight_decay": 0.0},
    ]
    return MuonAdamW(
        [{"params": inside}],
        [each for each in others if each["params"]],
        lr=lr,
        weight_decay=weight_decay,
        momentum=momentum,
        nesterov=nesterov,
        betas=betas,
        eps=eps,
    )


def _refuse_shards(groups: Sequence[dict[str, Any]]) -> None:
    for param in (each for group in groups for each in group["params"]):
        if isinstance(param, DTensor):
            raise InputError(
                f"Muon needs whole matrices, but FSDP2 has cut one of shape {tuple(param.shape)}. Use DDP inside a region, or "
                "another optimizer (training.optim=adamw_torch)."
            )
