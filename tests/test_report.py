"""fiberdp report: what the page says, what it refuses, and that it is one file that loads nothing."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import resource
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest

import fiberdp
from fiberdp.cli import main
from fiberdp.recipes import RECIPES
from fiberdp.recipes.recipe import Published
from fiberdp.report import document, html, markdown, read, report
from fiberdp.report.beside import difference
from fiberdp.report.gain import noise_gain
from fiberdp.report.rerun import command
from fiberdp.report.svg import NAMES, drawn
from fiberdp.report.tradeoff import detection
from reporting import RESULTS, ablated, comparison, many, run_folder, searched

pytest.importorskip("matplotlib")


def said(capsys, *arguments: str) -> tuple[int, str, str]:
    code = main(arguments)
    out, err = capsys.readouterr()
    return code, out, err


@pytest.fixture(scope="module")
def everything(tmp_path_factory) -> dict:
    """A page about runs, a comparison, a search and ablations, and what `report` said of it."""
    root = tmp_path_factory.mktemp("everything")
    folders = [comparison(root / "compared"), searched(root / "swept"), ablated(root / "ablated"), run_folder(root / "alone")]
    found = report(folders, out=root / "page.html")
    return found | {"text": Path(found["html"]).read_text(), "root": root}


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "link", "br", "path", "use"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in ("path", "use"):
            assert self.open.pop() == tag


def parsed(text: str) -> list[tuple[str, dict[str, str | None]]]:
    parser = Tags()
    parser.feed(text)
    assert parser.open == []
    return parser.tags


def test_the_page_is_whole_well_formed_small_and_loads_nothing(everything):
    text = everything["text"]
    tags = parsed(text)
    assert everything["bytes"] == len(text.encode()) < 3e6
    assert not re.search(r"""(?:src|href)\s*=\s*["'](?!#)""", text)
    assert not re.search(r"url\((?!#)", text)
    assert "@import" not in text
    assert not {tag for tag, _ in tags} & {"img", "iframe", "object", "embed", "link"}
    policy = next(attrs["content"] for tag, attrs in tags if attrs.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'")
    ids = [attrs["id"] for _, attrs in tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    for _, attrs in tags:
        if (attrs.get("href") or "").startswith("#"):
            assert attrs["href"][1:] in ids


def test_receipt_and_privacy_statement_come_first(everything):
    titles = re.findall(r"<h2[^>]*>(.*?)</h2>", everything["text"])
    assert titles[:2] == ["Noise receipt", "Privacy statement"]
    assert {"Results", "Learning curves", "Noise over time", "Tuning", "Ablations", "Cost", "Run it again", "Configuration"} <= set(titles)
    levels = [int(level) for level in re.findall(r"<h([1-6])\b", everything["text"])]
    assert all(after - before <= 1 for before, after in pairwise(levels))


def test_a_single_run_states_its_record(tmp_path):
    folder = run_folder(tmp_path / "run")
    record = json.loads((folder / "record.json").read_text())
    text = html(document(read([folder])))
    r = record["receipt"]
    assert f"Measured / charged std <strong>{r['std_ratio']:.4f} ± {r['standard_error']:.4f}</strong>" in text
    assert "The noise was proved" in text
    for told in ("add-or-remove-one", "privacy loss distributions", "poisson", "6.1×10⁻⁶", "55,000", "96.67 %", "97.24 %"):
        assert told in text, told
    assert "2.7\u00a0%" in text  # at one false alarm in a hundred, epsilon 1
    assert "13.6\u00a0%" in text
    for value in ("weight_decay", record["versions"]["commit"]):
        assert value in text


def test_a_failed_receipt_is_the_first_thing_that_is_said(tmp_path):
    def fail(record):
        record["receipt"]["passed"] = False

    text = html(document(read([run_folder(tmp_path / "run", change=fail)])))
    assert "The noise was not what was charged" in text
    assert "The noise was proved" not in text


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 4.0, 8.0])
@pytest.mark.parametrize("delta", [0.0, 1e-5, 0.01])
def test_limit_of_detection_is_what_the_two_inequalities_allow(epsilon, delta):
    """FP + e^eps FN >= 1 - delta and e^eps FP + FN >= 1 - delta: at the limit one is tight, above it one is broken."""
    for false_positives in (0.0, 0.01, 0.05, 0.5, 1.0):
        found = detection(epsilon, delta, false_positives)
        missed, e = 1 - found, math.exp(epsilon)
        slack = [false_positives + e * missed - (1 - delta), e * false_positives + missed - (1 - delta)]
        assert min(slack) >= -1e-9
        assert false_positives - 1e-12 <= found <= 1
        assert found == 1 or min(slack) < 1e-9


