"""The reward of a service over HTTP, which may be busy, restart, or refuse.

A busy service (408, 425, 429, 5xx), or a service without a whole reply, is asked again: after the time that its
`Retry-After` names, else after a pause that doubles. All tries of an answer end within the patience.
"""

import asyncio
import os
import random
import re
from collections import deque
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from urllib.parse import urljoin, urlsplit

import aiohttp

from mbd_core.errors import error_sentence
from mbd_core.json_text import parse_json
from mbd_core.proxies import is_own, proxy_note
from mbd_core.rl.parts import Failure, RewardOutcome, failed, first_error, outcome_of, question
from mbd_core.rl.rows import JudgedRow

SHORTEST_PAUSE, FIRST_PAUSE, LONGEST_PAUSE = 0.1, 0.5, 30.0  # seconds
LOST = 2  # a service is down after this number of answers in a row without a reward within the patience
BUSY = (408, 425, 429)  # and every status from 500 on
FORWARDED = (307, 308)  # redirects that keep the question
MOST_REDIRECTS = 5
SHOWN = 200  # characters of a refusal
REMEDIES = {
    400: "see that the service takes the body that the guide shows",
    401: "give its key with --judge-key",
    403: "give its key with --judge-key",
    404: "correct the URL's path",
    405: "let the URL's path take POST",
    413: "let the service take longer bodies, or draw shorter answers (--max-tokens)",
    415: "let the service take application/json",
    422: "see that the service takes the body that the guide shows",
}


class ServiceBusy(Exception):
    """The service gives no reward now. `after`: the seconds until the next try, if the service names them."""

    def __init__(self, why: str, after: float | None = None) -> None:
        super().__init__(why)
        self.after = after


class ServiceRefused(Exception):
    """The service refuses for good; the message is the rest of a sentence that says why."""


class HttpReward:
    """A service's reward."""

    def __init__(
        self,
        url: str,
        *,
        seconds: float,
        patience: float,
        concurrency: int,
        key: str | None = None,
        stops: bool = False,
    ) -> None:
        self._url, self._seconds, self._patience, self._concurrency = url, seconds, patience, concurrency
        self._headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self._stops = stops
        self._answered_at = 0.0  # when it last gave or refused a reward
        self._num_given_up = 0  # answers in a row without a reward
        self._down: str | None = None  # the reason why the service counts as down

    async def resolve(self) -> None:
        """Does nothing: the first question tests the service."""

    async def judge(self, rows: Sequence[JudgedRow]) -> list[RewardOutcome]:
        """An outcome for each row, with `concurrency` of them asked at a time. Raises `RewardFailed` with `stops` for
        a row that fails. Once the service counts as down (`LOST`), the remaining rows fail at once."""
        outcomes: list[RewardOutcome] = [None] * len(rows)
        places = deque(range(len(rows)))
        self._num_given_up, self._down = 0, None

        async def lane() -> None:
            while places:
                place = places.popleft()
                outcomes[place] = outcome = await self._outcome(session, rows[place])
                if self._stops and isinstance(outcome, Failure):
                    raise failed(self._url, outcome, rows[place])

        connector = aiohttp.TCPConnector(limit=self._concurrency)
        try:
            async with (
                aiohttp.ClientSession(
                    connector=connector,
                    trust_env=not is_own(self._url),
                    headers=self._headers,
                    timeout=aiohttp.ClientTimeout(total=None),
                ) as session,
                asyncio.TaskGroup() as lanes,
            ):
                for _ in range(min(self._concurrency, len(rows))):
                    lanes.create_task(lane())
        except BaseExceptionGroup as group:
            raise first_error(group) from None
        return outcomes

    async def close(self) -> None:
        """Nothing stays open."""

    async def _outcome(self, session: aiohttp.ClientSession, row: JudgedRow) -> RewardOutcome:
        clock = asyncio.get_running_loop()
        began, pause, tries = clock.time(), FIRST_PAUSE, 0
        busy: ServiceBusy | None = None
        while self._down is None:
            left = began + self._patience - clock.time()
            wait = 0.0
            if left > 0:
                tries += 1
                try:
                    content = await self._reply(session, row, min(self._seconds, left))
                    self._answered_at, self._num_given_up = clock.time(), 0
                    return _reward(content)
                except ServiceRefused as error:
                    self._answered_at, self._num_given_up = clock.time(), 0
                    return Failure(str(error))
                except TimeoutError:
                    if busy is None or left > self._seconds:  # else the patience left it too little time
                        busy = ServiceBusy(f"no whole reply within {min(self._seconds, left):.3g} s")
                except ServiceBusy as error:
                    busy = error
                wait = pause * random.uniform(0.5, 1.0) if busy.after is None else max(busy.after, SHORTEST_PAUSE)
                pause = min(2 * pause, LONGEST_PAUSE)
            if clock.time() + wait < began + self._patience:
                await asyncio.sleep(wait)
                continue
            asked = f"{tries} {'try' if tries == 1 else 'tries'}"
            asks = "" if busy is None or busy.after is None else f", and asks to wait {busy.after:.0f} s"
            why = f"gave none within {self._patience:g} s (--judge-patience) and {asked}: {busy}{asks}"
            why += proxy_note(self._url, takes_all=False)
            if self._answered_at < began:
                self._num_given_up += 1
                self._down = why if self._num_given_up >= LOST else None
            return Failure(why)
        return Failure(self._down)

    async def _reply(self, session: aiohttp.ClientSession, row: JudgedRow, seconds: float) -> bytes:
        """The body of a good reply. Raises `ServiceBusy`, `ServiceRefused` or `TimeoutError`."""
        url = self._url
        try:
            async with asyncio.timeout(seconds):  # from the connection to the last byte
                for _ in range(MOST_REDIRECTS + 1):
                    async with session.post(url, json=question(row), allow_redirects=False) as response:
                        status, headers = response.status, response.headers
                        content = await response.read()
                    if status in FORWARDED and "Location" in headers:
                        url = self._forwarded(url, headers["Location"], status)
                        continue
                    if status < 300:
                        return content
                    raise _status_error(status, headers, content)
        except aiohttp.ClientError as error:  # no connection, a reply that is cut or no HTTP
            raise ServiceBusy(error_sentence(error)) from None
        raise ServiceRefused(f"redirects more than {MOST_REDIRECTS} times, last to {url}; give the URL that answers")

    def _forwarded(self, url: str, location: str, status: int) -> str:
        target = urljoin(url, location)
        if not has_host(target):
            raise ServiceRefused(f"answers {status} to {location!r}, which is no URL of a service")
        here, there = urlsplit(url), urlsplit(target)
        is_safe = there.scheme == "https" or there.scheme == here.scheme == "http"
        if not is_safe or (self._headers and (here.scheme, here.netloc) != (there.scheme, there.netloc)):
            raise ServiceRefused(
                f"answers {status}, to {target}, where the answers and the key would be sent to another server or in "
                "the clear; give that URL if it is meant"
            )
        return target


