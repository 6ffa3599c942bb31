"""What a region does when it has not been finite for several rounds.

A step that is not finite stays: AdamW keeps it in its moments. Global params at every landing do not help, and the region
would sit out every later round.
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


def recover(
    synchronizer: Synchronizer,
    inner: InnerOptimizer,
    config: OuterConfig,
    endings: Endings,
    journal: Journal,
) -> None:
    """Do what `outer.on_nonfinite` says, if the last `outer.nonfinite_rounds` rounds of a fragment were not finite.

    All ranks of a region decide alike: the engine's rounds are not finite in all of them, or in none.
    """
    region, rounds = synchronizer.link.region, max(each.nonfinite_rounds for each in synchronizer.fragments)
    if rounds < config.nonfinite_rounds or endings.word.ending is not Ending.NO:
        return
    said = f"region {region} was not finite in {rounds} rounds in a row"
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
    journal.write("begin_anew", step=synchronizer.inner_step, rounds=rounds)
