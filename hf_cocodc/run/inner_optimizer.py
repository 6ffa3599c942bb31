"""The inner optimizer: which kinds can be trained with, its learning rate, and how it begins anew."""

import functools
import logging
import math
from collections.abc import Callable, Iterator
from numbers import Real
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn

from ..engine.shares import unknown_tokens
from ..errors import InputError, shown
from ..link.group import ranks_of_region
from ..newer import INNER
from ..parts.tensors.memory import is_capturing
from .copies import Copies

logger = logging.getLogger(__name__)

_WAY_OUT = "Give the optimizer, or the list of optimizers, that accelerator.prepare returned."
_NAMED = 3
"""Most parameters that a message names."""
_MISSING = (
    "Otherwise the other regions get nothing of what this one trains. Add the line `outer.step()` behind `optimizer.step()`, so "
    "that it is called before the next one."
)


def parts_of(optimizer: Any) -> list[Any]:
    """The optimizers that hold the parameters, without Accelerate's wrapper. Raises InputError if `optimizer` is none.

    Args:
        optimizer: one optimizer, a list of them, or an object that holds several as `optimizers` or, as Transformers'
            layer-wise ones do, one for each parameter as `optimizer_dict`. It need not be PyTorch's: it has `param_groups`,
            dicts with a list of parameters as "params".
    """
    if isinstance(optimizer, AcceleratedOptimizer):
        return parts_of(optimizer.optimizer)
    if isinstance(optimizer, type):
        raise InputError(f"optimizer={optimizer.__name__} is a class. {_WAY_OUT}")
    if hasattr(optimizer, "get_last_lr"):
        raise InputError(f"{type(optimizer).__name__} is a learning rate schedule, no optimizer. {_WAY_OUT}")
    several = optimizer if isinstance(optimizer, list | tuple) else _held(optimizer)
    if several:
        return [part for each in several for part in parts_of(each)]
    if not hasattr(optimizer, "param_groups"):
        raise InputError(
            f"optimizer={shown(optimizer)} ({type(optimizer).__name__}) has no param_groups, so its parameters and its "
            f'learning rate are unknown. {_WAY_OUT} An optimizer of your own needs param_groups: dicts with "params" and "lr".'
        )
    return [optimizer]


def refuse_two_sets_of_weights(optimizer: Any) -> None:
    """Check that an optimizer, or a class of optimizers, keeps one set of weights. Raises InputError if it keeps two: a
    schedule-free optimizer (2405.15682) has train() and eval(), which put one or the other set into the parameters.
    """
    while optimizer is not None:
        if not isinstance(optimizer, AcceleratedOptimizer) and all(
            callable(getattr(optimizer, name, None)) for name in ("train", "eval")
        ):
            kind = optimizer if isinstance(optimizer, type) else type(optimizer)
            raise InputError(two_sets_of_weights(f"the optimizer {kind.__name__}"))
        optimizer = getattr(optimizer, "optimizer", None)


def two_sets_of_weights(optimizer: str) -> str:
    """The message that refuses an optimizer with two sets of weights."""
    return (
        f"{optimizer} keeps two sets of weights, one to train with and one to evaluate, as schedule-free optimizers do. Regions "
        "would exchange only the first, and end with different models. Use an optimizer with one set of weights and a learning "
        "rate schedule, for example optim=adamw_torch and lr_scheduler_type=cosine."
    )


