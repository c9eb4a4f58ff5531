"""A sweep's requests to an OpenAI endpoint, with OpenAI's own client: what is known of an answer, and what fails."""

import json
import time
from collections.abc import Iterator, Mapping
from threading import Event
from types import MappingProxyType
from typing import Any

import pyarrow as pa
import pytest
from scripted_endpoint import ANSWER, Answer, ScriptedEndpoint, completion
from sweep_rows import planned_samples

from mbd_core.batch.rows import DECODED_COLUMNS
from mbd_core.batch.tool_chats import ToolChat
from mbd_core.decoding.blocks.sampling_config import Sampling
from mbd_core.evaluation.measures.rates import summarize
from mbd_core.evaluation.sweep.endpoints import endpoint as endpoint_room
from mbd_core.evaluation.sweep.endpoints.endpoint import (
    ENDPOINT_DEFAULT,
    Endpoint,
    EndpointAddress,
    EndpointLost,
    EndpointStage,
    find_endpoint,
    read_keys,
)
from mbd_core.evaluation.sweep.endpoints.request_form import RequestForm
from mbd_core.evaluation.sweep.gathered_samples import graded_sample
from mbd_core.evaluation.sweep.grading.part_grading import grade_table
from mbd_core.evaluation.sweep.plan import endpoint_notes

UNKNOWN = ("num_forwards", "num_store_forwards", "num_prefill_forwards")


@pytest.fixture
def server() -> Iterator[ScriptedEndpoint]:
    with ScriptedEndpoint() as server:
        yield server


@pytest.fixture(autouse=True)
def few_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_room.client_of, "__kwdefaults__", {"retries": 2})


def rows_of(
    server: ScriptedEndpoint,
    prompts: list[str],
    *,
    concurrency: int = 2,
    keys: Mapping[str, str] = MappingProxyType({}),
    **columns: Any,
) -> list[Any]:
    table = planned_samples(["x"], prompts=prompts)
    plain = [{**row, "config": "{}", "method": ENDPOINT_DEFAULT, **columns} for row in table.to_pylist()]
    endpoint = Endpoint(name="x", url=server.url, model="m")
    with EndpointStage({"x": endpoint}, keys, concurrency=concurrency) as stage:
        decoded = stage(pa.Table.from_pylist(plain, schema=table.schema))
    assert decoded.schema == DECODED_COLUMNS
    return list(decoded.to_pylist())


def test_a_chat_with_functions_gives_text_and_calls(server: ScriptedEndpoint) -> None:
    called = completion("One moment.")
    function = {"name": "take", "arguments": '{"n": 3}'}
    called["choices"][0]["message"]["tool_calls"] = [{"id": "1", "type": "function", "function": function}]
    server.script = lambda body: (200, {}, called if body["messages"][0]["content"] == "Take." else completion("No."))
    tools = [{"type": "function", "function": {"name": "take", "description": "Takes.", "parameters": {}}}]
    chats = [ToolChat(messages=[{"role": "user", "content": text}], tools=tools) for text in ("Take.", "Leave it.")]
    rows = [row for chat in chats for row in rows_of(server, ["?"], input=chat.as_json())]
    assert [body["tools"] for body in server.bodies] == [tools, tools]
    answers = [json.loads(row["text"]) for row in rows]
    assert answers == [{"content": "One moment.", "calls": [function]}, {"content": "No.", "calls": []}]


@pytest.mark.parametrize(
    "function", [{"name": "take", "arguments": {"n": 3}}, {"name": None, "arguments": "{}"}, None]
)
def test_a_call_without_openai_s_form_is_an_error(server: ScriptedEndpoint, function: Any) -> None:
    called = completion("")
    called["choices"][0]["message"]["tool_calls"] = [{"id": "1", "type": "function", "function": function}]
    server.script = lambda _: (200, {}, called)
    tools = [{"type": "function", "function": {"name": "take", "description": "Takes.", "parameters": {}}}]
    chat = ToolChat(messages=[{"role": "user", "content": "Take."}], tools=tools)
    [row] = rows_of(server, ["?"], input=chat.as_json())
    assert "has not OpenAI's form" in row["error"] and row["text"] is None


