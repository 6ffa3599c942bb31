"""Regions of a simulated run that are lost and come back (`VirtualLink.away`): what `elastic` does where there are processes."""

import contextlib
from collections.abc import Callable

from ..errors import InputError, LeftBehind
from ..link.lockstep import Absence, LockstepLink
from ..link.records import Words
from ..settings import RegionConfig
from .training import Training


class Absences:
    """One region's part in it. Its methods are those of `Elastic`.

    A region that is lost gives up what it has trained since its last sends that landed. It makes the inner steps of the others
    without training, as one that comes in with a base and the log does, and keeps its inner optimizer's state.

    Raises InputError if the run would end with a lost region, or regions have global params of their own.
    """

    def __init__(self, training: Training, link: LockstepLink, regions: RegionConfig) -> None:
        if not regions.elastic:
            raise InputError(
                "regions are away in this simulation (VirtualLink.away, --away), but by their settings the run ends when one is "
                "lost. Set regions.min."
            )
        if not training.engine.method.outer.regions_agree:
            raise InputError(
                f"{training.settings['method']} with regions that are away is not simulated: each region has global params of "
                "its own, and one that comes back takes those of another. Use another method, or real regions."
            )
        self._least = regions.least_of(link.num_regions)
        self._training, self._link = training, link
        self._members = link.members
        self._losses = self._epoch = 0
        self._missed: set[Absence] = set()

    def begin(self, is_new: bool) -> None:
        self._note_members("")

    def guard(self, step: Callable[[], Words | None]) -> None:
        """Make an inner step; if this region is lost after it, make those of the others until it is back."""
        self._hear(step())
        now = self._link.region, self._training.inner_step
        for absence in self._link.absences:
            if absence[:2] == now and not self._training.is_at_the_end:
                self._stay_away(absence)

    def come_back(self, error: LeftBehind, held_s: float = 0.0) -> None:
        """Never needed: regions take turns, and none goes on without another."""
        raise error

    def spare(self, what: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def close(self) -> None:
        pass

    def _stay_away(self, absence: Absence) -> None:
        training, before = self._training, self._training.inner_step
        training.journal.write("away", step=before, held_s=0.0, why=f"region {absence.region} is lost")
        self._link.stay_away(True)
        training.engine.take_over(training.engine.totals)
        words: Words | None = None
        while training.inner_step < absence.until or words is None:
            if training.is_at_the_end:  # it ends with the others
                break
            training.loop.stand_in()
            words = training.step(trained=False)
            self._hear(words)
        else:
            self._refuse_again(absence)
            self._link.stay_away(False)
            training.journal.write("join", step=training.inner_step, epoch=self._epoch, region=absence.region)
        if not training.is_at_the_end:
            training.loop.stand_in()
        training.loop.jump(before, training.inner_step, False)

    def _refuse_again(self, absence: Absence) -> None:
        """Raise InputError if this region, which takes part again from here on, were to be lost before."""
        step = self._training.inner_step
        for other in self._link.absences:
            if other.region == absence.region and absence.since < other.since <= step:
                raise InputError(
                    f"{other}: region {other.region} takes part again only from the landing at step {step} on, after it was lost "
                    f"at step {absence.since}. Let it be lost again later."
                )

    def _hear(self, words: Words | None) -> None:
        """Learn from a landing who takes part from the next inner step on: those that took part, and those that come in then."""
        if words is None:
            return
        step, there = self._training.inner_step, set(words)
        last = {each.region: each for each in sorted(self._link.absences) if each.since < step}
        back = {region for region, each in last.items() if each.until <= step}
        # a transfer that was sent before a region came in lacks it, too: a loss counts once
        missed = {each for region, each in last.items() if region not in there} - self._missed
        self._missed |= missed
        self._change(set(self._members) - {each.region for each in missed})
        self._change(there | back)

    def _change(self, there: set[int]) -> None:
        lost = [region for region in self._members if region not in there]
        came = sorted(there.difference(self._members))
        if not lost and not came:
            return
        self._members = tuple(sorted(there))
        self._losses, self._epoch = self._losses + len(lost), self._epoch + len(lost) + len(came)
        if len(there) < self._least:
            raise InputError(
                f"only {len(there)} of at least {self._least} regions (regions.min) take part at step "
                f"{self._training.inner_step}: a real run waits there for others, and a simulation does not. Lower "
                "regions.min, or let fewer regions be away at once."
            )
        why = [f"region {region} is lost (simulated)" for region in lost]
        self._note_members(", ".join(why + [f"region {region} has come in" for region in came]))

    def _note_members(self, why: str) -> None:
        self._training.journal.write(
            "epoch",
            step=self._training.inner_step,
            epoch=self._epoch,
            losses=self._losses,
            members=list(self._members),
            why=why,
        )
