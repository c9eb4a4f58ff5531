"""Learning from an autoregressive teacher against what it stands for: one causal forward of each clean text."""

import random
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from family_models import FAMILIES, random_model
from torch import Tensor
from torch.nn import functional as F

from mbd_core.models.decoder import Decoder
from mbd_core.multitf.config import LoraSettings, TeacherSettings, TrainConfig
from mbd_core.multitf.data.example import IGNORE, Example
from mbd_core.multitf.states.batch import MultiTFBatch
from mbd_core.multitf.states.clean_text import Lesson, end_of
from mbd_core.multitf.states.layout import StateConfig
from mbd_core.multitf.states.sample import build_batch
from mbd_core.multitf.step import loss as losses
from mbd_core.multitf.step.loss import multitf_loss
from mbd_core.multitf.step.teaching import Teacher, taught_divergence, taught_loss
from mbd_core.multitf.step.trainer import Trainer, split_batch
from mbd_core.ops.attention.whole import DenseAttention

B, EOS = 4, 1
STATES = StateConfig(block_size=B, max_group=3, num_random=2, span="response", rounding="ceil")


@pytest.fixture(scope="module", params=["sdar", "fastdllm2"])
def model(request: pytest.FixtureRequest) -> Decoder:
    return random_model(FAMILIES[request.param]).double().train()


@pytest.fixture(scope="module")
def other() -> Decoder:
    return random_model(FAMILIES["sdar"], seed=5).double().requires_grad_(False)


def sample(length: int = 24, prompt: int = 6, fill: int = 0, seed: int = 0) -> Example:
    rng = random.Random(seed)
    tokens = [rng.randrange(2, 300) for _ in range(length - fill)]
    tokens[prompt - 2] = EOS  # a turn of the prompt ends so, too
    return Example((*tokens, *[EOS] * fill), prompt)


CONVERSATION = Example(sample(24).tokens, 18, (Example((*sample(24).tokens[:9], EOS, EOS, EOS), 6),))
"""An answer in the prompt is trained too, as its own sample with its own fill."""
EXAMPLES = [sample(fill=5), sample(32, 9, seed=1), CONVERSATION]


def batch_of(model: Decoder, examples: list[Example], together: list[list[int]] | None = None) -> MultiTFBatch:
    c = model.config
    rngs = [random.Random(f"{i}") for i in range(len(examples))]
    settings = {"mask_token_id": c.mask_token_id, "shift": c.shift_logits, "together": together}
    return build_batch(examples, STATES, rngs=rngs, **settings)


def causal_logits(teacher: Decoder, text: tuple[int, ...]) -> Tensor:
    mask = torch.ones(len(text), len(text)).tril().bool()[None, None]
    places = torch.arange(len(text))[None]
    return teacher.logits(teacher(torch.tensor([text]), places, DenseAttention(mask)))[0]


def literal_targets(batch: MultiTFBatch, teacher: Decoder, examples: list[Example]) -> list[Tensor | None]:
    """The teacher's logits for each label, from a forward of each answer's own text."""
    found: list[Tensor | None] = []
    for row, place in (batch.labels != IGNORE).nonzero().tolist():
        example = examples[int(batch.sample[row, place])]
        position, stream = int(batch.positions[row, place]), int(batch.stream[row, place])
        own = (batch.sample[row] == batch.sample[row, place]) & (batch.stream[row] == stream)
        answer = next(
            a for a in (*example.earlier, example) if len(a.tokens) == int(batch.positions[row][own].max()) + 1
        )
        end = answer.tokens.index(EOS, answer.prompt_length) if answer.tokens[-1] == EOS else len(answer.tokens)
        found.append(causal_logits(teacher, answer.tokens)[position - 1] if position <= end else None)
    return found


@pytest.mark.parametrize("together", [None, [[0, 2], [1]]])
def test_the_target_of_a_label_is_the_next_token_of_a_causal_forward(
    model: Decoder, other: Decoder, together: list[list[int]] | None
) -> None:
    batch = batch_of(model, EXAMPLES, together)
    lesson = Lesson.of(batch, (EOS,))
    settings = TeacherSettings(weight=0.7)
    loss, _ = taught_loss(model, batch, lesson, Teacher(settings, other))
    targets = literal_targets(batch, other, EXAMPLES)
    assert 0 < sum(target is None for target in targets) < len(targets)  # fill

    alone = losses.states_of_labels(model, batch, losses.DENSE)
    student, weights = model.logits(alone.hidden), alone.weights
    total = torch.zeros((), dtype=torch.float64)
    for logits, label, weight, target in zip(student, alone.labels, weights, targets, strict=True):
        own = F.cross_entropy(logits, label)
        if target is not None:
            p = target.softmax(-1)
            own = 0.3 * own + 0.7 * (p * (p.log() - logits.log_softmax(-1))).sum()
        total = total + weight * own
    assert loss.item() == pytest.approx(total.item() / 3, rel=1e-9)


def test_a_text_is_read_once_for_all_noisy_streams(model: Decoder) -> None:
    batch = batch_of(model, EXAMPLES)
    assert len(Lesson.of(batch, (EOS,)).reading.input_ids) == 4  # one conversation has two answers
    assert int(batch.stream.max()) > 3


def test_the_end_of_a_text_is_its_first_eos() -> None:
    assert end_of((5, 1, 6, 1, 1, 1), (1,)) == 3
    assert end_of((5, 1, 6, 7), (1,)) == 4
    assert end_of((5, 2, 1, 1), (1, 2)) == 2  # the EOS that fills is one token


