"""The configuration of a decoder stack, in the same terms for every model family."""

from dataclasses import dataclass, replace
from typing import Literal

from mbd_core.models.rope_scaling import ProportionalRotation, RopeScaling, YarnScaling

NO_MASK = -1
"""The `mask_token_id` of a model that has no mask token."""

# The weights that are FP8: `mbd_core/models/quantize.py`.
Fp8Parts = Literal["experts", "all", "blocks"]


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """The mixture-of-experts layers of a stack: their places, their widths, and the routing of tokens.

    `intermediate_size` is one expert's width. The shared experts are one SwiGLU of `num_shared_experts` times that
    width.

    Routing: the function `score` gives the scores. With `num_groups` > 1 only experts of the best `topk_groups` groups
    can be chosen; a group's score sums its two best scores. Weights are normalised if `norm_topk_prob` and scaled by
    `routed_scaling`. `expert_bias` adds a learned float32 offset to the choice, never to the weights. With an
    `expert_capacity` there are no groups: the tokens of a block choose among the block's `expert_capacity` best
    experts, and an expert's rank is its best value in the block.

    Every `sparse_step`-th layer has experts, except the first `first_dense_layers` and the layers in `dense_layers`.
    """

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    score: Literal["softmax", "sigmoid"]
    norm_topk_prob: bool
    num_shared_experts: int = 0
    expert_bias: bool = False
    num_groups: int = 1
    topk_groups: int = 1
    routed_scaling: float = 1.0
    first_dense_layers: int = 0
    sparse_step: int = 1
    dense_layers: tuple[int, ...] = ()
    expert_capacity: int = 0

    def __post_init__(self) -> None:
        if self.expert_capacity and not self.experts_per_token <= self.expert_capacity <= self.num_experts:
            raise ValueError(
                f"expert_capacity={self.expert_capacity} must be 0 or lie in num_experts_per_tok="
                f"{self.experts_per_token}..num_experts={self.num_experts}"
            )
        if self.num_groups < 1 or self.num_experts % self.num_groups:
            raise ValueError(f"num_experts={self.num_experts} does not divide into n_group={self.num_groups} groups")
        if not 1 <= self.topk_groups <= self.num_groups:
            raise ValueError(f"topk_group={self.topk_groups} must lie in 1..n_group={self.num_groups}")
        reachable = self.expert_capacity or self.num_experts // self.num_groups * self.topk_groups
        if not 1 <= self.experts_per_token <= reachable:
            raise ValueError(f"num_experts_per_tok={self.experts_per_token} must lie in 1..{reachable}")
        if self.num_groups > 1 and self.num_experts // self.num_groups < 2:
            raise ValueError(f"n_group={self.num_groups} leaves fewer than 2 of {self.num_experts} experts a group")
        if self.sparse_step < 1:
            raise ValueError(f"decoder_sparse_step={self.sparse_step} must be at least 1")

    @property
    def shared_size(self) -> int:
        """Width of the shared experts together."""
        return self.num_shared_experts * self.intermediate_size

    def is_sparse(self, layer: int) -> bool:
        """Whether layer number `layer` has experts."""
        may_be_sparse = layer >= self.first_dense_layers and layer not in self.dense_layers
        return may_be_sparse and (layer + 1) % self.sparse_step == 0


@dataclass(frozen=True, kw_only=True)
class GemmaLayers:
    """Gemma's layers: dense MLP and experts side by side, norms before and after each part (`models/gemma.py`).

    A layer attends in a sliding window: a token sees the last `window` of the keys up to its own. Layers in
    `global_layers` see all keys. In these layers heads have another size, the share `global_rotated` of a head's
    channels rotates, and values are the keys before norm and rotation. Logits l become `softcap * tanh(l / softcap)`.
    """

    window: int
    global_layers: tuple[int, ...]
    global_kv_heads: int
    global_head_dim: int
    global_rope_theta: float
    global_rotated: float
    softcap: float

    def __post_init__(self) -> None:
        if self.global_head_dim % 2:
            raise ValueError(f"global_head_dim={self.global_head_dim} must be even")
        ProportionalRotation(share=self.global_rotated)


