"""A small model drafts for a large one: the literal loop and the engine agree, answers are the large model's own, and
what cannot be had is refused."""

import dataclasses
import functools
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from drawn_counts import MANY_ROWS, chi_square
from small_engines import EOS, MASK, VOCAB, B, build, request, run_with_preemption
from test_draft_lengths import Clock, Cost, force
from test_verified_decoding import random_requests
from test_verified_slots import WholeTexts

from mbd_core.decoding.blocks.causal_config import Causal
from mbd_core.decoding.blocks.config import DecodingConfig
from mbd_core.decoding.blocks.literal_algorithms import BlockTokens
from mbd_core.decoding.blocks.literal_verified import MaskDrafts, verified_multibd
from mbd_core.decoding.blocks.request import Output, Request
from mbd_core.decoding.blocks.sampling import Vocab
from mbd_core.decoding.blocks.sampling_config import Sampling
from mbd_core.decoding.blocks.verification import Draft, HashedNoise, judge
from mbd_core.decoding.blocks.verify_config import Verify
from mbd_core.decoding.canvas.unmasking import noise_source
from mbd_core.decoding.grammar.grammar import Grammar
from mbd_core.engine.config import EngineConfig
from mbd_core.engine.engine import Engine
from mbd_core.engine.sequences.admission import RequestRefused
from mbd_core.models.decoder import Decoder, init_weights
from mbd_core.models.model_config import NO_MASK

TWO = Verify(exact=True, store="causal", lead="causal", draft_model=True)
LARGE: dict[str, dict[str, Any]] = {
    "ar": {"architecture": "Qwen3ForCausalLM", "attention": "causal", "mask_token_id": NO_MASK, "block_size": 1},
    "ar mode": {"ar_mode": True, "mask_token_id": 3},
    "block size 1": {"mask_token_id": 3, "block_size": 2},
    "shifted": {"architecture": "Fast_dLLM_QwenForCausalLM", "shift_logits": True, "mask_token_id": 3},
}


def large_model(kind: str = "ar", *, seed: int = 11, std: float = 0.2) -> Decoder:
    """Wider and deeper than `build()`, in a padded vocabulary."""
    config = dataclasses.replace(
        build().config, hidden_size=48, num_layers=3, intermediate_size=64, vocab_size=VOCAB + 3, **LARGE[kind]
    )
    model = Decoder(config)
    init_weights(model, seed=seed, std=std)
    return model.eval()


def small_model(**changes: Any) -> Decoder:
    model = Decoder(dataclasses.replace(build().config, **changes))
    init_weights(model, seed=5, std=0.2)
    return model.eval()


def two_sizes(model: Decoder, draft: Decoder | None = None, **changes: Any) -> Engine:
    sizes = {"max_rows": 6, "num_pages": 200, "page_size": 8, "max_prefill_tokens": 12, "buffer_size": 3}
    config = EngineConfig(**(sizes | changes))
    return Engine(model, config, vocab_limit=VOCAB, draft_model=draft or small_model())


def own_decoding(kind: str) -> DecodingConfig:
    """The large model's decoding, token by token."""
    if kind.startswith("ar"):
        return DecodingConfig(block_size=1 if kind == "ar" else B, causal=Causal(method="ar"))
    return DecodingConfig(block_size=1, carry=kind == "shifted")


def own_answers(model: Decoder, kind: str, requests: list[Request]) -> list[tuple[Any, ...]]:
    if not kind.startswith("ar"):
        alone = Decoder(dataclasses.replace(model.config, block_size=1))
        alone.load_state_dict(model.state_dict())
        model = alone.eval()
    served = Engine(model, EngineConfig(max_rows=6, num_pages=200, page_size=8), vocab_limit=VOCAB)
    outputs = served.generate([dataclasses.replace(r, decoding=own_decoding(kind)) for r in requests])
    return [(o.tokens, o.finish_reason) for o in outputs]


