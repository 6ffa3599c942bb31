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
        "training begins, or continues from a checkpoint.",
        {
            "region": "number of the region that writes.",
            "num_regions": (
                "number of regions that take part; for a region that joins a run that is training: the most that "
                "may take part."
            ),
            "num_params": "number of values in all parameters that are synchronized.",
            "num_fragments": "number of fragments that they form.",
            "max_steps": "inner steps of the whole run; null if unknown.",
            "timing": "where times come from: measured, simulated or none.",
            "bytes_sent": "bytes that this region has sent so far.",
            "outer": "the settings of the method.",
            "run": (
                "unique name that regions agree on whenever they meet; a resumed run gets a new one. Only in a run that goes "
                "on without a lost region (`regions.on_loss`)."
            ),
            "from_region": (
                "the region whose state this one continues from; only if it joins the run or has no checkpoint of "
                "its own. The journal is then new, or that of the run that the region comes back to."
            ),
            "at": "seconds since 1970 by this machine's clock; only if times are measured.",
            "versions": "versions of the packages that numbers may depend on.",
            "training": "facts about training and data that regions compare (`About.facts`).",
        },
    ),
    LineKind(
        ("log",),
        "Trainer has logged a training loss. The line also has Trainer's own fields.",
        {
            "outer/rounds": "landings divided by the number of fragments.",
            "outer/loss": "mean training loss of the regions in nats, as received with the last landing.",
            "outer/staleness": "inner steps between the last landing and its send.",
            "outer/outer_grad_norm": "norm of the last mean outer gradient.",
            "outer/regions": "how many regions counted in the last landing.",
            "outer/transfer_s": "seconds that the link took for the last transfer, after the last region had arrived.",
            "outer/blocked_s": "seconds that training waited for the link, since the start of the run.",
            "outer/bytes_sent": "bytes that this region has sent since the start of the run.",
            "outer/compute_utilization": (
                "share of the training time (0 to 1) that did not wait for the link; evaluations, saves, "
                "sends and landings count as used. The report and the terminal use the same definition; "
                "`hf-cocodc plan` counts inner steps alone."
            ),
        },
    ),
    LineKind(
        ("evaluate",),
        "the held-out data was evaluated. The line also has Trainer's own fields.",
        {
            "weights": "which weights were evaluated: global or local.",
        },
    ),
    LineKind(
        ("save",),
        (
            "a checkpoint was written. This line is written together with the next one, so a run that resumes "
            "from the checkpoint does not have it."
        ),
        {},
    ),
    LineKind(
        ("send",),
        "an outer gradient was sent.",
        {
            "fragment": "number of the fragment.",
            "numel": "number of values in the fragment.",
            "norm": "norm of this region's outer gradient; null if not finite.",
        },
    ),
    LineKind(
        ("send", "land", "void", "evaluate", "save"),
        "lines of all these kinds also say how long the event took.",
        {
            "took_s": "seconds for which the event held up training, until this line.",
            "blocked_s": "the part of these seconds in which training waited for the link.",
        },
    ),
    LineKind(
        ("land", "void"),
        (
            "a mean of outer gradients has landed. A void mean changed nothing: it was not finite, or could "
            "not be believed."
        ),
        {
            "fragment": "number of the fragment.",
            "sent_at": "inner step of the send.",
            "staleness": "inner steps from the send to the landing.",
            "outer_grad_norm": "norm of the mean; null if it is void.",
            "bytes_sent": "bytes that this region sent in this transfer.",
            "transfer_s": "seconds that the link took, after the last region had arrived.",
            "rested_s": "seconds from the end of the transfer to this line; null if unknown.",
            "regions": "how many regions counted in the mean.",
            "members": "numbers of the regions that took part.",
            "norms": "norms of their outer gradients, in the order of `members`; null if not finite.",
            "coasted": (
                "by region number, the last inner step that the region trained; only for regions that have kept "
                "step without training since then."
            ),
            "digest": "checksum of the global params at the send; only where regions come and go, if it was compared and equal.",
        },
    ),
    LineKind(
        ("sit_out",),
        "this region's outer gradient was not finite and was left out of the mean.",
        {
            "fragment": "number of the fragment.",
        },
    ),
    LineKind(
        ("guard",),
        "the norm guard (`outer.guard`) has acted on a transfer that lands: norms were far from ordinary.",
        {
            "fragment": "number of the fragment.",
            "sent_at": "inner step of the send.",
            "regions": 'by region number: "clipped", "dropped", or "void" (it made the mean void).',
            "norms": (
                "norms of the outer gradients of all regions that took part, in the order of their numbers; null "
                "if not finite."
            ),
            "limit": "the ordinary norm that they were compared with.",
        },
    ),
    LineKind(
        ("begin_anew",),
        "this region started fresh, with the global params and a fresh inner optimizer (`outer.on_nonfinite`).",
        {
            "rounds": "for how many rounds in a row it had not counted.",
            "times": "how often it has started fresh so far.",
        },
    ),
    LineKind(
        ("adopt",),
        "more parameters are synchronized from here on.",
        {
            "num_params": "number of values in all parameters, including the new ones.",
            "num_fragments": "number of fragments that they form.",
            "averaged": "names of new parameters that started from the mean of the regions.",
            "created": "names of new parameters that started from region 0's values.",
        },
    ),
    LineKind(
        ("unread",),
        "nobody has trained on a part of the data, because its region was away.",
        {
            "region": "number of the region whose part it is.",
            "from_step": "the inner step after which the part was not read.",
            "to_step": "the last inner step for which it was not read.",
            "samples": "how many samples nobody has read; null if unknown.",
        },
    ),
    LineKind(
        ("best",),
        "the run ended with the global weights of its best checkpoint, saved at inner step `step`.",
        {
            "metric": "name of the metric that is best there.",
            "value": "value of this metric.",
        },
    ),
    LineKind(
        ("epoch",),
        (
            "these regions take part from here on. Each region writes this line when it starts or joins, and at"
            " each change."
        ),
        {
            "epoch": "how often the members have changed so far.",
            "losses": (
                "how many of those changes were losses. Two regions may see a loss and a join in different "
                "orders, so only both numbers together say who takes part."
            ),
            "members": "numbers of the regions. One that is no longer among them was lost or has left.",
            "why": "what has changed, in words.",
        },
    ),
    LineKind(
        ("retry",),
        "an operation on the link is repeated without a lost region.",
        {
            "epoch": "how often the members have changed by then.",
            "op": "number of the operation.",
            "what": "the operation, in words.",
            "members": "numbers of the regions that repeat it.",
            "why": "who was lost, in words.",
        },
    ),
    LineKind(
        ("late", "left"),
        (
            "the others go on without a region that is late (`regions.grace_s`), or a region has left in good "
            "order."
        ),
        {
            "region": "its number.",
            "epoch": "how often the members have changed by then.",
            "why": "the reason, in words.",
        },
    ),
    LineKind(
        ("join",),
        "a region is a member from the next inner step on.",
        {
            "region": "its number.",
            "epoch": "how often the members have changed by then.",
            "donor": "the region that gave it a snapshot; only in its own journal.",
            "base": "inner step of that snapshot; only in its own journal.",
        },
    ),
    LineKind(
        ("ways",),
        (
            "how this region is connected to each of the others. Each region writes this line at the start, and"
            " at each change."
        ),
        {
            "ways": (
                "by region number: direct (the region with the lower number calls the other one), reversed, or "
                "relayed."
            ),
        },
    ),
    LineKind(
        ("note",),
        "a message for people.",
        {
            "message": "its text.",
        },
    ),
    LineKind(
        ("finish",),
        "the run has finished, with the global weights.",
        {
            "blocked_s": "seconds that training waited for the link, since the start of the run.",
            "bytes_sent": (
                "bytes that this region has sent, to all others together, since the start of the run "
                "(`engine.account.Totals`)."
            ),
            "sends": "number of transfers that this region has sent.",
            "digest": "checksum of the global weights.",
        },
    ),
    LineKind(
        ("error",),
        "training ended with an error.",
        {
            "message": "the error message.",
            "exit_code": "exit code of the command.",
        },
    ),
)
"""A kind may be in several of them."""
