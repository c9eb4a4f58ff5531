"""Scaled rotary positions against transformers: frequencies, a model's logits; and config.json both ways."""

from dataclasses import replace

import pytest
import torch
from family_models import FAMILIES, SDAR, random_model
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from mbd_core.checkpoint.config import read_config, write_config
from mbd_core.models.fused import fuse
from mbd_core.models.rope import rope_frequencies
from mbd_core.models.rope_scaling import LinearScaling, YarnScaling
from mbd_core.ops.attention.whole import DenseAttention

LENGTH, TRAINED = 640, 64
SCALINGS = {
    "linear": {"type": "linear", "factor": 2.5},
    "yarn": {"rope_type": "yarn", "factor": 10.0, "original_max_position_embeddings": TRAINED},
    "yarn-length-of-the-config": {"rope_type": "yarn", "factor": 4.0},
    "yarn-bounds": {
        "type": "yarn",
        "rope_type": "yarn",
        "factor": 8,
        "original_max_position_embeddings": 4096,
        "beta_fast": 16,
        "beta_slow": 2.0,
        "truncate": False,
    },
    "yarn-attention": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": TRAINED,
        "attention_factor": 1.3,
    },
    "yarn-mscale": {
        "rope_type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": TRAINED,
        "mscale": 1.2,
        "mscale_all_dim": 0.7,
    },
    "yarn-one": {"rope_type": "yarn", "factor": 1.0, "original_max_position_embeddings": 2},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": TRAINED,
    },
}
BASE = replace(SDAR, head_dim=64, hidden_size=64, max_positions=LENGTH)


def configs(scaling: dict, *, key: str = "rope_scaling"):
    """Ours as read from config.json, and transformers' of the same sizes."""
    ours = read_config(write_config(BASE) | {key: scaling})
    theirs = Qwen3Config(
        vocab_size=ours.vocab_size,
        hidden_size=ours.hidden_size,
        intermediate_size=ours.intermediate_size,
        num_hidden_layers=ours.num_layers,
        num_attention_heads=ours.num_heads,
        num_key_value_heads=ours.num_kv_heads,
        head_dim=ours.head_dim,
        max_position_embeddings=ours.max_positions,
        rms_norm_eps=ours.rms_norm_eps,
        tie_word_embeddings=False,
        rope_theta=ours.rope_theta,
        rope_scaling=dict(scaling),
        attn_implementation="sdpa",
    )
    return ours, theirs


@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
def test_frequencies_are_those_of_transformers(scaling: dict) -> None:
    ours, theirs = configs(scaling)
    kind = theirs.rope_parameters["rope_type"]
    wanted, wanted_factor = ROPE_INIT_FUNCTIONS[kind](theirs, torch.device("cpu"))
    frequencies, factor = rope_frequencies(ours)
    assert torch.equal(frequencies, wanted) and factor == wanted_factor
    assert not torch.equal(frequencies, rope_frequencies(BASE)[0]) or scaling["factor"] == 1


def causal(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    seen = torch.ones(1, 1, len(q), len(q), dtype=torch.bool).tril()
    return DenseAttention(seen)(layer, q[None], k[None], v[None])[0]


@pytest.mark.parametrize("name", ["linear", "yarn", "yarn-mscale", "llama3"])
def test_a_model_has_the_logits_of_transformers(name: str) -> None:
    """Behind the positions of training; and the table of the fused decoder has the same rotation."""
    ours, theirs = configs(SCALINGS[name])
    model, released = random_model(ours), Qwen3ForCausalLM(theirs)
    released.load_state_dict(model.state_dict())
    ids = torch.randint(ours.vocab_size, (48,), generator=torch.Generator().manual_seed(3))
    positions = torch.arange(LENGTH - len(ids), LENGTH)
    with torch.no_grad():
        logits = model.logits(model(ids, positions, causal))
        wanted = released(input_ids=ids[None], position_ids=positions[None]).logits[0]
        plain = random_model(BASE)
        unscaled = plain.logits(plain(ids, positions, causal))
        torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=1e-4)
        assert (logits - unscaled).abs().max() > 1e-2
        hidden = model(ids, positions, causal)
        fused = fuse(model, num_positions=LENGTH).forward(ids, positions, causal)
        torch.testing.assert_close(fused, hidden, atol=1e-4, rtol=1e-4)


