"""A conversation's next turn: an answer's own tokens come back in the prompt, and the prefix cache holds them."""

import json
from pathlib import Path
from typing import Any

import pytest
from chat_templates import tool_folder
from local_server import run, server_of
from transformers import AddedToken

from mbd_core.serving.api.errors import ApiError
from mbd_core.serving.server.openai_server import OpenAIServer

QUESTION = {"role": "user", "content": "Tom has 3 apples and buys 4 more. How many has he?"}
NEXT = {"role": "user", "content": "And two more?"}

PLAIN = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}<|assistant|>{{ m['content'] }}<|endoftext|>"
    "{% else %}<|user|>{{ m['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TRIMMED = PLAIN.replace("{{ m['content'] }}<|endoftext|>", "{{ m['content'] | trim }}<|endoftext|>")
SHORTENED = PLAIN.replace("{{ m['content'] }}<|endoftext|>", "{{ m['content'][:3] }}<|endoftext|>")
HIDDEN = PLAIN.replace("{{ m['content'] }}<|endoftext|>", "<|endoftext|>")
BLANK = PLAIN.replace("<|assistant|>{{ m", "<|assistant|> {{ m")
TWICE = PLAIN.replace("{{ m['content'] }}<|endoftext|>", "{{ m['content'] }}{{ m['content'] }}<|endoftext|>")


async def chat(server: OpenAIServer, *messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    sampling = {
        "temperature": 1.0,
        "seed": 5,
        "ignore_eos": True,
    }  # tokens that no tokenizer would choose for the text
    asked = {"model": "tiny", "max_tokens": 40, "messages": messages, "return_token_ids": True} | sampling | fields
    return await (await server.chat(json.dumps(asked).encode())).whole()


def answer_of(reply: dict[str, Any]) -> dict[str, Any]:
    """A turn of the assistant as a client sends it back."""
    (choice,) = reply["choices"]
    return {"role": "assistant", "content": choice["message"]["content"], "token_ids": choice["token_ids"]}


def found(reply: dict[str, Any]) -> int:
    cached: int = reply["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == reply["mbd"]["num_cached_tokens"]
    return cached


def test_the_next_turn_finds_the_answer_by_its_tokens(tiny_model_dir: Path) -> None:
    server = server_of(tiny_model_dir)
    page = server.service.loaded.engine.page_size

    async def scenario() -> None:
        first = await chat(server, QUESTION)
        answer = answer_of(first)
        (choice,) = first["choices"]
        known = [*choice["prompt_token_ids"], *choice["token_ids"]]
        text = {"role": "assistant", "content": answer["content"]}
        by_text = await chat(server, QUESTION, text, NEXT, max_tokens=4)
        by_ids = await chat(server, QUESTION, answer, NEXT, max_tokens=4)
        assert by_ids["choices"][0]["prompt_token_ids"][: len(known)] == known
        assert found(by_ids) >= len(known) // page * page > found(by_text)
        assert by_text["choices"][0]["prompt_token_ids"][: len(known)] != known, "or the text would do"

    run(server, scenario)


@pytest.mark.parametrize(
    ("template", "stands"),
    [(PLAIN, True), (TRIMMED, True), (BLANK, True), (SHORTENED, False), (HIDDEN, False), (TWICE, False)],
)
def test_the_template_decides_what_is_shown(tiny_model_dir: Path, tmp_path: Path, template: str, stands: bool) -> None:
    """Blanks around an answer are its own; another text is the template's."""
    server = server_of(tool_folder(tiny_model_dir, tmp_path / "model", template=template))
    tokenizer = server.served.tokenizer
    ids = [t for word in (" ", "x", "1", "2", " ") for t in tokenizer(word)["input_ids"]]
    answer = {"role": "assistant", "content": tokenizer.decode(ids), "token_ids": ids}

    async def tokens(*messages: dict[str, Any]) -> list[int]:
        ids: list[int] = (await server.tokenize(json.dumps({"messages": messages}).encode()))["tokens"]
        return ids

    async def scenario() -> None:
        before = await tokens(QUESTION)
        by_ids, by_text = (
            await tokens(QUESTION, answer, NEXT),
            await tokens(QUESTION, {**answer, "token_ids": None}, NEXT),
        )
        assert (by_ids[: len(before) + len(ids)] == [*before, *ids]) == stands
        assert stands or by_ids == by_text
        end = by_text[-len(tokenizer(NEXT["content"])["input_ids"]) - 3 :]
        assert by_ids[-len(end) :] == end

    run(server, scenario)


@pytest.mark.parametrize("is_control", [False, True])
@pytest.mark.parametrize("begin", ["<think>\n", ""])
def test_an_answer_with_thoughts_comes_back_as_its_text(
    tiny_model_dir: Path, tmp_path: Path, begin: str, is_control: bool
) -> None:
    server = server_of(tool_folder(tiny_model_dir, tmp_path / "model", template=PLAIN + "{# <think> #}"))
    tokenizer = server.served.tokenizer
    tokenizer.add_tokens([AddedToken(mark, special=is_control) for mark in ("<think>", "</think>")])
    ids = tokenizer(f"{begin}2 and 2\n</think>\n\n4", add_special_tokens=False)["input_ids"]
    answer = {"role": "assistant", "content": "4", "reasoning": "2 and 2", "token_ids": ids}

    async def tokens(*messages: dict[str, Any]) -> list[int]:
        ids: list[int] = (await server.tokenize(json.dumps({"messages": messages}).encode()))["tokens"]
        return ids

    async def scenario() -> None:
        assert await tokens(QUESTION, answer, NEXT) == await tokens(QUESTION, {**answer, "token_ids": None}, NEXT)
        for wrong in ({"content": "5"}, {"token_ids": [*ids, tokenizer.eos_token_id]}):
            with pytest.raises(ApiError, match="not the tokens of the content"):
                await tokens(QUESTION, {**answer, **wrong}, NEXT)

    run(server, scenario)


def test_tokens_that_are_not_the_contents_are_refused(tiny_model_dir: Path) -> None:
    server = server_of(tiny_model_dir)
    tokenizer = server.served.tokenizer
    ids = tokenizer("42 apples")["input_ids"]
    cases = [
        ({"role": "assistant", "content": "43 apples", "token_ids": ids}, "not the tokens of the content"),
        ({"role": "assistant", "content": "42 apples", "token_ids": [*ids, tokenizer.eos_token_id]}, "not the tokens"),
        ({"role": "assistant", "content": "42 apples", "token_ids": [len(tokenizer)]}, "is no token"),
        ({"role": "user", "content": "42 apples", "token_ids": ids}, "only a turn of the assistant"),
    ]

    async def scenario() -> None:
        for message, why in cases:
            with pytest.raises(ApiError, match=why) as caught:
                await chat(server, QUESTION, message, NEXT)
            assert (caught.value.status, caught.value.param) == (400, "messages.1.token_ids")
        empty = {"role": "assistant", "content": "42 apples", "token_ids": []}
        plain = {"role": "assistant", "content": "42 apples"}
        replies = [await chat(server, QUESTION, message, NEXT) for message in (empty, plain)]
        assert replies[0]["choices"][0]["prompt_token_ids"] == replies[1]["choices"][0]["prompt_token_ids"]
        good = {"role": "assistant", "content": "42 apples", "token_ids": ids}
        asked = json.dumps({"messages": [QUESTION, good, NEXT], "add_special_tokens": True}).encode()
        with pytest.raises(ApiError):
            await server.tokenize(asked)

    run(server, scenario)
