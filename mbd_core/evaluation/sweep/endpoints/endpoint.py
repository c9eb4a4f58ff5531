"""An OpenAI endpoint as a sweep's model: its name, what it reports about itself, and its answers to a sweep's rows.

An endpoint of this project takes decoding fields in a request, and reports each answer's number of forwards. Any other
endpoint gives texts, tokens and seconds, and its only method is `ENDPOINT_DEFAULT`.
"""

import json
import os
import re
import ssl
import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Self, cast
from urllib.parse import urlsplit

import pyarrow as pa

from mbd_core.batch.parts import in_turns
from mbd_core.batch.rows import (
    COUNTS,
    DECODED_COLUMNS,
    DRAFTS,
    AnswerColumns,
    CountColumns,
    DecodedRow,
    EndColumns,
    PlannedRow,
    before_stop,
    with_draws,
)
from mbd_core.batch.tool_chats import ToolChat, answer_text
from mbd_core.decoding.blocks.sampling_config import Sampling
from mbd_core.evaluation.sweep.endpoints.request_form import RequestForm, ask_a_token, learn_form
from mbd_core.proxies import is_own, proxy_note

if TYPE_CHECKING:
    import openai

ENDPOINT_DEFAULT = "endpoint-default"  # the method of an endpoint that takes no decoding fields
SECONDS = 600.0  # of a request
RETRIES = 8  # the client waits as long as Retry-After says, else 0.5 s to 8 s, twice as long each time
MARK = "mbd"  # the field in which an endpoint of this project answers with its counts
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True, kw_only=True)
class EndpointAddress:
    """An endpoint's URL and model, and its name in the report. The endpoint's key is kept elsewhere."""

    name: str
    url: str
    model: str | None

    @classmethod
    def parse(cls, text: str) -> "EndpointAddress":
        """Reads `NAME=URL[#MODEL]`. Raises `ValueError` for any other text."""
        name, equals, address = text.partition("=")
        url, _, model = address.strip().partition("#")
        try:
            parts = urlsplit(url)
            is_place = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:
            is_place = False
        if not (equals and NAME.fullmatch(name.strip()) and is_place and not re.search(r"\s", url)):
            url_part = next((part for part in (text, name) if not re.search("[@?]", part)), "...")
            raise ValueError(
                f"--endpoint {url_part} must be NAME=http://HOST:PORT/v1, with #MODEL where it serves several"
            )
        if parts.username or parts.password or parts.query:
            raise ValueError(
                f"--endpoint {name} has a user, a password or a query in its URL, which would stand in the report; "
                f"name the environment variable that holds its key: --endpoint-key {name}=VARIABLE"
            )
        return cls(name=name.strip(), url=url.rstrip("/"), model=model.strip() or None)


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """An endpoint that has answered.

    positions  most tokens of a prompt with its answer; `None` if the endpoint does not report it
    defaults   the decoding of a request without decoding fields; `None`: the endpoint is not of this project
    slots      the largest buffer_size that an endpoint of this project takes
    form       the form of request that it takes
    """

    name: str
    url: str
    model: str
    positions: int | None = None
    defaults: Mapping[str, Any] | None = field(default=None, hash=False)
    slots: int | None = None
    form: RequestForm = RequestForm()

    @property
    def is_ours(self) -> bool:
        return self.defaults is not None

    @property
    def identity(self) -> str:
        """The endpoint's entry in a sweep's record, in the place of a model's digest."""
        return f"endpoint {self.url}#{self.model}"


def is_endpoint(digest: str) -> bool:
    """Whether the digest of a model in a sweep's record names an endpoint."""
    return digest.startswith("endpoint ")


def read_keys(options: Sequence[str], names: Iterable[str]) -> dict[str, str]:
    """The keys of endpoints from `NAME=VARIABLE`. No error repeats the text after `=`, which may be a key by
    mistake."""
    keys: dict[str, str] = {}
    names_text = list(names)
    for option in options:
        name, equals, variable = option.partition("=")
        if not equals or name not in names_text:
            raise ValueError(
                f"--endpoint-key must be NAME=VARIABLE, with a NAME of --endpoint: {', '.join(names_text)}"
            )
        if name in keys:
            raise ValueError(f"--endpoint-key gives endpoint '{name}' two keys; give one")
        if not (key := os.environ.get(variable, "").strip()):
            raise ValueError(
                f"--endpoint-key {name}=... must name an environment variable that is set and holds the key, "
                "not the key itself"
            )
        if not (key.isascii() and key.isprintable()):
            raise ValueError(f"--endpoint-key {name}: the key in {variable} has characters that no HTTP header holds")
        keys[name] = key
    return keys


