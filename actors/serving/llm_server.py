"""Our engine as a server class of Ray Serve LLM: `LLMConfig(server_cls="actors.serving.llm_server:DiffusionServer")`.

`build_openai_app` then deploys it behind Ray's own OpenAI ingress. The ingress parses requests with types of vLLM or
SGLang, so one of the two must be installed, though its engine does not run. This class imports neither. It answers
a request of one of Ray's types with one of Ray's types, and a dict of `ray.data.llm` with a dict.
"""

import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from copy import deepcopy
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from pydantic import BaseModel

from actors.serving.args import ModelArgs
from actors.serving.data_rows import ADDED_FIELDS, answer_row
from actors.serving.logs import log_failure
from cluster.ray_private import llm_types
from mbd_core.fields import load
from mbd_core.serving.api.errors import ApiError
from mbd_core.serving.api.orders import SleepOrder, WakeUpOrder
from mbd_core.serving.server.answer import ServedAnswer
from mbd_core.serving.server.engine_service import EngineService
from mbd_core.serving.server.openai_server import OpenAIServer
from mbd_core.serving.tokens.served_model import ServedModel

if TYPE_CHECKING:
    from ray.serve.llm import LLMConfig  # importing it needs vLLM or SGLang

log = logging.getLogger("ray.serve")

CONFIG_FIELDS = (
    "model",
    "name",
    "replicas",
    "routing",
    "adapters",
    "weights",
)  # our fields that Ray's config gives elsewhere, or that are not supported here


def model_args(config: "LLMConfig") -> ModelArgs:
    """The model that Ray's config describes; `engine_kwargs` holds fields of `ModelArgs`.

    Raises `ValueError` for an unsupported setting.
    """
    loading = config.model_loading_config
    source = loading.model_id if loading.model_source is None else loading.model_source
    if not isinstance(source, str):
        source = source.bucket_uri
    if config.lora_config is not None:
        raise ValueError(
            "lora_config: Ray's ingress gives this server no adapters; actors.serving.app:build serves them"
        )
    for name in CONFIG_FIELDS:
        if name in config.engine_kwargs:
            raise ValueError(
                f"engine_kwargs.{name} has no effect here; the model stands in model_loading_config, the number of "
                "replicas in deployment_config; adapters and weights are served by actors.serving.app:build"
            )
    return load(ModelArgs, {"model": source, "name": loading.model_id, **config.engine_kwargs})


def fields_given(request: BaseModel) -> dict[str, Any]:
    """The client's fields in a request from Ray's ingress.

    `decoding` is our own field. vLLM's types keep it. SGLang's types drop it but keep `custom_params`, so it may also
    be given there.
    """
    fields = request.model_dump(exclude_unset=True, warnings=False)
    for name in ADDED_FIELDS:
        fields.pop(name, None)
    if not fields.get("tools") and fields.get("tool_choice") == "none":  # a default of these types
        del fields["tool_choice"]
    for number, message in enumerate(fields.get("messages") or ()):
        fields["messages"][number] = {name: value for name, value in message.items() if value is not None}
    custom = fields.get("custom_params")
    if isinstance(custom, dict) and set(custom) == {"decoding"} and "decoding" not in fields:
        fields["decoding"] = fields.pop("custom_params")["decoding"]
    return fields


