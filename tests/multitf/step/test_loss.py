"""Losses against what they stand for: decoding's own forwards, separate passes, whole logits, one worker."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from family_models import FAMILIES, random_model
from torch import Tensor
from torch.nn import functional as F

from mbd_core.models.decoder import Decoder
from mbd_core.multitf.config import TrainConfig
from mbd_core.multitf.data.example import IGNORE, Example
from mbd_core.multitf.states.batch import MultiTFBatch, collate
from mbd_core.multitf.states.layout import GroupLayout, StateConfig
from mbd_core.multitf.states.mask import block_causal_mask, dual_stream_mask
from mbd_core.multitf.states.sample import NoisyStream, build_batch, lay_out, self_denoised
from mbd_core.multitf.step import loss as losses
from mbd_core.multitf.step.loss import denominator, distillation_loss, divergence, multitf_loss, roll_out
from mbd_core.multitf.step.trainer import StepMetrics, Trainer, split_batch
from mbd_core.multitf.step.workers import Workers
from mbd_core.ops.attention.whole import DenseAttention

B = 4


@pytest.fixture(scope="module", params=["sdar", "dream"])
def model(request: pytest.FixtureRequest) -> Decoder:
    return random_model(FAMILIES[request.param]).double().train()


def sample(length: int = 24, prompt: int = 6, seed: int = 0) -> Example:
    rng = random.Random(seed)
    return Example(tuple(rng.randrange(2, 300) for _ in range(length)), prompt)


def batch_of(model: Decoder, config: StateConfig, examples: list[Example], seed: int = 0) -> MultiTFBatch:
    c = model.config
    rngs = [random.Random(f"{seed}/{i}") for i in range(len(examples))]
    return build_batch(examples, config, mask_token_id=c.mask_token_id, rngs=rngs, shift=c.shift_logits)


def gradients(model: Decoder, loss: Tensor) -> list[Tensor]:
    model.zero_grad()
    loss.backward()
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return found


def test_a_label_is_predicted_as_decoding_predicts_it(model: Decoder) -> None:
    """Each noise-group behind its clean prefix in a forward of its own; with shifted logits from the token before."""
    one, layout = sample(), GroupLayout((2, 3, 1))
    rng = random.Random(1)
    masked = [i >= one.prompt_length and rng.random() < 0.6 for i in range(24)]
    noisy = [0 if m else t for m, t in zip(masked, one.tokens, strict=True)]
    config, shift = StateConfig(block_size=B, max_group=3), model.config.shift_logits
    row = lay_out(one, [(layout, NoisyStream(noisy, masked, [0.6] * 24))], config, first_block=0, shift=shift)
    batch = collate([row])
    loss, _ = multitf_loss(model, batch)

    total, start = torch.zeros((), dtype=torch.float64), 0
    for size in layout.sizes:
        end = start + size * B
        ids = torch.tensor([[*one.tokens[:start], *noisy[start:end]]])
        mask = block_causal_mask(torch.arange(end)[None] // B)[:, None]
        logits = model.logits(model(ids, torch.arange(end)[None], DenseAttention(mask)))[0]
        for i in range(start, end):
            if masked[i]:
                total = total + F.cross_entropy(logits[i - shift], torch.tensor(one.tokens[i]))
        start = end
    assert loss.item() == pytest.approx(total.item() / sum(masked), rel=1e-5)


@pytest.mark.parametrize("layouts", ["random", "one_group"])
def test_other_layouts_in_one_sequence_are_separate_sequences_too(model: Decoder, layouts: str) -> None:
    group = {"max_group": 3, "num_random": 3} if layouts == "random" else {}
    config = StateConfig(block_size=B, layouts=layouts, span="response", weighting="self_normalised", **group)
    batch = batch_of(model, config, [sample()])
    loss, _ = multitf_loss(model, batch, denominator(batch, config.weighting))
    total, weight = 0.0, 0.0
    clean = batch.stream[0] == 0
    for stream in range(1, int(batch.stream.max()) + 1):
        kept = (batch.stream[0] == stream) | clean
        places = kept.nonzero().flatten()
        renumbered = torch.full_like(batch.stream[0], -1)
        renumbered[places] = torch.arange(len(places))
        alone = MultiTFBatch(*(column[:, kept] for column in vars(batch).values()))
        alone = replace(alone, source=renumbered[alone.source])
        total += multitf_loss(model, alone, 1.0)[0].item()
        weight += alone.weights.sum().item()
    assert loss.item() == pytest.approx(total / weight, rel=1e-6)


def test_large_logits_go_through_the_head_in_pieces(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = batch_of(model, StateConfig(block_size=B, max_group=2), [sample(), sample(seed=1)])
    whole, measures = multitf_loss(model, batch)
    wanted = gradients(model, whole)
    widths: list[int] = []
    monkeypatch.setattr(losses, "LOGIT_BYTES", 4 * 300 * 3)
    hook = model.lm_head.register_forward_hook(lambda _m, _i, out: widths.append(len(out)))
    loss, same = multitf_loss(model, batch)
    found = gradients(model, loss)
    hook.remove()
    assert max(widths) == 3 and len(widths) > 4
    assert loss.item() == pytest.approx(whole.item(), rel=1e-12)
    torch.testing.assert_close(same, measures, rtol=1e-12, atol=0.0)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_head_on_labels_alone_gives_the_gradients_of_all_logits(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits of every position, the unlabelled weighted by nothing: what never exists in training."""
    model = random_model(FAMILIES[family]).double().train()
    batch = batch_of(model, StateConfig(block_size=B, max_group=2), [sample(), sample(16, seed=1)])
    mask = dual_stream_mask(batch.stream, batch.block, batch.first)[:, None]
    logits = model.logits(model(batch.input_ids, batch.positions, DenseAttention(mask)))
    logits = logits.gather(1, batch.source[..., None].expand_as(logits))
    pointwise = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), ignore_index=IGNORE, reduction="none")
    full = (pointwise * batch.weights.flatten()).sum() / batch.num_samples
    wanted = gradients(model, full)
    monkeypatch.setattr(losses, "LOGIT_BYTES", 4 * 300 * 3)
    loss, _ = multitf_loss(model, batch)
    assert loss.item() == pytest.approx(full.item(), rel=1e-9)
    for a, b in zip(gradients(model, loss), wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_last_mlp_computes_predicted_tokens_alone(family: str) -> None:
    model = random_model(FAMILIES[family]).train()
    config = StateConfig(block_size=B, max_group=2, labels="answer", self_denoising="half")
    batch = batch_of(model, config, [sample(), sample(16, seed=1)])
    tokens: list[int] = []
    for layer in model.model.layers:
        layer.mlp.register_forward_pre_hook(lambda _module, inputs: tokens.append(inputs[0][..., 0].numel()))
    multitf_loss(model, batch)
    every, labels, masks = batch.input_ids.numel(), int((batch.labels != IGNORE).sum()), int(batch.rollout.sum())
    before = [every] * (len(model.model.layers) - 1)
    assert 0 < masks < labels < every
    assert tokens == [*before, masks, *before, labels]


@pytest.mark.parametrize("family", FAMILIES)
def test_without_a_label_every_weight_has_a_gradient_of_zeros(family: str) -> None:
    """Workers add up the gradients of all weights: one that has none would wait for ever."""
    model = random_model(FAMILIES[family]).train()
    batch = batch_of(model, StateConfig(block_size=B, max_group=2), [sample()])
    batch = replace(batch, labels=torch.full_like(batch.labels, IGNORE))
    loss, _ = multitf_loss(model, batch)
    loss.backward()
    assert loss.item() == 0.0
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and not parameter.grad.any(), name


def test_self_denoising_has_gradients_through_its_second_pass_alone(model: Decoder) -> None:
    config = StateConfig(block_size=B, max_group=2, labels="answer", self_denoising="both", rounding="ceil")
    batch = batch_of(model, config, [sample()])
    assert batch.rollout.any() and (batch.input_ids[batch.rollout] == model.config.mask_token_id).all()
    rolled = roll_out(model, batch)
    assert not (rolled.input_ids[batch.rollout] == model.config.mask_token_id).any()
    assert torch.equal(rolled.input_ids[~batch.rollout], batch.input_ids[~batch.rollout])
    passes: list[bool] = []
    hook = model.register_forward_hook(lambda *_: passes.append(torch.is_grad_enabled()))
    loss, _ = multitf_loss(model, batch)
    hook.remove()
    assert passes == [False, True]
    found = gradients(model, loss)
    second, _ = multitf_loss(model, rolled)
    assert loss.item() == second.item()
    for a, b in zip(found, gradients(model, second), strict=True):
        assert torch.equal(a, b)


def test_the_two_branches_in_one_sequence_are_the_two_branches(model: Decoder) -> None:
    """`both`: the mean of the standard branch's loss and the self-denoising one's, each in a sequence of its own."""
    one, layout = sample(), GroupLayout((2, 2, 2))
    config = StateConfig(block_size=B, max_group=2, labels="answer", self_denoising="both")
    masked = [i >= one.prompt_length and i % 3 > 0 for i in range(24)]
    noisy = NoisyStream([0 if m else t for m, t in zip(masked, one.tokens, strict=True)], masked, [0.6] * 24)

    def loss_of(streams: list[tuple[GroupLayout, NoisyStream]]) -> float:
        row = lay_out(one, streams, config, first_block=0, shift=model.config.shift_logits)
        batch = collate([row])
        with torch.no_grad():
            return multitf_loss(model, batch)[0].item()

    both = self_denoised([(layout, noisy)], config, random.Random(0))
    assert [stream.rollout for _, stream in both] == [False, True]
    assert loss_of(both) == pytest.approx((loss_of(both[:1]) + loss_of(both[1:])) / 2, rel=1e-6)
    half = self_denoised([(layout, noisy)] * 200, replace(config, self_denoising="half"), random.Random(0))
    assert 70 < sum(stream.rollout for _, stream in half) < 130


def test_distillation_is_zero_where_student_and_teacher_see_the_same(model: Decoder) -> None:
    """One block of response sees all, and a block before another does not."""
    config = StateConfig(
        block_size=8, layouts="d2f", schedule="d2f_monotonic", rounding="bernoulli", weighting="ratio_mean"
    )
    same, other = (batch_of(model, config, [Example(sample().tokens[:n], 6)]) for n in (14, 24))
    for direction in ("student_teacher", "teacher_student"):
        assert distillation_loss(model, same, direction)[0].item() > 1e-4  # the prompt does not see the response
        assert distillation_loss(model, other, direction)[0].item() > 1e-4
    alone = replace(same, block=torch.zeros_like(same.block))
    assert distillation_loss(model, alone, "student_teacher")[0].item() == pytest.approx(0.0, abs=1e-9)


def test_the_directions_of_distillation_are_the_two_divergences() -> None:
    student, teacher = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    p, q = student.softmax(-1), teacher.softmax(-1)
    torch.testing.assert_close(divergence(student, teacher, "student_teacher"), (p * (p / q).log()).sum(-1))
    torch.testing.assert_close(divergence(student, teacher, "teacher_student"), (q * (q / p).log()).sum(-1))


def test_the_teacher_has_no_gradient_and_is_within_its_context(model: Decoder) -> None:
    config = StateConfig(block_size=8, layouts="d2f", weighting="ratio_mean")
    inside: list[bool] = []

    @contextmanager
    def as_teacher() -> Iterator[None]:
        inside.append(torch.is_grad_enabled())
        yield
        inside.append(torch.is_grad_enabled())

    batch = batch_of(model, config, [sample()])
    distillation_loss(model, batch, "student_teacher", as_teacher=as_teacher)
    assert inside == [False, False]


WEIGHTINGS = ("masked_mean", "block_ratio", "nelbo", "self_normalised", "ratio_mean", "label_mean")


def trainers(weighting: str, *, world_size: int, micro_batch: int | None = None) -> list[Trainer]:
    """The workers of a run in this process; the last two of four samples have hardly anything to mask."""
    examples = [sample(seed=0), sample(32, 5, seed=1), sample(8, 7, seed=2), sample(8, 7, seed=3)]
    states = StateConfig(block_size=B, max_group=2, weighting=weighting, rounding="floor")
    config = TrainConfig(
        steps=2, batch_size=4, lr=1e-3, precision="float32", micro_batch=micro_batch, optimizer="adamw"
    )
    found: list[Trainer] = []

    def mean(tensor: Tensor) -> Tensor:
        parts = [denominator(t.batch(0), t.states.weighting).double() for t in found]
        return torch.stack(parts).mean()

    for rank in range(world_size):
        model = random_model(FAMILIES["sdar"]).double()
        found.append(Trainer(model, examples, states, config, rank=rank, world_size=world_size, mean=mean))
    return found


def gradient_of(trainer: Trainer) -> list[Tensor]:
    batch = trainer.batch(0)
    divisor = trainer._divisor(batch)
    for part in split_batch(batch, trainer.config.micro_batch):
        trainer.objective(part, divisor)[0].backward()
    return [p.grad for p in trainer.model.parameters()]


@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_workers_and_parts_give_the_gradient_of_the_whole_batch(weighting: str) -> None:
    """Also of a worker whose samples have no masked token: no NaN, and every worker asks for the mean."""
    (alone,) = trainers(weighting, world_size=1)
    whole = gradient_of(alone)
    (parts,) = trainers(weighting, world_size=1, micro_batch=1)
    ranks = [gradient_of(t) for t in trainers(weighting, world_size=4)]
    labelled = [bool((t.batch(0).labels != IGNORE).any()) for t in trainers(weighting, world_size=4)]
    assert sorted(labelled) == [False, False, True, True]
    for i, (expected, part) in enumerate(zip(whole, gradient_of(parts), strict=True)):
        torch.testing.assert_close(part, expected, rtol=1e-4, atol=1e-7)  # norms are float32
        torch.testing.assert_close(sum(rank[i] for rank in ranks) / 4, expected, rtol=1e-4, atol=1e-7)


def test_a_batch_without_a_masked_token_changes_nothing_to_nan() -> None:
    for weighting in WEIGHTINGS:
        for trainer in trainers(weighting, world_size=4):
            trainer.mean = None
            assert torch.isfinite(torch.tensor(trainer.step().loss))
            assert all(torch.isfinite(p).all() for p in trainer.model.parameters())


def test_workers_and_parts_have_the_accuracy_of_the_whole_batch() -> None:
    """Also if some have no label, whose accuracy of 0 counts nothing. The model's likeliest token is always 0."""

    def updates(world_size: int, micro_batch: int | None) -> list[StepMetrics]:
        found = trainers("masked_mean", world_size=world_size, micro_batch=micro_batch)
        for trainer in found:
            torch.nn.init.zeros_(trainer.model.lm_head.weight)
            first, *others = trainer.examples
            trainer.examples = [replace(first, tokens=(*first.tokens[:6], *[0] * 18)), *others]
        return [trainer.step() for trainer in found]

    def mean_of(found: list[StepMetrics]) -> StepMetrics:
        sent: list[Tensor] = []
        cpu = torch.device("cpu")
        for metrics in found:
            Workers.mean_metrics(SimpleNamespace(size=4, device=cpu, mean=lambda t: sent.append(t) or t), metrics)
        total = torch.stack(sent).mean(0)
        return Workers.mean_metrics(SimpleNamespace(size=4, device=cpu, mean=lambda _: total), found[0])

    (whole,), (parts,), workers = updates(1, None), updates(1, 1), updates(4, None)
    assert 0 < whole.accuracy < 1 and len({worker.accuracy for worker in workers}) > 1
    for found in (parts, mean_of(workers)):
        assert (found.accuracy, found.labels) == (pytest.approx(whole.accuracy), whole.labels)


def test_tokens_are_counted_without_padding() -> None:
    (trainer,) = trainers("masked_mean", world_size=1)
    batch = trainer.batch(0)
    metrics = trainer.step()
    assert metrics.tokens == (24 + 32 + 8 + 8) * 3 - 4 * B < batch.input_ids.numel()  # the last block is unseen
