"""What regions that meet in a storage write there, and read."""

from __future__ import annotations

import re
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
import torch

from hf_cocodc.coordinator.messages import Terms
from hf_cocodc.coordinator.standby import Standby
from hf_cocodc.link.base import MeanRequest
from hf_cocodc.link.records import Trailer
from hf_cocodc.link.tcp import TcpLink
from hf_cocodc.net.mailbox import mailbox
from hf_cocodc.parts.codecs.base import Coder, Conversation, Message, Result, message_bytes
from hf_cocodc.parts.codecs.cast import Cast
from hf_cocodc.parts.codecs.topk import TopK
from tests.link.memory import at_once, linked
from tests.net.storages import folder_url

NUM_VALUES, REGIONS = 300_000, 3


def mean(link: TcpLink, coder: Coder) -> torch.Tensor:
    """The mean of what all regions bring."""
    values = torch.randn(NUM_VALUES, generator=torch.Generator().manual_seed(link.region))

    def converse() -> Conversation:
        reply = yield Message(values, coder)
        return Result(reply.mean, reply.own, {})

    trailer = Trailer(fragment=0, inner_step=0)
    return (
        link.mean(MeanRequest(converse, NUM_VALUES, lambda: trailer, "a fragment")).wait().result.mean.clone()
    )


@pytest.mark.parametrize(
    ("coder", "payloads"), [(Cast(torch.float32), 4 / 3), (TopK(64, 4096, Cast(torch.float32)), 2)]
)
def test_three_regions_write_and_read_less_than_two_payloads_each(
    coder: Coder, payloads: float, tmp_path: Path
) -> None:
    """Each averages a third (the table in docs/guides/storage.md); payloads of top-k go to all others whole."""
    url = folder_url(tmp_path)
    with closing(Standby(url, None)):
        terms = Terms(count=REGIONS, most=REGIONS, wait_s=0.0, timeout_s=60.0)
        links = at_once(*(partial(linked, url, region, terms) for region in range(REGIONS)))
        asked = mailbox(url).storage  # of all three: they are one process
        before = asked.num_bytes.copy()
        means = at_once(*(partial(mean, link, coder) for link in links))
        each = {kind: (asked.num_bytes[kind] - before[kind]) / REGIONS for kind in ("write", "read")}
        at_once(*(partial(link.close, "the test is over") for link in links))
    assert all(torch.equal(found, means[0]) for found in means)
    expected = payloads * coder.num_bytes(NUM_VALUES)
    assert each == pytest.approx({"write": expected, "read": expected}, rel=0.03)


def test_the_table_of_the_docs_is_what_a_region_sends() -> None:
    """All read all: each writes one payload, and reads M - 1."""
    page = (Path(__file__).parents[2] / "docs" / "guides" / "storage.md").read_text()
    rows = re.findall(r"^\| (\d+) \| (\d+), (\d+) \| ([\d.]+), ([\d.]+) \|$", page, re.MULTILINE)
    assert [int(row[0]) for row in rows] == [2, 3, 4, 8]
    for count, *figures in (map(float, row) for row in rows):
        coder, regions = Cast(torch.float32), int(count)
        sent = message_bytes(coder, 24_000, 0, regions) / coder.num_bytes(24_000)
        assert figures == pytest.approx([1, regions - 1, sent, sent], abs=0.005)
