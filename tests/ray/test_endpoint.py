"""The HTTP endpoint on Serve: OpenAI's shapes by OpenAI's own client, errors by name, nothing left by who hangs up."""

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

MODEL = "tiny"
SLOW = {"buffer_size": 1, "tau_m2t": 1.0}  # one token a forward


@pytest.fixture(scope="module")
def url(serve_instance: str, tiny_model_dir: Path) -> Iterator[str]:
    from ray import serve

    from actors.endpoint import EndpointArgs, build

    args = EndpointArgs(folder=str(tiny_model_dir), name=MODEL, max_rows=4, num_pages=200, max_waiting=6)
    serve.run(build(args), name="endpoint", route_prefix="/")
    yield serve_instance
    serve.delete("endpoint")


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as made:
        yield made


def post(url: str, route: str, body: Any) -> httpx.Response:
    content = body if isinstance(body, str | bytes) else json.dumps(body)
    return httpx.post(f"{url}/v1/{route}", content=content, timeout=60)


def events(url: str, route: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The objects of a stream, which must end with [DONE]."""
    with httpx.stream("POST", f"{url}/v1/{route}", json=body | {"stream": True}, timeout=60) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def wait_idle(url: str) -> dict[str, Any]:
    for _ in range(100):
        state = httpx.get(f"{url}/health").json()
        if state["running"] == state["waiting"] == 0:
            break
        time.sleep(0.05)
    assert (state["running"], state["waiting"]) == (0, 0)
    return state


def test_health_and_models(url: str, client: openai.OpenAI) -> None:
    state = wait_idle(url)
    assert (state["model"], state["ready"]) == (MODEL, True)
    assert "cpu" in state["backend"]
    assert [m.id for m in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_chat_streams_what_it_answers_whole(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "system", "content": "Count."}, {"role": "user", "content": "Tom has 3 apples."}],
        "max_tokens": 40,
        "temperature": 0,
        "seed": 7,
    }
    whole = client.chat.completions.create(**asked)
    choice, counts = whole.choices[0], whole.model_extra["mbd"]
    assert whole.object == "chat.completion"
    assert choice.message.role == "assistant"
    assert whole.usage.completion_tokens == counts["num_tokens"] <= 40
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    assert counts["tpf"] == pytest.approx(counts["num_tokens"] / counts["num_forwards"])

    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    *pieces, last = chunks
    assert {c.id for c in chunks} == {chunks[0].id}
    assert {(c.object, c.model, c.created) for c in chunks} == {("chat.completion.chunk", MODEL, chunks[0].created)}
    assert [c.choices[0].delta.role for c in pieces] == ["assistant"] + [None] * (len(pieces) - 1)
    assert "".join(c.choices[0].delta.content or "" for c in pieces) == choice.message.content
    assert [c.choices[0].finish_reason for c in pieces] == [None] * (len(pieces) - 1) + [choice.finish_reason]
    assert len(pieces) > 3
    assert (last.choices, last.usage) == ([], whole.usage)
    assert last.model_extra["mbd"]["num_forwards"] == counts["num_forwards"]


def test_chunks_are_openais_to_the_field(url: str) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
    first, *rest = events(url, "chat/completions", {"model": MODEL, "messages": messages, "max_tokens": 12})
    assert first["choices"] == [
        {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    ]
    assert set(first) == {"id", "object", "created", "model", "choices"}
    assert (rest[-1]["choices"][0]["delta"], "mbd" in rest[-1], "mbd" in rest[-2]) == ({}, True, False)


@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts_are_several_choices(url: str, client: openai.OpenAI, stream: bool) -> None:
    prompts = [[5, 6, 7, 8, 9], [40, 41], [100, 101, 102]]
    alone = [client.completions.create(model=MODEL, prompt=p, max_tokens=20).choices[0] for p in prompts]
    if stream:
        texts, reasons = [""] * 3, [""] * 3
        for piece in events(url, "completions", {"model": MODEL, "prompt": prompts, "max_tokens": 20}):
            choice = piece["choices"][0]
            texts[choice["index"]] += choice["text"]
            reasons[choice["index"]] += choice["finish_reason"] or ""
    else:
        together = client.completions.create(model=MODEL, prompt=prompts, max_tokens=20)
        assert [c.index for c in together.choices] == [0, 1, 2]
        assert together.usage.prompt_tokens == 10
        texts, reasons = [c.text for c in together.choices], [c.finish_reason for c in together.choices]
    assert texts == [a.text for a in alone]
    assert reasons == [a.finish_reason for a in alone]


def test_strings_and_their_token_ids_are_the_same_prompt(client: openai.OpenAI, tiny_model_dir: Path) -> None:
    from transformers import AutoTokenizer

    prompts = ["Tom has <|mask|> apples, 漢字.", "def f(x):"]
    ids = [AutoTokenizer.from_pretrained(tiny_model_dir).encode(p) for p in prompts]
    by_text = client.completions.create(model=MODEL, prompt=prompts, max_tokens=16)
    by_ids = client.completions.create(model=MODEL, prompt=ids, max_tokens=16)
    assert [c.text for c in by_text.choices] == [c.text for c in by_ids.choices]
    assert by_text.usage == by_ids.usage


def test_concurrent_requests_equal_each_alone(client: openai.OpenAI, url: str) -> None:
    asked = [
        {"model": MODEL, "prompt": [3 + i] * (1 + i), "max_tokens": 10 + 6 * i, "extra_body": {"decoding": decoding}}
        for i, decoding in enumerate([{}, SLOW, {"buffer_size": 2, "tau_add": 1.0}, {"tau_m2t": 0.3}, {}, SLOW])
    ]
    alone = [client.completions.create(**a) for a in asked]
    with ThreadPoolExecutor(len(asked)) as pool:
        together = list(pool.map(lambda a: client.completions.create(**a), asked))
    assert [t.choices[0].text for t in together] == [a.choices[0].text for a in alone]
    assert [t.model_extra["mbd"]["num_forwards"] for t in together] == [
        a.model_extra["mbd"]["num_forwards"] for a in alone
    ]
    wait_idle(url)


def test_decoding_fields_reach_the_engine(client: openai.OpenAI) -> None:
    one = client.completions.create(model=MODEL, prompt=[9, 9], max_tokens=24, extra_body={"decoding": SLOW})
    all_at_once = {"decoding": {"buffer_size": 1, "tau_m2t": 0.0}}
    block = client.completions.create(model=MODEL, prompt=[9, 9], max_tokens=24, extra_body=all_at_once)
    forwards = [r.model_extra["mbd"]["num_forwards"] for r in (one, block)]
    assert forwards[0] >= one.usage.completion_tokens > forwards[1]


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings(url: str, client: openai.OpenAI, stream: bool) -> None:
    asked = {"model": MODEL, "prompt": [9, 9], "max_tokens": 60}
    text = client.completions.create(**asked).choices[0].text
    stop = text[len(text) // 2 :][:3]
    assert stop
    asked["stop"] = ["never appears \u2603", stop]
    if stream:
        pieces = [e["choices"][0] for e in events(url, "completions", asked)]
        got, reason = "".join(p["text"] for p in pieces), pieces[-1]["finish_reason"]
    else:
        choice = client.completions.create(**asked).choices[0]
        got, reason = choice.text, choice.finish_reason
    assert (got, reason) == (text[: text.index(stop)], "stop")
    wait_idle(url)


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "x"}]} | fields


def complete(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "x"} | fields


REFUSED = [
    ("completions", '{"model": "tiny", ', 400, None),
    ("completions", b"\xff\xfe", 400, None),
    ("completions", "[]", 400, None),
    ("completions", {"model": MODEL}, 400, "prompt"),
    ("completions", {"prompt": "x"}, 400, "model"),
    ("completions", complete(model="other"), 404, "model"),
    ("completions", complete(prompt=""), 400, "prompt"),
    ("completions", complete(prompt=[]), 400, "prompt"),
    ("completions", complete(prompt=["x", ""]), 400, "prompt"),
    ("completions", complete(prompt=[1, "x"]), 400, "prompt"),
    ("completions", complete(prompt=[-1]), 400, "prompt"),
    ("completions", complete(prompt=[512]), 400, "prompt"),
    ("completions", complete(prompt=[7] * 600), 400, "prompt"),
    ("completions", complete(prompt=["x"] * 11), 400, None),
    ("completions", complete(max_tokens=0), 400, "max_tokens"),
    ("completions", complete(max_tokens=-3), 400, "max_tokens"),
    ("completions", complete(max_tokens="9"), 400, "max_tokens"),
    ("completions", complete(max_tokens=True), 400, "max_tokens"),
    ("completions", complete(max_tokens=512), 400, "max_tokens"),
    ("completions", complete(temperature=0.7), 400, "temperature"),
    ("completions", complete(top_p=0.9), 400, "top_p"),
    ("completions", complete(n=2), 400, "n"),
    ("completions", complete(best_of=3), 400, "best_of"),
    ("completions", complete(echo=True), 400, "echo"),
    ("completions", complete(suffix="y"), 400, "suffix"),
    ("completions", complete(logprobs=0), 400, "logprobs"),
    ("completions", complete(logit_bias={"5": 1}), 400, "logit_bias"),
    ("completions", complete(presence_penalty=0.5), 400, "presence_penalty"),
    ("completions", complete(frequency_penalty=1), 400, "frequency_penalty"),
    ("completions", complete(stop=""), 400, "stop"),
    ("completions", complete(stop=[3]), 400, "stop"),
    ("completions", complete(stream="yes"), 400, "stream"),
    ("completions", complete(stream_options={"include_usage": True}), 400, "stream_options"),
    ("completions", complete(**{"top-k": 3}), 400, "top-k"),
    ("completions", complete(messages=[]), 400, "messages"),
    ("completions", complete(decoding={"tau": 1}), 400, "decoding"),
    ("completions", complete(decoding={"tau_m2t": 2}), 400, "decoding"),
    ("completions", complete(decoding={"buffer_size": 5}), 400, "decoding"),
    ("completions", complete(decoding={"block_size": 3}), 400, "decoding"),
    ("completions", complete(decoding=[1]), 400, "decoding"),
    ("chat/completions", chat(messages=[]), 400, "messages"),
    ("chat/completions", chat(messages="x"), 400, "messages"),
    ("chat/completions", chat(messages=[{"role": "robot", "content": "x"}]), 400, "messages.0.role"),
    ("chat/completions", chat(messages=[{"role": "user"}]), 400, "messages.0.content"),
    ("chat/completions", chat(messages=[{"role": "user", "content": None}]), 400, "messages.0.content"),
    ("chat/completions", chat(messages=[{"role": "user", "content": "x " * 600}]), 400, "messages"),
    ("chat/completions", chat(model="other"), 404, "model"),
    ("chat/completions", chat(max_completion_tokens=0), 400, "max_completion_tokens"),
    ("chat/completions", chat(max_completion_tokens=3, max_tokens=4), 400, "max_completion_tokens"),
    ("chat/completions", chat(tools=[{"type": "function"}]), 400, "tools"),
    ("chat/completions", chat(logprobs=True), 400, "logprobs"),
    ("chat/completions", chat(response_format={"type": "json_object"}), 400, "response_format"),
    ("chat/completions", chat(prompt="x"), 400, "prompt"),
    ("nothing", {}, 404, None),
]


def check_error(response: httpx.Response, status: int, param: str | None) -> None:
    assert (response.status_code, response.headers["content-type"]) == (status, "application/json")
    assert set(response.json()) == {"error"}
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert error["message"]
    assert "Traceback" not in response.text


@pytest.mark.parametrize(("route", "body", "status", "param"), REFUSED)
def test_what_cannot_be_honoured_is_refused_by_name(
    url: str, route: str, body: Any, status: int, param: str | None
) -> None:
    check_error(post(url, route, body), status, param)
    if isinstance(body, dict) and param not in ("stream", "stream_options"):  # before a stream begins, too
        check_error(post(url, route, body | {"stream": True}), status, param)


def test_a_wrong_method_is_405_in_the_same_shape(url: str) -> None:
    check_error(httpx.get(f"{url}/v1/completions"), 405, None)
    check_error(httpx.get(f"{url}/v1/models/"), 404, "model")


def test_neutral_values_are_accepted(url: str) -> None:
    neutral = {"temperature": 0.0, "top_p": 1, "n": 1, "presence_penalty": 0, "stop": None, "logit_bias": None}
    free = {"seed": 3, "user": "me", "store": False, "metadata": {"a": "b"}, "max_completion_tokens": 4}
    asked = chat(**neutral, **free, response_format={"type": "text"}, logprobs=False, stream=None)
    assert post(url, "chat/completions", asked).status_code == 200


def hang_up(url: str, body: dict[str, Any], *, after: Callable[[socket.socket], None]) -> None:
    """Send a request on a bare socket, and close it after `after`."""
    host, port = url.removeprefix("http://").split(":")
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(content)}\r\n\r\n"
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(head.encode() + content)
        after(connection)


def wait_running(url: str) -> None:
    deadline = time.monotonic() + 20
    while httpx.get(f"{url}/health").json()["running"] == 0:
        assert time.monotonic() < deadline, "the request never ran"
        time.sleep(0.01)


@pytest.fixture(scope="module")
def lasting(client: openai.OpenAI) -> dict[str, Any]:
    """As many prompts as are taken at once, each of which uses its whole long budget at one token a forward."""
    for token in range(5, 60):
        asked = {"model": MODEL, "prompt": [token], "max_tokens": 500, "extra_body": {"decoding": SLOW}}
        if client.completions.create(**asked).choices[0].finish_reason == "length":
            return {"model": MODEL, "prompt": [[token]] * 10, "max_tokens": 500, "decoding": SLOW}
    raise AssertionError("the random model ends every answer")


def test_a_client_that_hangs_up_leaves_nothing(url: str, lasting: dict[str, Any]) -> None:
    started = time.monotonic()
    assert post(url, "completions", lasting).status_code == 200
    whole = time.monotonic() - started
    for stream in (False, True):
        hang_up(url, lasting | {"stream": stream}, after=lambda _: wait_running(url))
        started = time.monotonic()
        wait_idle(url)
        assert time.monotonic() - started < whole / 2, "the request was finished, not aborted"
    assert post(url, "completions", complete(max_tokens=4)).status_code == 200


def test_too_many_waiting_requests_get_429(url: str, lasting: dict[str, Any]) -> None:
    def crowd(_: socket.socket) -> None:
        wait_running(url)
        refused = post(url, "completions", complete(max_tokens=4))
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "1"
        assert set(refused.json()["error"]) == {"message", "type", "param", "code"}

    hang_up(url, lasting, after=crowd)
    wait_idle(url)
    assert post(url, "completions", complete(max_tokens=4)).status_code == 200


# -- without HTTP ---------------------------------------------------------------------------------------------------


def test_an_internal_failure_is_told_without_its_traceback() -> None:
    from actors.endpoint import answered
    from mbd_core.engine.async_engine import EngineFailed

    for failure in (EngineFailed("the engine failed: secret"), KeyError("secret")):

        async def handle(failure: Exception = failure) -> Any:
            raise failure

        response = asyncio.run(answered(handle))
        assert response.status_code == 500
        error = json.loads(response.body)["error"]
        assert (error["type"], set(error)) == ("server_error", {"message", "type", "param", "code"})
        assert b"secret" not in response.body
        assert b"Traceback" not in response.body


def test_a_failure_inside_a_stream_is_an_event_and_no_done() -> None:
    from actors.endpoint import Endpoint
    from actors.openai_schema import Reply
    from mbd_core.engine.async_engine import EngineFailed

    class Broken:
        requests = ()

        async def __aiter__(self) -> AsyncIterator[Any]:
            raise EngineFailed("secret")
            yield

    async def sent() -> list[str]:
        reply = Reply(id="x", created=0, model=MODEL, chat=True)
        return [e async for e in Endpoint.func_or_class._events(None, reply, Broken(), include_usage=False)]

    (only,) = asyncio.run(sent())
    assert json.loads(only.removeprefix("data: "))["error"]["code"] == "engine_failed"
    assert "secret" not in only


def test_the_job_names_known_models_and_does_not_take_over_a_running_serve(
    url: str, tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from jobs.serve import main

    assert main(["--model", "no-such-model"]) == 2
    message = capsys.readouterr().err
    assert "unknown model 'no-such-model'" in message and "known: tiny-bd" in message
    assert main(["--model", str(tiny_model_dir), "--buffer-size", "1"]) == 2
    assert "--buffer-size 1 must be at least that" in capsys.readouterr().err
    (tmp_path / "config.json").write_text("{")
    assert main(["--model", str(tmp_path)]) == 2
    assert "not valid JSON" in capsys.readouterr().err
    assert main(["--model", str(tiny_model_dir)]) == 1
    assert "Serve already runs" in capsys.readouterr().err
    wait_idle(url)