def test_without_weight_on_it_the_teacher_teaches_nothing(model: Decoder, other: Decoder) -> None:
    batch = batch_of(model, EXAMPLES)
    lesson, plain = Lesson.of(batch, (EOS,)), multitf_loss(model, batch)[0].item()
    almost = taught_loss(model, batch, lesson, Teacher(TeacherSettings(weight=1e-12), other))[0].item()
    assert almost == pytest.approx(plain, rel=1e-9)
    whole = taught_loss(model, batch, lesson, Teacher(TeacherSettings(), other))[0].item()
    assert abs(whole - plain) > 0.1


def test_logits_in_pieces_give_the_same_gradients(
    model: Decoder, other: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = batch_of(model, EXAMPLES)
    lesson = Lesson.of(batch, (EOS,))

    def gradients() -> list[Tensor]:
        model.zero_grad()
        taught_loss(model, batch, lesson, Teacher(TeacherSettings(top_k=7), other))[0].backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    whole = gradients()
    monkeypatch.setattr(losses, "LOGIT_BYTES", 4 * 300 * 5)
    for found, expected in zip(gradients(), whole, strict=True):
        torch.testing.assert_close(found, expected)


def random_logits() -> tuple[Tensor, Tensor]:
    student, teacher = torch.randn(2, 6, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return student, teacher


def test_the_divergences_are_their_formulas() -> None:
    student, teacher = random_logits()
    q, p = student.softmax(-1), teacher.softmax(-1)
    forward, reverse = (p * (p / q).log()).sum(-1), (q * (q / p).log()).sum(-1)
    torch.testing.assert_close(taught_divergence(student, teacher, TeacherSettings()), forward)
    mixed = taught_divergence(student, teacher, TeacherSettings(reverse=0.3))
    torch.testing.assert_close(mixed, 0.7 * forward + 0.3 * reverse)
    m = 0.4 * p + 0.6 * q
    jsd = 0.4 * (p * (p / m).log()).sum(-1) + 0.6 * (q * (q / m).log()).sum(-1)
    torch.testing.assert_close(taught_divergence(student, teacher, TeacherSettings(jsd=0.4)), jsd)
    soft = taught_divergence(2 * student, 2 * teacher, TeacherSettings(temperature=2.0))
    torch.testing.assert_close(soft, 4 * forward)
    top = teacher.topk(3).indices
    cut = (p * (p / q).log()).gather(-1, top).sum(-1)
    torch.testing.assert_close(taught_divergence(student, teacher, TeacherSettings(top_k=3)), cut)


def test_a_student_may_have_more_tokens_than_its_teacher() -> None:
    student, teacher = random_logits()
    p, q = teacher[:, :7].softmax(-1), student.softmax(-1)[:, :7]
    found = taught_divergence(student, teacher[:, :7], TeacherSettings())
    torch.testing.assert_close(found, (p * (p / q).log()).sum(-1))


def test_the_labels_of_an_ar_loss_stay_labels(other: Decoder) -> None:
    """Their loss is the same with a teacher of the other labels."""
    model, beside = random_model(FAMILIES["sdar"]).double(), replace(STATES, ar_weight=0.5)
    settings = {"mask_token_id": model.config.mask_token_id, "rngs": [random.Random(i) for i in range(3)]}
    both, alone = (build_batch(EXAMPLES, states, **deepcopy(settings)) for states in (beside, STATES))
    teacher = Teacher(TeacherSettings(), other)
    taught = [taught_loss(model, batch, Lesson.of(batch, (EOS,)), teacher)[0].item() for batch in (both, alone)]
    plain = [multitf_loss(model, batch)[0].item() for batch in (both, alone)]
    assert taught[0] - taught[1] == pytest.approx(plain[0] - plain[1], rel=1e-9)


TRAIN = TrainConfig(steps=4, batch_size=3, lr=1e-2, precision="float32", optimizer="adamw", warmup=1)


def test_the_base_without_its_adapter_teaches_as_a_copy_of_it() -> None:
    lora = LoraSettings(rank=4, alpha=4, dropout=0.0)
    train = replace(TRAIN, lora=lora, teacher=TeacherSettings(weight=0.5))
    losses_of = []
    for has_copy in (False, True):
        model = random_model(FAMILIES["sdar"])
        copy = deepcopy(model).requires_grad_(False) if has_copy else None
        trainer = Trainer(model, EXAMPLES, STATES, train, teacher=copy)
        losses_of.append([trainer.step().loss for _ in range(3)])
        assert trainer.measure(trainer.batch(3)).isfinite().all()
    assert losses_of[0] == pytest.approx(losses_of[1], rel=1e-5)
    assert len(set(losses_of[0])) == 3


def test_parts_of_a_batch_add_up(other: Decoder) -> None:
    trainer = Trainer(
        random_model(FAMILIES["sdar"]).double(),
        EXAMPLES,
        STATES,
        replace(TRAIN, teacher=TeacherSettings()),
        teacher=other,
    )
    batch = trainer.batch(0)
    whole = trainer._loss(batch, 3.0)[0].item()
    assert sum(trainer._loss(part, 3.0)[0].item() for part in split_batch(batch, 1)) == pytest.approx(whole, rel=1e-9)
    assert trainer.step().tflop > Trainer(trainer.model, EXAMPLES, STATES, TRAIN).step().tflop
