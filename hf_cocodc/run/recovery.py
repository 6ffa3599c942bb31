"""What a region does when it has not counted for several rounds, and what all do when no mean can be believed.

A step that is not finite, or far too large, stays: AdamW keeps it in its moments. Global params at every landing do not help,
and the region would not count in any later round.
"""

import logging
from collections.abc import Sequence

from ..engine.saving import begin_anew
from ..engine.synchronizer import Synchronizer
from ..errors import RunStopped
from ..links.trailer import Ending
from ..parts.guard import lower_median
from ..settings import OuterConfig
from .endings import Endings
from .inner_optimizer import InnerOptimizer
from .journal import Journal

logger = logging.getLogger(__name__)

_OFTEN = 3
"""Fresh starts of a region after which another one will not help."""


def recover(
    synchronizer: Synchronizer,
    inner: InnerOptimizer,
    config: OuterConfig,
    endings: Endings,
    journal: Journal,
    has_stages: bool = False,
) -> None:
    """Do what `outer.on_nonfinite` says, if this region did not count in the last `outer.nonfinite_rounds` rounds of a fragment.

    All regions stop if in so many rounds in a row the mean was void, or the losses were far above the ordinary ones.

    All ranks of a region decide alike: the engine's rounds count in all of them, or in none. Pipeline stages have an engine each,
    and begin anew one by one; they are refused with "stop".

    Raises:
        RunStopped: pipeline stages would have to stop, and cannot do so at one step.
    """
    region, rounds = synchronizer.link.region, max(each.nonfinite_rounds for each in synchronizer.fragments)
    if hopeless := _hopeless(synchronizer, config):
        if endings.verdict is None:
            journal.write("note", step=synchronizer.inner_step, message=hopeless)
            if has_stages:
                raise RunStopped(hopeless)
            if config.on_nonfinite == "restart" and any(each.voids for each in synchronizer.fragments):
                begin_anew(synchronizer.fragments)
                inner.begin_anew()
            for each in synchronizer.fragments:  # a run that resumes here has as many rounds again
                each.voids = each.far_losses = 0
            endings.stop(hopeless)
        return
    if rounds < config.nonfinite_rounds or endings.word.ending is not Ending.NO:
        return
    said = f"region {region} did not count in {rounds} rounds in a row (not finite, or clipped or dropped by outer.guard)"
    if config.on_nonfinite == "stop":
        endings.ask_to_stop(
            f"{said}; go back to an earlier checkpoint with a lower learning rate, or set outer.on_nonfinite=restart"
        )
        return
    logger.warning(
        "%s: after step %d it takes the global params, and a fresh state of its inner optimizer (outer.on_nonfinite=restart). "
        "Look at its loss; a lower learning rate or gradient clipping (max_grad_norm) helps.",
        *(said, synchronizer.inner_step),
    )
    begin_anew(synchronizer.fragments)
    inner.begin_anew()
    if inner.times_anew >= _OFTEN:
        logger.warning(
            "region %d has begun anew %d times: another time will not help. Compare its learning rate and data with those of "
            "the other regions, then start it again.",
            *(region, inner.times_anew),
        )
    journal.write("begin_anew", step=synchronizer.inner_step, rounds=rounds, times=inner.times_anew)


def _hopeless(synchronizer: Synchronizer, config: OuterConfig) -> str:
    """Why training must not go on, in words; empty if it may. Equal in all regions."""
    most = config.nonfinite_rounds
    for each in synchronizer.fragments:
        if each.voids >= most:
            return (
                f"the means of {each.voids} rounds in a row were void (fragment {each.fragment.index}), because half of the "
                f"regions or more have broken{_named(each.far_regions)}. The global params are as before these rounds. Look at "
                "the losses and learning rates of all regions; if their norms in the log are as they should be, raise the "
                "limits of outer.guard"
            )
        if each.far_losses >= most:
            return (
                f"the training losses of the regions were far above what they had been, in {each.far_losses} rounds in a row: "
                f"the model is ruined, or has other data. Their median was {lower_median(each.losses):.3g} before. Go back to an "
                "earlier checkpoint with a lower learning rate; outer.guard=none trains on whatever the losses"
            )
    return ""


def _named(regions: Sequence[int]) -> str:
    """Who is far out of the ordinary. Of two regions that may be the one that is right."""
    return (
        f" (far out of the ordinary: {', '.join(f'region {region}' for region in regions)})"
        if regions
        else ""
    )
