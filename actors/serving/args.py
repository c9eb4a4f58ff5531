"""The configuration of a serving application, for a local run, `serve deploy` and Kubernetes alike.

It is the `args` of the application in a Serve config file. docs/reference/options.md has a table of its fields.
"""

from collections.abc import Mapping
from dataclasses import asdict, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from cluster.topology import Topology
from mbd_core.fields import CLUSTER, MODEL, Flag, Ge, Gt, Le, configuration, load
from mbd_core.serving.api.parsing import MAX_PROMPTS, MOST_PROMPTS
from mbd_core.serving.server.open_requests import DRAIN_SECONDS
from mbd_core.serving.tokens.endpoint_args import EndpointArgs
from mbd_core.storage.models import FetchModel, check_url_weights, fetch_model


@configuration()
class Autoscaling:
    """The number of a model's replicas, by its load."""

    min: Annotated[int, Ge(0)] = 1
    """The fewest. With 0, the last replica ends when there are no requests, and the next request waits until a new
    replica has loaded the model."""
    max: Annotated[int, Ge(1)]
    """The most."""
    target_requests: Annotated[float, Gt(0)] = 16.0
    """Open requests per replica, on average; above it replicas are added."""
    target_kv_load: Annotated[float | None, Gt(0)] = None
    """Fraction of a replica's KV memory that its running and waiting requests need, on average; above it replicas are
    added too (default: only requests count)."""
    window_seconds: Annotated[float, Gt(0)] = 30.0
    """Time over which the load is averaged."""
    up_seconds: Annotated[float, Ge(0)] = 15.0
    """Duration of a high load before replicas are added."""
    down_seconds: Annotated[float, Ge(0)] = 300.0
    """Duration of a low load before replicas are removed."""

    def __post_init__(self) -> None:
        if self.min > self.max:
            raise ValueError(f"min={self.min} exceeds max={self.max}")


class LiveContent:
    """Settings that a running deployment adopts: Serve's `user_config`."""

    @classmethod
    def read(cls, values: Any) -> Self:
        """Reads the content; raises `ValueError`, in one sentence, if `values` has another form."""
        return load(cls, values, path="user_config.")

    def values(self) -> dict[str, Any]:
        """The content as a dictionary for Serve."""
        return asdict(self)  # type: ignore[call-overload]  # a dataclass in each case


@configuration()
class EngineContent(LiveContent):
    """`weights` and `adapters` as in `ModelArgs`."""

    weights: str | None = None
    """As in `ModelArgs`."""
    adapters: dict[str, str] = field(default_factory=dict)
    """As in `ModelArgs`."""


@configuration()
class GatewayContent(LiveContent):
    """The names of the adapters, by model."""

    adapters: dict[str, list[str]] = field(default_factory=dict)
    """The names of each model's adapters."""


@configuration(panel=CLUSTER)
class ModelArgs(EndpointArgs):
    """One model and its engines.

    A change of a field replaces the replicas, with one exception: running replicas adopt `adapters` and `weights`
    between two steps if Serve's `user_config` of the model's deployment gives them.
    """

    replicas: Annotated[int, Ge(1)] | Autoscaling = 1
    """Engines in parallel, each with its own copy of the model."""
    routing: Literal["prefix", "load"] = "prefix"
    """The choice of a request's replica. prefix: the replica that has stored the longest prefix of its prompt, unless
    it is clearly busier than others; load: the less busy of two random replicas."""
    adapters: Annotated[dict[str, str], Flag(panel=MODEL, name=False, opened_by="workers")] = field(
        default_factory=dict
    )
    """LoRA adapters: their names for clients, each with its folder or storage URL."""
    weights: Annotated[str | None, Flag(panel=MODEL, name=False, opened_by="workers")] = None
    """A folder or storage URL of other weights of the same shapes, which replace the model's own."""

    def __post_init__(self) -> None:
        if len(self.adapters) > self.engine.max_adapters:
            raise ValueError(
                f"there are {len(self.adapters)} adapters, but engine.max_adapters is {self.engine.max_adapters}; "
                "raise it, or give fewer adapters"
            )

    @property
    def content(self) -> EngineContent:
        """The settings that running replicas adopt."""
        return EngineContent(weights=self.weights, adapters=self.adapters)

    def without_content(self) -> "ModelArgs":
        """The settings whose change replaces the replicas."""
        return replace(self, weights=None, adapters={})

    @property
    def most_replicas(self) -> int:
        return self.replicas if isinstance(self.replicas, int) else self.replicas.max

    @property
    def least_replicas(self) -> int:
        return self.replicas if isinstance(self.replicas, int) else self.replicas.min

    def checked(self, fetch: FetchModel = fetch_model) -> Self:
        """The checked settings with models on this machine: `fetch` gives the local name or path of each model."""
        check_url_weights([self.model], self.engine.url_weights)
        model = fetch(self.model, url_weights=self.engine.url_weights)
        engine = self.engine
        if engine.draft_model is not None:
            engine = replace(engine, draft_model=fetch(engine.draft_model))
        return super(ModelArgs, replace(self, model=model, name=self.served_name, engine=engine)).checked()


