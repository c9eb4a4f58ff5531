"""On-policy distillation of an engine's answers: which states are learned, from whom, and the same in any parts."""

import io
import random
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from replayed_answers import METHODS, answers_of, rollout_request
from small_engines import B, build

from mbd_core.models.decoder import Decoder
from mbd_core.multitf.config import LoraSettings, TeacherSettings, TrainConfig
from mbd_core.multitf.states.answer import ReplayedAnswer
from mbd_core.multitf.states.drawn_states import block_by_block, drawn_rows, drawn_states
from mbd_core.multitf.states.replay import AnswerGrid, replayed_states
from mbd_core.multitf.step.distiller import Distiller, DistillerReport
from mbd_core.ops.attention.whole import DenseAttention

BLOCKS = TeacherSettings(reads="blocks")
CONFIG = TrainConfig(
    steps=50,
    batch_size=8,
    lr=2e-3,
    warmup=1,
    optimizer="adamw",
    schedule="constant",
    precision="float32",
    teacher=BLOCKS,
)
LORA = LoraSettings(rank=4, alpha=8, dropout=0.0)
MASK = 0


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Sums in one order, so that equal means equal."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def answers_by(method: str) -> list[ReplayedAnswer]:
    return answers_of(build(), [rollout_request(seed, method) for seed in range(8)])


@pytest.fixture(scope="module")
def answers() -> list[ReplayedAnswer]:
    return answers_by("four slots")


def copy_of(model: Decoder) -> Decoder:
    return deepcopy(model).eval().requires_grad_(False)


@torch.no_grad()
def other() -> Decoder:
    """A frozen model of other weights."""
    model, generator = build(), torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    return copy_of(model)


def distiller(frozen: Decoder | None = None, **train: Any) -> Distiller:
    """By default the model's copy teaches, or the model without its adapter."""
    config = replace(CONFIG, **train)
    return Distiller(build(), config, frozen if config.lora is not None else frozen or copy_of(build()))


def gist(report: DistillerReport) -> dict[str, float]:
    return {name: number for name, number in report.point().items() if name != "seconds"}


@pytest.mark.parametrize("method", [name for name in METHODS if name not in ("carry", "d2f")])
def test_every_block_counts_once_in_a_state_that_the_engine_was_in(method: str) -> None:
    for number, answer in enumerate(answers_by(method)):
        grid = AnswerGrid.of(answer, mask_token_id=MASK)
        exact = {int(grid.steps[state.is_label].min()): state for state in replayed_states(grid, "exact", 1)}
        every = np.ones(len(grid.tokens), dtype=bool)
        draws = random.Random(number)
        drawn = drawn_states(grid, "exact", shrink=1, choose=draws.randrange, counted=every)
        counted = np.concatenate([np.unique(grid.blocks[state.is_label]) for state in drawn])
        assert counted.tolist() == np.unique(grid.blocks[grid.is_decided]).tolist()
        for state in drawn:
            time = int(grid.steps[state.is_label].min())
            assert np.array_equal(state.is_visible, exact[time].is_visible)
            assert np.array_equal(state.is_there, exact[time].is_there)
            group = np.isin(grid.blocks, grid.blocks[state.is_label])
            assert np.array_equal(state.is_label, group & grid.is_decided & ~state.is_visible)


def test_with_one_slot_a_state_is_a_blocks_own() -> None:
    for answer in answers_by("single"):
        grid = AnswerGrid.of(answer, mask_token_id=MASK)
        every = np.ones(len(grid.tokens), dtype=bool)
        exact, local = (
            drawn_states(grid, states, shrink=1, choose=random.Random(5).randrange, counted=every)
            for states in ("exact", "block-local")
        )
        for one, other, alone in zip(exact, local, block_by_block(exact, grid.blocks), strict=True):
            for name in ("is_there", "is_label"):
                assert np.array_equal(getattr(one, name), getattr(other, name)), name
                assert np.array_equal(getattr(one, name), getattr(alone, name)), name
            there = one.is_there
            assert np.array_equal(one.is_visible[there], other.is_visible[there])


def test_the_end_of_an_answer_is_no_label(answers: list[ReplayedAnswer]) -> None:
    ended = [answer for answer in answers if len(answer.tail) and len(answer.tokens)]
    assert ended
    for answer in ended:
        row, _ = drawn_rows(answer, mask_token_id=MASK, draws=random.Random(0))
        learned = [p for p, label in zip(row["positions"], row["labels"], strict=True) if label >= 0]
        assert learned and max(learned) < len(answer.prompt) + len(answer.tokens)
        assert sum(row["weights"]) == pytest.approx(1)


def test_a_model_with_one_slot_is_its_own_perfect_teacher(answers: list[ReplayedAnswer]) -> None:
    """At one slot it reads the states that it was in; at four, finished blocks instead of masks."""
    assert distiller().update(answers_by("single")).loss == pytest.approx(0, abs=1e-6)
    report = distiller().update(answers)
    assert report.loss > 1e-3 and report.divergence > 1e-3 and report.grad_norm > 0 and report.tflop > 0
    assert report.answers == 8 and report.labels > 0 and report.tokens < report.positions
    assert 0 <= report.agreement <= 1 and report.parts["loss_slot_1"] >= 0


