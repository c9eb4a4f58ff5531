"""Serve an endpoint until a signal: connect to Ray, start Serve, wait, drain, and stop Serve and Ray."""

import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import ray
from ray import serve
from ray.exceptions import RayActorError, RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from actors.paths import JobPaths, known_paths, model_paths
from actors.serving.app import application
from actors.serving.args import GatewayArgs, ModelArgs, ServingArgs
from actors.serving.logs import LOGGING, SERVE_LOG
from actors.serving.proxy import CALLBACK, CALLBACK_VARIABLE
from actors.serving.proxy.waiting import NOTHING, STARTING, missing
from actors.serving.replica import GATEWAY_BUNDLE
from actors.serving.tracing import serve_variables
from cluster.local import connect, disconnect
from cluster.ray_private import dashboard_address, task_error_messages
from cluster.topology import Device, plan_topology
from mbd_core.stops import interrupt_on

APPLICATION = "mbd"
WANTS_SECONDS = 30.0  # between two lines that say why an application does not run yet
POLL_SECONDS = 0.5  # between two checks of a drain
REPLY_SECONDS = 10.0  # time for a gateway's answer, beyond the seconds of its drain
PASS_ON_SECONDS = 1.0  # time for the HTTP proxy to send the last output before Serve kills it
# The Kubernetes manifests have these values too. A dead proxy is replaced after 3 failed checks, sooner than with
# Serve's 10 s per check.
# A starting proxy gets 60 s; with Serve's 5 s, a busy machine would kill it again and again. The controller reads the
# variables at its start, so they apply only to a Ray that is started here.
PROXY_CHECKS = {
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "2",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
}
QUESTION = "Tom has 12 pens. Tom buys 3 bags with 4 pens each. Tom sells 5 pens. How many pens does Tom have now?"


def check_port(host: str, port: int) -> None:
    """Raise `ValueError` if this machine cannot listen on the port.

    An existing cluster is not checked, because its head node may be another machine.
    """
    if ray.is_initialized() or os.environ.get("RAY_ADDRESS"):
        return
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections that just ended do not count
            probe.bind((host, port))
    except OSError as error:
        raise ValueError(
            f"--port {port} on --host {host} cannot be listened on: {error.strerror}; give another"
        ) from None


def serve_until_stopped(model: ModelArgs, gateways: GatewayArgs, *, host: str, port: int) -> None:
    """Serve on the cluster of `RAY_ADDRESS`, or on a new local cluster, until SIGINT or SIGTERM.

    On a cluster with GPUs every rank gets a GPU, otherwise all run on CPUs. After the first signal running requests
    have `drain_seconds` to end; a second signal ends the wait. Everything that was started is stopped at the end.

    Raises `ValueError` for settings that the cluster or a replica refuses, and `RuntimeError` if Serve runs there
    already or the replicas fail; each is one sentence.
    """
    with task_error_messages() as silence, ExitStack() as stack:
        try:
            for name, value in {CALLBACK_VARIABLE: CALLBACK, **PROXY_CHECKS}.items():
                os.environ.setdefault(name, value)  # for the proxy and the controller of a Ray that is started here
            os.environ.update(serve_variables())  # for its replicas too
            with _ray_signals():
                if connect(num_cpus=max(4, model.most_replicas * model.tensor_parallel + 2), worker_logs=False):
                    stack.callback(disconnect)
            _check_no_serve()
            nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
            topology = plan_topology(nodes, processes=model.most_replicas, ranks=model.tensor_parallel)
            device: Device = "gpu" if topology.num_gpus else "cpu"
            args = ServingArgs(models=[model], device=device, **vars(gateways))
            name = model.checked().served_name
            stack.callback(serve.shutdown)
            # Serve's end kills its controller, and Ray prints that two of the controller's tasks failed.
            stack.callback(silence)
            _start_proxy(host, port)
            opened = model_paths("--model", model.model)
            opened += model_paths("--draft-model", model.engine.draft_model)
            paths = stack.enter_context(known_paths(opened, bundle=GATEWAY_BUNDLE))
            handle = _deploy(args, paths)
            try:
                for line in handle.describe.remote().result():
                    print(line, flush=True)
                url = f"http://{host}:{port}"
                print(f"serving {name} at {url}/v1", flush=True)
                print(curl_example(url, name, with_key=args.api_keys is not None), flush=True)
                signal.pause()
            except KeyboardInterrupt:
                if args.drain_seconds > 0:
                    interrupt_on(signal.SIGINT, signal.SIGTERM)
                    _drain(handle, seconds=args.drain_seconds)
        except KeyboardInterrupt:
            pass
        except (RayError, RayServeException) as error:  # a process of Serve has died meanwhile
            raise RuntimeError(f"Serve could not serve {model.model}: {_last_line(str(error))}") from error
        print("stopping", flush=True)


