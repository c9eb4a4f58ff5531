"""The API over one engine, without HTTP and without Ray."""

import asyncio
import json
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from chat_templates import REFUSAL, with_strict_template
from local_server import LIMIT, run, server_of

from mbd_core.serving.api.errors import ApiError, api_error
from mbd_core.serving.server import large_bodies
from mbd_core.serving.server.openai_server import OpenAIServer
from mbd_core.serving.tokens.served_model import ServedModel
from mbd_core.serving.tokens.stream import EngineFailed, RequestTimedOut, TooManyRequests


@pytest.fixture(scope="module")
def shared_server(tiny_model_dir: Path) -> Iterator[OpenAIServer]:
    """For what is refused before the engine sees it, which binds the server to no event loop."""
    server = server_of(tiny_model_dir)
    yield server
    asyncio.run(server.stop())


def body(**fields: Any) -> bytes:
    return json.dumps({"model": "tiny", "max_tokens": 8} | fields).encode()


def turns(*roles: str) -> list[dict[str, str]]:
    return [{"role": role, "content": "Tom has 3 apples."} for role in roles]


async def refusal(answer: Coroutine[Any, Any, Any]) -> ApiError:
    with pytest.raises(ApiError) as caught:
        await answer
    return caught.value


def test_control_tokens_that_a_request_spells_are_text(tiny_model_dir: Path) -> None:
    """In prompts, chats, fixed text and /tokenize; `parse_special` asks for the tokens."""
    server, text = server_of(tiny_model_dir), "a <|endoftext|> b"
    tokenizer = server.served.tokenizer
    parsed, as_text = (tokenizer(text, split_special_tokens=split)["input_ids"] for split in (False, True))
    assert parsed.count(1) == 1 and 1 not in as_text

    async def whole(**fields: Any) -> dict[str, Any]:
        answer = await server.complete(body(return_token_ids=True, **fields))
        (choice,) = (await answer.whole())["choices"]
        return choice

    async def scenario() -> None:
        message = {"role": "user", "content": text}
        chat = await (await server.chat(body(messages=[message], return_token_ids=True))).whole()
        assert chat["choices"][0]["prompt_token_ids"] == [2, *as_text, 3]
        assert (await server.tokenize(json.dumps({"messages": [message]}).encode()))["tokens"] == [2, *as_text, 3]
        for special, ids in ((False, as_text), (True, parsed)):
            assert (await whole(prompt=text, parse_special=special))["prompt_token_ids"] == ids
            asked = {"prompt": text, "parse_special": special}
            assert (await server.tokenize(json.dumps(asked).encode()))["tokens"] == ids
            template = {"prompt": "x", "template": [{"hole": 2}, text], "parse_special": special, "max_tokens": None}
            assert (await whole(**template))["token_ids"][2:] == ids
        assert (await whole(prompt=text, echo=True))["text"].startswith(text)
        error = await refusal(server.tokenize(json.dumps({"messages": [message], "parse_special": True}).encode()))
        assert error.status == 400 and error.param == "parse_special"

    run(server, scenario)


def test_a_chat_template_s_refusal_is_a_400_with_the_template_s_sentence(tiny_model_dir: Path, tmp_path: Path) -> None:
    server = server_of(with_strict_template(tiny_model_dir, tmp_path / "strict"))

    async def scenario() -> None:
        for wrong in (turns("assistant"), turns("user", "user"), turns("system", "assistant")):
            error = await refusal(server.chat(body(messages=wrong)))
            assert (error.status, error.param, error.code) == (400, "messages", "invalid_value")
            assert error.message == f"messages: the model's chat template refuses these messages: {REFUSAL}"
        for right in (turns("user"), turns("developer", "user", "assistant", "user")):
            answer = await server.chat(body(messages=right))
            assert (await answer.whole())["object"] == "chat.completion"

    run(server, scenario)


