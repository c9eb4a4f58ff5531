"""The requests of a soak, drawn at random (streams, whole answers, clients that hang up, bad ones), and their ends."""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import aiohttp

from jobs.load.stream_client import StreamError, Target, failure_kind, stream_chunks

Kind = Literal["stream", "whole answer", "hang-up", "bad request"]
End = Literal["whole", "error", "refused", "hung up", "lost", "wrong"]
"""How a request ended.

whole    as promised; "refused" before it was accepted, with 429 or 503, or for a bad request with its 4xx
error    accepted, and ended by an error in OpenAI's shape
hung up  the client left, as it meant to
lost     accepted, and ended without a word: a cut connection, a stream without an end, no answer in time
wrong    an end that is not the one promised: another text, another status, an error in another shape
"""
WEIGHTS: dict[Kind, int] = {"stream": 50, "whole answer": 20, "hang-up": 15, "bad request": 15}
EXACT = {"buffer_size": 1}
"""Block by block an answer does not depend on where a stream was taken over; with several blocks at once it may."""
BAD_BODIES: tuple[bytes, ...] = (
    b"",
    b"{",
    b'{"model": "nobody", "messages": [{"role": "user", "content": "a"}]}',
    b'{"messages": []}',
    b'{"model": %(model)s, "messages": [{"role": "user", "content": "a"}], "temperature": 9}',
    b'{"model": %(model)s, "messages": [{"role": "user", "content": "a"}], "max_tokens": 1000000}',
    b'{"model": %(model)s, "messages": [{"role": "user", "content": "a"}], "decoding": {"buffer_size": 4096}}',
    b'{"model": %(model)s, "messages": [{"role": "user", "content": "a"}], "no_such_field": 1}',
)


@dataclass(frozen=True)
class Ended:
    """The end of one request; `detail` says what was wrong with one that failed."""

    kind: Kind
    end: End
    detail: str = ""


class SoakClient:
    """Sends one request after another, each drawn from `rng`; compares exact answers with the first of their kind."""

    def __init__(
        self, session: aiohttp.ClientSession, target: Target, prompts: Sequence[str], rng: random.Random
    ) -> None:
        self._session, self._target, self._prompts, self._rng = session, target, prompts, rng
        self._texts: dict[str, str] = {}

    async def send(self, kind: Kind | None = None) -> Ended:
        """One request to its end; nothing is raised for what an endpoint may do."""
        kind = kind or self._rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        try:
            if kind == "bad request":
                return await self._bad()
            prompt, exact = self._rng.choice(self._prompts), self._rng.random() < 0.5
            body = self._target.body(prompt, stream=kind != "whole answer")
            if exact:
                body["decoding"] = EXACT
            if kind == "hang-up":
                return await self._hang_up(body)
            text = await (self._stream(body) if kind == "stream" else self._whole(body))
        except EndedEarly as early:
            return Ended(kind, early.end, early.detail)
        except StreamError as error:
            return Ended(kind, *_stream_end(str(error)))
        except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
            return Ended(kind, "lost", failure_kind(error))
        except (KeyError, IndexError, TypeError) as error:
            return Ended(kind, "wrong", f"an answer without {error}")
        if exact and self._texts.setdefault(prompt, text) != text:
            return Ended(kind, "wrong", "another text than before")
        return Ended(kind, "whole")

    async def _stream(self, body: Mapping[str, Any]) -> str:
        text, ends = "", 0
        async for chunk, _ in stream_chunks(self._session, self._target, body):
            for choice in chunk["choices"]:
                text += choice["delta"].get("content") or ""
                ends += choice["finish_reason"] is not None
        if ends != 1:
            raise EndedEarly("wrong", f"{ends} finish reasons in a stream")
        return text

    async def _whole(self, body: Mapping[str, Any]) -> str:
        async with self._session.post(f"{self._target.url}/v1/{self._target.route}", json=body) as response:
            answer = _json(await response.read())
            if response.status != 200:
                raise _refusal(response.status, answer)
        if answer is None or answer["choices"][0]["finish_reason"] not in ("stop", "length"):
            raise EndedEarly("wrong", "an answer without an end")
        return str(answer["choices"][0]["message"]["content"])

    async def _hang_up(self, body: Mapping[str, Any]) -> Ended:
        """Leave after some events, or before the first."""
        left = self._rng.randrange(4)
        chunks = stream_chunks(self._session, self._target, body)
        async for _ in chunks:
            if left == 0:
                break
            left -= 1
        await chunks.aclose()  # closes the connection, as its response was not read to the end
        return Ended("hang-up", "hung up")

    async def _bad(self) -> Ended:
        body = self._rng.choice(BAD_BODIES).replace(b"%(model)s", json.dumps(self._target.model).encode())
        async with self._session.post(f"{self._target.url}/v1/{self._target.route}", data=body) as response:
            answer = _json(await response.read())
        if 400 <= response.status < 500 and _is_error(answer):
            return Ended("bad request", "refused")
        if response.status == 503 and _is_error(answer):
            return Ended("bad request", "error", "HTTP 503")
        return Ended("bad request", "wrong", f"HTTP {response.status}" + ("" if _is_error(answer) else ", not JSON"))


class EndedEarly(Exception):
    """A request that did not end whole."""

    def __init__(self, end: End, detail: str) -> None:
        super().__init__(detail)
        self.end, self.detail = end, detail


def _refusal(status: int, answer: Any) -> EndedEarly:
    if not _is_error(answer):
        return EndedEarly("lost", f"HTTP {status}, not OpenAI's error")
    return EndedEarly("refused" if status in (429, 503) else "error", f"HTTP {status}")


def _stream_end(failure: str) -> tuple[End, str]:
    if failure == "error event":
        return "error", failure
    if failure in ("HTTP 429", "HTTP 503"):
        return "refused", failure
    return ("error" if failure.startswith("HTTP") else "lost"), failure


def _json(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return None


def _is_error(answer: Any) -> bool:
    return isinstance(answer, dict) and isinstance(answer.get("error"), dict) and "message" in answer["error"]
