"""DiffusionGemma in the engine: the cache-free loop's tokens, whatever runs beside a request, on one rank or two."""

import random
from dataclasses import replace
from typing import Any

import pytest
from gemma_models import GEMMA, gemma
from small_engines import gist, run_with_preemption
from thread_ranks import ThreadRanks
from torch import Tensor

from mbd_core.checkpoint.loading import load_model
from mbd_core.checkpoint.saving import save_model
from mbd_core.decoding.blocks.canvas_config import Canvas
from mbd_core.decoding.blocks.causal_config import Causal, Renoise
from mbd_core.decoding.blocks.config import DecodingConfig
from mbd_core.decoding.blocks.request import Output, Request
from mbd_core.decoding.blocks.sampling_config import Sampling
from mbd_core.decoding.causal import renoise
from mbd_core.decoding.grammar.grammar import Grammar
from mbd_core.engine.config import EngineConfig
from mbd_core.engine.engine import Engine
from mbd_core.engine.sequences.admission import RequestRefused
from mbd_core.models.decoder import Decoder
from mbd_core.models.shard import Shard
from mbd_core.plain_loops import run_renoise
from mbd_core.trace.recorder import TraceRecorder

L = GEMMA.block_size
RULES = (
    Renoise(steps=5, entropy_bound=2.0),
    Renoise(steps=9, entropy_bound=4.0, stability=0, tau_entropy=2.5),
    Renoise(steps=1),
    Renoise(steps=7, entropy_bound=1.0, stability=2, tau_entropy=3.0, t_max=0.3, t_min=0.1),
)


@pytest.fixture(scope="module")
def model() -> Decoder:
    return gemma()


def request(number: int, **changes: Any) -> Request:
    rng = random.Random(number)
    fields = {
        "prompt": tuple(rng.choices(range(2, 48), k=rng.randint(1, 30))),
        "max_tokens": rng.randint(1, 3 * L),
        "decoding": DecodingConfig(block_size=L, renoise=RULES[number % len(RULES)]),
        "sampling": Sampling(seed=number),
        "logprobs": True,
        "ignore_eos": number % 3 == 0,
    }
    return Request(request_id=f"r{number}", **(fields | changes))


def engine(model: Decoder, **changes: Any) -> Engine:
    sizes = {"max_rows": 5, "num_pages": 60, "page_size": 8, "max_prefill_tokens": 8, "batch_invariant": True}
    return Engine(model, EngineConfig(**(sizes | changes)))


REQUESTS = [request(number) for number in range(8)]


@pytest.fixture(scope="module")
def alone(model: Decoder) -> list[Output]:
    return [engine(model).generate([r])[0] for r in REQUESTS]


def test_the_engine_is_the_loop_without_a_cache(model: Decoder, alone: list[Output]) -> None:
    for r, output in zip(REQUESTS, alone, strict=True):
        plain = run_renoise(model, r)
        assert list(output.tokens) == plain.tokens and len(output.tokens) <= r.max_tokens
        assert (output.finish_reason, output.counts.num_forwards) == (plain.finish_reason, plain.num_forwards)
        assert output.piece.logprobs == pytest.approx(plain.log_probs, abs=1e-3)
        assert len(plain.tokens) == r.max_tokens  # exact; the released loop rounds up to whole canvases