@functools.cache
def random_answers(kind: str) -> list[tuple[Any, ...]]:
    """The large model's own answers to the `random_requests`, which are the same prompts for every number of them."""
    return own_answers(large_model(kind), kind, random_requests(12, own_decoding(kind)))


def drafted(buffer_size: int = 1, **changes: Any) -> DecodingConfig:
    return DecodingConfig(block_size=B, buffer_size=buffer_size, verify=dataclasses.replace(TWO, **changes))


@pytest.mark.parametrize("kind", LARGE)
@pytest.mark.parametrize(
    ("slots", "shift"),
    [
        (1, False),
        (3, True),
        pytest.param(1, True, marks=pytest.mark.slow),
        pytest.param(3, False, marks=pytest.mark.slow),
    ],
)
def test_an_exact_answer_is_the_large_models(kind: str, slots: int, shift: bool) -> None:
    """Greedy, over random prompts and lengths, in batches: no token differs, whatever is drafted."""
    model, draft = large_model(kind), small_model(shift_logits=shift)
    requests = random_requests(12, drafted(slots, lead="block" if slots == 3 else "causal"))
    served = two_sizes(model, draft)
    found = served.generate(requests)
    assert [(o.tokens, o.finish_reason) for o in found] == random_answers(kind)
    assert any(o.counts.num_confirmed_tokens for o in found)
    served.check_integrity()


class TwoTexts(WholeTexts):
    """The literal loop's drafts by a small model, judgements by a large one."""

    def __init__(self, model: Decoder, draft: Decoder, r: Request) -> None:
        super().__init__(draft, r)
        self.large = model

    def logits_of(self, ids: list[int], limits: list[int]) -> torch.Tensor:
        logits_LV = super().logits_of(ids, limits).clone()
        logits_LV[:, MASK] = -torch.inf
        padding = torch.full((len(ids), self.large.config.vocab_size - VOCAB), -torch.inf)
        return torch.cat((logits_LV, padding), dim=1)

    def draft(self, cached: list[int], blocks: list[BlockTokens], forward: int) -> MaskDrafts:
        self.vocab = Vocab(NO_MASK, VOCAB)
        return super().draft(cached, blocks, forward)

    def judge(self, text: list[int], drafted: int, forward: int) -> tuple[bool, int]:
        position, limits = len(text), list(range(1, len(text) + 1))
        large = WholeTexts(self.large, self.r)
        q_1V = large.logits_of(text, limits)[-1:]
        draw = noise_source(torch.tensor([position]), self.r.sampling, forward)
        draft = Draft(torch.tensor([drafted]), self.logits[position][None], self.rule, HashedNoise())
        verdict = judge(q_1V, draft, draw, self.vocab, greedy=not self.r.sampling.draws)
        return bool(verdict[2, 0]), int(verdict[0, 1])


def chosen(masks: Sequence[int]) -> int:
    """Another number of blocks for other numbers of masks."""
    return 1 + (masks[0] + len(masks)) % len(masks)


@pytest.mark.parametrize(
    ("slots", "is_measured"),
    [
        (1, False),
        pytest.param(2, False, marks=pytest.mark.slow),
        (3, False),
        pytest.param(2, True, marks=pytest.mark.slow),
        pytest.param(3, True, marks=pytest.mark.slow),
        (4, True),
    ],
)
def test_the_engine_follows_the_literal_loop(monkeypatch: pytest.MonkeyPatch, slots: int, is_measured: bool) -> None:
    """Tokens, reasons and numbers of forwards, greedy and drawn, of requests side by side."""
    model, draft = large_model(), small_model()
    rng = random.Random(slots)
    counts = force(monkeypatch, lambda rounds: chosen(rounds[-1].masks))
    decoding = drafted(slots, slots="measured" if is_measured else "all")
    requests = [
        dataclasses.replace(r, sampling=Sampling(temperature=rng.choice((0.0, 0.9)), top_k=rng.choice((0, 8)), seed=i))
        for i, r in enumerate(random_requests(8, decoding))
    ]
    confirmed = 0
    outputs = two_sizes(model, draft, buffer_size=4).generate(requests)
    for r, output in zip(requests, outputs, strict=True):
        texts = TwoTexts(model, draft, r)
        eos = () if r.ignore_eos else (EOS,)
        run = verified_multibd(
            list(r.prompt),
            r.max_tokens,
            r.decoding,
            texts.draft,
            texts.judge,
            eos=eos,
            choose=chosen if is_measured else None,
        )
        assert (list(output.tokens), output.finish_reason) == (run.tokens, run.finish_reason)
        assert output.counts.num_forwards == run.num_forwards
        confirmed += output.counts.num_confirmed_tokens
    assert confirmed
    assert set(counts) == (set(range(1, slots + 1)) if is_measured else set())