WHOLE_NUMBERS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "max_positions",
    "mask_token_id",
    "block_size",
)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes and switches of a decoder stack, its mask and EOS ids, and its diffusion block size. Defaults are SDAR's.

    architecture     the Hugging Face class name in the checkpoint
    block_size       the diffusion block of training, or the canvas; only a default for decoding if attention is "full"
    mask_token_id    -1 for a model that has no mask
    rotary_dim       the number of a head's leading channels that rotate (None: all)
    rope_scaling     the scaling of the rotary frequencies
    attention        what a token sees when its keys are stored: its own and earlier blocks ("block_causal"), all
                     positions ("full"), or itself and earlier tokens ("causal")
    shift_logits     whether the logits at a position predict the next position's token
    delete_token_id, split_token_id
                     the tokens by which a model edits (`Levenshtein`), both or neither
    ar_mode          whether a block-causal model can also decode token by token, with causal attention
    gemma            Gemma's layers; the heads and the rotation above then belong to layers with a window (`of_layer`)

    Raises ValueError if sizes contradict each other.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    rms_norm_eps: float
    max_positions: int
    tie_word_embeddings: bool
    mask_token_id: int
    eos_token_ids: tuple[int, ...]
    block_size: int
    qk_norm: bool = True
    qkv_bias: bool = False
    rotary_dim: int | None = None
    rope_scaling: RopeScaling | None = None
    shift_logits: bool = False
    attention: Literal["block_causal", "full", "causal"] = "block_causal"
    moe: MoEConfig | None = None
    delete_token_id: int | None = None
    split_token_id: int | None = None
    ar_mode: bool = False
    gemma: GemmaLayers | None = None

    def __post_init__(self) -> None:
        for name in WHOLE_NUMBERS:
            value, least = getattr(self, name), NO_MASK if name == "mask_token_id" else 1
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name}={value!r} must be a whole number of at least {least}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_attention_heads={self.num_heads} is not a multiple of num_key_value_heads={self.num_kv_heads}"
            )
        edits = {"delete_token_id": self.delete_token_id, "split_token_id": self.split_token_id}
        edit_ids = [(name, token) for name, token in edits.items() if token is not None]
        if len(edit_ids) == 1:
            raise ValueError(
                f"{edit_ids[0][0]}={edit_ids[0][1]} stands alone; give delete_token_id and split_token_id, or none"
            )
        eos = [("eos_token_id", token) for token in self.eos_token_ids]
        mask = [("mask_token_id", self.mask_token_id)] if self.has_mask else []
        if len({token for _, token in (*mask, *edit_ids)}) < len(mask) + len(edit_ids):
            raise ValueError(f"mask_token_id={self.mask_token_id}, {edits} must be different tokens")
        for name, token in (*mask, *eos, *edit_ids):
            if not 0 <= token < self.vocab_size:
                raise ValueError(f"{name}={token} lies outside the vocabulary of {self.vocab_size} tokens")
        if not self.eos_token_ids:
            raise ValueError("eos_token_id is an empty list; give at least one id")
        if self.mask_token_id in self.eos_token_ids:
            raise ValueError(f"mask_token_id={self.mask_token_id} is also an EOS id; they must differ")
        rotary_dim = self.num_rotated
        if rotary_dim % 2 or not 2 <= rotary_dim <= self.head_dim:
            raise ValueError(f"rotary_dim={rotary_dim} must be even and at most head_dim={self.head_dim}")
        if isinstance(self.rope_scaling, YarnScaling) and self.rope_theta <= 1:
            raise ValueError(f"rope_theta={self.rope_theta} must exceed 1 for YaRN")
        if self.ar_mode and self.attention != "block_causal":
            raise ValueError(
                f"ar_mode is a mode of models that attend in blocks; this one's attention is {self.attention}"
            )
        self._check_gemma()

    def _check_gemma(self) -> None:
        gemma = self.gemma
        if gemma is None:
            return
        if self.moe is None:
            raise ValueError("Gemma's layers have experts; num_experts is missing")
        if self.num_heads % gemma.global_kv_heads:
            raise ValueError(
                f"num_attention_heads={self.num_heads} is not a multiple of "
                f"num_global_key_value_heads={gemma.global_kv_heads}"
            )
        if list(gemma.global_layers) != sorted(set(gemma.global_layers) & set(range(self.num_layers))):
            raise ValueError(f"global layers {gemma.global_layers} must be ascending and below {self.num_layers}")

    @property
    def prefix_methods(self) -> tuple[str, ...]:
        """The methods (names of `METHODS`) of a model that stores keys by causal rows; empty for other models."""
        if self.attention != "causal":
            return ()
        if self.gemma is not None:
            return ("renoise",)
        return ("ar", "linear-spec", "dlm") if self.has_mask else ("ar",)

    @property
    def ar_methods(self) -> tuple[str, ...]:
        """`prefix_methods`, or the methods of the autoregressive mode of a block-causal model."""
        if not self.ar_mode:
            return self.prefix_methods
        return ("ar",) if self.shift_logits else ("ar", "linear-spec")

    @property
    def has_mask(self) -> bool:
        """Whether the model has a mask token."""
        return self.mask_token_id != NO_MASK

    def of_layer(self, layer: int) -> "ModelConfig":
        """The configuration with the heads, the rotation and the window of layer number `layer`."""
        gemma = self.gemma
        if gemma is None or layer not in gemma.global_layers:
            return self
        return replace(
            self,
            num_kv_heads=gemma.global_kv_heads,
            head_dim=gemma.global_head_dim,
            rope_theta=gemma.global_rope_theta,
            rope_scaling=ProportionalRotation(share=gemma.global_rotated),
        )

    def window_of(self, layer: int) -> int | None:
        """The number of keys, its own included, that a token sees in layer number `layer`; `None`: all."""
        return None if self.gemma is None or layer in self.gemma.global_layers else self.gemma.window

    @property
    def edit_token_ids(self) -> tuple[int, int, int] | None:
        """The mask, delete and split tokens; `None` for a model without edits."""
        if self.delete_token_id is None or self.split_token_id is None:
            return None
        return self.mask_token_id, self.delete_token_id, self.split_token_id

    @property
    def num_rotated(self) -> int:
        """Channels of a head that rotate."""
        return self.head_dim if self.rotary_dim is None else self.rotary_dim

    def is_sparse(self, layer: int) -> bool:
        """Whether layer number `layer` has experts, instead of one SwiGLU or, in Gemma's, beside a dense MLP."""
        return self.moe is not None and self.moe.is_sparse(layer)

    @property
    def num_parameters(self) -> int:
        """The number of parameters. Tied embeddings count once; `expert_bias` is a buffer and does not count."""
        if self.gemma is not None:
            return self._gemma_parameters(self.gemma)
        d, c = self.hidden_size, self.head_dim
        attention = d * c * (2 * self.num_heads + 2 * self.num_kv_heads) + 2 * d
        attention += 2 * c if self.qk_norm else 0
        attention += c * (self.num_heads + 2 * self.num_kv_heads) if self.qkv_bias else 0
        dense = 3 * d * self.intermediate_size
        moe = self.moe
        sparse = 0 if moe is None else d * moe.num_experts
        sparse += 0 if moe is None else 3 * d * (moe.num_experts * moe.intermediate_size + moe.shared_size)
        layers = sum(attention + (sparse if self.is_sparse(i) else dense) for i in range(self.num_layers))
        return self.vocab_size * d * (1 if self.tie_word_embeddings else 2) + layers + d

    def _gemma_parameters(self, gemma: GemmaLayers) -> int:
        """Counts the self-conditioning's MLP and norm too."""
        assert self.moe is not None
        d, moe = self.hidden_size, self.moe
        dense = 3 * d * self.intermediate_size
        experts = moe.num_experts * (3 * d * moe.intermediate_size + d + 1) + d
        total = 0
        for layer in range(self.num_layers):
            heads, values = self.of_layer(layer), layer not in gemma.global_layers
            c = heads.head_dim
            total += d * c * (2 * self.num_heads + (1 + values) * heads.num_kv_heads) + 2 * c
            total += dense + experts + 7 * d + 2
        return total + self.vocab_size * d + d + dense + d

    def sharded(self, size: int) -> "ModelConfig":
        """The sizes of one of `size` tensor-parallel ranks: fewer heads, narrower MLPs and experts, the rest
        unchanged.

        `vocab_size` is unchanged too, although a rank has a part of its rows (`Decoder.vocabulary`). Raises
        `ValueError` naming the size that does not divide.
        """
        moe = self.moe
        sizes = {
            "num_key_value_heads": self.num_kv_heads,
            "intermediate_size": self.intermediate_size,
            **({"moe_intermediate_size": moe.intermediate_size} if moe is not None else {}),
            **({"num_global_key_value_heads": self.gemma.global_kv_heads} if self.gemma is not None else {}),
        }
        for name, value in sizes.items():
            if value % size:
                raise ValueError(f"{name}={value} does not divide among {size} tensor-parallel ranks")
        return replace(
            self,
            num_heads=self.num_heads // size,
            num_kv_heads=self.num_kv_heads // size,
            intermediate_size=self.intermediate_size // size,
            moe=None if moe is None else replace(moe, intermediate_size=moe.intermediate_size // size),
            gemma=self.gemma and replace(self.gemma, global_kv_heads=self.gemma.global_kv_heads // size),
        )
