"""Serve a model over OpenAI's HTTP API: `python jobs/serve.py --model tiny-mbd`, until Ctrl-C or SIGTERM.

Exit codes: 0 stopped, 1 it could not be served, 2 bad input (also a checkpoint that is not
whole, or a port that is taken), in one sentence.
"""

import argparse
import os
import signal
import socket
import sys
from contextlib import ExitStack
from pathlib import Path

import ray
from ray import serve

from actors.endpoint import EndpointArgs, build
from cluster.local import connect
from cluster.placement import ClusterTooSmall, gpus_each
from cluster.signals import interrupt_on
from mbd_core.checkpoint.folder import read_folder
from mbd_core.checkpoint.shipped import model_folder
from mbd_core.decoding.decoding_config import decoding_config
from mbd_core.engine.engine import EngineConfig
from mbd_core.ops.attention import KERNELS

QUESTION = "Tom has 12 pens. Tom buys 3 bags with 4 pens each. Tom sells 5 pens. How many pens does Tom have now?"


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    defaults = EndpointArgs(folder="", name="")
    engine = defaults.engine
    parser.add_argument("--model", required=True, help="a shipped model's name, or a model folder")
    parser.add_argument("--name", help="what clients call it (default: the folder's name)")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument(
        "--tensor-parallel",
        type=int,
        default=defaults.tensor_parallel,
        metavar="N",
        help="cut the model among N GPUs of a replica's node, or N processes without GPUs (default: 1)",
    )
    parser.add_argument("--max-rows", type=int, default=engine.max_rows, help="sequences decoded at once")
    parser.add_argument("--buffer-size", type=int, default=engine.buffer_size, help="most slots a request may ask")
    parser.add_argument("--num-pages", type=int, default=engine.num_pages, help="pages of KV memory a replica")
    parser.add_argument("--max-waiting", type=int, default=defaults.max_waiting, help="more waiting requests get 429")
    parser.add_argument(
        "--prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=engine.prefix_caching,
        help="keep stored blocks for requests that begin alike (default: yes)",
    )
    parser.add_argument(
        "--batch-invariant",
        action="store_true",
        help="compute every request by itself: slower, its numbers are the same whatever runs beside it",
    )
    parser.add_argument(
        "--attention", choices=[*KERNELS, "reference"], help="the attention kernel (default: the best there is)"
    )
    parser.add_argument("--block-size", type=int, help="for a model that was trained without blocks (LLaDA, Dream)")
    parser.add_argument(
        "--fp8", choices=["experts", "all"], help="round weights to FP8: the experts', or those of all layers"
    )
    parser.add_argument("--trace", type=Path, metavar="DIR", help="write step traces, a folder a replica in DIR")
    parser.add_argument("--threads", type=int, default=defaults.num_threads, help="torch threads a replica")
    args = parser.parse_args(argv)
    sizes = ("max_rows", "buffer_size", "num_pages", "block_size", "max_waiting", "threads")
    for name in ("replicas", "tensor_parallel", *sizes):
        value = getattr(args, name)
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} {value} must be at least 1")
    if not 1 <= args.port <= 65535:
        parser.error(f"--port {args.port} must be from 1 to 65535")
    return args


