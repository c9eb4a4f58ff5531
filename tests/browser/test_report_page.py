"""A report's page in headless Chromium: what it shows is what the rows say, and it needs nothing but itself."""

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from chromium_pages import check_small_and_dark, watched_pages
from playwright.sync_api import Browser, Page, expect
from written_sweeps import graded_table, planned_rows, sweep_record, timed_table

from mbd_core.batch.parts import Part, cut
from mbd_core.evaluation.report.summary import write_summary
from mbd_core.evaluation.sweep.folder import SweepFolder, read_report
from mbd_core.evaluation.sweep.grading.graded_rows import GRADED_COLUMNS

EVIL = "</script><img src=x onerror=document.title='evil'><b>'\"&"
PIECES = ["Tom", " has", "\n", EVIL, "12", ""]
STEPS = [1, 2, 2, 4, 1, 4]
MODELS = ("first", f"second {EVIL[9:]}".replace("/", ""))


def sample(row: dict[str, Any]) -> dict[str, Any]:
    """What becomes of a planned row: its number decides whether it is right, and what it holds of its decoding."""
    number = row["sample"]
    replay = {"pieces": PIECES, "steps": STEPS} if number % 4 != 3 else {"seconds": None if number % 8 == 3 else 1.5}
    return {
        **row,
        **replay,
        "input": json.dumps([{"role": "user", "content": f"{EVIL} {row['problem_id']}?"}]),
        "text": f"answer {number} {EVIL}",
        "correct": number % 5 > 1,
        "reason": None if number % 5 > 1 else EVIL,
        "num_tokens": len(PIECES),
        "num_forwards": 5,
        "finish_reason": "length" if number % 7 == 0 else "stop",
    }


def part_table(part: Part) -> pa.Table:
    return pa.Table.from_pylist([sample(row) for row in graded_table(part).to_pylist()], schema=GRADED_COLUMNS)


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "sweep"
    rows = planned_rows(models=MODELS, tasks=("a", "b"), problems=25)
    parts = cut(rows, rows_per_part=20)
    with SweepFolder.claim(path, sweep_record(rows, parts, num_cases=1)) as folder:
        for part in parts:
            folder.write_part(part.number, part_table(part))
        folder.write_case(0, timed_table(rows[0]))
        write_summary(folder)
    return path


@pytest.fixture
def page(browser: Browser, sweep: Path) -> Iterator[Page]:
    with watched_pages(browser) as pages:
        yield pages.open((sweep / "report.html").as_uri())


def cells(page: Page, section: str) -> list[list[str]]:
    """The texts of the rows of the table under a heading."""
    rows = f"section:has(> h2:text-is('{section}')) table tr"
    return page.eval_on_selector_all(rows, "all => all.map((r) => [...r.cells].map((c) => c.textContent))")


def test_the_tables_are_those_of_the_markdown(page: Page, sweep: Path) -> None:
    lines = [line for line in (sweep / "report.md").read_text().splitlines() if line.startswith("|")]
    expected = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if not line.startswith("|---")]
    found = page.eval_on_selector_all("table tr", "all => all.map((r) => [...r.cells].map((c) => c.textContent))")
    assert [row for row in found if len(row) > 1] == [row for row in expected if not row[0].startswith("*")]
    assert [row[0] for row in found if len(row) == 1] == [row[0].strip("*") for row in expected if row[0][0] == "*"]
    assert "Batch-1 TPS (per request, end to end, tok/s)" in cells(page, "Speed")[0]
    assert "TPS gain, predicted and measured" in page.locator("section h3").all_inner_texts()
    assert "Difference [95 %]" in cells(page, "Differences in accuracy")[0]
    papers = page.locator("section:has(> h2:text('Beside the papers'))")
    assert "LLaDA2.0-mini" not in papers.inner_text() and papers.locator("details li").count() == 9
    papers.locator("summary").click()
    assert "LLaDA2.0-mini" in papers.inner_text()
    assert "y_max" in page.inner_text("section:has(> h2:text('AUP'))")


def test_no_table_is_cut_on_a_small_laptop(browser: Browser, sweep: Path) -> None:
    with watched_pages(browser) as pages:
        page = pages.open((sweep / "report.html").as_uri(), viewport={"width": 1222, "height": 900})
        cut = "all => all.filter((e) => e.scrollWidth > e.clientWidth).map((e) => e.ariaLabel)"
        assert page.locator(".wide").count() > 5 and page.eval_on_selector_all(".wide", cut) == []


