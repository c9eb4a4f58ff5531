"""OpenAI's requests and replies under the names that Ray Serve LLM imports from SGLang where there is no vLLM.

A test copies this file to where `sglang.srt.entrypoints.openai.protocol` is imported from, so that Ray's ingress can
be built without either. As SGLang's types do, these drop what they do not know and set `tool_choice` themselves.
"""

from typing import Any

from pydantic import BaseModel, model_validator


class Turn(BaseModel):
    role: str
    content: Any = None
    name: str | None = None
    tool_calls: list[Any] | None = None


class GenerationFields(BaseModel):
    model: str = "default"
    max_tokens: int | None = None
    temperature: float | None = None
    seed: int | None = None
    n: int = 1
    stop: str | list[str] | None = None
    stream: bool = False
    stream_options: dict[str, Any] | None = None
    custom_params: dict[str, Any] | None = None


class ChatCompletionRequest(GenerationFields):
    messages: list[Turn]
    tools: list[Any] | None = None
    tool_choice: str = "auto"

    @model_validator(mode="before")
    @classmethod
    def _no_tools(cls, values: Any) -> Any:
        return values if values.get("tools") else values | {"tool_choice": "none"}


class CompletionRequest(GenerationFields):
    prompt: list[int] | list[list[int]] | str | list[str]


class ReplyFields(BaseModel):
    id: str
    object: str
    created: int
    model: str
    choices: list[dict[str, Any]]
    usage: dict[str, Any]


class ChatCompletionResponse(ReplyFields):
    pass


class CompletionResponse(ReplyFields):
    pass


class ChatCompletionStreamResponse(ReplyFields):
    pass


class CompletionStreamResponse(ReplyFields):
    pass


class InputRequest(BaseModel):
    model: str = "default"
    input: str


class EmbeddingRequest(InputRequest):
    pass


class EmbeddingResponse(BaseModel):
    data: list[Any]


class ScoringRequest(InputRequest):
    pass


class ScoringResponse(BaseModel):
    scores: list[float]


class TokenizeRequest(InputRequest):
    pass


class TokenizeResponse(BaseModel):
    tokens: list[int]


class DetokenizeRequest(BaseModel):
    model: str = "default"
    tokens: list[int]


class DetokenizeResponse(BaseModel):
    text: str