@pytest.mark.parametrize("kind", LARGE)
def test_whatever_is_chosen_an_exact_answer_is_the_large_models(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Random numbers of blocks, anew in each round, in batches and after preemptions."""
    model, rng = large_model(kind), random.Random(2)
    counts = force(monkeypatch, lambda rounds: rng.randint(1, len(rounds)))
    requests = random_requests(7, drafted(3, slots="measured"))
    wanted = random_answers(kind)[:7]
    served = two_sizes(model)
    for found in (served.generate(requests), run_with_preemption(two_sizes(model, num_pages=40), requests, rng)):
        assert [(o.tokens, o.finish_reason) for o in found] == wanted
    assert set(counts) == {1, 2, 3}
    served.check_integrity()


@torch.no_grad()
def always_says_7(model: Decoder) -> None:
    for name, weight in model.named_parameters():
        if weight.ndim > 1:
            weight.fill_("embed" in name)
    model.lm_head.weight[7] = 1.0


@pytest.mark.parametrize(
    ("rows", "agrees", "small", "large"),
    [
        (1, True, lambda size: 0.1, lambda size: 1.0),
        (4, True, lambda size: 0.1, lambda size: 1.0),
        (1, True, lambda size: 0.02 * size, lambda size: 1.0),
        (4, True, lambda size: 0.02 * size, lambda size: 1.0),
        (1, False, lambda size: 0.5 * size, lambda size: 0.1 * size),
        pytest.param(4, False, lambda size: 0.5 * size, lambda size: 0.1 * size, marks=pytest.mark.slow),
    ],
)
def test_the_choice_follows_the_seconds_of_both_models(rows: int, agrees: bool, small: Cost, large: Cost) -> None:
    """By given seconds: several blocks where drafts agree and the large model's forwards cost most, one where drafts
    do not agree and the small model's positions cost most."""
    model, draft = large_model(), small_model()
    for each in [model, draft] if agrees else [draft]:
        always_says_7(each)
    seconds, tokens = [], set()
    for decoding in (drafted(), drafted(3, slots="measured")):
        clock = Clock()
        config = EngineConfig(max_rows=rows, num_pages=400, page_size=8, buffer_size=3)
        served = Engine(model, config, vocab_limit=VOCAB, draft_model=draft, clock=clock)
        assert served._state.draft_runner is not None
        clock.watch(served._state.draft_runner, small)
        clock.watch(served.runner, large)
        requests = [
            Request(request_id=f"r{i}", prompt=(5, 6, 7 + i), max_tokens=60, decoding=decoding, ignore_eos=True)
            for i in range(2 * rows)
        ]
        tokens.add(tuple(o.tokens for o in served.generate(requests)))
        seconds.append(clock.now)
    assert len(tokens) == 1
    assert seconds[1] < (0.75 if agrees else 1.06) * seconds[0]


def test_a_draft_that_is_the_judge_is_accepted_whole() -> None:
    """At block size 1 both models are one function of the text, so every draft is what the judge would write."""
    model = small_model(block_size=1)
    requests = random_requests(10, drafted())
    for output in two_sizes(model, model, page_size=8).generate(requests):
        assert output.counts.num_confirmed_tokens == output.counts.num_drafted_tokens > 0
        assert output.counts.num_forwards == 2 * output.counts.num_drafted_tokens


@pytest.mark.slow
@pytest.mark.parametrize("is_measured", [False, True], ids=["all", "chosen"])
def test_drawn_answers_have_the_large_models_distribution(monkeypatch: pytest.MonkeyPatch, is_measured: bool) -> None:
    """Four tokens of two blocks, 600 times each way: they have one distribution. A chosen number of blocks depends on
    the draws before it."""
    model = large_model(std=0.45)
    chosen = force(monkeypatch, lambda rounds: 1 if rounds[0].masks[0] == 1 else len(rounds))
    two = drafted(2, slots="measured") if is_measured else dataclasses.replace(drafted(2), tau_add=0.0)
    counts = []
    for served, decoding in (
        (two_sizes(model, **MANY_ROWS), two),
        (Engine(model, EngineConfig(**MANY_ROWS, page_size=8), vocab_limit=VOCAB), own_decoding("ar")),
    ):
        requests = [
            Request(
                request_id=f"r{i}",
                prompt=(5, 9, 14, 33, 7),
                max_tokens=4,
                decoding=decoding,
                sampling=Sampling(temperature=1.0, top_k=2, seed=i),
                ignore_eos=True,
            )
            for i in range(600)
        ]
        counts.append(Counter(o.tokens for o in served.generate(requests)))
    assert 8 < len(counts[0] | counts[1]) <= 16
    assert not is_measured or min(chosen[1], chosen[2]) > 50
    assert chi_square(*counts) < 37.7, counts  # the 0.999 quantile for 15 degrees of freedom


@pytest.mark.parametrize(
    "kind",
    ["ar", *(pytest.param(kind, marks=pytest.mark.slow) for kind in LARGE if kind != "ar")],
)
def test_preempted_answers_go_on_exactly(kind: str) -> None:
    """With all slots; another test preempts answers of chosen numbers of them, for each kind of large model."""
    requests = random_requests(8, drafted(2))
    found = run_with_preemption(two_sizes(large_model(kind), num_pages=40), requests, random.Random(2))
    assert [(o.tokens, o.finish_reason) for o in found] == random_answers(kind)[:8]


def test_pages_hold_the_keys_of_both_models() -> None:
    """A prefix that both have stored is shared, one that the large model alone has stored is not; a shared one gives
    the same drafts."""
    model, draft, prompt = large_model(), small_model(), tuple(range(2, 35))
    served = two_sizes(model, draft, max_prefill_tokens=64)
    confirmed = []
    for decoding, cached in ((own_decoding("ar"), 0), (drafted(), 0), (drafted(2), 32), (drafted(), 32)):
        one = Request(request_id="a", prompt=prompt, max_tokens=12, decoding=decoding, ignore_eos=True)
        (output,) = served.generate([one])
        assert output.counts.num_cached_tokens == cached
        confirmed.append(output.counts.num_confirmed_tokens)
    assert confirmed[1] == confirmed[3]
    (alone,) = two_sizes(model, draft, prefix_caching=False).generate([one])
    assert (alone.tokens, alone.counts.num_confirmed_tokens) == (output.tokens, confirmed[3])
    assert served.sleep() > 0
    served.wake_up()
    (again,) = served.generate([one])
    assert (again.tokens, again.counts.num_confirmed_tokens) == (output.tokens, confirmed[3])


@pytest.mark.parametrize("number", [4, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=() if kind in ("ar", "shifted") else pytest.mark.slow) for kind in LARGE],
)
def test_a_page_is_shared_when_both_models_have_stored_it(kind: str, number: int) -> None:
    """Requests that begin like another's answer, which ended where a page ends, write what they write alone."""
    model, rng = large_model(kind), random.Random(4)
    served, requests, outputs = two_sizes(model), list[Request](), list[Output]()
    for i in range(number):
        prompt = tuple(rng.choices(range(2, 40), k=rng.randint(1, 9)))
        for length, name in ((40 - len(prompt), "a"), (5, "b")):
            requests.append(
                Request(
                    request_id=f"{name}{i}",
                    prompt=prompt,
                    max_tokens=length,
                    decoding=drafted(1 + i % 2),
                    ignore_eos=True,
                )
            )
            outputs += served.generate(requests[-1:])
            prompt = (*prompt, *outputs[-1].tokens, 7)
    assert [(o.tokens, o.finish_reason) for o in outputs] == own_answers(model, kind, requests)
    assert all(32 <= o.counts.num_cached_tokens <= 40 for o in outputs[1::2])


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_an_answer_does_not_depend_on_what_runs_beside_it(temperature: float) -> None:
    """Batched requests of all methods, in a batch-invariant engine: the same tokens, drafts and forwards as alone."""
    model, draft = large_model("ar mode"), small_model()
    methods = {"drafted": drafted(), "slots": drafted(3), "ar": own_decoding("ar mode")}
    requests = [
        request(f"{name}{i}", i, "single", decoding=decoding, sampling=Sampling(temperature=temperature, seed=i))
        for i, (name, decoding) in enumerate(2 * list(methods.items()))
    ]
    together = two_sizes(model, draft, batch_invariant=True, prefix_caching=False).generate(requests)
    for r, output in zip(requests, together, strict=True):
        (alone,) = two_sizes(model, draft, batch_invariant=True, prefix_caching=False).generate([r])
        assert output.tokens == alone.tokens and output.piece.logprobs == alone.piece.logprobs
        assert output.counts.num_confirmed_tokens == alone.counts.num_confirmed_tokens


