"""Drafts change no token: self-speculation is decoding token by token, on any weights, under any load."""

import dataclasses
import json
import pickle
import random
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from adapter_folders import merged, write_adapter
from small_engines import MASK, VOCAB, B, build, engine, request

from mbd_core.decoding.blocks.causal_config import Causal, Thinking
from mbd_core.decoding.blocks.config import DecodingConfig
from mbd_core.decoding.blocks.request import Request
from mbd_core.decoding.blocks.sampling_config import Sampling
from mbd_core.engine.engine import Engine
from mbd_core.engine.sequences.admission import RequestRefused
from mbd_core.models.decoder import Decoder, init_weights
from mbd_core.models.rope_scaling import YarnScaling

PLAIN = Causal(method="ar")
YARN = YarnScaling(factor=8.0, original_max_position_embeddings=16, llama_4_scaling_beta=0.1)


@pytest.fixture(scope="module")
def model() -> Decoder:
    return build("NemotronLabsDiffusionModel", attention="causal", qk_norm=False, rope_scaling=YARN)


def redrawn(model: Decoder, seed: int) -> Decoder:
    """Other weights, whose drafts agree with the next token now and then."""
    init_weights(model, seed=seed, std=0.3)
    with torch.no_grad():
        model.lm_head.weight[MASK] = 0.0
    return model


def asked(rng: random.Random, causal: Causal, name: str, **changes: Any) -> Request:
    decoding = DecodingConfig(block_size=B, causal=causal)
    return request(name, rng.randrange(10**6), "ar", **({"decoding": decoding, "logprobs": False} | changes))


def as_ar(r: Request) -> Request:
    return dataclasses.replace(r, decoding=DecodingConfig(block_size=B, causal=PLAIN))


def tokens(served: Engine, requests: list[Request]) -> list[tuple[tuple[int, ...], str]]:
    return [(o.tokens, o.finish_reason) for o in served.generate(requests)]


@pytest.mark.parametrize("seed", [0, 1, 4, 5, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3, 6, 7))])
def test_self_speculation_is_token_by_token(model: Decoder, seed: int) -> None:
    """Greedy and drawn, with penalties and bans, ends anywhere, in batches, with drafts of any length."""
    rng = random.Random(seed)
    redrawn(model, seed)
    requests = []
    for i in range(5):
        sampling = Sampling(
            temperature=rng.choice((0.0, 0.0, 0.7)),
            top_k=rng.choice((0, 5)),
            seed=i,
            frequency_penalty=rng.choice((0.0, 0.0, 0.5)),
            repetition_penalty=rng.choice((1.0, 1.3)),
        )
        causal = Causal(block_length=rng.choice((None, 1, 2, 7, 16)), tau=rng.choice((None, None, 0.1, 0.5)))
        ends = {"stop_token_ids": tuple(rng.sample(range(2, VOCAB), 2)), "min_tokens": rng.choice((0, 0, 1))}
        requests.append(asked(rng, causal, f"r{i}", sampling=sampling, **ends))
    wanted = tokens(engine(model), [as_ar(r) for r in requests])
    assert tokens(engine(model), requests) == wanted
    assert tokens(engine(model, batch_invariant=False, max_rows=3, num_pages=30), requests) == wanted


