"""`serve deploy` on a test's own cluster, and what Serve says of the application."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx

from cluster.local import ROOT, TOKEN_PATH, LocalCluster

APPLICATION = "mbd"


def serve_deploy(cluster: LocalCluster, file: Path, *, seconds: float) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ray.serve.scripts", "deploy", file, "-a", cluster.dashboard_url],
        capture_output=True,
        text=True,
        env=cluster.environment,
        cwd=ROOT,
        timeout=seconds,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def application_state(cluster: LocalCluster, *, seconds: float) -> dict[str, Any]:
    """What Serve says of the application; nothing before it knows it."""
    token = Path(cluster.environment[TOKEN_PATH]).read_text()
    url, headers = f"{cluster.dashboard_url}/api/serve/applications/", {"Authorization": f"Bearer {token}"}
    applications: dict[str, Any] = httpx.get(url, headers=headers, timeout=seconds).json().get("applications", {})
    state: dict[str, Any] = applications.get(APPLICATION, {})
    return state
