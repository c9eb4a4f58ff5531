"""The cases of the decoder benchmark: models, their prompts, and the methods that fit each model.

A method is an entry of `decoding.methods.METHODS` with a few changed fields: thresholds near the papers' at which
small models accept several tokens a step.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from mbd_core.checkpoint.chat import chat_prompts, question
from mbd_core.checkpoint.loading import load_model
from mbd_core.checkpoint.shipped import model_folder
from mbd_core.checkpoint.tokenizer import load_tokenizer
from mbd_core.decoding.blocks.config import DecodingConfig, decoding_config
from mbd_core.decoding.blocks.methods import METHODS, merge_fields
from mbd_core.models.decoder import Decoder
from mbd_core.models.model_config import ModelConfig
from mbd_core.models.shapes import SHAPES, random_model
from mbd_core.tasks import gsm_mini

SHIPPED_MODELS = ("tiny-bd", "tiny-mbd")
FAMILIES = ("sdar", "llada2", "llada", "dream")
BLOCK_SIZE = 8  # of the families' models, which have random weights
CANVAS_BLOCK_LENGTH = 16
BRANCH_LENGTHS = (4, 8, 16, 32)


@dataclass(frozen=True, kw_only=True)
class MethodCase:
    """A decoder: its name in `METHODS`, its label in the table, its config; `static`: run with `static_shapes`."""

    name: str
    label: str
    decoding: DecodingConfig
    static: bool = False


@dataclass(frozen=True, kw_only=True)
class ModelCase:
    """A model, its prompts, and the methods to decode them with."""

    label: str
    model: Decoder
    prompts: list[tuple[int, ...]]
    methods: list[MethodCase] = field(default_factory=list)


def block_methods(block_size: int) -> list[MethodCase]:
    """The methods for block-causal models."""

    def case(name: str, label: str, *, static: bool = False, **fields: Any) -> MethodCase:
        return _method_case(name, label, {"tau_m2t": 0.9, **fields}, block_size=block_size, static=static)

    return [
        case("single", "SingleBD"),
        case("multi-bd", "MultiBD, dynamic (Alg. 4)"),
        case("multi-bd", "MultiBD, Block Buffer (Alg. 5)", static=True),
        case("t2t", "T2T, single", t2t={"tau": 0.9}),
        case("multi-bd-t2t", "T2T, multi", buffer_size=4, t2t={"tau": 0.9}),
        case("dmax", "DMax, single", buffer_size=2, tau_add=1.0),
        case("multi-bd-dmax", "DMax, multi", buffer_size=4, tau_stable=None),
    ]


def canvas_methods(max_tokens: int, *, shifted: bool) -> list[MethodCase]:
    """The methods for full-attention models: Dream's if `shifted`, otherwise LLaDA's."""
    block_size = CANVAS_BLOCK_LENGTH // 2

    def canvas(name: str, label: str, **fields: Any) -> MethodCase:
        return _method_case(name, label, {"canvas": fields}, block_size=block_size)

    def in_blocks(name: str, label: str, **fields: Any) -> MethodCase:
        return canvas(name, label, block_length=CANVAS_BLOCK_LENGTH, **fields)

    def pipelined(name: str, label: str, **fields: Any) -> MethodCase:
        return _method_case(name, label, fields, block_size=block_size)

    lengths = [length for length in BRANCH_LENGTHS if length <= max_tokens]
    if shifted:
        vanilla = canvas("dream-entropy", "vanilla Dream (entropy)", steps=max_tokens)
    else:
        vanilla = in_blocks("llada", "vanilla LLaDA", steps=max_tokens)
    return [
        vanilla,
        in_blocks("fast-dllm", "Fast-dLLM, no cache"),
        in_blocks("fast-dllm-prefix", "Fast-dLLM, prefix cache"),
        in_blocks("fast-dllm-dual", "Fast-dLLM, dual cache"),
        in_blocks("fast-dllm-factor", "Fast-dLLM, factor, dual cache"),
        in_blocks("dllm-cache", "dLLM-Cache"),
        in_blocks("local-leap", "LocalLeap"),
        canvas("block-batch", "BlockBatch", branches={"block_lengths": lengths}),
        pipelined("d2f", "D2F, pipelined", buffer_size=4),
        pipelined("d2f-cache-only", "D2F, cache only"),
        pipelined("d2f-block-causal", "D2F, block-causal prompt", buffer_size=4),
    ]


def _method_case(
    name: str, label: str, fields: Mapping[str, Any], *, block_size: int, static: bool = False
) -> MethodCase:
    decoding = decoding_config({}, merge_fields(METHODS[name], fields), block_size=block_size)
    return MethodCase(name=name, label=label, decoding=decoding, static=static)


def model_cases(fixtures: Path | None, *, num_requests: int, max_tokens: int) -> list[ModelCase]:
    """The shipped models, and one of each family from `fixtures` or with random weights.

    Raises `ValueError` for a fixtures folder without a checkpoint.
    """
    folders = (
        {} if fixtures is None else {p.parent.name: p.parent for p in sorted(fixtures.glob("*/model.safetensors"))}
    )
    if fixtures is not None and not folders:
        raise ValueError(f"--fixtures {fixtures} holds no folder with a model.safetensors")
    shipped = [_shipped_case(name, num_requests) for name in SHIPPED_MODELS]
    return shipped + [_family_case(family, folders, num_requests, max_tokens) for family in FAMILIES]


def _shipped_case(name: str, num_requests: int) -> ModelCase:
    folder = model_folder(name)
    model = load_model(folder, dtype=torch.float32)
    tokenizer = load_tokenizer(folder, model.config)
    problems = itertools.islice(gsm_mini.generate(split="test", seed=0), num_requests)
    prompts = chat_prompts(tokenizer, [question(problem["question"]) for problem in problems])
    methods = block_methods(model.config.block_size)
    if name == "tiny-bd":  # it was not trained on several noisy blocks
        methods = methods[:1]
    return ModelCase(label=name, model=model, prompts=[tuple(ids) for ids in prompts], methods=methods)


def _family_case(family: str, folders: Mapping[str, Path], num_requests: int, max_tokens: int) -> ModelCase:
    name = next((name for name in folders if name.rsplit("-", 1)[0] == family), None)
    model = _random_model(family) if name is None else load_model(folders[name], dtype=torch.float32)
    model.config = config = replace(model.config, block_size=BLOCK_SIZE)
    if config.attention == "full":
        methods = canvas_methods(max_tokens, shifted=config.shift_logits)
    else:
        methods = block_methods(config.block_size)
    prompts = _random_prompts(config, num_requests)
    return ModelCase(label=name or f"{family} (random)", model=model, prompts=prompts, methods=methods)


def _random_prompts(config: ModelConfig, count: int) -> list[tuple[int, ...]]:
    """Prompts of 13 to 28 ordinary tokens."""
    generator = torch.Generator().manual_seed(0)
    special = min(config.mask_token_id, *config.eos_token_ids)
    return [
        tuple(torch.randint(special, (13 + 5 * (number % 4),), generator=generator).tolist())
        for number in range(count)
    ]


def _random_model(family: str) -> Decoder:
    """Random weights, scaled so that confidences lie on both sides of the thresholds."""
    model = random_model(SHAPES[f"tiny-{family}"], device=torch.device("cpu"), dtype=torch.float32, std=0.2)
    model.lm_head.weight.mul_(3.0)
    return model
