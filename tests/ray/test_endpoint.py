"""The HTTP endpoint on Serve: OpenAI's shapes by OpenAI's own client, errors by name, nothing left by who hangs up."""

import json
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from chat_templates import REFUSAL, with_strict_template

MODEL = "tiny"
LIMIT = 300  # seconds to wait for what comes by itself, however busy the machine is
SLOW = {"buffer_size": 1, "tau_m2t": 1.0}  # one token a forward


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("traces")


@pytest.fixture(scope="module")
def strict_model_dir(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_strict_template(tiny_model_dir, tmp_path_factory.mktemp("models") / "strict")


@pytest.fixture(scope="module")
def url(serve_instance: str, strict_model_dir: Path, traces: Path) -> Iterator[str]:
    """The endpoint. Once all tests are through, it is ended, and the trace of what it did must be whole."""
    from ray import serve

    from actors.serving.app import application
    from actors.serving.args import ServingArgs
    from mbd_core.trace.recorder import read_trace

    # batch_invariant: what one request's log-probabilities are must not depend on who else is there, not in a bit
    model = {
        "model": str(strict_model_dir),
        "name": MODEL,
        "max_waiting": 6,
        "trace": str(traces),
        "engine": {"max_rows": 4, "num_pages": 200, "batch_invariant": True},
    }
    args = ServingArgs.read({"device": "cpu", "models": [model]})
    serve.run(application(args), name="endpoint", route_prefix="/")
    yield serve_instance
    serve.delete("endpoint")
    (own,) = traces.iterdir()
    assert own.name.startswith("replica-")
    assert {"ACTIVE", "TO_CACHE"} <= {row.state for row in read_trace(own)}


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=LIMIT) as connected:
        yield connected


def post(url: str, route: str, body: Any) -> httpx.Response:
    content = body if isinstance(body, str | bytes) else json.dumps(body)
    return httpx.post(f"{url}/v1/{route}", content=content, timeout=LIMIT)


