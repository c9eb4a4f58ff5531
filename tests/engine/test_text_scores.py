"""The scores of a text are those that the definition gives, forward by forward, however the text lies to blocks."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from small_engines import EOS, MASK, VOCAB, B, build
from step_replay import text_log_probabilities

from mbd_core.decoding.blocks.config import DecodingConfig
from mbd_core.decoding.blocks.request import Output, Request
from mbd_core.decoding.blocks.sampling import Vocab
from mbd_core.decoding.blocks.sampling_config import Sampling
from mbd_core.engine.config import EngineConfig
from mbd_core.engine.engine import Engine
from mbd_core.engine.sequences.admission import RequestRefused
from mbd_core.models.decoder import Decoder

DECODING = DecodingConfig(block_size=B, buffer_size=2, tau_add=1.0, tau_m2t=1.0, tokens_per_step=1)


@pytest.fixture(scope="module")
def model() -> Decoder:
    return build()


def scored(text: tuple[int, ...], *, prompt: int = 1, **fields: Any) -> Request:
    template = text[prompt:]
    return Request(
        request_id=f"{hash(text)} {prompt}",
        prompt=text[:prompt],
        template=template,
        max_tokens=len(template),
        decoding=DECODING,
        ignore_eos=True,
        scored=True,
        **fields,
    )


def texts(seed: int) -> list[tuple[int, ...]]:
    rng = random.Random(seed)
    return [tuple(rng.choices(range(VOCAB), k=n)) for n in (2, 3, 4, 5, 8, 9, 13, 22)]


def check(model: Decoder, output: Output, text: tuple[int, ...], *, prompt: int = 1) -> None:
    log_p_LV = text_log_probabilities(model, text)[prompt - 1 :]
    assert output.tokens == text[prompt:]
    expected = [float(row[token]) for row, token in zip(log_p_LV, text[prompt:], strict=True)]
    assert [s.logprob for s in output.scores] == pytest.approx(expected, abs=2e-4)
    likeliest, _ = Vocab(MASK, VOCAB).likeliest(log_p_LV)
    assert [s.likeliest for s in output.scores] == likeliest.tolist()
    best = log_p_LV.gather(1, likeliest[:, None])[:, 0].tolist()
    assert [s.likeliest_logprob for s in output.scores] == pytest.approx(best, abs=2e-4)


@pytest.mark.parametrize("slots", [1, 2])
def test_scores_are_the_definition_s_in_a_batch_with_others(model: Decoder, slots: int) -> None:
    engine = Engine(model, EngineConfig(max_rows=3, num_pages=60, page_size=8, buffer_size=3))
    plain = Request(
        request_id="plain", prompt=(5, 6, 7), max_tokens=9, decoding=DecodingConfig(block_size=B, buffer_size=3)
    )
    alone = engine.generate([plain])[0]
    asked = [scored(text, prompt=prompt) for text in texts(1) for prompt in (1, 2) if prompt < len(text)]
    asked = [replace(request, decoding=replace(DECODING, buffer_size=slots)) for request in asked]
    outputs = engine.generate([*asked, replace(plain, request_id="beside")])
    for request, output in zip(asked, outputs, strict=False):
        text = (*request.prompt, *(t for t in request.template if t is not None))
        check(model, output, text, prompt=len(request.prompt))
        assert output.counts.num_tokens == 0, "nothing of it was generated"
    assert outputs[-1].tokens == alone.tokens


def test_a_preemption_leaves_the_scores_as_they_are(model: Decoder) -> None:
    engine = Engine(model, EngineConfig(max_rows=2, num_pages=60, page_size=8, buffer_size=2))
    asked = [scored(text) for text in texts(2)]
    for request in asked:
        engine.add(request)
    outputs: dict[str, Output] = {}
    number = 0
    while engine.has_work:
        for step in engine.step():
            if step.output is not None:
                outputs[step.request_id] = step.output
        number += 1
        if number % 5 == 0:
            engine.preempt()
    assert sum(output.counts.num_preemptions for output in outputs.values()) > 2
    for request in asked:
        text = (*request.prompt, *(t for t in request.template if t is not None))
        check(model, outputs[request.request_id], text)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_hole_at_the_end_is_filled_and_scored(model: Decoder, temperature: float) -> None:
    engine = Engine(model, EngineConfig(max_rows=2, num_pages=60, page_size=8, buffer_size=2))
    for text in texts(3):
        sampling = Sampling(temperature=temperature, seed=4)
        request = scored(text, sampling=sampling)
        request = replace(request, template=(*request.template, None), max_tokens=len(text))
        [output] = engine.generate([request])
        check(model, output, (*text, output.tokens[-1]))
        assert output.counts.num_tokens == 1
        if not temperature:
            assert output.tokens[-1] == output.scores[-1].likeliest
        assert output.tokens[-1] != MASK


def test_the_probabilities_of_all_next_tokens_sum_to_one(model: Decoder) -> None:
    engine = Engine(model, EngineConfig(max_rows=8, num_pages=200, page_size=8, buffer_size=2))
    outputs = engine.generate([scored((7, 9, 11, token)) for token in range(VOCAB)])
    total = sum(torch.tensor(output.scores[-1].logprob).exp() for output in outputs)
    assert float(total) == pytest.approx(1.0, abs=1e-4)
    assert EOS in range(VOCAB)


def test_a_model_that_sees_the_whole_sequence_is_refused() -> None:
    full = build(architecture="LLaDAModelLM", attention="full")
    engine = Engine(full, EngineConfig(max_rows=2, num_pages=60, page_size=8, buffer_size=2))
    with pytest.raises(RequestRefused, match="attends in blocks"):
        engine.generate([scored((5, 6, 7))])
