"""Penalties, biases, ends, likeliest tokens and a chat's template as clients ask for them, over HTTP too."""

import asyncio
import json
import math
import shutil
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest
from family_models import rewrite
from gateway_in_process import running_gateway
from local_server import LIMIT, MODEL, ROUTES, answers, run, server_of

from actors.serving.args import ModelArgs, ServingArgs
from mbd_core.checkpoint.chat import unknown_variables
from mbd_core.engine.config import EngineConfig
from mbd_core.serving.api.errors import ApiError
from mbd_core.serving.api.messages import MessagesRequest
from mbd_core.serving.api.parsing import parse
from mbd_core.serving.api.requests import ChatRequest
from mbd_core.serving.server.model_route import first_seed

SAID = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}]}
GREEDY = {"decoding": {"buffer_size": 2, "tau_m2t": 0.02}, "return_token_ids": True, "max_tokens": 30}


@pytest.mark.parametrize(("fields", "seed"), [({"seed": 7}, 7), ({"temperature": 0, "seed": 7}, 7), ({}, 0)])
def test_a_given_seed_counts_at_temperature_0_too(fields: dict[str, Any], seed: int) -> None:
    """Methods like verify and renoise draw noise there."""
    assert first_seed(parse(ChatRequest, json.dumps(SAID | fields).encode())) == seed


def tokens(whole: list[dict[str, Any]]) -> list[int]:
    ids: list[int] = whole[0]["choices"][0]["token_ids"]
    return ids


PENALTIES, REPEATS = {"presence_penalty": 2, "frequency_penalty": 1.5}, {"repetition_penalty": 1.8}
BIAS, DRAWN = {"logit_bias": {"20": 50, "21": 49.5}}, {"temperature": 1.3, "min_p": 0.3, "seed": 5, "top_k": 50}