def events(url: str, route: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The objects of a stream, which must end with [DONE]."""
    with httpx.stream("POST", f"{url}/v1/{route}", json=body | {"stream": True}, timeout=LIMIT) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def health(url: str) -> dict[str, Any]:
    """What `/health` says of the one replica, and of the whole."""
    body = httpx.get(f"{url}/health", timeout=LIMIT).json()
    (model,) = body["models"]
    (replica,) = model["replicas"]
    return {**replica, **body}


def states_until_idle(url: str) -> Iterator[dict[str, Any]]:
    """What /health says, again and again, up to the first time that nothing runs and nothing waits."""
    deadline = time.monotonic() + LIMIT
    while (state := health(url))["running"] or state["waiting"]:
        yield state
        assert time.monotonic() < deadline, "the requests did not end"
        time.sleep(0.05)
    yield state


def wait_idle(url: str) -> dict[str, Any]:
    return list(states_until_idle(url))[-1]


def test_health_and_models(url: str, client: openai.OpenAI) -> None:
    state = wait_idle(url)
    assert (state["models"][0]["name"], state["ready"], state["draining"]) == (MODEL, True, False)
    assert state["backend"] == "torch cpu float32"
    assert state["attention"]["name"] == "reference" and state["rank_sums"] is None
    assert "needs a CUDA device" in state["attention"]["not_chosen"]["vllm-flash-attn"]
    assert (state["defaults"]["tau_m2t"], state["defaults"]["buffer_size"], state["defaults"]["t2t"]) == (0.9, 4, None)
    assert (state["defaults"]["temperature"], state["engine"]["batch_invariant"]) == (0, True)
    assert state["kv_cache"] == {"num_pages": 200, "page_size": 16, "tokens": 199 * 16, "free_pages": 199}
    assert state["graphs"] == {
        "not_used": "without static_shapes=True no step has a shape that repeats",
        "captured": 0,
        "memory_bytes": 0,
        "steps_replayed": 0,
        "steps_eager": 0,
    }
    for path in ("health", "ready"):
        seen = httpx.head(f"{url}/{path}", timeout=LIMIT)
        assert (seen.status_code, seen.content) == (200, b"")
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
    parsed = {"parse_special": True}
    by_text = client.completions.create(model=MODEL, prompt=prompts, max_tokens=16, extra_body=parsed)
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
    ("completions", complete(prompt=["x"] * 11), 400, "prompt"),
    ("completions", complete(max_tokens=0), 400, "max_tokens"),
    ("completions", complete(max_tokens=-3), 400, "max_tokens"),
    ("completions", complete(max_tokens="9"), 400, "max_tokens"),
    ("completions", complete(max_tokens=True), 400, "max_tokens"),
    ("completions", complete(max_tokens=512), 400, "max_tokens"),
    ("completions", complete(temperature=-0.1), 400, "temperature"),
    ("completions", complete(temperature=2.1), 400, "temperature"),
    ("completions", complete(temperature="1"), 400, "temperature"),
    ("completions", complete(temperature=True), 400, "temperature"),
    ("completions", '{"model": "tiny", "prompt": "x", "temperature": NaN}', 400, "temperature"),
    ("completions", complete(temperature=1, top_p=0), 400, "top_p"),
    ("completions", complete(temperature=1, top_p=1e-9), 400, "top_p"),
    ("completions", complete(temperature=1e-9), 400, "temperature"),
    ("completions", complete(temperature=1, top_p=1.1), 400, "top_p"),
    ("completions", complete(temperature=1, top_p=[0.5]), 400, "top_p"),
    ("completions", complete(min_p=1.1), 400, "min_p"),
    ("completions", complete(temperature=1, top_k=-2), 400, "top_k"),
    ("completions", complete(temperature=1, top_k=2.5), 400, "top_k"),
    ("completions", complete(temperature=1, top_k=10**30), 400, "top_k"),
    ("completions", complete(seed="7"), 400, "seed"),
    ("completions", complete(seed=1.5), 400, "seed"),
    ("completions", complete(seed=2**63), 400, "seed"),
    ("completions", complete(n=0), 400, "n"),
    ("completions", complete(n="2"), 400, "n"),
    ("completions", complete(n=True), 400, "n"),
    ("completions", complete(n=129), 400, "n"),
    ("completions", complete(n=11), 400, "n"),
    ("completions", complete(n=6, prompt=["x", "y"]), 400, "n"),
    ("completions", complete(best_of=3), 400, "best_of"),
    ("completions", complete(n=2, best_of=1), 400, "best_of"),
    ("completions", complete(echo=True, logprobs=0), 400, "max_tokens"),
    ("completions", complete(stop="x" * 1025), 400, "stop"),
    ("completions", complete(ignore_eos=1), 400, "ignore_eos"),
    ("completions", complete(min_tokens=9, max_tokens=8), 400, "min_tokens"),
    ("completions", complete(stop_token_ids=[10**6]), 400, "stop_token_ids"),
    ("completions", complete(stop_token_ids=["5"]), 400, "stop_token_ids.0"),
    ("completions", complete(repetition_penalty=0), 400, "repetition_penalty"),
    ("completions", complete(suffix="y"), 400, "suffix"),
    ("completions", complete(logprobs=21), 400, "logprobs"),
    ("completions", complete(logprobs=True), 400, "logprobs"),
    ("completions", complete(logprobs=-1), 400, "logprobs"),
    ("completions", complete(logit_bias={"five": 1}), 400, "logit_bias"),
    ("completions", complete(logit_bias={"1000000": 1}), 400, "logit_bias"),
    ("completions", complete(logit_bias={"5": 101}), 400, "logit_bias.5"),
    ("completions", complete(logit_bias={str(i): 1 for i in range(1025)}), 400, "logit_bias"),
    ("completions", complete(presence_penalty=2.5), 400, "presence_penalty"),
    ("completions", complete(frequency_penalty="1"), 400, "frequency_penalty"),
    ("completions", complete(frequency_penalty=1, decoding={"t2t": {}}), 400, "frequency_penalty"),
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
    ("completions", complete(decoding={"tau_m2t": "high"}), 400, "decoding"),
    ("completions", complete(decoding={"tau_m2t": None}), 400, "decoding"),
    ("completions", complete(decoding={"tokens_per_step": 1.5}), 400, "decoding"),
    ("completions", complete(decoding={"fallback": []}), 400, "decoding"),
    ("completions", complete(decoding={"prefix_cache": "yes"}), 400, "decoding"),
    ("completions", complete(decoding={"tau_stable": 0.5}), 400, "decoding"),
    ("completions", complete(decoding={"t2t": {"tau": "x"}}), 400, "decoding"),
    ("completions", complete(decoding={"t2t": {"tau": 1.5}}), 400, "decoding"),
    ("completions", complete(decoding={"t2t": {"theta": 0.5}}), 400, "decoding"),
    ("completions", complete(decoding={"t2t": {"max_edits": 10**30}}), 400, "decoding"),
    ("completions", complete(decoding={"t2t": True}), 400, "decoding"),
    ("completions", complete(decoding={"t2t": {}, "soft": {}}), 400, "decoding"),
    ("completions", complete(decoding={"soft": []}), 400, "decoding"),
    ("completions", complete(decoding={"prompt_attention": "full"}), 400, "decoding"),
    ("completions", complete(decoding={"canvas": {}}), 400, "decoding"),
    ("completions", complete(decoding={"canvas": {"tau": "x"}}), 400, "decoding"),
    ("completions", complete(decoding={"canvas": {"branches": {"block_lengths": 5}}}), 400, "decoding"),
    ("completions", complete(decoding={"canvas": {}, "buffer_size": 2}), 400, "decoding"),
    ("chat/completions", chat(messages=[]), 400, "messages"),
    ("chat/completions", chat(messages="x"), 400, "messages"),
    ("chat/completions", chat(messages=[{"role": "robot", "content": "x"}]), 400, "messages.0.role"),
    ("chat/completions", chat(messages=[{"role": "user"}]), 400, "messages.0.content"),
    ("chat/completions", chat(messages=[{"role": "user", "content": None}]), 400, "messages.0.content"),
    ("chat/completions", chat(messages=[{"role": "user", "content": "x " * 600}]), 400, "messages"),
    ("chat/completions", chat(model="other"), 404, "model"),
    ("chat/completions", chat(max_completion_tokens=0), 400, "max_completion_tokens"),
    ("chat/completions", chat(max_completion_tokens=3, max_tokens=4), 400, "max_completion_tokens"),
    ("chat/completions", chat(tools=[{"type": "function"}]), 400, "tools.0.function"),
    ("chat/completions", chat(logprobs=0), 400, "logprobs"),
    ("chat/completions", chat(top_logprobs=1), 400, "top_logprobs"),
    ("chat/completions", chat(logprobs=True, top_logprobs=21), 400, "top_logprobs"),
    ("chat/completions", chat(continue_final_message=True), 400, "continue_final_message"),
    ("chat/completions", chat(chat_template_kwargs={"messages": []}), 400, "chat_template_kwargs"),
    ("chat/completions", chat(logprobs=True, top_logprobs="0"), 400, "top_logprobs"),
    ("chat/completions", chat(response_format={"type": "xml"}), 400, "response_format"),
    ("chat/completions", chat(response_format={"type": "json_schema"}), 400, "response_format.json_schema"),
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


def test_a_chat_template_s_refusal_is_told_in_the_template_s_words(url: str) -> None:
    for roles in (["assistant"], ["user", "user"]):
        response = post(url, "chat/completions", chat(messages=[{"role": r, "content": "x"} for r in roles]))
        check_error(response, 400, "messages")
        assert REFUSAL in response.json()["error"]["message"]


def test_a_wrong_method_is_405_in_the_same_shape(url: str) -> None:
    check_error(httpx.get(f"{url}/v1/completions", timeout=LIMIT), 405, None)
    check_error(httpx.get(f"{url}/v1/models/", timeout=LIMIT), 404, "model")


@pytest.mark.parametrize(("route", "param"), [("v1/models/", "model"), ("nothing/", None)])
def test_a_long_path_is_repeated_only_in_part(url: str, route: str, param: str | None) -> None:
    response = httpx.get(f"{url}/{route}{'x' * 20_000}", timeout=LIMIT)
    check_error(response, 404, param)
    assert len(response.content) < 2000
    check_error(httpx.get(f"{url}/{route}{'x' * 50_000}", timeout=LIMIT), 414, None)


def test_neutral_values_are_accepted(url: str) -> None:
    neutral = {"temperature": 0.0, "top_p": 1, "n": 1, "presence_penalty": 0, "stop": None, "logit_bias": None}
    free = {"seed": 3, "user": "me", "store": False, "metadata": {"a": "b"}, "max_completion_tokens": 4}
    asked = chat(**neutral, **free, response_format={"type": "text"}, logprobs=False, top_logprobs=0, stream=None)
    assert post(url, "chat/completions", asked).status_code == 200
    tools = {
        "tools": [],
        "tool_choice": "none",
        "parallel_tool_calls": False,
        "functions": [],
        "function_call": "none",
    }
    hints = {"prompt_cache_key": "k", "safety_identifier": "s", "service_tier": "auto", "modalities": ["text"]}
    others = {"min_p": 0, "ignore_eos": False, "logit_bias": {}, "stop_token_ids": [], "repetition_penalty": 1.0}
    answer = post(url, "chat/completions", chat(**tools, **hints, **others))
    assert answer.status_code == 200, answer.text


# -- sampling, several choices, log-probabilities -------------------------------------------------------------------

HOT: dict[str, Any] = {"temperature": 1.0, "top_p": 0.95, "seed": 11}


def test_a_seed_repeats_whatever_runs_beside_it_and_another_one_differs(client: openai.OpenAI, url: str) -> None:
    asked: dict[str, Any] = {"model": MODEL, "prompt": [9, 9, 9], "max_tokens": 24, **HOT}
    first = client.completions.create(**asked, extra_body={"top_k": 50})
    others = [{"model": MODEL, "prompt": [i, 4], "max_tokens": 20, "temperature": 0.8, "seed": i} for i in range(5)]
    with ThreadPoolExecutor(6) as pool:
        crowd = [pool.submit(client.completions.create, **other) for other in others]
        again = pool.submit(client.completions.create, **asked, extra_body={"top_k": 50}).result()
        [c.result() for c in crowd]
    assert again.choices[0].text == first.choices[0].text
    assert again.model_extra["mbd"]["seed"] == first.model_extra["mbd"]["seed"] == 11
    texts = {client.completions.create(**{**asked, "seed": seed}).choices[0].text for seed in range(20, 24)}
    assert len(texts) > 1
    drawn = [client.completions.create(**{**asked, "seed": None}).model_extra["mbd"]["seed"] for _ in range(2)]
    assert drawn[0] != drawn[1]
    named = client.completions.create(**{**asked, "seed": drawn[0]})
    assert named.model_extra["mbd"]["seed"] == drawn[0]


def test_top_k_1_and_a_tiny_top_p_are_greedy(client: openai.OpenAI) -> None:
    """A narrowed distribution has one token, and its confidence is the model's own."""
    decoding = {**SLOW, "fallback": "leftmost"}
    asked: dict[str, Any] = {"model": MODEL, "prompt": [9, 9, 9], "max_tokens": 16}
    asked["extra_body"] = {"decoding": decoding}
    greedy = client.completions.create(**asked).choices[0].text
    for narrow in ({"temperature": 1.5, "top_p": 1e-6}, {"temperature": 0, "top_p": 0.5, "seed": 3}):
        assert client.completions.create(**asked, **narrow).choices[0].text == greedy
    asked["extra_body"] = {"decoding": decoding, "top_k": 1}
    assert client.completions.create(**asked, temperature=1.5).choices[0].text == greedy
    asked["extra_body"] = {"decoding": decoding}
    assert client.completions.create(**asked, temperature=1.5, seed=1).choices[0].text != greedy


@pytest.mark.parametrize("stream", [False, True])
def test_n_choices_are_n_seeds_prompt_by_prompt(url: str, client: openai.OpenAI, stream: bool) -> None:
    prompts = [[5, 6, 7, 8, 9], [40, 41]]
    asked = {"model": MODEL, "max_tokens": 18, **HOT}
    alone = [
        client.completions.create(**{**asked, "prompt": prompt, "seed": 11 + i})
        for prompt in prompts
        for i in range(3)
    ]
    texts, reasons = [a.choices[0].text for a in alone], [a.choices[0].finish_reason for a in alone]
    assert len(set(texts)) > 2
    body = {**asked, "prompt": prompts, "n": 3, "best_of": 3}
    if stream:
        got, ends = [""] * 6, [""] * 6
        pieces = events(url, "completions", body | {"stream_options": {"include_usage": True}})
        for choice in (choice for piece in pieces for choice in piece["choices"]):
            got[choice["index"]] += choice["text"]
            ends[choice["index"]] += choice["finish_reason"] or ""
        usage, measures = pieces[-1]["usage"], pieces[-1]["mbd"]
    else:
        whole = post(url, "completions", body).json()
        assert [c["index"] for c in whole["choices"]] == list(range(6))
        got, ends = [c["text"] for c in whole["choices"]], [c["finish_reason"] for c in whole["choices"]]
        usage, measures = whole["usage"], whole["mbd"]
    assert (got, ends) == (texts, reasons)
    assert usage["prompt_tokens"] == 7
    assert usage["completion_tokens"] == sum(a.usage.completion_tokens for a in alone)
    assert usage["total_tokens"] == 7 + usage["completion_tokens"]
    assert (measures["num_prompt_tokens"], measures["seed"]) == (21, 11)


def test_n_greedy_choices_are_equal(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "Tom has 3 apples."}]
    answer = client.chat.completions.create(model=MODEL, messages=messages, n=3, temperature=0, max_tokens=20)
    assert [c.index for c in answer.choices] == [0, 1, 2]
    assert len({c.message.content for c in answer.choices}) == 1
    assert "seed" not in answer.model_extra["mbd"]


