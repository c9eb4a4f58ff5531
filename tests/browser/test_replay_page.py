"""The replay page in headless Chromium: what it draws is what the trace says, and it needs nothing but itself."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from chromium_pages import check_small_and_dark, watched_pages
from playwright.sync_api import Browser, Page
from simulated_trace import EOS, SIZE, simulate

from mbd_core.decoding.answers.slots import DraftVerdict
from mbd_core.decoding.blocks.config import T2T
from mbd_core.trace.recorder import TraceRecorder
from mbd_core.trace.replay import ReplayFrame, ReplaySide, ReplaySlot, caption, replay_side, write_replay
from mbd_core.trace.traced_run import traced_run

EVIL = "</script><b>'\"&"
TEXTS = {token: f"w{token}" for token in range(2, 40)} | {EOS: "<eos>", 5: EVIL, 6: "\n", 7: " "}


def side(trace: TraceRecorder, name: str) -> ReplaySide:
    (request,) = traced_run(trace.table(), name=name).requests
    return replay_side(request, name=name, eos_token_ids=(EOS,))


SIDES = {"SingleBD": 1, "MultiBD": 4}


@pytest.fixture(scope="module")
def sides() -> list[ReplaySide]:
    return [side(simulate(buffer_size), name) for name, buffer_size in SIDES.items()]


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    with watched_pages(browser) as pages:
        yield pages.open("about:blank")


def show(page: Page, sides: list[ReplaySide], folder: Path) -> None:
    write_replay(sides, folder / "replay.html", title="a & b", note="What is 2 < 3?", texts=TEXTS)
    page.goto((folder / "replay.html").as_uri())


def counter(page: Page, number: int, name: str) -> str:
    return page.inner_text(f'[data-side="{number}"] [data-counter="{name}"]')


def cells(page: Page, number: int, kind: str) -> list[int]:
    """Positions of the cells of a side that have a class."""
    query = f'[data-side="{number}"] .cell.{kind}'
    return page.eval_on_selector_all(query, "all => all.map((e) => Number(e.dataset.position))")


def test_every_forward_is_drawn_as_the_trace_says(page: Page, sides: list[ReplaySide], tmp_path: Path) -> None:
    show(page, sides, tmp_path)
    assert page.title() == "a & b"
    longest = max(len(s.frames) for s in sides)
    assert len(sides[1].frames) < longest == len(sides[0].frames)
    for at in range(longest + 1):
        for number, of in enumerate(sides):
            k = min(at, len(of.frames))
            frame = of.frames[k - 1] if k else None
            filled = {i for f in of.frames[:k] for s in f.slots for i in ((s.block - 1) * SIZE + o for o in s.new)}
            assert set(cells(page, number, "filled")) == filled
            assert cells(page, number, "prompt") == [0, 1, 2]
            assert len(cells(page, number, "masked")) == of.num_blocks * SIZE - 3 - len(filled)
            assert counter(page, number, "forward") == f"{k} / {len(of.frames)}"
            assert counter(page, number, "tokens") == str(frame.num_tokens if frame else 0)
            assert counter(page, number, "committed") == str(frame.num_committed if frame else 0)
            assert counter(page, number, "tpf") == (f"{frame.num_tokens / k:.2f}" if frame else "–")
            bubble = page.locator(f'[data-side="{number}"].bubble').count() == 1
            over = at > len(of.frames)
            assert bubble == (frame is not None and frame.store_only and not over)
            if frame and not over:
                new = sorted((s.block - 1) * SIZE + o for s in frame.slots for o in s.new)
                assert cells(page, number, "new") == new
                assert page.inner_text(f'[data-side="{number}"] .caption') == frame.caption
                slots = page.eval_on_selector_all(
                    f'[data-side="{number}"] .slot', "all => all.map((e) => e.className)"
                )
                assert slots == [f"slot {s.state}" for s in frame.slots]
            assert ("finished" in page.inner_text(f'[data-side="{number}"] .done')) == (at >= len(of.frames))
        page.keyboard.press("ArrowRight")
    assert page.is_disabled("#next") and page.inner_text("#play") == "Replay"


def test_the_bubble_is_marked_in_the_timeline(page: Page, sides: list[ReplaySide], tmp_path: Path) -> None:
    show(page, sides, tmp_path)
    for number, of in enumerate(sides):
        marked = page.locator(f'[data-side="{number}"] .tick.bubble').count()
        assert marked == sum(f.store_only for f in of.frames)
    assert page.locator('[data-side="0"] .tick.bubble').count() == sides[0].num_blocks
    first = next(k for k, f in enumerate(sides[0].frames, start=1) if f.store_only)
    page.locator('[data-side="0"] .tick.bubble').first.click()
    assert counter(page, 0, "forward").startswith(f"{first} /")
    assert "only" in page.inner_text('[data-side="0"] .caption')
    assert cells(page, 0, "new") == []
    assert cells(page, 1, "new") != []


def test_the_ways_to_move(page: Page, sides: list[ReplaySide], tmp_path: Path) -> None:
    show(page, sides, tmp_path)
    longest = len(sides[0].frames)

    def at() -> str:
        return page.inner_text("#at").split()[1]

    assert at() == "0" and page.is_disabled("#back")
    page.click("#next")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowLeft")
    assert at() == "1"
    page.keyboard.press("End")
    assert at() == str(longest)
    page.click("#first")
    assert at() == "0"
    page.fill("#slider", "5")
    assert at() == "5"
    page.select_option("#speed", "140")
    page.click("#title")
    page.keyboard.press(" ")
    page.wait_for_selector('[data-side="0"] .tick:nth-child(8).past')
    page.click("#play")
    assert page.inner_text("#play") == "Play"
    stopped = at()
    page.wait_for_timeout(400)
    assert at() == stopped
    page.keyboard.press("Home")
    assert at() == "0"


def test_texts_are_text(page: Page, tmp_path: Path) -> None:
    texts = dict.fromkeys(range(40), EVIL)
    (request,) = traced_run(simulate(2).table(), name="x").requests
    write_replay([replay_side(request, name=EVIL)], tmp_path / "r.html", title=EVIL, note=EVIL, texts=texts)
    page.goto((tmp_path / "r.html").as_uri())
    page.keyboard.press("End")
    assert page.inner_text("h1") == page.inner_text("h2") == page.title() == EVIL
    assert page.inner_text('.cell[data-position="9"]') == EVIL
    assert page.locator("main b:not([data-counter]):not(.slot b)").count() == 0


def test_edits_and_what_lies_behind_the_end(page: Page, tmp_path: Path) -> None:
    of = side(simulate(3, t2t=T2T(tau=0.7), eos_at=30, seed=3), "T2T")
    show(page, [of], tmp_path)
    kinds = {"edited": 0, "new": 0}
    for frame in of.frames:
        page.keyboard.press("ArrowRight")
        expected = sorted((s.block - 1) * SIZE + o for s in frame.slots for o in s.edited)
        assert cells(page, 0, "edited") == expected
        kinds["edited"] += len(expected)
    assert kinds["edited"] > 0
    assert of.end is not None
    assert cells(page, 0, "behind") and min(cells(page, 0, "behind")) == of.end
    assert counter(page, 0, "tokens") == str(of.end - of.num_prompt)


def test_drafts_are_drawn_with_their_verdicts(page: Page, sides: list[ReplaySide], tmp_path: Path) -> None:
    """A block drafts three tokens; the verification confirms one, puts its own for the second, and drops the third."""

    def frame(tokens: tuple[int, ...], new: tuple[int, ...], verdict: DraftVerdict) -> ReplayFrame:
        slot = ReplaySlot(
            block=1,
            state="ACTIVE",
            mask_ratio=0.75,
            tokens=tokens,
            confidences=None,
            new=new,
            edited=(),
            verdict=verdict,
        )
        known = sum(token >= 0 for token in tokens[1:])
        return ReplayFrame(
            caption=caption([slot]),
            store_only=False,
            slots=(slot,),
            num_tokens=known,
            num_committed=0,
            num_cached_blocks=0,
        )

    drafted = frame((9, -1, -1, -1), (), DraftVerdict(drafted=(None, 10, 11, 12)))
    verdict = DraftVerdict(drafted=(None,) * 4, judged=3, confirmed=(1,), refused=(2,))
    judged = frame((9, 10, 20, -1), (1, 2), verdict)
    of = ReplaySide(
        name="verified",
        block_size=4,
        num_slots=1,
        num_blocks=1,
        num_prompt=1,
        prompt_tokens=(9,),
        end=None,
        frames=(drafted, judged),
    )
    show(page, [of], tmp_path)
    page.keyboard.press("ArrowRight")
    assert page.inner_text('[data-side="0"] .caption') == "Draft B1"
    assert cells(page, 0, "drafted") == cells(page, 0, "masked") == [1, 2, 3]
    assert page.inner_text('.cell[data-position="2"]') == "w11"
    page.keyboard.press("ArrowRight")
    assert page.inner_text('[data-side="0"] .caption') == "Verify B1 (1 of 3 drafted tokens confirmed)"
    kinds = ("confirmed", "refused", "drafted", "masked")
    assert [cells(page, 0, kind) for kind in kinds] == [[1], [2], [], [3]]
    assert (counter(page, 0, "judged"), counter(page, 0, "confirmed")) == ("3", "1")
    assert page.locator(".drafts:visible").count() == 3
    show(page, sides, tmp_path)
    assert page.locator(".drafts:visible").count() == 0


def test_it_is_readable_in_the_dark_and_on_a_small_screen(
    browser: Browser, sides: list[ReplaySide], tmp_path: Path
) -> None:
    write_replay(sides, tmp_path / "r.html", title="t")
    check_small_and_dark(browser, (tmp_path / "r.html").as_uri())
