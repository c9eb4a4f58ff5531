"""What a serving application is made of: one configuration for a local run, `serve deploy` and Kubernetes.

It is the `args` of the application in a Serve config file. docs/reference/options.md has a table of its fields.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from cluster.topology import Topology
from mbd_core.fields import CLUSTER, MODEL, Flag, Ge, Gt, Le, configuration, load
from mbd_core.serving.api.access import DRAIN_SECONDS
from mbd_core.serving.api.parsing import MAX_PROMPTS, MOST_PROMPTS
from mbd_core.serving.tokens.endpoint_args import EndpointArgs
from mbd_core.storage.models import fetch_model


@configuration()
class Autoscaling:
    """How many replicas a model has, by its load."""

    min: Annotated[int, Ge(0)] = 1
    """The fewest; with 0 the last replica goes when nothing is asked for, and the next request waits until another one
    has loaded the model."""
    max: Annotated[int, Ge(1)]
    """The most."""
    target_requests: Annotated[float, Gt(0)] = 16.0
    """Requests under way that a replica has on average; above it replicas are added."""
    target_kv_load: Annotated[float | None, Gt(0)] = None
    """Share of a replica's KV memory that its requests hold on average, the prompts that wait included; above it
    replicas are added too (default: requests alone count)."""
    window_seconds: Annotated[float, Gt(0)] = 30.0
    """Over which the load is averaged."""
    up_seconds: Annotated[float, Ge(0)] = 15.0
    """How long the load lasts before replicas are added."""
    down_seconds: Annotated[float, Ge(0)] = 300.0
    """How long it is gone before they are removed."""

    def __post_init__(self) -> None:
        if self.min > self.max:
            raise ValueError(f"min={self.min} exceeds max={self.max}")


class LiveContent:
    """What a deployment that runs takes over: Serve's `user_config`."""

    @classmethod
    def read(cls, values: Any) -> Self:
        """Reads the content; raises `ValueError`, in one sentence, if `values` has another form."""
        return load(cls, values, path="user_config.")

    def values(self) -> dict[str, Any]:
        """As Serve hands it on."""
        return asdict(self)  # type: ignore[call-overload]  # a dataclass in each case


@configuration()
class EngineContent(LiveContent):
    """`weights` and `adapters` as in `ModelArgs`."""

    weights: str | None = None
    """As the model's."""
    adapters: dict[str, str] = field(default_factory=dict)
    """As the model's."""


@configuration()
class GatewayContent(LiveContent):
    """The names of the adapters, by model."""

    adapters: dict[str, list[str]] = field(default_factory=dict)
    """The names of each model's."""


@configuration(panel=CLUSTER)
class ModelArgs(EndpointArgs):
    """One model and its engines.

    A change of these replaces the replicas. Replicas that run take over `adapters` and `weights` between two steps
    where Serve's `user_config` of the model's deployment names them.
    """

    replicas: Annotated[int, Ge(1)] | Autoscaling = 1
    """Engines in parallel, each with its own copy of the model."""
    routing: Literal["prefix", "load"] = "prefix"
    """Which replica gets a request: by prefix, the one that has stored the longest part of its prompt, unless it is
    clearly busier than others; by load, the less busy one of two."""
    adapters: Annotated[dict[str, str], Flag(panel=MODEL, name=False, opened_by="workers")] = field(
        default_factory=dict
    )
    """LoRA adapters: the names that clients call them by, each with its folder or storage URL."""
    weights: Annotated[str | None, Flag(panel=MODEL, name=False, opened_by="workers")] = None
    """A folder or storage URL of other weights of the same shapes, to decode with instead of the model's."""

    def __post_init__(self) -> None:
        if len(self.adapters) > self.engine.max_adapters:
            raise ValueError(
                f"{len(self.adapters)} adapters need engine.max_adapters of at least that; it is "
                f"{self.engine.max_adapters}"
            )

    @property
    def content(self) -> EngineContent:
        """What replicas that run take over."""
        return EngineContent(weights=self.weights, adapters=self.adapters)

    def without_content(self) -> "ModelArgs":
        """What replicas must be replaced for, where it changes."""
        return replace(self, weights=None, adapters={})

    @property
    def most_replicas(self) -> int:
        return self.replicas if isinstance(self.replicas, int) else self.replicas.max

    @property
    def least_replicas(self) -> int:
        return self.replicas if isinstance(self.replicas, int) else self.replicas.min

    def checked(self, fetch: Callable[[str], str] = fetch_model) -> Self:
        """On this machine: `fetch` gives the local name or path of the model, which it fetches from a URL."""
        return super(ModelArgs, replace(self, model=fetch(self.model), name=self.served_name)).checked()


@configuration(panel=CLUSTER)
class GatewayArgs:
    """The processes that speak HTTP, and their limits for clients."""

    gateways: Annotated[int, Ge(1)] = 1
    """Processes that speak HTTP and hold the streams."""
    request_seconds: Annotated[float | None, Gt(0)] = 600.0
    """Time limit of a request, its wait and its stream included; null in a file: none."""
    retry_seconds: Annotated[float, Ge(0)] = 120.0
    """How long a request looks for another replica after its own has died."""
    drain_seconds: Annotated[float, Ge(0)] = DRAIN_SECONDS
    """How long requests under way may go on after the first Ctrl-C or SIGTERM; 0 cuts them at once."""
    api_keys: Annotated[Path | None, Flag(metavar="FILE", opened_by="each")] = None
    """Serve only clients with a key of this file, on every machine with a gateway: lines of a client's name and its
    key; read when it changes."""
    client_requests: Annotated[int | None, Ge(1)] = None
    """Choices, n for each prompt, that the client of a key of --api-keys may have under way at each gateway (default:
    any number)."""
    body_bytes: Annotated[int, Ge(1024)] = 4 * 2**20
    """The largest body of a request; more is 413."""
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
    """What ranks compute on; each rank on gpu takes one."""

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> "ServingArgs":
        """Of the `args` of a Serve config file; `ValueError` names an unknown or refused field."""
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
        """What gateways that run take over."""
        return GatewayContent(adapters={model.served_name: list(model.adapters) for model in self.models})

    def topology(self, model: ModelArgs) -> Topology:
        """What a model's replicas ask of the cluster, as many as there may be."""
        return Topology(
            processes=model.most_replicas,
            ranks=model.tensor_parallel,
            gpus_per_rank=int(self.device == "gpu"),
        )
