"""`LLM`: the endpoint's answers in this process, for one text or many, from one thread or several."""

import asyncio
import gc
import json
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from local_server import LocalServer, server_of
from pydantic import BaseModel

from mbd_core import LLM
from mbd_core.decoding.blocks.config import DecodingConfig
from mbd_core.engine.config import EngineConfig
from mbd_core.serving.api.requests import ChatRequest, CompletionRequest
from mbd_core.serving.tokens.stream import TooManyRequests

ROOT = Path(__file__).resolve().parents[3]
QUESTION = "Tom has 12 pens. Tom buys 3 bags with 4 pens each. Tom sells 5 pens. How many pens does Tom have now?"
SHORT = {"max_tokens": 8}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("tiny-mbd", buffer_size=4) as llm:
        yield llm


def endpoint_texts(folder: Path, *asked: tuple[str, dict[str, Any]]) -> list[list[str]]:
    """For each request (route, fields) the texts of the choices that one server of the endpoint gives, in turn."""
    server: LocalServer = server_of(folder)

    async def ask() -> list[list[str]]:
        texts = []
        for route, fields in asked:
            body = json.dumps({"model": server.service.args.name, **fields}).encode()
            reply = await (await getattr(server, route)(body)).whole()
            texts.append(
                [c["text"] if route == "complete" else c["message"]["content"] or "" for c in reply["choices"]]
            )
        await server.stop()
        return texts

    return asyncio.run(ask())


def test_the_answers_are_those_of_the_endpoint(tiny_model_dir: Path) -> None:
    drawn = {"temperature": 1.0, "top_k": 20, "seed": 5, "max_tokens": 12}
    turns = [{"role": "user", "content": QUESTION}]
    decoding = {"buffer_size": 2, "tau_m2t": 0.3}
    asked: list[dict[str, Any]] = [
        SHORT,
        drawn,
        {"regex": "[a-c]{2,4}", "max_tokens": 8},
        {"stop": "a", "max_tokens": 30},
    ]
    fields = [{{"regex": "guided_regex"}.get(name, name): value for name, value in each.items()} for each in asked]
    chats = [("chat", {"messages": turns, "n": 3, "decoding": decoding, **each}) for each in fields]
    completions = [("complete", {"prompt": ["a b", "c"], "decoding": decoding, **each}) for each in fields]
    texts = endpoint_texts(tiny_model_dir, *chats, *completions)
    with LLM(tiny_model_dir, **decoding) as llm:
        for each, chat, completion in zip(asked, texts[: len(asked)], texts[len(asked) :], strict=True):
            assert [a.text for a in llm.chat(QUESTION, n=3, **each)] == chat
            assert llm.chat(turns, **each).text == chat[0]
            assert [a.text for a in llm.generate(["a b", "c"], **each)] == completion


def test_an_answer_says_what_it_took(llm: LLM) -> None:
    answer = llm.chat(QUESTION)
    assert answer.text.endswith("#### 19") and str(answer) == answer.text
    assert answer.finish_reason == "stop" and answer.trace is None and answer._repr_html_() is None
    assert answer.tpf == len(answer.tokens) / answer.forwards > 3
    assert llm.tokenizer.decode(answer.tokens) == answer.text
    assert answer.reply["usage"]["prompt_tokens"] == len(answer.prompt_tokens)
    single = llm.chat(QUESTION, method="single")
    assert single.forwards > answer.forwards
    assert llm.chat(QUESTION, buffer_size=1).forwards == single.forwards
    assert llm.chat(QUESTION, decoding={"buffer_size": 1}).forwards == single.forwards


def test_one_text_gives_one_answer_and_many_give_a_list(llm: LLM) -> None:
    ids = list(llm.tokenizer("Tom has 3 apples.")["input_ids"])
    one = llm.generate("Tom has 3 apples.", **SHORT)
    for prompt in (ids, tuple(ids), np.array(ids)):
        assert llm.generate(prompt, **SHORT).tokens == one.tokens
    assert [a.tokens for a in llm.generate([ids, "Tom has 3 apples."], **SHORT)] == [one.tokens] * 2
    assert llm.generate(np.array([ids, ids]), **SHORT)[1].tokens == one.tokens
    assert llm.generate([]) == []
    assert [len(of_prompt) for of_prompt in llm.generate(["a", "b", "c"], n=2, **SHORT)] == [2, 2, 2]
    assert len(llm.chat([QUESTION, QUESTION], **SHORT)) == 2
    assert len(llm.chat([[{"role": "user", "content": "a"}]], **SHORT)) == 1