def test_an_answer_goes_on_in_another_engine() -> None:
    model = large_model()
    r = request("a", 3, "single", max_tokens=24, ignore_eos=True, sampling=Sampling(), decoding=drafted(2))
    (whole,) = two_sizes(model).generate([r])
    for cut in (1, 5, B, 3 * B - len(r.prompt) % B):
        (rest,) = two_sizes(model).generate([dataclasses.replace(r, committed=whole.tokens[:cut], first_forward=9)])
        assert rest.tokens == whole.tokens


def test_what_cannot_be_had_is_refused_in_a_sentence() -> None:
    model = large_model()
    for draft, config, message in (
        (large_model(), {}, "fills masks in blocks"),
        (small_model(attention="full"), {}, "fills masks in blocks"),
        (small_model(vocab_size=VOCAB - 1), {}, "one tokenizer"),
        (small_model(max_positions=128), {}, "let max_model_len be at most 128"),
        (small_model().bfloat16(), {}, "load both alike"),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            two_sizes(model, draft, **config)
        assert "\n" not in str(caught.value)
    two_sizes(model, small_model(max_positions=128), max_model_len=128)
    with pytest.raises(ValueError, match="no mode that judges token by token"):
        two_sizes(small_model(attention="full"))
    plain = request("a", 4, "single", decoding=drafted(), sampling=Sampling())
    alone = Engine(model, EngineConfig(num_pages=50))
    with pytest.raises(RequestRefused, match="started with a draft model"):
        alone.add(plain)
    served = two_sizes(model)
    for changes, message in (
        ({"decoding": drafted(4)}, "exceeds this engine's 3 slots"),
        ({"sampling": Sampling(frequency_penalty=0.5)}, "no logit_bias, penalty"),
        ({"rollout": True}, "with verify"),
        (
            {"grammar": Grammar(syntax="regex", text="a*"), "ignore_eos": False},
            r'yet; decode with {"causal": {"method": "ar"}}$',
        ),
    ):
        with pytest.raises(RequestRefused, match=message):
            served.add(dataclasses.replace(plain, **changes))
    with pytest.raises(ValueError, match=r"needs verify\.exact=True"):
        Verify(draft_model=True)
    with pytest.raises(ValueError, match=r"no meaning with verify\.draft_model"):
        DecodingConfig(block_size=B, carry=True, verify=TWO)
