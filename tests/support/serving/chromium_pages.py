"""Pages in headless Chromium whose every complaint, and every request but for their own server or files, is noted."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from playwright.sync_api import Browser, Page


class WatchedPages:
    """Opens pages. `complaints` has the console's messages, errors, and requests to addresses that begin otherwise."""

    def __init__(self, browser: Browser, own: str) -> None:
        self._browser, self._own = browser, own
        self.complaints: list[str] = []

    def open(self, address: str, *, time_limit: float = 60, **settings: Any) -> Page:
        """A page of 1400 x 950 pixels unless `settings` (of `Browser.new_page`) differ; `time_limit` in seconds."""
        page = self._browser.new_page(**({"viewport": {"width": 1400, "height": 950}} | settings))
        page.set_default_timeout(time_limit * 1000)
        page.on("console", lambda message: self.complaints.append(message.text))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("request", lambda r: None if r.url.startswith((self._own, "data:")) else self.complaints.append(r.url))
        page.goto(address)
        return page


@contextmanager
def watched_pages(browser: Browser, own: str = "file:") -> Iterator[WatchedPages]:
    """Pages that are closed at the end, and had nothing to complain of."""
    pages = WatchedPages(browser, own)
    yield pages
    for context in browser.contexts:
        context.close()
    assert pages.complaints == []


def check_small_and_dark(browser: Browser, address: str) -> None:
    """On a screen of 380 pixels nothing is cut off, by day or by night, and the two have colours of their own."""
    shades = []
    for scheme in ("light", "dark"):
        page = browser.new_page(viewport={"width": 380, "height": 700}, color_scheme=scheme)
        page.goto(address)
        assert page.evaluate("document.documentElement.scrollWidth") <= 380
        shades += page.evaluate(
            "[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]"
        )
        page.close()
    assert len(set(shades)) == 4