def test_more_prompts_than_the_engine_takes_are_answered_in_their_order(tiny_model_dir: Path) -> None:
    with LLM(tiny_model_dir, max_rows=16) as llm:  # beside 16 requests that run, 256 may wait
        prompts = [[1 + i % 7, 2, 3] for i in range(300)]
        answers = llm.generate(prompts, max_tokens=4)
        assert [list(a.prompt_tokens) for a in answers] == prompts
        assert all(a.tokens == answers[i % 7].tokens for i, a in enumerate(answers))


def test_a_chat_of_several_turns(llm: LLM) -> None:
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    messages += [llm.chat(messages).message, {"role": "user", "content": QUESTION}]
    answer = llm.chat(messages)
    assert len(answer.prompt_tokens) > 2 * len(llm.chat(QUESTION).prompt_tokens)


def test_the_pieces_of_a_stream_join_to_the_answer(llm: LLM) -> None:
    stream = llm.stream(QUESTION, trace=True)
    assert stream.answer is None
    pieces = list(stream)
    assert len(pieces) > 1 and stream.answer is not None
    assert "".join(pieces) == stream.answer.text == llm.chat(QUESTION).text
    assert stream.answer.trace is not None
    assert list(stream) == []
    with pytest.raises(ValueError, match="temperature"):
        llm.stream(QUESTION, temperature=-1)
    with pytest.raises(ValueError):
        llm.stream(["a", "b"])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="call chat with n"):
        llm.stream("a", n=2)  # type: ignore[call-arg]


def busy(llm: LLM) -> int:
    load = llm._session.service.engine.load
    return load.running + load.waiting


def wait_until_idle(llm: LLM) -> None:
    for _ in range(300):
        if not busy(llm):
            return
        threading.Event().wait(0.1)
    raise AssertionError(f"{busy(llm)} requests go on")


def test_a_stream_that_is_left_half_way_frees_the_engine(llm: LLM) -> None:
    long = {"ignore_eos": True, "max_tokens": 900, "method": "single"}
    for piece in llm.stream(QUESTION, **long):
        assert piece
        break
    gc.collect()
    wait_until_idle(llm)
    with llm.stream(QUESTION, **long) as stream:
        next(stream)
    wait_until_idle(llm)
    assert list(stream) == [] and stream.answer is None
    assert llm.chat(QUESTION).text.endswith("19")


def test_threads_share_one_engine(llm: LLM) -> None:
    expected = llm.chat(QUESTION).text
    with ThreadPoolExecutor(12) as pool:
        assert {a.text for a in pool.map(lambda _: llm.chat(QUESTION), range(24))} == {expected}


def test_a_trace_is_drawn(llm: LLM, tmp_path: Path) -> None:
    answer = llm.chat(QUESTION, trace=True)
    assert answer == answer and answer.text == llm.chat(QUESTION).text
    assert answer.trace is not None and len(answer.trace) == answer.forwards
    html = answer._repr_html_()
    assert html is not None and html.startswith("<iframe") and 'srcdoc="&lt;!DOCTYPE html&gt;' in html
    assert "://" not in answer.trace.page
    page = answer.trace.write(tmp_path / "trace.html")
    data = json.loads(page.read_text().split('<script id="data" type="application/json">')[1].split("</script>")[0])
    (side,) = data["sides"]
    assert data["note"] == QUESTION and side["num_slots"] == 4 and len(side["frames"]) == answer.forwards
    cells = dict(enumerate(side["prompt_tokens"]))
    for frame in side["frames"]:
        for slot in frame["slots"]:
            if slot["state"] != "DUMMY":
                cells |= {
                    (slot["block"] - 1) * side["block_size"] + i: token for i, token in enumerate(slot["tokens"])
                }
    start = side["num_prompt"]
    assert [cells[start + i] for i in range(len(answer.tokens))] == list(answer.tokens)
    assert side["frames"][-1]["num_tokens"] == len(answer.tokens) and side["end"] == start + len(answer.tokens)
    with pytest.raises(ValueError):
        answer.trace.write(page)


class Count(BaseModel):
    pens: int


def weather(city: str) -> str:
    """The weather of a city.

    Args:
        city: its name

    Returns:
        a sentence
    """
    return city


