"""The command line: parse, call one function, print.  No logic, and no import of torch before a command needs it."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence

import typer

from fiberdp.cli import ablate, account, audit, bench, check, compare, diagnose, recipes, report, sweep, train

# typer's own classes for "the command line is wrong"; it vendors click, so they are reached through its public subclass
_USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[1]

app = typer.Typer(
    name="fiberdp",
    help="Differentially private training for PyTorch, with noise that is proved in every run.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("recipes")(recipes.recipes)
app.command("train")(train.train)
app.command("compare")(compare.compare)
app.command("sweep")(sweep.sweep)
app.command("ablate")(ablate.ablate)
app.command("account")(account.account)
app.command("audit")(audit.audit)
app.command("bench")(bench.bench)
app.command("check")(check.check)
app.command("report")(report.report)
app.add_typer(diagnose.diagnose, name="diagnose")


@app.callback(invoke_without_command=True)
def _begin(context: typer.Context, version: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
    command = context.invoked_subcommand
    if "WORLD_SIZE" in os.environ and command not in (None, "train"):
        from fiberdp._ranks import launched

        if (started := launched()) > 1:
            if os.environ.get("RANK", "0") != "0":
                raise typer.Exit(2)
            raise ValueError(
                f"{command} in {started} processes: only train shares its work between processes that were started together; this would be "
                "done once by each. Start one, which uses all cores by itself."
            )
    if version:
        from fiberdp._version import __version__

        print(__version__)
        raise typer.Exit


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit code: 0, 2 for bad input, 1 for a failure.  Errors are one line on stderr."""
    try:
        result = app(args=list(sys.argv[1:] if arguments is None else arguments), prog_name="fiberdp", standalone_mode=False)
        _flush()
        return result if isinstance(result, int) else 0
    except _USAGE_ERROR as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # a command without its subcommand: the message is its help page
            print(error.format_message(), file=sys.stderr)  # pyright: ignore[reportAttributeAccessIssue]
            return 2
        return _fail(error.format_message(), 2)  # pyright: ignore[reportAttributeAccessIssue]
    except (ValueError, ImportError) as error:
        return _fail(str(error), 2)
    except OSError as error:
        if error.filename is None and str(error).startswith("[Errno"):  # a print that failed: the library's own errors say more
            error = _unprinted(error)
        with contextlib.suppress(OSError):
            _flush()
        nowhere = type(error) is ConnectionError  # a name that no hub answers to; a broken pipe is a subclass
        return _fail(str(error), 2 if nowhere else 1)
    except (KeyboardInterrupt, typer.Abort):
        return _fail("interrupted: the run can be continued with --resume if it has an --out.", 1)


def _flush() -> None:
    """Say now what could not be printed, on a full disk or to a reader that is gone: the interpreter's end would say it in a traceback."""
    try:
        sys.stdout.flush()
    except OSError as error:
        raise _unprinted(error) from error


def _unprinted(error: OSError) -> OSError:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return OSError(f"standard output could not be written ({error.strerror}): it is lost, files are whole. Print elsewhere.")


def _fail(message: str, code: int) -> int:
    print(f"fiberdp: {' '.join(message.split())}", file=sys.stderr)
    return code