def test_what_an_endpoint_says_is_known_and_what_it_does_not_say_is_null(server: ScriptedEndpoint) -> None:
    rows = rows_of(server, ["2 + 2?", "1 + 3?"], stop=json.dumps(["A", "B", "C", "D", " ####"]))
    assert [row["text"] for row in rows] == ["Tom has"] * 2, "also by a stop that the endpoint is not given"
    assert {(row["num_prompt_tokens"], row["num_tokens"], row["finish_reason"]) for row in rows} == {(7, 3, "stop")}
    assert all(row[name] is None for row in rows for name in (*UNKNOWN, "error"))
    assert all(0 < row["seconds"] < 60 for row in rows)
    body = server.bodies[0]
    assert body["messages"][-1]["content"] in ("2 + 2?", "1 + 3?")
    assert (body["model"], body["max_tokens"], body["temperature"], body["stop"]) == ("m", 12, 0, ["A", "B", "C", "D"])
    assert "decoding" not in body
    summary = summarize([graded_sample(row) for row in grade_table(pa.Table.from_pylist(rows)).to_pylist()])
    assert (summary.tpf, summary.tpf_ratio_of_sums, summary.nfe, summary.num_forwards) == (None, None, None, None)
    assert (summary.n, summary.num_tokens, summary.errors) == (2, 6, 0)


def test_tokens_that_are_not_counted_are_null_and_a_text_is_gone_on_with(server: ScriptedEndpoint) -> None:
    server.script = lambda body: (200, {}, completion(usage=False, kind="text_completion"))
    (row,) = rows_of(server, ["x"], input=json.dumps("Question: 2 + 2?"))
    assert row["num_tokens"] is None and row["num_prompt_tokens"] is None and row["text"] == ANSWER
    assert (server.bodies[0]["path"], server.bodies[0]["prompt"]) == ("/v1/completions", "Question: 2 + 2?")
    (sample,) = (graded_sample(one) for one in grade_table(pa.Table.from_pylist([row])).to_pylist())
    assert summarize([sample]).num_tokens is None and summarize([sample]).tpf is None


def refusal(param: str, message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "invalid_request_error", "param": param, "code": "unsupported"}}


def reasoning_model(body: dict[str, Any]) -> dict[str, Any] | None:
    """What OpenAI's endpoint says for its reasoning models."""
    if "max_tokens" in body:
        message = "'max_tokens' is not supported with this model. Use 'max_completion_tokens' instead."
        return refusal("max_tokens", f"Unsupported parameter: {message}")
    if body.get("temperature", 1) != 1:
        message = "'temperature' does not support 0 with this model. Only the default (1) value is supported."
        return refusal("temperature", f"Unsupported value: {message}")
    if "stop" in body:
        return refusal("stop", "Unsupported parameter: 'stop' is not supported with this model.")
    if body["max_completion_tokens"] == 1:
        return {
            "error": {"message": "Could not finish the message because max_tokens or model output limit was reached."}
        }
    return None


def strict_server(body: dict[str, Any]) -> dict[str, Any] | None:
    """A server that checks its fields by pydantic, and wants so many tokens."""
    extra = [name for name in ("seed", "top_p", "stop") if name in body]
    if extra:
        return {"detail": [{"loc": ["body", extra[0]], "msg": "Extra inputs are not permitted", "type": "extra"}]}
    if body["max_tokens"] < 16:
        return refusal("max_tokens", "Invalid 'max_tokens': integer below minimum value. Expected a value >= 16.")
    return None


@pytest.mark.parametrize(
    ("refuse", "form"),
    [
        (lambda body: None, RequestForm()),
        (reasoning_model, RequestForm(renames_limit=True, left_out=("temperature", "stop"))),
        (strict_server, RequestForm(left_out=("stop",))),
        (
            lambda body: refusal("", "Unable to submit: no stopSequences parameter") if "stop" in body else None,
            RequestForm(left_out=("stop",)),
        ),
    ],
)
def test_an_endpoint_is_asked_as_it_wants(server: ScriptedEndpoint, refuse: Any, form: RequestForm) -> None:
    server.refuse = refuse
    found = find_endpoint(EndpointAddress(name="x", url=server.url, model=None), None)
    assert found.form == form
    table = planned_samples(["x"], prompts=["2 + 2?"])
    columns = {"config": "{}", "method": ENDPOINT_DEFAULT, "stop": json.dumps([" ####"]), "max_tokens": 32}
    rows = pa.Table.from_pylist([{**row, **columns} for row in table.to_pylist()], schema=table.schema)
    with EndpointStage({"x": found}, {}, concurrency=1) as stage:
        (row,) = stage(rows).to_pylist()
    assert (row["error"], row["text"]) == (None, "Tom has"), "cut at the stop that the endpoint does not take"
    assert len(endpoint_notes(found, [])) == 1 + len(form.left_out) + form.renames_limit
    assert ("without a temperature" in endpoint_notes(found, [])[0]) == ("temperature" in form.left_out)


