"""How fast this machine encodes, decodes and takes outer steps: seconds per value, measured with the programs of `bench`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ...methods import Method
from ..bench import codec, outer

CODEC_VALUES, OUTER_VALUES = 2_000_000, 4_000_000
REPEAT = 3
_ROWS = {
    "replace": "land, replace (diloco)",
    "mix": "land, mix (streaming)",
    "compensate": "land, compensate (cocodc)",
}


@dataclass(frozen=True)
class Speeds:
    """Seconds per value.

    Attributes:
        encode: by the codec's name.
        decode: by the codec's name.
        send: of the training thread at a send.
        step: of an outer step.
        land: of the training thread at a landing, by what the merge reads: replace, mix or compensate.
    """

    encode: Mapping[str, float] = field(default_factory=dict)
    decode: Mapping[str, float] = field(default_factory=dict)
    send: float = 0.0
    step: float = 0.0
    land: Mapping[str, float] = field(default_factory=dict)

    def landing(self, method: Method) -> float:
        """Seconds per value of a landing of this method, without its outer step."""
        merge = method.merge
        reads = "compensate" if merge.measure is not None else "mix" if merge.reads_local else "replace"
        return self.land.get(reads, 0.0)


def measure(codecs: Sequence[str], accelerated: bool) -> Speeds:
    """Measure this machine; takes some seconds.

    Args:
        codecs: names.
        accelerated: whether a GPU trains, so that the link's thread may use half of the cores; else it uses one.
    """
    from ...tensors.threads import HostThreads

    before, most = torch.get_num_threads(), HostThreads(not accelerated).in_training()
    try:
        torch.set_num_threads(most if accelerated else 1)
        rows = {row["codec"]: row for row in codec.measure(CODEC_VALUES, REPEAT, codecs).rows}
    finally:
        torch.set_num_threads(before)
    report = outer.measure(OUTER_VALUES, REPEAT, [most])
    took = {row["what"]: row["ms"] / 1e3 / report.setting["parameters"] for row in report.rows}
    return Speeds(
        encode={name: 4e-9 / row["encode GB/s"] for name, row in rows.items()},
        decode={name: 4e-9 / row["decode GB/s"] for name, row in rows.items()},
        send=took["send"],
        step=took["outer step"],
        land={reads: took[row] for reads, row in _ROWS.items()},
    )
