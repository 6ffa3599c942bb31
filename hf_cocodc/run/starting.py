"""What regions settle before step 1 of training."""

from ..errors import HandshakeError
from ..links.base import Link
from ..links.trailer import Trailer


def agree_on_start(link: Link, max_steps: int, run: int) -> tuple[int, int]:
    """The smallest `max_steps` of all regions, and region 0's number for the run. A collective call.

    Shards of unequal length give epochs of unequal length.
    """
    trailers = link.gather(Trailer(inner_step=max_steps, digest=run), "the number of inner steps")
    return int(min(trailer.inner_step for trailer in trailers)), int(trailers[0].digest)


def check_same_interval(link: Link, interval: int, verb: str, setting: str) -> None:
    """What all regions have to do at the same inner steps comes equally often in each; 0: not in this region.

    Raises:
        HandshakeError: it does not.
    """
    trailers = link.gather(Trailer(inner_step=interval), f"how often a region {verb}")
    found = {region: int(trailer.inner_step) for region, trailer in enumerate(trailers) if trailer.inner_step}
    for region, steps in found.items():
        first = min(found)
        if steps != found[first]:
            raise HandshakeError(
                f"region {first} {verb} every {found[first]} inner steps, region {region} every {steps}, but they have to do it "
                f"together. Where that is the length of an epoch their shards differ: set {setting}_strategy=steps and "
                f"{setting}_steps={min(found.values())} in every region."
            )
