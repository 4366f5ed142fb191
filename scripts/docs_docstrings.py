"""Docstrings as they are written here, for mkdocstrings: doctests, formulas and tables of plain text keep their lines."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension

FORMULA = re.compile(r"^\S.{0,110}$")
RELATION = re.compile(r"(?:^| )(?:=|->|<=|iff|<-)(?: |$)")


def markdown(text: str) -> str:
    """The docstring as Markdown: paragraphs that are doctests or formulas, line by line, become code.

    >>> markdown("A sum.\\n\\ng_t = a_t + b_t").splitlines()
    ['A sum.', '', '```text', 'g_t = a_t + b_t', '```']
    >>> markdown("Of [B, d] and _private names.")
    'Of \\\\[B, d] and \\\\_private names.'
    """
    parts = re.split(r"\n\s*\n", text.strip("\n"))
    return "\n\n".join(_part(part) for part in parts)


def _part(part: str) -> str:
    lines = part.split("\n")
    if lines[0].startswith(">>> "):
        return "\n".join(["```pycon", *lines, "```"])
    if lines[0].startswith("    "):  # text set apart: tables of two kinds, formulas, recursions
        lines = [line[4:] if line.startswith("    ") else line for line in lines]
        if lines[0].startswith("| "):
            return _prose("\n".join(lines))
        return "\n".join(["```text", *lines, "```"])
    if len(lines) > 1 and all(FORMULA.match(line) and re.search(r" {2,}", line.strip()) for line in lines):
        return "\n".join(["```text", *lines, "```"])
    if all(FORMULA.match(line) and RELATION.search(line) and not line.endswith(".") for line in lines):
        return "\n".join(["```text", *lines, "```"])
    return _prose(part)


def _prose(text: str) -> str:
    """Brackets, asterisks and underscores mean themselves, outside of code."""
    parts = re.split(r"(`[^`]+`)", text)
    return "".join(part if i % 2 else re.sub(r"(?<!\w)([*_])(?=\w)|(\[)", r"\\\g<0>", part) for i, part in enumerate(parts))


class Plain(Extension):
    """Every docstring of fiberdp, before it is rendered."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = markdown(obj.docstring.value)
