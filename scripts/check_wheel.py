"""Install a wheel into empty environments, as a user would, and train: without extras, and with each of them.

    python scripts/check_wheel.py dist/fiberdp-0.1.0-py3-none-any.whl --extras recipes,opacus

Nothing of the checkout is seen but constraints.txt: commands run in a folder of their own.  Exit code 1, and the reason, if anything fails.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

ROOT = Path(__file__).parent.parent
ACCOUNT = "account --num-examples 1000 --batch-size 100 --steps 10 --delta 1e-4 --noise-multiplier 2"
TRAIN = "train digits --steps 20 --seed 0 --out run"


def run(folder: Path, command: list[str], *, code: int = 0) -> str:
    """stdout and stderr of a command in `folder`; SystemExit unless it ends with `code`."""
    given = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(command, cwd=folder, env=given, capture_output=True, text=True)
    if done.returncode != code:
        sys.exit(f"{' '.join(command)}\nended with exit code {done.returncode}, not {code}:\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def check(wheel: Path, extra: str, constraints: Path) -> None:
    """One environment: install, then what a first user does."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        venv.create(folder / "env", with_pip=True)
        python, program = (str(folder / "env" / "bin" / each) for each in ("python", "fiberdp"))
        wanted = f"{wheel}[{extra}]" if extra else str(wheel)
        run(folder, [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "-c", str(constraints), wanted])
        installed = time.monotonic()
        version = run(folder, [program, "--version"]).strip()
        if version != wheel.name.split("-")[1]:
            sys.exit(f"{wheel.name} says that it is {version}")
        run(folder, [program, *ACCOUNT.split()])
        run(folder, [python, "-c", "import fiberdp, sys; assert all(getattr(fiberdp, name) is not None for name in fiberdp.__all__)"])
        if extra == "recipes":
            told = run(folder, [program, *TRAIN.split()])
            if "Noise receipt" not in told:
                sys.exit(f"fiberdp {TRAIN} did not prove its noise:\n{told}")
        else:
            told = run(folder, [program, *TRAIN.split()], code=2)
            if "fiberdp[recipes]" not in told or len(told.splitlines()) != 1:
                sys.exit(f"without the extra, fiberdp {TRAIN} must name it in one line, and said:\n{told}")
    took = f"installed in {installed - started:.0f} s, ran in {time.monotonic() - installed:.0f} s"
    print(f"{wanted.rpartition('/')[2]}: {took}: {told.splitlines()[-1][:90]}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--extras", default="", help="Comma-separated; each is tried in an environment of its own, after the wheel alone.")
    parser.add_argument("--constraints", type=Path, default=ROOT / "constraints.txt")
    given = parser.parse_args()
    for extra in ("", *filter(None, given.extras.split(","))):
        check(given.wheel.resolve(), extra, given.constraints.resolve())