def client_of(url: str, key: str | None, *, retries: int = RETRIES) -> "openai.OpenAI":
    """OpenAI's client. It takes only a proxy for other machines from the environment, so that no other endpoint's key
    is sent to this one. Raises `ValueError` if its package is not installed, or for a bad URL."""
    try:
        import openai
    except ImportError:
        raise ValueError("--endpoint needs the package openai (pip install 'mbd-cluster[endpoint]')") from None
    headers: dict[str, Any] = {"OpenAI-Organization": openai.omit, "OpenAI-Project": openai.omit}
    note = ""
    try:
        note = proxy_note(url)
        direct: dict[str, Any] = {"trust_env": False, "verify": ssl.create_default_context()} if is_own(url) else {}
        return openai.OpenAI(
            base_url=url,
            api_key=key or "none",
            default_headers=headers,
            max_retries=retries,
            timeout=SECONDS,
            http_client=openai.DefaultHttpxClient(timeout=SECONDS, **direct),
        )
    except Exception as error:  # its type depends on the HTTP client
        raise ValueError(f"--endpoint {url} is no URL that can be asked: {error}{note}") from None


def find_endpoint(address: EndpointAddress, key: str | None, *, sampling: Sampling | None = None) -> Endpoint:
    """Ask an endpoint for its models, and for one token in the form of a sweep's requests, drawn by `sampling`
    (default: greedy).

    Raises `ValueError`, one sentence, if the endpoint gives no such answer, or refuses a field of `sampling`.
    """
    import openai

    client, place = client_of(address.url, key, retries=1), f"endpoint '{address.name}' at {address.url}"
    try:
        models, positions = _named_models(client)
        model = address.model or (models[0] if len(models) == 1 else None)
        if model is None:
            raise ValueError(
                f"{place} serves {', '.join(models) or 'no model that it names'}; name one: {address.url}#MODEL"
            )
        if models and model not in models:
            raise ValueError(f"{place} serves no '{model}'; it serves {', '.join(models)}")
        form, answer = learn_form(client, model, RequestForm())
        endpoint = Endpoint(name=address.name, url=address.url, model=model, positions=positions.get(model))
        if answer is not None and MARK in (answer.model_extra or {}):
            return _own_endpoint(client, endpoint)
        form, _ = learn_form(client, model, form, **_sampling_fields(sampling or Sampling()), stop=["\n\n\n\n"])
        _check_sampling(place, form, sampling or Sampling())
        return replace(endpoint, form=form)
    except (openai.AuthenticationError, openai.PermissionDeniedError) as error:
        refusal = "refuses the key that --endpoint-key names" if key else "wants a key: --endpoint-key NAME=VARIABLE"
        raise ValueError(f"{place} {refusal} ({error.status_code})") from None
    except openai.APIStatusError as error:
        reason = f"{error_text(error, key)}; check URL and model{proxy_note(address.url)}"
        raise ValueError(f"{place} answers {error.status_code}: {reason}") from None
    except openai.APIConnectionError as error:
        remedy = proxy_note(address.url) or "; check host and port"
        raise ValueError(f"{place} cannot be reached: {error_text(error, key)}{remedy}") from None
    except (openai.OpenAIError, json.JSONDecodeError, AttributeError, LookupError, TypeError) as error:
        raise ValueError(f"{place} does not answer as an OpenAI endpoint does ({type(error).__name__})") from None
    finally:
        client.close()


def _sampling_fields(sampling: Sampling) -> dict[str, Any]:
    """The sampling fields of a row's request, as `Sweep` writes them."""
    draws = {"temperature": sampling.temperature, "top_p": sampling.top_p, "seed": sampling.seed}
    return draws if sampling.draws else {"temperature": 0}


