"""Peak memory of a training step, each (model, variant) in a process of its own.

peak_mib = the largest resident memory during three steps - resident memory after the imports and before the model is built.  So it counts
the model, the data (four batches for ours, one for the others), the optimizer's state and everything a step needs; for `nonprivate` a
step has torch's fused AdamW, as a plain training step has.  The set-up (a noise receipt, a first step) comes before the three steps, and
its peak does not count.

All processes run with glibc's own settings, not with those of `fiberdp train`: there a freed block stays in the process, and the peak would
count what was, not what is.  The mmap threshold is fixed, since glibc raises it as it goes and then behaves like the latter.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path

from fiberdp.record import forget_peak, memory_mib

STEPS = 3
SETTINGS = {"MALLOC_MMAP_THRESHOLD_": str(2**17), "MALLOC_TRIM_THRESHOLD_": str(2**17)}
RESET = Path("/proc/self/clear_refs")


def peak_mib(model: str, variant: str, batch_size: int) -> float | None:
    """The peak of one variant, MiB; None where it cannot be measured (it needs Linux's /proc, and a variant that runs)."""
    if not RESET.exists():
        return None
    from torch import get_num_threads

    return in_a_child("fiberdp.bench.memory", model, variant, str(batch_size), str(get_num_threads()))


def in_a_child(module: str, *arguments: str) -> float | None:
    """What `python -m module arguments` prints, with glibc's own settings.  RuntimeError, in one line, if it fails."""
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments], capture_output=True, text=True, check=False, env=os.environ | SETTINGS
    )
    if done.returncode:
        raise RuntimeError(
            f"memory of {' '.join(arguments)}: {' '.join(done.stderr.split()[-40:]) or f'ended with code {done.returncode}'}"
        )
    return json.loads(done.stdout.splitlines()[-1])


def measured(model: str, variant: str, batch_size: int) -> float | None:
    """What the child does.  Packages, the compiler among them, are loaded before the count starts."""
    import torch

    from fiberdp.bench.models import MODELS
    from fiberdp.bench.variants import VARIANTS, Unavailable
    from fiberdp.optim.fused import fused

    import_module("fiberdp.bench.ours")
    with suppress(ImportError):
        import_module("opacus")
    compiled = fused(_add_one)
    if compiled is not None:
        compiled(torch.zeros(8))
    idle = memory_mib("VmRSS")
    try:
        ready = VARIANTS[variant](MODELS[model], batch_size)
    except Unavailable:
        return None
    ready.train()
    forget_peak()  # the largest so far becomes what it is now; getrusage cannot do that, and counts the parent's too
    for _step in range(STEPS):
        ready.train()
    return memory_mib("VmHWM") - idle


def _add_one(x) -> None:
    x.add_(1.0)


if __name__ == "__main__":
    import torch

    torch.set_num_threads(int(sys.argv[4]))
    sys.stdout.write(json.dumps(measured(sys.argv[1], sys.argv[2], int(sys.argv[3]))) + "\n")