def check_chat_logprobs(content: list[dict[str, Any]], text: str) -> None:
    raw = b"".join(bytes(entry["bytes"]) for entry in content)
    assert raw.decode("utf-8", "replace").rstrip("\ufffd") == text
    for entry in content:
        assert set(entry) == {"token", "logprob", "bytes", "top_logprobs"}
        assert -50 < entry["logprob"] <= 1e-6
        assert bytes(entry["bytes"]).decode("utf-8", "replace") == entry["token"]
        assert entry["top_logprobs"] == []


@pytest.mark.parametrize("sampled", [False, True])
def test_chat_logprobs_whole_and_streamed(url: str, client: openai.OpenAI, sampled: bool) -> None:
    asked = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Tom has 3 apples."}],
        "max_tokens": 21,
        "n": 2,
        "logprobs": True,
        "top_logprobs": 0,
        **(HOT if sampled else {}),
    }
    whole = post(url, "chat/completions", asked).json()
    contents = [c["logprobs"]["content"] for c in whole["choices"]]
    assert sum(map(len, contents)) == whole["usage"]["completion_tokens"]
    for content, choice in zip(contents, whole["choices"], strict=True):
        assert choice["logprobs"]["refusal"] is None
        check_chat_logprobs(content, choice["message"]["content"])
    streamed: list[list[dict[str, Any]]] = [[], []]
    for piece in events(url, "chat/completions", asked):
        choice = piece["choices"][0]
        streamed[choice["index"]] += (choice["logprobs"] or {"content": []})["content"]
    assert streamed == contents
    typed = client.chat.completions.create(**asked)
    assert [t.token for t in typed.choices[0].logprobs.content] == [t["token"] for t in contents[0]]
    plain = client.chat.completions.create(**{**asked, "logprobs": None, "top_logprobs": None})
    assert [c.logprobs for c in plain.choices] == [None, None]
    assert [c.message.content for c in plain.choices] == [c["message"]["content"] for c in whole["choices"]]


