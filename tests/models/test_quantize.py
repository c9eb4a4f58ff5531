"""FP8 weights in a model: what is rounded, that nothing else changes, what is refused, and what it costs."""

import copy
import json
import threading
import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.commands import rounding
from mbd_core.checkpoint.loading import load_model
from mbd_core.checkpoint.saving import save_model
from mbd_core.decoding.blocks.config import DecodingConfig
from mbd_core.decoding.blocks.request import Request
from mbd_core.engine.config import EngineConfig
from mbd_core.engine.engine import Engine
from mbd_core.models.decoder import Decoder, init_weights
from mbd_core.models.mlp import Experts
from mbd_core.models.model_config import Fp8Parts, ModelConfig, MoEConfig
from mbd_core.models.quantize import quantize_weights, quantized_parts, weight_bytes
from mbd_core.models.shard import Shard
from mbd_core.ops.attention.whole import DenseAttention
from mbd_core.ops.experts import fp8

MOE = ModelConfig(
    architecture="LLaDA2MoeModelLM",
    vocab_size=96,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    rope_theta=1e4,
    rms_norm_eps=1e-6,
    max_positions=64,
    tie_word_embeddings=False,
    mask_token_id=0,
    eos_token_ids=(1,),
    block_size=4,
    moe=MoEConfig(
        num_experts=4,
        experts_per_token=2,
        intermediate_size=16,
        score="sigmoid",
        norm_topk_prob=True,
        num_shared_experts=1,
        expert_bias=True,
        num_groups=2,
        topk_groups=1,
        first_dense_layers=1,
    ),
)
DENSE = replace(
    MOE,
    architecture="DreamModel",
    moe=None,
    qkv_bias=True,
    qk_norm=False,
    attention="full",
    shift_logits=True,
    tie_word_embeddings=True,
)
ATTENTION = {f"self_attn.{n}_proj" for n in "qkvo"}
MLP = {f"mlp.{n}_proj" for n in ("gate", "up", "down")}
SHARED = {f"mlp.shared_experts.{n}_proj" for n in ("gate", "up", "down")}


def wide_model(config: ModelConfig) -> Decoder:
    model = Decoder(config).eval()
    init_weights(model, seed=0, std=0.2)
    return model


def logits(model: Decoder) -> Tensor:
    return run(model, [draw(12, model.config)], split=None)


def draw(count: int, config: ModelConfig) -> Tensor:
    return torch.randint(1, config.vocab_size, (count,), generator=torch.Generator().manual_seed(1))


def run(model: Decoder, rows: Sequence[Tensor], split: list[int] | None) -> Tensor:
    """Logits of packed rows that do not see one another."""
    lengths = [len(row) for row in rows]

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = zip(*(x.split(lengths) for x in (q, k, v)), strict=True)
        seen = (torch.ones(1, 1, n, n).bool() for n in lengths)
        return torch.cat(
            [DenseAttention(m)(layer, *(x[None] for x in p))[0] for m, p in zip(seen, parts, strict=True)]
        )

    positions = torch.cat([torch.arange(n) for n in lengths])
    with torch.no_grad():
        return model.logits(model(torch.cat(tuple(rows)), positions, attend, split=split), split=split)


def rounded_by_hand(model: Decoder) -> Decoder:
    """A wide model with the values that FP8 leaves of its layers' matrices; the router's are left alone."""
    with torch.no_grad():
        for name, weight in model.model.layers.named_parameters():
            if weight.ndim > 1 and not name.endswith("gate.weight"):
                weight.copy_(fp8.dequantize(fp8.quantize(weight), torch.float32))
    return model


@pytest.mark.parametrize(
    ("config", "parts", "replaced"),
    [
        (MOE, "experts", {"1.mlp.experts"}),
        (MOE, "all", {"1.mlp.experts"} | {f"0.{n}" for n in ATTENTION | MLP} | {f"1.{n}" for n in ATTENTION | SHARED}),
        (DENSE, "all", {f"{layer}.{n}" for layer in (0, 1) for n in ATTENTION | MLP}),
    ],
)
def test_only_what_was_asked_for_is_rounded(config: ModelConfig, parts: Fp8Parts, replaced: set[str]) -> None:
    model, before = wide_model(config), wide_model(config).state_dict()
    assert quantized_parts(model) is None
    assert quantize_weights(model, parts) is model
    assert quantized_parts(model) == parts
    found = {n for n, m in model.model.layers.named_modules() if isinstance(m, fp8.Fp8Module)}
    assert found == replaced
    assert not any(isinstance(m, Experts) for m in model.modules())
    kept = [n for n in model.state_dict() if not n.endswith(("_values", "_scale"))]
    assert {"model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"} <= set(kept)
    assert all(torch.equal(model.state_dict()[n], before[n]) for n in kept)
    stored = sum(t.numel() for n, t in model.state_dict().items() if n.endswith("_values"))
    lost = {n for n in before if n not in kept}
    assert stored == sum(before[n].numel() for n in lost) > 0


