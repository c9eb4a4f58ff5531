"""The keywords of `LLM`: settings of the model and its engine, fields of a request, fields of a decoding.

`EngineConfig`, `DecodingConfig` and the endpoint's requests define the names. A refusal of another library's name says
the name used here; a refusal of an unknown name suggests the nearest known name.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any, Literal, TypedDict

from jobs.api.call_options import plain_value, unknown
from mbd_core.calls.forms import CallFormName
from mbd_core.decoding.blocks.config import DecodingConfig
from mbd_core.engine.config import EngineConfig
from mbd_core.serving.api.requests import ChatRequest, CompletionRequest

DECODING = frozenset(field.name for field in fields(DecodingConfig))
ENGINE = frozenset(field.name for field in fields(EngineConfig))
ENDPOINT = ("name", "fp8", "generation_config", "call_form", "tensor_parallel")
STRUCTURED = ("schema", "regex", "choice")
HANDLED = frozenset(
    ("model", "messages", "prompt", "stream", "stream_options", "frames", "resumable", "resume", "user", "n")
)
"""Fields of a request that `LLM` fills in itself."""
SAME = {"max_new_tokens": "max_tokens", "max_completion_tokens": "max_tokens"}
"""Other names of a field, which are accepted."""
INSTEAD = {
    "do_sample": "give temperature: 0 takes the likeliest token, more draws",
    "eos_token_id": "give stop_token_ids",
    "frames": "give trace=True",
    "functions": "give tools",
    "json_schema": "give schema",
    "max_length": "give max_tokens, which counts only the answer",
    "num_beams": "there is no beam search; give n for several answers",
    "num_return_sequences": "give n",
    "sampling_params": "give its fields, as temperature=0.7",
    "stop_strings": "give stop",
    "stop_sequences": "give stop",
    "stream": "call LLM.stream",
    "use_tqdm": "leave it out; chat and generate take it",
}
SETTING_INSTEAD = {
    "device": "the GPU is taken if there is one; choose by CUDA_VISIBLE_DEVICES",
    "device_map": "the GPU is taken if there is one; choose by CUDA_VISIBLE_DEVICES",
    "enable_prefix_caching": "give prefix_caching",
    "enforce_eager": "give graphs=False",
    "gpu_memory_utilization": "give kv_memory_fraction",
    "load_in_8bit": "give dtype='int8' on a CPU, fp8 on a GPU",
    "max_num_batched_tokens": "give max_prefill_tokens",
    "max_num_seqs": "give max_rows",
    "quantization": "give dtype='int8' on a CPU, fp8 on a GPU",
    "served_model_name": "give name",
    "swap_space": "give host_kv_bytes",
    "tensor_parallel_size": "give tensor_parallel",
    "tokenizer": "the model folder's own is taken",
    "torch_dtype": "give dtype",
    "trust_remote_code": "no code of a model folder is run; leave it out",
}


class DecodingFields(TypedDict, total=False):
    """Fields of the decoding, which docs/reference/decoding.md describes."""

    adaptive: bool
    block_size: int
    buffer_size: int
    canvas: Mapping[str, Any] | None
    carry: bool
    causal: Mapping[str, Any] | None
    edit: Mapping[str, Any] | None
    entropy: Mapping[str, Any] | None
    fallback: str
    prefix_cache: bool
    prompt_attention: str
    renoise: Mapping[str, Any] | None
    soft: Mapping[str, Any] | None
    sub_block: int | None
    t2t: Mapping[str, Any] | None
    tau_add: float
    tau_m2t: float
    tau_semi: float
    tau_stable: float | None
    tokens_per_step: int | None
    verify: Mapping[str, Any] | None


class Settings(DecodingFields, total=False):
    """The keywords of `LLM(model, ...)`: its default decoding, and settings of the engine."""

    method: str
    name: str
    fp8: Literal["experts", "all", "blocks"]
    generation_config: Literal["model", "ignore"]
    call_form: CallFormName
    tensor_parallel: int
    attention: str
    batch_invariant: bool
    block_budget: int
    draft_model: str
    dtype: Literal["auto", "float32", "bfloat16", "int8"]
    graphs: bool
    host_kv_bytes: int
    kv_memory_fraction: float
    max_adapters: int
    max_model_len: int
    max_prefill_tokens: int
    max_rank: int
    max_rows: int
    max_step_seconds: float
    num_pages: int
    overlap: bool
    page_size: int
    prefix_caching: bool
    static_shapes: bool
    url_weights: Literal["cache", "stream"]


class Keywords(DecodingFields, total=False):
    """The keywords of a call: the fields of docs/reference/requests.md, and the fields of the decoding."""

    max_tokens: int
    max_new_tokens: int
    max_completion_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    min_tokens: int
    ignore_eos: bool
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: Mapping[str, float]
    logprobs: bool | int
    schema: Mapping[str, Any] | type | str
    regex: str
    choice: Sequence[str]
    decoding: Mapping[str, Any]
    method: str
    speed: float
    use_tqdm: bool


class ChatKeywords(Keywords, total=False):
    """The keywords of a chat."""

    tools: Sequence[Mapping[str, Any] | Callable[..., Any]]
    tool_choice: str | Mapping[str, Any]
    parallel_tool_calls: bool
    chat_template_kwargs: Mapping[str, Any]
    reasoning_effort: str


def split_settings(settings: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The settings of the decoding, of the engine, and of the model. Raises `ValueError` for an unknown name.

    Both the decoding and the engine have `buffer_size` and `block_size`. Here `buffer_size` is the decoding's, and
    `block_size` the engine's.
    """
    decoding = {name: value for name, value in settings.items() if name in DECODING - {"block_size"}}
    engine = {name: value for name, value in settings.items() if name in ENGINE - DECODING | {"block_size"}}
    model = {name: value for name, value in settings.items() if name in ENDPOINT}
    for name in settings.keys() - decoding.keys() - engine.keys() - model.keys():
        if name in SETTING_INSTEAD:
            raise ValueError(f"unknown setting '{name}': {SETTING_INSTEAD[name]}")
        if name in request_fields(ChatRequest) or name in SAME:
            raise ValueError(f"'{name}' belongs to a call: give it to chat, generate or stream")
        raise unknown("setting", name, {*DECODING, *ENGINE, *ENDPOINT, "method"})
    return decoding, engine, model


