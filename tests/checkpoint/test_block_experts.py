"""Experts that keep the FP8 values and block scales of their files: loaded, sharded, served, swapped."""

import json
import re
from pathlib import Path

import pytest
import torch
from checkpoint_folders import CONFIGS, KEPT, rounded_folder, write_model
from safetensors.torch import load_file, save_file

from mbd_core.checkpoint.block_experts import check_blocks
from mbd_core.checkpoint.loading import load_model
from mbd_core.checkpoint.safetensor_files import WEIGHTS
from mbd_core.checkpoint.saving import save_model
from mbd_core.decoding.blocks.config import DecodingConfig
from mbd_core.decoding.blocks.request import Request
from mbd_core.engine.config import EngineConfig
from mbd_core.engine.engine import Engine
from mbd_core.models.decoder import Decoder
from mbd_core.models.mlp import MoE
from mbd_core.models.quantize import quantized_parts
from mbd_core.models.shard import Shard
from mbd_core.ops.experts.fp8 import Fp8Experts, dequantize

STACKS = ("gate_proj", "up_proj", "down_proj")


def kept_experts(model: Decoder) -> dict[str, Fp8Experts]:
    return {name: module for name, module in model.named_modules() if isinstance(module, Fp8Experts)}


def outputs(model: Decoder) -> list[tuple[int, ...]]:
    engine = Engine(model, EngineConfig(max_rows=2, num_pages=20))
    decoding = DecodingConfig(block_size=32, buffer_size=2, tau_m2t=0.02, tau_add=0.1)
    requests = [
        Request(request_id=str(n), prompt=tuple(range(2 + n, 30 - n)), max_tokens=24, decoding=decoding)
        for n in range(3)
    ]
    return [tuple(output.tokens) for output in engine.generate(requests)]


@pytest.mark.parametrize(("name", "apart"), [("llada2", False), ("llada2", True), ("sdar-moe", False)])
def test_experts_hold_what_their_files_hold(tmp_path: Path, name: str, apart: bool) -> None:
    """Byte by byte, and the rest of the model is the wide one's."""
    rounded_folder(tmp_path / "m", name, apart=apart)
    stored = {k: t for path in (tmp_path / "m").glob("*.safetensors") for k, t in load_file(path).items()}
    model, wide = load_model(tmp_path / "m", fp8="blocks"), load_model(tmp_path / "m")
    assert quantized_parts(model) == "blocks" and quantized_parts(wide) is None
    layers = kept_experts(model)
    assert layers.keys() == {n + ".experts" for n, m in wide.named_modules() if isinstance(m, MoE)}
    for module_name, module in layers.items():
        for stack in STACKS:
            weight = module.weight(stack)
            assert weight.block == (8, 6)
            for expert in range(8):
                file = stored[f"{module_name}.{expert}.{stack}.weight"]
                assert torch.equal(weight.values[expert].view(torch.uint8), file.view(torch.uint8))
                assert torch.equal(weight.scale[expert], stored[f"{module_name}.{expert}.{stack}.weight_scale_inv"])
    ours = model.state_dict()
    for key, tensor in wide.state_dict().items():
        assert torch.equal(ours[key], tensor) if key in ours else key.rpartition(".")[0] in layers
    wide_bytes = sum(t.nbytes for n, t in wide.state_dict().items() if ".experts." in n and "shared" not in n)
    kept_bytes = sum(t.nbytes for n, t in ours.items() if n.endswith("_values"))
    assert 2 * kept_bytes == wide_bytes


def test_an_engine_of_kept_blocks_gives_the_tokens_of_what_they_stand_for(tmp_path: Path) -> None:
    meaning = rounded_folder(tmp_path / "m", "llada2", gain=20.0)
    plain = write_model(tmp_path / "plain", CONFIGS["llada2"])
    save_file(meaning, plain / WEIGHTS)
    wanted = outputs(load_model(plain, dtype=torch.float32))
    assert outputs(load_model(tmp_path / "m", dtype=torch.float32, fp8="blocks")) == wanted
    even = load_model(tmp_path / "m", dtype=torch.float32, fp8="blocks")
    for module in kept_experts(even).values():
        for stack in STACKS:
            scale = module.weight(stack).scale
            scale.copy_(scale.flip(0, 1, 2))
    assert outputs(even) != wanted, "the tokens depend on the scales"


def test_ranks_hold_whole_blocks_of_the_file(tmp_path: Path) -> None:
    rounded_folder(tmp_path / "m", "llada2", blocks=(3, 3))
    for rank in (0, 1):
        shard = Shard(rank=rank, size=2)
        model, wide = (
            load_model(tmp_path / "m", dtype=torch.float32, shard=shard, reduce=lambda x: x, fp8=parts)
            for parts in ("blocks", None)
        )
        for name, module in kept_experts(model).items():
            for stack in STACKS:
                found = dequantize(module.weight(stack), torch.float32)
                assert torch.equal(found, wide.get_parameter(f"{name}.{stack}")), (name, stack)


