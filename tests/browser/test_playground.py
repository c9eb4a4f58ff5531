"""The playground in headless Chromium, before a gateway in this process: what it shows is what the API says."""

import json
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest
from chromium_pages import WatchedPages, watched_pages
from gateway_in_process import running_gateway
from playwright.sync_api import Browser, Page, Route

from actors.serving.args import ServingArgs
from jobs.convert_checkpoint import main as convert

MODEL, LIMIT = "tiny-mbd", 120
KEY = "ann-0123456789abcdef"
EVIL = "</script><b>'\"&"
ENGINE = {"max_rows": 4, "num_pages": 200}
SIDES = {"singlebd": 1, "multibd": 4}
CONTRAST = """() => {
  const channel = (c) => { c /= 255; return c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4; };
  const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
  const behind = (e) => { for (; e; e = e.parentElement) { const c = rgb(getComputedStyle(e).backgroundColor); if (c.length < 4 || c[3] === 1) return c; } return [255, 255, 255]; };
  const texts = [...document.querySelectorAll("body *")].filter((e) => !e.disabled && e.checkVisibility() && [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim()));
  return texts.map((e) => { const [a, b] = [light(rgb(getComputedStyle(e).color)), light(behind(e))].sort((x, y) => y - x);
    return [(a + 0.05) / (b + 0.05), e.outerHTML.slice(0, 80)]; });
}"""  # noqa: E501


def serving_args(keys: Path | None) -> ServingArgs:
    model = {"model": MODEL, "engine": ENGINE}
    fields = {"device": "cpu", "models": [model], "api_keys": None if keys is None else str(keys)}
    return ServingArgs.read(fields)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with running_gateway(serving_args(None)) as (url, _):
        yield url


@pytest.fixture
def watched(browser: Browser, url: str) -> Iterator[WatchedPages]:
    with watched_pages(browser, url) as pages:
        yield pages


def playground(pages: WatchedPages, url: str, **settings: Any) -> Page:
    page = pages.open(f"{url}/", time_limit=LIMIT, **settings)
    page.wait_for_selector('#sides [data-side="multibd"]')
    return page


def finish(page: Page) -> str:
    """Press the button and wait for the end; what the status line then says."""
    page.click("#run")
    page.wait_for_selector("#stop:disabled")
    return page.inner_text("#status")


def counter(page: Page, side: str, name: str) -> str:
    return page.inner_text(f'[data-side="{side}"] [data-counter="{name}"]')


def cells(page: Page, side: str, kind: str) -> set[int]:
    query = f'[data-side="{side}"] .cell.{kind}'
    return set(page.eval_on_selector_all(query, "all => all.map((e) => Number(e.dataset.position))"))


def streamed(url: str, page: Page, slots: int) -> tuple[list[dict[str, Any]], str, dict[str, Any]]:
    """The frames, text and counts of the request that the page makes."""
    taus = {name: float(page.input_value(f"#{name}")) for name in ("tau_m2t", "tau_add", "tau_semi")}
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": page.input_value("#prompt")}],
        "max_tokens": int(page.input_value("#tokens")),
        "stream": True,
        "frames": True,
        "decoding": {"buffer_size": slots, **taus},
    }
    text = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=LIMIT).text
    data = [json.loads(e.partition("data: ")[2]) for e in text.split("\n\n") if e and "[DONE]" not in e]
    chunks = [d for d in data if "frame" not in d]
    answer = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks)
    return [d["frame"] for d in data if "frame" in d], answer, chunks[-1]["mbd"]


def test_both_answers_are_shown_forward_by_forward(watched: WatchedPages, url: str, tmp_path: Path) -> None:
    page = playground(watched, url)
    status = finish(page)
    page.screenshot(path=tmp_path / "playground.png", full_page=True)
    assert (tmp_path / "playground.png").stat().st_size > 20_000
    for side, slots in SIDES.items():
        frames, answer, counts = streamed(url, page, slots)
        assert page.inner_text(f'[data-side="{side}"] .answer').strip() == answer.strip() != ""
        assert counter(page, side, "tokens") == str(counts["num_tokens"])
        assert counter(page, side, "forwards") == str(counts["num_forwards"]) == str(len(frames))
        assert counter(page, side, "tpf") == f"{counts['tpf']:.2f}"
        assert float(counter(page, side, "speed")) > 0
        assert f"{counts['num_tokens']} tokens in {counts['num_forwards']} forwards" in status
        page.focus(f'[data-side="{side}"] .forward input')
        page.keyboard.press("Home")
        assert page.locator(f'[data-side="{side}"] .slot.empty').count() == slots
        for frame in frames:
            page.keyboard.press("ArrowRight")
            expected: dict[str, set[int]] = {"masked": set(), "new": set(), "edited": set()}
            places = count(frame["position"])
            for slot in frame["slots"]:
                for offset, token in enumerate(slot["tokens"]):
                    place = next(places)
                    for kind, holds in (
                        ("masked", token is None),
                        ("new", offset in slot["accepted"]),
                        ("edited", offset in slot["edited"]),
                    ):
                        expected[kind] |= {place} if holds else set()
            assert {kind: cells(page, side, kind) for kind in expected} == expected
            states = page.eval_on_selector_all(f'[data-side="{side}"] .slot', "all => all.map((e) => e.classList[1])")
            assert states == [s["state"] for s in frame["slots"]] + ["empty"] * (slots - len(frame["slots"]))
    assert int(counter(page, "multibd", "forwards")) < int(counter(page, "singlebd", "forwards"))