def test_a_greedy_logprob_is_the_model_s_own(url: str, tiny_model_dir: Path) -> None:
    """One position, one forward: its log-probability is log softmax of the model at the masked position."""
    import torch

    from mbd_core.decoding.blocks.request import Request
    from mbd_core.engine.config import EngineConfig
    from mbd_core.ops.attention.whole import DenseAttention
    from mbd_core.serving.tokens.load import load_engine

    loaded = load_engine(tiny_model_dir, EngineConfig(max_rows=1, num_pages=16))
    request = Request(
        request_id="r", prompt=(9, 9, 9), max_tokens=1, decoding=loaded.decoding({}), logprobs=True, ignore_eos=True
    )
    (output,) = loaded.engine.generate([request])
    asked = {"model": MODEL, "prompt": [9, 9, 9], "max_tokens": 1, "logprobs": 0}
    logprobs = post(url, "completions", asked).json()["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"] == pytest.approx(output.piece.logprobs, abs=1e-5)
    model, ids = loaded.engine.model, torch.tensor([[9, 9, 9, loaded.config.mask_token_id]])
    with torch.no_grad():
        seen = DenseAttention(torch.ones((1, 1, 4, 4), dtype=torch.bool))
        logits = model.logits(model(ids, torch.arange(4)[None], seen))[0, 3]
    assert logprobs["token_logprobs"][0] == pytest.approx(logits.log_softmax(-1)[output.tokens[0]].item(), abs=1e-4)


