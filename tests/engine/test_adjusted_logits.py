"""Penalties, biases, bans and min_p in block decoding: the engine against a plain loop over uncached forwards."""

import itertools
import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from small_engines import EOS, MASK, VOCAB, B, build
from torch import Tensor

from mbd_core.decoding.blocks.canvas_config import Branches, Canvas, MultiBlock
from mbd_core.decoding.blocks.config import T2T, DecodingConfig, Soft
from mbd_core.decoding.blocks.literal_algorithms import BlockTokens, LiteralRun, Predictions, Weights, naive_multibd
from mbd_core.decoding.blocks.request import Output, Request
from mbd_core.decoding.blocks.sampling import Draw, gumbel
from mbd_core.decoding.blocks.sampling_config import MAX_BIASES, MAX_STOP_IDS, Sampling
from mbd_core.engine.config import EngineConfig
from mbd_core.engine.engine import Engine
from mbd_core.engine.sequences.admission import RequestRefused
from mbd_core.engine.step.graphs import StepGraphs
from mbd_core.engine.step.kinds import StepKind
from mbd_core.models.decoder import Decoder
from mbd_core.multitf.states.mask import block_causal_mask
from mbd_core.ops.attention.whole import DenseAttention


@pytest.fixture(scope="module")
def model() -> Decoder:
    return build().double()


SAMPLINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.7},
    "reward": {"frequency_penalty": -0.4, "presence_penalty": -0.3},
    "repetition": {"repetition_penalty": 1.4},
    "bias": {"logit_bias": ((7, 3.0), (9, -100.0), (EOS, 1.5))},
    "all": {
        "presence_penalty": 0.5,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.2,
        "logit_bias": ((11, 2.0), (12, -2.0)),
        "min_p": 0.1,
    },
}


def request(name: str, seed: int, kind: str, *, buffer_size: int = 3, draws: bool = False, **changes: Any) -> Request:
    rng = random.Random(seed)
    prompt = tuple(rng.choices(range(2, VOCAB), k=rng.randint(1, 14)))
    drawn = {"temperature": 0.8, "top_k": rng.choice((0, 12)), "top_p": rng.choice((1.0, 0.9))} if draws else {}
    fields: dict[str, Any] = {
        "prompt": prompt,
        "max_tokens": 22,
        "decoding": DecodingConfig(block_size=B, buffer_size=buffer_size, tau_m2t=0.3, tau_add=0.1, tau_semi=0.5),
        "sampling": Sampling(seed=seed, **SAMPLINGS[kind], **drawn),
    }
    return Request(request_id=name, **(fields | changes))


def engine(model: Decoder, **changes: Any) -> Engine:
    return Engine(model, EngineConfig(**{"max_rows": 4, "num_pages": 64, "page_size": 8} | changes))


