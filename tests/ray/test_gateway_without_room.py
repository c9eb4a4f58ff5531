"""`serve deploy` on a cluster of two CPUs that another job holds: the endpoint says so until there is room.

A gateway that must make room keeps the requests that it has.
"""

import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from serve_deploy import APPLICATION, application_state, serve_deploy

from actors.serving.proxy import CALLBACK, CALLBACK_VARIABLE
from cluster.local import LOOPBACK, ROOT, LocalCluster, free_ports, local_cluster

pytestmark = pytest.mark.slow

SECONDS = 600.0
SOON = """
from actors.serving.proxy import middlewares, waiting

waiting.RESTART_SECONDS = 2.0
"""
SLOW_GATEWAY = """
import asyncio

from ray import serve


@serve.deployment(name="Gateway", graceful_shutdown_timeout_s=600)
class SlowGateway:
    async def __call__(self, request):
        await asyncio.sleep(20)
        return "answer"


application = SlowGateway.bind()
"""
HOLD = """
import ray, sys
ray.init(logging_level="error")
holder = ray.remote(num_cpus=2)(type("Holder", (), {"answer": lambda self: 1})).remote()
print(ray.get(holder.answer.remote()), flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv(CALLBACK_VARIABLE, CALLBACK)
        with local_cluster(num_cpus=2) as started:
            yield started


def deploy(cluster: LocalCluster, folder: Path, *, port: int, model: str) -> None:
    args = {"device": "cpu", "models": [{"model": model, "name": "m", "engine": {"max_rows": 2}}]}
    deploy_application(cluster, folder, port=port, import_path="actors.serving.app:build", args=args)


def deploy_application(cluster: LocalCluster, folder: Path, *, port: int, **fields: Any) -> None:
    application = {"name": APPLICATION, "route_prefix": "/", **fields}
    config = {"http_options": {"host": LOOPBACK, "port": port}, "applications": [application]}
    (folder / "serve.yaml").write_text(yaml.safe_dump(config))
    serve_deploy(cluster, folder / "serve.yaml", seconds=SECONDS)


def asked(port: int) -> httpx.Response | None:
    """The models, with the seconds that the answer took; nothing before the port is open."""
    try:
        return httpx.get(f"http://{LOOPBACK}:{port}/v1/models", timeout=SECONDS)
    except httpx.ConnectError:
        return None


def test_a_gateway_that_finds_no_room_is_missed_in_a_503_and_stands_once_there_is_room(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    (port,) = free_ports(1)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD],
        env=cluster.environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "1\n"
        deploy(cluster, tmp_path, port=port, model="tiny-mbd")
        messages = list[str]()
        deadline = time.monotonic() + SECONDS
        while not any('"CPU"' in message for message in messages) and time.monotonic() < deadline:
            if (answer := asked(port)) is None:
                time.sleep(1)
                continue
            assert answer.status_code == 503, answer.text
            error = answer.json()["error"]
            assert error["code"] == "no_gateway" and answer.headers["retry-after"] == "5"
            print(f"{answer.elapsed.total_seconds():.1f} s: {error['message']}", flush=True)
            messages.append(error["message"])
        assert '"CPU"' in messages[-1], messages
    finally:
        holder.communicate("", timeout=SECONDS)
    while (answer := asked(port)) is None or answer.status_code != 200:
        assert time.monotonic() < deadline, answer and answer.text
        time.sleep(1)
    assert [model["id"] for model in answer.json()["data"]] == ["m"]


def test_a_path_that_no_node_has_fails_the_deployment_in_a_sentence(cluster: LocalCluster, tmp_path: Path) -> None:
    deploy(cluster, tmp_path, port=free_ports(1)[0], model=str(tmp_path / "none"))
    deadline = time.monotonic() + SECONDS
    while (found := application_state(cluster, seconds=SECONDS)).get("status") != "DEPLOY_FAILED":
        assert time.monotonic() < deadline, found
        time.sleep(1)
    assert f"models[0].model {tmp_path}/none is on no node: give a URL" in found["message"]


def test_a_gateway_that_ends_keeps_its_requests_while_its_successor_finds_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "soon.py").write_text(SOON)
    (tmp_path / "slow_gateway.py").write_text(SLOW_GATEWAY)
    monkeypatch.setenv(CALLBACK_VARIABLE, "soon.middlewares")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (port,) = free_ports(1)
    with local_cluster(num_cpus=2) as cluster, ThreadPoolExecutor() as threads:

        def deploy_on(num_cpus: int) -> None:
            deployments = [{"name": "Gateway", "ray_actor_options": {"num_cpus": num_cpus}}]
            gateway = "slow_gateway:application"
            deploy_application(cluster, tmp_path, port=port, import_path=gateway, deployments=deployments)

        deploy_on(1)
        deadline = time.monotonic() + SECONDS
        while (found := application_state(cluster, seconds=SECONDS)).get("status") != "RUNNING":
            assert time.monotonic() < deadline, found
            time.sleep(1)
        while (first := asked(port)) is None or first.status_code != 200:
            assert time.monotonic() < deadline, first and first.text
            time.sleep(1)
        kept = threads.submit(asked, port)
        time.sleep(2)
        deploy_on(50)
        late = asked(port)
        while late is not None and late.status_code == 200:  # the old one stood yet
            assert time.monotonic() < deadline
            late = asked(port)
        assert late is not None and late.status_code == 503 and late.json()["error"]["code"] == "no_gateway"
        answer = kept.result()
        assert answer is not None and (answer.status_code, answer.text) == (200, "answer")
