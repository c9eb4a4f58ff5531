"""All names that Ray keeps private and this project uses, as they are in Ray 2.60; no other file imports one.

Ray may rename them in any version: a new version is read and tested here before `pyproject.toml` allows it. A module
is imported inside a function if it is slow to import, or needs a package that not every installation has.
"""

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import Context
from dataclasses import dataclass
from typing import Any

from ray._private import ray_constants, services, worker
from ray._private.authentication.authentication_token_setup import (
    AuthenticationTokenLoader,
    enable_token_auth_by_default,
)
from ray._private.ray_logging import global_worker_stdstream_dispatcher
from ray._private.runtime_env import uv_runtime_env_hook

PRINT_HANDLER = "ray_print_logs"  # the handler that prints the workers' lines
# At "0", Ray's default on Windows and macOS, every process of a node listens on loopback alone, also the metrics
# agent, which asks nobody for a token. Such a cluster has one node.
SEVERAL_NODES = ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR
# Unless it is "0", a driver that `uv run` started sends its folder to the cluster, and `uv run` starts each worker in
# the copy.
WORKERS_BY_UV = "RAY_ENABLE_UV_RUN_RUNTIME_ENV"
ALL_ADDRESSES = "[::]"  # where a Serve replica opens its port for calls from other replicas


@contextmanager
def on_loopback() -> Iterator[None]:
    """In the block Ray starts or joins a node on loopback, and its workers have this process's own environment,
    however the process was started. After the block this process can join any cluster.

    If the user has set `WORKERS_BY_UV`, its value holds.
    """
    before = ray_constants.ENABLE_RAY_CLUSTER, ray_constants.RAY_ENABLE_UV_RUN_RUNTIME_ENV
    variable = os.environ.get(SEVERAL_NODES)
    ray_constants.ENABLE_RAY_CLUSTER, os.environ[SEVERAL_NODES] = False, "0"
    if WORKERS_BY_UV not in os.environ:
        ray_constants.RAY_ENABLE_UV_RUN_RUNTIME_ENV = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER, ray_constants.RAY_ENABLE_UV_RUN_RUNTIME_ENV = before
        if variable is None:
            del os.environ[SEVERAL_NODES]
        else:
            os.environ[SEVERAL_NODES] = variable


def starts_workers_by_uv() -> bool:
    """Whether Ray would start this process's workers by `uv run`, as this process was started."""
    return ray_constants.RAY_ENABLE_UV_RUN_RUNTIME_ENV and uv_runtime_env_hook._get_uv_run_cmdline() is not None


def cluster_addresses() -> list[str]:
    """The addresses of all Ray clusters that run on this machine, other users' too."""
    services.find_gcs_addresses.cache_clear()
    return sorted(services.find_gcs_addresses())


def make_token() -> None:
    """Makes the token of a cluster before its start, as `ray.init` does for its own cluster."""
    notice = logging.getLogger(enable_token_auth_by_default.__module__)
    level = notice.level
    notice.setLevel(logging.ERROR)  # the notice tells of the token, which nobody here must give
    enable_token_auth_by_default()
    notice.setLevel(level)


def forget_token() -> None:
    """Read the token anew, from where the environment says."""
    AuthenticationTokenLoader.instance().reset_cache()


def handle_worker_lines(handle: Callable[[dict[str, Any]], None]) -> None:
    """Give the workers' lines to `handle` instead of printing them."""
    global_worker_stdstream_dispatcher.remove_handler(PRINT_HANDLER)
    global_worker_stdstream_dispatcher.add_handler(PRINT_HANDLER, handle)


def dashboard_address() -> str | None:
    """`host:port` of the connected cluster's dashboard."""
    return worker.get_dashboard_url()


@contextmanager
def task_error_messages() -> Iterator[Callable[[], None]]:
    """Yields a function that silences Ray's messages of failed tasks until the end of the block."""
    original = worker.print_to_stdstream

    def silence() -> None:
        worker.print_to_stdstream = lambda *_, **__: None

    try:
        yield silence
    finally:
        worker.print_to_stdstream = original


def open_replica_port_at(host: str) -> None:
    """The Serve replica of this process, when it starts, opens its port for calls from other replicas at `host` alone.

    Serve opens it on every interface, and takes pickled calls there from anybody, without Ray's token.
    """
    from ray.serve._private import replica

    add_port = replica.add_port_to_grpc_server
    replica.add_port_to_grpc_server = lambda server, address: add_port(server, address.replace(ALL_ADDRESSES, host))


@dataclass(frozen=True)
class AnsweringDeployment:
    """The deployment that answers a path, as Serve's HTTP proxy in this process knows it; without a name, no
    deployment answers."""

    name: str = ""
    router: Any = None

    @property
    def num_replicas(self) -> int:
        """Running replicas, without replicas that drain."""
        return 0 if self.router is None else len(self.router.curr_replicas)

    def waits(self, call: Context) -> bool:
        """Whether the proxy's call in this context has no replica yet. A replica that drains counts for its calls."""
        from ray.serve.context import _serve_request_context

        request = call.get(_serve_request_context)
        if request is None or not request._internal_request_id or self.router is None:
            return True
        return request._internal_request_id in self.router._pending_requests_by_id


def answering(proxy: Any, path: str) -> AnsweringDeployment | None:
    """The deployment that answers `path`; `None` from a proxy that knows no application yet.

    `proxy` is Serve's, of this process, or a middleware around it.
    """
    while not hasattr(proxy, "proxy_router"):
        proxy = proxy._app
    if not proxy.proxy_router.route_info:
        return None
    matched = proxy.proxy_router.match_route(path)
    if matched is None:
        return AnsweringDeployment()
    return AnsweringDeployment(matched[1].deployment_name, matched[1]._router._asyncio_router.request_router)


def llm_types() -> Any:
    """The module of Ray Serve LLM's requests and replies, which needs vLLM or SGLang."""
    from ray.llm._internal.serve.core.configs import openai_api_models

    return openai_api_models