def test_a_verified_answer_shows_its_drafts_and_their_verdicts(watched: WatchedPages, url: str) -> None:
    page = playground(watched, url)
    page.check("#verified")
    page.fill("#tokens", "20")
    status = finish(page)
    assert "drafted tokens confirmed" in status.split("Verified:")[1]
    page.focus('[data-side="verified"] .forward input')
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    drafted = cells(page, "verified", "drafted")
    assert drafted and drafted <= cells(page, "verified", "masked")
    page.keyboard.press("ArrowRight")
    decided = cells(page, "verified", "confirmed") | cells(page, "verified", "refused")
    assert decided and decided <= drafted and decided <= cells(page, "verified", "new")


def test_settings_reach_the_requests(watched: WatchedPages, url: str) -> None:
    page = playground(watched, url)
    bodies: list[dict[str, Any]] = []
    page.on("request", lambda r: bodies.append(r.post_data_json) if r.method == "POST" else None)
    page.fill("#tau_m2t", "0.35")
    page.fill("#temperature", "0.8")
    assert page.inner_text('output[for="tau_m2t"]') == "0.35"
    page.select_option("#slots", "2")
    page.select_option("#route", "text")
    page.uncheck("#turns")
    page.fill("#tokens", "20")
    finish(page)
    assert sorted(b["decoding"]["buffer_size"] for b in bodies) == [1, 2]
    for body in bodies:
        assert body["decoding"]["tau_m2t"] == 0.35 and body["decoding"]["tau_add"] == 0.1
        assert (body["temperature"], body["max_tokens"], body["prompt"]) == (0.8, 20, page.input_value("#prompt"))


def test_an_api_key_is_asked_for_and_kept_in_memory_alone(browser: Browser, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"ann {KEY}\n")
    with running_gateway(serving_args(keys)) as (url, _):
        pages = WatchedPages(browser, url)
        page = playground(pages, url)
        status = finish(page)
        assert status.startswith("A request failed")
        alert = page.inner_text('[data-side="singlebd"] [role="alert"]')
        assert (
            alert == "an API key of this server is needed; send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'"
        )
        page.fill("#key", KEY)
        assert "tokens in" in finish(page)
        kept = (
            "JSON.stringify([localStorage, sessionStorage, document.cookie, location.href, document.body.innerHTML])"
        )
        assert KEY not in page.evaluate(kept)
        page.reload()
        assert page.input_value("#key") == ""
        page.context.close()
    assert all("401" in complaint for complaint in pages.complaints), pages.complaints


def test_a_model_without_a_block_buffer_is_asked_for_none(browser: Browser, tmp_path: Path) -> None:
    heads = {
        "tiny-llama": "Token by token",
        "tiny-llada": "The whole sequence at once",
        "tiny-nemotron": "Drafts that are judged from left to right",
        "tiny-diffusion-gemma": "A block that is drawn anew in each forward",
    }
    for shape in heads:
        assert convert(["--random", shape, "--out", str(tmp_path / shape)]) == 0
    models = [{"model": str(tmp_path / shape), "name": shape, "engine": ENGINE} for shape in heads]
    served = running_gateway(ServingArgs.read({"device": "cpu", "models": models}))
    with served as (url, _), watched_pages(browser, url) as pages:
        page = pages.open(f"{url}/", time_limit=LIMIT)
        page.wait_for_selector("#sides [data-side]")
        page.fill("#tokens", "8")
        for shape, head in heads.items():
            page.select_option("#model", shape)
            assert page.inner_text("#sides h2") == f"{head}: this model has no Block Buffer to show"
            assert "tokens in" in finish(page)


def test_nothing_but_this_server_may_run_or_be_asked(url: str) -> None:
    for path, kind in (("/", "text/html"), ("/playground.css", "text/css"), ("/playground.js", "text/javascript")):
        answer = httpx.get(url + path, timeout=LIMIT)
        assert answer.status_code == 200 and answer.headers["content-type"].startswith(kind)
        policy = dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))
        assert policy["default-src"] == policy["base-uri"] == policy["frame-ancestors"] == "'none'"
        assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
        assert answer.headers["x-content-type-options"] == "nosniff"
    page = httpx.get(f"{url}/", timeout=LIMIT).text
    assert "http:" not in page and "https:" not in page and "style=" not in page and "onclick" not in page