def test_a_temperature_that_was_asked_for_is_not_left_out(server: ScriptedEndpoint) -> None:
    address = EndpointAddress(name="x", url=server.url, model=None)
    server.refuse = reasoning_model
    with pytest.raises(ValueError, match="leave out --temperature"):
        find_endpoint(address, None, sampling=Sampling(temperature=0.7))
    server.refuse = strict_server
    found = find_endpoint(address, None, sampling=Sampling(temperature=0.7))
    assert set(found.form.left_out) == {"seed", "top_p", "stop"}, "top_p 1 changes nothing"
    with pytest.raises(ValueError, match="leave out --top-p"):
        find_endpoint(address, None, sampling=Sampling(temperature=0.7, top_p=0.9))
    server.refuse = lambda body: refusal("model", "The model 'm' needs a licence.")
    with pytest.raises(ValueError, match="needs a licence"):
        find_endpoint(address, None)


@pytest.mark.parametrize(
    ("message", "reason", "text", "known"),
    [
        ({"content": None, "reasoning_content": "It is #### 4"}, "stop", "It is #### 4", "stop"),
        ({"content": "", "reasoning": "It is #### 4"}, "end_turn", "It is #### 4", "stop"),
        ({"content": None, "reasoning_content": "It is #### 4, or"}, "length", "", "length"),
        ({"content": "#### 4", "reasoning_content": "Or #### 5"}, "STOP", "#### 4", "stop"),
        ({"content": "#### 4"}, "MAX_TOKENS", "#### 4", "length"),
        ({"content": "#### 4"}, None, "#### 4", None),
        ({"content": None, "refusal": "No."}, "content_filter", "", "content_filter"),
    ],
)
def test_other_words_for_an_answer_s_end_and_its_reasoning(
    server: ScriptedEndpoint, message: dict[str, Any], reason: str | None, text: str, known: str | None
) -> None:
    choice = {"index": 0, "finish_reason": reason, "message": {"role": "assistant", **message}}
    server.script = lambda body: (200, {}, completion() | {"choices": [choice]})
    (row,) = rows_of(server, ["2 + 2?"])
    assert (row["text"], row["finish_reason"], row["error"]) == (text, known, None)


def test_a_busy_endpoint_is_asked_again_when_it_says(server: ScriptedEndpoint) -> None:
    came: list[float] = []

    def busy(body: dict[str, Any]) -> Answer:
        came.append(time.monotonic())
        return (
            (429, {"Retry-After": "1"}, {"error": {"message": "busy"}}) if len(came) == 1 else (200, {}, completion())
        )

    server.script = busy
    (row,) = rows_of(server, ["2 + 2?"])
    assert row["text"] == ANSWER and row["error"] is None
    assert len(came) == 2 and came[1] - came[0] >= 1.0


def test_what_fails_for_good_is_a_row_and_the_others_go_on(server: ScriptedEndpoint) -> None:
    def script(body: dict[str, Any]) -> Answer:
        question = body["messages"][-1]["content"]
        if question == "long":
            return 400, {}, {"error": {"message": "too many\ntokens"}}
        if question == "broken":
            return 500, {"Retry-After": "0.01"}, {"error": {"message": "out of memory"}}
        if question == "shut":
            return 0, {}, {}
        return 200, {}, {"choices": []} if question == "odd" else completion()

    server.script = script
    long, good, broken, shut, odd = rows_of(server, ["long", "good", "broken", "shut", "odd"])
    assert long["error"] == "the endpoint answers 400: too many tokens" and long["text"] is None
    assert good["text"] == ANSWER and good["error"] is None
    assert broken["error"] == "the endpoint answers 500: out of memory"
    assert shut["error"].startswith("the endpoint fails this request: ")
    assert odd["error"].startswith("the endpoint's answer has not OpenAI's form")
    asked = [body["messages"][-1]["content"] for body in server.bodies]
    assert (asked.count("long"), asked.count("broken"), asked.count("shut")) == (1, 3, 3)
    graded = grade_table(pa.Table.from_pylist([broken])).to_pylist()[0]
    assert (graded["correct"], graded["reason"]) == (False, "undecoded")
    assert summarize([graded_sample(graded)]).tpf is None, "not 0, though there is no answer at all"