def test_structured_answers_and_tools(llm: LLM) -> None:
    assert llm.chat(QUESTION, choice=["19", "20"]).text in ("19", "20")
    for schema in (Count, Count.model_json_schema(), json.dumps(Count.model_json_schema())):
        assert isinstance(json.loads(llm.chat(QUESTION, schema=schema, max_tokens=60).text)["pens"], int)
    asked = {"tools": [weather], "tool_choice": "required", "max_tokens": 100}
    answer = llm.chat(QUESTION, **asked)
    assert answer.finish_reason == "tool_calls" and answer.text == ""
    assert answer.tool_calls[0]["function"]["name"] == "weather"
    call = answer.tool_calls[0]["id"]
    turns: list[Any] = [{"role": "user", "content": "a"}, answer.message]
    turns.append({"role": "tool", "tool_call_id": call, "content": "sunny"})
    assert llm.chat(turns, **SHORT).prompt_tokens
    stream = llm.stream(QUESTION, **asked)
    assert "".join(stream) == "" and stream.answer is not None
    assert stream.answer.tool_calls[0]["function"] == answer.tool_calls[0]["function"]
    assert llm.chat(QUESTION, logprobs=3, **SHORT).logprobs["content"][0]["top_logprobs"]  # type: ignore[index]
    assert llm.generate("Tom has", logprobs=True, ignore_eos=True, **SHORT).logprobs["token_logprobs"]  # type: ignore[index]


@pytest.mark.parametrize(
    ("keywords", "sentence"),
    [
        ({"temprature": 1}, "unknown keyword 'temprature'; is 'temperature' meant?"),
        ({"do_sample": True}, "unknown keyword 'do_sample': give temperature"),
        ({"num_return_sequences": 2}, "unknown keyword 'num_return_sequences': give n"),
        ({"method": 3}, "method=3 must be a method's name"),
        ({"tools": len}, "tools=<built-in function len> must be a list of functions"),
        ({"guided_regex": {1j}}, "guided_regex: 1j of type complex has no form in JSON"),
        ({"max_rows": 2}, "'max_rows' belongs to the model"),
        ({"temperature": "hot"}, "temperature: "),
        ({"buffer_size": 0}, "buffer_size=0 must be a whole number of at least 1"),
        ({"buffer_size": 9}, "buffer_size=9"),
        ({"method": "multy"}, "unknown method 'multy'; is 'multi' meant?"),
        ({"max_tokens": 10**6}, "max_tokens=995 fits|max_tokens=.* fits"),
        ({"max_tokens": 5, "max_new_tokens": 6}, "max_new_tokens=6 is another name of max_tokens"),
        ({"n": 0}, "n=0 must be a whole number of at least 1"),
        ({"schema": 3}, "schema: 3 is no JSON schema"),
        ({"tools": [len]}, "tools: len cannot be described"),
        ({"stop": [object()]}, "has no form in JSON"),
        ({"decoding": 3}, "decoding=3 must be an object"),
        ({"regex": "("}, "guided_regex: "),
    ],
)
def test_what_cannot_be_honoured_is_refused_in_a_sentence(llm: LLM, keywords: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence) as caught:
        llm.chat(QUESTION, **keywords)
    assert "\n" not in str(caught.value)


def test_a_prompt_that_is_none_is_refused_before_any_is_decoded(llm: LLM) -> None:
    for messages in (3, None, b"a", [], [3], [{"role": "user"}], {"role": "nobody", "content": "a"}):
        with pytest.raises(ValueError, match=r"messages"):
            llm.chat(messages)  # type: ignore[call-overload]
    for prompt in (3, None, b"a", "", [10**9], [[]], ["a", 3], {"prompt": "a"}):
        with pytest.raises(ValueError, match=r"prompt"):
            llm.generate(prompt)  # type: ignore[call-overload]
    forwards = sum(llm._session.service.loaded.engine.counts.forwards.values())
    with pytest.raises(ValueError, match=r"positions \(number 2 of 3\)|\(number 2 of 3\)"):
        llm.generate(["a", "word " * 5000, "b"])
    assert sum(llm._session.service.loaded.engine.counts.forwards.values()) == forwards


