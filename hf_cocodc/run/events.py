"""The kinds of lines in a journal, and what their fields say."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class LineKind:
    """What lines of these kinds mean, and their fields beside `kind`, `time_s` and `step`, which every line has."""

    kinds: Sequence[str]
    meaning: str
    fields: Mapping[str, str]


LINE_KINDS = (
    LineKind(
        ("start", "resume"),
        "training begins, or goes on from a checkpoint.",
        {
            "region": "number of the region that writes.",
            "num_regions": (
                "regions that take part; of a region that comes to others that train: that may take part "
                "at most."
            ),
            "num_params": "values of all parameters that are synchronized.",
            "num_fragments": "fragments of them.",
            "max_steps": "inner steps of the whole run; null if unknown.",
            "timing": "what seconds are: measured, simulated or none.",
            "bytes_sent": "bytes that this region has sent so far.",
            "outer": "the settings of the method.",
            "run": "unique name that regions agree on whenever they meet: a resumed run gets another one.",
            "from_region": (
                "the region whose state it goes on from, because it joins the run or has no checkpoint of "
                "its own; only then. Its journal is new, or that of the run that it comes back to."
            ),
            "at": "seconds since 1970 by this machine's clock, where time is real.",
            "versions": "of the packages that numbers may depend on.",
            "training": "what regions compare of their training and data (`About.facts`).",
        },
    ),
    LineKind(
        ("log",),
        "a log of Trainer with a training loss; it also has Trainer's fields.",
        {
            "outer/rounds": "landings divided by the number of fragments.",
            "outer/loss": "nats, the mean of the regions' training losses, as they came with the last landing.",
            "outer/staleness": "inner steps from the send of the last landing to the landing.",
            "outer/outer_grad_norm": "norm of the last mean of outer gradients.",
            "outer/regions": "how many regions counted in the last landing.",
            "outer/transfer_s": "seconds of the last transfer on the link, once all regions were there.",
            "outer/blocked_s": "seconds that training waited for the link, since the start of the run.",
            "outer/bytes_sent": "bytes that this region has sent since the start of the run.",
            "outer/compute_utilization": (
                "share of the training time (0 to 1) that did not wait for the link; evaluations, saves, "
                "sends and landings count as used. Report and terminal mean the same by utilization; "
                "`planning.Course` counts inner steps alone."
            ),
        },
    ),
    LineKind(
        ("evaluate",),
        "the held-out data was evaluated; it also has Trainer's fields.",
        {
            "weights": "which ones were evaluated: global or local.",
        },
    ),
    LineKind(
        ("save",),
        (
            "a checkpoint was written. The line comes with the next one: a run that is resumed from the "
            "checkpoint does not have it."
        ),
        {},
    ),
    LineKind(
        ("send",),
        "an outer gradient has left.",
        {
            "fragment": "number of the fragment.",
            "numel": "its values.",
            "norm": "of this region's outer gradient; null if not finite.",
        },
    ),
    LineKind(
        ("send", "land", "void", "evaluate", "save"),
        "what each of them took.",
        {
            "took_s": "seconds for which it held training, up to this line.",
            "blocked_s": "seconds of these in which training waited for the link.",
        },
    ),
    LineKind(
        ("land", "void"),
        (
            "a mean of outer gradients is here. A void one changed nothing: it was not finite, or could "
            "not be believed."
        ),
        {
            "fragment": "number of the fragment.",
            "sent_at": "inner step of the send.",
            "staleness": "inner steps from the send to the landing.",
            "outer_grad_norm": "norm of the mean; null in a void one.",
            "bytes_sent": "bytes that this region sent in this transfer.",
            "transfer_s": "seconds that the link took, from when the last region came.",
            "rested_s": "seconds from the end of the transfer to this line; null if unknown.",
            "regions": "how many regions counted.",
            "members": "numbers of the regions that took part.",
            "norms": "of their outer gradients, in the order of `members`; null if not finite.",
            "coasted": (
                "the last inner step that a region had trained, by number; only of regions that have kept "
                "step without training since."
            ),
            "digest": "checksum of the global params of all regions at the send; only where regions come and go.",
        },
    ),
    LineKind(
        ("sit_out",),
        "this region's outer gradient was not finite, and stayed here.",
        {
            "fragment": "number of the fragment.",
        },
    ),
    LineKind(
        ("guard",),
        "outer gradients of a transfer that lands were far out of the ordinary (`outer.guard`).",
        {
            "fragment": "number of the fragment.",
            "sent_at": "inner step of the send.",
            "regions": 'which ones: "clipped", "dropped", or "void" (they make the mean void) by number.',
            "norms": (
                "of the outer gradients of all that took part, in the order of their numbers; null if not "
                "finite."
            ),
            "limit": "the ordinary norm that they were held against.",
        },
    ),
    LineKind(
        ("begin_anew",),
        "this region took the global params and a fresh inner optimizer (`outer.on_nonfinite`).",
        {
            "rounds": "how many in a row it had not counted in.",
            "times": "how often it has begun anew.",
        },
    ),
    LineKind(
        ("adopt",),
        "more parameters are synchronized from here on.",
        {
            "num_params": "values of all parameters, the new ones too.",
            "num_fragments": "fragments of them.",
            "averaged": "names of new parameters that began with the mean of the regions.",
            "created": "names of new parameters that began with region 0's values.",
        },
    ),
    LineKind(
        ("unread",),
        "nobody has trained on a part of the data, because its region was away.",
        {
            "region": "whose part it is.",
            "from_step": "the inner step after which it was not read.",
            "to_step": "the last inner step of which it was not read.",
            "samples": "how many; null if unknown.",
        },
    ),
    LineKind(
        ("best",),
        "the run ended with the global weights of its best checkpoint, which is of inner step `step`.",
        {
            "metric": "name of the metric that is best there.",
            "value": "of the metric.",
        },
    ),
    LineKind(
        ("epoch",),
        (
            "these regions take part from here on. Each writes it when it begins or enters the run, and at"
            " each change."
        ),
        {
            "epoch": "how often they have changed.",
            "losses": (
                "how many of those changes were losses. Two regions may see a loss and an arrival in "
                "another order: only both numbers together say who takes part."
            ),
            "members": "numbers of the regions. One that is no longer among them was lost.",
            "why": "what has changed, in words.",
        },
    ),
    LineKind(
        ("retry",),
        "an operation on the link is done again without a lost region.",
        {
            "epoch": "how often members have changed by then.",
            "op": "number of the operation.",
            "what": "the operation, in words.",
            "members": "numbers of the regions that do it again.",
            "why": "who was lost, in words.",
        },
    ),
    LineKind(
        ("late", "left"),
        (
            "the others go on without a region that is late (`regions.grace_s`), or one has left in good "
            "order."
        ),
        {
            "region": "its number.",
            "epoch": "how often members have changed by then.",
            "why": "in words.",
        },
    ),
    LineKind(
        ("join",),
        "a region is a member from the next inner step on.",
        {
            "region": "its number.",
            "epoch": "how often members have changed by then.",
            "donor": "the region that it began from; only in its own journal.",
            "base": "inner step of what it got there; only in its own journal.",
        },
    ),
    LineKind(
        ("ways",),
        (
            "by which way this region is connected to each other one. Each writes it at its beginning, and"
            " at each change."
        ),
        {
            "ways": (
                "by number: direct (the region with the lower number calls the other one), reversed, or "
                "relayed."
            ),
        },
    ),
    LineKind(
        ("note",),
        "something that people should know.",
        {
            "message": "what.",
        },
    ),
    LineKind(
        ("finish",),
        "the run has come to its end, with the global weights.",
        {
            "blocked_s": "seconds that training waited for the link, since the start of the run.",
            "bytes_sent": (
                "bytes that this region has sent, to all others together, since the start of the run "
                "(`engine.account.Totals`)."
            ),
            "sends": "transfers of this region.",
            "digest": "checksum of the global weights.",
        },
    ),
    LineKind(
        ("error",),
        "training ended with an error.",
        {
            "message": "of the error.",
            "exit_code": "of the command.",
        },
    ),
)
"""A kind may be in several of them."""