@pytest.mark.parametrize("epsilon", [0.5, 1.0, 3.0])
def test_limit_of_detection_is_touched_and_never_passed_by_the_best_test_of_a_gaussian(epsilon):
    """One Gaussian release, sensitivity and sigma 1: its ratio test, at the exact delta; the slope is e^epsilon where they meet."""
    from scipy.stats import norm

    delta = norm.cdf(0.5 - epsilon) - math.exp(epsilon) * norm.cdf(-0.5 - epsilon)
    for rate in (0.001, 0.01, 0.05, 0.2, 0.5):
        assert norm.sf(norm.isf(rate) - 1) <= detection(epsilon, delta, rate) + 1e-12
    at = norm.sf(epsilon + 0.5)
    assert norm.sf(epsilon - 0.5) == pytest.approx(detection(epsilon, delta, at), rel=1e-12)


def test_several_runs_cost_their_sum(everything):
    assert "mnist-cnn, 7 runs: ε = 7" in everything["text"]


def test_seeded_keys_are_named_as_not_private(everything, tmp_path):
    assert "not private against who knows the seed" in everything["text"]
    secret = html(document(read([run_folder(tmp_path / "run")])))
    assert "not private against who knows the seed" not in secret


def test_ours_stand_beside_the_papers_with_the_difference_and_its_interval(tmp_path, monkeypatch):
    known = (
        Published("fiber", 1.0, 93.0, "Table 15", 0.2),
        Published("fiber", 2.0, 50.0, "Table 99"),
        Published("disk", 1.0, 92.0, "Table 15"),
    )

    made = replace(RECIPES["mnist-cnn"](), published=known)
    monkeypatch.setitem(RECIPES, "mnist-cnn", lambda: made)

    def result(value):
        def change(record):
            record["result"]["test"] = value

        return change

    folders = [run_folder(tmp_path / "a", "fiber-1", result(0.95)), run_folder(tmp_path / "b", "fiber-1", result(0.97))]
    folders.append(run_folder(tmp_path / "c", "disk-1", result(0.95)))
    (section,) = [s for s in document(read(folders)).sections if s.id == "paper"]
    (table,) = [block for block in section.blocks if type(block).__name__ == "Table"]
    cells = {row[1].text: dict(zip(table.columns, (cell.text for cell in row))) for row in table.rows}
    assert len(table.rows) == 2
    assert cells["fiber"]["published"] == "93.00 ± 0.20"
    assert cells["fiber"]["difference"] == "+3.00"
    assert cells["fiber"]["95 % interval"] == "[−9.71, 15.71]"
    assert (cells["disk"]["difference"], cells["disk"]["95 % interval"]) == ("+3.00", "one run: none")
    assert "not a pass mark" in section.blocks[0].text


def test_difference_is_students_t_of_our_runs_minus_a_constant():
    from scipy.stats import ttest_1samp

    ours = [95.1, 96.4, 95.9, 94.7]
    low, high = ttest_1samp(ours, 93.0).confidence_interval(0.95)
    assert difference(ours, 93.0)["ci95"] == pytest.approx([low - 93.0, high - 93.0])


def test_noise_gain_over_time_is_that_of_the_filter_in_the_record(tmp_path):
    for name, first, settled in (("fiber-1", 0.81, 0.846154), ("disk-1", 1.0, 0.538462), ("dp-sgd-1", 1.0, 1.0)):
        (run,) = read([run_folder(tmp_path / name, name)]).runs
        A_t, A = noise_gain(run)
        assert (A_t[0], A, A_t[-1]) == pytest.approx((first, settled, settled), abs=1e-6)


