"""A chat's answer as a `Response` and its items."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

from mbd_core.serving.api.response_fields import Status
from mbd_core.serving.api.response_shapes import (
    FunctionCallItem,
    MessageItem,
    OutputText,
    ReasoningItem,
    ReasoningTokens,
    Response,
    ShownReasoning,
)
from mbd_core.serving.api.shapes import Completion, Usage
from mbd_core.serving.text.logprobs import TokenLogprob


def output_text(text: str, logprobs: Sequence[TokenLogprob] = ()) -> OutputText:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def message_item(
    id: str, text: str | None, logprobs: Sequence[TokenLogprob] = (), *, status: Status = "completed"
) -> MessageItem:
    """A message of the assistant; without text it has no content yet."""
    content = [] if text is None else [output_text(text, logprobs)]
    return {"id": id, "type": "message", "role": "assistant", "status": status, "content": content}


def reasoning_item(id: str, text: str | None, *, status: Status = "completed") -> ReasoningItem:
    """An answer's thoughts; without text they have no content yet."""
    content: list[ShownReasoning] = [] if text is None else [{"type": "reasoning_text", "text": text}]
    return {"id": id, "type": "reasoning", "summary": [], "content": content, "status": status}


def call_item(id: str, call_id: str, name: str, arguments: str, *, status: Status = "completed") -> FunctionCallItem:
    return {
        "id": id,
        "type": "function_call",
        "call_id": call_id,
        "name": name,
        "arguments": arguments,
        "status": status,
    }


def finished(response: Response, completion: dict[str, Any], output: list[Any], reason: str) -> Response:
    """The response at its end, with the usage and measures of the chat's `completion`."""
    usage = cast(Usage, completion["usage"])
    whole = reason in ("stop", "tool_calls")
    none: ReasoningTokens = {"reasoning_tokens": 0}
    reasoning = usage.get("completion_tokens_details", none)
    return {
        **response,
        "status": "completed" if whole else "incomplete",
        "incomplete_details": None if whole else {"reason": "max_output_tokens" if reason == "length" else reason},
        "output": output,
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": reasoning,
            "total_tokens": usage["total_tokens"],
        },
        "mbd": completion["mbd"],
    }


def entries(choice: Mapping[str, Any]) -> list[TokenLogprob]:
    """The log-probabilities in a chat's choice, if it has any."""
    return list((choice["logprobs"] or {}).get("content", ()))


def whole_response(response: Response, completion: Completion) -> Response:
    """The response of a chat's whole answer."""
    choice = completion["choices"][0]
    message, reason = choice["message"], choice["finish_reason"]
    suffix = response["id"].removeprefix("resp_")
    calls = message.get("tool_calls", [])
    status: Status = "completed" if reason in ("stop", "tool_calls") else "incomplete"
    output: list[Any] = []
    if reasoning := message.get("reasoning"):
        output.append(reasoning_item(f"rs_{suffix}", reasoning))
    if message["content"] or not (calls or (output and status == "incomplete")):
        output.append(message_item(f"msg_{suffix}", message["content"] or "", entries(choice), status=status))
    for number, call in enumerate(calls):
        function = call["function"]
        output.append(call_item(f"fc_{suffix}_{number}", call["id"], function["name"], function["arguments"]))
    return finished(response, cast(dict[str, Any], completion), output, reason)
