"""The bystander's measure: quiet is quiet, crowded is crowded, and the ratio is theirs."""

import asyncio
import json
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
from aiohttp import web
from threaded_app import running_app

from benchmarks.load import bystander as bench_bystander
from benchmarks.load.attacks import ATTACKS, attack_body
from benchmarks.load.bystander import TURNS, WARM_UP, Bystander
from mbd_core.serving.api.errors import ApiError
from mbd_core.serving.api.parsing import parse
from mbd_core.serving.api.requests import ChatRequest, CompletionRequest


class Endpoint:
    """Streams one token at once; a long prompt takes until a short one has come, or a second."""

    def __init__(self, *, refuses: bool = False, keys: frozenset[str] | None = None) -> None:
        self.refuses, self.keys = refuses, keys
        self.seen_keys: dict[str, set[str]] = {"long": set(), "short": set()}
        self.open_long = 0
        self.last_long = -math.inf  # when the latest long one ended
        self.short_came = asyncio.Event()
        self.crowds: list[int] = []  # for each short request, the long ones that were open when it came
        self.prompts: list[str] = []

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body, key = await request.json(), self.key(request)
        self.prompts.append(body["prompt"])
        self.seen_keys["long" if len(body["prompt"]) > 500 else "short"].add(key)
        if len(body["prompt"]) > 500:
            self.open_long += 1
            try:
                self.short_came.clear()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self.short_came.wait(), 1.0)
            finally:
                self.open_long -= 1
                self.last_long = time.monotonic()
            if self.refuses:
                return web.json_response({"error": {}}, status=400)
        else:
            is_crowded = time.monotonic() - self.last_long < 0.5
            end = time.monotonic() + (0.5 if is_crowded else 0.02)  # long ones come in between, on a busy machine too
            while not self.open_long and time.monotonic() < end:
                await asyncio.sleep(0.005)
            self.crowds.append(self.open_long)
            self.short_came.set()
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for choices in ([{"text": "x"}], []):
            event = {"choices": choices, "usage": None if choices else {"completion_tokens": 1}}
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    def key(self, request: web.Request) -> str:
        key = request.headers.get("authorization", "").removeprefix("Bearer ")
        if self.keys is not None and key not in self.keys:
            raise web.HTTPUnauthorized
        return key

    async def models(self, request: web.Request) -> web.Response:
        self.key(request)
        return web.json_response({"data": [{"id": "known"}]})

    @contextmanager
    def running(self) -> Iterator[str]:
        app = web.Application()
        app.router.add_post("/v1/completions", self.complete)
        app.router.add_get("/v1/models", self.models)
        with running_app(app) as url:
            yield url


@pytest.fixture(autouse=True)
def settled_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The endpoint of these tests drops a request as soon as its client has gone."""
    monkeypatch.setattr(bench_bystander, "SETTLE_SECONDS", 0.1)


@pytest.mark.parametrize("refuses", [False, True])
def test_short_requests_are_measured_in_quiet_and_in_a_crowd(
    capsys: pytest.CaptureFixture[str], refuses: bool
) -> None:
    endpoint = Endpoint(refuses=refuses)
    with endpoint.running() as url:
        options = ["--url", url, "--characters", "1000", "--crowd", "3", "--requests", "20"]
        assert bench_bystander.main(options) == 0
    out = capsys.readouterr().out
    assert "   quiet: 20 requests" in out and " crowded: 20 requests" in out
    assert ("refused or failed: HTTP 400" in out) is refuses
    assert "crowded / quiet: median" in out
    assert len(endpoint.crowds) == 40 + TURNS * WARM_UP
    assert sum(crowd > 0 for crowd in endpoint.crowds) >= 3, "some came while long prompts were read"
    assert endpoint.crowds[:5] == [0] * 5, "the first turn begins in quiet"
    long = [prompt for prompt in endpoint.prompts if len(prompt) > 500]
    assert len(set(long)) == len(long), "no cache could hold them"


def test_crowd_and_bystander_have_their_own_keys(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint = Endpoint(keys=frozenset({"ann-0123456789abcdef", "mob-0123456789abcdef"}))
    monkeypatch.setenv("OPENAI_API_KEY", "ann-0123456789abcdef")
    monkeypatch.setenv("MOB_KEY", "mob-0123456789abcdef")
    options = ["--characters", "1000", "--crowd", "2", "--requests", "24", "--url"]
    with endpoint.running() as url:
        assert bench_bystander.main([*options, url, "--crowd-key", "MOB_KEY"]) == 0
        assert endpoint.seen_keys == {"short": {"ann-0123456789abcdef"}, "long": {"mob-0123456789abcdef"}}
        assert bench_bystander.main([*options, url]) == 0
        assert endpoint.seen_keys["long"] == {"ann-0123456789abcdef", "mob-0123456789abcdef"}, "one client, as asked"
        printed = "".join(capsys.readouterr())
        assert "refused or failed" not in printed and "0123456789abcdef" not in printed
        assert bench_bystander.main([*options, url, "--crowd-key", "NOT_THERE"]) == 2
        assert "NOT_THERE: this environment variable holds nothing" in capsys.readouterr().err
        monkeypatch.setenv("OPENAI_API_KEY", "unknown")
        assert bench_bystander.main([*options, url]) == 1
        assert "does not answer as an OpenAI endpoint: 401" in capsys.readouterr().err


def test_the_ratio_is_of_equal_percentiles() -> None:
    found = Bystander(quiet=(1.0, 2.0, 3.0), crowded=(2.0, 6.0, 30.0), num_ended=1, crowd_errors=())
    assert (found.ratio(50), found.ratio(0), found.ratio(100)) == (3, 2, 10)


def test_what_does_not_answer_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_bystander.main(["--url", "http://127.0.0.1:1"]) == 1
    assert "does not answer as an OpenAI endpoint" in capsys.readouterr().err


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_is_a_request_that_the_endpoint_looks_at(attack: str) -> None:
    """It is refused, if at all, for what makes it an attack; and no two are alike."""
    route, body = attack_body(attack, "tiny", "a", 20_000)
    kind = ChatRequest if route == "chat/completions" else CompletionRequest
    if attack == "longer-stops":
        with pytest.raises(ApiError, match="stop"):
            parse(kind, json.dumps(body).encode())
    else:
        parse(kind, json.dumps(body).encode())
    assert attack_body(attack, "tiny", "a", 20_000) != attack_body(attack, "tiny", "b", 20_000)


def test_an_unknown_attack_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_bystander.main(["--url", "http://127.0.0.1:1", "--attacks", "prompts,floods"]) == 2
    assert "--attacks floods is unknown; choose among plain, prompts, stops" in capsys.readouterr().err