@pytest.mark.parametrize("seed", [0, 1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_draft_beside_the_verification_changes_no_token(model: Decoder, seed: int) -> None:
    """One forward for a draft and its verification: the tokens of `ar`, in fewer forwards than with a draft apart."""
    rng = random.Random(seed)
    redrawn(model, seed)
    requests = [
        asked(rng, Causal(block_length=rng.choice((2, 4, 5)), ahead=True), f"r{i}", max_tokens=20, ignore_eos=i > 1)
        for i in range(5)
    ]
    wanted = tokens(engine(model), [as_ar(r) for r in requests])
    assert tokens(engine(model, batch_invariant=False), requests) == wanted
    found = engine(model).generate(requests)
    assert [(o.tokens, o.finish_reason) for o in found] == wanted
    apart = [
        dataclasses.replace(
            r, decoding=dataclasses.replace(r.decoding, causal=dataclasses.replace(r.decoding.causal, ahead=False))
        )
        for r in requests
    ]
    forwards = [sum(o.counts.num_forwards for o in outputs) for outputs in (found, engine(model).generate(apart))]
    assert forwards[0] < forwards[1]


def test_a_busy_engine_goes_on_token_by_token(model: Decoder) -> None:
    """Under a budget of two blocks requests draft, stop when others come, and draft again: no token changes."""
    redrawn(model, 3)
    rng = random.Random(1)
    requests = [asked(rng, Causal(block_length=8), f"r{i}", max_tokens=40 - 8 * i, ignore_eos=True) for i in range(4)]
    requests.append(asked(rng, Causal(block_length=8), "kept", max_tokens=20, ignore_eos=True))
    requests[-1] = dataclasses.replace(
        requests[-1], decoding=dataclasses.replace(requests[-1].decoding, adaptive=False)
    )
    wanted = tokens(engine(model), [as_ar(r) for r in requests])
    served = engine(model, batch_invariant=False, block_budget=2)
    for r in requests:
        served.add(r)
    outputs, kinds = {}, {r.request_id: set() for r in requests}
    while served.has_work:
        running = len(served.scheduler.running) + len(served.scheduler.waiting)
        step = served.launch(served.schedule())
        for run in served._seating.planned.running:
            kinds[run.sequence.request.request_id].add((run.plan.queries[0].drafts, running))
        outputs |= {s.request_id: s.output for s in served.collect(step) if s.output is not None}
    assert [(outputs[r.request_id].tokens, outputs[r.request_id].finish_reason) for r in requests] == wanted
    for name, seen in kinds.items():
        assert any(drafts and running > 2 for drafts, running in seen) == (name == "kept")
    assert any(drafts for drafts, _ in kinds["r0"])


def test_pages_hold_committed_tokens_alone(model: Decoder) -> None:
    """What a draft wrote, and a verified row behind the last token that agrees, is never found by another request."""
    redrawn(model, 5)
    served, rng = engine(model), random.Random(2)
    first = asked(rng, Causal(block_length=8), "a", prompt=tuple(range(2, 15)), max_tokens=30, ignore_eos=True)
    (answer,) = served.generate([first])
    second = dataclasses.replace(first, request_id="b", prompt=(*first.prompt, *answer.tokens, 5, 6), max_tokens=12)
    (cached,) = served.generate([second])
    (alone,) = engine(model, prefix_caching=False).generate([second])
    assert cached.counts.num_cached_tokens == (len(first.prompt) + 30 - 1) // 8 * 8
    assert cached.tokens == alone.tokens
    chunked = engine(model, max_prefill_tokens=5, batch_invariant=False).generate([second])[0]
    assert chunked.tokens == alone.tokens and chunked.counts.num_prefill_forwards == 10


@pytest.mark.parametrize("method", ["ar", "linear_spec", "dlm"])
def test_an_answer_goes_on_in_another_engine(model: Decoder, method: str) -> None:
    redrawn(model, 7)
    rng = random.Random(3)
    r = asked(rng, Causal(method=method), "a", max_tokens=24, ignore_eos=True, sampling=Sampling())
    (whole,) = engine(model).generate([r])
    (rest,) = engine(model).generate([dataclasses.replace(r, committed=whole.tokens[: 3 * B])])
    assert rest.tokens == whole.tokens


@pytest.mark.parametrize("block_length", [2, 3])
def test_a_forced_end_of_thinking_fills_a_short_draft(model: Decoder, block_length: int) -> None:
    """A draft of the next token and the forced one has no mask left, so it is verified at once."""
    causal = Causal(block_length=block_length, thinking=Thinking(budget=3, end_token_id=9))
    r = asked(random.Random(1), causal, "a", max_tokens=12, ignore_eos=True)
    answer = engine(redrawn(model, 1)).generate([r])[0].tokens
    assert len(answer) == 12
    assert 9 in answer[3:6]


@pytest.mark.parametrize("context", ["causal", "full"])
def test_drawn_blocks_go_on_in_another_engine(model: Decoder, context: Literal["causal", "full"]) -> None:
    """With the noise of the forwards that would have followed, wherever the answer is cut."""
    redrawn(model, 7)
    causal = Causal(method="dlm", tau=0.3, context=context)
    sampling = Sampling(temperature=0.9, seed=5)
    r = asked(random.Random(3), causal, "a", max_tokens=24, ignore_eos=True, sampling=sampling)
    served = engine(model)
    served.add(r)
    steps = []
    while served.has_work:
        steps += served.step()
    answer = tuple(t for step in steps for t in step.piece.tokens)
    number = 0
    for step in steps[:-1]:
        number += len(step.piece.tokens)
        there = dataclasses.replace(r, committed=answer[:number], first_forward=step.counts.num_forwards)
        assert engine(model).generate([there])[0].tokens == answer
    assert number == 20


def test_what_cannot_be_had_is_refused_in_a_sentence(model: Decoder) -> None:
    from mbd_core.decoding.grammar.grammar import Grammar

    rng, served, blocks = random.Random(4), engine(model), build()
    plain = asked(rng, Causal(), "a", sampling=Sampling())
    for changes, message in (
        (
            {"decoding": DecodingConfig(block_size=B, buffer_size=2)},
            "decodes with ar or linear-spec or dlm, not block by block in a buffer; "
            "let its decoding name causal, such as",
        ),
        ({"grammar": Grammar(syntax="regex", text="a*"), "ignore_eos": False}, "no guide follows drafts"),
        ({"frames": True}, "causal has none"),
        ({"rollout": True}, "with causal"),
        ({"logprobs": True, "top_logprobs": 2}, "with causal"),
        ({"decoding": DecodingConfig(block_size=B, causal=Causal(block_length=99))}, "32 positions of this engine"),
        (
            {"decoding": DecodingConfig(block_size=B, causal=Causal(block_length=8, ahead=True))},
            "72 positions of a forward",
        ),
        (
            {
                "decoding": DecodingConfig(block_size=B, causal=Causal(block_length=3, ahead=True)),
                "min_tokens": 1,
            },
            "causal.ahead takes no logit_bias",
        ),
        ({"decoding": DecodingConfig(block_size=B, causal=Causal(draft_adapter="x"))}, "'x' is not loaded"),
        (
            {"decoding": DecodingConfig(block_size=B, causal=Causal(thinking=Thinking(budget=1, end_token_id=99)))},
            "outside the vocabulary",
        ),
    ):
        with pytest.raises(RequestRefused, match=message) as caught:
            served.add(dataclasses.replace(plain, **changes))
        assert "\n" not in str(caught.value)
    with pytest.raises(RequestRefused, match="causal needs a model that predicts the next token by causal rows"):
        engine(blocks).add(plain)
    for fields, message in (
        ({"buffer_size": 2}, "buffer_size=2 has no meaning with causal"),
        ({"causal": Causal(method="dlm", context="full"), "prefix_cache": True}, "prefix_cache=True"),
    ):
        with pytest.raises(ValueError, match=message):
            DecodingConfig(block_size=B, **({"causal": Causal()} | fields))
    with pytest.raises(ValueError, match=r"leave out causal\.tau"):
        Causal(ahead=True, tau=0.5)
    for fields in (
        {"method": "ar", "ahead": True},
        {"method": "ar", "tau": 0.5},
        {"context": "full"},
        {"method": "dlm", "draft_adapter": "x"},
    ):
        with pytest.raises(ValueError, match=r"has no effect with causal\.method"):
            Causal(**fields)


@pytest.mark.parametrize("number", [30, pytest.param(1000, marks=pytest.mark.slow)])
def test_the_ar_mode_of_a_block_model_is_a_causal_models(number: int) -> None:
    """The same weights, greedy, in float32: token by token, by drafts, and beside requests that decode in blocks."""
    blocks, causal = build(ar_mode=True), build("NemotronLabsDiffusionModel", attention="causal")
    causal.load_state_dict(redrawn(blocks, 3).state_dict())
    rng = random.Random(5)
    requests = [
        asked(rng, rng.choice((PLAIN, Causal(), Causal(block_length=7))), f"r{i}", sampling=Sampling(), max_tokens=12)
        for i in range(number)
    ]
    wanted = tokens(engine(causal, batch_invariant=False), [as_ar(r) for r in requests])
    in_blocks = [request(f"b{i}", i, "multi", max_tokens=9) for i in range(5)]
    served = engine(blocks, batch_invariant=False)
    assert tokens(served, [*requests, *in_blocks])[:number] == wanted
    counts = [o.counts for o in engine(blocks).generate(requests)]
    assert sum(c.num_drafted_tokens for c in counts) > sum(c.num_confirmed_tokens for c in counts) > 0


def test_an_ar_mode_that_is_not_there_is_refused_in_a_sentence() -> None:
    shifted = {"shift_logits": True, "qk_norm": False, "qkv_bias": True}
    for model, causal, message in (
        (build(), PLAIN, "wrote ar_mode into its generation_config.json"),
        (build(ar_mode=True), Causal(method="dlm"), "take ar or linear-spec"),
        (build("Fast_dLLM_QwenForCausalLM", ar_mode=True, **shifted), Causal(), "take ar"),
    ):
        with pytest.raises(RequestRefused, match=message):
            engine(model).add(asked(random.Random(1), causal, "a", sampling=Sampling()))
    with pytest.raises(ValueError, match="a mode of models that attend in blocks"):
        build("LLaDAModelLM", attention="full", ar_mode=True)


def test_an_adapter_of_a_training_with_an_ar_loss_brings_the_mode(tmp_path: Path) -> None:
    """Its recipe says so; other adapters do not, nor does the base, and a copy leaves the check to the engine."""
    model = build()
    served = engine(model, max_adapters=2, max_rank=2)
    for name, weight in (("ar", 0.5), ("blocks", 0.0)):
        folder = write_adapter(tmp_path / name, model.config, seed=1)
        recipe = {"states": {"block_size": B, "ar_weight": weight}, "generation": {}}
        (folder / "recipe.json").write_text(json.dumps(recipe))
        served.load_adapter(name, folder)
    write_adapter(tmp_path / "foreign", model.config, seed=2)  # no recipe: it has the base's mode
    plain = request("a", 4, "ar", decoding=DecodingConfig(block_size=B, causal=PLAIN), sampling=Sampling())
    copy = pickle.loads(pickle.dumps(served.admission))
    for adapter in ("blocks", None):
        with pytest.raises(RequestRefused, match="or the adapter of such a training"):
            served.add(replace(plain, adapter=adapter))
    copy.check(replace(plain, adapter="blocks"))
    (output,) = served.generate([replace(plain, adapter="ar")])
    wanted = engine(with_ar_mode(merged(model, tmp_path / "ar"))).generate([plain])[0]
    assert output.tokens == wanted.tokens
    of_mode = engine(with_ar_mode(model), max_adapters=2, max_rank=2)
    for name in ("blocks", "foreign"):
        of_mode.load_adapter(name, tmp_path / name)
    with pytest.raises(RequestRefused, match="or the adapter of such a training"):  # it has unlearned the mode
        of_mode.add(replace(plain, adapter="blocks"))
    assert of_mode.generate([replace(plain, adapter="foreign")])[0].tokens
    served.unload_adapter("ar")
    with pytest.raises(RequestRefused, match="is not loaded"):
        served.add(replace(plain, adapter="ar"))


def with_ar_mode(model: Decoder) -> Decoder:
    own = Decoder(replace(model.config, ar_mode=True))
    own.load_state_dict(model.state_dict())
    return own.eval()
