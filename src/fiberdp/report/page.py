"""The document as one HTML page that needs nothing else: no network, no file beside it.

Everything that comes from records is escaped, and the page's policy allows no script but its own, by its hash.
"""

from __future__ import annotations

import re
from base64 import b64encode
from hashlib import sha256
from html import escape
from importlib.resources import files

from fiberdp._version import __version__
from fiberdp.report.document import Block, Cell, Code, Columns, Document, Facts, Figure, Key, Notice, Points, Sample, Section, Table, Text

MARK = "fiberdp report"
SHAPES = {
    "o": '<circle cx="15" cy="7" r="3.2"/>',
    "s": '<path d="M12 4h6v6h-6z"/>',
    "^": '<path d="M15 3l4 7h-8z"/>',
    "v": '<path d="M15 11l4-7h-8z"/>',
    "D": '<path d="M15 2.6l4.4 4.4-4.4 4.4-4.4-4.4z"/>',
    "P": '<path d="M13.5 3h3v2.5H19v3h-2.5V11h-3V8.5H11v-3h2.5z"/>',
    "X": '<path d="M12.3 3L15 5.7 17.7 3 19 4.3 16.3 7 19 9.7 17.7 11 15 8.3 12.3 11 11 9.7 13.7 7 11 4.3z"/>',
}
"""matplotlib's markers, around (15, 7)."""


def html(document: Document) -> str:
    script, style, page = (_file(name) for name in ("page.js", "page.css", "page.html"))
    inside = {
        "title": escape(document.title),
        "subtitle": escape(document.subtitle),
        "mark": f"{MARK} {__version__}",
        "hash": b64encode(sha256(script.encode()).digest()).decode(),
        "style": style,
        "script": script,
        "nav": "\n".join(f'<li><a href="#{s.id}">{escape(s.title)}</a></li>' for s in document.sections),
        "main": "\n".join(_section(section) for section in document.sections),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda found: inside[found.group(1)], page)  # in one go: what is put in is not looked at again


def _file(name: str) -> str:
    return files("fiberdp.report").joinpath(name).read_text(encoding="utf-8")


def _section(section: Section) -> str:
    body, row = [], []
    for block in (*section.blocks, None):
        if isinstance(block, (Figure, Sample)) and (not row or type(row[0]) is type(block)):
            row.append(block)  # figures stand side by side where there is room
            continue
        if row:
            body.append(f'<div class="side{" alone" if len(row) == 1 else ""}">{"".join(_block(b) for b in row)}</div>')
            row = [block] if isinstance(block, (Figure, Sample)) else []
        if block is not None and not row:
            body.append(_block(block))
    return (
        f'<section id="{section.id}" aria-labelledby="{section.id}-title">\n<h2 id="{section.id}-title">{escape(section.title)}</h2>\n'
        + "\n".join(body)
        + "\n</section>"
    )


def _block(block: Block) -> str:
    match block:
        case Text():
            return f"<p>{_marked(block.text)}</p>"
        case Notice():
            return f'<div class="notice {block.kind}"><h3>{_marked(block.title)}</h3><p>{_marked(block.text)}</p></div>'
        case Facts():
            items = (
                f"<div><dt>{escape(name)}</dt><dd><b>{escape(value)}</b><span>{escape(what)}</span></dd></div>"
                for name, value, what in block.facts
            )
            return f'<dl class="facts">{"".join(items)}</dl>'
        case Points():
            return f"<h3>{escape(block.title)}</h3><ul>{''.join(f'<li>{_marked(point)}</li>' for point in block.points)}</ul>"
        case Code():
            shown = re.sub(r"(--[\w-]+(?: [^\s-]\S*)?)", r"<span>\1</span>", escape(block.text)) if block.command else escape(block.text)
            code = f'<pre tabindex="0" role="region" aria-label="{escape(block.title)}"><code>{shown}</code></pre>'
            if block.folded:
                return f"<details><summary>{escape(block.title)}</summary>{code}</details>"
            return f"<h3>{escape(block.title)}</h3>{code}"
        case Sample():
            parts = (f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in block.parts)
            return f'<div class="sample"><h3>{escape(block.title)}</h3><dl>{"".join(parts)}</dl></div>'
        case Table():
            if block.folded:
                return f"<details><summary>{escape(block.title)}</summary>{_table(block)}</details>"
            return f"<h3>{escape(block.title)}</h3>{_table(block)}"
        case Columns():
            first, second = ("".join(_block(b) for b in column) for column in (block.first, block.second))
            return f'<div class="side"><div>{first}</div><div>{second}</div></div>'
        case Figure():
            return _figure(block)


def _marked(text: str) -> str:
    text = re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", escape(text))
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", text)


def _table(table: Table) -> str:
    numeric = [table.numeric(i) for i in range(len(table.columns))]
    heads = []
    for name, right in zip(table.columns, numeric):
        kind, text = ' class="number"' if right else "", escape(name)
        if table.sortable:
            heads.append(f'<th scope="col"{kind} aria-sort="none"><button type="button">{text}</button></th>')
        else:
            heads.append(f'<th scope="col"{kind}>{text}</th>')
    rows = (
        "<tr>" + "".join(_cell(cell, right, i == 0) for i, (cell, right) in enumerate(zip(row, numeric))) + "</tr>" for row in table.rows
    )
    note = f'<p class="note">{_marked(table.note)}</p>' if table.note else ""
    kind = " data-sortable" if table.sortable else ""
    inside = f"<table{kind}><thead><tr>{''.join(heads)}</tr></thead>\n<tbody>{''.join(rows)}</tbody></table>"
    return f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(table.title)}">{inside}</div>{note}'


def _cell(cell: Cell, right: bool, first: bool) -> str:
    kind = ' class="number"' if right else ' class="long"' if len(cell.text) > 30 else ""
    value = f' data-v="{cell.value:.12g}"' if cell.value is not None else ""
    return f'<th scope="row"{kind}{value}>{escape(cell.text)}</th>' if first else f"<td{kind}{value}>{escape(cell.text)}</td>"


def _figure(figure: Figure) -> str:
    legend = f'<ul class="legend">{"".join(_key(key) for key in figure.legend)}</ul>' if figure.legend else ""
    data = f"<details><summary>The numbers</summary>{_table(figure.data)}</details>" if figure.data and figure.data.rows else ""
    drawing = f'<div class="drawing" role="img" aria-label="{escape(figure.alt)}">{figure.svg}</div>'
    return f"<figure><h3>{escape(figure.title)}</h3>{legend}{drawing}<figcaption>{_marked(figure.caption)}</figcaption>{data}</figure>"


def _key(key: Key) -> str:
    """The line and the marker that a legend's label belongs to."""
    colour = f"var(--s{key.colour})" if key.colour >= 0 else ("var(--ink)", "var(--muted)")[-1 - key.colour]
    dash = f' stroke-dasharray="{key.dash}"' if key.dash and key.dash != "none" else ""
    line = "" if key.dash == "none" else f'<path d="M1 7H29" stroke-width="2"{dash}/>'
    fill = "none" if key.colour < 0 else colour
    shape = f'<g fill="{fill}">{SHAPES[key.marker]}</g>' if key.marker else ""
    drawn = f'<svg class="key" viewBox="0 0 30 14" aria-hidden="true" focusable="false" style="stroke: {colour}">{line}{shape}</svg>'
    return f"<li>{drawn}{escape(key.label)}</li>"
