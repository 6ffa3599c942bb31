"""Draws the pictures of the documentation: `python docs/pictures/draw.py [NAME ...] [--output FOLDER]`.

It writes SVG files beside this one. The same versions of this package and the same results give the same bytes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

from canvas import Canvas
from diagrams import architecture, overview
from results import gap, measured_gaps, speed
from timelines import TIMELINES, timeline

HERE = Path(__file__).resolve().parent
PICTURES: dict[str, Callable[[], Canvas]] = {
    "overview": overview,
    "architecture": architecture,
    **{name: partial(timeline, name) for name in TIMELINES},
    "gap": lambda: gap(measured_gaps()),
    "speed": speed,
}


def main() -> None:
    """Draw the pictures that are asked for, by default all."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"by default all: {', '.join(PICTURES)}")
    parser.add_argument("--output", type=Path, default=HERE, metavar="FOLDER")
    options = parser.parse_args()
    unknown = [name for name in options.names if name not in PICTURES]
    if unknown:
        parser.error(f"NAME {', '.join(unknown)} is not known. Known: {', '.join(PICTURES)}.")
    for name in options.names or PICTURES:
        path = options.output / f"{name}.svg"
        path.write_text(PICTURES[name]().svg(), encoding="utf-8")
        print(f"written: {path}")


if __name__ == "__main__":
    main()