def _check_sampling(place: str, form: RequestForm, sampling: Sampling) -> None:
    """Raise `ValueError` if an endpoint refuses a field of `sampling` that the sweep needs."""
    asked = {"temperature": sampling.draws, "top_p": sampling.draws and sampling.top_p != 1}
    refused = [name for name in form.left_out if asked.get(name)]
    if refused:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in refused)
        raise ValueError(f"{place} refuses {' and '.join(refused)}; it draws as it likes, so leave out {options}")


def try_decoding(endpoint: Endpoint, key: str | None, configs: Sequence[Mapping[str, Any]]) -> None:
    """Ask an endpoint of this project for a token with each configuration. Raises `ValueError`, with the endpoint's
    words, if it cannot honour a configuration. Canvases are not tried: they would be filled completely."""
    import openai

    client = client_of(endpoint.url, key, retries=1)
    try:
        for config in configs:
            fields = {name: value for name, value in config.items() if value is not None}
            if fields and "canvas" not in fields:
                ask_a_token(client, endpoint.model, endpoint.form, extra_body={"decoding": fields})
    except openai.APIStatusError as error:
        refusal = f"endpoint '{endpoint.name}' refuses decoding {json.dumps(fields)}"
        raise ValueError(f"{refusal}: {error_text(error, key)}") from None
    except openai.APIConnectionError as error:
        reason = f"{error_text(error, key)}{proxy_note(endpoint.url)}"
        raise ValueError(f"endpoint '{endpoint.name}' cannot be reached: {reason}") from None
    finally:
        client.close()


def _named_models(client: "openai.OpenAI") -> tuple[list[str], dict[str, int]]:
    """The names of the endpoint's models (none if it lacks this route), and their positions if it reports them."""
    import openai

    try:
        models = client.models.list().data
    except openai.NotFoundError:
        return [], {}
    lengths = {model.id: (model.model_extra or {}).get("max_model_len") for model in models}
    return list(lengths), {name: length for name, length in lengths.items() if isinstance(length, int)}


def _own_endpoint(client: "openai.OpenAI", endpoint: Endpoint) -> Endpoint:
    """An endpoint of this project, with facts about its model from this project's own routes, which lie beside
    `/v1`."""
    root = endpoint.url.removesuffix("/v1")
    health = client.get(f"{root}/health", cast_to=object)
    state = _engine_state(health["models"], endpoint.model)  # type: ignore[index]
    if state is None:
        raise ValueError(
            f"endpoint '{endpoint.name}' at {endpoint.url} names no running replica of "
            f"'{endpoint.model}' at {root}/health; repeat the command when it does"
        )
    tokens = client.post(f"{root}/tokenize", body={"model": endpoint.model, "prompt": "1"}, cast_to=object)
    return Endpoint(
        name=endpoint.name,
        url=endpoint.url,
        model=endpoint.model,
        positions=tokens["max_model_len"],  # type: ignore[index]
        defaults={name: value for name, value in state["defaults"].items() if value is not None},
        slots=state["engine"]["buffer_size"],
    )


def _engine_state(models: Sequence[Mapping[str, Any]], name: str) -> Mapping[str, Any] | None:
    """The state of the first replica that answers, of a model or of an adapter's base; `None` if no replica
    answers."""
    return next(
        (
            state
            for model in models
            for state in model["replicas"]
            if "defaults" in state and (model["name"] == name or name in state.get("adapters", {}))
        ),
        None,
    )


def error_text(error: Exception, key: str | None) -> str:
    """An error on one line. An endpoint may repeat a request's headers, so its key is left out."""
    body = getattr(error, "body", None)
    text = str((isinstance(body, Mapping) and body.get("message")) or error.__cause__ or error)
    text = text.replace(key, "***") if key else text
    return " ".join(text.encode("utf-8", "replace").decode().split())[:300]


# The first stage of a sweep against endpoints: every row of a table is asked, as `DecodeStage` decodes it.
#
# What an endpoint does not report stays unknown (null). A request that an endpoint refuses, or fails for good while it
# answers other requests, becomes a row with the reason. If an endpoint is gone, or no longer lets us in, its table is
# dropped, so that the sweep can continue with it later.

