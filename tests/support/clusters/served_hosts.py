"""The application of the Kubernetes manifests on a cluster of hosts, and what its clients see."""

import json
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from typing import Any, NamedTuple

import httpx
import yaml
from host_cluster import PATIENCE, ROOT, Host, HostCluster, wait_for

# What Ray calls our actors.
SERVED_ENGINE, GATEWAY = "ServeReplica:mbd:tiny-mbd", "ServeReplica:mbd:Gateway"


def say(event: str, *, since: float) -> None:
    print(f"{time.monotonic() - since:6.1f} s  {event}", flush=True)


class Client:
    """Requests to the served model through a host's proxy."""

    def __init__(self, host: Host) -> None:
        self.url = f"http://{host.address}:8000"

    def engines(self) -> dict[str, int]:
        """The ids of the engines that are ready, each with the number of requests that it decodes."""
        with suppress(httpx.TransportError):
            health = httpx.get(f"{self.url}/health", timeout=PATIENCE)
            if health.status_code == 200:
                replicas = health.json()["models"][0]["replicas"]
                return {replica["replica"]: replica["running"] for replica in replicas if replica["ready"]}
        return {}

    def whole(self, cups: int) -> str:
        """The answer of one reply."""
        reply = httpx.post(f"{self.url}/v1/chat/completions", json=question(cups), timeout=PATIENCE)
        assert reply.status_code == 200, reply.text
        return reply.json()["choices"][0]["message"]["content"]

    def streamed(self, cups: int) -> "Streamed":
        """The answer of one stream, which ends as a whole one does."""
        text, times, ended = "", [], False
        body = question(cups) | {"stream": True}
        with httpx.stream("POST", f"{self.url}/v1/chat/completions", json=body, timeout=PATIENCE) as reply:
            assert reply.status_code == 200, reply.read()
            for event in (line.removeprefix("data: ") for line in reply.iter_lines() if line):
                assert not ended, f"{event} came after the end"
                ended = event == "[DONE]"
                content = "" if ended else json.loads(event)["choices"][0]["delta"].get("content")
                if content:
                    text += content
                    times.append(time.monotonic())
        assert ended, f"the stream was cut after {text!r}"
        return Streamed(text, max((later - sooner for sooner, later in pairwise(times)), default=0.0))


class Streamed(NamedTuple):
    text: str
    longest_pause: float


def question(cups: int) -> dict[str, Any]:
    """A greedy request that takes a forward a token. Decoded block by block, what goes on elsewhere stays the same."""
    content = f"Mia has {cups} cups. Mia gives away 2 cups. How many cups does Mia have now?"
    decoding = {"buffer_size": 1, "tau_m2t": 1.0}
    return {"model": "tiny-mbd", "messages": [{"role": "user", "content": content}], "decoding": decoding}


@contextmanager
def deployed(cluster: HostCluster, *, through: Host, model: str = "tiny-mbd") -> Iterator[Client]:
    """The application by `serve deploy`, once both engines are ready; its client asks the proxy of `through`.

    `model` is the name or URL of what is served as tiny-mbd.
    """

    def serve(*arguments: str) -> None:
        result = subprocess.run(
            ["serve", *arguments], env=cluster.client_environment, capture_output=True, text=True, timeout=PATIENCE
        )
        assert result.returncode == 0, result.stdout + result.stderr

    config = yaml.safe_load((ROOT / "k8s" / "base" / "serve.yaml").read_text())
    config["applications"][0]["args"]["models"][0]["model"] = model
    file = cluster.folder / "serve.yaml"
    file.write_text(yaml.safe_dump(config))
    client, start = Client(through), time.monotonic()
    serve("deploy", str(file))
    try:
        wait_for(lambda: len(client.engines()) == 2, "two engines")
        say("two engines are ready", since=start)
        yield client
    finally:
        serve("shutdown", "-y")
