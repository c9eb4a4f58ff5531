"""Verified drafts under a grammar: the tokens of block size 1 under the same grammar, in fewer forwards."""

import dataclasses
import json
import random
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from drawn_counts import chi_square
from llguidance.hf import from_tokenizer
from random_schemas import schema_requests
from small_engines import run_with_preemption

from mbd_core.checkpoint.tokenizer import grammars_of
from mbd_core.decoding.blocks.config import DecodingConfig
from mbd_core.decoding.blocks.request import Request
from mbd_core.decoding.blocks.sampling_config import Sampling
from mbd_core.decoding.blocks.verify_config import Verify
from mbd_core.decoding.causal.verified import DraftRound
from mbd_core.decoding.grammar.grammar import Grammar
from mbd_core.decoding.grammar.guide import Guide
from mbd_core.decoding.grammar.matchers import compile_grammar
from mbd_core.engine import engine as engine_module
from mbd_core.engine.config import EngineConfig
from mbd_core.engine.engine import Engine
from mbd_core.engine.schedule.draft_lengths import ConfirmedRates, DraftLengths
from mbd_core.engine.sequences.admission import RequestRefused
from mbd_core.models.decoder import Decoder, init_weights
from mbd_core.serving.tokens.load import LoadedModel, load_engine

B = 4
EXACT = Verify(exact=True, store="causal")
SIZES = EngineConfig(max_rows=4, num_pages=240, dtype="float32", buffer_size=3, batch_invariant=True)
EXACT_OF = {n: DecodingConfig(block_size=B, buffer_size=n, tau_add=0.0, verify=EXACT) for n in (1, 2, 3)}
GRAMMARS = [
    Grammar(syntax="regex", text="[a-z]{3,9}( [a-z]{2,5}){2};"),
    Grammar(syntax="regex", text="([a-z]+;)+end"),
    Grammar(syntax="lark", text='start: "a" /[b-k ]{5,30}/ "."'),
]


@pytest.fixture(scope="module")
def loaded(tiny_model_dir: Path) -> Iterator[LoadedModel]:
    """The tiny model, with weights whose drafts are often right."""
    with load_engine(tiny_model_dir, SIZES) as loaded:
        init_weights(loaded.engine.model, seed=11, std=0.1)
        yield loaded


def engine_of(loaded: LoadedModel, model: Decoder, **changes: Any) -> Engine:
    sizes = dataclasses.replace(SIZES, **changes)
    grammars = grammars_of(loaded.tokenizer, model.config)
    return Engine(model, sizes, vocab_limit=len(loaded.tokenizer), grammars=grammars)


def changed(loaded: LoadedModel, **changes: Any) -> Decoder:
    """The same weights in a model of another form."""
    model = Decoder(dataclasses.replace(loaded.engine.model.config, **changes))
    model.load_state_dict(loaded.engine.model.state_dict())
    return model.eval()


def asked(seed: int, grammar: Grammar | None, slots: int = 1, **fields: Any) -> Request:
    rng = random.Random(seed)
    given: dict[str, Any] = {
        "prompt": tuple(rng.choices(range(20, 300), k=rng.randint(1, 19))),
        "max_tokens": rng.choice((60, 120)),
        "decoding": DecodingConfig(block_size=B, buffer_size=slots, verify=EXACT),
        "logprobs": True,
        "grammar": grammar,
    }
    return Request(request_id=f"r{seed}", **given | fields)


def asked_schemas(loaded: LoadedModel, number: int) -> list[tuple[Request, dict[str, Any]]]:
    return schema_requests(loaded, number, lambda place, grammar, _: asked(place, grammar), seed=5)


def with_slots(request: Request, slots: int) -> Request:
    return dataclasses.replace(request, decoding=dataclasses.replace(request.decoding, buffer_size=slots))


