"""What the tests of this room share: one Ray cluster, and Serve on it. Idle, they would cost others half a core."""

import functools
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="package")
def ray_cluster() -> Iterator[Any]:
    """The `ray` module, connected to a cluster of 8 logical CPUs with a dashboard, until the last test here ends."""
    import ray

    # Ray's socket paths must stay under 107 bytes, which pytest's own temporary folders do not leave room for.
    folder = tempfile.mkdtemp(prefix="rt-", dir="/tmp")
    try:
        start_test_cluster(folder)
        yield ray
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def start_test_cluster(folder: str) -> None:
    """Start Ray with a job agent at a port of its own."""
    from ray._private import parameter

    from cluster.local import free_ports

    # Every cluster of a machine has its job agent at one port, which `ray.init` has no option for: a second cluster
    # would take no jobs.
    defaults = parameter.RayParams
    parameter.RayParams = functools.partial(defaults, dashboard_agent_listen_port=free_ports(1)[0])
    try:
        start_or_end(folder)
    finally:
        parameter.RayParams = defaults


def start_or_end(folder: str) -> None:
    """A Ray that does not start ends the test run: one error, not one for each test."""
    import ray

    from cluster.local import free_ports, start_ray

    try:
        start_ray(
            num_cpus=8,
            num_gpus=0,
            include_dashboard=True,
            dashboard_host="127.0.0.1",
            dashboard_port=free_ports(1)[0],
            _temp_dir=folder,
            log_to_driver=False,
            logging_level="error",
            namespace="tests",
        )
    except RuntimeError as error:
        pytest.exit(f"the test run's Ray cluster did not start: {error}", returncode=1)
    # Where a submitted job looks first for its cluster; without it any other of the machine would do.
    Path(folder, "ray_current_cluster").write_text(ray.get_runtime_context().gcs_address)


@pytest.fixture(scope="package")
def dashboard_url(ray_cluster: Any) -> str:
    """Where jobs are submitted to: the cluster's dashboard, as `http://host:port`."""
    from ray._private.worker import get_dashboard_url

    return f"http://{get_dashboard_url()}"


@pytest.fixture(scope="package")
def serve_instance(ray_cluster: Any) -> Iterator[str]:
    """Ray Serve on a free local port; the base URL."""
    from ray import serve

    from cluster.local import free_ports

    (port,) = free_ports(1)
    serve.start(http_options={"host": "127.0.0.1", "port": port}, proxy_location="HeadOnly")
    yield f"http://127.0.0.1:{port}"
    serve.shutdown()
