"""API requests become engine requests: checked once, refused by the client's field names, budgets that fit."""

from dataclasses import replace
from typing import Any

import pytest

from mbd_core.calls.thoughts import THOUGHT_FORMS, Thoughts
from mbd_core.decoding.blocks.canvas_config import Branches, Canvas
from mbd_core.decoding.blocks.config import DecodingConfig
from mbd_core.decoding.blocks.request import Request
from mbd_core.decoding.canvas.lane import num_lanes
from mbd_core.engine.sequences.admission import Admission
from mbd_core.models.model_config import ModelConfig
from mbd_core.serving.api.engine_requests import check_number, engine_requests
from mbd_core.serving.api.errors import ApiError
from mbd_core.serving.api.requests import MAX_TOKENS_DEFAULT, ChatRequest, CompletionRequest, GenerationRequest

MODEL = ModelConfig(
    architecture="SDARForCausalLM",
    vocab_size=48,
    hidden_size=32,
    intermediate_size=48,
    num_layers=1,
    num_heads=4,
    num_kv_heads=4,
    head_dim=8,
    rope_theta=1e4,
    rms_norm_eps=1e-6,
    max_positions=1024,
    tie_word_embeddings=False,
    mask_token_id=0,
    eos_token_ids=(1,),
    block_size=4,
)
DECODING = DecodingConfig(block_size=4)
GUIDED = DecodingConfig(block_size=4, canvas=Canvas(cfg_scale=1.0))
BLOCK_BATCH = DecodingConfig(block_size=4, canvas=Canvas(branches=Branches(block_lengths=(4, 8, 16))))


def admission(**changes: Any) -> Admission:
    sizes = {"block_size": 4, "buffer_size": 2, "page_size": 16, "num_pages": 100, "prefix_caching": True}
    model = changes.pop("model", MODEL)
    return Admission(model, max_positions=model.max_positions, **(sizes | changes))


def completion(**fields: Any) -> CompletionRequest:
    return CompletionRequest(model="m", prompt="x", **fields)


def build(asked: GenerationRequest, prompts: list[list[int]], limits: Admission, **changes: Any) -> list[Request]:
    options: dict[str, Any] = {"decoding": DECODING, "seed": 0}
    return engine_requests(asked, prompts, admission=limits, **(options | changes))


def test_without_a_budget_an_answer_gets_what_its_steps_can_be_spread_over() -> None:
    limits = admission(model=replace(MODEL, architecture="LLaDAModelLM", attention="full"))
    for canvas, max_tokens in (
        (Canvas(accept="quota", steps=400), 400),
        (Canvas(accept="quota", steps=3, block_length=8), 24),
    ):
        decoding = DecodingConfig(block_size=4, canvas=canvas)
        (request,) = build(completion(), [[5] * 10], limits, decoding=decoding)
        assert request.max_tokens == max_tokens


@pytest.mark.parametrize("schema", ["true", "[1]", "3"])
def test_a_schema_that_cannot_follow_thoughts_is_refused_by_its_field(schema: str) -> None:
    asked = ChatRequest(model="m", messages=[{"role": "user", "content": "x"}], guided_json=schema)
    with pytest.raises(ApiError, match="is no JSON object; give an object") as caught:
        build(asked, [[5]], admission(), thoughts=Thoughts(THOUGHT_FORMS[0], is_open=True))
    assert (caught.value.status, caught.value.param) == (400, "guided_json")


def test_choices_follow_prompt_by_prompt_and_draw_with_seeds_of_their_own() -> None:
    requests = build(completion(n=2, temperature=1.0, logprobs=0), [[5], [6, 7]], admission(), seed=40)
    assert [r.prompt for r in requests] == [(5,), (5,), (6, 7), (6, 7)]
    assert [r.sampling.seed for r in requests] == [40, 41, 40, 41]
    assert len({r.request_id for r in requests}) == 4
    assert all(r.logprobs for r in requests)