def endpoint_args(args: argparse.Namespace) -> EndpointArgs:
    """The replica's arguments; `ValueError` for an unknown or damaged model, or one whose own defaults cannot be
    served."""
    folder = model_folder(args.model).resolve()
    found = read_folder(folder)
    defaults, block_size = found.defaults, found.config.block_size
    if args.block_size is not None and found.config.attention == "full":
        defaults, block_size = {**defaults, "block_size": args.block_size}, args.block_size
    elif args.block_size not in (None, block_size):
        raise ValueError(f"--block-size {args.block_size} cannot be honoured: {folder.name} has {block_size}")
    default = decoding_config(defaults, {}, block_size=block_size)
    if default.buffer_size > args.buffer_size:
        raise ValueError(
            f"{folder.name} decodes with buffer_size={default.buffer_size} unless a request says otherwise; "
            f"--buffer-size {args.buffer_size} must be at least that"
        )
    if args.fp8 == "experts" and found.config.moe is None:
        raise ValueError(
            f"--fp8 experts cannot be honoured: {folder.name} has no experts; --fp8 all rounds its layers"
        )
    try:
        found.config.sharded(args.tensor_parallel)
    except ValueError as error:
        raise ValueError(f"--tensor-parallel {args.tensor_parallel} cannot be honoured: {error}") from None
    if args.trace is not None and args.trace.exists() and not args.trace.is_dir():
        raise ValueError(f"--trace {args.trace} is a file, not a folder")
    return EndpointArgs(
        folder=str(folder),
        name=args.name or folder.name,
        engine=EngineConfig(
            max_rows=args.max_rows,
            buffer_size=args.buffer_size,
            block_size=args.block_size,
            num_pages=args.num_pages,
            prefix_caching=args.prefix_caching,
            batch_invariant=args.batch_invariant,
            attention=args.attention,
        ),
        max_waiting=args.max_waiting,
        num_threads=args.threads,
        fp8=args.fp8,
        tensor_parallel=args.tensor_parallel,
        trace=None if args.trace is None else str(args.trace.resolve()),
    )


def check_port(host: str, port: int) -> None:
    """Raise `ValueError` where a Ray of this machine could not listen there; another's head node is not asked."""
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


def serve_forever(made: EndpointArgs, *, host: str, port: int, replicas: int) -> None:
    """Start the endpoint on the cluster of `RAY_ADDRESS`, or on a Ray of its own; stop what was started at the end.

    Every replica gets a GPU a rank on a cluster that has GPUs; else all run on CPUs (`gpus_each`).
    """
    with ExitStack() as started:
        try:
            interrupt_on(signal.SIGINT, signal.SIGTERM)
            try:
                if connect(num_cpus=max(4, replicas * made.tensor_parallel + 2), worker_logs=False):
                    started.callback(ray.shutdown)
            except SystemExit as error:  # what SIGTERM becomes inside ray.init
                raise KeyboardInterrupt from error
            interrupt_on(signal.SIGINT, signal.SIGTERM)  # ray.init has set its own
            try:
                ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve")
            except ValueError:
                pass  # as it should be
            else:
                raise RuntimeError(
                    "Serve already runs on this cluster, and its address cannot be changed; stop it first"
                )
            nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
            num_gpus = gpus_each(nodes, processes=replicas, ranks=made.tensor_parallel)
            started.callback(serve.shutdown)
            serve.start(http_options={"host": host, "port": port}, proxy_location="HeadOnly")
            try:
                handle = serve.run(build(made, replicas=replicas, num_gpus=num_gpus), name=made.name, route_prefix="/")
            except RuntimeError as error:
                raise RuntimeError(_reason(made.name) or str(error)) from error
            print(handle.describe.remote().result(), flush=True)
            url = f"http://{host}:{port}"
            print(f"serving {made.name} at {url}/v1", flush=True)
            body = f'{{"model": "{made.name}", "messages": [{{"role": "user", "content": "{QUESTION}"}}]}}'
            print(f"curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'", flush=True)
            signal.pause()
        except KeyboardInterrupt:
            print("stopping", flush=True)


def _reason(name: str) -> str:
    """What Serve knows of why an application's replicas could not start: a traceback, or nothing."""
    application = serve.status().applications.get(name)
    if application is None:
        return ""
    return "\n".join(d.message for d in application.deployments.values()).strip()


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    try:
        made = endpoint_args(args)
        check_port(args.host, args.port)
    except ValueError as error:
        print(f"serve: {error}", file=sys.stderr)
        return 2
    try:
        serve_forever(made, host=args.host, port=args.port, replicas=args.replicas)
    except ClusterTooSmall as error:
        print(f"serve: {error}", file=sys.stderr)
        return 2
    except RuntimeError as error:
        # The message may be a remote traceback; its last line says what was wrong.
        reason = str(error).strip().splitlines()[-1]
        refused = reason.startswith("ValueError: ")  # what only a replica can find out: its GPU, its copy of the model
        print(f"serve: {reason.removeprefix('ValueError: ')}", file=sys.stderr)
        return 2 if refused else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