def test_noise_gain_is_not_stated_where_gains_follow_the_data(tmp_path):
    def change(record):
        record["config"]["plan"]["method"]["filter"] = {"type": "kalman_auto"}

    (run,) = read([run_folder(tmp_path / "run", change=change)]).runs
    assert noise_gain(run) is None


def test_the_command_line_that_is_shown_makes_the_same_method(tmp_path):
    """Of every committed run: parsed again as `fiberdp train` would, it gives the method in the record."""
    import shlex

    for path in sorted(RESULTS.glob("*/record.json")):
        (run,) = read([path.parent]).runs
        line, exact = command(run)
        words = shlex.split(line)
        assert words[:3] == ["fiberdp", "train", "mnist-cnn"]
        given = dict(zip(words[3::2], words[4::2]))
        assert given["--steps"] == "432"
        assert given["--epsilon"] == "1"
        assert exact
        options = {name: float(given[f"--{name}"]) for name in ("lr", "omega", "kappa", "gamma") if f"--{name}" in given}
        tuned = RECIPES["mnist-cnn"]().options.get(given["--method"], {})
        made = json.loads(json.dumps(fiberdp.method(given["--method"], **{**tuned, **options}).to_json()))
        recorded = run.record["config"]["plan"]["method"]
        assert all(recorded[part].items() <= made[part].items() for part in recorded if part != "name"), path


def test_options_that_differ_from_the_recipe_are_in_the_command_line(tmp_path):
    def change(record):
        method = record["config"]["plan"]["method"]
        method["filter"]["omega"], method["averaging"] = 0.5, {"type": "ema", "decay": 0.99}
        record["seed"], record["config"]["device"] = 7, "cuda"

    (run,) = read([run_folder(tmp_path / "run", change=change)]).runs
    line, exact = command(run)
    assert exact
    for words in ("--omega 0.5", "--averaging 0.99", "--seed 7", "--device cuda"):
        assert words in line


def test_runs_that_differ_in_an_option_are_not_averaged(tmp_path):
    def change(record):
        record["config"]["plan"]["method"]["filter"]["omega"] = 0.5

    found = read([run_folder(tmp_path / "a"), run_folder(tmp_path / "b"), run_folder(tmp_path / "c", change=change)])
    assert [(group.label, len(group.runs)) for group in found.groups] == [("fiber-plus", 2), ("fiber-plus (omega 0.5)", 1)]


def test_heat_maps_and_charts_of_searches_and_ablations_are_there(everything):
    text = everything["text"]
    for title in (
        "κ and γ, mnist-cnn",
        "κ and ω, mnist-cnn",
        "mnist-cnn: geometry at ε = 1",
        "mnist-cnn: omega at ε = 1, by ω",
        "Along learning rate",
    ):
        assert title in text, title
    assert "One run a cell" in text
    assert ">93.00<" in text  # the paper's beside ours
    assert everything["sweeps"] == 1
    assert everything["ablations"] == 2


def test_commands_of_comparisons_and_sweeps_name_no_place_of_the_machine(everything):
    text = everything["text"]
    assert "fiberdp compare mnist-cnn" in re.sub("<[^>]*>", "", text)
    assert "--methods fiber,dp-sgd" in text
    assert "fiberdp sweep mnist-cnn" in re.sub("<[^>]*>", "", text)
    assert "/secret/place" not in text


def test_every_figure_has_words_and_numbers(everything):
    figures = re.findall(r"<figure>(.*?)</figure>", everything["text"], re.DOTALL)
    assert len(figures) >= 10
    for figure in figures:
        assert re.search(r'role="img" aria-label="[^"]{20,}"', figure)
        assert "<figcaption>" in figure
        assert "<svg" in figure
    assert not set(NAMES) & set(re.findall(r"#[0-9a-f]{6}", everything["text"]))
    assert set(re.findall(r"var\(--([rs]\d|on\d|ink|muted|grid|card)\)", everything["text"])) >= {"s0", "s1", "ink", "muted", "r0", "r8"}


