"""The report in a browser: it opens from disk without a complaint, its tables sort, and it can be read and used by everybody."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from reporting import ablated, comparison, run_folder, searched

pytest.importorskip("matplotlib")
playwright = pytest.importorskip("playwright.sync_api", reason="playwright drives the browser: pip install fiberdp[dev]")
axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-core looks for faults: pip install fiberdp[dev]")
CHROMIUM = next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here: apt-get install chromium")
WIDE, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}


@pytest.fixture(scope="module")
def page_file(tmp_path_factory) -> Path:
    from fiberdp.report import report

    root = tmp_path_factory.mktemp("pages")

    def texts(record):
        record["result"] |= {"details": {"bleu": 63.2}, "samples": [{"input": "name[A] " * 30, "output": "x" * 300, "reference": "A"}]}

    folders = [comparison(root / "compared"), searched(root / "swept"), ablated(root / "ablated"), run_folder(root / "alone", change=texts)]
    return Path(report(folders, out=root / "page.html")["html"])


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as started:
        running = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield running
        running.close()


class Opened:
    """The page, with what it complained about and what it asked for."""

    def __init__(self, browser, path: Path, size: dict, scheme: str) -> None:
        self.page = browser.new_page(viewport=size, color_scheme=scheme, reduced_motion="reduce")
        self.said: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(path.as_uri())


@pytest.fixture(scope="module", params=[("light", "wide"), ("light", "phone"), ("dark", "wide"), ("dark", "phone")], ids="-".join)
def opened(request, browser, page_file):
    scheme, size = request.param
    found = Opened(browser, page_file, WIDE if size == "wide" else PHONE, scheme)
    found.scheme, found.wide = scheme, size == "wide"
    yield found
    found.page.close()


@pytest.fixture
def page(browser, page_file):
    found = Opened(browser, page_file, WIDE, "light").page
    yield found
    found.close()


def test_it_opens_from_disk_without_a_complaint_and_asks_for_nothing(opened, page_file):
    assert opened.said == []
    assert opened.asked == [page_file.as_uri()]


def test_every_figure_is_there_and_has_a_size(opened):
    boxes = opened.page.eval_on_selector_all(
        "figure .drawing > svg", "all => all.map(e => [e.getBoundingClientRect().width, e.getBBox().height])"
    )
    assert len(boxes) == opened.page.locator("figure").count() >= 10
    assert all(width > 200 and height > 50 for width, height in boxes)


def test_nothing_is_wider_than_the_screen(opened):
    assert opened.page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    wider = """all => all.filter(e => e.getBoundingClientRect().right > window.innerWidth + 1 && !e.closest(".scroll, pre, nav, svg"))
        .map(e => e.outerHTML)"""
    assert opened.page.eval_on_selector_all("body *", wider) == []


def test_no_label_of_a_figure_lies_on_another_or_is_cut(opened):
    overlapping = """all => all.flatMap(svg => {
        const outer = svg.getBoundingClientRect();
        const texts = [...svg.querySelectorAll("text")].map(e => [e.textContent, e.getBoundingClientRect()]);
        return texts.flatMap(([name, a], i) => [
            ...(a.left < outer.left - 2 || a.right > outer.right + 2 || a.bottom > outer.bottom + 2 ? ["cut: " + name] : []),
            ...texts.slice(i + 1).filter(([, b]) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1
                && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 3).map(([other]) => name + " on " + other)]);
    })"""
    assert opened.page.eval_on_selector_all("figure .drawing > svg", overlapping) == []


def test_colours_follow_the_system(opened):
    body = opened.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (body == "rgb(15, 19, 23)") == (opened.scheme == "dark")
    lines = opened.page.eval_on_selector_all(".drawing path[style*='--s0']", "all => all.map(e => getComputedStyle(e).stroke)")
    assert set(lines) & {"rgb(108, 180, 255)" if opened.scheme == "dark" else "rgb(11, 98, 176)"}


def test_axe_finds_no_serious_fault(opened):
    if opened.wide:  # what is folded has the same parts, and is looked at in both colours
        opened.page.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    found = axe.Axe().run(opened.page).response
    serious = [(v["id"], v["nodes"][0]["html"][:200]) for v in found["violations"] if v["impact"] in ("serious", "critical")]
    assert serious == []
    assert len(found["passes"]) > 20  # it did look


def column(table, index: int) -> list[str]:
    return table.locator("tbody tr").evaluate_all(f"rows => rows.map(row => row.cells[{index}].textContent)")


CLICKS = """tables => tables.flatMap(table => [...table.tHead.rows[0].cells].flatMap((head, j, heads) =>
    ["ascending", "descending"].map(direction => {
        head.querySelector("button").click();
        const cells = [...table.tBodies[0].rows].map(row => row.cells[j]);
        return {direction, column: j, sorts: heads.map(e => e.getAttribute("aria-sort")), numeric: head.classList.contains("number"),
            values: cells.filter(c => "v" in c.dataset).map(c => Number(c.dataset.v)), texts: cells.map(c => c.textContent)};
    })))"""


def test_every_table_sorts_both_ways_by_every_column(page):
    """Every cell of a column of numbers that is not empty has its number; empty ones come last both ways."""
    clicked = page.eval_on_selector_all("table[data-sortable]", CLICKS)
    assert sum(click["numeric"] for click in clicked) > 60
    for click in clicked:
        down = click["direction"] == "descending"
        assert click["sorts"] == [click["direction"] if k == click["column"] else "none" for k in range(len(click["sorts"]))]
        if click["numeric"]:
            assert click["values"] == sorted(click["values"], reverse=down)
            assert len(click["values"]) == sum(text not in ("–", "") for text in click["texts"])
            assert all(text in ("–", "") for text in click["texts"][len(click["values"]) :])  # empty ones last


def test_numbers_sort_as_numbers_not_as_text(page):
    """-0.9 before -0.1 before 2 before 10, whatever the minus sign looks like; an en dash stays last both ways."""
    page.evaluate(
        """() => { const table = document.querySelector("#cost > .scroll table");
        const column = [...table.tHead.rows[0].cells].findIndex(e => e.classList.contains("number"));
        const values = [["10", 10], ["–", null], ["−0.9", -0.9], ["2", 2], ["−0.1", -0.1]];
        const row = table.tBodies[0].rows[0];
        table.tBodies[0].replaceChildren(...values.map(([text, v]) => { const made = row.cloneNode(true); const cell = made.cells[column];
            cell.textContent = text; if (v === null) delete cell.dataset.v; else cell.dataset.v = v; return made; }));
        table.id = "made"; table.tHead.rows[0].cells[column].id = "head"; table.dataset.column = column; }"""
    )
    table = page.locator("#made")
    index = int(table.get_attribute("data-column"))
    page.locator("#head button").click()
    assert column(table, index) == ["−0.9", "−0.1", "2", "10", "–"]
    page.locator("#head button").click()
    assert column(table, index) == ["10", "2", "−0.1", "−0.9", "–"]


def test_a_table_sorts_by_keyboard(page):
    button = page.locator("#cost > .scroll table thead th.number button").first
    button.focus()
    for direction in ("ascending", "descending"):
        page.keyboard.press("Enter")
        assert button.evaluate("b => b.closest('th').getAttribute('aria-sort')") == direction
    assert button.evaluate("b => b === document.activeElement")
    page.keyboard.press("Space")
    assert button.evaluate("b => b.closest('th').getAttribute('aria-sort')") == "ascending"


def test_the_first_tab_skips_to_the_report_and_the_focus_is_seen(page):
    page.keyboard.press("Tab")
    skip = page.locator(".skip")
    assert skip.evaluate("e => e === document.activeElement && e.getBoundingClientRect().left >= 0")
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"


def test_the_button_turns_light_into_dark_and_back(page):
    ground = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(ground)
    page.locator("#theme").focus()
    page.keyboard.press("Enter")
    assert page.evaluate(ground) == "rgb(15, 19, 23)"
    page.keyboard.press("Enter")
    assert page.evaluate(ground) == light
