"""The engine against loops that know nothing of it: no cache, no buffer, no batch."""

import copy
import dataclasses
import itertools
import random
from typing import Any

import pytest
import torch
from small_engines import EOS, MASK, B, build

from mbd_core.decoding.blocks.config import T2T, DecodingConfig, EntropyBound, Soft
from mbd_core.decoding.blocks.literal_algorithms import BlockTokens, Predictions, Weights, naive_multibd
from mbd_core.decoding.blocks.request import Output, Request
from mbd_core.engine.config import EngineConfig
from mbd_core.engine.engine import Engine
from mbd_core.engine.memory.pages import PagePool
from mbd_core.models.decoder import Decoder
from mbd_core.multitf.states.mask import block_causal_mask
from mbd_core.ops.attention.definition import RowLayout, paged_attention
from mbd_core.ops.attention.whole import DenseAttention
from mbd_core.trace.recorder import TraceRecorder, read_trace


@pytest.fixture(scope="module")
def model() -> Decoder:
    return build().double()


def clean_forward(model: Decoder, tokens: list[int], weights: list[float] | None = None) -> torch.Tensor:
    """Logits (L, V) of one whole block-causal forward, nothing cached."""
    positions = torch.arange(len(tokens))[None]
    mask = block_causal_mask(positions // B)[:, None]
    with torch.no_grad():
        soft = None if weights is None else torch.tensor([weights])
        return model.logits(model(torch.tensor([tokens]), positions, DenseAttention(mask), soft_weight=soft))[0]


def predictor(model: Decoder, config: DecodingConfig):
    """The model as the literal algorithms want it: a clean block-causal forward of prefix and running-set."""

    def predict(prefix: list[int], blocks: list[BlockTokens], weights: list[Weights]) -> list[Predictions]:
        tokens = prefix + [MASK if t is None else t for block in blocks for t in block]
        soft = [1.0] * len(prefix) + [w for block in weights for w in block]
        probabilities = clean_forward(model, tokens, soft)[len(prefix) :].softmax(-1)
        entropy = torch.special.entr(probabilities).sum(-1)
        probabilities[:, MASK] = -1.0
        confidence, token = probabilities.max(-1)
        score = -entropy if config.entropy else confidence
        triples = list(zip(token.tolist(), confidence.tolist(), score.tolist(), strict=True))
        return [triples[i * B : (i + 1) * B] for i in range(len(blocks))]

    return predict


REVISIONS: tuple[dict[str, Any], ...] = (
    {},
    {"t2t": T2T(tau=0.3, max_edits=3)},
    {"soft": Soft(stop_confidence=0.6)},
    {"t2t": T2T(tau=0.2), "tau_stable": 0.5},
    {"soft": Soft(), "tau_stable": 0.5},
    {"entropy": EntropyBound(gamma=6.0)},
    {"entropy": EntropyBound(gamma=7.0, rule="jetengine"), "t2t": T2T(tau=0.2)},
)


def request(name: str, seed: int, **changes) -> Request:
    rng = random.Random(seed)
    revision = REVISIONS[seed % len(REVISIONS)]
    config = DecodingConfig(
        block_size=B,
        buffer_size=rng.randint(1, 4),
        tau_add=rng.choice((0.0, 0.1, 0.6)),
        tau_semi=rng.choice((0.25, 0.9)),
        **{"tau_m2t": rng.choice((0.2, 0.4, 0.7))} if "entropy" not in revision else {},
        **revision,
    )
    prompt = tuple(rng.choices(range(40), k=rng.randint(1, 17)))
    fields = {"prompt": prompt, "max_tokens": rng.randint(1, 25), "decoding": config}
    return Request(request_id=name, **(fields | changes))


def engine(model: Decoder, **changes) -> Engine:
    return Engine(model, EngineConfig(**{"max_rows": 4, "num_pages": 64, "page_size": 8} | changes))


def gist(output: Output) -> tuple:
    """What must not depend on how a request was served."""
    counts = output.counts
    return output.tokens, output.finish_reason, counts.num_forwards, counts.num_store_forwards


@pytest.mark.parametrize("seed", [*range(12), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(12, 25))])
def test_engine_is_naive_multibd_on_whole_forwards(model: Decoder, seed: int) -> None:
    """Block Buffer, pages and cache change nothing: Alg. 4 capped at N_buf, each step a clean uncached forward."""
    r = request("a", seed)
    run = naive_multibd(
        list(r.prompt), r.max_tokens, r.decoding, predictor(model, r.decoding), eos=(EOS,), cap=r.decoding.buffer_size
    )
    served = engine(model)
    assert gist(served.generate([r])[0]) == (
        tuple(run.tokens),
        run.finish_reason,
        run.num_forwards,
        run.num_store_forwards,
    )
    served.check_integrity()


