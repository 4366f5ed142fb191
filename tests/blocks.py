"""The code blocks of a Markdown page, run as a reader would run them: from the top, in one folder, with one Python session.

    ```python                   runs in the page's namespace; with title="name.py" it is a file of the folder, which a later block imports
    ```console                  each line that begins with "$ " is a command: `fiberdp`, `python` and `torchrun` run; `pip install` and
                                `make` are looked up
    ```text  after python       is what the block printed

What is shown of an output must be what is printed, but for runs of blanks; "…" stands for anything, and with near="0.1" after the fence
numbers, which randomness decides, may be off by that share.  A block below the comment
`<!-- needs: NAME -->` runs where the package, or the folder of FIBERDP_DATA, of that name is there.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import os
import re
import shlex
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fiberdp
from fiberdp.cli import main

ROOT = Path(__file__).parent.parent
FENCE = re.compile(
    r"^(?:<!-- needs: (?P<name>[\w-]+) -->\n+)?(?P<indent> *)```(?P<head>[^\n`]*)\n(?P<body>.*?)^(?P=indent)```$", re.M | re.S
)
NUMBER = r"\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?"
PROGRAMS = {"python": [], "torchrun": ["-m", "torch.distributed.run"]}
QUIET = ("json", "toml", "diff", "math")
"""Languages that are read and not run."""


@dataclass(frozen=True)
class Block:
    """language: the first word after the fence, "" for none.  title: the file that the block is.

    near: how far off a number of its output may be, as a share.  needs: what it cannot run without.
    """

    language: str
    body: str
    line: int
    title: str | None = None
    near: float = 0.0
    needs: str | None = None


def blocks(text: str) -> list[Block]:
    found = []
    for fence in FENCE.finditer(text):
        language, _, rest = fence["head"].strip().partition(" ")
        title, near = re.search(r'title="([^"]+)"', rest), re.search(r'near="([\d.]+)"', rest)
        body = re.sub(rf"^{fence['indent']}", "", fence["body"], flags=re.M)
        line = 1 + text.count("\n", 0, fence.start("head"))
        found.append(Block(language, body, line, title and title[1], float(near[1]) if near else 0.0, fence["name"]))
    return found


def missing(name: str) -> bool:
    """Whether neither a package nor a data set of that name is there."""
    data = os.environ.get("FIBERDP_DATA")
    return importlib.util.find_spec(name.replace("-", "_")) is None and not (data and (Path(data) / name).is_dir())


def run_page(path: Path, folder: Path) -> list[str]:
    """Run every block of the page in `folder`; return what was left out, and why.  AssertionError where an output is not the one shown."""
    left_out, namespace, printed = [], {"__name__": "__main__"}, None
    with _in(folder):
        for block in blocks(path.read_text()):
            where = f"{path.name}:{block.line}"
            if block.needs and missing(block.needs):
                left_out.append(f"{where}: no {block.needs} here")
                printed = None
            elif block.language == "python":
                if block.title:
                    (folder / block.title).write_text(block.body)
                    importlib.invalidate_caches()
                else:
                    printed = run_python(block.body, namespace, where)
            elif block.language == "console":
                run_console(block.body, where, block.near)
            elif block.language == "text":
                if printed is not None:
                    compare(printed, block.body, where, block.near)
                    printed = None
            else:
                assert block.language in QUIET, f"{where}: ```{block.language} is nothing that is run; use one of python, console, text"
    return left_out


def run_python(code: str, namespace: dict[str, Any], where: str) -> str:
    """What the code prints."""
    told = io.StringIO()
    with contextlib.redirect_stdout(told):
        page, _, line = where.partition(":")
        exec(compile("\n" * int(line) + code, page, "exec", dont_inherit=True), namespace)
    return told.getvalue()


def run_console(body: str, where: str, near: float = 0.0) -> None:
    for shown in re.split(r"^\$ ", body, flags=re.M)[1:]:
        command, _, output = shown.partition("\n")
        line = command.partition("  #")[0]
        told = run_command(line, where)
        if output.strip():
            compare(told, output, f"{where}: {line}", near)


def run_command(line: str, where: str) -> str:
    """stdout of a command line.  A command that fails is an AssertionError with what it said."""
    words = shlex.split(line)
    if words[0] == "fiberdp":
        told, said = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(told), contextlib.redirect_stderr(said):
            code = main(words[1:])
        assert code == 0, f"{where}: {line} ended with exit code {code}: {said.getvalue()}"
        return told.getvalue()
    if words[:2] == ["pip", "install"]:
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        for wanted in words[2:]:
            name, _, extras = wanted.rstrip("]").partition("[")
            unknown = set(filter(None, extras.split(","))) - set(project["optional-dependencies"])
            assert not unknown, f"{where}: {line}"
            assert name == project["name"], f"{where}: {line}"
        return ""
    if words[0] in PROGRAMS:
        given = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(fiberdp.__file__).parent.parent), *sys.path])}
        done = subprocess.run([sys.executable, *PROGRAMS[words[0]], *words[1:]], capture_output=True, text=True, env=given)
        assert done.returncode == 0, f"{where}: {line} ended with exit code {done.returncode}: {done.stderr}"
        return done.stdout
    assert words[0] == "make", f"{where}: {words[0]} is no command that is run or looked up"
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M)
    assert {word for word in words[1:] if "=" not in word} <= set(targets), f"{where}: {line}"
    return ""


def compare(told: str, shown: str, where: str, near: float = 0.0) -> None:
    """AssertionError unless `told` is `shown`: "…" is anything, a run of blanks is one, and a number may be off by `near` of itself."""
    wrong = f"{where}: it prints\n{told}\nand not\n{shown}"
    pieces = re.findall(rf"…|\s+|{NUMBER}|[^\s…]", shown.strip()) if near else re.findall(r"…|\s+|[^\s…]+", shown.strip())
    pattern, numbers = "", []
    for i, piece in enumerate(pieces):
        if near and re.fullmatch(NUMBER, piece):
            pattern += f"({NUMBER})"
            numbers.append(piece)
        elif piece.isspace():
            beside = {pieces[i - 1], pieces[i + 1]}
            pattern += r"\s*" if "…" in beside else r"\s+"
        else:
            pattern += ".*?" if piece == "…" else re.escape(piece)
    found = re.fullmatch(pattern, told.strip(), re.S)
    assert found, wrong
    for value, figure in zip(found.groups(), numbers, strict=True):
        value, figure = (float(x.replace(",", "")) for x in (value, figure))
        assert abs(value - figure) <= near * abs(figure), wrong


@contextlib.contextmanager
def _in(folder: Path) -> Any:
    """The folder as working directory and import path, without a trace afterwards."""
    before, path, modules = Path.cwd(), list(sys.path), set(sys.modules)
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        os.chdir(before)
        sys.path[:] = path
        for name in set(sys.modules) - modules:
            if getattr(sys.modules[name], "__file__", None) and Path(str(sys.modules[name].__file__)).parent == folder:
                del sys.modules[name]