@pytest.mark.parametrize(
    ("model", "settings", "sentence"),
    [
        ("nobodys", {}, "unknown model 'nobodys'"),
        ("s3x://a/b", {}, "unknown scheme 's3x'"),
        ("tiny-mbd", {"buffer_size": 0}, "buffer_size=0 must be a whole number of at least 1"),
        ("tiny-mbd", {"buffersize": 4}, "unknown setting 'buffersize'; is 'buffer_size' meant?"),
        ("tiny-mbd", {"temperature": 1}, "'temperature' belongs to a call"),
        ("tiny-mbd", {"gpu_memory_utilization": 0.5}, "give kv_memory_fraction"),
        ("tiny-mbd", {"max_rows": 0}, "max_rows=0 must be a whole number of at least 1"),
        ("tiny-mbd", {"canvas": {}}, "canvas needs a model with full attention"),
        ("tiny-mbd", {"block_size": 7}, "block_size=7 cannot be honoured"),
        ("tiny-mbd", {"fp8": "some"}, "fp8="),
    ],
)
def test_a_model_or_a_setting_that_cannot_be_honoured(model: str, settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        LLM(model, **settings)


def test_two_at_once_and_one_after_its_end(tiny_model_dir: Path) -> None:
    with LLM("tiny-mbd") as one, LLM(tiny_model_dir) as two:
        assert one.chat(QUESTION).text.endswith("19")
        assert two.chat(QUESTION, **SHORT).tokens
        with pytest.raises(TypeError):
            pickle.dumps(one)
    one.close()
    for ask in (one.chat, one.generate, one.stream):
        with pytest.raises(RuntimeError):
            ask("a")


def test_closing_ends_what_runs(tiny_model_dir: Path) -> None:
    llm = LLM(tiny_model_dir)
    stream = llm.stream(QUESTION, ignore_eos=True, max_tokens=100)
    next(stream)
    llm.close()
    with pytest.raises(RuntimeError):
        list(stream)


def test_closing_ends_a_request_that_waits_for_room(tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm, is_tried = LLM(tiny_model_dir), threading.Event()

    async def full(*_: Any, **__: Any) -> None:
        is_tried.set()
        raise TooManyRequests("no room")

    monkeypatch.setattr(llm._session.server, "chat", full)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(llm.chat, QUESTION, **SHORT)
        assert is_tried.wait(60)
        llm.close()
        with pytest.raises(RuntimeError, match="closed meanwhile"):
            answer.result(60)


def test_several_answers_have_a_progress_bar_where_it_is_asked_for(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from jobs.api import llm as module

    monkeypatch.setattr(module, "BAR_SECONDS", 0.0)
    prompts = [[5, 6, 7], [6, 7, 8], [7, 8, 9]]
    shown = llm.generate(prompts, use_tqdm=True, **SHORT)
    assert "3/3" in capsys.readouterr().err
    hidden = llm.generate(prompts, **SHORT)  # what tests print goes to no terminal
    assert capsys.readouterr().err == "" and [a.tokens for a in hidden] == [a.tokens for a in shown]
    with pytest.raises(ValueError, match="unknown keyword 'use_tqdm': leave it out; chat and generate take it"):
        llm.stream(QUESTION, use_tqdm=True)


def test_the_keywords_of_editors_are_those_that_are_taken() -> None:
    from jobs.api import keywords

    decoding = set(DecodingConfig.__dataclass_fields__)
    assert set(keywords.DecodingFields.__annotations__) == decoding
    engine = set(EngineConfig.__dataclass_fields__)
    assert set(keywords.Settings.__annotations__) == decoding | engine | {*keywords.ENDPOINT, "method"}
    for kind, hints in ((ChatRequest, keywords.ChatKeywords), (CompletionRequest, keywords.Keywords)):
        taken = keywords.request_fields(kind) | decoding | {*keywords.SAME, "method", "use_tqdm"}
        assert set(hints.__annotations__) <= taken, kind


SCRIPT = """
import os, signal, sys, threading
from mbd_core import LLM
llm = LLM("tiny-mbd", max_rows=2)
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background of a shell ignores it
threading.Timer(1.0, os.kill, [os.getpid(), signal.SIGINT]).start()
try:
    llm.generate([[5, 6, 7]] * 500, ignore_eos=True, max_tokens=900)
except KeyboardInterrupt:
    print("interrupted")
print(llm.chat(sys.argv[1]).text[-7:])
llm.stream("hello", ignore_eos=True, max_tokens=900)  # left running at the end
"""


def test_a_script_is_interrupted_and_ends_without_a_word(tmp_path: Path) -> None:
    """By Ctrl-C, which leaves the engine free; without a main guard, without `close`, and without Ray."""
    code = f"import sys; sys.modules['ray'] = None; sys.path.insert(0, {str(ROOT)!r})\n" + SCRIPT
    done = subprocess.run(
        [sys.executable, "-I", "-c", code, QUESTION], capture_output=True, text=True, cwd=tmp_path, timeout=120
    )
    assert (done.returncode, done.stdout.split()) == (0, ["interrupted", "####", "19"]), done.stderr
    assert "Traceback" not in done.stderr and "never awaited" not in done.stderr


def test_importing_the_core_is_quick() -> None:
    code = "import sys, mbd_core; assert 'LLM' in dir(mbd_core); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.stdout.strip() == "False", done.stderr
