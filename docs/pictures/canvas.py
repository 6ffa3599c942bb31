"""What the pictures of the documentation are drawn with: one SVG file, element by element."""

from __future__ import annotations

import math
from typing import Any
from xml.sax.saxutils import escape

WIDTH = 800
FONTS = "'Segoe UI', Roboto, Helvetica, Arial, sans-serif"
INK, MUTED, RULE, CELL, PALE = "#1f2937", "#56606e", "#cbd5e1", "#d5dde7", "#f3f6f9"
BLUE, ORANGE, TEAL, RED = "#2563eb", "#d97706", "#0d9488", "#b42318"


def _number(value: float) -> str:
    told = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if told == "-0" else told


def _attributes(given: dict[str, Any]) -> str:
    told = ((name.replace("_", "-"), value) for name, value in given.items() if value is not None)
    return "".join(
        f' {name}="{_number(value) if isinstance(value, (int, float)) else value}"' for name, value in told
    )


class Canvas:
    """A picture, element by element; `alt` says in words what it shows."""

    def __init__(self, height: float, alt: str) -> None:
        self._height, self._alt = height, alt
        self._elements: list[str] = []

    def add(self, name: str, content: str = "", **given: Any) -> None:
        """Add any element; underscores in names of attributes are hyphens."""
        end = f">{content}</{name}>" if content else "/>"
        self._elements.append(f"<{name}{_attributes(given)}{end}")

    def box(self, x: float, y: float, width: float, height: float, fill: str = "none", **given: Any) -> None:
        """A rectangle."""
        self.add("rect", x=x, y=y, width=width, height=height, fill=fill, **given)

    def line(self, *points: tuple[float, float], color: str = INK, width: float = 1.5, **given: Any) -> None:
        """A line through points."""
        told = " ".join(f"{_number(x)},{_number(y)}" for x, y in points)
        self.add("polyline", points=told, fill="none", stroke=color, stroke_width=width, **given)

    def arrow(self, *points: tuple[float, float], color: str = INK, width: float = 1.5, **given: Any) -> None:
        """A line through points, with a head at the last one."""
        (x, y), (tip_x, tip_y) = points[-2:]
        length, size = math.hypot(tip_x - x, tip_y - y), 4 + 2 * width
        along, across = (tip_x - x) / length * size, (tip_y - y) / length * size
        end = tip_x - along * 0.8, tip_y - across * 0.8
        self.line(*points[:-1], end, color=color, width=width, **given)
        sides = [
            (tip_x - along - across / 2, tip_y - across + along / 2),
            (tip_x - along + across / 2, tip_y - across - along / 2),
        ]
        self.area((tip_x, tip_y), *sides, fill=color)

    def area(self, *points: tuple[float, float], fill: str, **given: Any) -> None:
        """A polygon."""
        told = " ".join(f"{_number(x)},{_number(y)}" for x, y in points)
        self.add("polygon", points=told, fill=fill, **given)

    def dot(self, x: float, y: float, radius: float, fill: str, **given: Any) -> None:
        """A circle."""
        self.add("circle", cx=x, cy=y, r=radius, fill=fill, **given)

    def text(
        self,
        x: float,
        y: float,
        *lines: str,
        size: float = 13,
        color: str = INK,
        bold: bool = False,
        anchor: str = "start",
        **given: Any,
    ) -> None:
        """Lines of text; `y` is the base of the first one."""
        for number, told in enumerate(lines):
            self.add(
                "text",
                escape(told),
                x=x,
                y=y + number * (size + 3),
                font_size=size,
                fill=color,
                font_weight="600" if bold else None,
                text_anchor=None if anchor == "start" else anchor,
                **given,
            )

    def small(self, x: float, y: float, *lines: str, anchor: str = "start") -> None:
        """Lines of small text that explain something."""
        self.text(x, y, *lines, size=12, color=MUTED, anchor=anchor)

    def label(self, x: float, y: float, word: str, *lines: str, anchor: str = "middle") -> None:
        """A word that the picture explains, and what it means."""
        self.text(x, y, word, size=15, bold=True, anchor=anchor)
        self.small(x, y + 16, *lines, anchor=anchor)

    def hatched(self, x: float, y: float, width: float, height: float) -> None:
        """A hatched rectangle: training waits."""
        self.box(x, y, width, height, fill="url(#hatch)", stroke=RED, stroke_width=0.8)

    def lock(self, x: float, y: float, color: str = INK) -> None:
        """A closed lock around a point."""
        self.dot(x, y, 12, "#fff", stroke=RULE)
        self.add(
            "path",
            d=f"M{_number(x - 3.5)} {_number(y - 1)}v-2.5a3.5 3.5 0 0 1 7 0v2.5",
            fill="none",
            stroke=color,
        )
        self.box(x - 5.5, y - 1, 11, 7.5, color, rx=1.5)

    def svg(self) -> str:
        """The file."""
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {_number(self._height)}" width="{WIDTH}" '
            f'height="{_number(self._height)}" font-family="{FONTS}" role="img">'
        )
        hatch = (
            '<defs><pattern id="hatch" width="5" height="5" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
            f'<path d="M0 0V5" stroke="{RED}" stroke-width="1.6"/></pattern></defs>'
        )
        ground = f'<rect width="{WIDTH}" height="{_number(self._height)}" rx="12" fill="#fff"/>'
        uses = [hatch] if any("#hatch" in each for each in self._elements) else []
        lines = [head, f"<title>{escape(self._alt)}</title>", *uses, ground, *self._elements, "</svg>"]
        return "\n".join(lines) + "\n"