def test_an_odd_answer_costs_no_other_row(server: ScriptedEndpoint) -> None:
    usage = {"prompt_tokens": 7, "completion_tokens": 2**70, "total_tokens": 10}
    odd: dict[str, Answer] = {
        "surrogate": (200, {}, completion("four \ud83d")),
        "parts": (200, {}, completion([{"type": "text", "text": "4"}])),  # type: ignore[arg-type]
        "huge": (200, {}, completion() | {"usage": usage}),
        "half": (200, {}, completion() | {"usage": usage | {"completion_tokens": 5.5}}),
        "no counts": (200, {}, completion() | {"usage": {}}),
        "reason": (200, {}, completion() | {"choices": [completion()["choices"][0] | {"finish_reason": ["\ud83d"]}]}),
        "refused": (400, {}, {"error": {"message": "not \ud83d"}}),
    }
    server.script = lambda body: odd.get(body["messages"][-1]["content"], (200, {}, completion()))
    rows = dict(zip((*odd, "good"), rows_of(server, [*odd, "good"]), strict=True))
    assert rows["good"]["text"] == ANSWER and rows["surrogate"]["text"] == "four ?"
    assert rows["parts"]["error"] == "the endpoint's answer has not OpenAI's form (TypeError: its text is a list)"
    assert rows["reason"]["error"].startswith("the endpoint's answer has not OpenAI's form")
    assert rows["refused"]["error"] == "the endpoint answers 400: not ?"
    for name in ("huge", "half", "no counts"):
        assert (rows[name]["num_tokens"], rows[name]["text"], rows[name]["error"]) == (None, ANSWER, None)
    assert rows["huge"]["num_prompt_tokens"] == 7


@pytest.mark.parametrize("status", [500, 504])
def test_an_endpoint_whose_engine_is_dead_is_no_row(server: ScriptedEndpoint, status: int) -> None:
    server.script = lambda body: (status, {"Retry-After": "0.01"}, {"error": {"message": "EngineDeadError"}})
    server.is_dead = True
    with pytest.raises(EndpointLost, match=f"{status}"):
        rows_of(server, ["1?"])


@pytest.mark.parametrize("status", [400, 401])
def test_a_key_that_an_endpoint_repeats_is_not_said(server: ScriptedEndpoint, status: int) -> None:
    server.script = lambda body: (status, {}, {"error": {"message": "no request with Bearer sk-secret"}})
    if status == 400:
        (row,) = rows_of(server, ["1?"], keys={"x": "sk-secret"})
        assert row["error"] == "the endpoint answers 400: no request with Bearer ***"
        return
    with pytest.raises(EndpointLost, match="401"):
        rows_of(server, ["1?"], keys={"x": "sk-secret"})


def test_requests_under_way_are_not_waited_for_when_the_endpoint_is_lost(server: ScriptedEndpoint) -> None:
    begun, released, ended = Event(), Event(), []

    def script(body: dict[str, Any]) -> Answer:
        question = body["messages"][-1]["content"]
        if question == "slow":
            begun.set()
            released.wait(20)
        else:
            begun.wait(20)
        ended.append(question)
        return (0, {}, {}) if question == "slow" else (403, {}, {"error": {"message": "no more"}})

    server.script = script
    with pytest.raises(EndpointLost):
        rows_of(server, ["slow", "shut"])
    assert ended == ["shut"]
    released.set()


def test_requests_under_way_are_bounded(server: ScriptedEndpoint) -> None:
    def slow(body: dict[str, Any]) -> Answer:
        time.sleep(0.05)
        return 200, {}, completion()

    server.script = slow
    rows_of(server, [f"{n}?" for n in range(12)], concurrency=3)
    assert len(server.bodies) == 12 and server.most_at_once == 3