@pytest.mark.parametrize("number", [4, pytest.param(8, marks=pytest.mark.slow)])
def test_answers_are_those_of_block_size_1_alone_batched_and_preempted(loaded: LoadedModel, number: int) -> None:
    """Of 1, 2 and 3 slots, beside rows without a grammar; all validate."""
    pairs = asked_schemas(loaded, number)
    requests = [request for request, _ in pairs] + [asked(20 + i, grammar) for i, grammar in enumerate(GRAMMARS)]
    single = DecodingConfig(block_size=1)
    wanted = engine_of(loaded, changed(loaded, block_size=1)).generate(
        [dataclasses.replace(r, decoding=single) for r in requests]
    )
    for (_, schema), output in zip(pairs, wanted, strict=False):
        text = loaded.tokenizer.decode(list(output.tokens), clean_up_tokenization_spaces=False)
        jsonschema.validate(json.loads(str(text)), schema)
    plain = [
        asked(40, None, 2, max_tokens=20, ignore_eos=True),
        asked(41, None, max_tokens=20, ignore_eos=True, decoding=DecodingConfig(block_size=B, buffer_size=3)),
    ]
    unguided = loaded.engine.generate(plain)
    preempted, forwards, pieces = partial(run_with_preemption, rng=random.Random(0)), [], {}
    for slots, decode in ((1, preempted), (2, Engine.generate), (3, preempted)):
        found = decode(loaded.engine, [with_slots(r, slots) for r in requests] + plain)
        got = [(o.tokens, o.finish_reason) for o in found]
        assert got == [(o.tokens, o.finish_reason) for o in wanted + unguided], slots
        assert sum(o.counts.num_confirmed_tokens for o in found[: len(requests)]) > 0
        forwards.append(sum(o.counts.num_forwards for o in found[: len(requests)]))
        pieces[slots] = [o.piece for o in found[: len(requests)]]
    alone = [loaded.engine.generate([with_slots(request, 2)])[0] for request in requests[::2]]
    assert [o.piece for o in alone] == pieces[2][::2]
    assert max(forwards) < sum(o.counts.num_forwards for o in wanted)


