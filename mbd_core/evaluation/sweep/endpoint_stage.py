"""The first stage of a sweep against endpoints: every row of a table is asked, as `DecodeStage` decodes it.

What an endpoint does not say stays unknown (null). A request that it refuses, or fails for good while it answers
others, is a row with the reason. An endpoint that is gone, or no longer lets us in, is no row: nothing of its table is
kept, so that the sweep goes on there later.
"""

import json
import threading
from collections import deque
from collections.abc import Mapping
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Self

import pyarrow as pa

from mbd_core.evaluation.sweep.decoding import before_stop
from mbd_core.evaluation.sweep.endpoint import MARK, Endpoint, ask_a_token, client_of, said
from mbd_core.evaluation.sweep.parts import COUNTS, DECODED_COLUMNS, in_turns

if TYPE_CHECKING:
    import openai

TOKEN_SECONDS = 60.0  # for one token, where another request failed
MOST_STOPS = 4  # that OpenAI's interface takes; all of them end the text
SHUT = (401, 403, 404, 405, 429, 502, 503)  # what every request would get now, after all that the client tried
ODD = (ValueError, TypeError, AttributeError, LookupError, OverflowError, RecursionError)  # of an answer's content


class EndpointLost(RuntimeError):
    """An endpoint that answered before does so no more."""


class EndpointStage:
    """Asks endpoints, with `concurrency` requests under way at a time; `keys` has those of endpoints that want one."""

    def __init__(self, endpoints: Mapping[str, Endpoint], keys: Mapping[str, str], *, concurrency: int) -> None:
        self._endpoints = dict(endpoints)
        self._keys = dict(keys)
        self._clients = {name: client_of(one.url, keys.get(name)) for name, one in endpoints.items()}
        self._concurrency = concurrency

    def __call__(self, table: pa.Table) -> pa.Table:
        """The table (`PLANNED_COLUMNS`) with texts, seconds and what counts there are (`DECODED_COLUMNS`).

        With an exception the requests that have not begun are dropped, and those under way are not waited for, not
        even when the process ends: an answer may take minutes.
        """
        rows = table.to_pylist()
        waiting, ended = deque(in_turns(rows)), SimpleQueue[BaseException | None]()
        for _ in range(min(self._concurrency, len(rows))):
            threading.Thread(target=self._ask_waiting, args=(waiting, ended), name="endpoint", daemon=True).start()
        try:
            for _ in rows:
                error = ended.get()
                if error is not None:
                    raise error
        finally:
            waiting.clear()
        return pa.Table.from_pylist(rows, schema=DECODED_COLUMNS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections."""
        for client in self._clients.values():
            client.close()

    def _ask_waiting(self, waiting: deque[dict[str, Any]], ended: SimpleQueue[BaseException | None]) -> None:
        """Ask row after row while some wait; each adds its columns to itself, and `None` or its error to `ended`."""
        while True:
            try:
                row = waiting.popleft()
            except IndexError:
                return
            try:
                row.update(self._ask(row))
                ended.put(None)
            except BaseException as error:
                ended.put(error)

    def _ask(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """The decoded columns of a row."""
        import openai

        endpoint, client = self._endpoints[row["model"]], self._clients[row["model"]]
        key = self._keys.get(row["model"])
        try:
            raw = _request(client, endpoint, row)
            columns = _columns(raw.parse(), raw.elapsed.total_seconds(), json.loads(row["stop"]))
            pa.Table.from_pylist([{**row, **columns}], schema=DECODED_COLUMNS)  # raises for what no column can hold
            return columns
        except openai.APIStatusError as error:
            what = f"answers {error.status_code}: {said(error, key)}"
            if error.status_code in SHUT or (error.status_code >= 500 and not _answers(client, endpoint)):
                raise _lost(endpoint, what) from None
            return {"error": f"the endpoint {what}"}
        except openai.APIConnectionError as error:
            if not _answers(client, endpoint):
                raise _lost(endpoint, f"cannot be reached any more: {said(error, key)}") from None
            return {"error": f"the endpoint fails this request: {said(error, key)}"}
        except (openai.OpenAIError, *ODD) as error:
            what = f"{type(error).__name__}: {said(error, key)}"
            return {"error": f"the endpoint's answer has not OpenAI's form ({what})"}


def _request(client: "openai.OpenAI", endpoint: Endpoint, row: Mapping[str, Any]) -> Any:
    """The raw answer to a row's prompt: a chat, or a text that is gone on with."""
    given, decoding = json.loads(row["input"]), json.loads(row["config"])
    asked: dict[str, Any] = {"model": endpoint.model, "max_tokens": row["max_tokens"], "temperature": 0}
    stop = json.loads(row["stop"])[: None if endpoint.is_ours else MOST_STOPS]
    asked |= {"stop": stop} if stop else {}
    if decoding:
        asked["extra_body"] = {"decoding": {name: value for name, value in decoding.items() if value is not None}}
    if isinstance(given, str):
        return client.completions.with_raw_response.create(prompt=given, **asked)
    return client.chat.completions.with_raw_response.create(messages=given, **asked)


def _columns(answer: Any, seconds: float, stop: list[str]) -> dict[str, Any]:
    """What an answer says: its text, its tokens if it counts them, and the forwards if the endpoint is ours."""
    choice, usage = answer.choices[0], answer.usage
    text = choice.text if answer.object == "text_completion" else choice.message.content
    if not isinstance(text, str | None):
        raise TypeError(f"its text is a {type(text).__name__}")
    columns = {
        "num_prompt_tokens": getattr(usage, "prompt_tokens", None),
        "num_tokens": getattr(usage, "completion_tokens", None),
    }
    counts = (answer.model_extra or {}).get(MARK) or {}
    columns |= {name: counts[name] for name in COUNTS if name in counts}
    known = {name: count if type(count) is int and 0 <= count < 2**63 else None for name, count in columns.items()}
    ended = before_stop((text or "").encode("utf-8", "replace").decode(), stop)
    return {**known, "text": ended, "finish_reason": choice.finish_reason, "seconds": seconds}


def _answers(client: "openai.OpenAI", endpoint: Endpoint) -> bool:
    """Whether the endpoint's engine still computes anything: its other routes may answer without it."""
    import openai

    try:
        ask_a_token(client.with_options(max_retries=1, timeout=TOKEN_SECONDS), endpoint.model)
    except openai.APIConnectionError:
        return False
    except openai.APIStatusError as error:
        return error.status_code < 500 and error.status_code not in SHUT
    except openai.OpenAIError:
        return True
    return True


def _lost(endpoint: Endpoint, what: str) -> EndpointLost:
    return EndpointLost(
        f"endpoint '{endpoint.name}' at {endpoint.url} {what}; what was computed is kept, and the same command asks "
        "what is missing"
    )