def test_an_endpoint_that_is_gone_or_shut_keeps_nothing_of_its_table(server: ScriptedEndpoint) -> None:
    server.script = lambda body: (429, {"Retry-After": "0.01"}, {"error": {"message": "quota"}})
    with pytest.raises(EndpointLost, match="429"):
        rows_of(server, ["1?"])
    assert len(server.bodies) == 3, "it was asked again before"
    server.script = lambda body: (403, {}, {"error": {"message": "no more"}})
    with pytest.raises(EndpointLost, match="403"):
        rows_of(server, ["1?", "2?"])
    with ScriptedEndpoint() as gone:
        pass
    with pytest.raises(EndpointLost):
        rows_of(gone, ["1?"])


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("http://h/v1", "must be NAME=http://HOST:PORT/v1"),
        ("m=ftp://h/v1", "must be NAME=http://HOST:PORT/v1"),
        ("a b=http://h/v1", "must be NAME=http://HOST:PORT/v1"),
        ("m=http://:8000/v1", "must be NAME=http://HOST:PORT/v1"),
        ("m=http://h:abc/v1", "m=http://h:abc/v1 must be NAME=http://HOST:PORT/v1"),
        ("m=http://h:99999/v1", "must be NAME=http://HOST:PORT/v1"),
        ("m=http://[::1/v1", "must be NAME=http://HOST:PORT/v1"),
        ("my m=https://h/v1?api_key=secret", "--endpoint my m must be NAME=http://HOST:PORT/v1"),
        ("https://me:secret@h/v1?a=1", "--endpoint ... must be NAME=http://HOST:PORT/v1"),
        ("m=http://me:secret@h/v1", "name the environment variable that holds its key: --endpoint-key m=VARIABLE"),
        ("m=http://h/v1?key=secret", "name the environment variable that holds its key"),
    ],
)
def test_an_address_that_is_none_is_refused_and_no_secret_said(text: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence) as refused:
        EndpointAddress.parse(text)
    assert "secret" not in str(refused.value)


def test_a_key_is_a_variable_s_and_no_error_says_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY", "sk-1\n")
    monkeypatch.setenv("LINES", "sk-secret\nb")
    assert read_keys(["m=KEY"], ["m", "n"]) == {"m": "sk-1"}
    for options, sentence in (
        (["m=sk-secret"], "must name an environment variable that is set"),
        (["sk-secret"], "must be NAME=VARIABLE"),
        (["other=KEY"], "with a NAME of --endpoint: m, n"),
        (["m=KEY", "m=KEY"], "two keys"),
        (["m=LINES"], "the key in LINES has characters that no HTTP header holds"),
    ):
        with pytest.raises(ValueError, match=sentence) as refused:
            read_keys(options, ["m", "n"])
        assert "secret" not in str(refused.value)


def test_what_does_not_answer_is_one_sentence(server: ScriptedEndpoint) -> None:
    def found(url: str = server.url, model: str | None = None, key: str | None = None) -> Endpoint:
        return find_endpoint(EndpointAddress(name="x", url=url, model=model), key)

    assert found() == found(model="m") == Endpoint(name="x", url=server.url, model="m")
    assert "secret" not in repr(found(key="secret"))
    with pytest.raises(ValueError, match="it serves m"):
        found(model="n")
    with pytest.raises(ValueError, match="check URL and model"):
        found(url=server.url + "/more", model="m")
    server.models = ("m", "n")
    with pytest.raises(ValueError, match="name one"):
        found()
    server.key = "right"
    assert found(model="m", key="right").model == "m"
    with pytest.raises(ValueError, match="key"):
        found(model="m", key="wrong")
    with pytest.raises(ValueError, match="--endpoint-key NAME=VARIABLE"):
        found(model="m")
    with ScriptedEndpoint() as gone:
        pass
    with pytest.raises(ValueError, match="check host and port"):
        found(url=gone.url)
    with pytest.raises(ValueError):
        found(url="http://\u2603..h/v1")


def test_an_adapter_of_our_endpoint_has_its_base_s_engine(server: ScriptedEndpoint) -> None:
    starting = {"ready": False, "error": "RayActorError"}
    ready = {"ready": True, "defaults": {"block_size": 16, "tau": None}, "engine": {"buffer_size": 4}}
    server.models = ("m", "n", "tuned")
    base = {"name": "m", "replicas": [starting, {**ready, "adapters": {"tuned": "/a"}}]}
    server.health = [{"name": "n", "replicas": [starting]}, base]

    def found(model: str) -> Endpoint:
        return find_endpoint(EndpointAddress(name="x", url=server.url, model=model), None)

    for model in ("m", "tuned"):
        ours = found(model)
        assert (ours.model, ours.positions, ours.slots, ours.defaults) == (model, 256, 4, {"block_size": 16})
    for replicas in ([starting], []):
        server.health = [{"name": "n", "replicas": replicas}, base]
        with pytest.raises(ValueError, match="/health"):
            found("n")
