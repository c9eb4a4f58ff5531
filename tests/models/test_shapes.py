"""Shapes by name are the published sizes, and a random model has its shape and dtype."""

from dataclasses import replace

import pytest
import torch

from mbd_core.models.shapes import SHAPES, random_model

CPU = torch.device("cpu")


def test_the_shapes_are_the_published_sizes() -> None:
    published = {"llada2-mini": 16.256, "llada2-flash": 102.89, "sdar-8b": 8.191, "llada-8b": 8.02, "dream-7b": 7.62}
    for name, billions in published.items():
        assert SHAPES[name].num_parameters / 1e9 == pytest.approx(billions, rel=1e-3), name
    assert SHAPES["sdar-50m"].num_parameters == pytest.approx(50e6, rel=0.02)
    assert SHAPES["sdar-50m"].block_size == 32


@pytest.mark.parametrize("name", [name for name, config in SHAPES.items() if config.hidden_size <= 64])
def test_a_random_model_has_its_shape_and_dtype(name: str) -> None:
    model = random_model(SHAPES[name], device=CPU, dtype=torch.bfloat16)
    assert sum(p.numel() for p in model.parameters()) == SHAPES[name].num_parameters
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert all(p.isfinite().all() for p in model.parameters())
    assert all(b.dtype == torch.float32 for b_name, b in model.named_buffers() if "expert_bias" in b_name)


def test_a_tied_random_model_stays_tied() -> None:
    model = random_model(replace(SHAPES["tiny-sdar"], tie_word_embeddings=True), device=CPU, dtype=torch.float32)
    assert model.lm_head.weight is model.model.embed_tokens.weight