def _status_error(status: int, headers: Mapping[str, str], content: bytes) -> ServiceBusy | ServiceRefused:
    text = " ".join(content[: 4 * SHOWN].decode("utf-8", "replace").split())[:SHOWN]
    said = f"status {status}" + (f": {text}" if text else "")
    if status in BUSY or status >= 500:
        return ServiceBusy(said, _retry_after(headers.get("Retry-After")))
    if status < 400:
        place = headers.get("Location", "no other URL")
        return ServiceRefused(f"answers {status}, a redirect to {place} that drops the question; give that URL")
    return ServiceRefused(f"answers with {said}; {REMEDIES.get(status, 'see what the service wants')}")


def _retry_after(value: str | None) -> float | None:
    """The seconds that the header names: a number, or a date (RFC 9110); `None` for neither."""
    if value is None:
        return None
    if re.fullmatch(r"\s*\d{1,9}(\.\d*)?\s*", value):
        return float(value)
    try:
        date = parsedate_to_datetime(value)
    except (ValueError, TypeError):
        return None
    return max(0.0, (date.replace(tzinfo=date.tzinfo or UTC) - datetime.now(UTC)).total_seconds())


def _reward(content: bytes) -> RewardOutcome:
    try:
        reply = parse_json(content, "the reply")
    except ValueError as error:
        return Failure(f"is unreadable: {error}")
    if not isinstance(reply, dict) or "reward" not in reply:
        text = " ".join(content[: 4 * SHOWN].decode("utf-8", "replace").split())[:SHOWN]
        return Failure(f"""replied without a field 'reward', as in {{"reward": 0.5}}: {text}""")
    return outcome_of(reply["reward"])


def has_host(url: str) -> bool:
    """Whether a request can be sent there: a host, a port that is a number if there is one, no blanks."""
    try:
        parts = urlsplit(url)
        return bool(parts.hostname) and parts.port != 0 and url.isprintable() and " " not in url
    except ValueError:
        return False


def key_in(variable: str, url: str) -> str:
    """A service's key from an environment variable; no error shows the variable's content."""
    key = os.environ.get(variable, "").strip()
    if not key:
        raise ValueError(
            f"--judge-key for {url} must be the name of an environment variable that holds the key, not the key itself"
        )
    if not (key.isascii() and key.isprintable()):
        raise ValueError(f"--judge-key for {url}: the key in {variable} has characters that no HTTP header holds")
    return key
