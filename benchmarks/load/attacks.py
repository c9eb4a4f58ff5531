"""Requests that cost an endpoint more than a short question, by name: the attacks of a crowd of clients."""

from collections.abc import Callable, Mapping
from typing import Any

AttackPrompt = str | list[str] | list[list[int]]
Attack = Callable[[str, int], tuple[AttackPrompt, dict[str, Any]]]
"""Makes a request: a prompt or several, and other fields. The first argument is a text of the request's own, so that
no cache holds its prompt. The second is the length of a long text in characters."""

HEADERS = "headers"  # the attack that has no body: headers without an end, from a client without a key
CROWD = "crowd"  # the user that all senders of an attack name
TEXT = "the pens of Tom are 12 and "
MAX_STOPS, MAX_STOP_LENGTH, MAX_TOOLS = 16, 1024, 128  # the endpoint's own limits


def _plain(name: str, characters: int) -> tuple[str, dict[str, Any]]:
    """No attack: short questions, to compare with the same number of ordinary clients."""
    return f"{name} {TEXT}", {"max_tokens": 64}


def _long_prompt(name: str, characters: int) -> tuple[str, dict[str, Any]]:
    return f"{name} {(TEXT * (characters // len(TEXT) + 1))[:characters]}", {"max_tokens": 1}


def _long_stops(name: str, characters: int) -> tuple[str, dict[str, Any]]:
    """Stop texts of many spaces: spaces anywhere in an answer may be the beginning of each."""
    stops = [f"{' ' * (MAX_STOP_LENGTH - 8)}{number:08}" for number in range(MAX_STOPS)]
    return f"{name} {TEXT}", {"max_tokens": 64, "stop": stops}


def _longer_stops(name: str, characters: int) -> tuple[str, dict[str, Any]]:
    """Stop texts longer than any server needs to accept."""
    return f"{name} {TEXT}", {"max_tokens": 64, "stop": [" " * (characters // MAX_STOPS)] * MAX_STOPS}


def _grammar(name: str, characters: int) -> tuple[str, dict[str, Any]]:
    """A large grammar, different in each request."""
    words = "|".join(f"{name}{number} [a-z]{{1,{number + 1}}}" for number in range(200))
    return TEXT, {"max_tokens": 32, "guided_regex": f"(({words}) ){{1,20}}end"}


def _many_choices(name: str, characters: int) -> tuple[str, dict[str, Any]]:
    return f"{name} {TEXT}", {"max_tokens": 32, "n": 16, "temperature": 1.0}


def _most_choices(name: str, characters: int) -> tuple[str, dict[str, Any]]:
    return f"{name} {TEXT}", {"max_tokens": 32, "n": 128, "temperature": 1.0}


def _most_prompts(name: str, characters: int) -> tuple[list[str], dict[str, Any]]:
    return [f"{name} {number} {TEXT}" for number in range(128)], {"max_tokens": 32, "n": 2, "temperature": 1.0}


def _most_ids(name: str, characters: int) -> tuple[list[list[int]], dict[str, Any]]:
    """As many token ids as a body may hold, in prompts that are all too long."""
    offset = sum(map(ord, name))
    return [[(offset + i) % 500 for i in range(number)] for number in (250_000, 250_000, 90_000)], {"max_tokens": 1}


def _regex_bomb(name: str, characters: int) -> tuple[str, dict[str, Any]]:
    """A short pattern with many states, different in each request."""
    pattern = f"((a|b|ab)*{name}|([ab]*a[ab]{{12}})+c|(.{{0,99}}x){{1,40}}){{1,100}}end"
    return f"{name} {TEXT}", {"max_tokens": 200, "temperature": 1.0, "guided_regex": pattern}


def _scores(name: str, characters: int) -> tuple[str, dict[str, Any]]:
    """A forward for each of the prompt's tokens."""
    text = (TEXT * (characters // len(TEXT) + 1))[:characters]
    return f"{name} {text}", {"max_tokens": 1, "echo": True, "logprobs": 1, "stream": False}


def _many_tools(name: str, characters: int) -> tuple[str, dict[str, Any]]:
    members = {f"m{number}": {"type": "integer"} for number in range(20)}
    tools = [
        {"type": "function", "function": {"name": f"f{n}", "parameters": {"type": "object", "properties": members}}}
        for n in range(MAX_TOOLS)
    ]
    return f"{name} {TEXT}", {"max_tokens": 32, "tools": tools, "tool_choice": "required"}


ATTACKS: Mapping[str, Attack] = {
    "plain": _plain,
    "prompts": _long_prompt,
    "stops": _long_stops,
    "longer-stops": _longer_stops,
    "grammars": _grammar,
    "choices": _many_choices,
    "most-choices": _most_choices,
    "most-prompts": _most_prompts,
    "ids": _most_ids,
    "bombs": _regex_bomb,
    "scores": _scores,
    "tools": _many_tools,
}

LONG = ("prompts", "longer-stops", "scores")
"""The attacks with a long text."""


def attack_body(
    attack: str, model: str, name: str, characters: int, *, user: str = CROWD
) -> tuple[str, dict[str, Any]]:
    """The route under /v1 and the body of an attack's request that `user` sends."""
    prompt, fields = ATTACKS[attack](name, characters)
    body = {"model": model, "stream": True, "user": user, **fields}
    if attack == "tools":
        return "chat/completions", body | {"messages": [{"role": "user", "content": prompt}]}
    return "completions", body | {"prompt": prompt}
