"""The same document as Markdown, for a repository or a terminal; figures become their numbers."""

from __future__ import annotations

from fiberdp.report.document import Block, Code, Columns, Document, Facts, Figure, Notice, Points, Sample, Table, Text
from fiberdp.report.page import MARK


def markdown(document: Document) -> str:
    parts = [f"<!-- {MARK} -->", f"# {_text(document.title)}", _text(document.subtitle)]
    for section in document.sections:
        parts += [f"## {section.title}", *(part for block in section.blocks for part in _block(block))]
    return "\n\n".join(part for part in parts if part) + "\n"


def _block(block: Block) -> list[str]:
    match block:
        case Text():
            return [_text(block.text)]
        case Notice():
            return [f"> **{_text(block.title)}.** {_text(block.text)}"]
        case Facts():
            return ["\n".join(f"- {name}: **{_text(value)}** ({_text(what)})" for name, value, what in block.facts)]
        case Points():
            return [f"### {_text(block.title)}", "\n".join(f"- {_text(point)}" for point in block.points)]
        case Code():
            return [f"### {_text(block.title)}", "\n".join(f"    {line}" for line in block.text.splitlines())]
        case Table():
            return [f"### {_text(block.title)}", _text(block.markdown()), _text(block.note)]
        case Figure():
            shown = [f"### {_text(block.title)}", _text(block.caption)]
            return shown + ([_text(block.data.markdown())] if block.data and block.data.rows else [_text(block.alt)])
        case Columns():
            return [part for inner in (*block.first, *block.second) for part in _block(inner)]
        case Sample():
            return [f"### {_text(block.title)}", "\n".join(f"- {name}: {_text(' '.join(text.split()))}" for name, text in block.parts)]


def _text(text: str) -> str:
    """No HTML of a record's becomes HTML."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
