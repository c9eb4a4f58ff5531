"""An agent's session by the official client of its route: it has many tools, and a turn is a call and its result."""

from __future__ import annotations

import copy
import importlib
import inspect
import json
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

# fmt: off
MODULES = (
    "json", "re", "shutil", "subprocess", "statistics", "random", "textwrap", "tempfile", "calendar", "heapq",
    "difflib", "shlex", "glob", "fnmatch", "gzip", "base64", "functools", "inspect", "ast", "csv", "urllib.parse",
    "html", "os", "os.path", "logging", "copy", "pprint", "locale", "gettext", "asyncio", "threading", "socket",
    "ssl", "mimetypes", "hmac", "filecmp", "linecache", "pickle", "bz2", "lzma", "platform", "contextlib",
    "types", "traceback", "warnings", "dis", "tokenize", "doctest", "timeit",
)
# fmt: on
KINDS: tuple[dict[str, Any], ...] = (
    {"type": "string"},
    {"type": "integer"},
    {"type": "boolean"},
    {"type": "array", "items": {"type": "string"}},
    {"type": "string", "enum": ["fast", "safe", "whole"]},
    {"type": "object", "properties": {"path": {"type": "string"}, "line": {"type": "integer"}}, "required": ["path"]},
)
MOST_PARAMETERS = 8
CLIENT_SECONDS = 3600.0  # of a request: a first turn stores all tools
SYSTEM = "You are an agent. Call one function at a time, and read its result before you go on."
QUESTION = "Find out why the tests fail, and mend it."


def agent_tools(characters: int) -> list[dict[str, Any]]:
    """Tools with that number of characters in all."""
    tools, length = [], 0
    for tool in all_tools():
        tools.append(tool)
        length += len(json.dumps(tool))
        if length >= characters:
            return tools
    raise ValueError(f"--tool-characters {characters} must be at most {length}: the standard library has no more")


def all_tools() -> Iterator[dict[str, Any]]:
    """Functions of the standard library, with their documentation, as tools.

    Their parameters have types at random, because most of these functions are not annotated.
    """
    for module in MODULES:
        for name, function in sorted(vars(importlib.import_module(module)).items()):
            if name.startswith("_") or not inspect.isfunction(function) or not function.__doc__:
                continue
            rng = random.Random(f"{module}.{name}")
            parameters = list(inspect.signature(function).parameters)[:MOST_PARAMETERS]
            properties = {
                parameter: {**rng.choice(KINDS), "description": f"The value of {parameter}, as {name} takes it."}
                for parameter in parameters
            }
            yield {
                "name": f"{module.replace('.', '_')}__{name}",
                "description": inspect.getdoc(function),
                "input_schema": {"type": "object", "properties": properties, "required": parameters[:1]},
            }


@dataclass(frozen=True, kw_only=True)
class AskedTurn:
    """A turn's measures; seconds count from the sending of the request.

    new  the prompt's tokens that were not found in the prefix cache
    """

    prompt: int
    new: int
    first_seconds: float
    seconds: float