def test_numbers_in_a_drawing_are_not_rounded_with_its_coordinates():
    svg = drawn(lambda axes: axes.set_xticks([0.00125, 1.0], ["0.00125", "label"]), "key")
    assert "0.00125" in svg
    assert not re.search(r'd="[^"]*\d\.\d{3}', svg)


def _luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _contrast(one: str, other: str) -> float:
    low, high = sorted((_luminance(one), _luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_colours_stand_out_in_light_and_dark():
    """WCAG: 3:1 for lines, 4.5:1 for text, in heat maps too."""
    css = Path(fiberdp.__file__).with_name("report").joinpath("page.css").read_text()
    blocks = re.findall(r":root[^{]*\{([^}]*--page[^}]*)\}", css)[:3]
    assert len(blocks) == 3
    assert blocks[1].split() == blocks[2].split()
    for block in blocks[:2]:
        colour = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block))
        for i in range(8):
            assert _contrast(colour[f"s{i}"], colour["card"]) >= 3
        for i in range(9):
            assert _contrast(colour[f"r{i}"], colour[f"on{i}"]) >= 4.5, i
        for text, ground in (
            ("ink", "card"),
            ("muted", "card"),
            ("muted", "page"),
            ("accent", "card"),
            ("good", "good-bg"),
            ("warn", "warn-bg"),
        ):
            assert _contrast(colour[text], colour[ground]) >= 4.5, (text, ground)


EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'&$x^2$ **{{script}}** `<b>`"


def test_nothing_in_a_record_becomes_markup(tmp_path):
    def change(record):
        record["recipe"] = record["method"] = EVIL
        record["config"]["plan"]["method"]["filter"][EVIL] = EVIL
        record["versions"]["machine"] = record["versions"]["torch"] = EVIL
        record["receipt"]["checks"][0]["name"] = EVIL
        record["warnings"] = [EVIL]
        record["result"] |= {"metric": EVIL, "details": {EVIL: 1.0}, "samples": [{"input": EVIL, "output": EVIL, "reference": EVIL}]}

    folder = tmp_path / "run"
    found = read([run_folder(folder, change=change), run_folder(tmp_path / EVIL.replace("/", "|"), "fiber-1", change)])
    made = document(found)
    text = html(made)
    tags = parsed(text)
    assert sum(tag == "script" for tag, _ in tags) == 1
    assert not any(tag in ("img", "b") and "src" in attrs for tag, attrs in tags)
    assert not any(name.startswith("on") for _, attrs in tags for name in attrs)
    assert "&lt;script&gt;alert(1)" in text
    outside = "\n".join(line for line in markdown(made).splitlines() if not line.startswith("    "))  # indented is code
    assert not re.search(r"<(script|img|b)\b", outside)


def test_generated_text_and_further_metrics_are_shown(tmp_path):
    def change(record):
        details = {"bleu": 63.2, "rouge_l": 0.66}
        record["result"] |= {
            "metric": "token_accuracy",
            "details": details,
            "samples": [{"input": "name[A]", "output": "A is…", "reference": "A, a…"}],
        }

    text = html(document(read([run_folder(tmp_path / "run", change=change)])))
    for told in ("Generated text", "name[A]", "A is…", "bleu", "63.2", "Test token accuracy"):
        assert told in text, told


def test_markdown_and_csv_say_the_same(everything):
    root = everything["root"]
    rows = list(csv.DictReader(io.StringIO((root / "page.csv").read_text())))
    assert len(rows) == everything["runs"] == 7
    record = json.loads((root / "alone" / "record.json").read_text())
    mine = next(row for row in rows if row["run"] == "alone")
    assert float(mine["epsilon"]) == record["privacy"]["epsilon"]
    assert float(mine["test"]) == record["result"]["test"]
    assert mine["receipt_passed"] == "True"
    text = (root / "page.md").read_text()
    assert text.index("## Noise receipt") < text.index("## Privacy statement") < text.index("## Results")
    assert "| recipe | method |" in text


