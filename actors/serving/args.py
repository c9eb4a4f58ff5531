"""What a serving application is made of: one configuration for a local run, `serve deploy` and Kubernetes.

It is the `args` of the application in a Serve config file; unknown fields are refused.
"""

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from cluster.storage import fetch_model
from cluster.topology import Topology
from mbd_core.engine.config import EngineConfig
from mbd_core.serving.api.access import DRAIN_SECONDS
from mbd_core.serving.api.parsing import MAX_PROMPTS, MOST_PROMPTS
from mbd_core.serving.tokens.endpoint_args import EndpointArgs, endpoint_args

REQUEST_SECONDS = 600.0
RETRY_SECONDS = 120.0
BODY_BYTES = 4 * 2**20

Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Fields(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Autoscaling(Fields):
    """How many replicas a model has, by its load.

    min, max         bounds; with min 0 the last replica goes when nothing is asked for, and the next request waits
                     until another one has loaded the model
    target_requests  requests under way that a replica shall have on average: above it replicas are added
    target_kv_load   share of a replica's KV memory that its requests shall hold on average, the prompts that wait
                     included: above it replicas are added too. `null`: requests alone count
    window_seconds   over which the load is averaged
    up_seconds       how long the load must last before replicas are added
    down_seconds     how long it must be gone before they are removed
    """

    min: Annotated[int, Field(ge=0)] = 1
    max: Count
    target_requests: Annotated[float, Field(gt=0)] = 16.0
    target_kv_load: Annotated[float, Field(gt=0)] | None = None
    window_seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 30.0
    up_seconds: Seconds = 15.0
    down_seconds: Seconds = 300.0

    @model_validator(mode="after")
    def _check(self) -> "Autoscaling":
        if self.min > self.max:
            raise ValueError(f"min={self.min} exceeds max={self.max}")
        return self


class Content(Fields):
    """What a deployment that runs takes over: Serve's `user_config`."""

    @classmethod
    def read(cls, values: Any) -> Self:
        """Raises `ValueError`, one sentence, for what is no such content."""
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(str(part) for part in ("user_config", *first["loc"]))
            raise ValueError(f"{place}: {first['msg']}; the fields are {', '.join(cls.model_fields)}") from None


class EngineContent(Content):
    """`weights` and `adapters` as in `ModelArgs`."""

    weights: str | None = None
    adapters: dict[str, str] = {}


class GatewayContent(Content):
    """The names of the adapters, by model."""

    adapters: dict[str, list[str]] = {}


class ModelArgs(Fields):
    """One model and its engines.

    model            a shipped model's name, a model folder on every machine that serves it, or a storage URL
    name             what clients call it (default: the folder's name)
    replicas         engines, each with its own copy of the model, or `Autoscaling`
    routing          which replica gets a request: by `prefix`, the one that has stored the longest part of its prompt,
                     unless it is clearly busier than others; by `load`, the less busy one of two
    tensor_parallel  ranks that each replica is cut among
    max_waiting      requests that wait for a batch row of a replica; more get 429
    threads          torch's threads, each rank's
    trace            a folder for step traces, each replica's in its own folder in it
    fp8              which weights are FP8: rounded, or with "blocks" as the folder has them
    engine           `EngineConfig`'s fields
    adapters         LoRA adapters: the names that clients call them by, each with its folder or storage URL
    weights          a folder or storage URL of other weights of the same shapes, to decode with instead of the model's

    A change of these replaces the replicas. Replicas that run take over `adapters` and `weights` between two steps
    where Serve's `user_config` of the model's deployment names them.
    """

    model: str
    name: str | None = None
    replicas: Count | Autoscaling = 1
    routing: Literal["prefix", "load"] = "prefix"
    tensor_parallel: Count = 1
    max_waiting: Count = EndpointArgs.max_waiting
    threads: Count = EndpointArgs.num_threads
    trace: str | None = None
    fp8: Literal["experts", "all", "blocks"] | None = None
    engine: EngineConfig = EngineConfig()
    adapters: dict[str, str] = {}
    weights: str | None = None

    @model_validator(mode="after")
    def _check(self) -> "ModelArgs":
        if len(self.adapters) > self.engine.max_adapters:
            raise ValueError(
                f"{len(self.adapters)} adapters need engine.max_adapters of at least that; it is "
                f"{self.engine.max_adapters}"
            )
        return self

    @property
    def served_name(self) -> str:
        """What clients call the model."""
        return self.name or self.model.rstrip("/").rpartition("/")[2]

    @property
    def content(self) -> EngineContent:
        """What replicas that run take over."""
        return EngineContent(weights=self.weights, adapters=self.adapters)

    def without_content(self) -> "ModelArgs":
        """What replicas must be replaced for, where it changes."""
        return self.model_copy(update={"weights": None, "adapters": {}})

    @property
    def most_replicas(self) -> int:
        return self.replicas if isinstance(self.replicas, int) else self.replicas.max

    @property
    def least_replicas(self) -> int:
        return self.replicas if isinstance(self.replicas, int) else self.replicas.min

    def checked(self) -> EndpointArgs:
        """What an engine needs to start, on this machine: a model at a URL is fetched.

        Raises `ValueError` for what the model's folder shows to be impossible.
        """
        return endpoint_args(
            fetch_model(self.model),
            name=self.served_name,
            engine=self.engine,
            max_waiting=self.max_waiting,
            num_threads=self.threads,
            trace=None if self.trace is None else Path(self.trace),
            fp8=self.fp8,
            tensor_parallel=self.tensor_parallel,
        )


class ServingArgs(Fields):
    """The whole application: gateways before the engines of one or several models.

    device           what ranks compute on; each rank on `gpu` takes one
    gateways         processes that speak HTTP and hold the streams
    request_seconds  time limit of a request, its wait and its stream included; `null`: none
    retry_seconds    how long a request looks for another replica after its own has died
    drain_seconds    how long requests under way may go on when their process is to end
    body_bytes       the largest body of a request; a larger one is refused before it is read
    body_prompts     the most prompts that one body may have
    api_keys         a file of clients' names and keys, on every machine with a gateway; it is read again when it
                     changes. `null`: everybody is served
    client_requests  choices that each client may have under way at a gateway, n for each prompt of a body; `null`: any
                     number. It needs `api_keys`
    """

    models: Annotated[list[ModelArgs], Field(min_length=1)]
    device: Literal["cpu", "gpu"]
    gateways: Count = 1
    request_seconds: Annotated[float, Field(gt=0)] | None = REQUEST_SECONDS
    retry_seconds: Seconds = RETRY_SECONDS
    drain_seconds: Seconds = DRAIN_SECONDS
    body_bytes: Annotated[int, Field(ge=1024)] = BODY_BYTES
    body_prompts: Annotated[int, Field(ge=1, le=MOST_PROMPTS)] = MAX_PROMPTS
    api_keys: Path | None = None
    client_requests: Count | None = None

    @model_validator(mode="after")
    def _check(self) -> "ServingArgs":
        names = [name for model in self.models for name in (model.served_name, *model.adapters)]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise ValueError(f"models: the name '{repeated[0]}' stands twice; give one of them another name")
        check_client_requests(self.client_requests, self.api_keys)
        return self

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


def check_client_requests(most: int | None, api_keys: Path | None) -> None:
    """Raise `ValueError` for a limit on clients that nothing tells apart."""
    if most is not None and api_keys is None:
        raise ValueError(
            f"client_requests={most} needs api_keys: without keys a client can give itself a new name each time"
        )
