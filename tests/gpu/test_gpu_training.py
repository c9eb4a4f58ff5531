"""On a GPU: the compiled FlexAttention of training against the dense mask, loss and gradients."""

import random

import pytest
import torch
from torch import Tensor

from mbd_core.models.decoder import Decoder, init_weights
from mbd_core.models.shapes import SHAPES
from mbd_core.multitf.config import AttentionChoice
from mbd_core.multitf.data.example import Example
from mbd_core.multitf.states.batch import MultiTFBatch
from mbd_core.multitf.states.layout import StateConfig
from mbd_core.multitf.states.sample import build_batch
from mbd_core.multitf.states.training_attention import TrainingAttention
from mbd_core.multitf.step.loss import multitf_loss

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


def batch_of(config: StateConfig, lengths: tuple[int, ...], *, mask: int) -> MultiTFBatch:
    rng = random.Random(0)
    examples = [Example(tuple(rng.randrange(mask) for _ in range(length)), length // 4) for length in lengths]
    return build_batch(examples, config, mask_token_id=mask, rngs=[random.Random(n) for n in range(len(lengths))])


def gradients(model: Decoder, batch: MultiTFBatch, kind: AttentionChoice, in_bfloat16: bool) -> tuple[float, Tensor]:
    model.zero_grad()
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=in_bfloat16):
        loss, _ = multitf_loss(model, batch, attention=TrainingAttention(kind, CUDA))
    loss.backward()
    return loss.item(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("in_bfloat16", [False, True])
@pytest.mark.parametrize("layouts", ["systematic", "one_group"])
def test_flex_attention_trains_as_the_dense_mask_does(layouts: str, in_bfloat16: bool) -> None:
    """For samples of several lengths, none a whole number of the mask's blocks."""
    model = Decoder(SHAPES["sdar-50m"]).to(CUDA)
    init_weights(model, seed=0)
    group = {"max_group": 3, "num_random": 1} if layouts == "systematic" else {}
    config = StateConfig(block_size=32, layouts=layouts, **group)
    for lengths in ((96, 160), (224,), (288, 64)):
        batch = batch_of(config, lengths, mask=model.config.mask_token_id).to(CUDA)
        dense, expected = gradients(model, batch, "dense", in_bfloat16)
        flex, found = gradients(model, batch, "flex", in_bfloat16)
        assert flex == pytest.approx(dense, rel=1e-2 if in_bfloat16 else 1e-4)
        error = (found - expected).norm() / expected.norm()
        assert float(error) < (5e-2 if in_bfloat16 else 1e-3)