def raw_logits(model: Decoder, tokens: list[int]) -> Tensor:
    """Logits (L, V) of one whole block-causal forward, nothing cached, in float32."""
    positions = torch.arange(len(tokens))[None]
    mask = block_causal_mask(positions // B)[:, None]
    with torch.no_grad():
        return model.logits(model(torch.tensor([tokens]), positions, DenseAttention(mask)))[0].float()


def changed(raw: list[float], r: Request, answer: list[int], position: int) -> list[float]:
    """One position's logits as docs/reference/requests.md defines them."""
    sampling, counts = r.sampling, Counter(answer)
    logits = raw[:]
    for token, bias in sampling.logit_bias:
        logits[token] += bias
    if position < len(r.prompt) + r.min_tokens:
        for token in r.ends((EOS,)):
            logits[token] = -torch.inf
    for token in {*r.prompt, *answer}:
        value = logits[token]
        logits[token] = value / sampling.repetition_penalty if value > 0 else value * sampling.repetition_penalty
    for token, count in counts.items():
        logits[token] -= sampling.frequency_penalty * count + sampling.presence_penalty
    logits[MASK] = -torch.inf
    return logits


def drawn(logits: Tensor, r: Request, position: int, forward: int) -> int:
    """A token by temperature, then min_p, then top_k, then top_p."""
    s = r.sampling
    p = (logits / s.temperature).softmax(-1)
    p[p < s.min_p * p.max()] = 0.0
    order = p.argsort(descending=True, stable=True)
    kept, total = [], 0.0
    ranked = order[: s.top_k or None]
    for token in ranked.tolist():
        if total < s.top_p * float(p[ranked].sum()) and p[token] > 0:
            kept.append(token)
        total += float(p[token])
    one = torch.tensor([0])
    noise = Draw(one, one, one, torch.tensor([s.seed]), torch.tensor([position]), torch.tensor([forward]))
    score = p[kept].log() + gumbel(noise, torch.tensor([kept]))[0]
    return kept[int(score.argmax())]


def literal(model: Decoder, r: Request) -> LiteralRun:
    """Algorithm 4; each forward counts the tokens of the prompt and those that earlier forwards have filled."""
    forwards = itertools.count()

    def predict(prefix: list[int], blocks: list[BlockTokens], weights: list[Weights]) -> list[Predictions]:
        forward = next(forwards)
        placed = [*prefix, *(t for block in blocks for t in block)]
        answer = [t for t in placed[len(r.prompt) :] if t is not None]
        raw = raw_logits(model, [MASK if t is None else t for t in placed])
        triples = []
        for position in range(len(prefix), len(placed)):
            logits = torch.tensor(changed(raw[position].tolist(), r, answer, position))
            token = drawn(logits, r, position, forward) if r.sampling.draws else int(logits.argmax())
            confidence = float(raw[position].softmax(-1)[token])  # the model's own probability
            triples.append((token, confidence, confidence))
        return [triples[i : i + B] for i in range(0, len(triples), B)]

    ends = r.ends((EOS,))
    return naive_multibd(list(r.prompt), r.max_tokens, r.decoding, predict, eos=ends, cap=r.decoding.buffer_size)


def gist(output: Output) -> tuple[Any, ...]:
    return output.tokens, output.finish_reason, output.counts.num_forwards


ONCE = {("presence", False), ("frequency", True), ("reward", False), ("repetition", True), ("bias", False)}
"""Cases whose change is made by the other choice of tokens, too; `plain` and `all` are made by both."""


@pytest.mark.parametrize(
    ("kind", "draws"),
    [
        pytest.param(
            kind,
            draws,
            id=f"{kind}-{'drawn' if draws else 'greedy'}",
            marks=pytest.mark.slow if (kind, draws) in ONCE else (),
        )
        for kind in SAMPLINGS
        for draws in (False, True)
    ],
)
def test_the_engine_is_the_literal_loop(model: Decoder, kind: str, draws: bool) -> None:
    """SingleBD and MultiBD, packed, static and ahead; with ends that are held back, ignored, or more than the EOS."""
    ends = [{}, {"min_tokens": 9}, {"stop_token_ids": (14, 22, 31)}, {"ignore_eos": True, "stop_token_ids": (5,)}]
    ends = ends if kind in ("plain", "all") else ends[:2]
    asked = [
        request(f"r{i}", 10 * i + draws, kind, buffer_size=size, draws=draws, **more)
        for i, (size, more) in enumerate(itertools.product((1, 3), ends))
    ]
    runs = [literal(model, r) for r in asked]
    wanted = [(tuple(run.tokens), run.finish_reason, run.num_forwards) for run in runs]
    for changes in ({}, {"static_shapes": True}, {"static_shapes": True, "overlap": True}):
        served = engine(model, **changes)
        assert [gist(o) for o in served.generate(asked)] == wanted
        served.check_integrity()


def test_each_change_changes_tokens(model: Decoder) -> None:
    """Otherwise the loop above would compare answers that nothing has touched."""
    served = engine(model)
    for draws in (False, True):
        plain = served.generate([request("r", 3, "plain", draws=draws)])[0].tokens
        for kind in SAMPLINGS.keys() - {"plain"}:
            assert served.generate([request("r", 3, kind, draws=draws)])[0].tokens != plain, kind
    sharp = request("r", 3, "plain", draws=True, sampling=Sampling(temperature=3.0, min_p=0.9, seed=3))
    loose = replace(sharp, sampling=replace(sharp.sampling, min_p=0.0))
    assert served.generate([sharp])[0].tokens != served.generate([loose])[0].tokens


def test_an_answer_ends_with_its_stop_tokens_and_no_sooner_than_asked(model: Decoder) -> None:
    served = engine(model)
    free = served.generate([request("r", 5, "plain", ignore_eos=True)])[0].tokens
    token = free[6]
    stopped = served.generate([request("r", 5, "plain", ignore_eos=True, stop_token_ids=(token,))])[0]
    assert stopped.tokens == free[: free.index(token)] and stopped.finish_reason == "stop"
    for least in (0, 1, 7, 22):
        for seed in range(4):
            bias = Sampling(logit_bias=((EOS, 30.0), (token, 20.0)))
            asked = request("r", seed, "plain", sampling=bias, stop_token_ids=(token,), min_tokens=least)
            assert len(served.generate([asked])[0].tokens) == least


@pytest.mark.parametrize("static", [False, True])
def test_a_row_beside_adjusted_ones_keeps_its_bits(model: Decoder, static: bool) -> None:
    plain = [request(f"p{i}", i, "plain", draws=i % 2 == 1, logprobs=True) for i in range(2)]
    beside = [request(f"a{i}", 7 * i, "all", draws=i == 0, logprobs=True, top_logprobs=3) for i in range(2)]
    served = engine(model, static_shapes=static)
    alone = served.generate(plain)
    together = served.generate([*plain, *beside])
    assert [(o.tokens, o.piece.logprobs) for o in together[:2]] == [(o.tokens, o.piece.logprobs) for o in alone]
    assert [gist(o) for o in served.generate(beside)] == [gist(o) for o in together[2:]]
    assert not served.buffer.adjustments.active_R.any() and (served.buffer.adjustments.penalties_R3[:, 0] == 1).all()


def test_a_batch_where_nobody_asks_runs_the_same_steps(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kinds of steps ask for no such work, whoever was there before; and the step then reads none of it."""
    kinds: list[StepKind] = []
    run = StepGraphs.run
    monkeypatch.setattr(StepGraphs, "run", lambda self, kind, **more: kinds.append(kind) or run(self, kind, **more))
    served = engine(model, static_shapes=True)
    served.generate([request("a", 1, "all", draws=True, logprobs=True, top_logprobs=2)])
    assert all(k.work.adjusts and k.work.tops for k in kinds)
    kinds.clear()
    monkeypatch.setattr(served.buffer, "adjust", None)
    served.generate([request("a", 1, "plain", draws=True, logprobs=True), request("b", 2, "plain")])
    assert kinds and not any(k.work.adjusts or k.work.tops for k in kinds)


@pytest.mark.parametrize("draws", [False, True])
def test_preempted_moved_and_cached_requests_count_the_same_tokens(model: Decoder, draws: bool) -> None:
    """Their penalties count what was committed before, and what stood in their slots."""
    asked = [request(f"r{i}", 20 + i, "all", draws=draws, min_tokens=6) for i in range(3)]
    served = engine(model, batch_invariant=True)
    wanted = [gist(o) for o in served.generate(asked)]
    assert [gist(o) for o in served.generate(asked)] == wanted  # from a warm prefix cache

    outputs: dict[str, Output] = {}
    for r in asked:
        served.add(r)
    for number in itertools.count():
        outputs |= {s.request_id: s.output for s in served.step() if s.output is not None}
        if not served.has_work:
            break
        if number % 3 == 2:
            served.preempt()
    assert [gist(outputs[r.request_id]) for r in asked] == wanted

    single = request("s", 24, "all", buffer_size=1, draws=draws)
    served.add(single)
    steps = []
    while served.has_work:
        steps += served.step()
    whole = steps[-1].output
    assert whole is not None and len(steps) > 2
    for cut in range(1, len(steps) - 1):
        committed = tuple(t for s in steps[:cut] for t in s.piece.tokens)
        moved = replace(single, committed=committed, first_forward=steps[cut - 1].counts.num_forwards)
        assert engine(model, batch_invariant=True).generate([moved])[0].tokens == whole.tokens


@pytest.mark.parametrize("method", ["single", "multi", "t2t", "soft", "carry"])
@pytest.mark.parametrize("static", [False, True])
def test_the_likeliest_tokens_are_those_of_the_reported_forward(model: Decoder, method: str, static: bool) -> None:
    """The answer's own token is among them with the log-probability that is reported, first where it is greedy."""
    parts = {"t2t": {"t2t": T2T(tau=0.2)}, "soft": {"soft": Soft(stop_confidence=0.5)}, "carry": {"carry": True}}
    if method == "carry":
        model = build("Fast_dLLM_QwenForCausalLM", shift_logits=True, qk_norm=False, qkv_bias=True).double()
    size = 1 if method == "single" else 3
    decoding = DecodingConfig(block_size=B, buffer_size=size, tau_m2t=0.3, **parts.get(method, {}))
    asked = [
        request(f"r{i}", i, "plain", decoding=decoding, logprobs=True, top_logprobs=n, ignore_eos=True)
        for i, n in enumerate((20, 1, 4))
    ]
    for r, output in zip(asked, engine(model, static_shapes=static).generate(asked), strict=True):
        assert output.piece.tops is not None and output.piece.logprobs is not None
        assert [len(tops) for tops in output.piece.tops] == [r.top_logprobs] * len(output.tokens)
        for token, logprob, tops in zip(output.tokens, output.piece.logprobs, output.piece.tops, strict=True):
            assert tops[0][0] == token and tops[0][1] == pytest.approx(logprob, abs=1e-5)
            assert [v for _, v in tops] == sorted((v for _, v in tops), reverse=True) and MASK not in dict(tops)


def test_the_likeliest_tokens_are_the_models_own_whatever_was_chosen(model: Decoder) -> None:
    r = request("r", 3, "bias", buffer_size=1, logprobs=True, top_logprobs=20, rollout=True, ignore_eos=True)
    output = engine(model).generate([r])[0]
    assert output.piece.tops is not None and output.piece.steps is not None and output.piece.logprobs is not None
    others = 0
    for index, (step, tops) in enumerate(zip(output.piece.steps, output.piece.tops, strict=True)):
        position = len(r.prompt) + index
        stop = -(-(position + 1) // B) * B
        seen = [t if s < step else MASK for t, s in zip(output.tokens, output.piece.steps, strict=True)]
        tokens = [*r.prompt, *seen, *[MASK] * B][:stop]
        log_p = raw_logits(model, tokens)[position].log_softmax(-1)
        log_p[MASK] = -torch.inf
        assert [t for t, _ in tops] == log_p.topk(20).indices.tolist()
        assert [v for _, v in tops] == pytest.approx(log_p.topk(20).values.tolist(), abs=1e-4)
        assert output.piece.logprobs[index] == pytest.approx(float(log_p[output.tokens[index]]), abs=1e-4)
        others += tops[0][0] != output.tokens[index]
    assert others


CANVASES: dict[str, Canvas] = {
    "threshold": Canvas(block_length=8, tau=0.3),
    "quota": Canvas(block_length=8, accept="quota", steps=12),
    "branches": Canvas(tau=0.3, branches=Branches(block_lengths=(4, 8))),
    "multi_block": Canvas(block_length=4, multi_block=MultiBlock(tau_entropy=3.0)),
}


@pytest.mark.parametrize("method", CANVASES)
@pytest.mark.parametrize("draws", [False, True])
def test_a_canvas_takes_what_it_can_define(method: str, draws: bool) -> None:
    full = build(architecture="LLaDAModelLM", attention="full").double()
    decoding = DecodingConfig(block_size=B, canvas=CANVASES[method])
    served = engine(full)
    free = request("r", 4, "plain", decoding=decoding, draws=draws, max_tokens=24, ignore_eos=True)
    plain = served.generate([free])[0].tokens
    worst = tuple((token, -100.0) for token in set(plain[:5]))
    banned = served.generate([replace(free, sampling=replace(free.sampling, logit_bias=worst))])[0].tokens
    assert len(banned) == 24 and not set(banned) & set(plain[:5])
    pulled = replace(free, sampling=replace(free.sampling, logit_bias=((EOS, 100.0),)), ignore_eos=False)
    for least in (0, 5, 9):
        assert len(served.generate([replace(pulled, min_tokens=least)])[0].tokens) == least
    stopped = served.generate([replace(free, stop_token_ids=(plain[9],))])[0]
    assert stopped.finish_reason == "stop" and plain[9] not in stopped.tokens
    if method != "branches":  # a shorter branch may end there first
        assert stopped.tokens == plain[: plain.index(plain[9])]
    often = replace(free, sampling=replace(free.sampling, frequency_penalty=2.0, presence_penalty=2.0))
    if method == "branches":
        with pytest.raises(RequestRefused, match="branches"):
            served.generate([often])
        return
    spread = served.generate([often])[0].tokens
    assert max(Counter(spread).values()) < max(Counter(plain).values())


def test_what_cannot_be_honoured_is_refused_with_its_field(model: Decoder) -> None:
    served = engine(model)
    t2t = DecodingConfig(block_size=B, t2t=T2T())
    soft = DecodingConfig(block_size=B, soft=Soft())
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("frequency_penalty", {"decoding": t2t, "sampling": Sampling(frequency_penalty=1.0)}),
        ("repetition_penalty", {"decoding": soft, "sampling": Sampling(repetition_penalty=1.1)}),
        ("logit_bias", {"sampling": Sampling(logit_bias=((VOCAB, 1.0),))}),
        ("stop_token_ids", {"stop_token_ids": (-1,)}),
        ("stop_token_ids", {"stop_token_ids": (3,) * (MAX_STOP_IDS + 1)}),
        ("min_tokens", {"min_tokens": 23}),
        ("min_tokens", {"min_tokens": 1, "template": (None,) * 22, "ignore_eos": True}),
        ("top_logprobs", {"top_logprobs": 3}),
        ("top_logprobs", {"top_logprobs": 21, "logprobs": True}),
    ]
    for field, changes in wrong:
        with pytest.raises(RequestRefused) as refused:
            served.add(request("r", 1, "plain", **changes))
        assert refused.value.field == field and field in str(refused.value)
    served.generate([request("r", 1, "bias", decoding=each) for each in (t2t,)])  # a bias has a meaning there


@pytest.mark.parametrize(
    "fields",
    [
        {"presence_penalty": 2.1},
        {"frequency_penalty": float("nan")},
        {"repetition_penalty": 0.0},
        {"min_p": 1.1},
        {"logit_bias": ((5, 101.0),)},
        {"logit_bias": ((5, 1.0), (5, 2.0))},
        {"logit_bias": tuple((token, 0.5) for token in range(MAX_BIASES + 1))},
    ],
)
def test_values_out_of_bounds_are_refused_by_name(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(fields))):
        Sampling(**fields)
