"""What a report consists of, before it is HTML or Markdown: frozen values, all of whose strings are untrusted text.

Text in backticks is code, between double asterisks strong; nothing else is markup.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from fiberdp.record import markdown_table


@dataclass(frozen=True)
class Cell:
    """value: what a column is sorted by, if not by the text."""

    text: str
    value: float | None = None


@dataclass(frozen=True)
class Table:
    """sortable: the order of the rows means nothing.  note: a line below.  folded: shown when asked for."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[Cell, ...]]
    note: str = ""
    sortable: bool = True
    folded: bool = False

    def numeric(self, column: int) -> bool:
        """Whether every cell that is not empty has a number to be sorted by."""
        cells = [row[column] for row in self.rows if row[column].text not in ("", "–")]
        return bool(cells) and all(cell.value is not None for cell in cells)

    def markdown(self) -> str:
        return markdown_table(self.columns, [[cell.text for cell in row] for row in self.rows])


@dataclass(frozen=True)
class Key:
    """A line of a legend.  colour: number of the page's palette, -1 the ink, -2 muted.  dash: of a stroke.  marker: matplotlib's."""

    label: str
    colour: int
    dash: str = ""
    marker: str = ""


@dataclass(frozen=True)
class Figure:
    """svg: with colours of the page.  alt: what it shows, for who does not see it.  data: the numbers that were drawn."""

    title: str
    caption: str
    alt: str
    svg: str
    legend: tuple[Key, ...] = ()
    data: Table | None = None


@dataclass(frozen=True)
class Text:
    text: str


@dataclass(frozen=True)
class Notice:
    """kind: "good" for what was proved, "warning" for what a reader must know."""

    kind: Literal["good", "warning"]
    title: str
    text: str


@dataclass(frozen=True)
class Facts:
    """(name, value, what it means) each."""

    title: str
    facts: tuple[tuple[str, str, str], ...]


@dataclass(frozen=True)
class Points:
    title: str
    points: tuple[str, ...]


@dataclass(frozen=True)
class Code:
    """command: a command line, which may be broken before an option."""

    title: str
    text: str
    folded: bool = False
    command: bool = False


@dataclass(frozen=True)
class Sample:
    """A piece of generated text beside what was wanted."""

    title: str
    parts: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Columns:
    """Side by side where there is room, the second below the first where there is not."""

    first: tuple[Text | Figure, ...]
    second: tuple[Text | Figure, ...]


Block = Text | Notice | Facts | Points | Code | Table | Figure | Sample | Columns


@dataclass(frozen=True)
class Section:
    """title: short enough for the page's navigation."""

    id: str
    title: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class Document:
    title: str
    subtitle: str
    sections: tuple[Section, ...]


def number(value: Any, form: str = ".4g") -> Cell:
    """A cell of a number; an en dash for none."""
    return Cell("–") if value is None else Cell(power(format(value, form)), float(value))


def power(text: str) -> str:
    """A formatted number as it is printed: a minus sign, and powers of ten.

    >>> power("6.1e-06"), power("-0.25")
    ('6.1×10⁻⁶', '−0.25')
    """
    mantissa, e, exponent = text.partition("e")
    raised = "×10" + str(int(exponent)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")) if e else ""
    return mantissa.replace("-", "−") + raised


def share(value: float | None) -> Cell:
    """A share as per cent with two decimals."""
    return Cell("–") if value is None else Cell(f"{100 * value:.2f}", 100 * value)


def span(ends: Any, scale: float = 100.0) -> Cell:
    """An interval, sorted by its middle; an en dash for none."""
    return Cell("–") if ends is None else Cell(power(f"[{scale * ends[0]:.2f}, {scale * ends[1]:.2f}]"), scale * (ends[0] + ends[1]) / 2)


def quantity(value: float, what: str) -> str:
    """ "1 run", "15 runs"."""
    return f"{value} {what}" if value == 1 else f"{value} {what}s"


def without_empty(rows: list[tuple[Cell, ...]], columns: tuple[str, ...]) -> tuple[list[tuple[Cell, ...]], tuple[str, ...]]:
    """Without columns in which no row has anything."""
    kept = [i for i in range(len(columns)) if any(row[i].text not in ("", "–") for row in rows)]
    return [tuple(row[i] for i in kept) for row in rows], tuple(columns[i] for i in kept)
