"""Where answers end: stop strings end the decoding of their own request and no other, and limits fit the model."""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mbd_core.batch.answer_ends import fit_request, generate_until, output_at
from mbd_core.batch.rows import before_stop
from mbd_core.checkpoint.chat import decode_text
from mbd_core.decoding.answers.counts import Counts
from mbd_core.decoding.answers.piece import Piece
from mbd_core.decoding.blocks.canvas_config import Canvas
from mbd_core.decoding.blocks.config import DecodingConfig
from mbd_core.decoding.blocks.request import Request, StepOutput
from mbd_core.engine.config import EngineConfig
from mbd_core.engine.engine import Engine
from mbd_core.serving.tokens.load import LoadedModel, load_engine


@pytest.fixture(scope="module")
def model(tiny_model_dir: Path) -> Iterator[LoadedModel]:
    with load_engine(tiny_model_dir, EngineConfig(max_rows=4, buffer_size=2, num_pages=256)) as loaded:
        yield loaded


def requests(model: LoadedModel, count: int = 3) -> list[Request]:
    decoding = model.decoding({"buffer_size": 2, "tau_m2t": 0.05})
    return [
        Request(request_id=str(n), prompt=(5 + n, 6, 7), max_tokens=40, decoding=decoding, ignore_eos=True)
        for n in range(count)
    ]


def test_a_text_ends_before_the_stop_string_that_comes_first() -> None:
    assert before_stop("a b Q: c [D]", ["[D]", "Q:"]) == "a b "
    assert before_stop("a b", ["Q:"]) == before_stop("a b", []) == "a b"
    assert before_stop("Q: a", ["Q:"]) == ""


def test_a_stop_string_ends_its_request_and_no_other(model: LoadedModel) -> None:
    decode: Any = partial(decode_text, model.tokenizer)
    whole = model.engine.generate(requests(model))
    text = decode(whole[1].tokens)
    number = next(n for n in range(10, 30) if len(decode(whole[1].tokens[:n])) > len(decode(whole[1].tokens[: n - 1])))
    stop = text[len(decode(whole[1].tokens[: number - 1])) - 3 : len(decode(whole[1].tokens[:number]))]
    number = next(n for n in range(1, 41) if stop in decode(whole[1].tokens[:n]))  # where it occurs first
    ended = generate_until(model.engine, requests(model), {"1": [stop]}, decode)
    assert [ended[0].tokens, ended[2].tokens] == [whole[0].tokens, whole[2].tokens]
    assert ended[1].tokens == whole[1].tokens[:number]
    assert (ended[1].finish_reason, ended[1].counts.num_tokens) == ("stop", number)
    assert ended[1].counts.num_forwards < whole[1].counts.num_forwards
    assert before_stop(decode(ended[1].tokens), [stop]) == before_stop(text, [stop])
    assert not model.engine.has_work
    assert [o.tokens for o in model.engine.generate(requests(model))] == [o.tokens for o in whole]


def test_a_step_s_text_is_decoded_once_however_many_stop_strings_there_are(model: LoadedModel) -> None:
    calls: list[int] = []

    def decode(tokens: Sequence[int]) -> str:
        calls.append(len(tokens))
        return "text"

    names = ("num_prompt_tokens", "num_tokens", "num_forwards", "num_store_forwards", "num_prefill_forwards")
    counts = Counts(**dict.fromkeys(names, 1), decode_seconds=0.0)
    answer = Piece(tokens=(5, 6))
    step = StepOutput(request_id="r", piece=answer, output=None, counts=counts)
    assert output_at(step, answer, ("a", "b", "c"), decode) is None and calls == [2]
    assert output_at(step, answer, (), decode) is None and calls == [2]
    ended = output_at(step, answer, ("no", "ext"), decode)
    assert ended is not None and ended.tokens == (5,)


def test_without_stop_strings_it_is_generate(model: LoadedModel) -> None:
    decode: Any = partial(decode_text, model.tokenizer)
    whole = [output.tokens for output in model.engine.generate(requests(model))]
    for stops in ({}, {"0": []}, {"0": ["no such text anywhere"]}):
        assert [o.tokens for o in generate_until(model.engine, requests(model), stops, decode)] == whole


@pytest.mark.parametrize(("prompt", "wanted", "fits"), [(100, 4096, 412), (100, 50, 50), (600, 128, 128), (511, 9, 1)])
def test_a_limit_is_what_the_model_holds_behind_the_prompt(prompt: int, wanted: int, fits: int) -> None:
    decoding = DecodingConfig(block_size=4, buffer_size=1)
    request = Request(request_id="r", prompt=(1,) * prompt, max_tokens=wanted, decoding=decoding)
    assert fit_request(request, 512).max_tokens == fits


def test_a_canvas_gets_a_length_that_its_steps_can_fill() -> None:
    decoding = DecodingConfig(block_size=4, canvas=Canvas(steps=64, accept="quota"))
    request = Request(request_id="r", prompt=(1,) * 100, max_tokens=4096, decoding=decoding)
    assert fit_request(request, 512).max_tokens == 412
    assert fit_request(Request(request_id="r", prompt=(1,), max_tokens=10, decoding=decoding), 512).max_tokens == 64


def test_nothing_is_decoded_behind_a_stop_string(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    decode: Any = partial(decode_text, model.tokenizer)
    steps: list[str] = []
    step = Engine.step

    def counted(engine: Engine) -> Any:
        steps.append("step")
        return step(engine)

    monkeypatch.setattr(Engine, "step", counted)
    (whole,) = model.engine.generate(requests(model, 1))
    taken, stop = len(steps), decode(whole.tokens)[4:7]
    generate_until(model.engine, requests(model, 1), {"0": [stop]}, decode)
    assert len(steps) - taken < taken / 2
