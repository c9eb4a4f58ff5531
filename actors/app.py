"""The serving application: gateways before the engines of one or several models.

`build` is what `serve deploy`, `jobs/serve.py` and the manifests of Kubernetes name.
"""

from ray import serve
from ray.serve.config import BackpressureConfig

from actors.engine_replica import engine_replicas
from actors.gateway import STOP_SECONDS, Gateway
from actors.serving_args import ServingArgs

GATEWAY_CPUS = 0.1  # it waits most of the time; what it asks for counts beside the engines' own CPUs


def build(args: ServingArgs) -> serve.Application:
    """The Serve application; `ValueError` for a model that is not whole, or that cannot be served as asked."""
    checked = [model.checked() for model in args.models]
    names = [one.name for one in checked]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ValueError(f"models: the name '{repeated[0]}' stands twice; give one of them another name")
    engines = [engine_replicas(args, model, one) for model, one in zip(args.models, checked, strict=True)]
    waiting = sum(model.max_waiting * model.most_replicas for model in args.models)
    return Gateway.options(  # type: ignore[attr-defined]  # Serve's decorators are not typed through
        num_replicas=args.gateways,
        max_ongoing_requests=max(1000, 2 * waiting),
        max_queued_requests=waiting,
        backpressure_config=BackpressureConfig(status_code=429, retry_after_s=1),
        max_constructor_retry_count=2,
        health_check_period_s=1,
        health_check_timeout_s=30,
        graceful_shutdown_timeout_s=args.drain_seconds + STOP_SECONDS,
        graceful_shutdown_wait_loop_s=0.5,
        ray_actor_options={"num_cpus": GATEWAY_CPUS},
    ).bind(args, checked, engines)
