"""Int8 products in whole models of every family: near the wide model, and the same whatever runs beside a request."""

import copy
from dataclasses import replace

import pytest
import torch
from family_models import FAMILIES, random_model
from gemma_models import gemma
from small_engines import EXPERTS, build, engine, gist, request
from torch import Tensor, nn

from mbd_core.checkpoint.loading import planned_bytes
from mbd_core.models.decoder import Decoder
from mbd_core.models.mlp import Experts
from mbd_core.models.quantize import is_int8, quantized_parts, round_to_int8, weight_bytes
from mbd_core.ops.attention.whole import DenseAttention
from mbd_core.ops.layer.int8 import packs_weights

SMALL = {
    "sdar": {},
    "llada2": {"architecture": "LLaDA2MoeModelLM", "moe": EXPERTS},
    "dream": {"architecture": "DreamModel", "attention": "full", "qk_norm": False, "qkv_bias": True},
}


def models() -> dict[str, Decoder]:
    """A random model of each family; wide enough that rounding is small beside the signal."""
    found = {
        name: random_model(replace(config, hidden_size=64, intermediate_size=96), seed=1)
        for name, config in FAMILIES.items()
    }
    return found | {"gemma": gemma()}


def logits_of(model: Decoder, tokens: Tensor) -> Tensor:
    attend = DenseAttention(torch.ones(1, 1, len(tokens), len(tokens), dtype=torch.bool))
    with torch.inference_mode():
        return model.logits(model(tokens[None], torch.arange(len(tokens))[None], attend))[0]


@pytest.mark.parametrize("family", [*FAMILIES, "gemma"])
def test_a_rounded_model_is_near_the_wide_one_and_has_no_wide_product(family: str) -> None:
    wide = models()[family]
    rounded = round_to_int8(copy.deepcopy(wide))
    assert is_int8(rounded) and not is_int8(wide) and quantized_parts(rounded) is None
    assert not [m for m in rounded.modules() if isinstance(m, (nn.Linear, Experts))]
    assert planned_bytes(wide.config, torch.int8) == weight_bytes(rounded)
    if not packs_weights():  # FBGEMM fills 64 inputs up to 512
        assert weight_bytes(rounded) < weight_bytes(wide)
    tokens = torch.arange(2, 2 + 32) % wide.config.vocab_size
    given, expected = logits_of(rounded, tokens), logits_of(wide, tokens)
    error = ((given - expected).norm() / expected.norm()).item()
    assert 0 < error < 0.25  # routers of random weights change their choice at the least rounding


@pytest.mark.parametrize(("family", "method"), [("sdar", "multi"), ("llada2", "multi"), ("dream", "d2f")])
def test_tokens_do_not_depend_on_the_requests_beside_them(family: str, method: str) -> None:
    served = engine(round_to_int8(build(**SMALL[family])))
    asked = [request(f"r{i}", 30 * i + 7, method, max_tokens=24) for i in range(4)]
    together = served.generate(asked)
    assert [gist(output) for output in together] == [gist(served.generate([each])[0]) for each in asked]
