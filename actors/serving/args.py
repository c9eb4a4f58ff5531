"""What a serving application is made of: one configuration for a local run, `serve deploy` and Kubernetes.

It is the `args` of the application in a Serve config file. docs/reference/options.md has a table of its fields.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from cluster.topology import Topology
from mbd_core.options import CLUSTER, MODEL, Option, check, read
from mbd_core.serving.api.access import DRAIN_SECONDS
from mbd_core.serving.api.parsing import MAX_PROMPTS, MOST_PROMPTS
from mbd_core.serving.tokens.endpoint_args import EndpointArgs
from mbd_core.storage.models import fetch_model


@dataclass(frozen=True, kw_only=True)
class Autoscaling:
    """How many replicas a model has, by its load."""

    min: Annotated[
        int,
        Option(
            "The fewest; with 0 the last replica goes when nothing is asked for, and the next request waits until "
            "another one has loaded the model.",
            at_least=0,
        ),
    ] = 1
    max: Annotated[int, Option("The most.", at_least=1)]
    target_requests: Annotated[
        float,
        Option("Requests under way that a replica has on average; above it replicas are added.", above=0),
    ] = 16.0
    target_kv_load: Annotated[
        float | None,
        Option(
            "Share of a replica's KV memory that its requests hold on average, the prompts that wait included; above "
            "it replicas are added too (default: requests alone count).",
            above=0,
        ),
    ] = None
    window_seconds: Annotated[float, Option("Over which the load is averaged.", above=0)] = 30.0
    up_seconds: Annotated[float, Option("How long the load lasts before replicas are added.", at_least=0)] = 15.0
    down_seconds: Annotated[float, Option("How long it is gone before they are removed.", at_least=0)] = 300.0

    def __post_init__(self) -> None:
        check(self)
        if self.min > self.max:
            raise ValueError(f"min={self.min} exceeds max={self.max}")


class LiveContent:
    """What a deployment that runs takes over: Serve's `user_config`."""

    @classmethod
    def read(cls, values: Any) -> Self:
        """Raises `ValueError`, one sentence, for what is no such content."""
        return read(cls, values, path="user_config.")

    def values(self) -> dict[str, Any]:
        """As Serve hands it on."""
        return asdict(self)  # type: ignore[call-overload]  # a dataclass in each case


@dataclass(frozen=True, kw_only=True)
class EngineContent(LiveContent):
    """`weights` and `adapters` as in `ModelArgs`."""

    weights: Annotated[str | None, Option("As the model's.")] = None
    adapters: Annotated[dict[str, str], Option("As the model's.")] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, kw_only=True)
class GatewayContent(LiveContent):
    """The names of the adapters, by model."""

    adapters: Annotated[dict[str, list[str]], Option("The names of each model's.")] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, kw_only=True)
class ModelArgs(EndpointArgs):
    """One model and its engines.

    A change of these replaces the replicas. Replicas that run take over `adapters` and `weights` between two steps
    where Serve's `user_config` of the model's deployment names them.
    """

    replicas: Annotated[
        int | Autoscaling, Option("Engines in parallel, each with its own copy of the model.", CLUSTER, at_least=1)
    ] = 1
    routing: Annotated[
        Literal["prefix", "load"],
        Option(
            "Which replica gets a request: by prefix, the one that has stored the longest part of its prompt, unless "
            "it is clearly busier than others; by load, the less busy one of two.",
            CLUSTER,
        ),
    ] = "prefix"
    adapters: Annotated[
        dict[str, str],
        Option(
            "LoRA adapters: the names that clients call them by, each with its folder or storage URL.",
            MODEL,
            flag=False,
        ),
    ] = field(default_factory=dict)
    weights: Annotated[
        str | None,
        Option(
            "A folder or storage URL of other weights of the same shapes, to decode with instead of the model's.",
            MODEL,
            flag=False,
        ),
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
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

    def checked(self) -> Self:
        """On this machine: a model at a URL is fetched."""
        return super(ModelArgs, replace(self, model=fetch_model(self.model), name=self.served_name)).checked()


@dataclass(frozen=True, kw_only=True)
class GatewayArgs:
    """The processes that speak HTTP, and what they grant to clients."""

    gateways: Annotated[int, Option("Processes that speak HTTP and hold the streams.", CLUSTER, at_least=1)] = 1
    request_seconds: Annotated[
        float | None,
        Option("Time limit of a request, its wait and its stream included; null in a file: none.", CLUSTER, above=0),
    ] = 600.0
    retry_seconds: Annotated[
        float,
        Option("How long a request looks for another replica after its own has died.", CLUSTER, at_least=0),
    ] = 120.0
    drain_seconds: Annotated[
        float,
        Option(
            "How long requests under way may go on after the first Ctrl-C or SIGTERM; 0 cuts them at once.",
            CLUSTER,
            at_least=0,
        ),
    ] = DRAIN_SECONDS
    api_keys: Annotated[
        Path | None,
        Option(
            "Serve only clients with a key of this file, on every machine with a gateway: lines of a client's name "
            "and its key; read when it changes.",
            CLUSTER,
            metavar="FILE",
        ),
    ] = None
    client_requests: Annotated[
        int | None,
        Option(
            "Choices, n for each prompt, that the client of a key of --api-keys may have under way at each gateway "
            "(default: any number).",
            CLUSTER,
            at_least=1,
        ),
    ] = None
    body_bytes: Annotated[int, Option("The largest body of a request; more is 413.", CLUSTER, at_least=1024)] = (
        4 * 2**20
    )
    body_prompts: Annotated[
        int, Option("The most prompts of one body.", CLUSTER, at_least=1, at_most=MOST_PROMPTS)
    ] = MAX_PROMPTS

    def __post_init__(self) -> None:
        check(self)
        if self.client_requests is not None and self.api_keys is None:
            raise ValueError(
                f"client_requests={self.client_requests} needs api_keys: without keys a client can give itself a new "
                "name each time"
            )


@dataclass(frozen=True, kw_only=True)
class ServingArgs(GatewayArgs):
    """The whole application: gateways before the engines of one or several models."""

    models: Annotated[list[ModelArgs], Option("The models and their engines.", MODEL, flag=False)]
    device: Annotated[
        Literal["cpu", "gpu"], Option("What ranks compute on; each rank on gpu takes one.", CLUSTER, flag=False)
    ]

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> "ServingArgs":
        """Of the `args` of a Serve config file; `ValueError` names an unknown or refused field."""
        return read(cls, values)

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
