"""A client of any OpenAI endpoint that notes when each event came. It does little else, because many run at once."""

import json
import time
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import aiohttp

from benchmarks.load.loads import Arrival, RequestRecord, proportional_shares
from mbd_core.batch.tool_chats import ToolChat
from mbd_core.fields import LOAD, Flag, Ge

StreamRoute = Literal["chat/completions", "completions"]
AskedPrompt = str | ToolChat
RequestSeconds = Annotated[float, Ge(0.1), Flag("Time limit of a request.", LOAD)]
LINE_BYTES = 2**24  # the longest event that is read
TOGETHER_SECONDS = 1e-3  # events with a shorter gap count as one: a server may send each token of a block as an event
TEXT_FIELDS = ("content", "reasoning_content", "reasoning")


@dataclass(frozen=True, kw_only=True)
class Target:
    """An endpoint, and the form of the requests to it. `extra` are further fields of a request's body."""

    name: str
    url: str
    model: str
    route: StreamRoute = "chat/completions"
    max_tokens: int = 64
    extra: Mapping[str, Any] = field(default_factory=dict)

    def body(self, prompt: AskedPrompt, *, stream: bool) -> dict[str, Any]:
        """The request's JSON object. It asks a stream to say at its end how many tokens it had."""
        body: dict[str, Any] = {"model": self.model, "max_tokens": self.max_tokens, **self.extra}
        if isinstance(prompt, ToolChat):
            body |= {"messages": prompt.messages, "tools": prompt.tools}
        elif self.route == "completions":
            body["prompt"] = prompt
        else:
            body["messages"] = [{"role": "user", "content": prompt}]
        return body | ({"stream": True, "stream_options": {"include_usage": True}} if stream else {})


class NoUsage(RuntimeError):
    """The endpoint does not say how many tokens a stream had, so its tokens cannot be counted."""


class StreamError(RuntimeError):
    """The request did not end as promised; the text is the kind of the failure."""


def open_session(*, seconds: float, api_key: str | None = None) -> aiohttp.ClientSession:
    """A session without a bound on its connections; `seconds` is the time limit of a request."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=seconds),
        headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
        read_bufsize=LINE_BYTES,
    )


async def record_stream(
    session: aiohttp.ClientSession, target: Target, prompt: AskedPrompt, due: float
) -> RequestRecord:
    """Send one streamed request and record it. Raises `NoUsage`; every other failure is in the record."""
    times: list[float] = []
    weights: list[int] = []
    exact, total, error, last_time = True, None, None, 0.0
    try:
        async for chunk, at in stream_chunks(session, target, target.body(prompt, stream=True)):
            text, num_logprobs = _content(chunk)
            if text or num_logprobs:
                if not times or at - last_time > TOGETHER_SECONDS:
                    times.append(at)
                    weights.append(0)
                last_time = at
                weights[-1] += num_logprobs or len(text)
                exact = exact and num_logprobs > 0
            usage = chunk.get("usage")
            total = usage["completion_tokens"] if usage else total
    except (StreamError, aiohttp.ClientError, TimeoutError) as failure:
        error = failure_kind(failure)
    end = time.perf_counter()
    if error is None and total is None:
        raise NoUsage(f"{target.url} sends no usage at the end of a stream, so its tokens cannot be counted")
    if total and not times:  # no token has its own text
        times, weights = [end], [total]
    counts = weights if exact and times else proportional_shares(total if total is not None else len(times), weights)
    arrivals = tuple(Arrival(at=at, num_tokens=n) for at, n in zip(times, counts, strict=True) if n)
    return RequestRecord(due=due, arrivals=arrivals, ended=end, error=error)


async def stream_chunks(
    session: aiohttp.ClientSession, target: Target, body: Mapping[str, Any]
) -> AsyncGenerator[tuple[dict[str, Any], float], None]:
    """Each object of a stream with its time of arrival. Raises `StreamError` unless the stream ends with [DONE]."""
    async with session.post(f"{target.url}/v1/{target.route}", json=body) as response:
        if response.status != 200:
            await response.read()
            raise StreamError(f"HTTP {response.status}")
        async for line in response.content:
            if not line.startswith(b"data:"):
                continue
            at, data = time.perf_counter(), line[5:].strip()
            if data == b"[DONE]":
                return
            try:
                chunk = json.loads(data)
            except ValueError as error:
                raise StreamError("event that is not JSON") from error
            if "error" in chunk:
                raise StreamError("error event")
            yield chunk, at
    raise StreamError("stream without an end")


def failure_kind(failure: BaseException) -> str:
    """The kind of a failure, a short text by which failures are counted."""
    if isinstance(failure, StreamError):
        return str(failure)
    if isinstance(failure, TimeoutError):
        return "time limit"
    return f"connection: {type(failure).__name__}"


async def served_models(session: aiohttp.ClientSession, url: str) -> list[str]:
    """The names at /v1/models. Raises `RuntimeError`, one sentence, if no OpenAI endpoint answers."""
    try:
        async with session.get(f"{url}/v1/models") as response:
            response.raise_for_status()
            return [model["id"] for model in (await response.json())["data"]]
    except (aiohttp.ClientError, TimeoutError, ValueError, TypeError, KeyError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise RuntimeError(f"{url}/v1/models does not answer as an OpenAI endpoint: {reason}") from error


def _content(chunk: Mapping[str, Any]) -> tuple[str, int]:
    """The text of a stream's object, and the number of its log-probabilities: its tokens, or 0 if it has none."""
    text, num_logprobs = "", 0
    for choice in chunk.get("choices") or ():
        delta = choice.get("delta") or {}
        text += choice.get("text") or "".join(delta.get(name) or "" for name in TEXT_FIELDS)
        functions = [call.get("function") or {} for call in delta.get("tool_calls") or ()]
        text += "".join(function.get(name) or "" for function in functions for name in ("name", "arguments"))
        logprobs = choice.get("logprobs") or {}
        num_logprobs += len(logprobs.get("content") or logprobs.get("tokens") or ())
    return text, num_logprobs