def test_ranks_that_would_cut_a_block_are_refused(tmp_path: Path) -> None:
    rounded_folder(tmp_path / "m", "llada2", blocks=(4, 6))
    check_blocks(tmp_path / "m", num_ranks=1)
    sentence = (
        "fp8=blocks cannot be honoured with tensor_parallel=2: a rank gets 3 of the 6 rows of "
        "'model.layers.1.mlp.experts.0.gate_proj.weight', and its scales are for blocks of 4; take fewer ranks, or "
        "fp8=experts"
    )
    with pytest.raises(ValueError, match=re.escape(sentence)):
        check_blocks(tmp_path / "m", num_ranks=2)
    with pytest.raises(ValueError, match=re.escape(sentence)):
        load_model(tmp_path / "m", shard=Shard(rank=1, size=2), reduce=lambda x: x, fp8="blocks")
    load_model(tmp_path / "m", shard=Shard(rank=1, size=2), reduce=lambda x: x, fp8="experts")


def test_folders_without_such_experts_are_refused(tmp_path: Path) -> None:
    rounded_folder(tmp_path / "dense", "sdar")
    with pytest.raises(ValueError, match="fp8=all"):
        load_model(tmp_path / "dense", fp8="blocks")
    write_model(tmp_path / "wide", CONFIGS["llada2"])
    with pytest.raises(ValueError, match="fp8=experts"):
        load_model(tmp_path / "wide", fp8="blocks")
    rounded_folder(tmp_path / "mixed", "llada2", kept=(*KEPT, "layers.2.mlp.experts.3.up_proj"))
    sentence = r"'.*layers\.2\.mlp\.experts\..*' is FP8 and '.*experts\.3\.up_proj\.weight' of the same layer is not"
    with pytest.raises(ValueError, match=sentence):
        load_model(tmp_path / "mixed", fp8="blocks")
    rounded_folder(tmp_path / "half", "llada2", kept=(*KEPT, "layers.2.mlp.experts"))
    assert kept_experts(load_model(tmp_path / "half", fp8="blocks")).keys() == {"model.layers.1.mlp.experts"}
    with pytest.raises(ValueError, match="fp8=blocks"):
        load_model(tmp_path / "half", fp8="blocks", device="meta")


def test_a_value_that_is_no_number_is_refused_in_kept_blocks(tmp_path: Path) -> None:
    rounded_folder(tmp_path / "m", "llada2")
    tensors = load_file(tmp_path / "m" / WEIGHTS)
    name = "model.layers.1.mlp.experts.2.down_proj.weight"
    tensors[name].view(torch.uint8)[3, 1] = 0xFF
    save_file(tensors, tmp_path / "m" / WEIGHTS)
    with pytest.raises(ValueError):
        load_model(tmp_path / "m", fp8="blocks")


def test_swapped_weights_keep_the_blocks_of_their_own_files(tmp_path: Path) -> None:
    """A folder that is FP8 in the same blocks is copied as it is; one that is wide is rounded in these blocks."""
    rounded_folder(tmp_path / "new", "llada2")
    for path in (tmp_path / "old", tmp_path / "other"):
        rounded_folder(path, "llada2", blocks=(8, 6) if path.name == "old" else (4, 6))
        tensors = load_file(path / WEIGHTS)
        save_file({n: t if "experts" not in n else t.roll(1, 0) for n, t in tensors.items()}, path / WEIGHTS)
    model = load_model(tmp_path / "old", dtype=torch.float32, fp8="blocks")
    engine = Engine(model, EngineConfig(max_rows=2, num_pages=20))
    wanted = load_model(tmp_path / "new", dtype=torch.float32, fp8="blocks").state_dict()
    engine.update_weights(tmp_path / "new")
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor.view(torch.uint8), wanted[name].view(torch.uint8)), name
    with pytest.raises(ValueError):
        engine.update_weights(tmp_path / "other")
    wide = load_model(tmp_path / "new", dtype=torch.float32)
    save_model(tmp_path / "wide", wide)
    engine.update_weights(tmp_path / "wide")
    for name, module in kept_experts(model).items():
        for stack in STACKS:
            found, right = dequantize(module.weight(stack), torch.float32), wide.get_parameter(f"{name}.{stack}")
            assert ((found - right).abs() <= right.abs() / 16 + module.weight(stack).scale.max() / 1024).all()
    assert json.loads((tmp_path / "new" / "config.json").read_text())["quantization_config"]
