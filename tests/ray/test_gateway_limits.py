"""What a gateway lets in: API keys, bodies within bounds, and nobody's browser; and conversations that go on."""

import os
import statistics
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest
from raw_http import RawHttp, post, statuses

from benchmarks.load.bystander import served_memory

MODEL, APP = "guarded", "guarded"
LIMIT = 300  # seconds to wait for what comes by itself, however busy the machine is
BODY_BYTES = 20_000
ANN, BEN, CAT = "ann-0123456789abcdef", "ben-0123456789abcdef", "cat-0123456789abcdef"
SLOW = {"max_tokens": 400, "decoding": {"buffer_size": 1, "tau_m2t": 1.0}}


@pytest.fixture(scope="module")
def keys_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("secrets") / "keys"
    file.write_text(f"ann {ANN}\nben {BEN}\n")
    return file


@pytest.fixture(scope="module")
def url(serve_instance: str, tiny_model_dir: Path, keys_file: Path) -> Iterator[str]:
    from ray import serve

    from actors.serving.app import application
    from actors.serving.args import ServingArgs

    model = {"model": str(tiny_model_dir), "name": MODEL, "engine": {"max_rows": 2, "num_pages": 200}}
    limits = {"api_keys": str(keys_file), "client_requests": 2, "body_bytes": BODY_BYTES}
    args = ServingArgs.read({"device": "cpu", "models": [model], **limits})
    serve.run(application(args), name=APP, route_prefix=f"/{APP}")
    yield f"{serve_instance}/{APP}"
    serve.delete(APP)


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key=ANN, max_retries=0, timeout=LIMIT) as connected:
        yield connected


