"""The first stage of a sweep against endpoints: every row of a table is asked, as `DecodeStage` decodes it.

What an endpoint does not say stays unknown (null). A request that it refuses, or fails for good while it answers
others, is a row with the reason. An endpoint that is gone, or no longer lets us in, is no row: nothing of its table is
kept, so that the sweep goes on there later.
"""

import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Self

import pyarrow as pa

from mbd_core.evaluation.answer_ends import before_stop
from mbd_core.evaluation.endpoint import MARK, Endpoint, client_of, said
from mbd_core.evaluation.sample_tables import COUNTS, DECODED_COLUMNS

if TYPE_CHECKING:
    import openai

MOST_STOPS = 4  # that OpenAI's interface takes; all of them end the text
SHUT = (401, 403, 404, 405, 429, 502, 503)  # what every request would get now, after all that the client tried


class EndpointLost(RuntimeError):
    """An endpoint that answered before does so no more."""


class EndpointStage:
    """Asks endpoints, with `concurrency` requests under way at a time; `keys` has those of endpoints that want one."""

    def __init__(self, endpoints: Mapping[str, Endpoint], keys: Mapping[str, str], *, concurrency: int) -> None:
        self._endpoints = dict(endpoints)
        self._clients = {name: client_of(one.url, keys.get(name)) for name, one in endpoints.items()}
        self._pool = ThreadPoolExecutor(concurrency, thread_name_prefix="endpoint")

    def __call__(self, table: pa.Table) -> pa.Table:
        """The table (`PLANNED_COLUMNS`) with texts, seconds and what counts there are (`DECODED_COLUMNS`)."""
        rows = table.to_pylist()
        asked = [self._pool.submit(self._ask, row) for row in rows]
        try:
            for row, answer in zip(rows, asked, strict=True):
                row.update(answer.result())
        finally:
            for answer in asked:
                answer.cancel()
        return pa.Table.from_pylist(rows, schema=DECODED_COLUMNS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections, when the requests under way have ended."""
        self._pool.shutdown(cancel_futures=True)
        for client in self._clients.values():
            client.close()

    def _ask(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """The decoded columns of a row."""
        import openai

        endpoint, client = self._endpoints[row["model"]], self._clients[row["model"]]
        try:
            raw = _request(client, endpoint, row)
            return _columns(raw.parse(), raw.elapsed.total_seconds(), json.loads(row["stop"]))
        except openai.APIStatusError as error:
            if error.status_code in SHUT:
                raise _lost(endpoint, f"answers {error.status_code}: {said(error)}") from None
            return {"error": f"the endpoint answers {error.status_code}: {said(error)}"}
        except openai.APIConnectionError as error:
            if not _answers(client):
                raise _lost(endpoint, f"cannot be reached any more: {error.__cause__ or error}") from None
            return {"error": f"the endpoint fails this request: {error.__cause__ or error}"}
        except (openai.OpenAIError, json.JSONDecodeError, AttributeError, IndexError, TypeError) as error:
            return {"error": f"the endpoint's answer has not OpenAI's form ({type(error).__name__}: {error})"}


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
    columns = {"num_prompt_tokens": usage and usage.prompt_tokens, "num_tokens": usage and usage.completion_tokens}
    counts = (answer.model_extra or {}).get(MARK) or {}
    columns |= {name: counts[name] for name in COUNTS if name in counts}
    ended = before_stop(text or "", stop)
    return {**columns, "text": ended, "finish_reason": choice.finish_reason, "seconds": seconds}


def _answers(client: "openai.OpenAI") -> bool:
    """Whether the endpoint says anything at all."""
    import openai

    try:
        client.with_options(max_retries=1, timeout=20.0).models.list()
    except openai.APIConnectionError:
        return False
    except openai.OpenAIError:
        return True
    return True


def _lost(endpoint: Endpoint, what: str) -> EndpointLost:
    return EndpointLost(
        f"endpoint '{endpoint.name}' at {endpoint.url} {what}; what was computed is kept, and the same command asks "
        "what is missing"
    )