@configuration(panel=CLUSTER)
class GatewayArgs:
    """The processes that speak HTTP, and their limits for clients."""

    gateways: Annotated[int, Ge(1)] = 1
    """Processes that speak HTTP and hold the streams."""
    request_seconds: Annotated[float | None, Gt(0)] = 600.0
    """Time limit of a request including its wait and its stream; null in a file: no limit."""
    retry_seconds: Annotated[float, Ge(0)] = 120.0
    """How long a request looks for another replica after its own has died."""
    drain_seconds: Annotated[float, Ge(0)] = DRAIN_SECONDS
    """How long running requests may continue after the first Ctrl-C or SIGTERM; 0 cuts them at once."""
    api_keys: Annotated[Path | None, Flag(metavar="FILE", opened_by="each")] = None
    """Serve only clients with a key in this file. A line has a client's name and its key. Every machine with a gateway
    needs the file; a changed file is read again."""
    client_requests: Annotated[int | None, Ge(1)] = None
    """Open choices (n for each prompt) of a client at each gateway; needs --api-keys (default: any number)."""
    body_bytes: Annotated[int, Ge(1024)] = 4 * 2**20
    """The largest body of a request, in bytes; a larger body gets 413."""
    body_prompts: Annotated[int, Ge(1), Le(MOST_PROMPTS)] = MAX_PROMPTS
    """The most prompts of one body."""

    def __post_init__(self) -> None:
        if self.client_requests is not None and self.api_keys is None:
            raise ValueError(
                f"client_requests={self.client_requests} needs api_keys: without keys a client can give itself a new "
                "name each time"
            )


@configuration(panel=MODEL)
class ServingArgs(GatewayArgs):
    """The whole application: gateways before the engines of one or several models."""

    models: Annotated[list[ModelArgs], Flag(name=False)]
    """The models and their engines."""
    device: Annotated[Literal["cpu", "gpu"], Flag(panel=CLUSTER, name=False)]
    """The device of ranks; with gpu, each rank takes one GPU."""

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> "ServingArgs":
        """The arguments in the `args` of a Serve config file.

        Raises `ValueError` that names an unknown or refused field.
        """
        return load(cls, values)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.models:
            raise ValueError("models must name at least one model")
        names = [name for model in self.models for name in (model.served_name, *model.adapters)]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise ValueError(f"models: the name '{repeated[0]}' stands twice; give one of them another name")

    @property
    def content(self) -> GatewayContent:
        """The settings that running gateways adopt."""
        return GatewayContent(adapters={model.served_name: list(model.adapters) for model in self.models})

    def topology(self, model: ModelArgs) -> Topology:
        """The resources of the largest number of a model's replicas."""
        return Topology(
            processes=model.most_replicas,
            ranks=model.tensor_parallel,
            gpus_per_rank=int(self.device == "gpu"),
        )
