"""`serve deploy` on a cluster of two CPUs that another job holds: the endpoint says so until there is room."""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml
from serve_deploy import APPLICATION, application_state, serve_deploy

from actors.serving.proxy import CALLBACK, CALLBACK_VARIABLE
from cluster.local import LOOPBACK, ROOT, LocalCluster, free_ports, local_cluster

pytestmark = pytest.mark.slow

SECONDS = 600.0
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
    application = {
        "name": APPLICATION,
        "route_prefix": "/",
        "import_path": "actors.serving.app:build",
        "args": {"device": "cpu", "models": [{"model": model, "name": "m", "engine": {"max_rows": 2}}]},
    }
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
