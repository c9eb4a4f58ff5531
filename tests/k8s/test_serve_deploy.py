"""The config of the manifests on a real cluster: `serve deploy`, with the pods' environment, and a first answer."""

import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import yaml
from manifests import BASE_SERVE_FILE, environment, node_groups, render
from serve_deploy import application_state, serve_deploy

from actors.serving.serve import QUESTION
from cluster.local import LOOPBACK, LocalCluster, local_cluster

CONFIG = yaml.safe_load(BASE_SERVE_FILE.read_text())
PORT = CONFIG["http_options"]["port"]
SECONDS = 300


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    """A node with the environment that the manifest gives to the pods."""
    with socket.socket() as probe:
        if probe.connect_ex((LOOPBACK, PORT)) == 0:
            pytest.skip(f"something listens on the config's port {PORT} here")
    (service,) = [o for o in render("cpu-kind") if o["kind"] == "RayService"]
    *_, workers = node_groups(service)
    given = environment(workers.container)
    given["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"] = "0"  # the cluster of a test ends at once
    with pytest.MonkeyPatch.context() as patched:
        for name, value in given.items():
            patched.setenv(name, value)
        with local_cluster(num_cpus=int(workers.resources["CPU"])) as started:
            yield started


def application(cluster: LocalCluster) -> dict[str, Any]:
    """What Serve says of the application, once it runs."""
    deadline = time.monotonic() + SECONDS
    while True:
        state = application_state(cluster, seconds=60)
        if state.get("status") == "RUNNING":
            return state
        assert state.get("status") != "DEPLOY_FAILED" and time.monotonic() < deadline, json.dumps(state)[:2000]
        time.sleep(1)


@pytest.mark.slow
def test_serve_deploy_takes_the_file_and_the_endpoint_answers(cluster: LocalCluster) -> None:
    serve_deploy(cluster, BASE_SERVE_FILE, seconds=SECONDS)
    deployments = application(cluster)["deployments"].values()
    args = CONFIG["applications"][0]["args"]
    (model,) = args["models"]
    assert sorted(len(d["replicas"]) for d in deployments) == sorted([args["gateways"], model["replicas"]])
    reply = httpx.post(
        f"http://{LOOPBACK}:{PORT}/v1/chat/completions",
        json={"model": model["name"], "messages": [{"role": "user", "content": QUESTION}]},
        headers={"X-Request-ID": "a b" + "x" * 500},
        timeout=SECONDS,
    )
    assert reply.status_code == 200 and reply.json()["choices"][0]["message"]["content"]
    assert reply.headers["x-request-id"] == "a_b" + "x" * 97  # the pods' environment reached the proxy
