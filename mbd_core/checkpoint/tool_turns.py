"""Tools in a chat: the one form in which calls stand in a text, and turns with calls for templates of both kinds.

    <tool_call>
    {"name": "weather", "arguments": {"city": "Rome"}}
    </tool_call>

is what chat templates of Qwen's kind teach a model; a template that says nothing of tools gets the same form in a
system turn. A template with tools in another form is not followed: nobody could tell a call from a text.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mbd_core.decoding.grammar import Grammar

BEGIN, END = "<tool_call>", "</tool_call>"
HEAD, ARGUMENTS, TAIL = '\n{"name": "', '", "arguments": ', "}\n"
INSTRUCTION = (
    "You may call functions. Each line between <tools> and </tools> describes one:\n<tools>\n{tools}\n</tools>\n"
    "To call functions, end your answer with one block like this for each call:\n"
    '<tool_call>\n{{"name": "the function", "arguments": {{...}}}}\n</tool_call>'
)
SEPARATORS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}  # those of templates


def takes_tools(template: str) -> bool:
    """Whether a chat template says itself how tools are shown: it names them."""
    return re.search(r"\btools\b", template) is not None


def check_form(template: str) -> None:
    """Raise `ValueError` for a template that takes tools and has calls in another form."""
    if takes_tools(template) and BEGIN not in template:
        raise ValueError(
            f"the model's chat template has tool calls in a form of its own, without {BEGIN}; calls could not be "
            "told from text"
        )


def plain_turns(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A chat with tools as turns of text alone: the tools end the system turn, calls end the assistant's, and what
    functions returned is a turn of the user."""
    turns: list[dict[str, Any]] = []
    after_result = False
    for message in messages:
        role, text = message["role"], message["content"]
        if role == "tool":
            response = f"<tool_response>\n{text}\n</tool_response>"
            if after_result:
                turns[-1]["content"] += "\n" + response
            else:
                turns.append({"role": "user", "content": response})
        else:
            calls = [_call_text(call["function"]) for call in message.get("tool_calls") or ()]
            turns.append({"role": role, "content": "\n".join(filter(None, [text, *calls]))})
        after_result = role == "tool"
    if tools:
        shown = INSTRUCTION.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
        if turns[:1] and turns[0]["role"] == "system":
            turns[0]["content"] = "\n\n".join(filter(None, [turns[0]["content"], shown]))
        else:
            turns.insert(0, {"role": "system", "content": shown})
    return turns


def _call_text(function: Mapping[str, Any]) -> str:
    arguments = json.dumps(function["arguments"], ensure_ascii=False)
    return f"{BEGIN}{HEAD}{function['name']}{ARGUMENTS}{arguments}{TAIL}{END}"


@dataclass(frozen=True, kw_only=True)
class CallRule:
    """Which calls an answer may have.

    functions  names of functions, and the JSON schemas of their arguments
    must       the answer is a call; otherwise it is text, which calls may follow
    several    more calls than one may follow one another
    """

    functions: tuple[tuple[str, Mapping[str, Any]], ...]
    must: bool
    several: bool

    def grammar(self, vocabulary: Mapping[str, int]) -> Grammar:
        """The grammar of such answers; of `vocabulary` it matters which marks are tokens of their own. Raises
        `GrammarRefused`.

        Text ends where a call begins, however its mark was written; a text may be cut by the budget, a call not.
        """
        begin, end = (mark if mark in vocabulary else json.dumps(mark) for mark in (BEGIN, END))
        lines = [
            f"call: {begin} body",
            f"body: {json.dumps(HEAD)} function {json.dumps(TAIL)} {end}",
            "function: " + " | ".join(f"f{i}" for i in range(len(self.functions))),
        ]
        for i, (name, schema) in enumerate(self.functions):
            arguments = json.dumps({**schema, "x-guidance": SEPARATORS})
            lines.append(f"f{i}: {json.dumps(name + ARGUMENTS)} %json {arguments}")
        others = ' ("\\n" call)*' if self.several else ""
        if self.must:
            lines.insert(0, f"start: call{others}")
        else:
            head = "spelled" if begin != BEGIN else f"spelled | TEXT {begin}"
            lines[:0] = [
                f"start: TEXT | head body{others}",
                f"head: {head}",
                f"spelled[lazy]: /(?s:.*)/ {json.dumps(BEGIN)}",
                "TEXT: /(?s:.*)/",
            ]
        return Grammar(syntax="lark", text="\n".join(lines), may_be_cut=not self.must)