@pytest.mark.parametrize("stream", [False, True])
def test_completion_logprobs_with_a_stop_string(url: str, stream: bool) -> None:
    asked = {"model": MODEL, "prompt": [9, 9], "max_tokens": 60, "logprobs": 0}
    free = post(url, "completions", asked).json()
    text, logprobs = free["choices"][0]["text"], free["choices"][0]["logprobs"]
    assert len(logprobs["tokens"]) == len(logprobs["token_logprobs"]) == free["usage"]["completion_tokens"]
    assert logprobs["top_logprobs"] is None
    check_offsets(logprobs, text)
    asked["stop"] = stop = text[len(text) // 2 :][:3]
    if stream:
        pieces = [e["choices"][0] for e in events(url, "completions", asked)]
        short = "".join(p["text"] for p in pieces)
        parts = [p["logprobs"] for p in pieces if p["logprobs"]]
        cut = {name: [x for p in parts for x in p[name]] for name in ("tokens", "token_logprobs", "text_offset")}
    else:
        answer = post(url, "completions", asked).json()
        short, cut = answer["choices"][0]["text"], answer["choices"][0]["logprobs"]
        assert len(cut["tokens"]) == answer["usage"]["completion_tokens"]
    assert short == text[: text.index(stop)]
    count = len(cut["tokens"])
    assert 0 < count < len(logprobs["tokens"])
    for name in ("tokens", "token_logprobs", "text_offset"):
        assert cut[name] == logprobs[name][:count]
    ends = [*logprobs["text_offset"], len(text)]
    assert ends[count - 1] < text.index(stop) + len(stop) <= ends[count], "the last entry completed the stop string"


def check_offsets(logprobs: dict[str, Any], text: str) -> None:
    """Every token that is text by itself stands in the answer at its offset."""
    assert logprobs["text_offset"] == sorted(logprobs["text_offset"])
    whole = [
        (token, at)
        for token, at in zip(logprobs["tokens"], logprobs["text_offset"], strict=True)
        if not token.startswith(("bytes:", "<|"))
    ]
    assert len(whole) > 5
    split = any(token.startswith("bytes:") for token in logprobs["tokens"])
    assert split or all(text[at : at + len(token)] == token for token, at in whole)


@pytest.mark.parametrize(
    ("decoding", "reaches"),
    [
        ({"t2t": {"tau": 0.2, "max_edits": 4}, "buffer_size": 1}, "t2t"),
        ({"soft": {"stop_confidence": 0.9}, "tau_stable": 0.5, "buffer_size": 2}, "soft"),
        ({"fallback": "margin", "tau_m2t": 1.0, "prefix_cache": False}, "fallback"),
    ],
)
def test_nested_decoding_reaches_the_engine(
    client: openai.OpenAI, tiny_model_dir: Path, decoding: dict[str, Any], reaches: str
) -> None:
    from mbd_core.decoding.blocks.request import Request
    from mbd_core.engine.config import EngineConfig
    from mbd_core.serving.tokens.load import load_engine

    loaded = load_engine(tiny_model_dir, EngineConfig(max_rows=1, num_pages=64, batch_invariant=True))
    config = loaded.decoding(decoding)
    assert getattr(config, reaches) is not None
    (alone,) = loaded.engine.generate([Request(request_id="r", prompt=(9, 8), max_tokens=24, decoding=config)])
    answer = client.completions.create(model=MODEL, prompt=[9, 8], max_tokens=24, extra_body={"decoding": decoding})
    assert answer.usage.completion_tokens == len(alone.tokens)
    assert answer.model_extra["mbd"]["num_forwards"] == alone.counts.num_forwards


def test_usage_tells_what_the_prefix_cache_held(client: openai.OpenAI, url: str) -> None:
    prompt = [200 + i for i in range(70)]
    asked = {"model": MODEL, "prompt": prompt, "max_tokens": 8}
    cold, warm = client.completions.create(**asked), client.completions.create(**asked)
    assert (cold.usage.prompt_tokens, cold.usage.prompt_tokens_details.cached_tokens) == (70, 0)
    assert 48 <= warm.usage.prompt_tokens_details.cached_tokens <= 70
    assert warm.choices[0].text == cold.choices[0].text
    twice = client.completions.create(**asked, n=2)
    assert twice.usage.prompt_tokens == 70
    assert twice.usage.prompt_tokens_details.cached_tokens <= 70
    assert health(url)["prefix_cache"]["found"] >= 48


def hang_up(url: str, body: dict[str, Any], *, after: Callable[[socket.socket], None]) -> None:
    """Send a request on a bare socket, and close it after `after`."""
    host, port = url.removeprefix("http://").split(":")
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(content)}\r\n\r\n"
    with socket.create_connection((host, int(port)), timeout=LIMIT) as connection:
        connection.sendall(head.encode() + content)
        after(connection)


