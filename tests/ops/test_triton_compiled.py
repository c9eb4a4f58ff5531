"""The Triton kernels compiled for real chips, which takes no GPU: they fit, and keep what they hold in registers."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from mbd_core.ops.attention import paged_attention as attention_triton
from mbd_core.ops.experts import expert_products as experts_triton
from mbd_core.ops.experts import expert_tiles as expert_tiles
from mbd_core.ops.layer import confidence, residual_norm
from mbd_core.ops.layer import heads as heads_triton
from mbd_core.ops.layer import router as router_triton
from mbd_core.ops.layer import swiglu as swiglu_triton

triton = pytest.importorskip("triton", reason="triton is not installed here; its kernels are not compiled")

SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""What a program may have of a chip's shared memory, by compute capability."""
LEAST_SHARED_BYTES = 99 * 1024
"""That of 8.9, the first capability with FP8."""
CAPABILITIES = [80, 90, pytest.param(100, marks=pytest.mark.slow)]

EXPERTS = {"llada2-mini": (2048, 512, 8), "llada2-flash": (4096, 1024, 8), "sdar-30b-a3b": (2048, 768, 8)}
"""Hidden size, an expert's width, experts a token."""

VOCABULARY = 157184


def compiled(kernel: Any, arguments: dict[str, Any], capability: int, **options: int) -> Any:
    """`kernel` for a chip; an argument is a type (a pointer or number) or, where the kernel wants it, a constant.

    Triton specializes on addresses and numbers that 16 divides, as all of these do but counts.
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    constants = {name: value for name, value in arguments.items() if not isinstance(value, str)}
    types = {name: "constexpr" if name in constants else value.removesuffix("!") for name, value in arguments.items()}
    whole = {
        (place,): [["tt.divisibility", 16]]
        for place, value in enumerate(arguments.values())
        if isinstance(value, str) and not value.endswith("!")
    }
    source, target = ASTSource(kernel, types, constants, whole), GPUTarget("cuda", capability, 32)
    return triton.compile(source, target=target, options=options)


def spilled(binary: Any, folder: Path) -> int:
    """Bytes of memory in which a thread of this binary keeps what its registers cannot hold."""
    from triton import knobs

    file = folder / "kernel.cubin"
    file.write_bytes(binary.asm["cubin"])
    command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(file)]
    usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.findall(r"STACK:(\d+) .*LOCAL:(\d+)", usage)
    assert len(found) == 1, usage
    return sum(map(int, found[0]))


def check(binary: Any, capability: int, folder: Path, *, most_spilled: int = 0) -> None:
    assert binary.asm["cubin"] and binary.metadata.shared <= SHARED_BYTES.get(capability, LEAST_SHARED_BYTES)
    assert spilled(binary, folder) <= most_spilled


FORMS: dict[str, tuple[str, int, int]] = {
    "bf16": ("bf16", 0, 0),
    "fp8": ("fp8e4nv", 1, 0),
    "fp8 in blocks": ("fp8e4nv", 128, 128),
}
"""A weight's type, and the rows and columns of a scale."""


ONE_REGISTER = {("fp8 in blocks", False, 64, 100)}
"""SwiGLU's kernels that keep one register in memory, from before their loop to behind it."""