def request_fields(kind: type[ChatRequest | CompletionRequest]) -> frozenset[str]:
    """The keywords that are fields of a request of this kind."""
    return frozenset({*kind.model_fields, *STRUCTURED} - HANDLED)


def split_keywords(
    kind: type[ChatRequest | CompletionRequest], keywords: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The fields of a request's body, and the fields of its decoding. Raises `ValueError` for an unknown name."""
    body: dict[str, Any] = {}
    decoding: dict[str, Any] = {}
    known = request_fields(kind)
    for name, value in keywords.items():
        if name in SAME:
            if keywords.get(SAME[name], value) != value or body.get(SAME[name], value) != value:
                raise ValueError(
                    f"{name}={value!r} is another name of {SAME[name]}, which has another value; give one of them"
                )
            body[SAME[name]] = value
        elif name in known:
            body[name] = value
        elif name in DECODING:
            decoding[name] = value
        elif name in INSTEAD:
            raise ValueError(f"unknown keyword '{name}': {INSTEAD[name]}")
        elif name in ENGINE:
            raise ValueError(f"'{name}' belongs to the model: give it to LLM(...)")
        else:
            hints = ChatKeywords if kind is ChatRequest else Keywords
            raise unknown("keyword", name, {*hints.__annotations__, "trace", "n"})
    return _structured(_tools(_logprobs(kind, body))), decoding


def json_body(body: Mapping[str, Any]) -> bytes:
    """A body as JSON for the endpoint; arrays and numbers of other libraries become lists and numbers."""
    for name, value in body.items():
        try:
            json.dumps(value, default=plain_value)
        except TypeError as error:
            raise ValueError(f"{name}: {error}") from None
    return json.dumps(body, default=plain_value).encode()


def _logprobs(kind: type, body: dict[str, Any]) -> dict[str, Any]:
    """The body with `logprobs` as the endpoint takes it.

    For a chat a number becomes `top_logprobs`. For a completion `True` becomes 0, and `False` becomes `None`.
    """
    given = body.get("logprobs")
    if kind is ChatRequest and isinstance(given, int) and not isinstance(given, bool):
        return {"top_logprobs": given, **body, "logprobs": True}
    if kind is CompletionRequest and isinstance(given, bool):
        return {**body, "logprobs": 0 if given else None}
    return body


def _tools(body: dict[str, Any]) -> dict[str, Any]:
    """The body, in which each tool that is a Python function is replaced by a JSON description of the function."""
    tools = body.get("tools")
    if callable(tools):
        raise ValueError(f"tools={tools!r} must be a list of functions")
    if not isinstance(tools, Sequence) or isinstance(tools, str):
        return body
    return {**body, "tools": [_tool(tool) if callable(tool) else tool for tool in tools]}


def _tool(function: Callable[..., Any]) -> dict[str, Any]:
    from transformers.utils import get_json_schema

    name = getattr(function, "__name__", repr(function))
    try:
        described = get_json_schema(function)["function"]
    except Exception as error:  # transformers raises its own types for incomplete docstrings
        raise ValueError(f"tools: {name} cannot be described: {' '.join(str(error).split())}") from None
    described.pop("return", None)
    return {"type": "function", "function": described}


def _structured(body: dict[str, Any]) -> dict[str, Any]:
    """The body with `schema`, `regex` and `choice` renamed to the endpoint's fields."""
    body = dict(body)
    schema = body.pop("schema", None)
    if schema is not None:
        if isinstance(schema, type) and hasattr(schema, "model_json_schema"):  # a pydantic class
            schema = schema.model_json_schema()
        if not isinstance(schema, Mapping | str):
            raise ValueError(f"schema: {schema!r} is no JSON schema; give an object, its text, or a pydantic class")
        body["guided_json"] = schema
    for name in ("regex", "choice"):
        value = body.pop(name, None)
        if value is not None:
            body[f"guided_{name}"] = value
    return body