def headers(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def ask(url: str, key: str | None, **fields: Any) -> httpx.Response:
    body = {"model": MODEL, "prompt": "Tom has 3 pens.", "max_tokens": 4} | fields
    sent = {} if key is None else headers(key)
    return httpx.post(f"{url}/v1/completions", json=body, headers=sent, timeout=LIMIT)


def check_error(response: httpx.Response, status: int, code: str) -> None:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["code"] == code


def test_a_conversation_goes_on_as_openai_s_client_sends_it_back(client: openai.OpenAI) -> None:
    for stream in (False, True):
        messages: list[Any] = [{"role": "system", "content": "Be short."}]
        for turn in range(3):
            messages.append({"role": "user", "content": f"{turn} + 1", "name": "tom"})
            asked: dict[str, Any] = {"model": MODEL, "messages": messages, "max_completion_tokens": 6}
            if stream:
                pieces = [
                    c.choices[0].delta.content or "" for c in client.chat.completions.create(**asked, stream=True)
                ]
                messages.append({"role": "assistant", "content": "".join(pieces)})
            else:
                answer = client.chat.completions.create(**asked, tools=[], tool_choice="none", service_tier="auto")
                messages.append(answer.choices[0].message)
        assert len(messages) == 7


def test_only_who_has_a_key_is_served(url: str) -> None:
    assert ask(url, ANN).status_code == 200
    for key in (None, "wrong", ANN[:-1]):
        answer = ask(url, key)
        check_error(answer, 401, "invalid_api_key")
        assert answer.headers["www-authenticate"] == "Bearer" and ANN not in answer.text
    for route in ("/v1/models", f"/v1/models/{MODEL}", "/tokenizer_info"):
        check_error(httpx.get(url + route, timeout=LIMIT), 401, "invalid_api_key")
        assert httpx.get(url + route, headers=headers(BEN), timeout=LIMIT).status_code == 200
    for route in ("/tokenize", "/detokenize", "/v1/chat/completions"):
        check_error(httpx.post(url + route, json={}, timeout=LIMIT), 401, "invalid_api_key")
    for route in ("/v1/messages", "/v1/messages/count_tokens"):
        body = httpx.post(url + route, json={}, timeout=LIMIT)
        assert (body.status_code, body.json()["error"]["type"]) == (401, "authentication_error")
        assert httpx.post(url + route, json={}, headers={"x-api-key": ANN}, timeout=LIMIT).status_code == 400
    for route in ("/health", "/ready", "/version", "/openapi.json"):
        assert httpx.get(url + route, timeout=LIMIT).status_code == 200
    assert httpx.get(f"{url}/ready", timeout=LIMIT).json() == {"ready": True, "asleep": False}


def test_keys_change_without_a_restart(url: str, keys_file: Path) -> None:
    old = keys_file.read_text()
    changed = keys_file.with_name("changed")
    for text, known, unknown in ((f"cat {CAT}\n", CAT, ANN), (old, ANN, CAT)):
        changed.write_text(text)
        os.replace(changed, keys_file)
        assert ask(url, known).status_code == 200
        check_error(ask(url, unknown), 401, "invalid_api_key")


def test_a_client_at_its_limit_waits_and_others_do_not(url: str) -> None:
    with ThreadPoolExecutor(6) as clients:
        many = list(clients.map(lambda _: ask(url, ANN, **SLOW), range(6)))
    refused = [answer for answer in many if answer.status_code != 200]
    assert refused and all(a.status_code == 429 and a.headers["retry-after"] for a in refused)
    assert sum(a.status_code == 200 for a in many) >= 2
    assert ask(url, ANN).status_code == ask(url, BEN).status_code == 200


def test_a_large_body_is_refused_before_it_is_read(url: str) -> None:
    for size in (BODY_BYTES, 5_000_000):
        check_error(ask(url, ANN, prompt="a " * (size // 2)), 413, "body_too_large")
    pieces = iter([b'{"model": "guarded", "prompt": "'] + [b"a" * 1000] * 100)
    answer = httpx.post(f"{url}/v1/completions", content=pieces, headers=headers(ANN), timeout=LIMIT)
    check_error(answer, 413, "body_too_large")
    parts = urlsplit(url)
    assert parts.hostname and parts.port
    claimed = post(f"/{APP}/v1/completions", b"{", f"Authorization: Bearer {ANN}", length=10**12)
    assert statuses(RawHttp(parts.hostname, parts.port, LIMIT).exchange(claimed))[0] == 413
    assert ask(url, ANN, prompt="a " * 100).status_code == 200


def test_fifty_clients_without_a_key_and_with_endless_headers_cost_nobody_anything(url: str) -> None:
    parts = urlsplit(url)
    assert parts.hostname and parts.port
    raw = RawHttp(parts.hostname, parts.port, LIMIT)
    head, header = f"GET /{APP}/v1/models HTTP/1.1\r\nHost: test\r\n".encode(), b"X-A: " + b"a" * 2**20 + b"\r\n"
    answer = raw.exchange(head, *[header] * 100, b"\r\n")
    assert statuses(answer) == [431] and b'"code":"headers_too_large"' in answer

    def proxy() -> int:
        (held,) = (n for name, n in served_memory(url).items() if name.startswith("proxy"))
        return held

    def bystander() -> list[float]:
        seconds = []
        for _ in range(20):
            begun = time.perf_counter()
            assert ask(url, ANN).status_code == 200
            seconds.append(time.perf_counter() - begun)
        return seconds

    over = threading.Event()

    def attack() -> int:
        number = 0
        while not over.is_set():
            with suppress(ConnectionError):
                assert statuses(raw.exchange(head, *[header] * 100)) in ([431], [])
                number += 1
        return number

    quiet, before = bystander(), proxy()
    with ThreadPoolExecutor(50) as crowd:
        attacks = [crowd.submit(attack) for _ in range(50)]
        try:
            crowded, during = bystander(), proxy()
        finally:
            over.set()
        refused = sum(one.result() for one in attacks)
    grown = (during - before) / 2**20
    ratio = max(crowded) / statistics.median(quiet)
    print(f"\n{refused} attacks; the proxy grew by {grown:.0f} MiB; slowest bystander / quiet median {ratio:.1f}")
    assert refused >= 50
    assert grown < 64, "50 heads of 32 KiB are less than 2 MiB"


def test_a_page_of_another_origin_gets_no_permission(url: str) -> None:
    asked = {"Origin": "http://elsewhere", "Access-Control-Request-Method": "POST"}
    preflight = httpx.options(f"{url}/v1/completions", headers=asked, timeout=LIMIT)
    assert preflight.status_code == 405
    plain = httpx.get(f"{url}/health", headers={"Origin": "http://elsewhere"}, timeout=LIMIT)
    assert not [name for name in (*preflight.headers, *plain.headers) if name.startswith("access-control")]