@pytest.mark.parametrize(
    ("form", "shares", "each", "capability"),
    [
        *(("bf16", True, 1, capability) for capability in SHARED_BYTES),
        *(("fp8", True, 1, capability) for capability in (89, 90)),
        *(("fp8 in blocks", True, 1, capability) for capability in (89, 100)),
        pytest.param("fp8", True, 1, 100, marks=pytest.mark.slow),
        pytest.param("fp8 in blocks", True, 1, 90, marks=pytest.mark.slow),
        pytest.param("bf16", False, 1, 90, marks=pytest.mark.slow),
        ("bf16", True, 64, 90),
        *((form, False, 64, 90) for form in FORMS),
        ("fp8 in blocks", False, 64, 100),
    ],
)
def test_the_experts_kernels_fit(form: str, shares: bool, each: int, capability: int, tmp_path: Path) -> None:
    """`each` tokens an expert."""
    weights, rows, columns = FORMS[form]
    swiglu, down = experts_triton.SWIGLU.compiled, experts_triton.DOWN.compiled
    scale = "*fp32" if rows else "*bf16"
    layout = {"order_ptr": "*i64", "expert_ptr": "*i32", "first_ptr": "*i32", "end_ptr": "*i32"}
    size = 1 if rows else 2
    tiles = experts_triton.tiles_for(64, 512, size, each=each)
    assert tiles.rows == (16 if each == 1 else 64)
    assert experts_triton._within(columns, tiles.depth) == tiles.depth
    depths = set()
    for hidden, width, _ in EXPERTS.values():
        assert hidden % 128 == width % 128 == 0  # so that all models run the same binaries
        depths.add(experts_triton.down_depth(tiles, width, columns))
        assert -(-width // max(depths)) <= 4 or columns == max(depths), "products that a block of scales does not end"
    options = {"num_warps": tiles.warps, "num_stages": tiles.stages}
    rule = {"num_scales": "i32!", "SHARES": shares, "ROWS": rows, "COLUMNS": columns, "TILE": tiles.rows}
    gather = {
        "x_ptr": "*bf16",
        "gate_ptr": "*" + weights,
        "up_ptr": "*" + weights,
        "gate_scale_ptr": scale,
        "up_scale_ptr": scale,
        "shared_gate_ptr": "*bf16",
        "shared_up_ptr": "*bf16",
        "hidden_ptr": "*bf16",
        **layout,
        "D": "i32",
        "F": "i32",
        "E": "i32",
        "K": "i32!",
        **rule,
        "BLOCK_F": tiles.columns,
        "BLOCK_D": tiles.depth,
    }
    most_spilled = 8 if (form, shares, each, capability) in ONE_REGISTER else 0
    check(compiled(swiglu, gather, capability, **options), capability, tmp_path, most_spilled=most_spilled)
    scatter = {
        "hidden_ptr": "*bf16",
        "down_ptr": "*" + weights,
        "down_scale_ptr": scale,
        "shared_down_ptr": "*bf16",
        "weights_ptr": "*fp32",
        "y_ptr": "*fp32",
        **layout,
        "D": "i32",
        "F": "i32",
        "E": "i32",
        "wide": "i32",
        **rule,
        "BLOCK_D": tiles.columns,
    }
    for depth in sorted(depths):
        check(compiled(down, scatter | {"BLOCK_F": depth}, capability, **options), capability, tmp_path)


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_the_confidence_kernels_fit(dtype: str, capability: int, tmp_path: Path) -> None:
    stretch, join = confidence.STRETCH.compiled, confidence.JOIN.compiled
    parts = {"top_ptr": "*fp32", "total_ptr": "*fp32", "best_ptr": "*fp32", "token_ptr": "*i32"}
    reads = {
        "logits_ptr": "*" + dtype,
        **parts,
        "stride": "i32",
        "V": "i32",
        "size": "i32!",
        "mask": "i32!",
        "SPAN": confidence._SPAN,
        "BLOCK": confidence._BLOCK,
    }
    check(compiled(stretch, reads, capability), capability, tmp_path)
    writes = {"chosen_ptr": "*i64", **dict.fromkeys(("probability_ptr", "logit_ptr", "lse_ptr"), "*fp32")}
    size = {"S": "i32!", "BLOCK": 1 << (confidence.num_stretches(VOCABULARY) - 1).bit_length()}
    check(compiled(join, {**parts, **writes, **size}, capability), capability, tmp_path)


ATTENTION = {
    "llada2-mini, sdar": (4, 128),
    "dream-7b": (7, 128),
    "narrow": (2, 64),
    "wide": (4, 256),
    "diffusion-gemma": (2, 256),
    "diffusion-gemma, global": (8, 512),
}
"""Query heads for each key head, channels."""


# Every model on the chip with the least shared memory, and on one of the two others.
ELSEWHERE = {"llada2-mini, sdar": 90, "diffusion-gemma": 90, "diffusion-gemma, global": 90}


@pytest.mark.parametrize(
    ("model", "capability"),
    [
        pytest.param(
            model,
            capability,
            marks=() if capability in (80, ELSEWHERE.get(model, 100)) else pytest.mark.slow,
        )
        for model in ATTENTION
        for capability in SHARED_BYTES
    ],
)
def test_the_attention_kernels_fit(model: str, capability: int, tmp_path: Path) -> None:
    """A captured step's call with splits, and without for the models that are served; rows of a prompt."""
    share, channels = ATTENTION[model]
    split, join = attention_triton.SPLIT.compiled, attention_triton.JOIN.compiled
    strides = dict.fromkeys(("q_token", "q_head", "k_page", "k_place", "k_head", "v_page", "v_place", "v_head"), "i32")
    steps = {"table_row": "i32!", "tiles": "i32!", "length": "i32", "num_out": "i32!", "scale": "fp32!"}
    batches = [(1, 2, False)]
    if model.startswith(("llada2", "diffusion-gemma")):
        batches += [(300, 1, False), (1, 2, True)]
    for sequences, each, causal in batches:
        cut = attention_triton.plan(
            sequences=sequences, queries=32 * each, share=share, kv_heads=4, head_dim=channels, exact=False
        )
        assert (cut.splits == 1) == (sequences > 1)
        reads = {
            "q_ptr": "*bf16",
            "k_ptr": "*bf16",
            "v_ptr": "*bf16",
            "out_ptr": "*fp32" if cut.splits > 1 else "*bf16",
            "lse_ptr": "*fp32",
            "bounds_ptr": "*i32",
            "keys_ptr": "*i32",
            "first_keys_ptr": "*i32",
            "hidden_ptr": "*i32",
            "table_ptr": "*i32",
            **strides,
            **steps,
            "EACH": each,
            "CAUSAL": causal,
            "WINDOW": causal and model == "diffusion-gemma",
            "GAP": causal and model.startswith("llada2"),
            "SHARE": share,
            "C": channels,
            "PAGE": 32,
            "SPLITS": cut.splits,
            "BLOCK_M": cut.block_m,
            "BLOCK_N": cut.block_n,
            "BLOCK_C": cut.block_c,
        }
        check(
            compiled(split, reads, capability, num_warps=cut.num_warps, num_stages=cut.num_stages),
            capability,
            tmp_path,
        )
    writes = {
        "parts_ptr": "*fp32",
        "lse_ptr": "*fp32",
        "out_ptr": "*bf16",
        "num_out": "i32!",
        "C": channels,
        "SPLITS": 16,
        "BLOCK_S": 16,
        "BLOCK_C": cut.block_c,
    }
    check(compiled(join, writes, capability), capability, tmp_path)


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_the_layer_kernels_fit(capability: int, tmp_path: Path) -> None:
    """At LLaDA2-mini's sizes; the norm also at the widest model's, in all of its forms."""
    residual = residual_norm.ADD_NORM.compiled
    forms = (
        (2048, 8, True, True, 0),
        (2048, 0, True, True, 0),
        (4096, 8, True, True, 0),
        (2048, 8, False, False, 0),
        (2048, 0, True, True, 2),
        (4096, 0, True, True, 8),
    )
    for width, each, base, norms, ranks in forms:
        warps = 8 if width > 2048 else 4
        rows = {
            "x_ptr": "*bf16",
            "part_ptr": "*bf16",
            "ranks_ptr": "*i64",
            "y_ptr": "*fp32",
            "ids_ptr": "*i64",
            "gain_ptr": "*bf16",
            "sum_ptr": "*bf16",
            "out_ptr": "*bf16",
            "D": "i32",
            "E": "i32",
            "eps": "fp32!",
            "BASE": base,
            "ADDS": norms and not ranks,
            "RANKS": ranks,
            "NORMS": norms,
            "K": each,
            "BLOCK": width,
        }
        binary = compiled(residual, rows, capability, num_warps=warps)
        check(binary, capability, tmp_path)
        wide = re.findall(r"ld\.global[.\w]*\.v4", binary.asm["ptx"])
        assert len(wide) >= 2 + ranks, "x, the gain, and every rank's part, each in loads of 16 bytes"
    heads = heads_triton.HEADS.compiled
    pointers = {
        "qkv_ptr": "*bf16",
        "gain_ptr": "*bf16",
        "table_ptr": "*bf16",
        "positions_ptr": "*i64",
        "places_ptr": "*i64",
        "q_ptr": "*bf16",
        "k_ptr": "*bf16",
        "v_ptr": "*bf16",
        "eps": "fp32!",
    }
    for count, rotated, norms in ((16, 64, True), (28, 128, False)):
        sizes = {"H": count, "K": 4, "C": 128, "ROTATED": rotated, "NORMS": norms, "BLOCK": 128}
        check(compiled(heads, {**pointers, **sizes}, capability, num_warps=1), capability, tmp_path)
    swiglu = swiglu_triton.GATED.compiled
    gate = {"gate_up_ptr": "*bf16", "out_ptr": "*bf16", "F": "i32", "BLOCK": swiglu_triton._BLOCK}
    check(compiled(swiglu, gate, capability), capability, tmp_path)


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_the_routing_kernels_fit(capability: int, tmp_path: Path) -> None:
    """LLaDA2's grouped choice, SDAR-MoE's of 128 by softmax, and LLaDA2.2's for a block."""
    choice = router_triton.ROUTE.compiled
    pointers = {
        "logits_ptr": "*fp32",
        "bias_ptr": "*fp32",
        "live_ptr": "*i1",
        "kept_ptr": "*i8",
        "ids_ptr": "*i64",
        "weights_ptr": "*fp32",
        "scaling": "fp32!",
    }
    for experts, groups, kept, sigmoid, shared in ((256, 8, 4, True, 1), (128, 1, 1, False, 0), (256, 1, 1, True, 1)):
        rule = {
            "E": experts,
            "B": 32,
            "LIMITED": sigmoid and groups == 1,
            "SHARED": shared,
            "GROUPS": groups,
            "KEPT": kept,
            "K": 8,
            "SIGMOID": sigmoid,
            "NORMALIZES": True,
            "BIASED": sigmoid,
            "MASKED": True,
            "BLOCK_G": groups,
            "BLOCK_E": experts // groups,
            "BLOCK_K": 8 << shared,
        }
        check(compiled(choice, {**pointers, **rule}, capability, num_warps=1), capability, tmp_path)
    block = {"logits_ptr": "*fp32", "bias_ptr": "*fp32", "kept_ptr": "*i8"}
    block |= {"E": 256, "B": 32, "CAPACITY": 48, "SIGMOID": True, "BIASED": True, "BLOCK_E": 256}
    check(compiled(router_triton.KEEP_EXPERTS.compiled, block, capability, num_warps=1), capability, tmp_path)
    tiles = expert_tiles.TILES_KERNEL.compiled
    layout = {
        "ids_ptr": "*i64",
        "order_ptr": "*i64",
        "expert_ptr": "*i32",
        "first_ptr": "*i32",
        "end_ptr": "*i32",
        "A": "i32!",
        "E": "i32",
        "N": "i32!",
        "placing": "i32!",
        "TILE": "i32",
        "BLOCK": expert_tiles._PLACED,
        "CHUNK": expert_tiles._CHUNK,
    }
    for block in (256, 512):  # 256 experts, and one more
        check(compiled(tiles, {**layout, "BLOCK_E": block}, capability, num_warps=8), capability, tmp_path)
