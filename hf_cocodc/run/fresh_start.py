"""What a region does when it has not counted for several rounds, and what all do when no mean can be believed.

A step that is not finite, or far too large, stays in AdamW's moments. Global params at every landing do not help, and the
region would not count in any later round.
"""

import logging
from collections.abc import Sequence

from ..engine.replicas import Engine
from ..errors import CocodcError
from ..link.records import Ending
from ..settings import OuterConfig
from .endings import Endings
from .inner_optimizer import InnerOptimizer
from .journal import Journal

logger = logging.getLogger(__name__)

_OFTEN = 3
"""After so many fresh starts of a region, another one will not help."""


def recover(
    synchronizer: Engine,
    inner: InnerOptimizer,
    config: OuterConfig,
    endings: Endings,
    journal: Journal,
    has_landed: bool,
    has_stages: bool,
) -> None:
    """Do what `outer.on_nonfinite` says, if this region did not count in the last `outer.nonfinite_rounds` rounds of a
    fragment. All regions stop if in so many rounds in a row the mean was void, or the losses were far above the ordinary ones.

    All ranks of a region decide alike: they know the same facts, and ask the leader whether the region is about to end.
    Pipeline stages (`has_stages`) have an engine each, and begin anew one by one; they are refused with "stop". Only if a
    transfer `has_landed` in this step can what all regions know have changed.

    Raises:
        CocodcError: pipeline stages would have to stop, and cannot do so at one step.
    """
    region, rounds = synchronizer.link.region, max(each.nonfinite_rounds for each in synchronizer.facts)
    most = config.nonfinite_rounds
    if has_landed and endings.verdict is None and (why := _why(synchronizer, most, most)):
        journal.write("note", step=synchronizer.inner_step, message=why)
        if has_stages:
            raise CocodcError(f"{why}. A stage cannot stop with a checkpoint: go back to the last one.")
        if config.on_nonfinite == "restart" and any(each.voids >= most for each in synchronizer.facts):
            synchronizer.begin_anew()
            inner.begin_anew()
        synchronizer.forgive(most)
        endings.stop(why)
        return
    if rounds < config.nonfinite_rounds or not synchronizer.as_leader(endings.word.ending is Ending.NO):
        return
    sentence = f"region {region} did not count in {rounds} rounds in a row (not finite, or clipped or dropped by outer.guard)"
    if config.on_nonfinite == "stop":
        endings.ask_to_stop(
            f"{sentence}; go back to an earlier checkpoint with a lower learning rate, or set outer.on_nonfinite=restart"
        )
        return
    logger.warning(
        "%s: after step %d it takes the global params, and a fresh state of its inner optimizer (outer.on_nonfinite=restart). "
        "Look at its loss; a lower learning rate or gradient clipping (max_grad_norm) helps.",
        *(sentence, synchronizer.inner_step),
    )
    synchronizer.begin_anew()
    inner.begin_anew()
    if inner.times_anew >= _OFTEN:
        logger.warning(
            "region %d has begun anew %d times: another time will not help. Compare its learning rate and data with those of "
            "the other regions, then start it again.",
            *(region, inner.times_anew),
        )
    journal.write("begin_anew", step=synchronizer.inner_step, rounds=rounds, times=inner.times_anew)


def ruined_at_the_end(synchronizer: Engine, config: OuterConfig) -> str:
    """Why a run must not end as if it were well, in words; empty if it may. No later landing can say more than the last one."""
    return _why(synchronizer, config.nonfinite_rounds, 1)


def _why(synchronizer: Engine, most_voids: int, most_losses: int) -> str:
    """Why training must not go on, in words; empty if it may. Equal in all regions."""
    for index, each in enumerate(synchronizer.facts):
        if each.voids >= most_voids:
            return (
                f"the means of {each.voids} rounds in a row were void (fragment {index}), because "
                f"{_reason(each.far_regions)}. The global params are as before these rounds. Look at the losses and learning "
                "rates of all regions; if their norms in the log are as they should be, raise the limits of outer.guard"
            )
        if each.far_losses >= most_losses:
            return (
                f"the training losses of the regions were far above what they had been, in {each.far_losses} rounds in a row: "
                f"the model is ruined, or has other data. Their median was {each.ordinary_loss:.3g} before. Go back to an "
                "earlier checkpoint with a lower learning rate; outer.guard=none trains on whatever the losses"
            )
    return ""


def _reason(far_regions: Sequence[int]) -> str:
    """Why means were void. Of two regions, the one whose norms are far beyond the other's may be right."""
    if not far_regions:
        return "they were not finite or far too large, or no region had a finite outer gradient"
    names = ", ".join(f"region {region}" for region in far_regions)
    return f"half of the regions or more have broken (norms far beyond the others': {names})"