def single_block_loop(model: Decoder, prompt: tuple[int, ...], max_tokens: int, tau: float) -> tuple[list[int], int]:
    """SingleBD as one would write it on a napkin: fill a block, go on to the next, stop at EOS or the budget."""
    tokens, end, forwards = list(prompt), len(prompt) + max_tokens, 0
    while len(tokens) < end:
        start = len(tokens) // B * B
        block = [*tokens[start:], *[None] * (start + B - len(tokens))]
        fixed = [i for i, t in enumerate(block) if t is not None]
        while any(t is None for i, t in enumerate(block) if start + i < end):
            filled = [MASK if t is None else t for t in block]
            p = clean_forward(model, tokens[:start] + filled)[start:].softmax(-1)
            p[:, MASK] = -1
            confidence, best = p.max(-1)
            todo = [i for i, t in enumerate(block) if t is None and start + i < end]
            sure = [i for i in todo if confidence[i] > tau] or [max(todo, key=lambda i: (float(confidence[i]), -i))]
            for i in sure:
                block[i] = int(best[i])
            forwards += 1
        forwards += 1  # the store
        new = [t for i, t in enumerate(block) if i not in fixed and start + i < end]
        tokens = tokens + new
        if EOS in new:
            break
    generated = tokens[len(prompt) :]
    return generated[: generated.index(EOS)] if EOS in generated else generated, forwards


@pytest.mark.parametrize("seed", range(12))
def test_buffer_size_one_is_single_block_diffusion(model: Decoder, seed: int) -> None:
    r = request("a", seed, decoding=DecodingConfig(block_size=B, buffer_size=1, tau_m2t=0.4))
    tokens, forwards = single_block_loop(model, r.prompt, r.max_tokens, 0.4)
    output = engine(model).generate([r])[0]
    assert (list(output.tokens), output.counts.num_forwards) == (tokens, forwards)