class DiffusionServer:
    """`LLMServerProtocol` over one engine. Ray checks its methods, not its base classes."""

    @classmethod
    def get_deployment_options(cls, llm_config: "LLMConfig") -> dict[str, Any]:
        """Serve's options: `deployment_config`, with the CPUs and GPUs that the ranks need."""
        options = deepcopy(llm_config.deployment_config)
        model, kind = model_args(llm_config), llm_config.accelerator_config.kind
        if kind not in ("cpu", "gpu"):
            raise ValueError(f"accelerator_config.kind={kind} is not supported; give cpu or gpu")
        ranks = model.tensor_parallel
        actor = {"num_cpus": ranks, "num_gpus": ranks if kind == "gpu" else 0}
        if llm_config.accelerator_type is not None:
            actor["accelerator_type"] = llm_config.accelerator_type
        if llm_config.runtime_env is not None:
            actor["runtime_env"] = llm_config.runtime_env
        options["ray_actor_options"] = actor | options.get("ray_actor_options", {})
        # Serve queues further requests while the engine is full.
        options.setdefault("max_ongoing_requests", model.engine.max_rows + model.max_waiting)
        return options

    def __init__(self, llm_config: "LLMConfig") -> None:
        """Load the model and start the engine."""
        model = model_args(llm_config)
        args = model.checked()
        torch.set_num_threads(args.threads)
        self._config = llm_config
        self.service = EngineService(args)
        self.server = OpenAIServer({args.served_name: self._served_model}, log=log)
        log.info(self.service.describe())

    async def _served_model(self) -> ServedModel:
        return self.service.served_model()

    async def start(self) -> None:
        """Part of the protocol; the constructor has started the engine."""

    async def __del__(self) -> None:
        """Awaited by Serve when it ends a replica in good order."""
        if hasattr(self, "server"):
            await self.server.stop()
            await self.service.stop()

    # -- requests -----------------------------------------------------------------------------------------------

    async def chat(self, request: Any, raw_request_info: Any = None) -> AsyncIterator[Any]:
        """One answer in Ray's type, or server-sent events as text for a stream."""
        async for part in self._answers(self.server.chat, request, "ChatCompletionResponse"):
            yield part

    async def completions(self, request: Any, raw_request_info: Any = None) -> AsyncIterator[Any]:
        """The same for a completion."""
        async for part in self._answers(self.server.complete, request, "CompletionResponse"):
            yield part

    async def _answers(
        self, ask: Callable[[bytes], Awaitable[ServedAnswer]], request: Any, response: str
    ) -> AsyncIterator[Any]:
        if not isinstance(request, BaseModel):
            async for row in answer_row(ask, request):
                yield row
            return
        try:
            answer = await ask(json.dumps(fields_given(request)).encode())
            try:
                if answer.streamed:
                    async for event in answer.events(log_failure):
                        yield event
                else:
                    yield getattr(llm_types(), response)(**await answer.whole())
            finally:
                answer.close()
        except Exception as error:
            yield ray_error(log_failure(error))

    async def embeddings(self, request: Any, raw_request_info: Any = None) -> AsyncIterator[Any]:
        yield not_supported("embeddings", request)

    async def transcriptions(self, request: Any, raw_request_info: Any = None) -> AsyncIterator[Any]:
        yield not_supported("transcriptions", request)

    async def score(self, request: Any, raw_request_info: Any = None) -> AsyncIterator[Any]:
        yield not_supported("score", request)

    async def tokenize(self, request: Any, raw_request_info: Any = None) -> AsyncIterator[Any]:
        yield not_supported("tokenize", request)

    async def detokenize(self, request: Any, raw_request_info: Any = None) -> AsyncIterator[Any]:
        yield not_supported("detokenize", request)

    # -- operation ----------------------------------------------------------------------------------------------

    async def check_health(self) -> None:
        """Raises if the engine has failed."""
        self.service.check_health()

    async def llm_config(self) -> "LLMConfig":
        return self._config

    async def is_sleeping(self) -> bool:
        return self.service.asleep

    async def is_paused(self) -> bool:
        return False

    async def sleep(self, *, level: int = 1, **options: Any) -> None:
        """Free the engine's memory; `options` are the fields of `SleepOrder`. Raises `ValueError` for unknown options,
        and if requests do not end in time."""
        order = SleepOrder.model_validate(options)
        if level != 1:
            raise ValueError(f"level={level} is not supported: weights wait in the host's memory (level 1)")
        await order.apply(self.service)

    async def wakeup(self, **options: Any) -> None:
        if options:
            raise ValueError(f"wakeup takes no options and wakes up everything; given: {', '.join(sorted(options))}")
        await WakeUpOrder().apply(self.service)

    async def pause(self, **_: Any) -> None:
        refuse("pause")

    async def resume(self, **_: Any) -> None:
        refuse("resume")

    async def reset_prefix_cache(self) -> None:
        refuse("reset_prefix_cache")

    async def start_profile(self) -> None:
        refuse("start_profile")

    async def stop_profile(self) -> None:
        refuse("stop_profile")


def ray_error(error: ApiError) -> Any:
    """The error in the form of Ray's ingress, which uses its code as the HTTP status."""
    types, shape = llm_types(), error.body["error"]
    kind, param = shape["type"], shape["param"]
    return types.ErrorResponse(error=types.ErrorInfo(message=error.message, type=kind, param=param, code=error.status))


def not_supported(route: str, request: Any) -> Any:
    """The error for an unsupported route; for a row of `ray.data.llm` it is raised."""
    message = f"{route}: not supported; this engine answers chat and completions"
    if not isinstance(request, BaseModel):
        raise ValueError(message)
    return ray_error(ApiError(501, message))


def refuse(method: str) -> NoReturn:
    raise NotImplementedError(f"{method}: not supported by this engine")