TOKEN_SECONDS = 60.0  # for one token, after another request has failed
MOST_STOPS = 4  # stop strings that OpenAI's interface takes; afterwards the text is cut at all stop strings
# statuses that every further request would get too: the client has repeated the request already
CLOSED_STATUSES = (401, 403, 404, 405, 429, 502, 503)
# other interfaces' words for OpenAI's, which some endpoints pass on
FINISH_REASONS = {
    **dict.fromkeys(("max_tokens", "MAX_TOKENS", "max_output_tokens", "model_length", "max_length"), "length"),
    **dict.fromkeys(("eos", "eos_token", "end_turn", "stop_sequence", "STOP", "COMPLETE"), "stop"),
}
ODD = (ValueError, TypeError, AttributeError, LookupError, OverflowError, RecursionError)  # of odd answers


class EndpointLost(RuntimeError):
    """An endpoint that answered before no longer answers."""


class ReplyColumns(AnswerColumns, CountColumns, EndColumns):
    """The columns of an endpoint's answer to a row, or the reason why there is none."""


class EndpointStage:
    """Asks endpoints, with `concurrency` requests under way at a time; `keys` holds the keys of endpoints that need
    one."""

    def __init__(self, endpoints: Mapping[str, Endpoint], keys: Mapping[str, str], *, concurrency: int) -> None:
        self._endpoints = dict(endpoints)
        self._keys = dict(keys)
        self._clients = {name: client_of(endpoint.url, keys.get(name)) for name, endpoint in endpoints.items()}
        self._concurrency = concurrency

    def __call__(self, table: pa.Table) -> pa.Table:
        """The table (`PLANNED_COLUMNS`) with texts, seconds and the counts that endpoints report (`DECODED_COLUMNS`).

        After an exception, requests that have not begun are dropped. Requests under way are not waited for, even when
        the process ends, because an answer may take minutes.
        """
        rows: list[DecodedRow] = table.to_pylist()
        waiting, outcomes = deque(in_turns(rows)), SimpleQueue[BaseException | None]()
        for _ in range(min(self._concurrency, len(rows))):
            threading.Thread(target=self._ask_waiting, args=(waiting, outcomes), name="endpoint", daemon=True).start()
        try:
            for _ in rows:
                error = outcomes.get()
                if error is not None:
                    raise error
        finally:
            waiting.clear()
        return pa.Table.from_pylist(rows, schema=with_draws(DECODED_COLUMNS, rows))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections."""
        for client in self._clients.values():
            client.close()

    def _ask_waiting(self, waiting: deque[DecodedRow], outcomes: SimpleQueue[BaseException | None]) -> None:
        """Ask row after row while rows wait. Each row gets its columns, and `outcomes` gets its error or `None`."""
        while True:
            try:
                row = waiting.popleft()
            except IndexError:
                return
            try:
                row.update(self._ask(row))
                outcomes.put(None)
            except BaseException as error:
                outcomes.put(error)

    def _ask(self, row: PlannedRow) -> ReplyColumns:
        """The decoded columns of a row."""
        import openai

        endpoint, client = self._endpoints[row["model"]], self._clients[row["model"]]
        key = self._keys.get(row["model"])
        try:
            raw = _request(client, endpoint, row)
            answer = raw.parse()
            columns = _columns(answer, raw.elapsed.total_seconds(), json.loads(row["stop"]))
            if ToolChat.of_input(row["input"]) is not None:
                columns["text"] = answer_text(columns["text"] or "", _calls(answer.choices[0].message))
            pa.Table.from_pylist([{**row, **columns}], schema=DECODED_COLUMNS)  # raises for odd values
            return columns
        except openai.APIStatusError as error:
            said = f"answers {error.status_code}: {error_text(error, key)}"
            if error.status_code in CLOSED_STATUSES or (error.status_code >= 500 and not _answers(client, endpoint)):
                raise _loss(endpoint, said) from None
            return {"error": f"the endpoint {said}"}
        except openai.APIConnectionError as error:
            if not _answers(client, endpoint):
                raise _loss(endpoint, f"cannot be reached any more: {error_text(error, key)}") from None
            return {"error": f"the endpoint fails this request: {error_text(error, key)}"}
        except (openai.OpenAIError, *ODD) as error:
            reason = f"{type(error).__name__}: {error_text(error, key)}"
            return {"error": f"the endpoint's answer has not OpenAI's form ({reason})"}


def _request(client: "openai.OpenAI", endpoint: Endpoint, row: PlannedRow) -> Any:
    """The raw answer to a row's prompt: a chat, or a text to continue."""
    prompt, decoding = json.loads(row["input"]), json.loads(row["config"])
    fields: dict[str, Any] = {"max_tokens": row["max_tokens"], "temperature": 0}
    fields |= json.loads(row.get("sampling") or "{}")
    stop = json.loads(row["stop"])[: None if endpoint.is_ours else MOST_STOPS]
    fields |= {"stop": stop} if stop else {}
    extra: dict[str, Any] = {}
    if "repetition_penalty" in (endpoint.defaults or {}):
        extra["repetition_penalty"] = 1
    if decoding:
        extra["decoding"] = {name: value for name, value in decoding.items() if value is not None}
    fields |= {"extra_body": extra} if extra else {}
    is_text = isinstance(prompt, str)
    fields = {"model": endpoint.model, **endpoint.form.of(fields, is_chat=not is_text)}
    if is_text:
        return client.completions.with_raw_response.create(prompt=prompt, **fields)
    if (chat := ToolChat.of_input(row["input"])) is not None:
        prompt, fields["tools"] = chat.messages, chat.tools
    return client.chat.completions.with_raw_response.create(messages=prompt, **fields)


