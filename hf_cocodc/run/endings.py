"""How a run ends early: what all regions do when one of them ends."""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from ..link.base import Link
from ..link.ranks import SharedLink
from ..link.records import Ending, Word, Words

logger = logging.getLogger(__name__)

_NOTE_S = 2.0
"""Seconds to wait for the note of a region that was interrupted."""
_WORDS = {
    Ending.DONE: "has completed its training",
    Ending.INTERRUPTED: "was interrupted",
    Ending.LEAVING: "leaves",
}


def verdict(endings: Collection[Ending], policy: str) -> str | None:
    """What all regions do, after the endings of one transfer: "finish", "stop" (with a checkpoint), or None, to train on.

    >>> verdict([Ending.NO, Ending.DONE], "auto"), verdict([Ending.NO, Ending.INTERRUPTED], "auto")
    ('finish', 'stop')
    >>> verdict([Ending.LEAVING, Ending.NO], "continue"), verdict([Ending.LEAVING, Ending.LEAVING], "continue")
    (None, 'stop')
    """
    nobody_stays = all(ending is Ending.LEAVING for ending in endings)
    if Ending.INTERRUPTED in endings or nobody_stays:
        return "finish" if policy == "finish" else "stop"
    if Ending.DONE not in endings or (policy == "continue" and Ending.NO in endings):
        return None
    return "stop" if policy == "stop" else "finish"


def reasons(endings: Mapping[int, Ending], note_of: Callable[[int], str | None]) -> str:
    """Which regions ended, and why, in words; `note_of` returns the note that a region left, if any."""
    sentences = []
    for region, ending in endings.items():
        if ending is not Ending.NO:
            note = note_of(region)
            sentences.append(f"region {region} {_WORDS[ending]}" + (f" ({note})" if note else ""))
    return "; ".join(sentences)


def announcement(verdict: str, why: str, step: int, policy: str) -> str:
    """The sentence that tells of a verdict."""
    do = "finish" if verdict == "finish" else "stop, to be resumed from a checkpoint,"
    return f"{why}: all regions {do} here, at step {step} (regions.when_one_ends={policy})."


def farewell(
    step: int, why: str, saved_at: int, saved_everywhere: int, savers: Sequence[int] | None = None
) -> str:
    """What a region says when all regions have stopped at `step`: what it has saved there, what all have, and how to go on.
    `savers`: the regions that are known to have saved that; None if these are all regions of the run.

    >>> print(farewell(7, "region 1 was interrupted", 7, 5)[57:163])
    This region has saved checkpoint-7 in its folder. All regions have checkpoint-5 (of later ones it does not
    >>> print(farewell(7, "region 1 was interrupted", 7, 7, [0, 2])[107:141])
    Regions 0 and 2 have checkpoint-7.
    """
    saved = "has" if saved_at == step else "has not"
    common = "It does not know whether all regions have a checkpoint."
    if saved_everywhere:
        common = f"{_have(savers)} checkpoint-{saved_everywhere}"
        common += "." if saved_everywhere == step else " (of later ones it does not know)."
    return (
        f"all regions stopped at step {step}: {why}. This region {saved} saved checkpoint-{step} in its folder. {common} "
        "Continue with trainer.train(resume_from_checkpoint=True) or hf-cocodc train RECIPE --resume: all go on from one step."
    )


def _have(savers: Sequence[int] | None) -> str:
    if savers is None:
        return "All regions have"
    *first, last = map(str, savers)
    return f"Regions {', '.join(first)} and {last} have" if first else f"Region {last} has"


def loss_in_words(step: int, why: str, has_saved: bool) -> str:
    """What a region says at the end of a run that a lost region has ended at `step`."""
    saved = (
        f"This region has saved checkpoint-{step}, and so do the others that are left; a lost region takes it over from them."
        if has_saved
        else "This region has saved no checkpoint of this step, so what it has trained since its last one is lost."
    )
    return (
        f"{why}. The other regions have ended at step {step} (regions.on_loss=stop). {saved} Start all regions again with "
        "--resume, or trainer.train(resume_from_checkpoint=True)."
    )


