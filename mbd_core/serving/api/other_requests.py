"""The requests beside completions: the tokenizer over HTTP, and what administrators ask of a running server."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator
from transformers import PreTrainedTokenizerBase

from mbd_core.engine.weights import SwapMode
from mbd_core.serving.api.engine_requests import chat_ids, text_ids
from mbd_core.serving.api.errors import ApiError
from mbd_core.serving.api.fields import Strict, ToolFields, items
from mbd_core.serving.api.requests import Messages, Only, TokenId, turns
from mbd_core.serving.tokens.served_model import ServedModel
from mbd_core.serving.tokens.stream import Asleep

# The tokenizer over HTTP, in the shapes of vLLM's server, which evaluation harnesses ask for.

MAX_TOKENS = 2**17  # of a text that is asked for


class TokenizeRequest(ToolFields):
    """A text, or a chat in the model's template, with its tools; `model` may be left out where one model is served.

    parse_special  control tokens that the prompt spells are control tokens, as in `CompletionRequest`
    """

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    parse_special: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: Annotated[Any, Only(True)] = None
    continue_final_message: Annotated[Any, Only(False)] = None

    @model_validator(mode="after")
    def _one_text(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("prompt: give either prompt or messages")
        if self.tools and self.messages is None:
            raise ValueError("tools: only a chat has tools; give messages")
        if self.parse_special and self.messages is not None:
            raise ValueError("parse_special: what messages spell is text; leave it out, or give prompt")
        turns(self.messages or ())
        return self


class DetokenizeRequest(Strict):
    """Token ids; `model` may be left out where one model is served."""

    model: str | None = None
    tokens: Annotated[list[TokenId], items(MAX_TOKENS)]


def token_ids(asked: TokenizeRequest, model: ServedModel) -> dict[str, Any]:
    """The ids that a prompt of this text has. Raises `ApiError` (400) for a text that has far too many."""
    if asked.prompt is not None:
        special, parsed = asked.add_special_tokens is not False, bool(asked.parse_special)
        ids = text_ids(model, asked.prompt, field="prompt", special=special, parse_special=parsed)
    else:
        special = bool(asked.add_special_tokens)
        ids = chat_ids(model, turns(asked.messages or ()), tools=asked.shown_tools, special=special)
    names = model.tokenizer.convert_ids_to_tokens(ids) if asked.return_token_strs else None
    return {
        "count": len(ids),
        "max_model_len": model.limits.admission.max_length,
        "tokens": ids,
        "token_strs": names,
    }


def token_text(asked: DetokenizeRequest, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """The text of token ids, special tokens included. Raises `ApiError` (400) for an id that is none."""
    unknown = next((t for t in asked.tokens if t >= len(tokenizer)), None)
    if unknown is not None:
        message = f"tokens: {unknown} is no token; the vocabulary has {len(tokenizer)}"
        raise ApiError(400, message, param="tokens", code="invalid_value")
    return {"prompt": tokenizer.decode(asked.tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)}


def tokenizer_info(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """What a client needs to build prompts: the special tokens and the chat template."""
    return {
        "tokenizer_class": type(tokenizer).__name__,
        "vocab_size": len(tokenizer),
        "bos_token": tokenizer.bos_token,
        "eos_token": tokenizer.eos_token,
        "pad_token": tokenizer.pad_token,
        "unk_token": tokenizer.unk_token,
        "chat_template": tokenizer.chat_template,
    }


# What administrators ask of a server that runs: the bodies of these requests, and what is kept of them.

SLEEP_SECONDS = 600.0
MAX_VERSION = 2**53  # numbers that every reader of JSON keeps


class ModelOrder(Strict):
    """`model` may be left out where one is served."""

    model: str | None = None


class WeightsUpdate(ModelOrder):
    """Other weights of the same shapes.

    folder   a model folder on every machine with a replica, or a storage URL
    mode     `preempt`: they take their place at once, and requests that run go on with them; `wait`: once those have
             ended, and no other begins before
    version  their number, larger than that of the weights before (default: one more)
    """

    folder: Annotated[str, Field(min_length=1)]
    mode: SwapMode = "preempt"
    version: Annotated[int, Field(ge=1, lt=MAX_VERSION)] | None = None


class SleepOrder(ModelOrder):
    """What happens to requests that run or wait: `finish` lets them end, for `seconds` at most; `abort` ends them with
    what they have committed."""

    requests: Literal["finish", "abort"] = "finish"
    seconds: Annotated[float, Field(ge=0, le=3600, allow_inf_nan=False)] = SLEEP_SECONDS


@dataclass(frozen=True, kw_only=True)
class WeightsOrder:
    """`WeightsUpdate` as replicas get it."""

    folder: str
    version: int
    mode: SwapMode = "preempt"


@dataclass
class Standing:
    """What holds for a model's replicas, those included that start later.

    weights  the newest weights that were ordered
    asleep   whether they sleep, or are about to
    """

    weights: WeightsOrder | None = None
    asleep: bool = False

    def check_awake(self) -> None:
        """Raise `Asleep`."""
        if self.asleep:
            raise Asleep("the server sleeps; ask again when it was woken up")