@torch.no_grad()
def log_distributions(model: Decoder, tokens: list[int]) -> torch.Tensor:
    """Of each position (L, V), where blocks see themselves and the blocks before them."""
    ids, positions = torch.tensor([tokens]), torch.arange(len(tokens))[None]
    blocks = positions[0] // B
    hidden = model(ids, positions, DenseAttention((blocks <= blocks[:, None])[None, None]))
    return model.logits(hidden)[0].log_softmax(-1)


def literal_divergence(answer: ReplayedAnswer, student: Decoder, teacher: Decoder, draws: random.Random) -> float:
    """KL(teacher || student) at the masks of drawn states, a forward a block: the teacher reads the finished blocks
    before it and the block's state, the student the whole state."""
    num_prompt, steps = len(answer.prompt), [0] * len(answer.prompt) + list(answer.steps)
    tokens = [*answer.prompt, *answer.decided]
    fill = -len(tokens) % B
    tokens, steps = tokens + [MASK] * fill, steps + [0] * fill
    block_of = [place // B for place in range(len(tokens))]
    done, divergences = -1, []
    for block in range(block_of[-1] + 1):
        times = sorted({step for step, of in zip(steps, block_of, strict=True) if of == block and step})
        if block <= done or not times:
            continue
        time = times[draws.randrange(len(times))]
        done = max(of for step, of in zip(steps, block_of, strict=True) if step == time)
        state = [token if step < time else MASK for token, step in zip(tokens, steps, strict=True)]
        student_LV = log_distributions(student, state[: (done + 1) * B])
        for taught in range(block, done + 1):
            teacher_LV = log_distributions(teacher, tokens[: taught * B] + state[taught * B : (taught + 1) * B])
            for place in range(taught * B, (taught + 1) * B):
                if steps[place] >= time and place < num_prompt + len(answer.tokens):
                    ours, theirs = student_LV[place], teacher_LV[place]
                    divergences.append(float((theirs.exp() * (theirs - ours)).sum()))
    return sum(divergences) / max(1, len(divergences))


@pytest.mark.parametrize("method", ["four slots", "single"])
def test_a_teacher_of_blocks_is_a_literal_forward_for_each_block(method: str) -> None:
    given, student, teacher = answers_by(method), build().eval(), other()
    assert {answer.decoding.block_size for answer in given} == {B}
    wanted = [
        literal_divergence(answer, student, teacher, random.Random(f"{CONFIG.seed}/states/0/{place}"))
        for place, answer in enumerate(given)
    ]
    report = distiller(teacher).update(given)
    assert report.loss == pytest.approx(sum(wanted) / len(wanted), rel=1e-4) and report.loss > 1e-2


@pytest.mark.parametrize("reads", ["text", "blocks"])
def test_a_student_comes_nearer_to_its_teacher(answers: list[ReplayedAnswer], reads: str) -> None:
    one = distiller(other(), teacher=TeacherSettings(reads=reads), lr=1e-2)
    first, *_, last = [one.update(answers).divergence for _ in range(12)]
    assert last < 0.8 * first


@pytest.mark.parametrize("reads", ["text", "blocks"])
@pytest.mark.parametrize(
    "train",
    [{"micro_batch": 1}, {"micro_batch": 3}, {"pack": 200}, {"pack": 200, "micro_batch": 1}, {"attention": "dense"}],
)
def test_parts_of_an_update_are_the_update(answers: list[ReplayedAnswer], reads: str, train: dict[str, Any]) -> None:
    settings = TeacherSettings(reads=reads)
    whole, parts = (distiller(other(), teacher=settings, **changes) for changes in ({}, train))
    one, two = whole.update(answers), parts.update(answers)
    assert (one.labels, one.tokens) == (two.labels, two.tokens)
    for name in ("loss", "divergence", "agreement", "grad_norm"):
        assert getattr(one, name) == pytest.approx(getattr(two, name), rel=1e-4), name


@pytest.mark.parametrize("train", [{}, {"lora": LORA}])
def test_a_resumed_distiller_goes_on_bit_for_bit(answers: list[ReplayedAnswer], train: dict[str, Any]) -> None:
    if train:
        pytest.importorskip("peft")
    through = distiller(**train)
    reports = [gist(through.update(answers)) for _ in range(3)]
    first = distiller(**train)
    first.update(answers)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second = distiller(**train)
    second.load_state_dict(torch.load(file, weights_only=True))
    assert [gist(second.update(answers)) for _ in range(2)] == reports[1:]
    for name, tensor in second.weights().items():
        assert torch.equal(tensor, through.weights()[name]), name
    if not train:
        with pytest.raises(ValueError, match="frozen"):
            distiller(other()).load_state_dict(first.state_dict())


def test_what_a_distiller_cannot_honour_is_refused() -> None:
    with pytest.raises(ValueError, match="needs a teacher"):
        Distiller(build(), CONFIG, None)
    with pytest.raises(ValueError, match="labels"):
        distiller(teacher=TeacherSettings(weight=0.5))
    with pytest.raises(ValueError, match="dropout"):
        distiller(lora=replace(LORA, dropout=0.1))
    with pytest.raises(ValueError, match="at least one answer"):
        distiller().update([])
