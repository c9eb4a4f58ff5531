"""The papers' recipes as constants: MBD-LMs' Tables 5 and 2b, DMax's and D2F's, for a user's base and data.

Where the paper leaves a number out, the released configurations give it: margin 0.01, AdamW with weight decay on
everything, cosine to 1e-7 after 3 % warmup, global batch 32, float32 weights. Where paper and released code differ,
the paper's rule is taken, and each recipe's `source` names the rule of the released code.
"""

from dataclasses import replace
from typing import Any

from mbd_core.decoding.blocks.methods import D2F_TABLE_8, TABLE_4
from mbd_core.multitf.config import LoraSettings, TrainConfig
from mbd_core.multitf.recipes.recipe import TrainingRecipe
from mbd_core.multitf.states.layout import StateConfig
from mbd_core.multitf.states.noise import NoiseBounds

SEQUENCE = 2048
WARMUP = 0.03
LLADA2, SDAR = ("LLaDA2MoeModelLM",), ("SDARForCausalLM", "SDARMoeForCausalLM")


def _training(steps: int, *, lr: float, weight_decay: float, batch_size: int = 32) -> TrainConfig:
    """The optimisation that all released configurations of MultiTF share."""
    return TrainConfig(
        steps=steps,
        batch_size=batch_size,
        lr=lr,
        lr_min=1e-7,
        warmup=round(WARMUP * steps),
        schedule="cosine",
        optimizer="adamw",
        betas=(0.9, 0.999),
        weight_decay=weight_decay,
        micro_batch=1,
        activation_checkpointing=True,
        seed=42,
    )


def _decoding(row: str, task: str) -> dict[str, Any]:
    """Table 4's MBD row."""
    return {**TABLE_4[row]["math" if task == "math" else "code"]["multi"], "trained_with": "multitf"}


def _recipe(name: str, row: str, task: str, states: StateConfig, train: TrainConfig, **fields: Any) -> TrainingRecipe:
    return TrainingRecipe(
        name=name,
        base=None,
        model=None,
        data=None,
        states=states,
        train=train,
        max_length=SEQUENCE,
        generation=_decoding(row, task),
        **fields,
    )


# LLaDA2-Mini (Table 5: MultiTF CE)
LLADA2_STATES = StateConfig(block_size=32, max_group=2)
LLADA2_MATH = _recipe(
    "LLaDA2-Mini",
    "LLaDA2-Mini",
    "math",
    LLADA2_STATES,
    _training(15000, lr=1e-5, weight_decay=0.1),
    architectures=LLADA2,
    source="MBD-LMs Table 5, MBD-LLaDA2-Mini Math; released llada2 multi_tf math b32",
)
LLADA2_CODE = replace(
    LLADA2_MATH,
    name="LLaDA2-Mini-code",
    train=_training(6500, lr=1e-5, weight_decay=0.1),
    generation=_decoding("LLaDA2-Mini", "code"),
    source="MBD-LMs Table 5, MBD-LLaDA2-Mini Code; the released run's schedule has 7500 steps",
)

# LLaDA2-Mini-DMax (Table 5: MultiTF + DMax OPUT, Alg. 2)
DMAX_STATES = replace(LLADA2_STATES, labels="answer", self_denoising="both")
DMAX_MATH = _recipe(
    "LLaDA2-Mini-DMax",
    "LLaDA2-Mini-DMax",
    "math",
    DMAX_STATES,
    _training(15000, lr=2e-6, weight_decay=0.01),
    architectures=LLADA2,
    trailing_fill=32,
    source=(
        "MBD-LMs Table 5, MBD-LLaDA2-Mini-DMax Math; labels and fill as released; chain-uniform as in the paper, not "
        "the ranges of the released configuration (LLaDA2-Mini-DMax-ranges)"
    ),
)
DMAX_CODE = replace(
    DMAX_MATH,
    name="LLaDA2-Mini-DMax-code",
    states=replace(DMAX_STATES, num_random=2),
    train=_training(4000, lr=2e-6, weight_decay=0.01),
    generation=_decoding("LLaDA2-Mini-DMax", "code"),
    source="MBD-LMs Table 5, MBD-LLaDA2-Mini-DMax Code; the released run's schedule has 15000 steps",
)
DMAX_RANGES = replace(
    DMAX_MATH,
    name="LLaDA2-Mini-DMax-ranges",
    states=replace(
        DMAX_STATES,
        span="response",
        schedule="slot_ranges",
        bounds=NoiseBounds(slots=((0.001, 0.20), (0.80, 1.0))),
        self_denoising="half",
    ),
    source=(
        "released llada2 oput math b32: explicit ranges for the two slots, one branch a layout; the ranges begin at "
        "the response, which the released code misses"
    ),
)