class AgentSession(ABC):
    """A session at a route: the client sends all messages and all tools with every turn, and keeps the answers."""

    route: ClassVar[str]

    def __init__(self, url: str, model: str, tools: list[dict[str, Any]], *, answer_tokens: int) -> None:
        self._url, self._tools = url, tools
        self._fields: dict[str, Any] = {
            "model": model,
            "max_tokens": answer_tokens,
            # random weights: every block in one forward, as far as the grammar allows
            "extra_body": {"decoding": {"tau_m2t": 0.0}},
        }
        self.messages: list[dict[str, Any]] = [{"role": "user", "content": QUESTION}]

    def turn(self, result: str) -> AskedTurn:
        """The next turn: `result` is the last call's, if there is a call."""
        self.messages += self._after_call(self.messages[-1], result) if len(self.messages) > 1 else []
        asked, answer = self._ask(self.messages)
        self.messages.append(answer)
        return asked

    def made_up_turn(self, number: int, result: str) -> None:
        """The next turn, as `turn` makes it, but its answer is a made-up short call: the endpoint is not asked."""
        self.messages += self._after_call(self.messages[-1], result) if len(self.messages) > 1 else []
        tool = self._tools[number % len(self._tools)]
        self.messages.append(self._made_up_answer(number, tool.get("name") or tool["function"]["name"]))

    def again(self, number: int, result: str) -> AskedTurn:
        """Ask turn `number` (at least 2) once more, with another last result. The session stays as it is."""
        return self._ask(self.messages_of(number, result))[0]

    def messages_of(self, number: int, result: str) -> list[dict[str, Any]]:
        """The messages of turn `number` (at least 2), with another last result."""
        kept = self.messages[: 2 * number - 2]
        return [*copy.deepcopy(kept), *self._after_call(kept[-1], result)]

    def body(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        """A request's body, as the client sends it."""
        fields = self._arguments(messages)
        extra = fields.pop("extra_body")
        return {**fields, **extra}

    @abstractmethod
    def _arguments(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        """The client's arguments."""

    @abstractmethod
    def _after_call(self, answer: dict[str, Any], result: str) -> list[dict[str, Any]]:
        """The messages with the result of an answer's call."""

    @abstractmethod
    def _made_up_answer(self, number: int, name: str) -> dict[str, Any]:
        """An answer that calls the function `name`."""

    @abstractmethod
    def _ask(self, messages: list[dict[str, Any]]) -> tuple[AskedTurn, dict[str, Any]]:
        """The measures of a streamed answer, and the answer as a message."""


class MessagesSession(AgentSession):
    """By the package anthropic."""

    route = "messages"

    def __init__(self, url: str, *arguments: Any, **options: Any) -> None:
        super().__init__(url, *arguments, **options)
        try:
            import anthropic
        except ImportError:
            raise ValueError("--route messages needs its client: pip install anthropic") from None
        self._client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=CLIENT_SECONDS)

    def _arguments(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        fields = {"system": SYSTEM, "tools": self._tools, "tool_choice": {"type": "any"}}
        return {**self._fields, **fields, "messages": messages}

    def _after_call(self, answer: dict[str, Any], result: str) -> list[dict[str, Any]]:
        calls = [block for block in answer["content"] if block["type"] == "tool_use"]
        results = [{"type": "tool_result", "tool_use_id": call["id"], "content": result} for call in calls]
        return [{"role": "user", "content": results}]

    def _made_up_answer(self, number: int, name: str) -> dict[str, Any]:
        call = {
            "type": "tool_use",
            "id": f"toolu_{number}",
            "name": name,
            "input": {"path": f"tests/test_{number}.py"},
        }
        return {"role": "assistant", "content": [call]}

    def _ask(self, messages: list[dict[str, Any]]) -> tuple[AskedTurn, dict[str, Any]]:
        start, first = time.perf_counter(), 0.0
        with self._client.messages.stream(**self._arguments(messages)) as stream:
            for event in stream:
                if event.type == "content_block_start":
                    first = first or time.perf_counter() - start
            answer = stream.get_final_message()
        usage = answer.usage
        asked = AskedTurn(
            prompt=usage.input_tokens + usage.cache_read_input_tokens,
            new=usage.input_tokens,
            first_seconds=first,
            seconds=time.perf_counter() - start,
        )
        return asked, {"role": "assistant", "content": [block.to_dict() for block in answer.content]}


class ChatSession(AgentSession):
    """By the package openai."""

    route = "chat"

    def __init__(self, url: str, *arguments: Any, **options: Any) -> None:
        super().__init__(url, *arguments, **options)
        import openai

        self._client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=CLIENT_SECONDS)
        self._tools = [_chat_tool(tool) for tool in self._tools]

    def _arguments(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        fields = {"tools": self._tools, "tool_choice": "required", "parallel_tool_calls": False}
        streamed = {"stream": True, "stream_options": {"include_usage": True}}
        system = {"role": "system", "content": SYSTEM}
        return {**self._fields, **fields, **streamed, "messages": [system, *messages]}

    def _after_call(self, answer: dict[str, Any], result: str) -> list[dict[str, Any]]:
        return [{"role": "tool", "tool_call_id": call["id"], "content": result} for call in answer["tool_calls"]]

    def _made_up_answer(self, number: int, name: str) -> dict[str, Any]:
        function = {"name": name, "arguments": json.dumps({"path": f"tests/test_{number}.py"})}
        call = {"id": f"call_{number}", "type": "function", "function": function}
        return {"role": "assistant", "content": None, "tool_calls": [call]}

    def _ask(self, messages: list[dict[str, Any]]) -> tuple[AskedTurn, dict[str, Any]]:
        start, first = time.perf_counter(), 0.0
        usage: Any = None  # in the last chunk
        calls: list[dict[str, Any]] = []
        for chunk in self._client.chat.completions.create(**self._arguments(messages)):
            usage = chunk.usage or usage
            for delta in (call for choice in chunk.choices for call in choice.delta.tool_calls or ()):
                first = first or time.perf_counter() - start
                if delta.id is not None:
                    function = {"name": delta.function.name, "arguments": ""}
                    calls.append({"id": delta.id, "type": "function", "function": function})
                calls[-1]["function"]["arguments"] += delta.function.arguments or ""
        found = usage.prompt_tokens_details.cached_tokens
        asked = AskedTurn(
            prompt=usage.prompt_tokens,
            new=usage.prompt_tokens - found,
            first_seconds=first,
            seconds=time.perf_counter() - start,
        )
        return asked, {"role": "assistant", "content": None, "tool_calls": calls}


SESSIONS: dict[str, type[AgentSession]] = {kind.route: kind for kind in (MessagesSession, ChatSession)}


def _chat_tool(tool: dict[str, Any]) -> dict[str, Any]:
    function = {"name": tool["name"], "description": tool["description"], "parameters": tool["input_schema"]}
    return {"type": "function", "function": function}


def result_text(seed: object, characters: int) -> str:
    """A function's result of that length, of words of the tools' documentation; another for each seed."""
    words = [word for tool in agent_tools(4000) for word in tool["description"].split()]
    rng = random.Random(str(seed))
    return " ".join(rng.choice(words) for _ in range(characters))[:characters]