def test_a_model_without_head_norms_has_the_logits_of_transformers() -> None:
    scaling = SCALINGS["yarn"]
    sizes = replace(FAMILIES["dream"], num_heads=4, hidden_size=64, head_dim=16, max_positions=LENGTH)
    ours = read_config(write_config(sizes) | {"rope_scaling": scaling})
    theirs = Qwen2Config(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=ours.intermediate_size,
        num_hidden_layers=ours.num_layers,
        num_attention_heads=4,
        num_key_value_heads=ours.num_kv_heads,
        max_position_embeddings=LENGTH,
        tie_word_embeddings=False,
        rope_theta=ours.rope_theta,
        rope_scaling=dict(scaling),
    )
    model, released = random_model(ours), Qwen2ForCausalLM(theirs)
    released.load_state_dict(model.state_dict())
    ids = torch.arange(40, 80)
    with torch.no_grad():
        wanted = released(input_ids=ids[None], position_ids=(ids * 8)[None]).logits[0]
        torch.testing.assert_close(model.logits(model(ids, ids * 8, causal)), wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
@pytest.mark.parametrize("family", ["sdar", "sdar-moe", "llada2", "dream"])
def test_a_scaling_is_written_and_read_back(family: str, scaling: dict) -> None:
    written = write_config(FAMILIES[family])
    config = read_config(written | {"rope_scaling": scaling})
    assert config.rope_scaling is not None and read_config(write_config(config)) == config
    newer = {key: value for key, value in written.items() if key not in ("rope_theta", "rope_scaling")}
    of_five = {**scaling, "rope_theta": config.rope_theta}
    assert read_config(newer | {"rope_parameters": of_five}) == config
    assert read_config(written | {"rope_scaling": scaling, "rope_parameters": of_five}) == config
    with pytest.raises(ValueError, match="; remove"):
        read_config(written | {"rope_scaling": scaling, "rope_parameters": {"rope_type": "default"}})


def test_what_a_scaling_leaves_out() -> None:
    written, yarn = write_config(BASE), {"rope_type": "yarn", "factor": 2.0}
    assert read_config(written | {"rope_scaling": {"rope_type": "default"}}) == BASE
    assert read_config(written | {"rope_scaling": {}, "rope_parameters": {}}) == BASE
    of_config = YarnScaling(factor=2.0, original_max_position_embeddings=LENGTH)
    assert read_config(written | {"rope_scaling": yarn}).rope_scaling == of_config
    beside = written | {"rope_scaling": yarn, "original_max_position_embeddings": 32}
    trained = read_config(beside).rope_scaling
    assert isinstance(trained, YarnScaling) and trained.original_max_position_embeddings == 32
    linear = read_config(written | {"rope_scaling": {"type": "linear", "factor": 2}})
    assert linear.rope_scaling == LinearScaling(factor=2.0)


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "rope_type='dynamic' .*known: default, linear, llama3, yarn"),
        ({"rope_type": 7}, "rope_type=7 "),
        ({"rope_type": ["yarn"]}, r"rope_type=\['yarn'\] "),
        ({"type": "linear", "rope_type": "yarn", "factor": 2.0}, "rope_type='yarn' and type='linear'"),
        ("yarn", "rope_scaling='yarn'; it must be an object"),
        ({"type": "linear"}, "rope_type='linear' .*without 'factor'"),
        ({"type": "linear", "factor": "2"}, "rope_scaling.factor='2'; it must be a number"),
        ({"type": "linear", "factor": 0.5}, "rope_scaling.factor=0.5; it must be a number of at least 1"),
        ({"type": "linear", "factor": 2.0, "beta_fast": 3}, "beta_fast=3 in rope_scaling, which is not known"),
        ({"type": "yarn", "factor": True}, "rope_scaling.factor=True"),
        ({"type": "yarn", "factor": 2.0, "truncate": None}, "rope_scaling.truncate=None; it must be true or false"),
        ({"type": "yarn", "factor": 2.0, "attention_factor": 0}, "rope_scaling.attention_factor=0"),
        ({"type": "yarn", "factor": 2.0, "beta_fast": 1, "beta_slow": 2}, "beta_fast=1.0 .*beta_slow=2.0"),
        (
            {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 6.5},
            "rope_scaling.original_max_position_embeddings=6.5; it must be a whole number",
        ),
        (
            {"type": "llama3", "factor": 2.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0},
            "high_freq_factor=4.0 must exceed low_freq_factor=4.0",
        ),
    ],
)
def test_a_scaling_that_cannot_be_computed_is_named(scaling: object, message: str) -> None:
    with pytest.raises(ValueError, match=rf"^config.json has .*{message}") as caught:
        read_config(write_config(SDAR) | {"rope_scaling": scaling})
    assert "\n" not in str(caught.value)


def test_a_family_whose_code_scales_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="LLaDAModelLM"):
        read_config(write_config(FAMILIES["llada"]) | {"rope_parameters": {"rope_type": "linear", "factor": 2.0}})
    with pytest.raises(ValueError, match="LLaDAModelLM"):
        write_config(replace(FAMILIES["llada"], rope_scaling=LinearScaling(factor=2.0)))
    with pytest.raises(ValueError, match=r"rope_theta=1.0"):
        replace(SDAR, rope_theta=1.0, rope_scaling=YarnScaling(factor=2.0, original_max_position_embeddings=8))
