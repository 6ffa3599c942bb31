"""The page of a report: what it loads, what it makes of the text of others, what a browser shows of it."""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from hf_cocodc.cli.main import main
from tests.tools.report.made import a_cut_run, a_resumed_run, a_run, write

EVIL = "</title></style><script>alert(1)</script><img src=http://example.com/x onerror=alert(2)>$\\frac{$ \ud800\0"
ALLOWED = {
    *(
        "html",
        "head",
        "meta",
        "title",
        "style",
        "body",
        "h1",
        "h2",
        "h3",
        "p",
        "div",
        "details",
        "summary",
        "footer",
    ),
    *("table", "thead", "tbody", "tr", "th", "td", "ul", "li", "code"),
    *(
        "svg",
        "g",
        "defs",
        "path",
        "use",
        "text",
        "tspan",
        "clippath",
        "pattern",
        "rect",
        "metadata",
        "rdf:rdf",
        "cc:work",
    ),
}
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Page(HTMLParser):
    """What a browser would find on a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.links: list[str] = []
        self.words = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        for name, value in attrs:
            assert not name.startswith("on"), f"{tag} has {name}"
            if name in ("href", "xlink:href", "src", "srcset", "action", "data", "background"):
                self.links.append(value or "")

    def handle_data(self, data: str) -> None:
        self.words += data


def test_a_page_has_no_script_loads_nothing_and_shows_what_journals_say_as_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also if a journal has HTML, or mathematics, in every place where it can have text; two runs side by side."""
    a_run(tmp_path / "good", regions=3)
    evil = {EVIL: EVIL, "hf_cocodc": EVIL, "batch": 4, "data.block_size": 8}
    paths = a_run(tmp_path / "<b>bad", method=EVIL, timing=EVIL, run=EVIL, versions=evil, training=evil)
    with paths[0].open("a") as file:
        file.write(
            f'<script>\n{{"kind": "error", "time_s": 99, "step": 80, "message": "{"<script>" * 99}"}}\n'
        )
    out = tmp_path / "page.html"
    folders = [str(tmp_path / "good"), str(tmp_path / "<b>bad")]
    assert main(["report", *folders, "-o", str(out), "--seconds", "5", "30"]) == 0
    printed = capsys.readouterr()
    assert "line 29: it is not JSON" in printed.err
    text = out.read_text(encoding="utf-8")
    page = Page(text)
    assert page.tags <= ALLOWED, page.tags - ALLOWED
    assert page.links and all(link.startswith("#") for link in page.links)
    assert set(re.findall(r"url\((.)", text)) <= {"#"} and "@import" not in text
    assert "default-src 'none'; style-src 'unsafe-inline'" in text
    assert "<script>alert(1)</script>" in page.words and "<b>bad" in page.words
    for words in ("waiting for region 1", "Transfers, one by one", "From 5 s to 30 s", "outer.sync_interval"):
        assert words in page.words
    for axis in (
        "tokens of all regions",
        "time since the start (seconds)",
        "staleness (inner steps)",
        "outer gradient",
    ):
        assert axis in page.words
    assert len(text) < 3e6


