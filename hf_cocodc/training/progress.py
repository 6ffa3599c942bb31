"""Tells the command that started a region how far the region's training has come."""

import os
import threading
import time
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..status import ENV_STATUS, tell
from ..trainer.callback import CoCoDCCallback

TELL_S = 1.0


class Progress(TrainerCallback):
    """Tells once a second, from its own thread: also while training waits. Rates count from the start in this process."""

    def __init__(self, callback: CoCoDCCallback, tokens_per_step: int) -> None:
        self._callback, self._tokens_per_step = callback, tokens_per_step
        self._doing = "training"
        self._began_at = self._stepped_at = self._blocked_before = 0.0
        self._first_step = 0
        self._max_steps = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._tell_regularly, name="hf_cocodc-progress", daemon=True)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if ENV_STATUS not in os.environ or not state.is_local_process_zero:
            return
        assert self._callback.outer is not None
        self._first_step, self._max_steps = state.global_step, state.max_steps
        self._blocked_before = self._callback.outer.synchronizer.totals.blocked_s
        self._began_at = self._stepped_at = time.time()
        self._thread.start()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        is_first = self._stepped_at == self._began_at
        self._stepped_at = time.time()
        if is_first and self._thread.ident is not None:
            self._tell(self._doing)

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._doing = "evaluating"

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._doing = "training"

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join()
            self._tell("saving the model")

    def _tell_regularly(self) -> None:
        while not self._ended.wait(TELL_S):
            self._tell(self._doing)

    def _tell(self, doing: str) -> None:
        outer = self._callback.outer
        assert outer is not None
        tell(
            doing,
            step=outer.inner_step,
            max_steps=self._max_steps,
            steps_made=outer.inner_step - self._first_step,
            tokens_per_step=self._tokens_per_step,
            trained_s=time.time() - self._began_at,
            blocked_s=outer.synchronizer.totals.blocked_s - self._blocked_before,
            stepped_at=self._stepped_at,
            awaits=outer.link.awaits,
        )
