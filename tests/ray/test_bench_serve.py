"""`benchmarks serve`: what it measures of an endpoint whose timing is known, and of our own beside its engine."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from threaded_app import running_app

from benchmarks.load.serve import main

ROOT = Path(__file__).resolve().parents[2]
PIECES = ["one", " two three", " four"]  # 4 words, 3 events
GAP = 0.05


class KnownEndpoint:
    """An OpenAI endpoint that streams `PIECES`, `GAP` seconds apart; `faults` says what else the n-th request gets."""

    def __init__(self, *, usage: bool = True, faults: dict[int, str] | None = None) -> None:
        self._usage, self._faults = usage, faults or {}
        self.bodies: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()

    async def chat(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.json())
        self.keys.add(request.headers.get("Authorization"))
        fault = self._faults.get(len(self.bodies))
        if fault == "status":
            return web.Response(status=500, text="plain")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for piece in PIECES:
            await asyncio.sleep(GAP)
            choice = {"index": 0, "delta": {"content": piece}, "finish_reason": None}
            await response.write(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")
            if fault == "event":
                await response.write(b'data: {"error": {"message": "lost"}}\n\n')
                return response
            if fault == "cut":
                return response
        usage = {"completion_tokens": 6, "prompt_tokens": 3, "total_tokens": 9} if self._usage else None
        await response.write(b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "known"}]})

    @contextmanager
    def running(self) -> Iterator[str]:
        """Its URL, while it runs in a thread of its own."""
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self.chat)
        app.router.add_get("/v1/models", self.models)
        with running_app(app) as url:
            yield url


def measured(tmp_path: Path, *options: str) -> dict[str, Any]:
    report = tmp_path / "report.json"
    assert main([*options, "--json", str(report)]) == 0
    return dict(json.loads(report.read_text()))


def test_endpoints_beside_each_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "the-key")
    endpoint = KnownEndpoint()
    with endpoint.running() as url:
        report = measured(
            tmp_path,
            *("--url", url, "--url", f"{url}/v1", "--concurrency", "2", "--rate", "50", "--requests", "6"),
            *("--repeats", "2", "--warm-up", "1", "--slo", "ttft=20000", "--max-tokens", "9"),
            *("--extra-body", '{"decoding": {"buffer_size": 1}}', "--extra-body", '{"decoding": {"buffer_size": 4}}'),
            *("--plot", str(tmp_path / "plot.png")),
        )
    rows = {(row["target"], row["load"]): row for row in report["rows"]}
    assert {load for _, load in rows} == {"2 at once", "50 a second"}
    assert len(rows) == 4
    for row in rows.values():
        assert (row["num_ended"], row["num_errors"], row["tokens_per_arrival"]) == (12, 0, 2.0)
        assert row["counts"] == {"ttft": 12, "tpot": 12, "itl": 60, "gap": 24, "e2e": 12}
        assert row["ttft_p50"] >= GAP
        assert row["gap_p50"] >= 0.5 * GAP  # events may be read together on a busy machine, though not all of them
        assert row["e2e_p50"] >= 3 * GAP
        assert row["goodput"] == pytest.approx(row["requests_per_second"])
    of_median = [row["itl_mean"] / row["tpot_p50"] for row in rows.values()]
    # a busy machine delays a few answers, which moves a row's mean and not its median; not in every row
    assert min(of_median, key=lambda ratio: abs(ratio - 1)) == pytest.approx(1, rel=0.5)
    assert [ratio["rounds"] for ratio in report["ratios"]] == [2, 2]
    sizes = [body["decoding"]["buffer_size"] for body in endpoint.bodies]
    assert (sizes.count(1), sizes.count(4)) == (25, 25)
    assert all(
        body["max_tokens"] == 9 and body["stream_options"] == {"include_usage": True} for body in endpoint.bodies
    )
    asked = {(body["decoding"]["buffer_size"], body["messages"][0]["content"]) for body in endpoint.bodies}
    assert {text for size, text in asked if size == 1} == {text for size, text in asked if size == 4}
    assert len(asked) == 50, "a prompt was sent twice"
    assert endpoint.keys == {"Bearer the-key"}
    printed = capsys.readouterr().out
    assert "| 2 at once |" in printed
    assert "the-key" not in printed + json.dumps(report)
    assert (tmp_path / "plot.png").stat().st_size > 1000


def test_what_fails_is_counted_by_kind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    faults = {1: "status", 2: "event", 3: "cut", 4: "event"}
    with KnownEndpoint(faults=faults).running() as url:
        options = ["--url", url, "--concurrency", "1", "--requests", "6", "--repeats", "1", "--warm-up", "0"]
        (row,) = measured(tmp_path, *options)["rows"]
    assert row["errors"] == {"HTTP 500": 1, "error event": 2, "stream without an end": 1}
    assert (row["num_ended"], row["counts"]["ttft"]) == (2, 2)
    assert "2 x error event" in capsys.readouterr().out


def test_an_endpoint_that_does_not_count_its_tokens_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with KnownEndpoint(usage=False).running() as url:
        assert main(["--url", url, "--concurrency", "2", "--requests", "2", "--repeats", "1"]) == 1
    assert "sends no usage" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--url", "URL", "--max-rows", "4"], "--max-rows sets up our own endpoint"),
        (["--url", "URL", "--model", "other"], "does not serve 'other'; it serves known"),
        (["--url", "URL", "--rate", "0"], "--rate 0 must be"),
        (["--url", "URL", "--rate", "often"], "--rate often must be"),
        (["--url", "URL", "--concurrency", "none"], "--concurrency none must be"),
        (["--url", "URL", "--slo", "ttfb=1"], "'ttfb' is unknown"),
        (["--url", "URL", "--extra-body", "[]"], "must be an object"),
        (["--url", "URL", "--extra-body", "{}", "--extra-body", "{}"], "once for each --url"),
        (["--extra-body", '{"temperature": 1}'], "'temperature' cannot be asked of the engine alone"),
        (["--model", "nothing"], "unknown model 'nothing'"),
        (["--model", "sdar-null"], "64 tokens is too small"),
        (["--url", "URL", "--json", __file__], "exists already"),
    ],
)
def test_bad_options_are_one_sentence(capsys: pytest.CaptureFixture[str], options: list[str], sentence: str) -> None:
    with KnownEndpoint().running() as url:
        assert main([option.replace("URL", url) for option in options]) == 2
    printed = capsys.readouterr().err
    assert sentence in printed
    assert len(printed.strip().splitlines()) == 1


def test_a_dead_endpoint_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with KnownEndpoint().running() as url:
        pass
    assert main(["--url", url]) == 1
    printed = capsys.readouterr().err
    assert "/v1/models does not answer as an OpenAI endpoint" in printed
    assert len(printed.strip().splitlines()) == 1


@pytest.mark.slow
def test_our_own_endpoint_beside_its_engine(tmp_path: Path, tiny_model_dir: Path) -> None:
    """The command as it is run: it starts the endpoint, measures both sides with the same load, and leaves nothing."""
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "benchmarks", "serve", "--model", str(tiny_model_dir), "--concurrency", "3"]
    command += ["--requests", "6", "--repeats", "2", "--num-pages", "64", "--max-tokens", "24", "--json", str(report)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, env={**os.environ})
    assert done.returncode == 0, done.stderr
    rows = {row["target"]: row for row in json.loads(report.read_text())["rows"]}
    assert list(rows) == ["engine alone", "endpoint, 1 replica"]
    ours, alone = rows["endpoint, 1 replica"], rows["engine alone"]
    assert (ours["num_ended"], ours["num_errors"]) == (alone["num_ended"], alone["num_errors"]) == (12, 0)
    assert ours["counts"]["itl"] == alone["counts"]["itl"] > 0  # the same tokens were decoded
    (ratio,) = json.loads(report.read_text())["ratios"]
    assert (ratio["over"], ratio["rounds"]) == ("engine alone", 2)
    assert ratio["throughput"] > 0
    assert ratio["first_token"] > 0
