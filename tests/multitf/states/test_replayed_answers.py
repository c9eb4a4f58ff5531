"""A rollout's learner sequence: its log-probabilities are the engine's, forward by forward."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from replayed_answers import answers_of, rollout_request
from small_engines import EXPERTS, MASK, B, build
from torch import Tensor

from mbd_core.decoding.answers.piece import Edit, Piece
from mbd_core.decoding.blocks.canvas_config import Canvas
from mbd_core.decoding.blocks.config import T2T, DecodingConfig, Levenshtein, Soft
from mbd_core.decoding.blocks.verify_config import Verify
from mbd_core.models.decoder import Decoder
from mbd_core.multitf.data.example import IGNORE
from mbd_core.multitf.states.answer import ReplayedAnswer
from mbd_core.multitf.states.replay import ReplayBatch, replay_batch
from mbd_core.multitf.states.replay_cost import ReplayCost, replay_cost
from mbd_core.multitf.step.policy_loss import log_probabilities
from mbd_core.ops.attention.whole import DenseAttention

EXACT = 2e-4


@pytest.fixture(scope="module")
def models() -> dict[str, Decoder]:
    return {
        "blocks": build(),
        "experts": build(moe=EXPERTS),
        "shifted": build("Fast_dLLM_QwenForCausalLM", shift_logits=True, qk_norm=False, qkv_bias=True),
        "full": build("DreamModel", attention="full", shift_logits=True, qk_norm=False, qkv_bias=True),
    }


def batch_of(model: Decoder, answers: list[ReplayedAnswer], **settings: Any) -> ReplayBatch:
    config = model.config
    return replay_batch(answers, mask_token_id=config.mask_token_id, shift=config.shift_logits, **settings)


def differences(model: Decoder, batch: ReplayBatch) -> Tensor:
    """Of each label the learner's log-probability minus the engine's."""
    with torch.no_grad():
        logprobs, _ = log_probabilities(model, batch)
    return logprobs - batch.logprobs[batch.labels != IGNORE]


CASES = [
    *(("blocks", method) for method in ("single", "two slots", "four slots", "quota", "entropy", "parts")),
    ("experts", "four slots"),
    ("shifted", "carry"),
    ("shifted", "four slots"),
    ("full", "d2f"),
    ("full", "four slots"),
]


@pytest.mark.parametrize(("name", "method"), CASES)
def test_log_probabilities_are_the_engines_forward_by_forward(
    models: dict[str, Decoder], name: str, method: str
) -> None:
    model = models[name]
    answers = answers_of(model, [rollout_request(seed, method) for seed in range(12)])
    assert any(answer.tail.tokens for answer in answers)  # ended by an EOS
    assert any(len(answer.tokens) == answer.max_tokens and answer.max_tokens % B for answer in answers)
    batch = batch_of(model, answers)
    assert differences(model, batch).abs().max() < EXACT
    for number, answer in enumerate(answers):
        is_label = (batch.labels != IGNORE) & (batch.sample == number)
        assert sorted(batch.forward[is_label].tolist()) == sorted(step for step in answer.steps if step)
        assert len(batch.stream[is_label].unique()) == len(set(answer.steps) - {0})


def test_answers_that_share_a_sequence_are_as_alone(models: dict[str, Decoder]) -> None:
    answers = answers_of(models["full"], [rollout_request(seed, "d2f") for seed in range(7)])
    packed = batch_of(models["full"], answers, together=[[4, 0, 2], [5], [1, 3, 6]])
    assert packed.input_ids.shape[0] == 3
    assert differences(models["full"], packed).abs().max() < EXACT


@pytest.mark.parametrize("changes", [{"static_shapes": True, "overlap": True}, {"max_rows": 2, "num_pages": 24}])
def test_rollouts_of_other_engines_replay_too(models: dict[str, Decoder], changes: dict[str, Any]) -> None:
    answers = answers_of(models["blocks"], [rollout_request(seed, "four slots") for seed in range(8)], **changes)
    assert differences(models["blocks"], batch_of(models["blocks"], answers)).abs().max() < EXACT


def test_fixed_tokens_are_seen_and_are_no_labels(models: dict[str, Decoder]) -> None:
    template = (5, None, None, 7, 8, 9, None, None, None, 4, None, 6, 3)
    requests = [
        rollout_request(
            seed, "four slots", template=template, max_tokens=len(template), ignore_eos=True, stop_token_ids=()
        )
        for seed in range(6)
    ]
    answers = answers_of(models["blocks"], requests)
    batch = batch_of(models["blocks"], answers)
    assert differences(models["blocks"], batch).abs().max() < EXACT
    assert int((batch.labels != IGNORE).sum()) == len(answers) * template.count(None)
    with pytest.raises(ValueError, match="token 3"):
        replace(answers[0], template=(5, None, None, 8, *template[4:]))


def test_states_of_a_block_alone_are_the_engines_with_one_slot_and_wrong_with_more(models: dict[str, Decoder]) -> None:
    model = models["blocks"]
    for method, is_exact in (("single", True), ("two slots", False), ("four slots", False)):
        answers = answers_of(model, [rollout_request(seed, method) for seed in range(12)])
        local = differences(model, batch_of(model, answers, states="block-local")).abs()
        assert (local.max() < EXACT) == is_exact
        if not is_exact:
            assert (local > 0.1).float().mean() > 0.05


def test_masked_states_are_one_stream_of_blocks_behind_clean_ones(models: dict[str, Decoder]) -> None:
    model = models["blocks"]
    (answer,) = answers_of(model, [rollout_request(4, "four slots", max_tokens=14)])
    batch = batch_of(model, [answer], states="all-masked")
    assert batch.stream.unique().tolist() == [0, 1]
    is_label = batch.labels != IGNORE
    assert int(is_label.sum()) == 14 and bool((batch.input_ids[is_label] == MASK).all())
    assert torch.equal(batch.first[batch.stream == 1], batch.block[batch.stream == 1])
    with torch.no_grad():
        logprobs, _ = log_probabilities(model, batch)
    text = (*answer.prompt, *answer.tokens)
    for place, value in zip(batch.positions[is_label].tolist(), logprobs.tolist(), strict=True):
        start = max(place // B * B, len(answer.prompt))
        block = torch.arange((place // B + 1) * B) // B
        ids = torch.tensor([*text[:start], *[MASK] * (len(block) - start)])
        attention = DenseAttention((block[None] <= block[:, None])[None, None])
        with torch.no_grad():
            hidden = model(ids[None], torch.arange(len(ids))[None], attention)[0, place]
            assert model.logits(hidden).log_softmax(-1)[text[place]].item() == pytest.approx(value, abs=EXACT)


@pytest.mark.parametrize("states", ["exact", "block-local"])
def test_forwards_that_become_one_are_scored_before_the_first_of_them(models: dict[str, Decoder], states: Any) -> None:
    model = models["blocks"]
    answers = answers_of(model, [rollout_request(seed, "two slots", max_tokens=24) for seed in (0, 4, 8)])
    whole, shrunk = (batch_of(model, answers, states=states, shrink=shrink) for shrink in (1, 3))
    noisy = [int((batch.stream > 0).sum()) for batch in (whole, shrunk)]
    assert noisy[0] / 3 < noisy[1] < 0.7 * noisy[0]
    for number, answer in enumerate(answers):
        mine = shrunk.sample == number
        assert int((shrunk.labels[mine] != IGNORE).sum()) == len(answer.tokens)
        if states == "block-local":
            continue
        steps = sorted(set(answer.steps))
        for stream in range(1, int(shrunk.stream[mine].max()) + 1):
            part = mine & (shrunk.stream == stream)
            forwards = shrunk.forward[part & (shrunk.labels != IGNORE)]
            assert sorted(set(forwards.tolist())) == steps[3 * stream - 3 : 3 * stream]
            assert bool((shrunk.input_ids[part & (shrunk.labels != IGNORE)] == MASK).all())
    first = shrunk.forward[shrunk.labels != IGNORE] == 1
    assert states != "exact" or differences(model, shrunk)[first].abs().max() < EXACT


def test_the_windows_of_the_example_in_the_file() -> None:
    answer = ReplayedAnswer(
        prompt=(20, 21),
        answer=Piece(tokens=(2, 3, 4, 5, 6, 7, 8, 9), steps=(1, 2, 1, 3, 2, 3, 4, 4), logprobs=(-1.0,) * 8),
        decoding=DecodingConfig(block_size=2, buffer_size=4),
        max_tokens=8,
        advantage=0.5,
        correct=True,
    )
    batch = replay_batch([answer], mask_token_id=0)
    windows = {
        stream: (batch.input_ids[batch.stream == stream].tolist(), batch.labels[batch.stream == stream].tolist())
        for stream in range(5)
    }
    no = IGNORE
    assert windows == {
        1: ([0, 0, 0, 0], [2, no, 4, no]),
        2: ([2, 0, 4, 0, 0, 0], [no, 3, no, no, 6, no]),
        3: ([4, 0, 6, 0], [no, 5, no, 7]),
        4: ([0, 0], [8, 9]),
        0: ([20, 21, 2, 3, 4, 5, 6, 7], [no] * 8),
    }
    assert batch.first[batch.stream > 0].unique().tolist() == [1, 2, 4]
    assert replay_cost(answer) == ReplayCost(forwards=4, noisy=16, clean=8, trace_rl=2 * (2 + 16))
    assert batch.advantage[batch.labels != no].unique().tolist() == [0.5]
    assert float(batch.weights.sum()) == pytest.approx(1.0)


def test_a_window_begins_at_the_first_open_block_though_another_one_got_the_tokens() -> None:
    """As under a template or a grammar, whose first block waits; the forward of the second has seen the open first."""
    answer = ReplayedAnswer(
        prompt=(20, 21),
        answer=Piece(tokens=(2, 3, 4, 5), steps=(1, 3, 2, 2), logprobs=(-1.0,) * 4),
        decoding=DecodingConfig(block_size=2, buffer_size=2),
        max_tokens=4,
        advantage=1.0,
        correct=True,
    )
    batch = replay_batch([answer], mask_token_id=0)
    assert batch.input_ids[batch.stream == 2].tolist() == [2, 0, 0, 0]
    assert batch.first[batch.stream == 2].unique().tolist() == [1]
    assert batch.block[batch.stream == 3].tolist() == [1, 1], "no later block matters to the last forward"


@pytest.mark.parametrize("states", ["exact", "block-local", "all-masked"])
def test_a_cost_is_that_of_the_batch(models: dict[str, Decoder], states: Any) -> None:
    for name, method in (("blocks", "four slots"), ("full", "d2f")):
        answers = answers_of(models[name], [rollout_request(seed, method) for seed in range(8)])
        costs = [replay_cost(answer, states=states) for answer in answers]
        assert sum(cost.tokens for cost in costs) == batch_of(models[name], answers, states=states).num_tokens
        assert sum(costs, ReplayCost()).noisy == sum(cost.noisy for cost in costs)


def with_steps(*steps: int, tail: tuple[int, ...] = (2, 3)) -> dict[str, Piece]:
    """An answer and its tail with this step map, each of one log-probability."""
    return {
        "answer": Piece(tokens=(7, 8, 9, 10), steps=steps, logprobs=(-1.0,) * len(steps)),
        "tail": Piece(tokens=(1, 3)[: len(tail)], steps=tail, logprobs=(-0.5,) * len(tail)),
    }


def good(**changes: Any) -> ReplayedAnswer:
    """An answer of six tokens, whose EOS and the token behind it end its second block."""
    fields: dict[str, Any] = {
        "prompt": (5, 6),
        **with_steps(1, 1, 2, 2),
        "decoding": DecodingConfig(block_size=4, buffer_size=2),
        "max_tokens": 20,
        "advantage": 1.0,
        "correct": True,
    }
    return ReplayedAnswer(**fields | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"decoding": DecodingConfig(block_size=4, t2t=T2T())}, "with t2t cannot be replayed"),
        ({"decoding": DecodingConfig(block_size=4, soft=Soft())}, "with soft cannot be replayed"),
        ({"decoding": DecodingConfig(block_size=4, verify=Verify())}, "with verify cannot be replayed"),
        ({"decoding": DecodingConfig(block_size=4, tau_m2t=0.3, edit=Levenshtein())}, "with edit cannot be replayed"),
        ({"decoding": DecodingConfig(block_size=4, canvas=Canvas(block_length=4, tau=0.3))}, "with canvas cannot be"),
        ({"answer": replace(good().answer, edits=(Edit(0, 1, 4),))}, "tokens that were overwritten"),
        ({"answer": replace(good().answer, steps=(1, 1, 2))}, "has 3 steps and 4 log-probabilities of 4 tokens"),
        ({"tail": replace(good().tail, logprobs=())}, "0 log-probabilities of 2 tail tokens"),
        (with_steps(1, 1, 2, 2, tail=()), r"ends 2 tokens into a block of 4.*tail.*missing"),
        ({"answer": replace(good().answer, steps=(1, -1, 2, 2))}, "negative step"),
        (with_steps(0, 0, 0, 0, tail=(0, 0)), "nothing to learn from"),
        ({"max_tokens": 5}, "6 tokens, more than max_tokens=5"),
        ({"advantage": float("nan")}, "must be finite"),
        ({"answer": replace(good().answer, logprobs=(-1.0, float("-inf"), -1.0, -1.0))}, "must be finite"),
    ],
)
def test_what_cannot_be_replayed_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        good(**changes)


def test_settings_that_cannot_be_honoured_are_refused() -> None:
    with pytest.raises(ValueError, match="shrink=0"):
        replay_batch([good()], mask_token_id=0, shrink=0)
    with pytest.raises(ValueError, match="shrink=2"):
        replay_batch([good()], mask_token_id=0, shrink=2, states="all-masked")
    with pytest.raises(ValueError, match="without a prompt"):
        replay_batch([good(prompt=(), **with_steps(1, 1, 2, 2, tail=()))], mask_token_id=0, shift=True)