def test_every_configuration_is_a_point_with_its_interval_and_the_front_is_ringed(page: Page, sweep: Path) -> None:
    rows = read_report(sweep)["rows"]
    for label in ("A", "B"):
        of_task = [row for row in rows if row["task"] == label.lower()]
        points = page.eval_on_selector_all(
            f'.chart[data-task="{label}"] .point',
            "all => all.map((e) => [e.querySelector('title').textContent, e.querySelector('.ring') !== null])",
        )
        assert len(points) == len(of_task) == 4
        for row in of_task:
            beaten = any(
                (other["tpf"], other["accuracy"]) != (row["tpf"], row["accuracy"])
                and other["tpf"] >= row["tpf"]
                and other["accuracy"] >= row["accuracy"]
                for other in of_task
            )
            text = f"accuracy {row['accuracy']:.2f} % [{row['accuracy_low']:.1f}, {row['accuracy_high']:.1f}]"
            matches = [ring for title, ring in points if text in title and f"TPF {row['tpf']:.2f}" in title]
            assert matches and (not beaten) in matches
        assert page.locator(f'.chart[data-task="{label}"] .bars').count() == 4
    page.locator(".point circle, .point rect").last.click()
    assert page.input_value("#configuration") == page.locator(".point").last.get_attribute("data-configuration")


def test_samples_are_chosen_by_configuration_and_outcome(page: Page, sweep: Path) -> None:
    assert "160 of 200 samples are here: of each configuration on each task at most 20" in page.inner_text("#note")
    rows = read_report(sweep)["rows"]
    options = page.locator("#configuration option").all_inner_texts()
    assert len(options) == len(rows) == 8
    for number, row in enumerate(rows):
        assert row["model"] in options[number] and "20 of 25 shown" in options[number]
        page.select_option("#configuration", str(number))
        marks = page.locator("#list button").all_inner_texts()
        assert len(marks) == 20 and marks == sorted(marks, key=lambda text: not text.startswith("✗ wrong"))
        wrong = round(25 * (1 - row["accuracy"] / 100))
        assert sum(text.startswith("✗ wrong") for text in marks) == wrong
        page.select_option("#outcome", "wrong")
        assert page.locator("#list button").count() == wrong
        page.select_option("#outcome", "all")
    page.select_option("#outcome", "error")
    assert page.inner_text("#list") == "None of the shown samples." and page.inner_text("#sample") == ""


def test_a_sample_shows_its_prompt_text_grade_and_reason(page: Page) -> None:
    page.locator("#list button.wrong").nth(1).click()
    assert page.locator('#list [aria-pressed="true"]').count() == 1
    problem = page.inner_text("#sample h3 >> nth=0")
    assert page.inner_text("#sample .grade") == "✗ wrong" and EVIL in page.inner_text("#sample p >> nth=0")
    assert page.inner_text("#sample pre.prompt") == f"{EVIL} {problem}?"
    assert page.inner_text("#sample pre.text").startswith("answer ")
    facts = page.inner_text("#sample dl")
    assert "reference\n4" in facts and "TPF\n1.20" in facts


def test_the_replay_shows_each_token_from_the_forward_that_accepted_it(page: Page) -> None:
    assert page.locator(".piece").count() == len(PIECES)
    for at in range(5, -1, -1):
        states = page.eval_on_selector_all(".piece", "all => all.map((e) => e.className.split(' ')[1])")
        expected = ["masked" if step > at else "fresh" if step == at else "seen" for step in STEPS]
        assert states == expected
        texts = page.locator(".piece").all_text_contents()
        for text, piece, state in zip(texts, PIECES, states, strict=True):
            assert (state == "masked") == ("░" in text or (piece == "\n" and text == "░\n"))
            assert state == "masked" or text == (piece.replace("\n", "↵\n") or "∅")
        told = page.inner_text(".told")
        assert f"{sum(step <= at for step in STEPS)} of {len(PIECES)} are there" in told
        assert at == 0 or f"Forward {at} of 5 accepts" in told
        page.focus(".replay")
        page.keyboard.press("ArrowLeft")
    page.keyboard.press("End")
    assert page.input_value(".replay input") == "5"
    page.keyboard.press("Home")
    assert page.is_disabled("[aria-label^='To the start']")
    page.fill(".replay input", "2")
    assert "Forward 2 of 5 accepts 2 tokens" in page.inner_text(".told")
    page.click("[aria-label^='One forward on']")
    assert "accepts no token" in page.inner_text(".told")
    page.keyboard.press("Home")
    page.click(".replay .main")
    page.wait_for_selector(".told:has-text('Forward 5 of 5')")
    assert page.inner_text(".replay .main") == "Replay"


def test_a_token_that_was_overwritten_is_replayed_as_it_stood(page: Page) -> None:
    edits = [
        {"index": 0, "step": 1, "piece": EVIL},
        {"index": 2, "step": 2, "piece": "x"},
        {"index": 0, "step": 2, "piece": "Ann"},
    ]
    page.evaluate(
        "s => byId('sample').replaceChildren(replayOf(s))",
        {"pieces": ["Tom", " has", "3"], "steps": [4, 1, 3], "edits": edits, "num_forwards": 4},
    )
    page.focus(".replay")
    page.keyboard.press("Home")
    expected = [
        (["masked"] * 3, ["░" * 3, "░" * 4, "░"], "Before forward 1 of 4. 0 of 3 are there."),
        (["fresh", "fresh", "masked"], [EVIL, " has", "░"], "accepts 2 tokens. 2 of 3 are there."),
        (["edited", "seen", "fresh"], ["Ann", " has", "x"], "accepts 1 token and changes 1 token. 3 of 3"),
        (["seen", "seen", "edited"], ["Ann", " has", "3"], "accepts no token of the answer and changes 1 token."),
        (
            ["edited", "seen", "seen"],
            ["Tom", " has", "3"],
            "Forward 4 of 4 accepts no token of the answer and",
        ),
    ]
    for states, texts, told in expected:
        pieces = page.locator(".piece")
        assert pieces.evaluate_all("all => all.map((e) => e.className.split(' ')[1])") == states
        assert pieces.all_text_contents() == texts and told in page.inner_text(".told")
        page.keyboard.press("ArrowRight")
    first = page.get_attribute(".piece >> nth=0", "title")
    assert first == "accepted by forward 1, changed by forward 2, changed by forward 4"


