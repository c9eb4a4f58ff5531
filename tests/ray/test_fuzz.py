"""What no client should send gets an answer below 500 or a closed connection, and the endpoint goes on as before."""

import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from raw_http import RawHttp, post, read_all, statuses
from schema_bounds import SchemaBounds
from schemathesis import checks
from schemathesis.schemas import BaseSchema

from mbd_core.serving.api.openapi import openapi_document

MODEL = "tiny"
LIMIT = 300  # seconds to wait for what comes by itself, however busy the machine is
SILENCE = 60.0  # seconds that an answer may take on a busy machine
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
FEW_TOKENS = 24
CHECKED = [
    checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
    checks.negative_data_rejection,
]


@pytest.fixture(scope="module")
def url(serve_instance: str, tiny_model_dir: Path) -> Iterator[str]:
    from ray import serve

    from actors.serving.app import build

    engine = {"max_rows": 4, "num_pages": 200}
    model = {"model": str(tiny_model_dir), "name": MODEL, "max_waiting": 12, "engine": engine}
    serve.run(build({"device": "cpu", "models": [model]}), name="fuzz", route_prefix="/")
    yield serve_instance
    serve.delete("fuzz")


def states(url: str) -> list[dict[str, Any]]:
    """What /health says of each replica."""
    body = httpx.get(f"{url}/health", timeout=LIMIT).json()
    return [replica for model in body["models"] for replica in model["replicas"]]


def idle_states(url: str) -> list[dict[str, Any]]:
    """What /health says once nothing runs and no page is held; a request that was reset may still be on its way."""
    deadline = time.monotonic() + LIMIT
    while True:
        found = states(url)
        held = [s for s in found if s["kv_cache"]["free_pages"] != s["kv_cache"]["num_pages"] - 1]
        if not held and not any(s["running"] or s["waiting"] for s in found):
            return found
        assert time.monotonic() < deadline, "the requests did not end, or pages are held"
        time.sleep(0.1)


