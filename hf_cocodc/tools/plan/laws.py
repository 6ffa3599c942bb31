"""What is known of the loss that low communication costs: fits and tables from papers, each with its source. Else nothing."""

DILOCO_EXPONENT = 0.0116
"""Of M in the joint fit of the loss, 19.226 N^-0.0985 M^0.0116 (2503.09799): DiLoCo with H = 30, N from 35M to 2.4B."""
MOST_REGIONS = 8
ADVISED_OVERLAP, TRIED_OVERLAP = 5, 10
"""Inner steps of overlap of Streaming DiLoCo: those that the paper advises, and those that cost less than 0.2 % (2501.18512)."""


def cost(
    method: str, num_regions: int, overlap_steps: int, sync_interval: int, recipes_interval: int
) -> list[str]:
    """Sentences about the loss that a method is expected to have, beside one model copy with the same tokens.

    Args:
        method: its name.
        num_regions: M.
        overlap_steps: inner steps between a send and its landing.
        sync_interval: H.
        recipes_interval: H of the recipe that was planned, whose cost is known to its author at best.

    >>> cost("co2", 2, 48, 48, 48)
    []
    """
    said = []
    if method == "diloco" and 1 < num_regions <= MOST_REGIONS:
        counts = [each for each in (num_regions, 2 * num_regions) if each <= MOST_REGIONS]
        costs = [f"{each} regions are expected to cost {each**DILOCO_EXPONENT - 1:.1%}" for each in counts]
        said.append(
            f"loss: {', '.join(costs)} beside one (scaling law of DiLoCo at H = 30 for at most {MOST_REGIONS}, 2503.09799)."
        )
    if sync_interval > recipes_interval:
        said.append(
            f"loss: no source that we know tells what H = {sync_interval} costs beside the recipe's {recipes_interval}. Compare "
            "both in a short run."
        )
    if method == "streaming" and overlap_steps > 0:
        if overlap_steps <= ADVISED_OVERLAP:
            words = f"is within what the paper advises (at most {ADVISED_OVERLAP})"
        elif overlap_steps <= TRIED_OVERLAP:
            words = "is expected to cost less than 0.2 %"
        else:
            words = f"is more than the paper tried ({TRIED_OVERLAP} cost less than 0.2 %)"
        said.append(
            f"loss: an overlap of {overlap_steps} inner step{'s' * (overlap_steps > 1)} {words} (2501.18512)."
        )
    return said
