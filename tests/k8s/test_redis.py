"""The Redis of `k8s/components/redis`, started by its manifest's own command: its password is in no argument."""

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest
import yaml
from manifests import ROOT

from cluster.local import free_ports

PASSWORD = "0123456789abcdef" * 4
LIMIT = 60

pytestmark = pytest.mark.skipif(shutil.which("redis-server") is None, reason="there is no redis-server here")


def ask(port: int, *command: str, password: str) -> str:
    environment = {**os.environ, "REDISCLI_AUTH": password}
    done = subprocess.run(["redis-cli", "-p", str(port), *command], env=environment, capture_output=True, text=True)
    return done.stdout


def test_the_password_is_asked_for_and_stands_in_no_argument(tmp_path: Path) -> None:
    documents = yaml.safe_load_all((ROOT / "k8s" / "components" / "redis" / "redis.yaml").read_text())
    (stateful,) = [document for document in documents if document["kind"] == "StatefulSet"]
    (container,) = stateful["spec"]["template"]["spec"]["containers"]
    (port,) = free_ports(1)
    *shell, script = container["command"]
    script = script.replace("dir /data", f"dir {tmp_path}\nport {port}\nbind 127.0.0.1")
    server = subprocess.Popen([*shell, script], env={**os.environ, "REDIS_PASSWORD": PASSWORD}, stdout=subprocess.PIPE)
    try:
        deadline = time.monotonic() + LIMIT
        while "PONG" not in ask(port, "ping", password=PASSWORD):
            assert time.monotonic() < deadline and server.poll() is None
            time.sleep(0.1)
        assert "PONG" not in ask(port, "ping", password="wrong")
        assert PASSWORD.encode() not in Path(f"/proc/{server.pid}/cmdline").read_bytes()
        assert ask(port, "config", "get", "appendonly", password=PASSWORD).split() == ["appendonly", "yes"]
    finally:
        server.kill()
        server.wait()