def test_committed_pages_are_a_clean_block_causal_forward(model: Decoder) -> None:
    served = engine(model)
    r = request("a", 5, max_tokens=24, ignore_eos=True)
    served.add(r)
    emitted: list[int] = []
    while len(emitted) < 16:
        for out in served.step():
            emitted += out.piece.tokens
    sequence = next(iter(served.scheduler.running.values()))
    tokens = [*r.prompt, *emitted][: sequence.committed]
    assert len(tokens) == sequence.committed > len(r.prompt)

    keys: list[torch.Tensor] = []

    class Record(DenseAttention):
        def __call__(self, layer, q, k, v):
            keys.append(k[0])
            return super().__call__(layer, q, k, v)

    positions = torch.arange(len(tokens))[None]
    with torch.no_grad():
        model(torch.tensor([tokens]), positions, Record(block_causal_mask(positions // B)[:, None]))
    cache = served.runner.cache
    for layer, clean in enumerate(keys):
        stored = cache.layers[layer][0][sequence.pages].flatten(0, 1)[: len(tokens)]
        torch.testing.assert_close(stored, clean)


@pytest.mark.parametrize("static", [False, True])
def test_a_batch_is_each_request_alone(model: Decoder, static: bool) -> None:
    """Requests of different settings join and leave between steps; nobody notices."""
    requests = [request(f"r{i}", 100 + i) for i in range(14)]
    alone = [gist(engine(model).generate([r])[0]) for r in requests]
    served = engine(model, static_shapes=static)
    assert [gist(o) for o in served.generate(requests)] == alone
    served.check_integrity()
    assert not served.has_work


def test_chunked_prefill_changes_nothing(model: Decoder) -> None:
    long = request("long", 1, prompt=tuple(range(2, 40)) * 2, max_tokens=12)
    other = request("other", 2)
    whole = [gist(o) for o in engine(model).generate([long, other])]
    served = engine(model, max_prefill_tokens=8)
    outputs = served.generate([long, other])
    assert [gist(o) for o in outputs] == whole
    assert outputs[0].counts.num_prefill_forwards == -(-len(long.prompt) // 8) - 1


def test_streamed_tokens_are_the_output(model: Decoder) -> None:
    served = engine(model)
    for r in (requests := [request(f"r{i}", i) for i in range(5)]):
        served.add(r)
    seen: dict[str, list[int]] = {r.request_id: [] for r in requests}
    outputs = {}
    while served.has_work:
        for out in served.step():
            seen[out.request_id] += out.piece.tokens
            if out.output:
                outputs[out.request_id] = out.output
    assert {name: list(o.tokens) for name, o in outputs.items()} == seen


def test_no_mask_leaves_and_budgets_are_exact(model: Decoder) -> None:
    for r, n in itertools.product((request("a", s, ignore_eos=True) for s in range(3)), (1, 3, 4, 5, 9)):
        output = engine(model).generate([dataclasses.replace(r, max_tokens=n)])[0]
        assert len(output.tokens) == n and MASK not in output.tokens and output.finish_reason == "length"


def test_prompt_with_the_mask_token_is_data(model: Decoder) -> None:
    """The boundary block holds mask ids of the prompt's; they stay, and what follows is predicted from them."""
    r = request("a", 0, prompt=(5, 6, 7, 8, MASK, MASK), max_tokens=9, ignore_eos=True)
    run = naive_multibd(list(r.prompt), 9, r.decoding, predictor(model, r.decoding), cap=r.decoding.buffer_size)
    assert engine(model).generate([r])[0].tokens == tuple(run.tokens)


def test_abort_frees_everything(model: Decoder) -> None:
    rng, served, alive, number = random.Random(0), engine(model, num_pages=24), [], 0
    for _ in range(400):
        action = rng.random()
        if action < 0.3:
            alive.append(f"r{number}")
            served.add(request(alive[-1], rng.randrange(1000)))
            number += 1
        elif action < 0.4 and alive:
            name = alive.pop(rng.randrange(len(alive)))
            output = served.abort(name)
            assert output is not None and output.finish_reason == "abort"
            assert served.abort(name) is None
        else:
            finished = {o.request_id for o in served.step() if o.output}
            alive = [a for a in alive if a not in finished]
        served.check_integrity()
    while served.has_work:
        served.step()
    assert served.scheduler.pool.num_free == served.scheduler.pool.capacity


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": ()}, "the prompt is empty"),
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"max_tokens": 500}, "256 positions"),
        ({"prompt": (99,)}, "prompt token 99"),
        ({"decoding": DecodingConfig(block_size=8)}, "block_size=8"),
        ({"decoding": DecodingConfig(block_size=B, buffer_size=9)}, "buffer_size=9"),
    ],
)
def test_bad_requests_are_refused_by_name(model: Decoder, changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        engine(model).add(request("a", 0, **changes))


def test_request_larger_than_the_cache_and_duplicate_id(model: Decoder) -> None:
    served = engine(model, num_pages=3)
    with pytest.raises(ValueError, match="KV pages"):
        served.add(request("a", 0, max_tokens=60))
    served.add(request("b", 0, prompt=(4,), max_tokens=4))
    with pytest.raises(ValueError, match="already being served"):
        served.add(request("b", 0, prompt=(4,), max_tokens=4))


def test_trace_tells_every_slot_of_every_step(model: Decoder, tmp_path) -> None:
    trace = TraceRecorder()
    served = Engine(model, EngineConfig(max_rows=2, num_pages=64), trace=trace)
    output = served.generate([request("a", 4, max_tokens=20, ignore_eos=True)])[0]
    trace.write(tmp_path / "trace.parquet")
    rows = read_trace(tmp_path / "trace.parquet")
    assert rows == trace.rows
    assert len({r.step for r in rows}) == output.counts.num_forwards
    assert sum(r.accepted for r in rows) == 20
    assert all((r.mask_ratio == 0.0) for r in rows if r.state == "TO_CACHE")
    assert {r.state for r in rows} == {"DUMMY", "ACTIVE", "TO_CACHE"}
    boundary = len(request("a", 4).prompt) // B
    assert {r.block for r in rows if r.accepted} == set(range(boundary, (len(request("a", 4).prompt) + 19) // B + 1))


def test_ids_past_the_tokenizer_are_never_predicted(model: Decoder) -> None:
    boosted = copy.deepcopy(model)
    with torch.no_grad():
        boosted.lm_head.weight[38:] = 50 * boosted.lm_head.weight[2]
    r = request("a", 1, max_tokens=24, ignore_eos=True)
    free, limited = (
        Engine(boosted, EngineConfig(num_pages=64), vocab_limit=limit).generate([r])[0].tokens for limit in (None, 38)
    )
    assert max(free) >= 38 > max(limited)


def test_generate_needs_an_idle_engine_and_distinct_ids(model: Decoder) -> None:
    served = engine(model)
    with pytest.raises(ValueError, match="request_id of its own"):
        served.generate([request("a", 0), request("a", 1)])
    assert not served.has_work
    served.add(request("a", 0))
    with pytest.raises(ValueError, match="still being served"):
        served.generate([request("b", 0)])


def test_paged_attention_is_dense_attention_row_by_row() -> None:
    torch.manual_seed(0)
    lengths, kv_lens = [3, 5, 1], [4, 9, 2]
    k_pages, v_pages = torch.randn(2, 8, 4, 2, 6).double()
    table = torch.tensor([[3, 0, 0], [5, 1, 7], [2, 0, 0]])
    q = torch.randn(sum(lengths), 4, 6).double()
    bounds = torch.tensor([0, 3, 8, 9])
    layout = RowLayout(cu_seqlens_q=bounds, kv_lens_R=torch.tensor(kv_lens), page_table_RP=table, page_size=4)
    out = paged_attention(q, k_pages, v_pages, layout)
    for r, n in enumerate(kv_lens):
        k = k_pages[table[r]].flatten(0, 1)[:n].repeat_interleave(2, dim=1)
        v = v_pages[table[r]].flatten(0, 1)[:n].repeat_interleave(2, dim=1)
        rows = q[bounds[r] : bounds[r + 1]]
        weights = torch.einsum("qhc,khc->hqk", rows, k).div(6**0.5).softmax(-1)
        torch.testing.assert_close(out[bounds[r] : bounds[r + 1]], torch.einsum("hqk,khc->qhc", weights, v))


def test_page_pool_names_what_is_wrong() -> None:
    pool = PagePool(6)
    first, second = pool.alloc(2), pool.alloc(3)
    assert first and second and pool.alloc(1) is None
    pool.check_integrity({"a": first, "b": second})
    with pytest.raises(AssertionError, match="no owner holds"):
        pool.check_integrity({"a": first})
    with pytest.raises(AssertionError, match="is held by a and by b"):
        pool.check_integrity({"a": first, "b": [*second, first[0]]})
