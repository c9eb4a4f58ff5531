"""Proxies of the environment: no client asks one for loopback or this machine, and one that fails is named."""

import asyncio
import os
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import aiohttp
import httpx
import pytest
import requests
from scripted_endpoint import ScriptedEndpoint

from cluster.local import ROOT
from mbd_core.evaluation.sweep.endpoints.endpoint import EndpointAddress, client_of, find_endpoint
from mbd_core.proxies import is_own, keep_direct, proxy_note
from mbd_core.rl.parts import Failure, RewardOutcome
from mbd_core.rl.services import HttpReward
from mbd_core.storage.folder import Folder

DEAD = "http://127.0.0.1:9"
VARIABLES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")
ROW = {"prompt": "p", "text": "t", "reference": "r", "problem_id": "1"}


def judged(url: str) -> RewardOutcome:
    """What a reward service gives for `ROW`, asked for at most a second."""
    (outcome,) = asyncio.run(HttpReward(url, seconds=5, patience=1, concurrency=1).judge([ROW]))
    return outcome


@pytest.fixture
def proxies(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets the variables of proxies; without names there are none."""

    def put(**values: str) -> None:
        for name in (*VARIABLES, *map(str.upper, VARIABLES)):
            monkeypatch.setenv(name, "")  # so that what `keep_direct` writes is taken back
            monkeypatch.delenv(name)
        for name, value in values.items():
            monkeypatch.setenv(name, value)

    monkeypatch.setattr(urllib.request, "_opener", None)  # it keeps the proxies that stood when it was made
    put()
    return put


class Replies(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"reward": 0.5}')

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.do_GET()

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def service() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Replies)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


SETTINGS: list[dict[str, str]] = [
    {"http_proxy": DEAD, "https_proxy": DEAD},
    {"HTTP_PROXY": DEAD, "HTTPS_PROXY": DEAD},
    {"all_proxy": DEAD, "http_proxy": DEAD},
    {"ALL_PROXY": DEAD, "HTTP_PROXY": DEAD, "NO_PROXY": "example.com, .corp"},
    {"http_proxy": DEAD, "no_proxy": "", "NO_PROXY": "example.com"},
]


async def _aiohttp(url: str) -> int:
    async with aiohttp.ClientSession(trust_env=True) as session, session.get(url) as response:
        return response.status


@pytest.mark.parametrize("settings", SETTINGS)
def test_every_client_asks_loopback_and_this_machine_directly(
    proxies: Callable[..., None], service: str, settings: dict[str, str]
) -> None:
    proxies(**settings)
    keep_direct(["10.1.2.3"])
    for url in (service, service.replace("127.0.0.1", "localhost")):
        with urllib.request.urlopen(url) as response:
            assert response.status == 200
        assert (requests.get(url).status_code, httpx.get(url).status_code, asyncio.run(_aiohttp(url))) == (200,) * 3
    direct = os.environ["no_proxy"].split(",")
    assert os.environ["NO_PROXY"].split(",") == direct and "10.1.2.3" in direct
    assert all(host in direct for host in settings.get("NO_PROXY", "").replace(" ", "").split(",") if host)
    assert proxy_note("http://10.1.2.3/x") == "" and proxy_note("http://elsewhere.org/x") != ""


def test_without_a_proxy_or_with_a_star_nothing_changes(proxies: Callable[..., None]) -> None:
    keep_direct(["10.1.2.3"])
    assert "no_proxy" not in os.environ and "NO_PROXY" not in os.environ
    proxies(http_proxy=DEAD, no_proxy="*")
    keep_direct()
    assert os.environ["no_proxy"] == "*" and proxy_note("http://elsewhere.org") == ""


@pytest.mark.parametrize(
    ("url", "own"),
    [
        ("http://localhost:8000/v1", True),
        ("http://LOCALHOST", True),
        ("http://api.localhost", True),
        ("http://127.3.4.5:1", True),
        ("http://[::1]:8000", True),
        ("http://0.0.0.0:8000", True),
        ("http://localhost.example.com", False),
        ("http://8.8.8.8", False),
    ],
)
def test_what_is_our_own_address(url: str, own: bool) -> None:
    assert is_own(url) == own


def test_a_reward_and_an_endpoint_of_this_machine_need_no_exception(
    proxies: Callable[..., None], service: str
) -> None:
    """Called as functions, without `keep_direct`; a proxy that the client cannot even read stands in no way."""
    proxies(http_proxy=DEAD, all_proxy="socks5://127.0.0.1:9", no_proxy="fe80::/10,[::1]")
    assert judged(f"{service}/score") == 0.5
    with ScriptedEndpoint() as server:
        server.models = ("m",)
        found = find_endpoint(EndpointAddress(name="x", url=server.url, model=None), None)
    assert found.model == "m"


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (
            {"http_proxy": DEAD},
            f"the proxy of http_proxy={DEAD}: correct http_proxy, or add elsewhere.invalid to",
        ),
        ({"HTTP_PROXY": "http://me:secret@127.0.0.1:9"}, "of HTTP_PROXY=http://***@127.0.0.1:9: correct HTTP_PROXY"),
    ],
)
def test_a_proxy_before_another_machine_is_named(
    proxies: Callable[..., None], settings: dict[str, str], says: str
) -> None:
    proxies(**settings)
    url = "http://elsewhere.invalid/v1"
    failure = judged(url)
    assert isinstance(failure, Failure)
    with pytest.raises(ValueError) as refused:
        find_endpoint(EndpointAddress(name="x", url=url, model=None), None)
    for sentence in (failure.why, str(refused.value)):
        assert says in sentence and "secret" not in sentence and "\n" not in sentence


def test_a_proxy_that_answers_for_the_endpoint_is_named(proxies: Callable[..., None]) -> None:
    with ScriptedEndpoint() as proxy:
        proxy.script = lambda body: (503, {"error": {"message": "no route"}})
        proxies(all_proxy=proxy.url.removesuffix("/v1"))
        with pytest.raises(ValueError, match="all_proxy=http://127"):
            find_endpoint(EndpointAddress(name="x", url="http://elsewhere.invalid/v1", model="m"), None)


def test_a_proxy_that_no_client_can_read_is_named(proxies: Callable[..., None]) -> None:
    proxies(all_proxy="ftp://proxy.corp:21")
    with pytest.raises(ValueError, match="correct all_proxy"):
        client_of("http://elsewhere.invalid/v1", None)


def test_a_storage_behind_a_dead_proxy_names_it(proxies: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    proxies(https_proxy=DEAD)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setattr("mbd_core.storage.remote.OPTIONS", {"s3": {"config_kwargs": {"retries": {"max_attempts": 0}}}})
    with pytest.raises(OSError, match=rf"through the proxy of https_proxy={DEAD}: correct https_proxy"):
        Folder.at("s3://bucket/folder").read_text("file")


JOB = """
import subprocess, sys
from cluster.local import local_cluster

with local_cluster(num_cpus=1, start_seconds=120) as cluster:
    submit = [sys.executable, "-m", "ray.scripts.scripts", "job", "submit", "--", "printenv", "no_proxy"]
    done = subprocess.run(submit, env=cluster.environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)
"""


@pytest.mark.slow
def test_a_cluster_takes_jobs_behind_a_dead_proxy() -> None:
    """A process's own cluster behind one is a test of test_local.py."""
    kept = {k: v for k, v in os.environ.items() if k.lower() not in VARIABLES and k != "RAY_ADDRESS"}
    dead = {"http_proxy": DEAD, "HTTPS_PROXY": DEAD, "all_proxy": DEAD, "grpc_proxy": DEAD}
    done = subprocess.run(
        [sys.executable, "-c", JOB], env=kept | dead, cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "localhost,127.0.0.1,::1" in done.stdout