@pytest.mark.parametrize(
    ("prompt_length", "max_tokens"), [(1, MAX_TOKENS_DEFAULT), (900, 124), (1023, 1)], ids=["short", "long", "longest"]
)
def test_without_a_budget_an_answer_gets_what_fits(prompt_length: int, max_tokens: int) -> None:
    (request,) = build(completion(), [[5] * prompt_length], admission())
    assert request.max_tokens == max_tokens


def test_without_a_budget_a_block_batch_request_gets_what_its_lanes_leave_it() -> None:
    """Three lanes hold the prompt each, with 12 pages a lane. The client gave no `max_tokens` to be refused for."""
    assert BLOCK_BATCH.canvas is not None and num_lanes(BLOCK_BATCH.canvas, 64) == 3
    limits = admission(model=replace(MODEL, architecture="LLaDAModelLM", attention="full"), num_pages=36)
    (request,) = build(completion(), [[5] * 100], limits, decoding=BLOCK_BATCH)
    assert request.max_tokens == 12 * 16 - 100
    (request,) = build(completion(), [[5] * 200], limits, decoding=BLOCK_BATCH)
    assert request.max_tokens == 8, "the most that two lanes decode"
    with pytest.raises(ApiError, match="max_tokens") as caught:
        build(completion(max_tokens=93), [[5] * 100], limits, decoding=BLOCK_BATCH)
    assert caught.value.param == "max_tokens"
    with pytest.raises(ApiError, match=r"decoding.canvas"):
        build(completion(), [[5] * 300], limits, decoding=GUIDED)


@pytest.mark.parametrize(
    ("asked", "prompt", "param", "code", "message"),
    [
        (completion(), [], "prompt", "invalid_value", "prompt: the prompt is empty"),
        (completion(), [48], "prompt", "invalid_value", "prompt: prompt token 48 lies outside the vocabulary"),
        (completion(), [5] * 1024, "prompt", "context_length_exceeded", "prompt: 1024 tokens leave no room"),
        (completion(max_tokens=9), [5] * 1024, "prompt", "context_length_exceeded", "prompt: the prompt's 1024"),
        (completion(max_tokens=1020), [5] * 5, "max_tokens", "context_length_exceeded", "max_tokens: the prompt's 5"),
    ],
)
def test_a_refusal_names_the_client_s_field(
    asked: CompletionRequest, prompt: list[int], param: str, code: str, message: str
) -> None:
    with pytest.raises(ApiError) as caught:
        build(asked, [prompt], admission())
    assert (caught.value.status, caught.value.param, caught.value.code) == (400, param, code)
    assert caught.value.message.startswith(message)


def test_a_refusal_names_fields_as_the_route_has_them() -> None:
    messages = [{"role": "user", "content": "x"}]
    chat = ChatRequest.model_validate({"model": "m", "messages": messages, "max_completion_tokens": 1020})
    for prompt, param in (([5] * 5, "max_completion_tokens"), ([5] * 1024, "messages"), ([], "messages")):
        with pytest.raises(ApiError) as caught:
            build(chat, [prompt], admission())
        assert caught.value.param == param
    with pytest.raises(ApiError, match="buffer_size=3") as caught:
        build(chat, [[5]], admission(), decoding=replace(DECODING, buffer_size=3))
    assert caught.value.param == "decoding"


@pytest.mark.parametrize(
    ("fields", "message", "param"),
    [
        ({"prompt": ["x"] * 11}, "prompt: 11 choices at once; this server takes at most 10", "prompt"),
        ({"prompt": "x", "n": 11}, "n: 11 choices at once; this server takes at most 10", "n"),
        ({"prompt": []}, "prompt: no prompt was given", "prompt"),
    ],
)
def test_the_number_of_choices_is_bounded(fields: dict[str, Any], message: str, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        check_number(CompletionRequest(model="m", **fields), 10)
    assert (caught.value.status, caught.value.param, caught.value.message) == (400, param, message)
    check_number(CompletionRequest(model="m", prompt=["x"] * 5, n=2), 10)