def test_what_a_replay_does_not_show_of_its_method_is_said(page: Page) -> None:
    remarks = "c => remarksOf(c).map((e) => e.textContent)"
    assert page.evaluate(remarks, {"t2t": {"tau": 0.5}, "soft": None, "canvas": {"branches": None}}) == []
    assert "mixture" in page.evaluate(remarks, {"soft": {}})[0]
    assert "the branch that won" in page.evaluate(remarks, {"canvas": {"branches": {"tau_sync": 8}}})[0]


def test_a_sample_without_a_step_map_says_why(page: Page) -> None:
    page.select_option("#configuration", "2")
    missing, reasons = page.locator(".replay-missing"), set()
    for button in page.locator("#list button").all():
        button.click()
        if missing.count():
            assert page.locator(".replay").count() == 0
            reasons.add((missing.inner_text()[:21], "seconds, network included" in page.inner_text("#sample dl")))
    assert reasons == {("An endpoint answered:", True), ("An earlier version of", False)}


def test_a_value_that_is_not_known_is_not_shown(page: Page) -> None:
    show = (
        "s => [...facts({problem_id: 'p', correct: true, text: '4', seed: 0, ...s}, data.configurations[0]).children]"
    )
    show += ".map((e) => e.textContent)"
    assert page.evaluate(show, {})[2:] == ["seed", "0"]
    assert page.evaluate(show, {"finish_reason": "length"})[2:4] == ["tokens", "cut at the limit"]
    counts = {"num_tokens": 6, "num_forwards": 5}
    assert page.evaluate(show, counts)[2:-2] == ["tokens", "6", "forwards (NFE)", "5", "TPF", "1.20"]
    whole = page.evaluate(show, {**counts, "num_store_forwards": 1, "num_prefill_forwards": 0})
    assert whole[5] == "5, of them store-only 1, prefill 0"


def test_nothing_of_a_text_is_markup(page: Page) -> None:
    for number in range(8):
        page.select_option("#configuration", str(number))
    assert page.locator("img, b").count() == 0 and page.locator("script").count() == 2
    assert page.title() == page.inner_text("h1") == f"Evaluation sweep: {', '.join(MODELS)} on A, B"


def test_everything_is_reached_and_named_without_a_mouse(page: Page) -> None:
    assert page.locator("h1").count() == 1
    levels = page.eval_on_selector_all("h1, h2, h3", "all => all.map((e) => Number(e.tagName[1]))")
    assert levels[0] == 1 and all(after - before <= 1 for before, after in pairwise(levels))
    assert page.locator("th:not([scope])").count() == 0 and page.locator("table:not(:has(caption))").count() == 0
    assert page.locator("tbody tr:not(:has(th))").count() == 0
    unnamed = (
        """all => all.filter((e) => !(e.getAttribute("aria-label") || e.textContent.trim() || e.labels?.length))"""
    )
    assert (
        page.eval_on_selector_all(
            "button, select, input, a, [tabindex]", f"{unnamed.replace('all =>', 'all => (', 1)}).length"
        )
        == 0
    )
    page.focus("#configuration")
    seen = set()
    for _ in range(40):
        seen.add(
            page.evaluate(
                "document.activeElement.id || document.activeElement.className || document.activeElement.title"
            )
        )
        page.keyboard.press("Tab")
    assert {"configuration", "outcome", "replay", "pieces", "main"} <= seen


def test_the_first_table_and_the_curves_are_as_wide_as_a_screen_of_1280_points(browser: Browser, sweep: Path) -> None:
    with watched_pages(browser) as pages:
        page = pages.open((sweep / "report.html").as_uri(), viewport={"width": 1280, "height": 900})
        assert page.evaluate("(t => t.scrollWidth <= t.clientWidth)(document.querySelector('#results .wide'))")
        expect(page.locator(".chart:not(:has(svg))")).to_have_count(0)  # the page forbids `wait_for_function`'s eval
        widths = page.evaluate(
            "[document.querySelector('#figures').clientWidth, "
            "...[...document.querySelectorAll('.chart')].map((c) => c.querySelector('svg').clientWidth)]"
        )
        assert sum(widths[1:]) > 0.97 * widths[0]
        page.click("#results a")
        assert page.evaluate("location.hash") == "#what-the-numbers-are"


def test_it_is_readable_in_the_dark_and_on_a_small_screen(browser: Browser, sweep: Path) -> None:
    check_small_and_dark(browser, (sweep / "report.html").as_uri())
