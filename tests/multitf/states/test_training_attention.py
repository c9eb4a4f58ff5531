"""The block mask against the dense one: which pairs it has, what a loss and its gradients are, when it is built.

Torch refuses gradients of FlexAttention on a CPU, though its eager reference has them: the tests go past that refusal.
"""

import random
from collections.abc import Iterator
from dataclasses import fields

import pytest
import torch
from family_models import FAMILIES, random_model
from torch import Tensor
from torch.nn.attention import flex_attention as flex_module
from torch.nn.attention.flex_attention import BlockMask

from mbd_core.models.decoder import Decoder
from mbd_core.multitf.config import TrainConfig
from mbd_core.multitf.data.example import Example
from mbd_core.multitf.states import training_attention
from mbd_core.multitf.states.batch import MultiTFBatch
from mbd_core.multitf.states.layout import StateConfig
from mbd_core.multitf.states.mask import dual_stream_mask, whole_sequence_mask
from mbd_core.multitf.states.packing import Together
from mbd_core.multitf.states.sample import build_batch
from mbd_core.multitf.states.stream_attention import StreamAttention, stream_groups
from mbd_core.multitf.states.training_attention import TrainingAttention, places_of_samples
from mbd_core.multitf.step.loss import distillation_loss, multitf_loss
from mbd_core.multitf.step.trainer import Trainer

B = 4
CPU = torch.device("cpu")
LAYOUTS = {
    "systematic": StateConfig(block_size=B, max_group=3, num_random=2),
    "random": StateConfig(block_size=B, layouts="random", max_group=3, num_random=2, span="response"),
    "one_group": StateConfig(block_size=B, layouts="one_group"),
    "teacher forcing": StateConfig(block_size=B, num_layouts=2),
    "self-denoising": StateConfig(block_size=B, max_group=2, self_denoising="both", labels="answer"),
    "d2f": StateConfig(block_size=B, layouts="d2f", weighting="ratio_mean"),
}


@pytest.fixture
def flex(monkeypatch: pytest.MonkeyPatch) -> Iterator[TrainingAttention]:
    monkeypatch.setattr(flex_module, "_validate_device", lambda *_: None)
    attention = TrainingAttention("dense", CPU)
    attention.kind = "flex"
    yield attention
    torch.compiler.reset()


def sample(length: int, prompt: int, seed: int) -> Example:
    rng = random.Random(seed)
    return Example(tuple(rng.randrange(2, 300) for _ in range(length)), prompt)


def batch_of(
    config: StateConfig,
    *,
    mask: int = 1,
    seed: int = 0,
    lengths: tuple[int, ...] = (60, 24),
    together: Together | None = None,
) -> MultiTFBatch:
    """Samples of unequal lengths, so that one is padded; the longest has more tokens than a block of the mask."""
    examples = [sample(length, 6, n) for n, length in enumerate(lengths)]
    rngs = [random.Random(f"{seed}/{n}") for n in range(len(examples))]
    return build_batch(examples, config, mask_token_id=mask, rngs=rngs, together=together)


def visible_pairs(mask: BlockMask) -> Tensor:
    """What a kernel computes: all pairs of a full block, those of the predicate in a partial one, none elsewhere."""
    samples, _, length, _ = mask.shape
    size, _ = mask.BLOCK_SIZE
    sample, head = torch.arange(samples)[:, None, None], torch.zeros((), dtype=torch.int64)
    places = torch.arange(length)
    pairs = mask.mask_mod(sample, head, places[None, :, None], places[None, None, :])
    found = torch.zeros_like(pairs)
    for counts, columns, whole in (
        (mask.kv_num_blocks, mask.kv_indices, False),
        (mask.full_kv_num_blocks, mask.full_kv_indices, True),
    ):
        for s in range(samples):
            for row in range(counts.shape[-1]):
                for column in columns[s, 0, row, : int(counts[s, 0, row])].tolist():
                    at = (s, slice(row * size, (row + 1) * size), slice(column * size, (column + 1) * size))
                    found[at] = True if whole else pairs[at]
    return found


@pytest.mark.parametrize("layouts", LAYOUTS)
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("together", [None, [[0], [2, 1]]], ids=["separate", "packed"])
def test_the_block_mask_is_the_dense_mask(
    flex: TrainingAttention, layouts: str, whole: bool, together: Together | None
) -> None:
    batch = batch_of(LAYOUTS[layouts], lengths=(60, 24, 16), together=together)
    assert bool((batch.stream < 0).any())
    dense = dual_stream_mask(batch.stream, batch.block, batch.first, batch.sample)
    if whole:
        dense = whole_sequence_mask(batch.stream, batch.sample)
    assert torch.equal(visible_pairs(flex.of(batch, whole=whole).mask), dense)


def test_blocks_between_layouts_are_left_out(flex: TrainingAttention) -> None:
    batch = batch_of(StateConfig(block_size=B, max_group=3), lengths=(256,))
    mask = flex.of(batch).mask
    computed = mask.kv_num_blocks.sum() + mask.full_kv_num_blocks.sum()
    blocks = -(-batch.stream.shape[1] // 128)
    assert blocks == 12 and int(computed) < 0.4 * blocks**2
    assert int(mask.full_kv_num_blocks.sum()) > 0


@pytest.fixture(scope="module")
def model() -> Decoder:
    return random_model(FAMILIES["sdar"]).double().train()


def loss_and_gradients(model: Decoder, batch: MultiTFBatch, attention: TrainingAttention) -> tuple[Tensor, list]:
    model.zero_grad()
    loss, _ = multitf_loss(model, batch, attention=attention)
    loss.backward()
    return loss.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]