class Endings:
    """What a region says about its own end, what it hears about the others', and what all regions do then.

    Attributes:
        word: what this region tells the others with its next transfers.
        verdict: "finish" or "stop" once the regions have agreed to end before `max_steps`, or "leave" for this one alone; `why`
            has the reason in words.
        is_hopeless: whether the verdict is to stop because training cannot go on as it is (`stop`).
        lost: the region whose loss ends the run; None before.
        saved_everywhere: step of the newest checkpoint that is known to be complete in every region that took part then, which
            are the `savers`; 0 if there is none.
        leaves: why this region alone is to leave; empty if it is not.
    """

    def __init__(self, link: Link, policy: str, max_steps: int | None) -> None:
        self.word = Word()
        self.verdict: str | None = None
        self.is_hopeless = False
        self.lost: int | None = None
        self.why = ""
        self.saved_everywhere, self.savers = 0, tuple(link.members)
        self.leaves = ""
        self._link, self._policy, self._max_steps = link, policy, max_steps

    def tell(self, **news: Any) -> None:
        """Change the word: loss, ending or saved_at."""
        self.word = self.word._replace(**news)

    def ask_to_stop(self, reason: str) -> None:
        """Ask all regions to stop, at a step that they agree on through the coordinator, or else when a transfer tells them.
        Where regions go on without each other and `regions.when_one_ends` is "continue", only this one leaves.
        """
        agreement = self._link.agreement
        if agreement is not None:  # the other ranks of this region hear of it, too
            agreement.ask(reason)
        if self._link.is_elastic and self._policy == "continue":
            self.leaves = self.leaves or reason
            return
        if agreement is not None and agreement.decides and self._link.most_regions == 1:
            return  # its ranks must not end one by one
        if self.word.ending is not Ending.INTERRUPTED:
            self.tell(ending=Ending.INTERRUPTED)
            self._link.leave_note(reason)

    def before_step(self) -> None:
        """Pass on what another rank of this region has asked for."""
        if self._link.agreement is not None and self._link.agreement.asked:
            self.ask_to_stop(self._link.agreement.asked)

    def after_step(self, inner_step: int, words: Words | None) -> None:
        """Act on the words of all regions, from a transfer that has just landed, and on what was agreed through the coordinator.

        A single region needs no transfer; unless its ranks hear of each other's words in no other way.
        """
        agreement = self._link.agreement
        is_alone = agreement is not None and agreement.decides and self._link.most_regions == 1
        if self._link.num_regions == 1 and (is_alone or not isinstance(self._link, SharedLink)):
            words = {self._link.region: self.word}
        if words is not None:
            self.note_saved_everywhere(words)
            self.hear({region: word.ending for region, word in words.items()}, inner_step)
        if agreement is None or self.verdict is not None or inner_step == self._max_steps:
            return
        agreement.is_done = self.word.ending is Ending.DONE
        passes = agreement.passes(inner_step)
        if agreement.is_done and self.word.ending is Ending.NO:
            self.tell(ending=Ending.DONE)
        if not passes:
            reasons = {region: agreement.reasons.get(region, "") for region in self._link.members}
            endings = {r: Ending.INTERRUPTED if reason else Ending.NO for r, reason in reasons.items()}
            self._end(endings, reasons.__getitem__, inner_step)

    def hear(self, endings: Mapping[int, Ending], inner_step: int) -> None:
        """Act on what all regions have said about their ends at one moment."""
        self._end(endings, lambda region: self._note_of(region, endings[region]), inner_step)

    def note_saved_everywhere(self, words: Words | None) -> None:
        """Learn from the words of all regions which checkpoint is complete everywhere."""
        words = words or {}
        steps = {word.saved_at for word in words.values()}
        if len(steps) == 1:
            [step] = steps
            # a region that is away now need not have it when it is back
            known = self.savers if step == self.saved_everywhere else ()
            self.saved_everywhere, self.savers = step, tuple(sorted({*known, *words}))

    def continue_from(self, inner_step: int, is_base: bool = False) -> None:
        """Begin at a loaded checkpoint of `inner_step`: it is complete in every region, and none of them is about to end. Another
        region's base (`is_base`) is no checkpoint of this one.
        """
        if self._link.agreement is not None:
            self._link.agreement.forget(inner_step)
        self.verdict, self.why, self.is_hopeless, self.lost = None, "", False, None
        saved_at = 0 if is_base else inner_step
        self.saved_everywhere, self.savers = saved_at, tuple(self._link.members)
        self.tell(ending=Ending.NO, saved_at=saved_at)

    def stop(self, why: str) -> None:
        """Stop here with a checkpoint. Every region comes to this by itself at the same step, whatever the policy says."""
        self.verdict, self.why, self.is_hopeless = "stop", why, True
        logger.error("%s: all regions stop here.", why)

    def lose(self, region: int, why: str) -> None:
        """Stop here with a checkpoint, because a region is lost and that ends the run. All others do, at the same step."""
        self.verdict, self.why, self.lost = "stop", why, region
        logger.error("%s: all other regions stop here (regions.on_loss=stop).", why)

    def end(self, verdict: str, why: str) -> None:
        """End here: with a verdict of all regions, or to "leave" alone."""
        self.verdict, self.why = verdict, why
        logger.warning("%s: region %d ends here.", why, self._link.region)

    def _note_of(self, region: int, ending: Ending) -> str | None:
        """The note of a region that ends. One that was interrupted has left a note, but a transfer may be faster."""
        return self._link.note_of(region, _NOTE_S if ending is Ending.INTERRUPTED else 0.0)

    def _end(
        self, endings: Mapping[int, Ending], note_of: Callable[[int], str | None], inner_step: int
    ) -> None:
        """Find the verdict, and announce it."""
        if self.verdict is not None:
            return
        self.verdict = verdict(endings.values(), self._policy)
        if self.verdict is None:
            return
        if inner_step == self._max_steps:
            self.verdict = "finish"  # nothing is left to stop
        self.why = reasons(endings, note_of)
        logger.warning(announcement(self.verdict, self.why, inner_step, self._policy))
