"""Recipes that train an autoregressive (AR) base further: to block diffusion by several papers' objectives, or as AR.

The bases of block-diffusion recipes are folders that `mbd convert --to block-diffusion` wrote, of any family. The
objectives are the papers'. The optimisation is the same in all, so that arms of a study differ in their training
states alone.
"""

from dataclasses import replace
from typing import Any

from mbd_core.multitf.config import TrainConfig
from mbd_core.multitf.recipes.recipe import TrainingRecipe
from mbd_core.multitf.states.layout import StateConfig
from mbd_core.multitf.states.noise import NoiseBounds

TRAINING = TrainConfig(
    steps=1000,
    batch_size=32,
    lr=2e-5,
    lr_min=1e-7,
    warmup=30,
    schedule="cosine",
    optimizer="adamw",
    betas=(0.9, 0.999),
    weight_decay=0.01,
    micro_batch=1,
)

AR = TrainingRecipe(
    name="ar",
    base=None,
    model=None,
    data=None,
    states=StateConfig(block_size=1, layouts="none", weighting="ratio_mean", ar_weight=1.0),
    train=TRAINING,
    max_length=2048,
    generation={},
    source="plain fine-tuning: the mean CE of the next token over all labels of a batch, as in transformers",
)

UP_TO_ALL = NoiseBounds(t_low=0.001, t_high=1.0, margin=0.0)
"""Mask ratios of all objectives: uniform, and never 0."""
TEACHER_FORCING: dict[str, Any] = {"span": "response", "rounding": "bernoulli", "bounds": UP_TO_ALL}

A2D = replace(
    AR,
    name="a2d",
    states=StateConfig(block_size=32, schedule="sample_uniform", weighting="nelbo", **TEACHER_FORCING),
    generation={"buffer_size": 1, "trained_with": "teacher_forcing"},
    source="BD3LM (arXiv 2503.09573) as dllm's A2D trains it: one ratio t a sample, CE / t over the answer's tokens",
)
A2D_AR = replace(
    A2D,
    name="a2d-ar",
    states=replace(A2D.states, ar_weight=1.0),
    source="a2d with the AR loss beside it (TiDAR, arXiv 2511.08923; Nemotron's released ar_loss_weight is 1)",
)
SDAR = replace(
    A2D,
    name="sdar",
    states=StateConfig(block_size=32, schedule="independent_uniform", weighting="block_ratio", **TEACHER_FORCING),
    source="SDAR (arXiv 2510.06303): a ratio for each block, Eq. B.13 of MBD-LMs",
)
FAST_DLLM_V2 = replace(
    A2D,
    name="fast-dllm-v2",
    states=StateConfig(
        block_size=32,
        schedule="independent_uniform",
        weighting="label_mean",
        complementary=True,
        **TEACHER_FORCING,
    ),
    generation={},
    source=(
        "Fast-dLLM v2 (arXiv 2509.26328): complementary masks, the mean CE of all labels; of a base with shifted "
        "logits a block's first token is predicted by the clean token before it, as in decoding; the released code "
        "takes the noisy one"
    ),
)
LLADA2_WSD = replace(
    A2D,
    name="llada2-wsd",
    states=replace(
        A2D.states,
        block_warmup=((0.05, 1), (0.1, 4), (0.15, 32), (0.2, 64), (0.8, 4096), (0.85, 2048), (0.9, 256)),
    ),
    source=(
        "LLaDA2.0 (arXiv 2512.15745): blocks warm up from 1 over 4, 32 and 64 to whole samples, and decay to 32; the "
        "shares of the updates are this project's"
    ),
)
EFFICIENT_DLM = replace(
    A2D,
    name="efficient-dlm",
    states=StateConfig(
        block_size=16,
        schedule="independent_uniform",
        weighting="nelbo",
        half_life_ratio=0.25,
        **{**TEACHER_FORCING, "rounding": "nearest"},
    ),
    source=(
        "Efficient-DLM (arXiv 2512.14067): later positions are masked more often at low ratios, no shift, a middle "
        "block size; half-life and rounding as in NVIDIA's NeMo AutoModel"
    ),
)

NEMOTRON = replace(
    A2D,
    name="nemotron",
    states=StateConfig(
        block_size=32,
        schedule="independent_uniform",
        weighting="label_mean",
        clean="causal",
        ar_weight=1.0,
        **TEACHER_FORCING,
    ),
    generation={},
    source=(
        "Nemotron-Labs-Diffusion and TiDAR (arXiv 2511.08923): blocks without order after a causal clean stream, "
        "whose next tokens are learned beside them; the released ar_loss_weight is 1"
    ),
)

ADAPTATION_RECIPES = (AR, A2D, A2D_AR, SDAR, FAST_DLLM_V2, LLADA2_WSD, EFFICIENT_DLM, NEMOTRON)