def wait_running(url: str) -> None:
    deadline = time.monotonic() + LIMIT
    while health(url)["running"] == 0:
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
    """Four of the ten prompts run. Were even these finished and not aborted, that would take 500 forwards."""
    answered = post(url, "completions", lasting)
    assert answered.status_code == 200, answered.text
    for stream in (False, True):
        num_forwards = health(url)["forwards"]
        hang_up(url, lasting | {"stream": stream}, after=lambda _: wait_running(url))
        assert wait_idle(url)["forwards"] - num_forwards < 500, "the request went on after its client had left"
    assert post(url, "completions", complete(max_tokens=4)).status_code == 200


def test_too_many_waiting_requests_get_429(url: str, lasting: dict[str, Any]) -> None:
    """Ten are taken, of which the engine knows eight, two for each of its rows. What the eleventh is told counts only
    if they were still there when it had been answered."""
    counted: list[httpx.Response] = []

    def crowd(_: socket.socket) -> None:
        wait_running(url)
        response = post(url, "completions", complete(max_tokens=4))
        state = health(url)
        if state["running"] + state["waiting"] == 8:
            counted.append(response)

    for _ in range(20):
        hang_up(url, lasting, after=crowd)
        wait_idle(url)
        if counted:
            break
    (refused,) = counted
    assert refused.status_code == 429
    assert refused.headers["retry-after"] == "1"
    assert set(refused.json()["error"]) == {"message", "type", "param", "code"}
    assert post(url, "completions", complete(max_tokens=4)).status_code == 200


def test_the_job_names_known_models_and_does_not_take_over_a_running_serve(
    url: str, tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from jobs.serve import main

    assert main(["--model", "no-such-model"]) == 2
    message = capsys.readouterr().err
    assert "unknown model 'no-such-model'" in message and "known: ledger-bd, ledger-mbd" in message
    assert main(["--model", str(tiny_model_dir), "--buffer-size", "1"]) == 2
    assert "buffer_size=1 must be at least that" in capsys.readouterr().err
    (tmp_path / "config.json").write_text("{")
    assert main(["--model", str(tmp_path)]) == 2
    assert "not valid JSON" in capsys.readouterr().err
    assert main(["--model", str(tiny_model_dir)]) == 1
    assert "Serve already runs" in capsys.readouterr().err
    wait_idle(url)