def test_an_answer_stops_at_a_stop_token(model: Decoder, alone: list[Output]) -> None:
    for r, output in zip(REQUESTS, alone, strict=True):
        stop = output.tokens[len(output.tokens) // 2]
        ended = engine(model).generate([replace(r, stop_token_ids=(stop,))])[0]
        assert (ended.finish_reason, ended.stop_reason) == ("stop", stop)
        assert ended.tokens == output.tokens[: output.tokens.index(stop)]
        assert list(ended.tokens) == run_renoise(model, replace(r, stop_token_ids=(stop,))).tokens


@pytest.mark.parametrize("changes", [{}, {"max_prefill_tokens": 64}, {"prefix_caching": False}, {"max_rows": 1}])
def test_a_batch_changes_no_bit(model: Decoder, alone: list[Output], changes: dict[str, Any]) -> None:
    """Prompts in chunks, whole, and in their turn."""
    served = engine(model, **changes)
    assert [gist(o) for o in served.generate(REQUESTS)] == [gist(o) for o in alone]
    served.check_integrity()
    assert served.scheduler.pool.num_free == served.scheduler.pool.capacity


def test_the_engine_holds_no_more_logits_than_a_piece(
    model: Decoder, alone: list[Output], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(renoise, "PIECE_BYTES", 3 * 4 * renoise.COPIES * GEMMA.vocab_size)
    served, sizes = engine(model), []
    logits = served.runner.logits

    def counted(hidden: Tensor, **settings: Any) -> Tensor:
        sizes.append(len(hidden))
        return logits(hidden, **settings)

    monkeypatch.setattr(served.runner, "logits", counted)
    assert [o.tokens for o in served.generate(REQUESTS[:3])] == [o.tokens for o in alone[:3]]
    assert set(sizes) == {3, L % 3}


def test_packed_rows_that_share_products_give_the_same_tokens(model: Decoder, alone: list[Output]) -> None:
    outputs = engine(model, batch_invariant=False, max_prefill_tokens=20).generate(REQUESTS)
    assert [o.tokens for o in outputs] == [o.tokens for o in alone]


def test_a_preempted_canvas_comes_out_the_same(model: Decoder, alone: list[Output]) -> None:
    served = engine(model, num_pages=24)
    outputs = run_with_preemption(served, REQUESTS, random.Random(0))
    assert [gist(o)[:3] for o in outputs] == [gist(o)[:3] for o in alone]
    served.check_integrity()


def test_the_last_canvas_may_reach_past_the_last_position(model: Decoder) -> None:
    """An answer that ends at the model's last position; its canvas is decoded whole."""
    r = request(4, prompt=tuple(i % 46 + 2 for i in range(251)), max_tokens=5, ignore_eos=True)
    output = engine(model).generate([r])[0]
    assert len(output.tokens) == 5 and list(output.tokens) == run_renoise(model, r).tokens


def test_stored_prefixes_are_reused_and_change_nothing(model: Decoder) -> None:
    served = engine(model)
    first = request(4, prompt=tuple(range(2, 22)), max_tokens=2 * L, ignore_eos=True)
    answer = served.generate([first])[0]
    second = request(5, prompt=(*first.prompt, *answer.tokens, 7, 8))
    again = served.generate([second])[0]
    assert again.counts.num_cached_tokens >= len(first.prompt) // 8 * 8 > 0
    assert gist(again) == gist(engine(model, prefix_caching=False).generate([second])[0])


def test_an_answer_goes_on_elsewhere_after_its_committed_canvases(model: Decoder) -> None:
    whole = request(4, max_tokens=3 * L, ignore_eos=True)
    wanted = engine(model).generate([whole])[0]
    rest = engine(model).generate([replace(whole, committed=wanted.tokens[: 2 * L], first_forward=9)])[0]
    assert rest.tokens == wanted.tokens


def test_a_replay_tells_when_each_token_came(model: Decoder) -> None:
    output = engine(model).generate([request(4, max_tokens=2 * L, ignore_eos=True, replay=True)])[0]
    assert output.piece.steps is not None and len(output.piece.steps) == len(output.tokens)
    first, second = output.piece.steps[:L], output.piece.steps[L:]
    assert min(first) >= 1 and max(first) <= 5 < min(second) and max(second) <= output.counts.num_forwards


def test_a_trace_has_a_row_for_each_forward_of_a_canvas(model: Decoder) -> None:
    trace = TraceRecorder()
    config = EngineConfig(max_rows=2, num_pages=60, page_size=8)
    output = Engine(model, config, trace=trace).generate([request(4, max_tokens=2 * L, ignore_eos=True)])[0]
    assert len(trace.rows) == output.counts.num_forwards
    assert {row.state for row in trace.rows} == {"CANVAS"} and {row.block for row in trace.rows} == {0, 1}
    assert all(1 <= row.accepted <= L for row in trace.rows)


def test_random_operations_lose_nothing(model: Decoder) -> None:
    """add, step, abort and preempt in any order, with fewer pages than the requests could use."""
    rng = random.Random(0)
    served = engine(model, num_pages=16, max_rows=3, batch_invariant=False)
    known: list[str] = []
    done = preemptions = number = 0
    for _ in range(150):
        act = rng.choices(("add", "step", "abort", "preempt"), (3, 10, 0.5, 1.5))[0]
        if act == "add" and len(known) < 6:
            r = request(number)
            number += 1
            served.add(r)
            known.append(r.request_id)
        elif act == "abort" and known:
            assert served.abort(known.pop(rng.randrange(len(known)))) is not None
        elif act == "preempt":
            preemptions += served.preempt() is not None
        else:
            for step in served.step():
                if step.output is not None:
                    known.remove(step.request_id)
                    done += 1
        served.check_integrity()
    while served.has_work:
        served.step()
    assert done > 5 and preemptions > 3 and served.scheduler.pool.num_free == served.scheduler.pool.capacity


def test_two_ranks_decode_as_one(model: Decoder, alone: list[Output], tmp_path: Any) -> None:
    save_model(tmp_path / "model", model)
    ranks = ThreadRanks(2)
    parts = [load_model(tmp_path / "model", shard=Shard(rank=r, size=2), reduce=ranks.reduce(r)) for r in range(2)]
    few = REQUESTS[:4]
    found = ranks.run(lambda rank: engine(parts[rank], batch_invariant=False).generate(few))
    assert [o.tokens for o in found[0]] == [o.tokens for o in alone[:4]]
    assert [gist(o) for o in found[0]] == [gist(o) for o in found[1]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sampling": Sampling(temperature=0.7)}, r"temperature=0.7"),
        ({"sampling": Sampling(frequency_penalty=0.5)}, r"renoise"),
        ({"min_tokens": 3}, "min_tokens"),
        ({"grammar": Grammar(syntax="regex", text="a+")}, r"no guide follows it"),
        ({"rollout": True}, r"a step map cannot be given with renoise"),
        ({"frames": True}, r"a Block Buffer, and renoise has none"),
        ({"top_logprobs": 2}, r"top_logprobs cannot be given with renoise"),
        (
            {"decoding": DecodingConfig(block_size=L)},
            r"decodes with renoise, not block by block in a buffer; let its decoding name renoise$",
        ),
        ({"decoding": DecodingConfig(block_size=L, buffer_size=2)}, r"decodes with renoise, not block by block"),
        ({"decoding": DecodingConfig(block_size=L, canvas=Canvas())}, r"canvas needs a model with full attention"),
        (
            {"decoding": DecodingConfig(block_size=L, causal=Causal())},
            r"causal needs a model that predicts the next token",
        ),
        ({"decoding": DecodingConfig(block_size=4, renoise=Renoise())}, r"differs from the canvas of 8 tokens"),
    ],
)
def test_what_cannot_be_had_is_refused_in_a_sentence(model: Decoder, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestRefused, match=message) as error:
        engine(model).add(request(1, **changes))
    assert "\n" not in str(error.value)
