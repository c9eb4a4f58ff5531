"""Serve a model over OpenAI's HTTP API: `python jobs/serve.py --model tiny-mbd`, until Ctrl-C or SIGTERM."""

import argparse
import signal
import sys

import ray
from ray import serve

from actors.endpoint import EndpointArgs, build
from cluster.local import connect
from mbd_core.decoding.config import decoding_config
from mbd_core.models.loader import load_config, load_generation_defaults
from mbd_core.recipes import model_folder


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    defaults = EndpointArgs(folder="", name="")
    parser.add_argument("--model", required=True, help="a shipped model's name, or a model folder")
    parser.add_argument("--name", help="what clients call it (default: the folder's name)")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--max-rows", type=int, default=defaults.max_rows, help="sequences decoded at once")
    parser.add_argument("--buffer-size", type=int, default=defaults.buffer_size, help="most slots a request may ask")
    parser.add_argument("--num-pages", type=int, default=defaults.num_pages, help="pages of KV memory a replica")
    parser.add_argument("--max-waiting", type=int, default=defaults.max_waiting, help="more waiting requests get 429")
    parser.add_argument("--threads", type=int, default=defaults.num_threads, help="torch threads a replica")
    args = parser.parse_args(argv)
    for name in ("replicas", "max_rows", "buffer_size", "num_pages", "max_waiting", "threads"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    return args


def endpoint_args(args: argparse.Namespace) -> EndpointArgs:
    """The replica's arguments; `ValueError` for an unknown model, or one whose own defaults cannot be served."""
    folder = model_folder(args.model).resolve()
    default = decoding_config(load_generation_defaults(folder), {}, block_size=load_config(folder).block_size)
    if default.buffer_size > args.buffer_size:
        raise ValueError(
            f"{folder.name} decodes with buffer_size={default.buffer_size} unless a request says otherwise; "
            f"--buffer-size {args.buffer_size} must be at least that"
        )
    return EndpointArgs(
        folder=str(folder),
        name=args.name or folder.name,
        max_rows=args.max_rows,
        buffer_size=args.buffer_size,
        num_pages=args.num_pages,
        max_waiting=args.max_waiting,
        num_threads=args.threads,
    )


def serve_forever(made: EndpointArgs, *, host: str, port: int, replicas: int) -> None:
    """Start the endpoint on the cluster of `RAY_ADDRESS`, or on a Ray of its own; stop what was started at the end."""
    connect(num_cpus=max(4, replicas + 2), worker_logs=False)
    try:
        ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve")
    except ValueError:
        pass  # as it should be
    else:
        raise RuntimeError("Serve already runs on this cluster, and its address cannot be changed; stop it first")
    for number in (signal.SIGINT, signal.SIGTERM):  # after ray.init, which sets its own
        signal.signal(number, signal.default_int_handler)
    try:
        serve.start(http_options={"host": host, "port": port}, proxy_location="HeadOnly")
        serve.run(build(made, replicas=replicas), name=made.name, route_prefix="/")
        url = f"http://{host}:{port}"
        print(f"serving {made.name} at {url}/v1", flush=True)
        body = f'{{"model": "{made.name}", "messages": [{{"role": "user", "content": "2 + 3?"}}]}}'
        print(f"curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'", flush=True)
        signal.pause()
    except KeyboardInterrupt:
        print("stopping", flush=True)
    finally:
        serve.shutdown()
        ray.shutdown()


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    try:
        made = endpoint_args(args)
    except ValueError as error:
        print(f"serve: {error}", file=sys.stderr)
        return 2
    try:
        serve_forever(made, host=args.host, port=args.port, replicas=args.replicas)
    except RuntimeError as error:
        # Ray puts the remote traceback into the message; its last line says what was wrong.
        print(f"serve: {str(error).strip().splitlines()[-1]}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
