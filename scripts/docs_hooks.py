"""What mkdocs builds beyond docs/: pages made from the repository and the code, figures in the page's colours, links that leave docs/.

    NOTATION.md, CHANGELOG.md, results/    are part of the site, under the names of `ELSEWHERE`
    reference/command-line.md              is written from the command line's own declarations
    <!-- made from the code: NAME -->      becomes the table that `MADE` has under that name
    ![alt](…/figures/NAME.svg)             becomes the figure that docs_figures.py draws, inline, so that it follows the theme
    $σ_w = σC/B$ and ```math               become HTML: italic letters, indices and exponents; no script and no font is loaded

A link to a file of the repository that is not part of the site is a warning, and so an error of `mkdocs build --strict`.
"""

from __future__ import annotations

import html
import inspect
import logging
import posixpath
import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, get_args, get_origin

from docs_figures import FIGURES
from mkdocs.structure.files import File, InclusionLevel

ROOT = Path(__file__).parent.parent
ELSEWHERE = {"NOTATION.md": "reference/notation.md", "CHANGELOG.md": "reference/changelog.md", "README.md": "index.md"}
IN_NAV = {"results/README.md"}
LINK = re.compile(r"(?<!!)\]\((?P<to>[^)\s:#]+)(?P<anchor>#[^)\s]*)?\)")
FIGURE = re.compile(r"^!\[(?P<alt>[^\]]*)\]\((?:\.\./)*figures/(?P<name>[\w-]+)\.svg\)$", re.M)
log = logging.getLogger("mkdocs.hooks.fiberdp")