@pytest.mark.parametrize("config", [MOE, DENSE], ids=["moe", "dense"])
def test_the_model_computes_with_the_rounded_values(config: ModelConfig) -> None:
    narrow = logits(quantize_weights(wide_model(config), "all"))
    torch.testing.assert_close(narrow, logits(rounded_by_hand(wide_model(config))), atol=1e-4, rtol=1e-4)
    assert not torch.allclose(narrow, logits(wide_model(config)), atol=1e-3)


@pytest.mark.parametrize("config", [MOE, DENSE], ids=["moe", "dense"])
def test_rows_computed_apart_keep_their_bits(config: ModelConfig) -> None:
    model = quantize_weights(wide_model(config), "all")
    rows = draw(12, config).split([4, 5, 3])
    alone = [run(model, [row], [len(row)]) for row in rows]
    assert torch.equal(run(model, rows, [4, 5, 3]), torch.cat(alone))


def test_ranks_round_their_own_parts(tmp_path: Path) -> None:
    """Rows of a cut matrix are rounded as in the whole one; columns more finely."""
    save_model(tmp_path / "m", wide_model(MOE))
    parts: list[Tensor] = [torch.empty(0)] * 2
    barrier = threading.Barrier(2, timeout=20)

    def reduce(rank: int, x: Tensor) -> Tensor:
        parts[rank] = x
        barrier.wait()
        total = parts[0] + parts[1]
        barrier.wait()
        return total

    ranks = [
        quantize_weights(
            load_model(tmp_path / "m", shard=Shard(rank=r, size=2), reduce=lambda x, r=r: reduce(r, x)), "all"
        )
        for r in range(2)
    ]
    whole = quantize_weights(load_model(tmp_path / "m"), "all")
    for name, dim in (("0.self_attn.q_proj.weight", 0), ("1.mlp.experts.up_proj", 1)):
        cut = [r.model.layers.get_buffer(f"{name}_values").view(torch.uint8) for r in ranks]
        assert torch.equal(torch.cat(cut, dim), whole.model.layers.get_buffer(f"{name}_values").view(torch.uint8))
    scale = "1.mlp.experts.down_proj_scale"
    assert all((r.model.layers.get_buffer(scale) <= whole.model.layers.get_buffer(scale)).all() for r in ranks)
    found: dict[int, Tensor] = {}
    threads = [threading.Thread(target=lambda r=r: found.update({r: logits(ranks[r])})) for r in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.equal(found[0], found[1])
    wide = logits(wide_model(MOE))
    assert (found[0] - wide).abs().mean() < 0.1 * wide.std()


def test_wide_tensors_are_let_go_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    model = wide_model(MOE)
    wide = [
        weakref.ref(p)
        for n, p in model.model.layers.named_parameters()
        if p.ndim > 1 and not n.endswith("gate.weight")
    ]
    alive: list[int] = []
    once = fp8.quantize

    def counting(weight: Tensor, **how: Any) -> fp8.Fp8Weight:
        alive.append(sum(r() is not None for r in wide))
        with monkeypatch.context() as inner:  # a stack's matrices are not counted
            inner.setattr(fp8, "quantize", once)
            return once(weight, **how)

    monkeypatch.setattr(fp8, "quantize", counting)
    quantize_weights(model, "all")
    assert len(alive) == len(wide)
    assert all(count <= len(wide) - done for done, count in enumerate(alive))
    assert not any(r() is not None for r in wide)


def test_fp8_values_follow_to_no_other_dtype() -> None:
    model = quantize_weights(wide_model(MOE), "all")
    before, size = logits(model), weight_bytes(model)
    assert size < 0.6 * weight_bytes(wide_model(MOE))
    held = {n: t.clone() for n, t in model.state_dict().items() if n.endswith(("_values", "_scale"))}
    model.to(torch.bfloat16)
    for name, tensor in held.items():
        now = model.state_dict()[name]
        assert now.dtype == tensor.dtype
        assert torch.equal(now.view(torch.uint8), tensor.view(torch.uint8))
    assert (logits(model) - before).abs().mean() < 0.05 * before.std()
    again = quantize_weights(wide_model(MOE), "all").to(torch.bfloat16)
    again.load_state_dict(model.state_dict())
    assert torch.equal(logits(again), logits(model))


def test_what_cannot_be_done_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="experts, all"):
        quantize_weights(wide_model(MOE), "mlp")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="use parts='all'"):
        quantize_weights(wide_model(DENSE), "experts")
    model = wide_model(MOE)
    broken = copy.deepcopy(model)
    with torch.no_grad():
        broken.model.layers[1].mlp.experts.down_proj[2, 3, 4] = torch.nan
    with pytest.raises(ValueError, match=r"down_proj .*finite"):
        quantize_weights(broken, "all")
    assert quantized_parts(broken) is None
    quantize_weights(model, "experts")
    with pytest.raises(ValueError, match="parts='experts'"):
        quantize_weights(model, "all")
    with pytest.raises(ValueError, match="save the model that it was made from"):
        save_model(tmp_path / "no", model)
    assert not (tmp_path / "no").exists()
    with pytest.raises(ValueError, match="meta"):
        quantize_weights(Decoder(MOE).to("meta"), "all")