@pytest.mark.parametrize(
    ("route", "fields"),
    [
        ("complete", PENALTIES),
        ("chat", REPEATS),
        ("complete", BIAS),
        ("chat", DRAWN),
        *(
            pytest.param(*other, marks=pytest.mark.slow)
            for other in (("chat", PENALTIES), ("complete", REPEATS), ("chat", BIAS), ("complete", DRAWN))
        ),
    ],
)
def test_whole_streamed_resumed_and_several_answers_are_one(
    tiny_model_dir: Path, route: str, fields: dict[str, Any]
) -> None:
    """With one slot a stream that was cut goes on exactly; its penalties count the tokens that the client has."""
    asked = GREEDY | {"decoding": {"buffer_size": 1}, "ignore_eos": True} | fields
    drawn = "temperature" in fields
    plain, whole, events, several = answers(
        tiny_model_dir,
        (route, asked | dict.fromkeys(fields.keys() - {"temperature", "seed", "ignore_eos"})),
        (route, asked),
        (route, asked | {"stream": True, "resumable": True}),
        (route, asked | {"n": 2}),
    )
    assert tokens(whole) != tokens(plain)
    choices = [event["choices"][0] for event in events]
    assert [t for c in choices for t in c.get("token_ids", [])] == tokens(whole)
    assert several[0]["choices"][0]["token_ids"] == tokens(whole)
    assert (several[0]["choices"][1]["token_ids"] == tokens(whole)) is not drawn
    places = [c["resume"] for c in choices if "resume" in c]
    place = places[len(places) // 2]
    resume = place | {"token_ids": tokens(whole)[: place["num_tokens"]]}
    [rest] = answers(tiny_model_dir, (route, asked | {"stream": True, "resumable": True, "resume": resume}))
    assert [t for e in rest for t in e["choices"][0].get("token_ids", [])] == tokens(whole)[place["num_tokens"] :]


@pytest.mark.parametrize("route", ROUTES)
def test_a_stop_token_ends_an_answer_before_it(tiny_model_dir: Path, route: str) -> None:
    asked = GREEDY | {"ignore_eos": True}
    [free] = answers(tiny_model_dir, (route, asked))
    ids = tokens(free)
    ended, later, events = answers(
        tiny_model_dir,
        (route, asked | {"stop_token_ids": [ids[9]]}),
        (route, asked | {"stop_token_ids": [ids[9]], "min_tokens": 30}),
        (route, asked | {"stop_token_ids": [ids[9]], "stream": True}),
    )
    assert tokens(ended) == ids[: ids.index(ids[9])] and ended[0]["choices"][0]["finish_reason"] == "stop"
    whole, last = ended[0]["choices"][0], events[-1]["choices"][0]
    assert whole["stop_reason"] == last["stop_reason"] == ids[9] and free[0]["choices"][0]["stop_reason"] is None
    assert all("stop_reason" not in event["choices"][0] for event in events[:-1])
    assert ended[0]["usage"]["completion_tokens"] == len(tokens(ended))
    assert len(tokens(later)) == 30 and ids[9] not in tokens(later)
    assert [t for e in events for t in e["choices"][0].get("token_ids", [])] == tokens(ended)


def test_stop_strings_wait_for_min_tokens(tiny_model_dir: Path) -> None:
    asked = GREEDY | {"ignore_eos": True}
    [free] = answers(tiny_model_dir, ("complete", asked))
    letter = next(c for c in free[0]["choices"][0]["text"] if not c.isspace())
    short, longer = answers(
        tiny_model_dir,
        ("complete", asked | {"stop": ["@@", letter]}),
        ("complete", asked | {"stop": letter, "min_tokens": 12}),
    )
    assert (
        len(tokens(short)) < 12 < len(tokens(longer)) <= 30 and tokens(longer) == tokens(free)[: len(tokens(longer))]
    )
    assert short[0]["choices"][0]["stop_reason"] == letter


@pytest.mark.parametrize("route", ROUTES)
def test_what_has_no_effect_is_noted_and_answered(tiny_model_dir: Path, route: str) -> None:
    plain, noted, events, drawn = answers(
        tiny_model_dir,
        (route, GREEDY),
        (route, GREEDY | {"top_p": 0.9, "min_p": 0.1, "top_k": 3}),
        (route, GREEDY | {"top_p": 0.9, "stream": True}),
        (route, GREEDY | {"top_p": 0.9, "temperature": 1.0}),
    )
    assert noted[0]["choices"] == plain[0]["choices"] and "notes" not in plain[0]["mbd"]
    assert [note.split()[0] for note in noted[0]["mbd"]["notes"]] == ["top_p", "top_k", "min_p"]
    assert all("temperature" in note for note in noted[0]["mbd"]["notes"])
    assert len(events[-1]["mbd"]["notes"]) == 1 and "notes" not in drawn[0]["mbd"]


AUTHOR = {"do_sample": True, "temperature": 0.9, "top_k": 12, "top_p": 0.9, "repetition_penalty": 1.3}


def copy_with(folder: Path, tmp_path: Path, **generation: Any) -> Path:
    copy = tmp_path / "of-an-author"
    shutil.copytree(folder, copy)
    rewrite(copy / "generation_config.json", **generation)
    return copy


@pytest.mark.parametrize("route", ROUTES)
def test_what_a_request_leaves_out_is_as_the_author_says(tiny_model_dir: Path, tmp_path: Path, route: str) -> None:
    """Equal to a request that spells the author's values; its own values win, and each only over its own."""
    spelled = {name: value for name, value in AUTHOR.items() if name != "do_sample"}
    folder = copy_with(tiny_model_dir, tmp_path, **AUTHOR, max_new_tokens=11)
    asked = GREEDY | {"seed": 3, "ignore_eos": True}
    empty = {"max_tokens": None, "ignore_eos": True}
    revised = asked | {"decoding": {"t2t": {}}}
    plain = [
        (route, asked | spelled),
        (route, asked | spelled | {"temperature": 0}),
        (route, asked | spelled | {"top_k": 2}),
        (route, revised | {"temperature": 0.9, "top_k": 12, "top_p": 0.9}),
        ("complete", {"echo": True, "logprobs": 1, "max_tokens": 1}),
    ]
    fields = [{}, {"temperature": 0}, {"top_k": 2}]
    own = [(route, asked | each) for each in fields] + [(route, revised), plain[-1]]
    wanted, (*got, lengths, longer) = (
        answers(tiny_model_dir, *plain),
        answers(folder, *own, (route, empty), (route, empty | {"min_tokens": 20})),
    )
    assert [reply["choices"] for [reply] in got] == [reply["choices"] for [reply] in wanted]
    assert len({json.dumps(reply["choices"]) for [reply] in wanted[:3]}) == 3
    assert got[0][0]["mbd"]["seed"] == 3 and "seed" not in got[1][0]["mbd"]
    assert (lengths[0]["usage"]["completion_tokens"], longer[0]["usage"]["completion_tokens"]) == (11, 20)


def test_the_author_is_heard_unless_the_server_ignores_the_file(tiny_model_dir: Path, tmp_path: Path) -> None:
    """Without `do_sample` nothing is drawn, and a penalty counts all the same."""
    folder = copy_with(tiny_model_dir, tmp_path, **AUTHOR | {"temperature": None}, max_new_tokens=11)

    def in_force(folder: Path, **settings: Any) -> tuple[Any, ...]:
        server = server_of(folder, **settings)
        defaults = server.service.state()["defaults"]
        assert all(f"{name}={defaults[name]}" in server.service.describe() for name in ("temperature", "max_tokens"))
        asyncio.run(server.stop())
        return tuple(defaults.get(name) for name in ("temperature", "top_k", "repetition_penalty", "max_tokens"))

    assert in_force(folder) == (1.0, 12, 1.3, 11)
    assert in_force(folder, generation_config="ignore") == in_force(tiny_model_dir) == (0, None, None, 256)
    rewrite(folder / "generation_config.json", do_sample=False)
    assert in_force(folder) == (0, None, 1.3, 11)
    rewrite(folder / "generation_config.json", do_sample=True, top_k=-1)
    assert in_force(folder) == (1.0, 0, 1.3, 11), "no limit, as vLLM and SGLang write it"


def names(entry: dict[str, Any]) -> list[str]:
    return [entry["token"], *(top["token"] for top in entry["top_logprobs"])]


@pytest.mark.parametrize("stop", [None, " "])
def test_likeliest_tokens_have_the_shapes_of_openai(tiny_model_dir: Path, stop: str | None) -> None:
    asked = GREEDY | {"stop": stop, "logit_bias": {"20": 40}}
    chat, chat_events, text, text_events = answers(
        tiny_model_dir,
        *(("chat", asked | {"logprobs": True, "top_logprobs": 4, "stream": stream}) for stream in (False, True)),
        *(("complete", asked | {"logprobs": 4, "stream": stream}) for stream in (False, True)),
    )
    content = chat[0]["choices"][0]["logprobs"]["content"]
    pieces = [e["choices"][0]["logprobs"] for e in chat_events]
    streamed = [entry for p in pieces if p for entry in p["content"]]
    assert content and [names(entry) for entry in streamed] == [names(entry) for entry in content]
    others = 0
    for entry in content:
        tops = entry["top_logprobs"]
        assert len(tops) == 4 and set(tops[0]) == {"token", "logprob", "bytes"}
        assert [t["logprob"] for t in tops] == sorted((t["logprob"] for t in tops), reverse=True)
        assert sum(math.exp(t["logprob"]) for t in tops) <= 1 + 1e-6
        assert entry["logprob"] <= tops[0]["logprob"] + 1e-6
        others += entry["token"] != tops[0]["token"]
    assert others, "the bias has chosen no other token"
    columns = text[0]["choices"][0]["logprobs"]
    parts = [p["choices"][0]["logprobs"] for p in text_events if p["choices"] and p["choices"][0]["logprobs"]]
    assert [list(top) for p in parts for top in p["top_logprobs"]] == [list(top) for top in columns["top_logprobs"]]
    for token, logprob, top in zip(*(columns[n] for n in ("tokens", "token_logprobs", "top_logprobs")), strict=True):
        assert top[token] == pytest.approx(logprob, abs=1e-5) and len(top) in (3, 4, 5)


THINKS = (
    "{% if enable_thinking %}<think {{ depth }}>{% endif %}{% for d in documents or [] %}[{{ d.text }}]{% endfor %}"
)


@pytest.fixture
def thinking_model(tiny_model_dir: Path, tmp_path: Path) -> Path:
    """A model whose chat template has variables of its own."""
    from transformers import AutoTokenizer

    folder = tmp_path / "thinks"
    shutil.copytree(tiny_model_dir, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = THINKS + tokenizer.chat_template
    tokenizer.save_pretrained(folder)
    return folder


def prompts(folder: Path, *asked: dict[str, Any]) -> list[Any]:
    """The text of each chat's prompt, or the error it was refused with."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    found = answers(folder, *(("chat", {"return_token_ids": True, "max_tokens": 1} | fields) for fields in asked))
    return [
        each if isinstance(each, ApiError) else tokenizer.decode(each[0]["choices"][0]["prompt_token_ids"])
        for each in found
    ]


def test_a_chats_template_gets_its_variables_as_text(thinking_model: Path) -> None:
    from transformers import AutoTokenizer

    eos = AutoTokenizer.from_pretrained(thinking_model).eos_token
    plain, thinks, spelled, several = prompts(
        thinking_model,
        {},
        {"chat_template_kwargs": {"enable_thinking": True, "depth": 3}},
        {"chat_template_kwargs": {"enable_thinking": True, "depth": eos}},
        {"chat_template_kwargs": {"documents": [{"text": "a"}, {"text": "b"}]}},
    )
    assert (thinks, several) == (f"<think 3>{plain}", f"[a][b]{plain}")
    assert spelled == f"<think {eos}>{plain}"
    [noted, encoded] = answers(
        thinking_model,
        ("chat", {"chat_template_kwargs": {"enable_thinking": False, "nothing": 1}}),
        ("chat", {"chat_template_kwargs": {"enable_thinking": True, "depth": eos}, "return_token_ids": True}),
    )
    assert len(noted[0]["mbd"]["notes"]) == 1 and "nothing" in noted[0]["mbd"]["notes"][0]
    ids = encoded[0]["choices"][0]["prompt_token_ids"]
    first = ids[: len(ids) // 3]
    assert AutoTokenizer.from_pretrained(thinking_model).eos_token_id not in first, "what a client spells stays text"


def test_an_effort_sets_what_the_template_has_and_is_noted_where_it_has_nothing(
    thinking_model: Path, tiny_model_dir: Path, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    levels = tmp_path / "levels"
    shutil.copytree(tiny_model_dir, levels)
    tokenizer = AutoTokenizer.from_pretrained(levels)
    tokenizer.chat_template = "{% if reasoning_effort %}<{{ reasoning_effort }}>{% endif %}" + tokenizer.chat_template
    tokenizer.save_pretrained(levels)
    own = {"enable_thinking": False, "reasoning_effort": "max"}
    fields: list[dict[str, Any]] = [
        {},
        {"reasoning_effort": "high"},
        {"reasoning_effort": "none"},
        {"reasoning_effort": "low", "chat_template_kwargs": own},
    ]
    plain, *switched = prompts(thinking_model, *fields)
    assert switched == [f"<think >{plain}", plain, plain]
    assert prompts(levels, *fields) == [plain, f"<high>{plain}", plain, f"<max>{plain}"]
    for folder, noted in ((thinking_model, 0), (levels, 0), (tiny_model_dir, 1)):
        [whole, none] = answers(folder, ("chat", GREEDY | fields[1]), ("chat", GREEDY | fields[2]))
        assert len(whole[0]["mbd"].get("notes", ())) == noted and "notes" not in none[0]["mbd"]
    assert whole[0]["mbd"]["notes"][0].startswith("reasoning_effort has no effect")
    assert whole[0]["choices"] == none[0]["choices"]


def test_thinking_has_another_name_in_some_templates(thinking_model: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(thinking_model)
    tokenizer.chat_template = tokenizer.chat_template.replace("enable_thinking", "thinking")
    tokenizer.save_pretrained(thinking_model)
    on, off = {"enable_thinking": True}, {"thinking": False}
    plain, *thinks, own = prompts(
        thinking_model,
        {},
        {"chat_template_kwargs": on},
        {"reasoning_effort": "low"},
        {"reasoning_effort": "low", "chat_template_kwargs": off},
    )
    assert thinks == [f"<think >{plain}"] * 2 and own == plain
    budget = {"type": "enabled", "budget_tokens": 1024}
    [whole] = answers(thinking_model, ("chat", GREEDY | {"chat_template_kwargs": on}))
    assert "notes" not in whole[0]["mbd"]
    message = parse(MessagesRequest, json.dumps(SAID | {"max_tokens": 2048, "thinking": budget}).encode())
    assert message.chat.template_notes(partial(unknown_variables, tokenizer)) == []


def test_a_prompt_ends_where_the_client_says(tiny_model_dir: Path) -> None:
    turns = [{"role": "user", "content": "Tom has 3 pens."}, {"role": "assistant", "content": "He has  "}]
    begun, closed, goes_on, asked_for = prompts(
        tiny_model_dir,
        {"messages": turns},
        {"messages": turns, "add_generation_prompt": False},
        {"messages": turns, "continue_final_message": True, "add_generation_prompt": False},
        {"messages": turns[:1]},
    )
    assert begun.startswith(closed) and len(begun) > len(closed)
    assert closed.startswith(goes_on) and goes_on.endswith("He has  ")
    assert goes_on == asked_for + "He has  "


def test_tokenize_writes_a_chat_as_it_is_decoded(thinking_model: Path) -> None:
    asked = {
        "chat_template_kwargs": {"depth": 2},
        "reasoning_effort": "low",
        "add_generation_prompt": False,
    }
    [whole] = answers(thinking_model, ("chat", asked | {"return_token_ids": True}))
    server = server_of(thinking_model)

    async def scenario() -> list[Any]:
        found: list[Any] = [await server.tokenize(json.dumps(ROUTES["chat"] | asked).encode())]
        for name, value in {**asked, "continue_final_message": True}.items():
            with pytest.raises(ApiError) as refused:
                await server.tokenize(json.dumps({"prompt": "x", name: value}).encode())
            found.append(refused.value.param == name)
        return found

    tokenized, *named = run(server, scenario)
    assert tokenized["tokens"] == whole[0]["choices"][0]["prompt_token_ids"] and named == [True] * 4


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"add_generation_prompt": False}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"eos_token": "x"}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"a b": 1}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"documents": 5}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs"),
        ({"reasoning_effort": "a little"}, "reasoning_effort"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "add_generation_prompt"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"presence_penalty": -2.1}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"logit_bias": {"05": 1}}, "logit_bias"),
        ({"logit_bias": {"99999": 1}}, "logit_bias"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
        ({"stop_token_ids": [99999]}, "stop_token_ids"),
        ({"stop_token_ids": [5] * 129}, "stop_token_ids"),
        ({"min_tokens": 61}, "min_tokens"),
        ({"min_tokens": 5, "guided_regex": "[ab]{9}"}, "min_tokens"),
        ({"stop_token_ids": [5], "guided_regex": "[ab]{9}"}, "stop_token_ids"),
        ({"frequency_penalty": 1, "decoding": {"soft": {}}}, "frequency_penalty"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(thinking_model: Path, fields: dict[str, Any], param: str) -> None:
    [error] = answers(thinking_model, ("chat", fields))
    assert isinstance(error, ApiError), error
    assert (error.status, error.param) == (400, param) and len(error.message) < 400


def test_a_grammar_chooses_among_allowed_tokens_after_the_changes(tiny_model_dir: Path) -> None:
    """A bias prefers one of two letters, and a penalty lets them take turns."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    ids = {letter: tokenizer.convert_tokens_to_ids(letter) for letter in "xz"}
    asked = {"guided_regex": "[xz]{12}", "decoding": {"buffer_size": 1, "tau_m2t": 1.0}, "logprobs": 0}
    biased = {name: {str(ids[name]): 30} for name in "xz"}
    x, z, fair = answers(
        tiny_model_dir,
        *(("complete", asked | {"logit_bias": biased[name]}) for name in "xz"),
        ("complete", asked | {"frequency_penalty": 2, "temperature": 0.01, "seed": 1}),
    )
    assert (x[0]["choices"][0]["text"], z[0]["choices"][0]["text"]) == ("x" * 12, "z" * 12)
    text = fair[0]["choices"][0]["text"]
    assert set(Counter(text)) == {"x", "z"}
    assert all(0 >= v > -99 for v in fair[0]["choices"][0]["logprobs"]["token_logprobs"])


@pytest.mark.slow
def test_openais_client_gets_what_it_asks_for(tiny_model_dir: Path) -> None:
    sizes = EngineConfig(max_rows=2, num_pages=64)
    args = ServingArgs(device="cpu", models=[ModelArgs(model=str(tiny_model_dir), name=MODEL, engine=sizes)])
    with running_gateway(args) as (url, _), openai.OpenAI(base_url=f"{url}/v1", api_key="x", timeout=LIMIT) as client:
        messages: Any = [{"role": "user", "content": "Tom has 3 apples."}]
        answer = client.chat.completions.create(
            model=MODEL,
            messages=messages,
            top_p=0.9,
            presence_penalty=0.5,
            frequency_penalty=0.5,
            logit_bias={"20": 5},
            logprobs=True,
            top_logprobs=3,
            max_tokens=20,
            extra_body={
                "min_tokens": 10,
                "repetition_penalty": 1.1,
                "chat_template_kwargs": {"enable_thinking": False},
            },
        )
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None and logprobs.content is not None and len(logprobs.content) >= 10
        assert all(len(each.top_logprobs) == 3 for each in logprobs.content)
        assert answer.model_extra is not None and len(answer.model_extra["mbd"]["notes"]) == 2
        text = client.completions.create(model=MODEL, prompt="Tom", logprobs=5, max_tokens=8)
        assert text.choices[0].logprobs is not None and text.choices[0].logprobs.top_logprobs is not None
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(model=MODEL, messages=messages, presence_penalty=3)
        assert refused.value.param == "presence_penalty"