def test_the_loss_and_its_gradients_are_the_dense_ones(model: Decoder, flex: TrainingAttention) -> None:
    batch = batch_of(
        LAYOUTS["self-denoising"], mask=model.config.mask_token_id, lengths=(24, 16, 8), together=[[0], [1, 2]]
    )
    dense, expected = loss_and_gradients(model, batch, TrainingAttention("dense", CPU))
    found, gradients = loss_and_gradients(model, batch, flex)
    assert float(found) == pytest.approx(float(dense), rel=1e-9)
    assert len(gradients) == len(expected) > 10
    for gradient, wanted in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("layouts", LAYOUTS)
@pytest.mark.parametrize("together", [None, [[2, 0], [1]]])
def test_groups_of_streams_give_the_dense_loss_and_gradients(
    model: Decoder, layouts: str, together: Together | None
) -> None:
    """With padding, in packed sequences, and where the last layer computes the labels' tokens alone."""
    mask = model.config.mask_token_id
    batch = batch_of(LAYOUTS[layouts], mask=mask, lengths=(60, 24, 16), together=together)
    dense, expected = loss_and_gradients(model, batch, TrainingAttention("dense", CPU))
    found, gradients = loss_and_gradients(model, batch, TrainingAttention("streams", CPU))
    assert float(found) == pytest.approx(float(dense), rel=1e-9) and len(gradients) == len(expected) > 10
    for gradient, wanted in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("layouts", LAYOUTS)
def test_groups_of_streams_have_every_visible_pair_once(layouts: str) -> None:
    batch = batch_of(LAYOUTS[layouts], lengths=(60, 24, 16), together=[[2, 0], [1]])
    found = torch.zeros(batch.stream.numel(), batch.stream.numel(), dtype=torch.int64)
    for group in stream_groups(batch, places_of_samples(batch)):
        found[group.queries[:, None], group.keys[None]] += torch.from_numpy(group.sees)
    dense = dual_stream_mask(batch.stream, batch.block, batch.first, batch.sample)
    is_token = batch.stream >= 0
    wanted = torch.block_diag(*(dense & is_token[:, None])).long()
    assert torch.equal(found, wanted)


def test_groups_of_streams_compute_few_pairs() -> None:
    batch = batch_of(StateConfig(block_size=B, max_group=3), lengths=(256,))
    attend = TrainingAttention("streams", CPU).of(batch)
    assert isinstance(attend, StreamAttention)
    computed = sum(part.mask.numel() for part in attend.whole.parts)
    visible = int(dual_stream_mask(batch.stream, batch.block, batch.first, batch.sample).sum())
    assert visible < computed < 0.2 * batch.stream.numel() ** 2


def test_distillation_attends_with_it_too(model: Decoder, flex: TrainingAttention) -> None:
    batch = batch_of(LAYOUTS["d2f"], mask=model.config.mask_token_id, together=[[1, 0]])
    with torch.no_grad():
        dense, _ = distillation_loss(model, batch, "student_teacher")
        found, _ = distillation_loss(model, batch, "student_teacher", attention=flex)
    assert float(found) == pytest.approx(float(dense), rel=1e-9) and float(dense) > 1e-3


@pytest.mark.parametrize("kind", ["flex", "streams"])
def test_under_autocast_all_three_have_one_dtype(flex: TrainingAttention, kind: str) -> None:
    """Norms and rotations leave queries and keys in float32, and values are bfloat16."""
    batch = batch_of(LAYOUTS["one_group"], lengths=(16,))
    attention = flex if kind == "flex" else TrainingAttention("streams", CPU)
    attend, shape = attention.of(batch), (*batch.input_ids.shape, 2, 8)
    q, k, v = (torch.randn(shape, generator=torch.Generator().manual_seed(n)) for n in range(3))
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        out = attend(0, q, k, v.bfloat16())
    assert out.dtype == torch.bfloat16 and out.shape == shape


def test_a_block_mask_is_built_once_for_a_layout_shape(
    flex: TrainingAttention, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[int] = []
    build = training_attention.block_mask

    def counted(*args, **kwargs) -> BlockMask:
        built.append(1)
        return build(*args, **kwargs)

    monkeypatch.setattr(training_attention, "block_mask", counted)
    config = StateConfig(block_size=B, max_group=2)
    first, again = batch_of(config, seed=0), batch_of(config, seed=1)
    assert not torch.equal(first.input_ids, again.input_ids)
    assert flex.of(first).mask is flex.of(again).mask and len(built) == 1
    assert flex.of(first, whole=True).mask is not flex.of(first).mask and len(built) == 2
    flex.of(MultiTFBatch(*(getattr(first, f.name)[:1] for f in fields(first))))
    flex.of(batch_of(config, lengths=(60, 28)))
    assert len(built) == 4
    monkeypatch.setattr(training_attention, "KEPT_MASKS", 4)
    flex.of(batch_of(config, lengths=(8, 8)))
    assert len(flex._masks) == 4 and len(built) == 5
    flex.of(first, whole=True)  # the one that was used longest ago was dropped
    assert len(built) == 6


def test_the_choice_is_named_and_a_cpu_trains_dense() -> None:
    gpu = torch.device("cuda")
    assert TrainingAttention("auto", CPU).describe() == "dense attention (flex needs a GPU)"
    assert TrainingAttention("dense", gpu).describe() == "dense attention, as asked"
    assert [TrainingAttention("auto", d).kind for d in (CPU, gpu)] == ["dense", "flex"]
    with pytest.raises(ValueError, match="choose dense"):
        TrainingAttention("flex", CPU)
    model = random_model(FAMILIES["sdar"])
    config = TrainConfig(steps=1, batch_size=1, lr=1e-3, attention="dense")
    trainer = Trainer(model, [sample(16, 5, 0)], LAYOUTS["systematic"], config)
    assert trainer.objective.attention.describe() == "dense attention, as asked"