def curl_example(url: str, name: str, *, with_key: bool) -> str:
    """A curl command that asks the endpoint, with a placeholder for the key if the server has keys."""
    body = f'{{"model": "{name}", "messages": [{{"role": "user", "content": "{QUESTION}"}}]}}'
    key = " -H 'Authorization: Bearer YOUR_KEY'" if with_key else ""
    return f"curl {url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d '{body}'"


@contextmanager
def _ray_signals() -> Iterator[None]:
    """SIGINT and SIGTERM raise `KeyboardInterrupt`, even while Ray starts and `ray.init` has set another handler."""
    interrupt_on(signal.SIGINT, signal.SIGTERM)
    try:
        yield
    except SystemExit as error:
        raise KeyboardInterrupt from error
    interrupt_on(signal.SIGINT, signal.SIGTERM)


def _start_proxy(host: str, port: int) -> None:
    """Starts Serve with its HTTP proxy; raises `RuntimeError`, one sentence, if the proxy does not come up."""
    # Serve starts itself twice, and logs at the second time that the options "will not be applied", although the first
    # time applied them.
    logging.getLogger(SERVE_LOG).setLevel(logging.WARNING)
    try:
        serve.start(http_options={"host": host, "port": port}, proxy_location="HeadOnly", logging_config=LOGGING)
    except RayActorError:  # Serve's controller has killed it
        raise RuntimeError(
            f"Serve's HTTP proxy did not start on {host}:{port}; the machine may be too busy, or the port is taken on "
            "the cluster's head node; try again"
        ) from None
    except TimeoutError as error:
        raise RuntimeError(
            f"Serve's HTTP proxy was not ready on {host}:{port} in time ({error}); the machine may be too busy; "
            "try again"
        ) from None


def _check_no_serve() -> None:
    try:
        ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve")
    except ValueError:
        return
    dashboard = f"http://{dashboard_address()}"
    raise RuntimeError(
        "Serve already runs on this cluster, and its address cannot be changed; end it with "
        f"`serve shutdown -y --address {dashboard}`"
    )


def _deploy(args: ServingArgs, paths: JobPaths) -> DeploymentHandle:
    """Start the gateways and the replicas. Returns a handle to the gateways."""
    try:
        with _saying_what_it_waits_for():
            return serve.run(application(args, paths), name=APPLICATION, route_prefix="/", logging_config=LOGGING)
    except RuntimeError as error:
        raise start_failure(_status_message(APPLICATION) or str(error)) from error


@contextmanager
def _saying_what_it_waits_for() -> Iterator[None]:
    """While the block takes long, lines on stderr say what keeps the application from running."""
    end = threading.Event()

    def say() -> None:
        while not end.wait(WANTS_SECONDS):
            if (want := missing()) not in (STARTING, NOTHING) and not end.is_set():  # else it is on its way
                print(f"waiting: {want}", file=sys.stderr, flush=True)

    thread = threading.Thread(target=say, daemon=True)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join(REPLY_SECONDS)


def _drain(handle: DeploymentHandle, *, seconds: float) -> None:
    """Let every gateway refuse new requests, and wait at most `seconds` for running requests.

    `serve.shutdown` does not wait: it kills the HTTP proxy, and with it every connection, before the replicas end.
    """
    deadline = time.monotonic() + seconds
    count = num_left = _drain_gateways(handle, seconds=0)
    if count == 0:
        return
    noun = "request" if count == 1 else "requests"
    print(f"draining {count} {noun}, at most {seconds:g} s; a second signal stops at once", flush=True)
    while num_left and (remaining := deadline - time.monotonic()) > 0:
        num_left = _drain_gateways(handle, seconds=min(POLL_SECONDS, remaining))
    if num_left:
        print(f"cutting {num_left} of them, which did not end in {seconds:g} s", flush=True)
    time.sleep(PASS_ON_SECONDS)


def _drain_gateways(handle: DeploymentHandle, *, seconds: float) -> int:
    """Drain every gateway for `seconds` more. Returns the number of open requests.

    An ended gateway counts as no request, a gateway that does not answer in time as one open request.
    """
    try:
        answers = handle.broadcast("drain", seconds).results(timeout_s=seconds + REPLY_SECONDS, return_exceptions=True)
    except RayServeException:  # no gateway is left
        return 0
    except TimeoutError as error:
        answers = [error]
    return sum(answer if isinstance(answer, int) else isinstance(answer, TimeoutError) for answer in answers)


def start_failure(message: str) -> Exception:
    """A replica's traceback as one sentence, its last line.

    A `ValueError` there is bad input that only a replica can detect, as on its GPU or its copy of the model.
    """
    reason = _last_line(message)
    if reason.startswith("ValueError: "):
        return ValueError(reason.removeprefix("ValueError: "))
    return RuntimeError(reason)


def _last_line(text: str) -> str:
    return text.strip().splitlines()[-1].strip() if text.strip() else "it gave no reason"


def _status_message(name: str) -> str:
    """Serve's report on why an application's replicas could not start: a traceback, or an empty text."""
    application = serve.status().applications.get(name)
    if application is None:
        return ""
    return "\n".join(d.message for d in application.deployments.values()).strip()