@pytest.mark.parametrize(
    ("shape", "given", "reason"),
    [
        ((32, 48), {"capability": (8, 0)}, "this device has 8.0"),
        ((32, 40), {"capability": (9, 0)}, "multiples of 16 channels, not 40"),
        ((4, 32, 40), {"capability": (9, 0), "has_triton": False}, "need triton"),
        ((4, 32, 40), {"capability": (9, 0), "has_triton": True}, None),
        ((32, 48), {"capability": (9, 0), "has_triton": False}, None),
    ],
)
def test_what_a_gpu_cannot_do(shape: tuple[int, ...], given: dict[str, Any], reason: str | None) -> None:
    weight: Any = SimpleNamespace(device=torch.device("cuda"), ndim=len(shape), shape=shape)
    found = fp8.fp8_obstacle(weight, **given)
    assert found is None if reason is None else found is not None and reason in found


def test_an_engine_serves_a_rounded_model(tiny_model_dir: Path) -> None:
    def outputs(count: int) -> list[tuple[int, ...]]:
        model = quantize_weights(load_model(tiny_model_dir, dtype=torch.float32), "all")
        engine = Engine(model, EngineConfig(batch_invariant=True, max_rows=4))
        decoding = DecodingConfig(block_size=4, buffer_size=2, tau_m2t=0.2)
        requests = [
            Request(request_id=f"r{n}", prompt=tuple(range(10 + n, 20 + 2 * n)), max_tokens=12, decoding=decoding)
            for n in range(count)
        ]
        return [tuple(o.tokens) for o in engine.generate(requests)]

    assert outputs(1)[0] == outputs(3)[0]


def test_the_report_measures_the_shipped_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "f.json"
    asked = ["--model", "tiny-mbd", "--parts", "all", "--limit", "4", "--json", str(target)]
    assert rounding(asked) == 0
    assert capsys.readouterr().out.count("| tiny-mbd | all | ") == 2
    rows = json.loads(target.read_text())["rows"]
    assert [r["inputs"] for r in rows] == ["clean text", "masked text"]
    for row in rows:
        assert row["positions"] > 20
        assert 0 < row["mean_abs"] <= 0.04 * row["logit_std"] and row["max_abs"] <= 0.4 * row["logit_std"]
        assert row["top1_agreement"] >= 0.97 and 0 <= row["mean_kl"] <= 2e-3
        assert row["bytes_after"] < 0.35 * row["bytes_before"]


def test_the_report_takes_a_folder_without_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_model(tmp_path / "m", wide_model(MOE))
    assert rounding(["--model", str(tmp_path / "m"), "--limit", "2"]) == 0
    printed = capsys.readouterr().out
    assert "| m | experts |" in printed and "| masked random ids | 32 |" in printed
    save_model(tmp_path / "d", wide_model(DENSE))
    assert rounding(["--model", str(tmp_path / "d"), "--limit", "2"]) == 0
    assert "| d | all |" in capsys.readouterr().out
    for asked, sentence in (
        (["--model", "none"], "unknown model 'none'"),
        (["--model", str(tmp_path / "d"), "--parts", "experts"], "has no experts; use --parts all"),
        (["--model", str(tmp_path / "m"), "--limit", "0"], "--limit 0 must be a whole number of at least 1"),
    ):
        assert rounding(asked) == 2
        printed = capsys.readouterr()
        assert printed.out == "" and printed.err.count("\n") == 1 and sentence in printed.err


@pytest.mark.gpu
@pytest.mark.parametrize("config", [MOE, DENSE], ids=["moe", "dense"])
def test_gpu_computes_with_the_rounded_values(config: ModelConfig) -> None:
    expected = logits(rounded_by_hand(wide_model(config)))
    model = wide_model(config).to("cuda", torch.bfloat16)
    quantize_weights(model, "all")
    ids = draw(12, config).cuda()
    attend = DenseAttention(torch.ones(1, 1, 12, 12).bool().cuda())
    with torch.no_grad():
        found = model.logits(model(ids[None], torch.arange(12).cuda()[None], attend))[0].cpu()
    assert (found - expected).abs().mean() < 0.1 * expected.std()
