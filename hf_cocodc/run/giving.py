"""A region gives the newest global model to whoever pulls it (`hf-cocodc pull`).

The training thread saves the model as in a checkpoint, between two inner steps: for all that wait for it then. Other threads
send it. A region spends little of its time on this (`PART`), however many pull, and however often.
"""

import itertools
import logging
import shutil
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Protocol

from torch import nn

from ..coordinator.caller import CoordinatorConnection
from ..coordinator.messages import Give, Given, Refuse
from ..errors import CocodcError, LinkError, reason
from ..link.group import main_says
from ..snapshot.files import files_in
from ..snapshot.given import send
from ..threads import side_by_side
from .session import RegionSession, session_of
from .training import Training

logger = logging.getLogger(__name__)

FOLDER = "pulled"
PART = 0.05
"""Of a region's time, for which it saves models that are pulled."""
SHARE = 4
"""What is sent has this part of the rate limit, as a base has."""
_SLOWEST_DISK = 100e6
"""Bytes per second."""
_TAKEN_S, _END_S = 10.0, 2.0


class _Shown(Protocol):
    def __call__(self, everywhere: bool = True) -> AbstractContextManager[None]: ...


class Giving:
    """One rank's part in it. The constructor is a collective call of the region's ranks.

    Args:
        shown: `OuterOptimizer.own_global_weights`.
        home: folder for what is sent, until it is sent; a temporary one by default.
        place: where the model will lie at the end, for people.
    """

    def __init__(self, training: Training, shown: _Shown, home: Path | None, place: str) -> None:
        self._training, self._shown, self._home, self._place = training, shown, home, place
        self._is_temporary = home is None
        self._landings = training.engine.totals.landings
        self._may_at = 0.0
        self._numbers = itertools.count(1)
        self._answered: set[str] = set()
        self._ended = threading.Event()
        self._threads: list[threading.Thread] = []
        self._is_online = training.session is not None
        if not training.has_stages:
            link = training.link
            self._is_online = main_says(
                link, training.accelerator, lambda: session_of(link) is not None, "whether others can pull"
            )

    def after_step(self) -> None:
        """Call after the events of an inner step. A collective call of the region's ranks."""
        training, session = self._training, self._training.session
        if not self._is_online:
            return
        if training.has_stages:
            if session is not None and session.pulls:
                names = [name for name in session.pulls if name not in self._answered]
                why = "a region with pipeline stages has no rank that holds the whole model. Take it from a checkpoint."
                self._refuse(session, names, why)
            return
        if training.accelerator.num_processes > 1:  # its ranks speak with each other at landings only
            landings = training.engine.totals.landings
            if landings == self._landings:
                return
            self._landings = landings
        elif session is None or not session.pulls:
            return
        names, folder = training.say(self._next, "who pulls the model")
        if names:
            self._give(names, Path(folder))

    def close(self) -> None:
        """Send nothing more. Call before the link is closed."""
        self._ended.set()
        for thread in self._threads:
            thread.join(_END_S)
        if self._is_temporary and self._home is not None:
            shutil.rmtree(self._home, ignore_errors=True)

    def _next(self, session: RegionSession) -> tuple[list[str], str]:
        """Whoever is given the model now, and the folder into which it is saved first."""
        pulls, now = session.pulls, time.monotonic()
        self._answered.intersection_update(pulls)
        names = [name for name in pulls if name not in self._answered]
        if not names or now < self._may_at:
            return [], ""
        save_s, grace_s = bytes_of(self._training.model) / _SLOWEST_DISK, session.context.terms.grace_s
        if grace_s is not None and save_s > grace_s:
            why = (
                f"to save it may take {save_s:.0f} s, and the others go on without a region that is late for {grace_s:g} s "
                "(regions.grace_s). Take it from a checkpoint, for which all pause."
            )
            self._refuse(session, names, why)
            return [], ""
        number, region = next(self._numbers), session.context.region
        if self._home is None:
            self._home = Path(tempfile.mkdtemp(prefix="hf_cocodc-"))
        if number == 1:
            for old in self._home.glob(f"{FOLDER}-{region}-*"):  # of a process that was killed
                shutil.rmtree(old, ignore_errors=True)
        self._answered.update(names)
        return names, str(self._home / f"{FOLDER}-{region}-{number}")

    def _give(self, names: Sequence[str], folder: Path) -> None:
        training, began, why = self._training, time.monotonic(), ""
        spent = training.timer()
        with self._shown(everywhere=False):  # an error at its end would leave other weights to train on
            try:
                training.loop.save_model(folder, training.model)
            except Exception as error:  # no reason to end the run
                is_ours = isinstance(error, CocodcError)
                why = str(error) if is_ours else f"{type(error).__name__}: {reason(error)}"
                logger.warning("somebody pulls the model, and it cannot be saved: %s", why)
        training.journal.write("pull", step=training.inner_step, **spent())
        session = training.session
        if session is None:
            return
        took_s = time.monotonic() - began
        self._may_at = time.monotonic() + took_s * (1 / PART - 1)
        answer: Given | Refuse
        if why:
            answer = Refuse(
                error="InputError", why=f"region {training.link.region} cannot give its model: {why}"
            )
        else:
            answer = Given(
                run=session.context.name,
                region=training.link.region,
                step=training.inner_step,
                landings=training.engine.totals.landings,
                fragments=len(training.engine.facts),
                regions=tuple(training.link.members),
                place=self._place,
                files={name: path.stat().st_size for name, path in files_in(folder).items()},
            )
        logger.info(
            "region %d gives its model of step %d to %d",
            training.link.region,
            training.inner_step,
            len(names),
        )
        self._start(session, names, folder, answer)

    def _refuse(self, session: RegionSession, names: Sequence[str], why: str) -> None:
        self._answered.update(names)
        if names:
            refusal = Refuse(error="InputError", why=f"the model cannot be pulled: {why}")
            self._start(session, names, None, refusal)

    def _start(
        self, session: RegionSession, names: Sequence[str], folder: Path | None, answer: Given | Refuse
    ) -> None:
        self._threads = [each for each in self._threads if each.is_alive()]
        thread = threading.Thread(
            target=self._answer_all,
            args=(session, names, folder, answer),
            name="hf_cocodc-giving",
            daemon=True,
        )
        self._threads.append(thread)
        thread.start()

    # -- in threads

    def _answer_all(
        self, session: RegionSession, names: Sequence[str], folder: Path | None, answer: Given | Refuse
    ) -> None:
        side_by_side([partial(self._answer, session, name, folder, answer) for name in names], len(names))
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)

    def _answer(self, session: RegionSession, name: str, folder: Path | None, answer: Given | Refuse) -> None:
        context = session.context
        assert context.regions.coordinator is not None
        try:
            connection = CoordinatorConnection(
                context.regions.coordinator, context.name, "command", context.keys, look=self._look
            )
            try:
                connection.send(Give(pull=name))
                if isinstance(answer, Given) and folder is not None:
                    rate = None if context.rate is None else context.rate / SHARE
                    send(connection, answer, files_in(folder), rate, self._look)
                else:
                    connection.send(answer)
                    connection.wait_for_end(_TAKEN_S, self._look)
            finally:
                connection.drop()
        except (CocodcError, OSError) as error:
            if not self._ended.is_set():
                logger.info("what somebody pulls has not come to its end: %s", error)
            self._answered.discard(name)  # whoever still waits for it is given it again

    def _look(self) -> None:
        if self._ended.is_set():
            raise LinkError("training ends here.")


def bytes_of(model: nn.Module) -> int:
    """Bytes of what is saved of an unwrapped model: of one with adapters, what is trained."""
    has_adapters = bool(getattr(model, "peft_config", None))
    params = (param for param in model.parameters() if param.requires_grad or not has_adapters)
    return sum(param.numel() * param.element_size() for param in params)