def on_files(files: Any, config: Any) -> Any:
    for name in ("NOTATION.md", "CHANGELOG.md"):
        files.append(File.generated(config, ELSEWHERE[name], content=(ROOT / name).read_text()))
    for path in sorted(p for p in (ROOT / "results").rglob("*") if p.is_file()):
        name = path.relative_to(ROOT).as_posix()
        shown = InclusionLevel.INCLUDED if name in IN_NAV else InclusionLevel.NOT_IN_NAV
        files.append(File.generated(config, name, abs_src_path=str(path), inclusion=shown))
    files.append(File.generated(config, "reference/command-line.md", content=command_line()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    markdown = re.sub(r"^<!-- made from the code: (\w+) -->$", lambda found: MADE[found[1]](), markdown, flags=re.M)
    markdown = re.sub(r'^( *```\w+) near="[\d.]+"$', r"\1", markdown, flags=re.M)  # how exact a test is (tests/blocks.py)
    return with_links(with_math(with_figures(markdown)), page.file.src_uri, {file.src_uri for file in files})


def with_links(markdown: str, uri: str, known: set[str]) -> str:
    """Links as they are in the repository, to where their files are in the site.  uri: of the page, in the site."""
    here = {site: repository for repository, site in ELSEWHERE.items()}
    path = here.get(uri, uri if uri.startswith("results/") else f"docs/{uri}")  # of the page, in the repository

    def placed(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(path), link["to"]))
        to = ELSEWHERE.get(target, target.removeprefix("docs/"))
        if to not in known:
            log.warning("%s links %s, which is no part of the site", path, link["to"])
        return f"]({posixpath.relpath(to, posixpath.dirname(uri) or '.')}{link['anchor'] or ''})"

    return _outside_code(markdown, lambda text: LINK.sub(placed, text))


def _outside_code(markdown: str, change: Any) -> str:
    parts = re.split(r"(^ *```.*?^ *```$|`[^`\n]+`)", markdown, flags=re.M | re.S)
    return "".join(part if i % 2 else change(part) for i, part in enumerate(parts))


def with_figures(markdown: str) -> str:
    def drawn(found: re.Match[str]) -> str:
        if found["name"] not in FIGURES:
            log.warning("no figure is called %s", found["name"])
            return ""
        svg = re.sub(r"\n\s*", " ", FIGURES[found["name"]]())
        return f'<figure class="drawn" role="img" aria-label="{found["alt"]}">{svg}<figcaption>{found["alt"]}</figcaption></figure>'

    return FIGURE.sub(drawn, markdown)


# Formulas, as Unicode with _ and ^


def with_math(markdown: str) -> str:
    markdown = re.sub(r"^```math\n(.*?)^```$", lambda found: _display(found[1]), markdown, flags=re.M | re.S)
    inline = re.compile(r"\$([^$\n]+)\$")
    return _outside_code(markdown, lambda text: inline.sub(lambda found: f'<span class="math">{formula(found[1])}</span>', text))


def _display(lines: str) -> str:
    """Equations below each other; where every line has one, the first = of each stands below that of the line before."""
    rows = [line for line in lines.splitlines() if line.strip()]
    if len(rows) > 1 and all(" = " in row for row in rows):
        cells = [row.partition(" = ") for row in rows]
        body = "".join(f"<span>{formula(left.strip())}</span><span>= {formula(right.strip())}</span>" for left, _, right in cells)
        return f'<div class="math lines aligned">{body}</div>\n'
    body = "".join(f"<span>{formula(row.strip())}</span>" for row in rows)
    return f'<div class="math lines">{body}</div>\n'


def formula(text: str) -> str:
    """
    >>> formula("g̃_{t−1} = e^x min(1, C)")
    '<i>g̃</i><sub><i>t</i>−1</sub> = <i>e</i><sup><i>x</i></sup> min(1, <i>C</i>)'
    """
    text = html.escape(text, quote=False)
    accents = "[\u0300-\u036f]*"
    text = re.sub(rf"((?<![A-Za-z&])[A-Za-z]{accents}(?![A-Za-z;])|[α-ωϕ]{accents})", r"<i>\1</i>", text)
    letter = r"(<i>[^<]*</i>|[^\s{}<])"
    for mark, tag in (("_", "sub"), (r"\^", "sup")):
        text = re.sub(mark + r"\{([^{}]*)\}", rf"<{tag}>\1</{tag}>", text)
        text = re.sub(mark + letter, rf"<{tag}>\1</{tag}>", text)
    return re.sub(r" {2,}", "&emsp;&ensp;", text)


# The command line, from its own declarations


def command_line() -> str:
    """The page of `fiberdp`, every command with its arguments and options."""
    from fiberdp.cli import app

    lines = [
        "# Command line",
        "",
        "Made from the program's own declarations. Every command has `--help`. Exit codes: 0; 2 for bad input, in one line on stderr and",
        "before anything is written; 1 for a failure (a full disk, an audit that contradicts its account, an engine that is not exact).",
        "",
    ]
    for command in app.registered_commands:
        lines += _command(str(command.name), command.callback, "##")
    for group in app.registered_groups:
        lines += [f"## fiberdp {group.name}", "", *_paragraphs(group.typer_instance.info.help), ""]
        for command in group.typer_instance.registered_commands:
            lines += _command(f"{group.name} {command.name}", command.callback, "###")
    return "\n".join(lines)


def _command(name: str, function: Any, level: str) -> list[str]:
    parameters = [Parameter.of(each) for each in inspect.signature(function, eval_str=True).parameters.values()]
    arguments = [p.name for p in parameters if p.argument]
    usage = " ".join(["fiberdp", name, *arguments, *(["[options]"] if len(arguments) < len(parameters) else [])])
    rows = [f"| `{p.name}` | {p.value} | {p.default} | {p.help} |" for p in parameters]
    table = ["| option | value | default | what |", "|---|---|---|---|", *rows] if rows else []
    return [f"{level} fiberdp {name}", "", "```text", usage, "```", "", *_paragraphs(function.__doc__), *table, ""]


@dataclass(frozen=True)
class Parameter:
    """A parameter of a command as its signature declares it: Annotated[type, typer.Option(…)] = default."""

    name: str
    argument: bool
    value: str
    default: str
    help: str

    @classmethod
    def of(cls, declared: inspect.Parameter) -> Parameter:
        kind, info = get_args(declared.annotation)
        argument = type(info).__name__ == "ArgumentInfo"
        required, flag, several = declared.default is declared.empty, kind is bool, get_origin(kind) is list
        plain = next((each for each in get_args(kind) if each is not type(None)), kind)
        option = declared.name.replace("_", "-")
        named = info.param_decls or ([info.default] if isinstance(info.default, str) else [])  # Annotated: the first may be either
        name = (info.metavar or declared.name.upper()) if argument else (named or [f"--{option}"])[0]
        if flag and not named:
            name += f"`, `--no-{option}"
        name = f"[{name}]" if argument and not required else name
        value = "" if flag or argument else {int: "whole number", float: "number"}.get(plain, "text") + (", repeated" if several else "")
        if required or declared.default is True:
            default = "required" if required else "on"
        else:
            default = "" if declared.default in (None, False, []) else f"`{declared.default}`"
        return cls(name, argument, value, default, (info.help or "").replace("|", "\\|"))


def _paragraphs(text: str | None) -> list[str]:
    return [" ".join(part.split()) + "\n" for part in (text or "").split("\n\n")]


# Tables made from the code


def parts() -> str:
    """Part, type and fields of everything that a method can be made of."""
    from fiberdp.methods import PARTS

    rows = ["| part | `type` | fields |", "|---|---|---|"]
    for part, known in PARTS.items():
        for name, cls in known.items():
            rows.append(f"| `{part}` | `{name}` | {', '.join(f'`{field.name}`' for field in fields(cls))} |")
    return "\n".join(rows)


MADE = {"parts": parts}