class InnerOptimizer:
    """The inner optimizer of a region. Raises InputError if no region can train with it, and says what to change.

    Args:
        model: unwrapped.
        reads_lr: whether the method computes with the learning rate.
        begins_anew: whether `begin_anew` may be called; `times_anew` counts how often it was.
    """

    def __init__(self, optimizer: Any, model: nn.Module, *, reads_lr: bool, begins_anew: bool) -> None:
        self._given, self._parts = optimizer, parts_of(optimizer)
        self._model, self._reads_lr = model, reads_lr
        self.times_anew = 0
        self._is_clipped = False
        self._counted = self._is_watched = False
        self._steps: list[int] = []
        for part in self._parts:
            refuse_two_sets_of_weights(part)
            if begins_anew and not callable(getattr(getattr(part, "state", None), "clear", None)):
                raise InputError(
                    f"{type(part).__name__} has no `state` that can be cleared, as outer.on_nonfinite=restart does. Give the "
                    "optimizers that it combines, as a list; or set outer.on_nonfinite=stop."
                )
        self._check_parameters()
        if reads_lr and all(rate is None for rate, _ in self._rates()):
            raise InputError(
                f"this method computes with the inner optimizer's learning rate, but no parameter group of {self._name} has a "
                'number as "lr". Give the optimizer a learning rate; or use a method or a compensation that needs none '
                "(CO2 and compensation=lr_normalized need one)."
            )
        self.begin()

    def begin(self) -> None:
        """Begin from the present state of the optimizer, at the start of a run or at a checkpoint, before any inner step."""
        self._noted: float | None = None
        self._at_start: float | None = self._lr()
        self.copies = Copies(self._parts, self._model)
        self._steps = [0] * len(self._steps)

    @property
    def _name(self) -> str:
        return " and ".join(type(part).__name__ for part in self._parts)

    @property
    def is_bounded(self) -> bool:
        """Whether a step is bounded: by the learning rate, as with Adam and its kin, or because gradients are clipped."""
        names = "betas", "eps", "ns_steps"  # of moments, of a division by the gradient's size, of Muon
        return self._is_clipped or all(
            "sgd" not in type(part).__name__.lower() and any(name in group for name in names)
            for part in self._parts
            for group in part.param_groups
        )

    def note_clipping(self, accelerator: Accelerator) -> Callable[[], None]:
        """Watch from now on whether gradients are clipped, by Trainer or by a loop; returns a function that undoes this."""
        clip = accelerator.clip_grad_norm_

        @functools.wraps(clip)
        def clipping(parameters: Any, max_norm: float, *args: Any, **kwargs: Any) -> Any:
            if max_norm < math.inf:  # Trainer without clipping asks for the norm alone, to log it
                self._is_clipped = True
            return clip(parameters, max_norm, *args, **kwargs)

        def undo() -> None:
            accelerator.clip_grad_norm_ = clip

        accelerator.clip_grad_norm_ = clipping
        return undo

    def watch_steps(self) -> Callable[[], None]:
        """Count the optimizers' steps from now on, and refuse them if nobody calls `count`; returns a function that undoes this.

        Optimizers that are not PyTorch's have no hooks, and are not counted. A step that a gradient scaler skips is none. Of
        several optimizers one may step more often than others: all of them must have stepped twice without a call.

        A step that a CUDA graph captures is none, and its replays call no hooks.
        """
        self._is_watched = True
        parts = [part for part in self._parts if isinstance(part, torch.optim.Optimizer)]
        self._steps, depths = [0] * len(parts), [0] * len(parts)

        def begins(number: int, *_: Any) -> None:
            depths[number] += 1  # PyTorch also calls hooks for a class's step inside that of its subclass

        def ends(number: int, *_: Any) -> None:
            depths[number] -= 1
            if depths[number]:
                return
            if is_capturing():
                return
            self._steps[number] += 1
            if self._steps[number] == 2 and min(self._steps) >= 2:
                raise InputError(
                    f"{self._name} has made 2 steps without a call of `outer.step()`. {_MISSING}"
                )

        hooks = []
        for number, part in enumerate(parts):
            hooks.append(part.register_step_pre_hook(functools.partial(begins, number)))
            hooks.append(part.register_step_post_hook(functools.partial(ends, number)))

        def undo() -> None:
            for hook in hooks:
                hook.remove()

        return undo

    def count(self) -> None:
        """Note that `outer.step()` was called after the optimizers' steps."""
        self._counted, self._steps = True, [0] * len(self._steps)

    def note_weights(self, inner_step: int) -> None:
        """Remember with which weights training begins at this inner step."""
        self._began_at, self._began_with = inner_step, self.copies.values()

    def refuse_uncounted(self, inner_step: int) -> None:
        """Raise InputError if the optimizers have made steps in this run, and `count` was never called: they would be lost. One
        step after the last call is in the last round. Steps without hooks, as of a graph's replays, show in the weights.
        """
        if self._counted or not self._is_watched:
            return
        if any(self._steps):
            raise InputError(
                f"{self._name} has made {max(self._steps)} step(s), and nobody has called `outer.step()`. {_MISSING}"
            )
        if inner_step == self._began_at and not all(map(torch.equal, self._began_with, self.copies.values())):
            raise InputError(
                f"the weights that {self._name} trains have changed, and nobody has called `outer.step()`. {_MISSING} A CUDA "
                "graph that has captured the optimizer's step needs it after each replay."
            )

    def refuse_midway(self, inner_step: int) -> None:
        """Raise InputError if an optimizer has stepped since the last call of `count`: the weights are ahead of `inner_step`."""
        if any(self._steps):
            raise InputError(
                f"accelerator.save_state in the middle of inner step {inner_step + 1}: {self._name} has stepped, and nobody has "
                "called `outer.step()` since. No run could go on from there exactly. Call `outer.step()` before "
                "`accelerator.save_state`."
            )

    @property
    def has_state(self) -> bool:
        """Whether any part of it has made steps, or has loaded state."""
        return any(getattr(part, "state", None) for part in self._parts)

    def note_lr(self) -> None:
        """Remember the learning rate as it is now, for the inner step that has just been made."""
        self._noted = self._lr()

    def take_lr(self) -> float:
        """The learning rate of the inner step that has just been made: as noted, or as it is now."""
        lr = self._lr() if self._noted is None else self._noted
        if self._reads_lr and self._noted is None and self._at_start not in (None, lr):
            logger.warning(
                "the learning rate went from %g to %g before the first outer.step(): call optimizer.step(), outer.step(), "
                "scheduler.step() in this order, or outer.note_lr() before scheduler.step(). Otherwise each step counts with "
                "the learning rate of the next one.",
                *(self._at_start, lr),
            )
        self._at_start = self._noted = None
        return lr

    def warn_of_unsaved(self, accelerator: Accelerator) -> None:
        """Warn if `accelerator.save_state` leaves out the state of an optimizer: it knows those that it has prepared."""
        kept = [*accelerator._optimizers, *accelerator._custom_objects]
        kept += [each.optimizer for each in accelerator._optimizers]

        def is_kept(optimizer: Any) -> bool:
            several = optimizer if isinstance(optimizer, list | tuple) else _held(optimizer)
            return any(optimizer is each for each in kept) or (bool(several) and all(map(is_kept, several)))

        if not is_kept(self._given):
            logger.warning(
                "accelerator.save_state does not save all state of %s: a run that loads this checkpoint will not be exact. "
                "Prepare the optimizer (accelerator.prepare), or give it state_dict() and load_state_dict() and register it "
                "(accelerator.register_for_checkpointing).",
                self._name,
            )

    def warn_unless_fitting(self, method: str) -> None:
        """Warn if a method is named for an inner optimizer, and no class of this one has that word in its name."""
        word = INNER.get(method)
        if word is None:
            return
        kinds = [each.__name__.lower() for part in self._parts for each in type(part).__mro__]
        if not any(word in each for each in kinds):
            logger.warning(
                "outer.method=%s is DiLoCo with %s inside, but the inner optimizer is %s. Give it hf_cocodc.%s, or take "
                "method=diloco with the same outer settings.",
                *(method, word, self._name, word),
            )

    def begin_anew(self) -> None:
        """Forget all state: moments, counts of steps. Raises InputError if an optimizer keeps it."""
        self.times_anew += 1
        for part in self._parts:
            part.state.clear()
            if part.state:
                raise InputError(
                    f"{type(part).__name__} gives a copy of its state, which cannot be cleared (outer.on_nonfinite=restart). "
                    "Give the optimizers that it combines, as a list; or set outer.on_nonfinite=stop."
                )

    def _rates(self) -> Iterator[tuple[float | None, Any]]:
        """The learning rate of each group, None if it is no number, and the group's parameters."""
        for part in self._parts:
            for group in part.param_groups:
                rate = group.get("lr")
                is_number = isinstance(rate, Real) or (isinstance(rate, Tensor) and rate.numel() == 1)
                yield float(rate) if is_number else None, group.get("params", ())

    def _lr(self) -> float:
        """The mean learning rate of the groups, weighted by the values that they train; 0 if no group counts. Groups whose rate
        is 0, or that train nothing of the model, do not: a frozen group says nothing about the others' steps.
        """
        rates = [group.get("lr") for part in self._parts for group in part.param_groups]
        if all(type(rate) is float for rate in rates) and len(set(rates)) == 1:
            return rates[0]  # as nearly always: this is read in every inner step
        moving = [(rate, params) for rate, params in self._rates() if rate]
        if len({rate for rate, _ in moving}) > 1:
            trained = {id(param) for param in self._model.parameters() if param.requires_grad}
            sizes = [sum(p.numel() for p in params if id(p) in trained) for _, params in moving]
            weighted = [(rate, size) for (rate, _), size in zip(moving, sizes, strict=True) if size]
            if len({rate for rate, _ in weighted}) > 1:
                return math.fsum(rate * size for rate, size in weighted) / sum(size for _, size in weighted)
            moving = [(rate, ()) for rate, _ in weighted]
        return moving[0][0] if moving else 0.0  # not a mean: that of equal numbers may be rounded

    def _check_parameters(self) -> None:
        """Refuse an optimizer that trains nothing of the model; warn about parameters that it leaves out."""
        held = {id(param) for _, params in self._rates() for param in params}
        trainable = {name: param for name, param in self._model.named_parameters() if param.requires_grad}
        missing = [name for name, param in trainable.items() if id(param) not in held]
        if not missing:
            return
        if len(missing) == len(trainable):
            raise InputError(
                f"{self._name} holds none of the model's {len(trainable)} trainable parameters (the first is {missing[0]}): it "
                "would train copies, or another model. Make it from model.parameters(), and prepare model and optimizer "
                "together (accelerator.prepare)."
            )
        names = ", ".join(missing[:_NAMED]) + (", ..." if len(missing) > _NAMED else "")
        logger.warning(
            "%s does not hold %d of the model's %d trainable parameters (%s): they do not change, but take part in every "
            "transfer. Give them to the optimizer, or freeze them (requires_grad_(False)).",
            *(self._name, len(missing), len(trainable), names),
        )


