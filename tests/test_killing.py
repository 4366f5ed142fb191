"""kill -9 at 30 random instants of a real run: every resumed run is bit-equal to the uninterrupted one, and none costs less."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

KILLS = 30


def test_30_kills_are_30_bit_equal_resumes_and_epsilon_is_never_below(tmp_path, capsys):
    pytest.importorskip("sklearn")
    script = Path(__file__).with_name("killing.py")
    done = subprocess.run([sys.executable, str(script), str(tmp_path), str(KILLS)], capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    runs = found["runs"]
    stages = Counter(stage for run in runs for stage in run["stages"])
    with capsys.disabled():
        kills = ", ".join(f"{n} {stage}" for stage, n in stages.most_common())
        print(f"\n{stages.total()} kills ({kills}) of {len(runs)} runs: {sum(run['equal'] for run in runs)} resumed bit for bit;")
        print(f"epsilon {found['epsilon']:.6f} uninterrupted, {min(r['epsilon'] for r in runs):.6f} at least after a kill.")
    assert len(runs) == KILLS
    assert all(run["equal"] for run in runs)
    assert all(run["epsilon"] == run["from_ledger"] == found["epsilon"] for run in runs)
    assert stages["training"] >= KILLS // 3
