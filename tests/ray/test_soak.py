"""`benchmarks soak`: what it counts as lost, wrong or grown; and a short soak with a kill that finds nothing."""

import asyncio
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from benchmarks.load.soak import end_rows, failures, held_pages
from benchmarks.load.soak_parts import EndedRequest, MemorySample, SoakClient, memory_rows
from benchmarks.load.stream_client import Target, open_session

ROOT = Path(__file__).resolve().parents[2]
CHUNK = {"choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": None}]}
LAST = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
ERROR = {"error": {"message": "m", "type": "server_error", "param": None, "code": None}}
WHOLE = {"choices": [{"message": {"content": "a"}, "finish_reason": "stop"}]}


def stream(*chunks: dict[str, Any], done: bool = True) -> tuple[int, str]:
    lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks] + ["data: [DONE]\n\n"] * done
    return 200, "".join(lines)


@pytest.mark.parametrize(
    ("kind", "reply", "end"),
    [
        ("stream", stream(CHUNK, LAST), "whole"),
        ("stream", stream(CHUNK, LAST, done=False), "lost"),
        ("stream", stream(CHUNK, ERROR, done=False), "error"),
        ("stream", stream(CHUNK), "wrong"),
        ("stream", stream(CHUNK, LAST, LAST), "wrong"),
        ("stream", (429, json.dumps(ERROR)), "refused"),
        ("stream", (500, json.dumps(ERROR)), "error"),
        ("whole answer", (200, json.dumps(WHOLE)), "whole"),
        ("whole answer", (200, "{}"), "wrong"),
        ("whole answer", (500, "Internal Server Error"), "lost"),
        ("whole answer", (500, json.dumps(ERROR)), "error"),
        ("whole answer", (503, json.dumps(ERROR)), "refused"),
        ("hang-up", stream(*[CHUNK] * 9), "hung up"),
        ("bad request", (400, json.dumps(ERROR)), "refused"),
        ("bad request", (200, json.dumps(WHOLE)), "wrong"),
        ("bad request", (400, "plain"), "wrong"),
        ("bad request", (500, json.dumps(ERROR)), "wrong"),
    ],
)
def test_how_a_request_ended(kind: Any, reply: tuple[int, str], end: str) -> None:
    assert asyncio.run(ends_of(kind, [reply]))[0].end == end


def test_an_exact_answer_that_differs_from_the_first_is_wrong() -> None:
    other = {"choices": [{"index": 0, "delta": {"content": "ab"}, "finish_reason": None}]}
    replies = [stream(CHUNK, LAST)] * 8 + [stream(other, LAST)] * 8  # one in two is exact
    ends = asyncio.run(ends_of("stream", replies))
    assert {ended.end for ended in ends[:8]} == {"whole"}
    assert EndedRequest("stream", "wrong", "another text than before") in ends[8:]


async def ends_of(kind: Any, replies: list[tuple[int, str]]) -> list[EndedRequest]:
    """How requests end that get these replies."""
    coming = iter(replies)

    async def answer(_: web.Request) -> web.Response:
        status, text = next(coming)
        return web.Response(status=status, text=text)

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    async with TestServer(app) as server, open_session(seconds=60) as session:
        target = Target(name="m", url=str(server.make_url("")).rstrip("/"), model="m")
        client = SoakClient(session, target, ["one"], random.Random(0))
        return [await client.send(kind) for _ in replies]


def test_a_cut_connection_is_a_lost_request() -> None:
    async def dead() -> EndedRequest:
        async with open_session(seconds=60) as session:
            target = Target(name="m", url="http://127.0.0.1:9", model="m")
            return await SoakClient(session, target, ["one"], random.Random(0)).send("whole answer")

    assert asyncio.run(dead()).end == "lost"


def test_memory_that_grows_is_not_flat() -> None:
    def series(role: str, at_end: int) -> list[MemorySample]:
        return [
            MemorySample(float(s), role, 1, 500 * 2**20 + max(0, s - 25) * at_end * 2**20 // 75) for s in range(100)
        ]

    rows = memory_rows([*series("gateway", 200), *series("replica", 20)], 100.0)
    assert [(row["role"], row["flat"]) for row in rows] == [("gateway", False), ("replica", True)]
    assert rows[0]["quarter_1"] == 500.0


def test_the_verdict_names_each_failure() -> None:
    report: dict[str, Any] = {
        "ends": end_rows(
            [
                EndedRequest("stream", "lost"),
                EndedRequest("stream", "whole"),
                EndedRequest("bad request", "wrong", "HTTP 200"),
            ]
        ),
        "memory": [{"role": "gateway", "quarter_2": 100.0, "quarter_4": 200.0, "flat": False}],
        "held_pages": [0, 3],
    }
    assert len(failures(report, idle=False)) == 4
    healthy = {"ends": end_rows([EndedRequest("stream", "whole")]), "memory": [], "held_pages": [0]}
    assert failures(healthy, idle=True) == []
    assert held_pages({"kv_cache": {"num_pages": 10, "free_pages": 7}}) == 2
    assert held_pages({"error": "dead"}) == 1


@pytest.mark.slow
@pytest.mark.parametrize(("minutes", "kill_every"), [(0.5, 8), (10, 60)])
def test_a_soak_with_kills_loses_nothing(
    tmp_path: Path, tiny_model_dir: Path, minutes: float, kill_every: float
) -> None:
    report = tmp_path / "report.json"
    command = [
        sys.executable,
        "-m",
        "benchmarks",
        "soak",
        "--model",
        str(tiny_model_dir),
        "--clients",
        "4",
        "--max-tokens",
        "48",
    ]
    command += ["--minutes", str(minutes), "--kill-every", str(kill_every), "--sample-every", "1"]
    command += ["--json", str(report)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=60 * minutes + 900, env={**os.environ}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(report.read_text())
    ends = {row["request"]: row for row in told["ends"]}
    assert set(ends) == {"stream", "whole answer", "hang-up", "bad request"}
    assert all(row["lost"] == row["wrong"] == row["error"] == 0 for row in ends.values())
    assert min(ends["stream"]["whole"], ends["whole answer"]["whole"], ends["hang-up"]["hung up"]) > 0
    assert len(told["recoveries"]) >= 1
    assert told["held_pages"] == [0, 0]
    assert {row["role"] for row in told["memory"]} == {"gateway", "replica", "proxy", "controller"}