@pytest.fixture(autouse=True)
def goes_on_as_before(url: str, request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test the same replicas are there, nothing runs, no page is held, and a question is answered."""
    request.node._nodeid = request.node.nodeid  # pytest 9.2 has none, which Schemathesis 4.32 reads
    before = idle_states(url)
    yield
    after = idle_states(url)
    assert [s["pid"] for s in after] == [s["pid"] for s in before], "a replica was replaced"
    answer = httpx.post(f"{url}{COMPLETIONS}", json=body(), timeout=LIMIT)
    assert answer.status_code == 200, answer.text


@pytest.fixture
def raw(url: str) -> RawHttp:
    address = urlsplit(url)
    assert address.hostname and address.port
    return RawHttp(address.hostname, address.port, SILENCE)


def body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "Tom has 3 pens.", "max_tokens": 8} | fields


def encoded(**fields: Any) -> bytes:
    return json.dumps(body(**fields)).encode()


# -- from the schema ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=openapi_document()["paths"])
def schema(request: pytest.FixtureRequest) -> BaseSchema:
    """One path of it, as the server here is; made when a test begins, since making its cases takes seconds."""
    document = openapi_document(keys=False)
    return schemathesis.openapi.from_dict({**document, "paths": {request.param: document["paths"][request.param]}})


def test_the_schema_is_served(url: str) -> None:
    assert httpx.get(f"{url}/openapi.json", timeout=LIMIT).json() == openapi_document(keys=False)


@pytest.mark.slow
@schemathesis.pytest.from_fixture("schema").parametrize()
@settings(max_examples=40, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
def test_what_the_schema_says_is_what_comes(url: str, case: schemathesis.Case) -> None:
    given = case.body
    if isinstance(given, dict):
        if isinstance(given.get("model"), str):
            given["model"] = MODEL  # any other name is a 404, and nothing else is tried
        limits = ("max_tokens", "max_completion_tokens")
        if case.path != COUNT and all(given.get(name) is None for name in limits):
            given["max_tokens"] = FEW_TOKENS
    case.call_and_validate(base_url=url, timeout=LIMIT, checks=CHECKED)


# -- every field at its bounds ---------------------------------------------------------------------------------------

TOOL = {"type": "function", "function": {"name": "count", "parameters": {"type": "object", "properties": {}}}}
MESSAGE_TOOL = {"name": "count", "input_schema": {"type": "object", "properties": {}}}
HOLES = [{"hole": 2}, " pens, so ", {"hole": 3}]
WITH: dict[str, dict[str, Any]] = {  # what a field needs beside it to have its effect
    "top_p": {"temperature": 1.0},
    "top_k": {"temperature": 1.0},
    "seed": {"temperature": 1.0},
    "stream_options": {"stream": True},
    "frames": {"stream": True},
    "tool_choice": {"tools": [TOOL]},
    "parallel_tool_calls": {"tools": [TOOL], "tool_choice": "required"},
    "echo": {"logprobs": 0, "max_tokens": 1},
    "logprobs": {"echo": True, "max_tokens": 1},
    "top_logprobs": {"logprobs": True},
    "min_p": {"temperature": 1.0},
}
BESIDE: dict[
    str, list[dict[str, Any]]
] = {  # features that change how a request is decoded, one of which a field joins
    COMPLETIONS: [{}, {"stream": True}, {"template": HOLES, "max_tokens": None}, {"guided_regex": "[a-z ]{1,9}"}],
    CHAT: [{}, {"stream": True}, {"tools": [TOOL]}, {"response_format": {"type": "json_object"}}],
    MESSAGES: [{}, {"stream": True}, {"tools": [MESSAGE_TOOL]}],
    COUNT: [{}, {"tools": [MESSAGE_TOOL]}],
    "/tokenize": [{}],
    "/detokenize": [{}],
}
LEAST: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"model": MODEL, "prompt": "Tom has 3 pens.", "max_tokens": 8},
    CHAT: {"model": MODEL, "messages": [{"role": "user", "content": "Tom has 3 pens."}], "max_tokens": 8},
    MESSAGES: {"model": MODEL, "messages": [{"role": "user", "content": "Tom has 3 pens."}], "max_tokens": 8},
    COUNT: {"model": MODEL, "messages": [{"role": "user", "content": "Tom has 3 pens."}]},
    "/tokenize": {"messages": [{"role": "user", "content": "Tom"}]},
    "/detokenize": {"tokens": [9]},
}


def wrong_field(answer: httpx.Response) -> Any:
    """The field that an error names."""
    error = answer.json()["error"]
    return error["param"] if "param" in error else error["details"]["param"]


def fields_of(path: str) -> dict[str, Any]:
    document = openapi_document()
    content = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    fields: dict[str, Any] = SchemaBounds(document).resolve(content["schema"])["properties"]
    return fields


@pytest.mark.slow
@pytest.mark.parametrize("path", LEAST)
def test_every_field_at_its_bounds_is_served_or_refused_by_name(url: str, path: str) -> None:
    """Alone and beside what changes the decoding. Most are served, so the engine is reached."""
    bounds, served, sent = SchemaBounds(openapi_document()), 0, 0
    with httpx.Client(base_url=url, timeout=LIMIT) as client:
        for name, schema in fields_of(path).items():
            if name == "model":
                continue
            for value in bounds.inside(schema):
                for beside in BESIDE[path]:
                    needed = {} if path in (MESSAGES, COUNT) and name == "tool_choice" else WITH.get(name, {})
                    other = {"messages": None} if (path, name) == ("/tokenize", "prompt") else needed
                    answer = client.post(path, json=LEAST[path] | other | beside | {name: value})
                    said = f"{name}={json.dumps(value)[:200]} beside {beside}: {answer.text[:300]}"
                    assert answer.status_code in (200, 400), said
                    assert answer.status_code == 200 or wrong_field(answer), said
                    assert 'data: {"error"' not in answer.text and "event: error" not in answer.text, said
                    served, sent = served + (answer.status_code == 200), sent + 1
            for value in bounds.outside(schema):
                answer = client.post(path, json=LEAST[path] | {name: value})
                assert answer.status_code == 400, f"{name}={json.dumps(value)[:200]}: {answer.text[:300]}"
    print(f"{path}: {served} of {sent} requests were served")
    assert served > sent / 2


# -- bodies that are not the schema's ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x00",
        b"\xff\xfe{}",
        b"null",
        b"[]",
        b'"text"',
        b"{",
        b'{"model": "tiny", "prompt": "a"} trailing',
        b'{"model": "tiny", "prompt": "\xed\xa0\x80"}',
        b'{"model": "tiny", "prompt": "\\ud800"}',
        b'{"model": "tiny", "prompt": "a", "prompt": 3}',
        b'{"model": "tiny", "prompt": "a", "temperature": NaN}',
        b'{"model": "tiny", "prompt": "a", "temperature": 1e999}',
        b'{"model": "tiny", "prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}",
        b'{"model": "tiny", "prompt": ' + b"[" * 100_000,
        b'{"model": "tiny", "prompt": "a", "metadata": ' + b'{"a":' * 50_000 + b"1" + b"}" * 50_000 + b"}",
        b'{"model": "tiny", "prompt": "a", "decoding": {"t2t": {"t2t": {"t2t": {}}}}}',
        b'{"model": "tiny", "prompt": "a", "decoding": {"tau_m2t": true}}',
        b'{"model": "tiny", "prompt": "a", "decoding": {"block_size": "4"}}',
        b'{"model": "tiny", "prompt": "a", "decoding": {"canvas": []}}',
        b'{"model": "tiny", "prompt": [999999999999999999999999]}',
    ],
    ids=lambda content: repr(content[:60]),
)
def test_a_body_that_is_no_request_is_refused(url: str, content: bytes) -> None:
    for path in (COMPLETIONS, CHAT):
        answer = httpx.post(f"{url}{path}", content=content, timeout=LIMIT)
        assert answer.status_code == 400, answer.text
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    for path in (MESSAGES, COUNT):
        answer = httpx.post(f"{url}{path}", content=content, timeout=LIMIT)
        assert answer.status_code == 400, answer.text
        assert set(answer.json()) == {"type", "error", "request_id"} and answer.json()["request_id"]


@pytest.mark.parametrize("prompt", ["\x00", "\u202e", "a" * 200_000, "\U0010ffff" * 300, "\n" * 400, "<|mask|>" * 9])
def test_a_prompt_of_odd_characters_is_served_or_refused(url: str, prompt: str) -> None:
    for path, asked in (
        (COMPLETIONS, {"prompt": prompt}),
        (CHAT, {"messages": [{"role": "user", "content": prompt}]}),
        (MESSAGES, {"messages": [{"role": "user", "content": prompt}]}),
    ):
        answer = httpx.post(f"{url}{path}", json={"model": MODEL, "max_tokens": 8} | asked, timeout=LIMIT)
        assert answer.status_code in (200, 400), answer.text


# -- over a bare socket --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /health HTTP/1.1\r\nno colon here\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: test\r\n" + b"X: " + b"a" * 2**20 + b"\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: test\r\n" + b"".join(b"X-%d: a\r\n" % n for n in range(20_000)) + b"\r\n",
        b"GET /" + b"a" * 2**20 + b" HTTP/1.1\r\nHost: test\r\n\r\n",
        b"\x00" * 4096,
        b"\r\n" * 4096,
    ],
    ids=lambda sent: repr(sent[:40]),
)
def test_garbage_is_answered_or_hung_up_on(raw: RawHttp, sent: bytes) -> None:
    assert all(status < 500 for status in statuses(raw.exchange(sent, half_close=True)))


@pytest.mark.parametrize(
    "path", ["/%", "/%00", "/v1/models/%ff%fe", "/v1/models/" + "%2e%2e%2f" * 9, "//v1//models", "/v1/models/a?b=%zz"]
)
def test_an_odd_path_is_not_found(raw: RawHttp, path: str) -> None:
    answer = raw.exchange(f"GET {path} HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n".encode())
    assert statuses(answer)[0] in (400, 404)


def test_a_body_may_come_slowly_and_in_pieces(raw: RawHttp) -> None:
    sent = post(COMPLETIONS, encoded())
    with raw.connect() as peer:
        for start in range(0, len(sent), 16):
            peer.sendall(sent[start : start + 16])
            time.sleep(0.02)
        assert statuses(read_all(peer)) == [200]


def test_requests_in_one_packet_are_answered_in_order(raw: RawHttp) -> None:
    first = post(COMPLETIONS, encoded()).replace(b"Connection: close\r\n", b"")
    unknown = b"GET /nowhere HTTP/1.1\r\nHost: test\r\n\r\n"
    last = b"GET /v1/models HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n"
    assert statuses(raw.exchange(first + unknown + last)) == [200, 404, 200]


def test_a_length_beyond_the_body_ends_with_the_connection(raw: RawHttp) -> None:
    assert all(s < 500 for s in statuses(raw.exchange(post(COMPLETIONS, encoded(), length=10_000), half_close=True)))


def test_a_length_short_of_the_body_cuts_it(raw: RawHttp) -> None:
    assert statuses(raw.exchange(post(COMPLETIONS, encoded(), length=10)))[0] == 400


@pytest.mark.parametrize(
    "headers",
    [
        ("Content-Length: -1",),
        ("Content-Length: many",),
        ("Content-Length: 5", "Content-Length: 6"),
        ("Transfer-Encoding: chunked", "Content-Length: 5"),
        ("Transfer-Encoding: gzip",),
        ("Expect: the-unexpected",),
        ("Content-Encoding: gzip",),
        ("X-Request-ID: \x01\x02",),
        ("Authorization: Bearer " + "k" * 20_000,),
    ],
    ids=lambda headers: headers[0][:40],
)
def test_wrong_headers_are_answered_or_hung_up_on(raw: RawHttp, headers: tuple[str, ...]) -> None:
    assert all(status < 500 for status in statuses(raw.exchange(post(CHAT, b"{}", *headers), half_close=True)))


@pytest.mark.parametrize("chunks", [b"zz\r\n{}\r\n0\r\n\r\n", b"ffffffffffffffffff\r\n", b"5\r\n{}", b"0\r\n"])
def test_broken_chunks_are_answered_or_hung_up_on(raw: RawHttp, chunks: bytes) -> None:
    answer = raw.exchange(post(COMPLETIONS, chunks, "Transfer-Encoding: chunked"), half_close=True)
    assert all(status < 500 for status in statuses(answer))


def test_connections_that_say_nothing_keep_nobody_out(url: str, raw: RawHttp) -> None:
    silent = [raw.connect() for _ in range(60)]
    try:
        for number, peer in enumerate(silent):
            peer.sendall(post(COMPLETIONS, b"", length=1000)[: 1 + 5 * number])
        assert httpx.post(f"{url}{COMPLETIONS}", json=body(), timeout=SILENCE).status_code == 200
    finally:
        for peer in silent:
            peer.close()


def test_a_reset_at_any_moment_frees_what_was_held(raw: RawHttp) -> None:
    slow = {"max_tokens": 300, "stream": True, "n": 2, "decoding": {"buffer_size": 1, "tau_m2t": 1.0}}
    sent = post(COMPLETIONS, encoded(**slow))
    for cut in (5, 60, len(sent) - 3):
        raw.reset_after(sent[:cut])
    raw.reset_after(sent)
    for answered in (1, 300):
        raw.reset_after(sent, answered=answered)


def test_a_client_that_does_not_read_holds_only_its_own(url: str, raw: RawHttp) -> None:
    with raw.connect() as peer:
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        peer.sendall(post(COMPLETIONS, encoded(max_tokens=200, stream=True, logprobs=0)))
        assert httpx.post(f"{url}{COMPLETIONS}", json=body(), timeout=SILENCE).status_code == 200