def test_answers_are_the_same_whatever_number_of_blocks_is_drafted(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [request for request, _ in asked_schemas(loaded, 4)]
    wanted = loaded.engine.generate(requests)
    rng, chosen = random.Random(0), set[int]()

    def choose(self: DraftLengths, rounds: list[DraftRound], rates: ConfirmedRates, *, num_running: int) -> int:
        number = rng.randint(1, len(rounds))
        chosen.add(number)
        return number

    monkeypatch.setattr(DraftLengths, "choose", choose)
    measured = DecodingConfig(block_size=B, buffer_size=3, verify=dataclasses.replace(EXACT, slots="measured"))
    found = loaded.engine.generate([dataclasses.replace(r, decoding=measured) for r in requests])
    assert [(o.tokens, o.finish_reason) for o in found] == [(o.tokens, o.finish_reason) for o in wanted]
    assert chosen == {1, 2, 3}


@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("grammar", [GRAMMARS[0], GRAMMARS[2]])
def test_tokens_are_those_of_a_literal_loop(loaded: LoadedModel, grammar: Grammar, shift: bool) -> None:
    """One token after another, each the likeliest of those that the matcher allows; also of a model whose logits
    predict the next position."""
    model = changed(loaded, shift_logits=shift)
    request = asked(2, grammar, decoding=DecodingConfig(block_size=B, verify=EXACT, carry=shift))
    [output] = engine_of(loaded, model).generate([request])
    eos = model.config.eos_token_ids[0]
    matcher = compile_grammar(from_tokenizer(loaded.tokenizer, n_vocab=len(loaded.tokenizer), eos_token=eos), grammar)
    tokens: list[int] = []
    while tokens[-1:] != [eos]:
        text = [*request.prompt, *tokens, *([] if shift else [model.config.mask_token_id])]
        logits_V = last_logits(model, text)
        bits = torch.frombuffer(bytearray(matcher.compute_bitmask()), dtype=torch.uint8)
        allowed_V = (bits[:, None] >> torch.arange(8) & 1).flatten()[: len(loaded.tokenizer)].bool()
        allowed_V[model.config.mask_token_id] = False
        tokens.append(int(logits_V[: len(allowed_V)].masked_fill(~allowed_V, -torch.inf).argmax()))
        if tokens[-1] != eos:
            assert matcher.consume_token(tokens[-1])
    assert list(output.tokens) == tokens[:-1] and output.finish_reason == "stop"
    assert output.counts.num_drafted_tokens


@torch.inference_mode()
def last_logits(model: Decoder, text: list[int]) -> torch.Tensor:
    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out[0].transpose(0, 1)

    return model.logits(model(torch.tensor(text), torch.arange(len(text)), attend))[-1]


def test_answers_are_the_same_where_guides_wait_for_their_turn(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [with_slots(request, 1 + i % 2) for i, (request, _) in enumerate(asked_schemas(loaded, 3))]
    requests += [asked(20 + i, GRAMMARS[i % 2], 1 + i % 3, max_tokens=60) for i in range(4)]
    wanted, waits = loaded.engine.generate(requests), list[bool]()
    plain_extend = Guide.extend

    def extend(guide: Guide, *args: Any, **kwargs: Any) -> list[tuple[int, float]]:
        tokens = plain_extend(guide, *args, **kwargs)
        waits.append(not tokens)
        return tokens

    monkeypatch.setattr(engine_module, "STEP_TRIES", 1)
    monkeypatch.setattr(Guide, "extend", extend)
    found = engine_of(loaded, loaded.engine.model, batch_invariant=False).generate(requests)
    assert [o.tokens for o in found] == [o.tokens for o in wanted]
    assert any(waits)


@pytest.mark.parametrize("stride", [7, pytest.param(3, marks=pytest.mark.slow)])
def test_a_resumed_answer_goes_on_inside_its_grammar(loaded: LoadedModel, stride: int) -> None:
    """Behind a whole block, as block size 1 does: the new guide may know another end, so near the end of its budget a
    resumed answer need not be the whole one."""
    alone = engine_of(loaded, changed(loaded, block_size=1))
    for slots, (request, schema) in enumerate(asked_schemas(loaded, 3), start=1):
        asked_now = with_slots(request, slots)
        loaded.engine.add(asked_now)
        steps = []
        while loaded.engine.has_work:
            steps += loaded.engine.step()
        cuts = []
        for number in range(1, len(steps) - 1, stride):
            begun = tuple(token for step in steps[:number] for token in step.piece.tokens)
            cut = dataclasses.replace(asked_now, committed=begun, closing=steps[number - 1].closing)
            cuts.append(dataclasses.replace(cut, request_id=f"{number}"))
        rests = loaded.engine.generate(cuts)
        wanted = alone.generate([dataclasses.replace(cut, decoding=DecodingConfig(block_size=1)) for cut in cuts])
        for cut, rest, other in zip(cuts, rests, wanted, strict=True):
            begun = cut.committed
            assert rest.tokens == other.tokens and rest.tokens[: len(begun)] == begun, cut.request_id
            text = loaded.tokenizer.decode(list(rest.tokens), clean_up_tokenization_spaces=False)
            jsonschema.validate(json.loads(str(text)), schema)


def test_only_an_exact_answer_follows_a_grammar(loaded: LoadedModel) -> None:
    request = asked(0, GRAMMARS[0], decoding=DecodingConfig(block_size=B, verify=Verify()))
    with pytest.raises(RequestRefused, match=r"let verify\.exact be true, or verify be null") as caught:
        loaded.engine.admission.check(request)
    assert "\n" not in str(caught.value)


def drawn_texts(loaded: LoadedModel, block_size: int, decoding: DecodingConfig) -> Counter[str]:
    """A few letters, 400 times. The weights are such that drafts and judgements differ."""
    grammar, model = Grammar(syntax="regex", text="(a[bc]|c[ab])[de];"), changed(loaded, block_size=block_size)
    init_weights(model, seed=4, std=0.3)
    requests = [
        asked(3, grammar, decoding=decoding, sampling=Sampling(temperature=1.0, seed=i), max_tokens=12)
        for i in range(400)
    ]
    requests = [dataclasses.replace(r, request_id=f"r{i}", logprobs=False) for i, r in enumerate(requests)]
    served = engine_of(loaded, model, max_rows=128, num_pages=800, batch_invariant=False)
    return Counter(loaded.tokenizer.decode(list(o.tokens)) for o in served.generate(requests))


@pytest.fixture(scope="module")
def texts_of_block_size_1(loaded: LoadedModel) -> Counter[str]:
    return drawn_texts(loaded, 1, DecodingConfig(block_size=1))


@pytest.mark.slow
@pytest.mark.parametrize("slots", [1, 2])
def test_answers_are_drawn_as_at_block_size_1(
    loaded: LoadedModel, texts_of_block_size_1: Counter[str], slots: int
) -> None:
    """The later letters are drafted behind the first: the engines' texts have one distribution."""
    counts = drawn_texts(loaded, B, EXACT_OF[slots]), texts_of_block_size_1
    assert 4 < len(counts[0] | counts[1]) <= 8
    assert chi_square(*counts) < 24.3, counts  # the 0.999 quantile for 7 degrees of freedom


@pytest.mark.usefixtures("warm_followers")
def test_two_ranks_decide_as_one(tiny_model_dir: Path) -> None:
    with load_engine(tiny_model_dir, SIZES) as one, load_engine(tiny_model_dir, SIZES, tensor_parallel=2) as two:
        requests = [with_slots(request, 1 + i % 3) for i, (request, _) in enumerate(asked_schemas(one, 4))]
        requests.append(asked(60, None, max_tokens=12, ignore_eos=True))
        assert [o.tokens for o in two.engine.generate(requests)] == [o.tokens for o in one.engine.generate(requests)]
