"""Answers under a grammar, token by token: the literal loop's tokens; valid whatever the weights say; alone, batched,
preempted, resumed and over two ranks alike."""

import json
import random
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from llguidance import LLMatcher
from llguidance.hf import from_tokenizer
from random_schemas import schema_requests
from small_engines import run_with_preemption
from transformers import Qwen3ForCausalLM

from mbd_core.checkpoint.tokenizer import grammars_of
from mbd_core.decoding.blocks.request import Output, Request
from mbd_core.decoding.blocks.sampling_config import Sampling
from mbd_core.decoding.grammar.grammar import Grammar
from mbd_core.decoding.grammar.matchers import compile_grammar
from mbd_core.engine import engine as engine_module
from mbd_core.engine.config import EngineConfig
from mbd_core.engine.engine import Engine
from mbd_core.engine.sequences.admission import RequestRefused
from mbd_core.serving.tokens.load import LoadedModel, load_engine

SIZES = EngineConfig(max_rows=4, num_pages=200, dtype="float32")


@pytest.fixture(scope="module")
def folder(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model's weights as an autoregressive model."""
    folder = tmp_path_factory.mktemp("ar") / "model"
    shutil.copytree(tiny_model_dir, folder)
    config = json.loads((folder / "config.json").read_text())
    own = {name: value for name, value in config.items() if name not in ("block_size", "mask_token_id", "auto_map")}
    own |= {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    (folder / "config.json").write_text(json.dumps(own))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": config["eos_token_id"]}))
    return folder


@pytest.fixture(scope="module")
def loaded(folder: Path) -> Iterator[LoadedModel]:
    with load_engine(folder, SIZES) as loaded:
        yield loaded


def asked(loaded: LoadedModel, seed: int, grammar: Grammar | None, **fields: Any) -> Request:
    rng = random.Random(seed)
    given: dict[str, Any] = {
        "prompt": tuple(rng.choices(range(20, 300), k=rng.randint(1, 19))),
        "max_tokens": 120,
        "sampling": Sampling(temperature=(0.0, 1.0)[seed % 2], seed=seed),
        "logprobs": True,
        "grammar": grammar,
    }
    return Request(request_id=f"r{seed}", decoding=loaded.decoding({}), **given | fields)


def asked_schemas(loaded: LoadedModel, number: int) -> list[tuple[Request, dict[str, Any]]]:
    return schema_requests(loaded, number, lambda place, grammar, _: asked(loaded, place, grammar), seed=5)


def gist(output: Output) -> Any:
    return output.tokens, output.finish_reason, output.piece.logprobs


def text_of(loaded: LoadedModel, output: Output) -> str:
    return str(loaded.tokenizer.decode(list(output.tokens), clean_up_tokenization_spaces=False))


@pytest.mark.parametrize(
    "syntax_text", [("regex", "[a-z]{3,9}( [a-z]{2,5}){2};"), ("lark", 'start: "a" /[b-k ]{5,30}/ "."')]
)
def test_greedy_tokens_are_those_of_a_literal_loop(folder: Path, loaded: LoadedModel, syntax_text: Any) -> None:
    syntax, text = syntax_text
    grammar = Grammar(syntax=syntax, text=text)
    request = asked(loaded, 2, grammar, max_tokens=80)
    [output] = loaded.engine.generate([request])
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    eos = loaded.engine.model.config.eos_token_ids[0]
    tokenizer = from_tokenizer(loaded.tokenizer, n_vocab=len(loaded.tokenizer), eos_token=eos)
    matcher: LLMatcher = compile_grammar(tokenizer, grammar)
    tokens: list[int] = []
    while tokens[-1:] != [eos]:
        with torch.inference_mode():
            logits_V = model(torch.tensor([[*request.prompt, *tokens]])).logits[0, -1]
        bits = torch.frombuffer(bytearray(matcher.compute_bitmask()), dtype=torch.uint8)
        allowed_V = (bits[:, None] >> torch.arange(8) & 1).flatten()[: len(logits_V)].bool()
        tokens.append(int(logits_V[: len(allowed_V)].masked_fill(~allowed_V, -torch.inf).argmax()))
        if tokens[-1] != eos:
            assert matcher.consume_token(tokens[-1])
    assert list(output.tokens) == tokens[:-1] and output.finish_reason == "stop"
    assert output.counts.num_forwards == len(tokens)


@pytest.mark.parametrize("number", [5, pytest.param(12, marks=pytest.mark.slow)])
def test_every_answer_of_a_random_model_validates_alone_batched_and_preempted(
    loaded: LoadedModel, number: int
) -> None:
    pairs = asked_schemas(loaded, number)
    requests = [request for request, _ in pairs]
    plain = [asked(loaded, 100 + i, None, max_tokens=20, ignore_eos=True) for i in range(3)]
    outputs = loaded.engine.generate(requests + plain)
    for (request, schema), output in zip(pairs, outputs, strict=False):
        assert output.finish_reason == "stop" and len(output.tokens) < request.max_tokens
        jsonschema.validate(json.loads(text_of(loaded, output)), schema)
    exact = replace(SIZES, batch_invariant=True)
    engine = Engine(
        loaded.engine.model,
        exact,
        vocab_limit=len(loaded.tokenizer),
        grammars=grammars_of(loaded.tokenizer, loaded.engine.model.config),
    )
    together = engine.generate(requests[:5] + plain)
    alone = [engine.generate([request])[0] for request in requests[:5] + plain]
    assert list(map(gist, together)) == list(map(gist, alone))
    assert [output.tokens for output in run_with_preemption(engine, requests[:5] + plain, random.Random(0))] == [
        output.tokens for output in alone
    ]


def test_every_answer_validates_where_guides_wait_for_their_turn(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "STEP_TRIES", 1)
    engine = Engine(
        loaded.engine.model,
        SIZES,
        vocab_limit=len(loaded.tokenizer),
        grammars=grammars_of(loaded.tokenizer, loaded.engine.model.config),
    )
    pairs = asked_schemas(loaded, 6)
    outputs = engine.generate([request for request, _ in pairs])
    for (_, schema), output in zip(pairs, outputs, strict=True):
        jsonschema.validate(json.loads(text_of(loaded, output)), schema)
    assert [output.tokens for output in outputs] == [
        loaded.engine.generate([request])[0].tokens for request, _ in pairs
    ]


@pytest.mark.parametrize("stride", [17, pytest.param(7, marks=pytest.mark.slow)])
def test_a_resumed_answer_goes_on_inside_its_grammar(loaded: LoadedModel, stride: int) -> None:
    for request, _ in asked_schemas(loaded, 4):
        loaded.engine.add(request)
        steps = []
        while loaded.engine.has_work:
            steps += loaded.engine.step()
        whole = steps[-1].output
        assert whole is not None
        cuts = []
        for number in range(1, len(steps) - 1, stride):
            begun = tuple(token for step in steps[:number] for token in step.piece.tokens)
            cut = replace(request, committed=begun, closing=steps[number - 1].closing)
            cuts.append(replace(cut, request_id=f"{number}"))
        for cut, rest in zip(cuts, loaded.engine.generate(cuts), strict=True):
            assert rest.tokens == whole.tokens, cut.request_id


def test_what_is_left_of_max_tokens_is_an_end(loaded: LoadedModel) -> None:
    grammar = Grammar(syntax="regex", text="([a-z]+;)+end")
    for max_tokens in range(8, 20):
        request = asked(loaded, 1, grammar, max_tokens=max_tokens)
        [output] = loaded.engine.generate([request])
        assert output.finish_reason == "stop" and text_of(loaded, output).endswith(";end")


def test_thinking_under_a_grammar_is_refused(loaded: LoadedModel) -> None:
    decoding = loaded.decoding({"causal": {"method": "ar", "thinking": {"budget": 4, "end_token_id": 30}}})
    request = replace(asked(loaded, 0, Grammar(syntax="regex", text="[a-z]+")), decoding=decoding)
    with pytest.raises(RequestRefused, match="thinking inserts a token"):
        loaded.engine.admission.check(request)


@pytest.mark.usefixtures("warm_followers")
def test_two_ranks_decide_as_one(folder: Path, loaded: LoadedModel) -> None:
    requests = [request for request, _ in asked_schemas(loaded, 4)]
    requests.append(asked(loaded, 60, None, max_tokens=12, ignore_eos=True))
    with load_engine(folder, SIZES, tensor_parallel=2) as ranks:
        pair = ranks.engine.generate(requests)
    single = loaded.engine.generate(requests)
    assert [output.tokens for output in pair] == [output.tokens for output in single]
