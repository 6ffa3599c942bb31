"""What a region does when it has not counted for several rounds: it was not finite, or the norm guard has dropped it.

A step that is not finite, or far too large, stays: AdamW keeps it in its moments. Global params at every landing do not help,
and the region would not count in any later round.
"""

import logging

from ..engine.saving import begin_anew
from ..engine.synchronizer import Synchronizer
from ..links.trailer import Ending
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
) -> None:
    """Do what `outer.on_nonfinite` says, if this region did not count in the last `outer.nonfinite_rounds` rounds of a fragment.

    All ranks of a region decide alike: the engine's rounds count in all of them, or in none. Pipeline stages have an engine each,
    and begin anew one by one; they are refused with "stop".
    """
    region, rounds = synchronizer.link.region, max(each.nonfinite_rounds for each in synchronizer.fragments)
    if rounds < config.nonfinite_rounds or endings.word.ending is not Ending.NO:
        return
    said = (
        f"region {region} did not count in {rounds} rounds in a row (not finite, or dropped by outer.guard)"
    )
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