# SDAR-8B-Chat (Table 5: MultiTF CE in SDAR's form, Eq. B.13)
SDAR_B32_STATES = StateConfig(block_size=32, max_group=4, num_random=3, weighting="block_ratio")
SDAR_B32_MATH = _recipe(
    "SDAR-8B-b32",
    "SDAR-8B-Chat-b32",
    "math",
    SDAR_B32_STATES,
    _training(3125, lr=1e-5, weight_decay=0.1),
    architectures=SDAR,
    source="MBD-LMs Table 5, MBD-SDAR-8B-Chat-b32 Math; Eq. B.13 (SDAR-8B-b32-released has the released loss)",
)
SDAR_B32_CODE = replace(
    SDAR_B32_MATH,
    name="SDAR-8B-b32-code",
    train=_training(1670, lr=1e-5, weight_decay=0.1),
    generation=_decoding("SDAR-8B-Chat-b32", "code"),
    source="MBD-LMs Table 5, MBD-SDAR-8B-Chat-b32 Code",
)
SDAR_B32_RELEASED = replace(
    SDAR_B32_MATH,
    name="SDAR-8B-b32-released",
    states=replace(SDAR_B32_STATES, weighting="self_normalised", random_sizes="released"),
    source="released sdar math b32: self-normalised loss, repaired and shuffled random layouts; the paper's mask",
)
SDAR_B4_MATH = replace(
    SDAR_B32_MATH,
    name="SDAR-8B-b4",
    states=replace(SDAR_B32_STATES, block_size=4, num_random=2),
    train=_training(1250, lr=1e-5, weight_decay=0.1),
    generation=_decoding("SDAR-8B-Chat-b4", "math"),
    source="MBD-LMs Table 5, MBD-SDAR-8B-Chat-b4 Math",
)
SDAR_B4_CODE = replace(
    SDAR_B4_MATH,
    name="SDAR-8B-b4-code",
    train=_training(200, lr=1e-5, weight_decay=0.1),
    generation=_decoding("SDAR-8B-Chat-b4", "code"),
    source="MBD-LMs Table 5, MBD-SDAR-8B-Chat-b4 Code; the released run's schedule has about 668 steps",
)


# Table 2b: each changes one thing in LLaDA2-Mini-DMax-code, the row with systematic and random layouts
def _ablation(suffix: str, subject: str, **changes: Any) -> TrainingRecipe:
    return replace(
        DMAX_CODE,
        name=f"LLaDA2-Mini-DMax-{suffix}",
        states=replace(DMAX_CODE.states, **changes),
        source=f"MBD-LMs Table 2b, {subject}",
    )


ABLATIONS = (
    _ablation("systematic-layouts", "systematic layouts alone", num_random=0),
    _ablation("random-layouts", "random layouts alone", layouts="random"),
    _ablation(
        "d2f-noise",
        "D2F-style monotonic scheduler, as the released mode of that name: a linear ramp over one noise-group",
        layouts="one_group",
        max_group=1,
        num_random=0,
        schedule="linear",
    ),
    _ablation("random-noise", "random scheduler, power law of 2", schedule="power_law"),
    _ablation("sorted-noise", "sorted-uniform scheduler", schedule="sorted_uniform"),
)