def _held(optimizer: Any) -> list[Any]:
    """The optimizers that one object holds, if it holds several."""
    several = getattr(optimizer, "optimizers", None) or getattr(optimizer, "optimizer_dict", None)
    if isinstance(several, dict):
        return list(several.values())
    return list(several) if isinstance(several, list | tuple) else []


class Tokens:
    """Counts the tokens of an inner step over its micro-batches and the region's ranks. If not `counted`, tokens are no
    weights, and ranks say nothing to each other. `alike`: all ranks train on the same samples (pipeline stages).
    """

    def __init__(self, accelerator: Accelerator, counted: bool, alike: bool = False) -> None:
        self.counted = counted
        self._accelerator, self._alike = accelerator, alike
        self._noted: Any = None
        self._failure: InputError | None = None

    def note(self, tokens: Any) -> None:
        """Add the tokens of a micro-batch of this rank: a number, or a tensor of one, on any device."""
        if self.counted:
            self._noted = tokens if self._noted is None else self._noted + tokens

    def fail(self, error: InputError) -> None:
        """Note that a micro-batch has no tokens that can be counted: `take` raises `error` in all ranks. A single rank need not
        wait for it.
        """
        if self._is_alone:
            raise error
        self._failure = self._failure or error

    def take(self) -> int | None:
        """The region's tokens since the last call, by a collective call of its ranks; None if they are not counted. Raises
        InputError, the same in all ranks, if one of them has noted none, or no whole number from 0.
        """
        if not self.counted:
            return None
        noted, failure, number = self._noted, self._failure, 0
        self._noted = self._failure = None
        try:
            number = _whole(noted)
        except InputError as error:
            failure = failure or error
        if not self._is_alone:
            return self._sum(number, failure)
        if failure is not None:
            raise failure
        return number

    @property
    def _is_alone(self) -> bool:
        return self._alike or self._accelerator.num_processes == 1

    def _sum(self, number: int, failure: InputError | None) -> int:
        """The sum over all ranks, if none of them has failed: a leader that fails alone would keep the others waiting."""
        own = torch.tensor(
            [[failure is not None, number]], dtype=torch.int64, device=self._accelerator.device
        )
        rows = self._accelerator.gather(own).tolist()
        failed = [rank for rank, (has_failed, _) in enumerate(rows) if has_failed]
        if failed:
            message = ranks_of_region().say(failed[0], str(failure), "the tokens of an inner step")
            raise InputError(message) from failure
        return sum(number for _, number in rows)


def _whole(tokens: Any) -> int:
    """The number of tokens. Raises InputError if nobody has noted any, or if it is no whole number from 0."""
    if tokens is None:
        raise unknown_tokens()
    try:
        number = float(tokens)
    except (TypeError, ValueError):
        number = math.nan
    if number < 0 or not number.is_integer():
        raise InputError(
            f"outer.step(tokens={shown(tokens)}): the tokens of an inner step must be a whole number from 0."
        )
    return int(number)
