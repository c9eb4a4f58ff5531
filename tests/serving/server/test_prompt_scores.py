"""`echo` with `logprobs`: a prompt's log-probabilities are the definition's, in the shape that lm_eval reads."""

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import pytest
from local_server import LIMIT, MODEL, answers, openai_client, server_of
from step_replay import text_log_probabilities

from mbd_core.checkpoint.loading import load_model
from mbd_core.checkpoint.tokenizer import load_tokenizer
from mbd_core.models.decoder import Decoder
from mbd_core.serving.api.errors import ApiError
from mbd_core.serving.text.logprobs import ChoiceLogprobs

ASKED = {"echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0, "seed": 1234}  # as lm_eval asks
PROMPTS = ["Tom has 3 pens and buys", "2 + 2 = 4\n", "x"]


@pytest.fixture(scope="module")
def model(tiny_model_dir: Path) -> Decoder:
    return load_model(tiny_model_dir)


def ids_of(folder: Path, text: str) -> list[int]:
    from mbd_core.checkpoint.config import load_config

    return list(load_tokenizer(folder, load_config(folder)).encode(text, split_special_tokens=True))


def lm_eval_s_reading(choice: dict[str, Any], context_length: int) -> tuple[float, bool]:
    """What lm_eval's local-completions makes of a choice: the continuation's log-likelihood, and whether it is greedy.
    The last token is the one that was generated."""
    logprobs = choice["logprobs"]
    part = slice(context_length, -1)
    total = sum(logprobs["token_logprobs"][part])
    pairs = zip(logprobs["tokens"][part], logprobs["top_logprobs"][part], strict=True)
    return total, all(token == max(top, key=top.get) for token, top in pairs)


def test_lm_eval_reads_the_definition_s_log_likelihoods(tiny_model_dir: Path, model: Decoder) -> None:
    prompts = [ids_of(tiny_model_dir, text) for text in PROMPTS]
    [objects] = answers(tiny_model_dir, ("complete", ASKED | {"prompt": prompts}))
    choices = objects[0]["choices"]
    for ids, choice in zip(prompts, choices, strict=True):
        log_p_LV = text_log_probabilities(model, tuple(ids))
        expected = [float(row[token]) for row, token in zip(log_p_LV, ids[1:], strict=True)]
        logprobs = choice["logprobs"]
        assert {len(column) for column in logprobs.values()} == {len(ids) + 1}
        assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
        assert logprobs["token_logprobs"][1:-1] == pytest.approx(expected, abs=2e-4)
        for context in range(1, len(ids)):
            total, greedy = lm_eval_s_reading(choice, context)
            assert total == pytest.approx(sum(expected[context - 1 :]), abs=2e-3)
            rows, tokens = log_p_LV[context - 1 :].clone(), ids[context:]
            rows[:, model.config.mask_token_id] = -1e9
            assert greedy == (rows.argmax(-1).tolist() == tokens)
        assert "".join(logprobs["tokens"]).startswith(choice["text"][: logprobs["text_offset"][-1]])
        assert choice["finish_reason"] == "length"
    usage = objects[0]["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (sum(map(len, prompts)), 3)


def test_the_likeliest_continuation_is_greedy_and_another_is_not(tiny_model_dir: Path) -> None:
    start = ids_of(tiny_model_dir, PROMPTS[0])
    ids = list(start)
    for _ in range(5):
        [objects] = answers(tiny_model_dir, ("complete", ASKED | {"prompt": ids, "return_token_ids": True}))
        ids += objects[0]["choices"][0]["token_ids"]
    other = [*ids[:-1], (ids[-1] + 1) % 500]
    [objects] = answers(tiny_model_dir, ("complete", ASKED | {"prompt": [ids, other]}))
    (best, greedy), (less, not_greedy) = (lm_eval_s_reading(c, len(start)) for c in objects[0]["choices"])
    assert (greedy, not_greedy) == (True, False)
    assert best > less


def test_without_a_token_behind_it_the_prompt_stands_alone(tiny_model_dir: Path) -> None:
    one, zero, short, ids = answers(
        tiny_model_dir,
        ("complete", ASKED | {"prompt": PROMPTS[0]}),
        ("complete", ASKED | {"prompt": PROMPTS[0], "max_tokens": 0, "logprobs": 0}),
        ("complete", ASKED | {"prompt": [5], "max_tokens": 0}),
        ("complete", ASKED | {"prompt": PROMPTS[0], "return_token_ids": True}),
    )
    choice, with_one = zero[0]["choices"][0], one[0]["choices"][0]
    assert choice["text"] == PROMPTS[0]
    scores, beside = choice["logprobs"]["token_logprobs"], with_one["logprobs"]["token_logprobs"][:-1]
    assert scores[0] is beside[0] is None
    assert scores[1:] == pytest.approx(beside[1:], abs=1e-4)  # computed in a shape of its own
    assert choice["logprobs"]["top_logprobs"] is None
    assert zero[0]["usage"]["completion_tokens"] == 0
    assert short[0]["choices"][0]["logprobs"]["token_logprobs"] == [None]
    choice = ids[0]["choices"][0]
    assert choice["prompt_token_ids"] == ids_of(tiny_model_dir, PROMPTS[0]) and len(choice["token_ids"]) == 1


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 2}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0, "echo": False}, "max_tokens"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"frequency_penalty": 1}, "frequency_penalty"),
        ({"min_tokens": 1}, "min_tokens"),
        ({"stop_token_ids": [5]}, "stop_token_ids"),
        ({"logprobs": 2}, "logprobs"),
        ({"n": 2}, "n"),
        ({"stream": True}, "stream"),
        ({"stop": "x"}, "stop"),
        ({"decoding": {}}, "decoding"),
        ({"speed": 0.5}, "speed"),
        ({"guided_regex": "x"}, "guided_regex"),
        ({"return_step_map": True}, "return_step_map"),
        ({"prompt": [5] * 512}, "prompt"),
        ({"prompt": [5, 600]}, "prompt"),
        ({"prompt": []}, "prompt"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(tiny_model_dir: Path, fields: dict[str, Any], param: str) -> None:
    [error] = answers(tiny_model_dir, ("complete", ASKED | fields))
    assert isinstance(error, ApiError), json.dumps(error)
    assert (error.status, error.param) == (400, param), error.message


def test_openai_s_client_reads_it(tiny_model_dir: Path) -> None:
    import asyncio

    async def scenario() -> None:
        server = server_of(tiny_model_dir)
        try:
            completions = openai_client(server).completions
            answer = await completions.create(model="tiny", prompt=PROMPTS[0], echo=True, logprobs=1, max_tokens=1)
            logprobs = answer.choices[0].logprobs
            assert logprobs is not None and logprobs.tokens is not None and logprobs.token_logprobs is not None
            assert len(logprobs.tokens) == len(logprobs.token_logprobs)
        finally:
            await server.stop()

    asyncio.run(scenario())


HOSTILE = [
    "\x00\x01\x7f\x1b[31m",
    "\u202eabc\u202c\u200b\ufeff",  # turns around, joins, marks
    "e\u0301 \u1100\u1161\u11a8 \u0645\u064e",  # characters of several code points
    "\U0001f468\u200d\U0001f469\u200d\U0001f467 \U0010ffff \ufffd",
    '</script><!-- "}]} \\u0000 \\ud83d data: [DONE]\n\ndata: {',
    "\r\n\u2028\u2029\x85\t" * 3,
    "<|mask|><|im_start|><eos>" * 3,
    "bytes:\\xe6",  # what completions name a piece of a character
]


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_characters_come_back_as_they_were_sent(tiny_model_dir: Path, text: str) -> None:
    ids = ids_of(tiny_model_dir, text)
    [objects] = answers(tiny_model_dir, ("complete", ASKED | {"prompt": text, "max_tokens": 0}))
    (choice,) = json.loads(json.dumps(objects[0]))["choices"]
    logprobs = choice["logprobs"]
    assert choice["text"] == text
    assert {len(column) for column in logprobs.values()} == {len(ids)}
    assert all(score is None or -10_000 < score <= 0 for score in logprobs["token_logprobs"])
    offsets = logprobs["text_offset"]
    assert offsets == sorted(offsets) and offsets[0] >= 0 and offsets[-1] <= len(text)
    whole = [token for token in logprobs["tokens"] if not token.startswith("bytes:")]
    assert all(token in text for token in whole)
    assert objects[0]["usage"]["prompt_tokens"] == len(ids)


def test_half_a_character_is_a_400(tiny_model_dir: Path) -> None:
    server = server_of(tiny_model_dir)
    body = b'{"model": "tiny", "prompt": "a\\ud83d", "echo": true, "logprobs": 1, "max_tokens": 1}'

    async def scenario() -> None:
        with pytest.raises(ApiError) as refused:
            await server.complete(body)
        assert refused.value.status == 400
        await server.stop()

    asyncio.run(scenario())


def test_entries_are_made_beside_the_gateway_s_loop(tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other requests go on meanwhile: the entries wait here for what the loop does after it has handed them over."""
    server, begun, going_on = server_of(tiny_model_dir), threading.Event(), threading.Event()
    add, made = ChoiceLogprobs.columns, list[bool]()

    def waiting(entries: ChoiceLogprobs, *arguments: Any) -> Any:
        begun.set()
        made.append(going_on.wait(timeout=5.0))
        return add(entries, *arguments)

    monkeypatch.setattr(ChoiceLogprobs, "columns", waiting)
    body = json.dumps({"model": MODEL, "prompt": PROMPTS, **ASKED}).encode()

    async def scenario() -> None:
        answer = await server.complete(body)
        whole = asyncio.create_task(answer.whole())
        while not whole.done():
            await asyncio.sleep(0.01)
            if begun.is_set():
                going_on.set()  # never, where the loop itself waits
        assert len((await whole)["choices"]) == len(PROMPTS)
        await server.stop()

    asyncio.run(asyncio.wait_for(scenario(), LIMIT))
    assert made == [True] * len(PROMPTS)


def test_a_prompt_that_is_not_scored_to_its_end_is_an_error(tiny_model_dir: Path) -> None:
    server = server_of(tiny_model_dir)
    body = json.dumps({"model": MODEL, "prompt": [5 + n % 300 for n in range(200)], **ASKED}).encode()

    async def scenario() -> None:
        answer = await server.complete(body)
        whole = asyncio.create_task(answer.whole())
        while await server.service.engine.abort_all() == 0:
            await asyncio.sleep(0)
        with pytest.raises(ApiError) as refused:
            await whole
        assert refused.value.status == 503
        await server.stop()

    asyncio.run(asyncio.wait_for(scenario(), LIMIT))