def test_a_spreadsheet_takes_no_cell_for_a_formula(tmp_path):
    def change(record):
        record["recipe"] = "=cmd()"

    found = report([run_folder(tmp_path / "run", change=change)])
    (row,) = csv.DictReader(io.StringIO(Path(found["csv"]).read_text()))
    assert row["recipe"] == "'=cmd()"


def test_the_page_goes_into_the_run_directory_and_replaces_itself_only(tmp_path, capsys):
    folder = run_folder(tmp_path / "run")
    code, out, err = said(capsys, "report", str(folder), "--json")
    found = json.loads(out)
    assert (code, err) == (0, "")
    assert found["html"] == str(folder / "report.html")
    assert {path.name for path in folder.iterdir()} == {"record.json", "metrics.jsonl", "report.html", "report.md", "report.csv"}
    before = (folder / "report.html").read_text()
    assert said(capsys, "report", str(folder))[0] == 0
    assert (folder / "report.html").read_text() == before
    (folder / "report.html").write_text("mine")
    code, out, err = said(capsys, "report", str(folder))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert (folder / "report.html").read_text() == "mine"


def _broken(key, value):
    def change(record):
        *path, last = key.split(".")
        for part in path:
            record = record[part]
        record.pop(last) if value is None else record.__setitem__(last, value)

    return change


