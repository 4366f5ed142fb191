"""matplotlib -> an SVG that belongs to the page: its colours in light and dark, its font, ids of its own.

A figure is drawn in colours that stand for names (`INK` is #010203); in the SVG each becomes `var(--ink)`, which the page defines once for
light and once for dark.  Text stays text, so that it is set in the page's font, found by search and enlarged with the page.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from typing import Any

INK, MUTED, GRID, CARD = "#010203", "#010204", "#010205", "#010206"
SERIES = tuple(f"#0102{16 + i:02x}" for i in range(8))
RAMP = tuple(f"#0103{i:02x}" for i in range(9))
"""From low to high.  Text on step i is drawn in ON[i]."""
ON = tuple(f"#0104{i:02x}" for i in range(9))
NAMES = {INK: "ink", MUTED: "muted", GRID: "grid", CARD: "card"}
NAMES |= {colour: f"s{i}" for i, colour in enumerate(SERIES)}
NAMES |= {colour: f"r{i}" for i, colour in enumerate(RAMP)} | {colour: f"on{i}" for i, colour in enumerate(ON)}
DASHES = ("", "6 2.5", "2 2", "7 2 2 2", "10 3")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
STYLE: Any = {
    "svg.fonttype": "none", "font.size": 8.6, "axes.titlesize": 8.6, "axes.labelsize": 8.6, "axes.titlepad": 9.0, "axes.labelpad": 5.0,
    "text.color": INK, "axes.labelcolor": MUTED, "xtick.color": MUTED, "ytick.color": MUTED, "axes.edgecolor": GRID, "xtick.major.size": 0,
    "ytick.major.size": 0, "xtick.minor.size": 0, "ytick.minor.size": 0, "axes.spines.top": False, "axes.spines.right": False,
    "axes.spines.left": False, "axes.grid": True, "axes.grid.axis": "y", "grid.color": GRID, "grid.linewidth": 0.8, "axes.axisbelow": True,
    "lines.linewidth": 1.8, "axes.linewidth": 0.8,
}  # fmt: skip


def require_matplotlib() -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ImportError(
            "a report draws figures and needs matplotlib, which is not installed: pip install fiberdp[recipes], then repeat the command."
        ) from None


def drawn(draw: Callable[[Any], None], key: str, *, width: float = 4.3, height: float = 2.55) -> str:
    """The SVG of `draw(axes)`.  key: prefix of its ids, one a figure of a page.  width, height: inches of 72 user units."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with rc_context(STYLE | {"svg.hashsalt": key}):
        figure = Figure(figsize=(width, height), layout="constrained", facecolor="none")
        FigureCanvasSVG(figure)
        axes = figure.add_subplot(facecolor="none")
        draw(axes)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    return _of_the_page(text.getvalue(), key)


def _of_the_page(svg: str, key: str) -> str:
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(<svg\b[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg\b[^>]*?) width="[^"]*"', r'\1 aria-hidden="true" focusable="false"', svg, count=1)
    svg = re.sub(r'(xlink:)?href="#([^"]*)"', rf'href="#{key}-\2"', svg)
    svg = re.sub(r"url\(#([^)]*)\)", rf"url(#{key}-\1)", svg)
    svg = re.sub(r' id="([^"]*)"', rf' id="{key}-\1"', svg)
    svg = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px", svg)
    svg = re.sub(r' (?:d|x|y|width|height|points|transform)="[^"]*"', _shorter, svg)
    svg = re.sub(r"#[0-9a-f]{6}", lambda found: f"var(--{NAMES[found.group()]})" if found.group() in NAMES else found.group(), svg)
    return re.sub(r"\n\s*", "\n", svg).strip()


def _shorter(attribute: re.Match[str]) -> str:
    """Coordinates to a hundredth of a unit; not text, which may be a number too."""
    return re.sub(r"-?\d+\.\d{3,}", lambda found: f"{float(found.group()):.2f}", attribute.group())


def dashes(pattern: str) -> Any:
    """The linestyle of matplotlib for a pattern of `DASHES`, which is in user units and not in line widths."""
    return (0, tuple(float(part) / 1.8 for part in pattern.split())) if pattern else "-"


def few(count: int, most: int = 9) -> Sequence[int]:
    """At most about `most` of `count` places, evenly spaced, for markers and tick labels.

    >>> list(few(3)), list(few(20, 5))
    ([0, 1, 2], [0, 4, 8, 12, 16])
    """
    return range(0, count, max(1, -(-count // most)))