def _columns(answer: Any, seconds: float, stop: list[str]) -> ReplyColumns:
    """The columns of an answer: its text, its tokens if it counts them, and the forwards if the endpoint is ours."""
    choice, usage = answer.choices[0], answer.usage
    finish_reason = FINISH_REASONS.get(choice.finish_reason, choice.finish_reason)
    text = choice.text if answer.object == "text_completion" else choice.message.content
    if not text and answer.object != "text_completion" and finish_reason == "stop":
        said = choice.message.model_extra or {}
        text = said.get("reasoning_content") or said.get("reasoning") or text  # a thought is all that it said
    if not isinstance(text, str | None):
        raise TypeError(f"its text is a {type(text).__name__}")
    columns = {
        "num_prompt_tokens": getattr(usage, "prompt_tokens", None),
        "num_tokens": getattr(usage, "completion_tokens", None),
    }
    counts = (answer.model_extra or {}).get(MARK) or {}
    columns |= {name: counts[name] for name in (*COUNTS, *DRAFTS) if name in counts}
    numbers = {name: count if type(count) is int and 0 <= count < 2**63 else None for name, count in columns.items()}
    answer_text = before_stop((text or "").encode("utf-8", "replace").decode(), stop)
    counted = cast(CountColumns, numbers)
    return {**counted, "text": answer_text, "finish_reason": finish_reason, "seconds": seconds}


def _calls(message: Any) -> list[dict[str, str]]:
    """The calls of a message. Raises `TypeError` for a name or arguments that are no text."""
    calls = [{"name": call.function.name, "arguments": call.function.arguments} for call in message.tool_calls or ()]
    for call in calls:
        for name, value in call.items():
            if not isinstance(value, str):
                raise TypeError(f"a call's {name} is a {type(value).__name__}")
    return calls


def _answers(client: "openai.OpenAI", endpoint: Endpoint) -> bool:
    """Whether the endpoint's engine still computes anything: its other routes may answer without the engine."""
    import openai

    try:
        ask_a_token(client.with_options(max_retries=1, timeout=TOKEN_SECONDS), endpoint.model, endpoint.form)
    except openai.APIConnectionError:
        return False
    except openai.APIStatusError as error:
        return error.status_code < 500 and error.status_code not in CLOSED_STATUSES
    except openai.OpenAIError:
        return True
    return True


def _loss(endpoint: Endpoint, answer: str) -> EndpointLost:
    return EndpointLost(
        f"endpoint '{endpoint.name}' at {endpoint.url} {answer}{proxy_note(endpoint.url)}; what was computed is kept, "
        "and the same command asks what is missing"
    )
