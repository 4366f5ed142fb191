"""The migration example: two files that differ in three lines, of which the second trains with FiBeR and reports the same epsilon."""

from __future__ import annotations

import difflib
import importlib
from pathlib import Path

import pytest

opacus = pytest.importorskip("opacus", reason="opacus is not installed (pip install fiberdp[opacus])")
pytest.importorskip("sklearn", reason="scikit-learn is not installed (pip install fiberdp[recipes])")

FOLDER = Path(__file__).parent.parent / "examples" / "opacus_mnist"
PAGE = FOLDER.parent.parent / "docs" / "from-opacus.md"
SHORT = ["--epochs", "3", "--batch-size", "256", "--epsilon", "3"]


def changed():
    before, after = ((FOLDER / f"{name}.py").read_text().splitlines() for name in ("before", "after"))
    return [line[2:] for line in difflib.ndiff(before, after) if line.startswith("+ ")], [
        line[2:] for line in difflib.ndiff(before, after) if line.startswith("- ")
    ]


def test_three_lines_are_changed_and_the_page_shows_them():
    added, removed = changed()
    assert (len(added), len(removed)) == (3, 2)  # one is an import
    page = PAGE.read_text()
    for line in added:
        assert line.strip() in page, line


@pytest.fixture
def main(monkeypatch, request):
    """main of the file; on scikit-learn's digits, whatever data there are here."""
    monkeypatch.delenv("FIBERDP_DATA", raising=False)
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module(request.param).main


@pytest.mark.parametrize("main", ["before", "after"], indirect=True)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_both_train(main, capsys):
    accuracy, epsilon = main(SHORT)
    assert accuracy > 0.2  # ten classes; three epochs
    assert 2.97 < epsilon <= 3.0
    assert capsys.readouterr().out.startswith(f"accuracy {accuracy:.4f}, epsilon {epsilon:.4f} at delta 1e-05")


@pytest.mark.parametrize("main", ["after"], indirect=True)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_opacus_reports_for_fiber_what_its_accountant_says_of_the_plan(main, monkeypatch):
    from opacus.accountants import RDPAccountant

    import fiberdp.integrations.opacus as ours

    made = []

    def watched(**options):
        made.append((options, right(**options)))
        return made[0][1]

    right = ours.make_private_with_epsilon
    monkeypatch.setattr("after.make_private_with_epsilon", watched)
    _, reported = main(SHORT)
    optimizer, plan = made[0][1][1], made[0][1][1].plan
    assert plan.method.name == "fiber"
    assert optimizer.receipt.passed
    accountant = RDPAccountant()
    accountant.history = [(plan.noise_multiplier, plan.batch_size / plan.num_examples, plan.steps)]
    assert reported == accountant.get_epsilon(1e-5)
    assert reported == pytest.approx(optimizer.epsilon, rel=1e-4)
    assert len(optimizer.ledger) == plan.steps == 18