# DMax itself (czg1225/DMax, llada2_mini_bd_oput): teacher forcing at one mask ratio
DMAX_BASE = TrainingRecipe(
    name="DMax",
    base=None,
    model=None,
    data=None,
    states=StateConfig(
        block_size=32,
        schedule="slot_ranges",
        bounds=NoiseBounds(slots=((0.75, 0.75),)),
        rounding="bernoulli",
        labels="answer",
        self_denoising="half",
    ),
    train=replace(_training(15000, lr=2e-6, weight_decay=0.01, batch_size=8), lr_min=0.0),
    max_length=SEQUENCE,
    generation={**TABLE_4["LLaDA2-Mini-DMax"]["math"]["single"], "trained_with": "dmax_oput"},
    trailing_fill=32,
    architectures=LLADA2,
    source="DMax's released configuration of LLaDA2.0-mini; its two epochs depend on the data: set --steps",
)

# D2F: asymmetric distillation (Eq. 3), native and fully block-causal (MBD-LMs App. C.5)
D2F_TRAINING = TrainConfig(
    steps=50_000,
    batch_size=40,
    lr=1e-5,
    warmup=1,
    schedule="constant",
    optimizer="adamw",
    betas=(0.9, 0.95),
    weight_decay=0.05,
    micro_batch=1,
    activation_checkpointing=True,
    distillation="student_teacher",
    lora=LoraSettings(rank=32, alpha=32, dropout=0.1),
)
D2F_LLADA = TrainingRecipe(
    name="D2F-LLaDA",
    base=None,
    model=None,
    data=None,
    states=StateConfig(
        block_size=16,
        layouts="d2f",
        schedule="d2f_monotonic",
        bounds=NoiseBounds(t_low=0.2, t_high=0.7, margin=0.0),
        rounding="bernoulli",
        weighting="ratio_mean",
    ),
    train=D2F_TRAINING,
    max_length=1024,
    generation={**D2F_TABLE_8["LLaDA/gsm8k"], "trained_with": "d2f"},
    architectures=("LLaDAModelLM",),
    source="D2F Eq. 3; its released configuration: 8 processes with 5 accumulated samples, weights 1/t",
)
D2F_DREAM = replace(
    D2F_LLADA,
    name="D2F-Dream",
    generation={**D2F_TABLE_8["Dream/gsm8k"], "trained_with": "d2f"},
    architectures=("DreamModel",),
    source="D2F Eq. 3 with the paper's learning rate (the released Dream configuration has 5e-6); shifted logits",
)
D2F_RELEASED = replace(
    D2F_LLADA,
    name="D2F-LLaDA-released",
    train=replace(D2F_TRAINING, distillation="teacher_student"),
    source="D2F's released code: KL(teacher || student), the other direction than Eq. 3's",
)
D2F_BLOCK_CAUSAL = replace(
    D2F_LLADA,
    name="D2F-LLaDA-block-causal",
    states=StateConfig(block_size=16, layouts="one_group", span="response", schedule="linear"),
    train=replace(D2F_TRAINING, distillation=None),
    generation={**D2F_TABLE_8["LLaDA/gsm8k"], "prompt_attention": "block_causal", "trained_with": "d2f_block_causal"},
    source="MBD-LMs App. C.5: one noise-group over all suffix blocks after a block-causal clean prefix",
)

PAPER_RECIPES = (
    LLADA2_MATH,
    LLADA2_CODE,
    DMAX_MATH,
    DMAX_CODE,
    DMAX_RANGES,
    SDAR_B32_MATH,
    SDAR_B32_CODE,
    SDAR_B32_RELEASED,
    SDAR_B4_MATH,
    SDAR_B4_CODE,
    *ABLATIONS,
    DMAX_BASE,
    D2F_LLADA,
    D2F_DREAM,
    D2F_RELEASED,
    D2F_BLOCK_CAUSAL,
)