def test_a_model_without_a_chat_template_refuses_chats(tiny_model_dir: Path) -> None:
    server = server_of(tiny_model_dir)
    server.served.tokenizer.chat_template = None

    async def scenario() -> None:
        error = await refusal(server.chat(body(messages=turns("user"))))
        assert (error.status, error.param) == (400, "messages")
        assert "no chat template" in error.message

    run(server, scenario)


@pytest.mark.parametrize("route", ["chat", "complete"])
def test_the_loop_goes_on_while_a_prompt_becomes_tokens(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch, route: str
) -> None:
    """The tokenizer waits for what only the event loop can do: were it on the loop, nothing would move."""
    server = server_of(tiny_model_dir)
    loop_moved, threads = threading.Event(), set()
    kind = type(server.served.tokenizer)
    original = kind._encode_plus

    def slow(*args: Any, **kwargs: Any) -> Any:
        threads.add(threading.get_ident())
        assert loop_moved.wait(60), "the event loop stood still while the tokenizer worked"
        return original(*args, **kwargs)

    monkeypatch.setattr(kind, "_encode_plus", slow)
    fields = {"messages": turns("user")} if route == "chat" else {"prompt": "Tom has"}

    async def scenario() -> None:
        answers = [asyncio.create_task(getattr(server, route)(body(**fields))) for _ in range(3)]
        await asyncio.sleep(0)
        await asyncio.sleep(0.05)
        loop_moved.set()
        for answer in answers:
            assert (await (await answer).whole())["usage"]["completion_tokens"] <= 8
        assert threads and len(threads) == 1, "one thread tokenises: a tokenizer's settings are not thread-safe"
        assert threading.get_ident() not in threads

    run(server, scenario)


def test_health_tells_the_kv_memory_and_the_graphs(tiny_model_dir: Path) -> None:
    server = server_of(tiny_model_dir)

    async def scenario() -> None:
        state = server.service.state()
        assert state["kv_cache"] == {"num_pages": 64, "page_size": 16, "tokens": 63 * 16, "free_pages": 63}
        assert state["graphs"] == server.service.loaded.engine.graph_report()
        assert state["ready"]
        assert "KV memory: 1,008 tokens in 64 pages" in server.service.describe()
        await server.service.engine.stop()
        with pytest.raises(EngineFailed):
            await server.complete(body(prompt="x"))
        assert not server.service.state()["ready"]

    run(server, scenario)