def event(frame: dict[str, Any]) -> str:
    fields = {"index": 0, "forward": 1, "position": -1, "num_slots": 1} | frame
    return f"event: frame\ndata: {json.dumps({'choices': [], 'frame': fields})}\n\n"


def test_texts_are_text_and_edits_are_marked(watched: WatchedPages, url: str) -> None:
    page = playground(watched, url)
    slot = {"state": "ACTIVE", "tokens": [3, 4, 5, None], "texts": [" ", EVIL, "\n", None], "accepted": [1]}
    chunk = {"choices": [{"delta": {"content": EVIL}, "token_ids": [4, 5]}]}
    sent = event({"slots": [slot | {"edited": [2]}]}) + f"data: {json.dumps(chunk)}\n\n"
    failure = f"data: {json.dumps({'error': {'message': EVIL}})}\n\n"

    def answer(route: Route) -> None:
        single = route.request.post_data_json["decoding"]["buffer_size"] == 1
        route.fulfill(content_type="text/event-stream", body=sent + ("data: [DONE]\n\n" if single else failure))

    page.route("**/v1/chat/completions", answer)
    finish(page)
    own = '[data-side="singlebd"]'
    page.wait_for_selector(f"{own} .cell.edited")
    assert page.inner_text(f"{own} .cell.new") == page.inner_text(f"{own} .answer") == EVIL
    assert page.eval_on_selector_all(f"{own} .cell", "all => all.map((e) => e.textContent)") == ["␣", EVIL, "⏎", ""]
    assert cells(page, "singlebd", "known") == {-1} and cells(page, "singlebd", "edited") == {1}
    assert page.inner_text('[data-side="multibd"] [role="alert"]') == EVIL
    assert page.locator("main b").count() == 0


def test_a_run_can_be_stopped(watched: WatchedPages, url: str) -> None:
    page = playground(watched, url)
    page.route("**/v1/chat/completions", lambda route: None)  # never answered
    page.click("#run")
    assert page.inner_text("#status") == "Decoding…"
    page.click("#stop")
    page.wait_for_selector("#stop:disabled")
    assert "SingleBD was stopped" in page.inner_text("#status")


def test_it_works_by_keyboard_and_names_every_control(watched: WatchedPages, url: str) -> None:
    page = playground(watched, url)
    nameless = "[...document.querySelectorAll('input, select, textarea')].filter((e) => !e.labels.length).length"
    assert page.evaluate(nameless) == 0
    snapshot = page.locator("main").aria_snapshot()
    for name in ("Question", "API key, if one is needed", "Accept a token above tau_m2t", "Forward", "Run both"):
        assert name in snapshot
    reached = []
    for _ in range(40):
        page.keyboard.press("Tab")
        focused = page.evaluate(
            "[document.activeElement.id || document.activeElement.className, "
            "getComputedStyle(document.activeElement).outlineStyle]"
        )
        assert focused[0] == "" or focused[1] != "none", focused
        reached.append(focused[0])
        if focused[0] == "run":
            break
    for name in (
        "skip",
        "prompt",
        "model",
        "route",
        "tokens",
        "slots",
        "key",
        "tau_m2t",
        "temperature",
        "turns",
        "run",
    ):
        assert name in reached
    page.keyboard.press("Enter")
    page.wait_for_selector("#status:has-text('tokens in')")
    live = page.eval_on_selector_all("[aria-live]", "all => all.map((e) => e.id)")
    assert live == ["status"], "one calm line speaks, not every forward"


@pytest.mark.parametrize(
    ("scheme", "width"),
    [
        ("light", 1400),
        ("dark", 380),
        pytest.param("light", 380, marks=pytest.mark.slow),
        pytest.param("dark", 1400, marks=pytest.mark.slow),
    ],
)
def test_it_is_readable_in_any_light_on_any_screen(
    watched: WatchedPages, url: str, scheme: Any, width: int, tmp_path: Path
) -> None:
    page = playground(
        watched, url, viewport={"width": width, "height": 900}, color_scheme=scheme, reduced_motion="reduce"
    )
    finish(page)
    for side in SIDES:  # a forward in the middle has slots in several states
        page.focus(f'[data-side="{side}"] .forward input')
        page.keyboard.press("Home")
        for _ in range(3):
            page.keyboard.press("ArrowRight")
        assert cells(page, side, "new") and page.inner_text(f'[data-side="{side}"] .answer')
    picture = tmp_path / f"{scheme}-{width}.png"
    page.screenshot(path=picture, full_page=True)
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 20_000
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    pale = [(round(ratio, 2), place) for ratio, place in page.evaluate(CONTRAST) if ratio < 4.5]
    assert not pale, pale
    assert page.eval_on_selector(".slot .cell", "e => getComputedStyle(e).transitionDuration") == "0s"
