"""How a diagnostic is shown and kept: tables, and a new folder with NAME.json, NAME.md and NAME.png.

Each diagnostic is a module with

    tables(found)          what it found as tables, the paper's numbers beside ours
    draw(found, figure)    its figure, on an empty matplotlib figure
    TEXT                   what the figures mean, in a paragraph
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fiberdp._disk import make_folder, write_atomically
from fiberdp.record import markdown_table, to_text, versions

BLUE, ORANGE, GREEN, PURPLE, GREY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#666666"
"""Colours that the colour-blind can tell apart (Okabe and Ito)."""

STYLE: Any = {
    "font.size": 9.0, "axes.titlesize": 10.0, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
    "grid.color": "#e6e6e6", "grid.linewidth": 0.6, "axes.axisbelow": True, "legend.frameon": False, "lines.linewidth": 1.4,
}  # fmt: skip


@dataclass(frozen=True)
class Table:
    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]

    def markdown(self) -> str:
        return f"**{self.title}**\n\n{markdown_table(self.columns, self.rows)}"


def new_folder(out: str | Path | None) -> Path | None:
    """The folder to write to, not made yet; None without one.

    Raises ValueError unless it is new or empty, and ImportError without matplotlib.
    """
    if out is None:
        return None
    folder = Path(out)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(
            f"--out {folder} is {'not empty' if folder.is_dir() else 'a file'}: it must be a new or empty folder, because nothing is "
            "overwritten. Choose another."
        )
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ImportError(
            "--out draws a figure and needs matplotlib, which is not installed: pip install fiberdp[recipes], or leave --out out."
        ) from None
    return folder


def write(folder: Path, name: str, found: dict[str, Any], module: Any) -> None:
    """NAME.json, NAME.md and NAME.png of what `module` (a diagnostic) found."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    make_folder(folder)
    write_atomically(folder / f"{name}.json", to_text(found | {"versions": versions()}))
    write_atomically(folder / f"{name}.md", text(name, found, module.tables(found), module.TEXT))
    with rc_context(STYLE):
        figure = Figure(layout="constrained", dpi=150)
        FigureCanvasAgg(figure)
        module.draw(found, figure)
        figure.savefig(folder / f"{name}.png")


def text(name: str, found: dict[str, Any], tables: list[Table], meaning: str) -> str:
    settings = ", ".join(
        f"{key} {value:.6g}" if isinstance(value, float) else f"{key} {value}"
        for key, value in found["settings"].items()
        if value is not None
    )
    warnings = [f"Warning: {warning}" for warning in found.get("warnings", [])]
    parts = [
        f"# fiberdp diagnose {name}",
        meaning,
        *warnings,
        *(t.markdown() for t in tables),
        f"![{name}]({name}.png)",
        f"Settings: {settings}.",
    ]
    return "\n\n".join(parts) + "\n"


Advance = Callable[[int, int], None]
"""Told (done, of how many) as the work goes on."""


def unheard(done: int, total: int) -> None:
    """Nobody listens."""
