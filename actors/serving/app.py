"""The serving application: gateways before the engines of one or several models.

`serve deploy` and the manifests of Kubernetes name `build`.
"""

from dataclasses import replace
from typing import Any

import ray
from ray import serve
from ray.serve.config import BackpressureConfig

from actors.paths import NO_PATHS, JobPaths, OpenedPath, check_everywhere
from actors.serving.args import ServingArgs
from actors.serving.gateway import Gateway
from actors.serving.replica import GATEWAY_BUNDLE, GATEWAY_CPUS, STOP_SECONDS, engine_replicas


def build(args: dict[str, Any]) -> serve.Application:
    """The Serve application of the `args` in a Serve config file.

    Serve calls it in a process that ends before the application starts, on a node of the cluster. Raises `ValueError`
    for a forbidden field, and for a path that some node lacks.
    """
    serving = ServingArgs.read(args)
    if ray.is_initialized():
        keys = [] if serving.api_keys is None else [OpenedPath("api_keys", str(serving.api_keys))]
        check_everywhere(model_paths_of(serving), keys, bundle=GATEWAY_BUNDLE)
    return application(serving)


def model_paths_of(args: ServingArgs) -> list[OpenedPath]:
    """Every path and URL of a model, its draft model, its adapters and its other weights, by its place in `args`."""
    paths = []
    for number, model in enumerate(args.models):
        place = f"models[{number}]"
        paths.append(OpenedPath(f"{place}.model", model.model))
        if (draft := model.engine.draft_model) is not None:
            paths.append(OpenedPath(f"{place}.engine.draft_model", draft))
        paths += [OpenedPath(f"{place}.adapters.{name}", path) for name, path in model.adapters.items()]
        paths += [] if model.weights is None else [OpenedPath(f"{place}.weights", model.weights)]
    return paths


def application(args: ServingArgs, paths: JobPaths = NO_PATHS) -> serve.Application:
    """The Serve application. The models' folders are read by the replicas and gateways, not here; `paths` say where
    each node finds the folders."""
    fixed_args = replace(args, models=[model.without_content() for model in args.models])
    engines = [engine_replicas(args, model, paths) for model in args.models]
    # Requests wait for an engine inside a gateway, where `max_waiting` bounds their number. Serve's own limits are
    # larger, so a request waits before a gateway only to be handed over.
    most = max(1000, 2 * sum(model.max_waiting * model.most_replicas for model in args.models))
    return Gateway.options(  # type: ignore[attr-defined]  # Serve's decorators are not typed through
        num_replicas=args.gateways,
        max_ongoing_requests=most,
        max_queued_requests=most,
        backpressure_config=BackpressureConfig(status_code=429, retry_after_s=1),
        max_constructor_retry_count=2,
        health_check_period_s=1,
        health_check_timeout_s=30,
        graceful_shutdown_timeout_s=args.drain_seconds + STOP_SECONDS,
        graceful_shutdown_wait_loop_s=0.5,
        ray_actor_options={"num_cpus": GATEWAY_CPUS},
        user_config=args.content.values(),
    ).bind(fixed_args, engines, paths)