def test_a_report_that_cannot_be_written_is_refused_in_one_paragraph(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With exit code 2, and before the journals are read."""
    a_run(tmp_path / "a")
    for arguments, words in (
        ([tmp_path / "b", "-o", tmp_path / "x.html"], "b is not there"),
        ([tmp_path / "a", "-o", tmp_path / "no" / "x.html"], "-o .*x.html cannot be written"),
        ([tmp_path / "a", "-o", tmp_path / "x.html", "--seconds", "5", "4"], "--seconds 5 4"),
    ):
        assert main(["report", *map(str, arguments)]) == 2
        said = capsys.readouterr().err
        assert re.search(words, said) and said.startswith("error: ") and said.count("\n") == 1
    assert not (tmp_path / "x.html").exists()


@pytest.mark.slow
def test_a_long_run_of_many_regions_and_fragments_is_small_and_quick(tmp_path: Path) -> None:
    """18,000 steps, 4 regions, 24 fragments: a few megabytes."""
    size = {"regions": 4, "fragments": 24, "steps": 18_000, "interval": 100, "overlap": 5}
    a_run(tmp_path / "run", **size, step_s=2.0, link_s=6.0, late=3)
    out = tmp_path / "page.html"
    assert main(["report", str(tmp_path / "run"), "-o", str(out)]) == 0
    assert out.stat().st_size < 6e6


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 5, 102, 115])
def test_numbers_that_nobody_would_write_are_drawn_or_refused(seed: int, tmp_path: Path) -> None:
    """Without a traceback, and without a warning of matplotlib."""
    chance = random.Random(seed)
    values = [
        0,
        1e9,
        9e9,
        2**52,
        1e299,
        -1e299,
        1e-300,
        1e29,
        None,
        0.5,
        99_998,
        7,
        [],
        [1, 2],
        "x" * 5000,
        "$a$",
        True,
    ]
    paths = a_run(tmp_path / "run", steps=40, regions=chance.choice([1, 2, 3]), seed=seed)
    for path in paths:
        events = [json.loads(line) for line in path.read_text().splitlines()]
        for _ in range(10):
            event = chance.choice(events[1:])
            event[chance.choice(list(event))] = chance.choice(values)
            event[chance.choice(["norms", "members", "took_s", "rested_s"])] = chance.choice(values)
        write(path.parent.parent, events)
    assert main(["report", str(tmp_path / "run"), "-o", str(tmp_path / "page.html")]) == 0


def share(pixels: object, color: str) -> float:
    """The share of the pixels that have a color."""
    import numpy as np

    wanted = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    return float((np.abs(np.asarray(pixels) - wanted).max(axis=-1) < 0.02).mean())


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs a browser: apt-get install chromium")
def test_a_browser_shows_the_report_of_a_real_run(tmp_path: Path) -> None:
    """Trained by the command, over gloo: every chart is painted, and the browser refuses nothing."""
    import matplotlib.image

    run = tmp_path / "run"
    sets = [
        "training.max_steps=24",
        "training.eval_steps=12",
        "training.save_steps=12",
        "training.logging_steps=2",
    ]
    sets += ["outer.sync_interval=8", "model.config.hidden_size=32", "model.config.intermediate_size=64"]
    sets += [f"training.output_dir={run}"]
    arguments = [part for each in sets for part in ("--set", each)]
    command = [sys.executable, "-m", "hf_cocodc"]
    subprocess.run(
        [*command, "train", "quickstart/streaming", *arguments], check=True, capture_output=True, timeout=600
    )
    page, picture = tmp_path / "page.html", tmp_path / "page.png"
    subprocess.run([*command, "report", str(run), "-o", str(page)], check=True, timeout=120)
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1120,5000"]
    options += [
        "--enable-logging=stderr",
        f"--screenshot={picture}",
        f"--user-data-dir={tmp_path / 'profile'}",
    ]
    shot = [str(CHROMIUM), *options, page.as_uri()]
    found = subprocess.run(shot, check=True, capture_output=True, text=True, timeout=120)
    assert "Refused" not in found.stderr and "CONSOLE" not in found.stderr
    seen = matplotlib.image.imread(picture)[..., :3]
    assert seen.shape[:2] == (5000, 1120)
    colors = ("#d5dee8", "#009e73", "#0072b2", "#f0e442", "#222222", "#b5b5b5")
    assert all(share(seen, color) > 2e-5 for color in colors), {color: share(seen, color) for color in colors}
    assert "saving" in page.read_text() and "held out" in page.read_text()


def test_pictures_say_what_is_seen_and_differ_by_more_than_color(tmp_path: Path) -> None:
    """Each picture has a description with its figures; waiting is hatched; ink follows the page's, also where it is dark."""
    a_run(tmp_path / "run", regions=3, steps=400, late=1)
    out = tmp_path / "page.html"
    assert main(["report", str(tmp_path / "run"), "-o", str(out)]) == 0
    text = out.read_text(encoding="utf-8")
    described = re.findall(r'role="img" aria-label="([^"]*)"', text)
    assert len(described) == text.count("<svg")
    assert re.search(
        r"loss \(nats per token\) against inner step: region 0 from [\d.]+ to [\d.]+;", described[0]
    )
    assert any("waiting for region 1" in words for words in described)
    assert "<pattern" in text and "prefers-color-scheme: dark" in text
    assert not re.search(r"(fill|stroke): #000000", text)


def test_a_page_gives_advice_and_shows_code_as_code(tmp_path: Path) -> None:
    """What the time went into, with the way out; no backtick is left."""
    a_cut_run(tmp_path / "cut")
    a_run(tmp_path / "slow", late=-1, link_s=9.0)
    a_resumed_run(tmp_path / "resumed", 2, 2)
    paths = a_run(tmp_path / "fails")
    with paths[0].open("a") as file:
        file.write('{"kind": "error", "time_s": 99, "step": 80, "message": "Run `pip <b>`."}\n')
    out = tmp_path / "page.html"
    assert (
        main(
            [
                "report",
                *(str(tmp_path / name) for name in ("cut", "slow", "fails", "resumed")),
                "-o",
                str(out),
            ]
        )
        == 0
    )
    text = out.read_text(encoding="utf-8")
    assert re.search(r"cut: region 1 was not there for 50 % of the time", text)
    assert re.search(
        r"slow: region \d waited for the link for \d\d % of its time. <code>hf-cocodc plan</code>", text
    )
    assert "resumed: region" not in text
    assert "<code>pip &lt;b&gt;</code>" in text and "`" not in text


def test_a_page_says_what_each_region_got_of_the_global_batch_and_why(tmp_path: Path) -> None:
    """A table of all deals; nothing where none was. Where one region waits for another, the advice is a deal; and if there was
    one, whether it has helped, or what else would.
    """
    a_run(tmp_path / "equal", late=1, step_s=2.0)
    for name, step in (("dealt", 20), ("late", 80)):
        for path in a_run(tmp_path / name, late=1, step_s=2.0):
            deal = {"kind": "deal", "time_s": 40.0, "step": step, "samples": {"0": 1200, "1": 400}}
            lines = path.read_text().splitlines()
            lines.insert(6, json.dumps({**deal, "speeds": {"0": 12.04, "1": 0.5}, "why": "<speeds>"}))
            path.write_text("\n".join(lines) + "\n")
    out = tmp_path / "page.html"
    assert (
        main(["report", *(str(tmp_path / name) for name in ("equal", "dealt", "late")), "-o", str(out)]) == 0
    )
    text = out.read_text(encoding="utf-8")
    rows = re.findall(r"<tr><th scope=\"row\">from step 20 on</th>(.*?)</tr>", text)
    assert rows == ["<td>1,200 (12/s)</td><td>400 (0.5/s)</td><td>1,600</td><td>&lt;speeds&gt;</td>"]
    assert text.count("How the global batch was dealt") == 2
    late = r"{}: region 0 waited for region 1 for \d\d % of its time. {}"
    assert re.search(late.format("equal", "With <code>regions.balance: auto</code> the regions share"), text)
    since = r"Since the last deal of the global batch \(step {}\), that was {} %.{}"
    assert re.search(late.format("dealt", since.format(20, r"\d\d", " Smaller micro-batches")), text)
    assert re.search(late.format("late", since.format(80, "0", "</li>")), text)


def test_lines_stand_out_on_a_dark_page(tmp_path: Path) -> None:
    """By the contrast that the Web's guidelines want of text, 4.5 to 1, also where a line lets the page shine through."""
    for name in ("a", "b", "c"):
        a_run(tmp_path / name, regions=2)
    out = tmp_path / "page.html"
    assert main(["report", *(str(tmp_path / name) for name in "abc"), "-o", str(out)]) == 0
    text = out.read_text(encoding="utf-8")
    paper = re.findall(r"--paper: (#[0-9a-f]{6})", text)[-1]
    dark = dict(re.findall(r"--(c[0-9a-f]{6}): (#[0-9a-f]{6})", text))
    style = r"fill: none; stroke: var\(--(c[0-9a-f]{6}), #[0-9a-f]{6}\);(?: stroke-opacity: ([\d.]+);)? stroke-width"
    shown = {(dark[name], float(alpha or 1)) for name, alpha in re.findall(style, text) if name != "cb0b0b0"}
    assert len(shown) == 6, "three colors, of training losses and of all else"
    for color, alpha in shown:
        assert contrast(mixed(color, paper, alpha), parts(paper)) > 4.5, (color, alpha)


def parts(color: str) -> list[float]:
    return [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]


def mixed(color: str, paper: str, alpha: float) -> list[float]:
    return [alpha * a + (1 - alpha) * b for a, b in zip(parts(color), parts(paper), strict=True)]


def contrast(one: list[float], other: list[float]) -> float:
    linear = [
        [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in each] for each in (one, other)
    ]
    dark, light = sorted(0.2126 * r + 0.7152 * g + 0.0722 * b for r, g, b in linear)
    return (light + 0.05) / (dark + 0.05)