def test_editing_a_model_not_trained_for_it_is_noted_once(tiny_model_dir: Path) -> None:
    server, notes = server_of(tiny_model_dir), list[str]()

    class Notes(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            notes.append(record.getMessage())

    server._log = logging.Logger("notes")
    server._log.addHandler(Notes())
    untrained = server.served
    trained = replace(
        untrained,
        limits=replace(untrained.limits, generation={**untrained.limits.generation, "t2t": {"tau": 0.5}}),
    )

    async def scenario() -> None:
        for model, expected in ((untrained, 1), (trained, 0)):
            notes.clear()
            server.served = model
            server._routes.clear()
            for decoding in ({}, {"t2t": {}}, {"t2t": {"tau": 0.9}}):
                await (await server.complete(body(prompt="x", decoding=decoding))).whole()
            assert len(notes) == expected, "once, and only where generation_config.json names no t2t"

    run(server, scenario)


LONG = "x" * 1_000_000


@pytest.mark.parametrize(
    ("route", "fields", "names"),
    [
        ("complete", {"model": LONG}, "model"),
        ("complete", {LONG: 1}, "unknown field"),
        ("complete", {"stream_options": {LONG: 1}}, "stream_options."),
        ("complete", {"suffix": LONG}, "suffix: "),
        ("complete", {"suffix": [LONG]}, "suffix: "),
        ("complete", {"logit_bias": {LONG: 1}}, "logit_bias: "),
        ("complete", {"echo": LONG}, "echo: "),
        ("complete", {"best_of": 10**4000}, "best_of: "),
        ("complete", {"max_tokens": 10**4000}, "max_tokens"),
        ("complete", {"max_tokens": LONG}, "max_tokens: "),
        ("complete", {"decoding": {LONG: 1}}, "decoding: unknown decoding field"),
        ("complete", {"decoding": {"fallback": LONG}}, "decoding: fallback="),
        ("complete", {"decoding": {"t2t": {LONG: 1}}}, "decoding: unknown decoding field"),
        ("complete", {"decoding": {"tau_m2t": [LONG]}}, "decoding: "),
        ("complete", {"prompt": [10**4000]}, "prompt: "),
        ("chat", {"messages": [{"role": LONG, "content": "x"}]}, "messages.0.role: "),
        ("chat", {"messages": [{"role": "user", "content": "x", LONG: 1}]}, "messages.0."),
        ("chat", {"messages": turns("user"), "tools": [LONG]}, "tools.0: "),
        ("chat", {"messages": turns("user"), "response_format": {"type": LONG}}, "response_format: "),
    ],
)
def test_an_error_names_the_field_and_repeats_little_of_a_long_value(
    shared_server: OpenAIServer, route: str, fields: dict[str, Any], names: str
) -> None:
    given = {"prompt": "x"} | fields if route == "complete" else fields

    async def scenario() -> ApiError:
        return await refusal(getattr(shared_server, route)(body(**given)))

    error = asyncio.run(scenario())
    assert error.status in (400, 404)
    assert names in error.message
    assert len(json.dumps(error.body)) < 2000


def test_a_draining_server_finishes_its_requests_and_refuses_others(tiny_model_dir: Path) -> None:
    server = server_of(tiny_model_dir)
    asked = {"max_tokens": 40, "decoding": {"buffer_size": 1, "tau_m2t": 1.0}, "stream": True}

    async def scenario() -> None:
        answers = [await server.complete(body(prompt=[9, 9, i], **asked)) for i in range(1, 5)]
        assert not server.draining
        assert server.begin_drain() == 4, "two run in the two batch rows, two wait"
        assert server.draining
        for route, fields in (("complete", {"prompt": "x"}), ("chat", {"messages": turns("user")})):
            error = await refusal(getattr(server, route)(body(**fields)))
            assert (error.status, error.code, error.body["error"]["type"]) == (503, "shutting_down", "server_error")
            assert error.headers is not None and int(error.headers["Retry-After"]) > 0
        assert await server.wait_until_drained(0) == 4
        end = asyncio.create_task(server.wait_until_drained(LIMIT))
        for answer in answers:
            assert not end.done()
            events = [event async for event in answer.events(no_failure)]
            assert events[-1] == "data: [DONE]\n\n"
            assert json.loads(events[-2].removeprefix("data: "))["choices"][0]["finish_reason"] in ("stop", "length")
            answer.close()
            answer.close()
        assert await end == 0
        assert server.begin_drain() == 0

    run(server, scenario)


def no_failure(error: Exception) -> ApiError:
    raise AssertionError("the answer failed") from error


def test_refused_and_abandoned_requests_do_not_hold_up_a_drain(tiny_model_dir: Path) -> None:
    server = server_of(tiny_model_dir)

    async def scenario() -> None:
        await refusal(server.complete(b"{"))
        await refusal(server.complete(body(model="other", prompt="x")))
        await refusal(server.complete(body(prompt="x", max_tokens=10_000)))
        (await server.complete(body(prompt="x"))).close()
        assert server.begin_drain() == 0
        assert await server.wait_until_drained(LIMIT) == 0

    run(server, scenario)


def test_an_answer_that_takes_too_long_is_a_504(tiny_model_dir: Path) -> None:
    server = server_of(tiny_model_dir, request_seconds=0.05)
    slow = {"prompt": "x", "max_tokens": 400, "decoding": {"buffer_size": 1, "tau_m2t": 1.0}}

    async def answered() -> None:
        answer = await server.complete(body(**slow))
        try:
            await answer.whole()
        finally:
            answer.close()

    check_timeout(server, answered)


def test_the_wait_for_a_model_counts_too() -> None:
    async def model() -> ServedModel:
        await asyncio.sleep(LIMIT)
        raise AssertionError("the request outlived its limit")

    server = OpenAIServer({"tiny": model}, request_seconds=0.05)

    async def answered() -> None:
        await server.complete(body(prompt="x"))

    check_timeout(server, answered)


def check_timeout(server: OpenAIServer, answered: Callable[[], Awaitable[None]]) -> None:
    async def scenario() -> None:
        with pytest.raises(RequestTimedOut) as caught:
            await answered()
        seen = api_error(caught.value)
        assert (seen.status, seen.code) == (504, "timeout")
        assert "0.05 s" in seen.message

    run(server, scenario)


def test_a_client_has_no_more_choices_under_way_than_it_may(tiny_model_dir: Path) -> None:
    """Several prompts with several choices in one body are as many requests."""
    server = server_of(tiny_model_dir, client_requests=4)
    messages = [{"role": "user", "content": "x"}]
    many = [{"prompt": ["x", "y"], "n": 2, "temperature": 1.0}, {"prompt": [[5], [6], [7], [8]]}]

    async def scenario() -> None:
        for fields in (*many, {"prompt": ["x"] * 4, "echo": True, "logprobs": 1, "max_tokens": 1}):
            first = await server.complete(body(**fields), key="ann")
            one, chat = body(prompt="x"), body(messages=messages)
            for more in (server.complete(one, key="ann"), server.chat(chat, key="ann")):
                with pytest.raises(TooManyRequests, match="4 choices"):
                    await more
            for key in ("ben", "", ""):
                (await server.complete(body(prompt="x"), key=key)).close()
            first.close()
        half = await server.chat(body(messages=messages, n=3), key="ann")
        with pytest.raises(TooManyRequests):
            await server.complete(body(prompt="x", n=2), key="ann")
        (await server.complete(body(prompt="x"), key="ann")).close()
        half.close()

    run(server, scenario)


@pytest.mark.parametrize("may_grow", [True, False])
def test_what_one_engine_refuses_waits_where_others_may_come(tiny_model_dir: Path, may_grow: bool) -> None:
    """Of two engines of 3 requests each one is there: up to 6 wait for it if the other may yet come."""
    server = server_of(tiny_model_dir, max_waiting=1)
    server.served = replace(server.served, num_engines=2, may_grow=may_grow)

    async def answered() -> bool:
        try:
            answer = await server.complete(body(prompt="x", max_tokens=4))
        except TooManyRequests:
            return False
        await answer.whole()
        answer.close()
        return True

    async def scenario() -> None:
        async with asyncio.timeout(LIMIT):
            ends = await asyncio.gather(*(answered() for _ in range(8)))
        assert ends.count(True) == (6 if may_grow else 3)

    run(server, scenario)


def test_a_body_with_more_choices_than_a_client_may_have_says_so(tiny_model_dir: Path) -> None:
    server = server_of(tiny_model_dir, client_requests=4)
    messages = [{"role": "user", "content": "x"}]

    async def scenario() -> None:
        for asked, field in (
            (server.complete(body(prompt=["x"] * 5), key="ann"), "prompt"),
            (server.complete(body(prompt=["x"] * 3, n=2), key="ann"), "n"),
            (server.chat(body(messages=messages, n=5), key="ann"), "n"),
        ):
            error = await refusal(asked)
            assert (error.status, error.param, error.code) == (400, field, "invalid_value")
            assert "one API key may have 4 under way here" in error.message
        (await server.complete(body(prompt=["x"] * 4), key="ann")).close()  # none of these counts any more

    run(server, scenario)


def test_a_key_without_a_limit_has_any_number_of_choices(tiny_model_dir: Path) -> None:
    server = server_of(tiny_model_dir, client_requests=4)
    messages = [{"role": "user", "content": "x"}]

    async def scenario() -> None:
        answers = [
            await server.complete(body(prompt=["x"] * 5), key="rows", limited=False),
            await server.chat(body(messages=messages, n=5), key="rows", limited=False),
        ]
        (await server.complete(body(prompt=["x"] * 4), key="rows")).close()  # they count for nobody
        assert server.begin_drain() == len(answers)
        for answer in answers:
            answer.close()
        assert await server.wait_until_drained(0.0) == 0

    run(server, scenario)


def test_a_body_that_is_still_to_come_counts_for_its_client(tiny_model_dir: Path) -> None:
    server = server_of(tiny_model_dir, client_requests=1)

    async def scenario() -> None:
        sent = asyncio.Event()

        async def read() -> bytes:
            await sent.wait()
            return body(prompt="x")

        async def fails() -> bytes:
            raise ApiError(408, "too late", code="timeout")

        slow = asyncio.create_task(server.complete(read, key="ann"))
        await asyncio.sleep(0)
        with pytest.raises(TooManyRequests, match="1 choices"):
            await server.complete(lambda: pytest.fail("its body was read"), key="ann")
        (await server.complete(body(prompt="x"), key="ben")).close()
        sent.set()
        (await slow).close()
        assert (await refusal(server.complete(fails, key="ann"))).status == 408
        (await server.complete(body(prompt="x"), key="ann")).close()

    run(server, scenario)


def test_a_body_has_at_most_so_many_prompts(tiny_model_dir: Path) -> None:
    server = server_of(tiny_model_dir, body_prompts=3)

    async def scenario() -> None:
        for prompts in (["x"] * 4, [[5]] * 4, ["x"] * 4000):
            error = await refusal(server.complete(body(prompt=prompts)))
            assert (error.status, error.param, error.code) == (400, "prompt", "invalid_value")
            assert error.message == f"prompt: {len(prompts)} prompts in one body; this server takes at most 3"
        assert not server._routes, "it was refused before anything was tokenised"
        (await server.complete(body(prompt=[[5], [6], [7]]))).close()
        (await server.complete(body(prompt=[5, 6, 7, 8]))).close()  # one prompt of four tokens

    run(server, scenario)


def test_a_prompt_far_too_long_is_refused_for_a_part_of_its_cost(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = server_of(tiny_model_dir)
    text, encode, lengths = "a " * 1_000_000, server.served.tokenizer.encode, []

    def counting(text: str, **options: Any) -> list[int]:
        lengths.append(len(text))
        ids: list[int] = encode(text, **options)
        return ids

    monkeypatch.setattr(server.served.tokenizer, "encode", counting)

    async def scenario() -> None:
        for asked, field in (
            (server.complete(body(prompt=text)), "prompt"),
            (server.chat(body(messages=[{"role": "user", "content": text}])), "messages"),
            (server.tokenize(json.dumps({"prompt": text}).encode()), "prompt"),
        ):
            error = await refusal(asked)
            assert (error.status, error.param, error.code) == (400, field, "context_length_exceeded")
            assert "512 tokens, which is the limit" in error.message

    run(server, scenario)
    assert max(lengths) < 10_000


def test_more_prompts_than_are_taken_are_refused_before_they_are_read(tiny_model_dir: Path) -> None:
    server = server_of(tiny_model_dir, max_waiting=6)

    async def scenario() -> None:
        server.served.tokenizer.encode("")
        error = await refusal(server.complete(body(prompt=["a"] * 100)))
        assert error.param == "prompt" and "at most 8" in error.message

    run(server, scenario)


@pytest.mark.parametrize("stream", [False, True])
def test_echo_puts_each_prompt_before_its_choices(tiny_model_dir: Path, stream: bool) -> None:
    server = server_of(tiny_model_dir)

    async def texts(**fields: Any) -> list[str]:
        answer = await server.complete(body(max_tokens=6, n=2, temperature=1, seed=3, **fields))
        if not stream:
            return [choice["text"] for choice in (await answer.whole())["choices"]]
        joined = [""] * 4
        async for event in answer.events(no_failure):
            if event.startswith("data: {"):
                for choice in json.loads(event.removeprefix("data: "))["choices"]:
                    joined[choice["index"]] += choice["text"]
        return joined

    async def scenario() -> None:
        prompts = ["Tom has 3 pens.", "2 + 2"]
        alone = await texts(prompt=prompts)
        assert await texts(prompt=prompts, echo=True) == [
            prompt + text for prompt, text in zip([prompts[0]] * 2 + [prompts[1]] * 2, alone, strict=True)
        ]

    run(server, scenario)


def test_the_tokenizer_s_routes_agree_with_the_prompts(tiny_model_dir: Path) -> None:
    server = server_of(tiny_model_dir)
    chat = [{"role": "developer", "content": "Be short."}, {"role": "user", "content": "Tom has 3 pens."}]

    async def scenario() -> None:
        assert server.model("tiny")["max_model_len"] is None
        await asyncio.gather(*(server.learn_limits(["tiny", "other"], seconds=LIMIT) for _ in range(3)))
        text = await server.tokenize(json.dumps({"prompt": "Tom has 3 pens.", "return_token_strs": True}).encode())
        assert server.models()["data"][0]["max_model_len"] == 512
        assert text["count"] == len(text["tokens"]) == len(text["token_strs"]) and text["max_model_len"] == 512
        back = await server.detokenize(json.dumps({"tokens": text["tokens"]}).encode())
        assert back == {"prompt": "Tom has 3 pens."}
        template = await server.tokenize(json.dumps({"model": "tiny", "messages": chat}).encode())
        answer = await server.chat(body(messages=chat, return_token_ids=True))
        assert (await answer.whole())["choices"][0]["prompt_token_ids"] == template["tokens"]
        info = await server.tokenizer_info(None)
        assert info["chat_template"] == server.served.tokenizer.chat_template and info["eos_token"]
        for wrong, param in (({"tokens": [10**9]}, "tokens"), ({"tokens": "x"}, "tokens"), ({}, "tokens")):
            assert (await refusal(server.detokenize(json.dumps(wrong).encode()))).param == param
        for wrong, param in (({}, "prompt"), ({"prompt": "a", "messages": chat}, "prompt"), ({"prompt": 3}, "prompt")):
            assert (await refusal(server.tokenize(json.dumps(wrong).encode()))).param == param
        assert (await refusal(server.tokenizer_info("other"))).status == 404

    run(server, scenario)


def test_large_bodies_leave_the_event_loop_to_others(tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four of them at once are parsed one by one, and between them a small one of another client."""
    server, parsed = server_of(tiny_model_dir), []
    parse = large_bodies.parse

    def noted(kind: Any, given: bytes) -> Any:
        time.sleep(0.05)
        parsed.append("large" if len(given) > large_bodies.LARGE_BODY else "small")
        return parse(kind, given)

    monkeypatch.setattr(large_bodies, "parse", noted)

    async def scenario() -> None:
        large = body(prompt=[[7] * 200_000])
        crowd = [asyncio.create_task(server.complete(large, key="crowd")) for _ in range(4)]
        await asyncio.sleep(0.01)
        answer = await server.complete(body(prompt="Tom"), key="bystander")
        await answer.whole()
        answer.close()
        for refused in await asyncio.gather(*crowd, return_exceptions=True):
            assert isinstance(refused, ApiError) and refused.code == "context_length_exceeded"
        waiting = [
            asyncio.create_task(server.complete(large, key="crowd")) for _ in range(large_bodies.MOST_LARGE + 1)
        ]
        ends = await asyncio.gather(*waiting, return_exceptions=True)
        assert sum(isinstance(end, TooManyRequests) for end in ends) == 1

    run(server, scenario)
    assert parsed[:3].count("small") == 1