BAD = {
    "missing folder": (lambda root: root / "nothing", "not there"),
    "a file": (lambda root: run_folder(root / "run") / "record.json", "a file"),
    "empty": (lambda root: (root / "empty").mkdir() or root / "empty", "no finished run"),
    "another version": (lambda root: run_folder(root / "run", change=_broken("versions.fiberdp", "7.0.0")), "7.0.0"),
    "no epsilon": (lambda root: run_folder(root / "run", change=_broken("privacy.epsilon", None)), "privacy.epsilon"),
    "epsilon is text": (lambda root: run_folder(root / "run", change=_broken("privacy.epsilon", "1")), "privacy.epsilon"),
    "epsilon is NaN": (lambda root: run_folder(root / "run", change=_broken("privacy.epsilon", math.nan)), "privacy.epsilon"),
    "receipt is a list": (lambda root: run_folder(root / "run", change=_broken("receipt", [])), "receipt"),
    "passed is a number": (lambda root: run_folder(root / "run", change=_broken("receipt.passed", 1)), "receipt.passed"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_exit_2_nothing_written(tmp_path, capsys, case):
    make, named = BAD[case]
    folder = make(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    code, out, err = said(capsys, "report", str(folder), "--out", str(tmp_path / "page.html"))
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert named in err
    assert sorted(tmp_path.rglob("*")) == before


def test_unfinished_runs_are_refused_by_name_and_left_out_of_a_folder(tmp_path, capsys):
    begun = tmp_path / "all" / "begun"
    (begun / "resume").mkdir(parents=True)
    (begun / "ledger.jsonl").write_text("")
    code, _, err = said(capsys, "report", str(begun))
    assert (code, err.count("\n"), "unfinished" in err) == (2, 1, True)
    run_folder(tmp_path / "all" / "done")
    code, _, err = said(capsys, "report", str(tmp_path / "all"))
    assert code == 0
    assert "1 unfinished run left out" in err
    assert not list(begun.glob("report*"))


def test_a_place_for_several_runs_must_be_given_and_end_in_html(tmp_path, capsys):
    one, two = run_folder(tmp_path / "a"), run_folder(tmp_path / "b")
    for arguments, named in (
        ([], "--out"),
        (["--out", str(tmp_path / "page.txt")], ".html"),
        (["--out", str(one / "record.json" / "p.html")], "file"),
    ):
        code, out, err = said(capsys, "report", str(one), str(two), *arguments)
        assert (code, out, err.count("\n"), named in err) == (2, "", 1, True)


def test_a_file_beside_the_page_is_not_overwritten(tmp_path, capsys):
    folder = run_folder(tmp_path / "a")
    (tmp_path / "notes.md").write_text("mine")
    code, _, err = said(capsys, "report", str(folder), "--out", str(tmp_path / "notes.html"))
    assert (code, err.count("\n")) == (2, 1)
    assert (tmp_path / "notes.md").read_text() == "mine"
    assert not (tmp_path / "notes.html").exists()


def test_mixed_versions_are_named(tmp_path):
    folders = [run_folder(tmp_path / "a"), run_folder(tmp_path / "b", change=_broken("versions.fiberdp", "0.9.3"))]
    assert any("0.9.3" in warning for warning in report(folders, out=tmp_path / "p.html")["warnings"])


@pytest.mark.parametrize(("missing", "more"), [("matplotlib", []), ("tensorboard", ["--tensorboard"])])
def test_a_missing_extra_is_named_with_how_to_install_it(tmp_path, capsys, monkeypatch, missing, more):
    folder = run_folder(tmp_path / "run")
    monkeypatch.setitem(sys.modules, missing, None)
    code, out, err = said(capsys, "report", str(folder), *more)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "pip install fiberdp[recipes]" in err
    assert not (folder / "report.html").exists()


def test_event_files_hold_the_metrics(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = run_folder(tmp_path / "run")
    found = report([folder], tensorboard=True)
    found = report([folder], tensorboard=True)  # again: replaced, not added to
    (kept,) = Path(found["tensorboard"]).iterdir()
    read_back = EventAccumulator(str(kept)).Reload()
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [(e.step, e.value) for e in read_back.Scalars("heldout/accuracy")] == [
        (line["step"], pytest.approx(line["heldout"]["accuracy"])) for line in lines
    ]
    assert {"epsilon", "clamp_mass", "result/test"} <= set(read_back.Tags()["scalars"])
    (Path(found["tensorboard"]) / "mine.txt").write_text("")
    with pytest.raises(ValueError, match=r"mine\.txt"):
        report([folder], tensorboard=True)


def test_a_hundred_runs_take_less_than_ten_seconds_and_three_megabytes(tmp_path):
    many(tmp_path / "runs", 100)
    code = "import sys; from fiberdp.cli import main; sys.exit(main(sys.argv[1:]))"
    line = [sys.executable, "-c", code, "report", str(tmp_path / "runs"), "--out", str(tmp_path / "page.html"), "--json"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(line, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert found["runs"] == 100
    assert found["bytes"] < 3e6
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 10  # of a processor, so that a busy machine is no excuse


def test_a_record_of_a_run_of_today_is_read(tmp_path):
    """The contract with what `fiberdp train` writes now, not with committed records alone."""
    pytest.importorskip("sklearn")
    record = fiberdp.fit("digits", steps=6, seed=0, out=tmp_path / "run")
    found = read([tmp_path / "run"])
    assert found.runs[0].record["privacy"]["epsilon"] == record["privacy"]["epsilon"]
    line, exact = command(found.runs[0])
    assert exact
    assert "--data" not in line
    assert "Learning curves" in html(document(found))


def test_runs_of_an_ablation_stand_in_its_own_section_alone(tmp_path):
    """They are many, at rates of their own: beside the runs of a comparison they would mislead.  Without others they are the results."""
    (tmp_path / "a" / "runs").mkdir(parents=True)
    cell = {"options": {"omega": 0.9}, "method": "fiber", "n": 1, "mean": 0.9, "std": None, "ci95": None, "accuracies": [0.9]}
    ablation = {"recipe": "mnist-cnn", "name": "omega", "epsilon": 1.0, "axes": ["omega"], "cells": [cell], "paper": [], "note": ""}
    (tmp_path / "a" / "ablation.json").write_text(json.dumps(ablation))
    run_folder(tmp_path / "a" / "runs" / "omega0.9-seed0")
    alone = read([tmp_path / "a"])
    assert [len(group.runs) for group in alone.groups] == [1]
    run_folder(tmp_path / "b")
    both = read([tmp_path / "a", tmp_path / "b"])
    assert len(both.runs) == 2  # the receipt tells of all
    assert [run.name for group in both.groups for run in group.runs] == ["b"]
