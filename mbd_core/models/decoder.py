"""The decoder stack of every family: pre-norm, GQA with RoPE, SwiGLU or experts. `ModelConfig` holds the differences.
Gemma's layers are in `gemma.py`.

The stack knows no mask, no cache and no decoding method: attention is a callable given to `forward`. Modules have
Qwen3's (SDAR's) names; `checkpoint.families` maps other families' names.

Shape legend: ... any leading shape (`B L` in training, `T` packed in the engine), D hidden, H query heads, K key/value
heads, C head channels, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mbd_core.models.gemma import Denoising, GemmaLayer, GemmaNorm, SelfConditioning
from mbd_core.models.layer_parts import Attend, Reduce, RMSNorm, join, pieces, together
from mbd_core.models.lora import Adapt, TokenAdapters, adapted
from mbd_core.models.mlp import MoE, Router, SwiGLU
from mbd_core.models.model_config import ModelConfig
from mbd_core.models.rope import Rope, rotary
from mbd_core.models.shard import Shard


class Attention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        d, c, bias = config.hidden_size, config.head_dim, config.qkv_bias
        self.q_proj = nn.Linear(d, config.num_heads * c, bias=bias)
        self.k_proj = nn.Linear(d, config.num_kv_heads * c, bias=bias)
        self.v_proj = nn.Linear(d, config.num_kv_heads * c, bias=bias)
        self.o_proj = nn.Linear(config.num_heads * c, d, bias=False)
        self.q_norm = RMSNorm(c, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(c, config.rms_norm_eps) if config.qk_norm else None

    def project(self, x: Tensor, rope: Rope | None, adapt: Adapt | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (..., H, C), keys and values (..., K, C) of `x` (..., D), normed, then rotated by a `rope`."""
        q, k, v = together((self.q_proj, self.k_proj, self.v_proj), x)
        q = adapted(q, adapt, "q_proj", x).unflatten(-1, (-1, self.head_dim))
        k = adapted(k, adapt, "k_proj", x).unflatten(-1, (-1, self.head_dim))
        v = adapted(v, adapt, "v_proj", x).unflatten(-1, (-1, self.head_dim))
        q = q if self.q_norm is None else self.q_norm(q)
        k = k if self.k_norm is None else self.k_norm(k)
        return (q, k, v) if rope is None else (rope.rotate_queries(q), rope.rotate(k), v)


class DecoderLayer(nn.Module):
    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        sparse = config.is_sparse(layer)
        self.mlp = MoE(config) if sparse else SwiGLU(config.hidden_size, config.intermediate_size)
        # in a mixture with a capacity a token's experts depend on its whole block
        self._needs_blocks = sparse and config.moe is not None and config.moe.expert_capacity > 0

    def forward(
        self,
        rows: list[Tensor],
        rope: Rope,
        attend: Attend,
        layer: int,
        split: Sequence[int] | None,
        reduce: Reduce | None,
        adapters: TokenAdapters | None = None,
        kept: Tensor | None = None,
        experts: Tensor | None = None,
    ) -> list[Tensor]:
        """The residual stream after this layer, in the same rows. Only `attend` and the rotation, which goes element
        by element, get all rows in one tensor.

        `experts` (..., K) replaces the router's choice for the tokens of a single row. `kept` (N) are flat indices
        into a single row's tokens: the result is (N, D), and the MLP runs only on these tokens, unless experts depend
        on whole blocks.
        """
        adapts = [None] * len(rows) if adapters is None else [a.of(layer) for a in adapters.split(split)]
        own_rope = rope if len(rows) == 1 else None
        parts = [
            self.self_attn.project(self.input_layernorm(x), own_rope, adapt)
            for x, adapt in zip(rows, adapts, strict=True)
        ]
        q, k, v = (join(part) for part in zip(*parts, strict=True))
        if own_rope is None:
            q, k = rope.rotate_queries(q), rope.rotate(k)
        attended = pieces(attend(layer, q, k, v), split)
        return [
            self._finish(x, out, reduce, adapt, kept, experts)
            for x, out, adapt in zip(rows, attended, adapts, strict=True)
        ]

    def _finish(
        self,
        x: Tensor,
        attended: Tensor,
        reduce: Reduce | None,
        adapt: Adapt | None,
        kept: Tensor | None,
        experts: Tensor | None,
    ) -> Tensor:
        heads = attended.flatten(-2)
        out = adapted(self.self_attn.o_proj(heads), adapt, "o_proj", heads)
        x = x + (out if reduce is None else reduce(out))
        if kept is not None and not self._needs_blocks:
            x, experts = x.flatten(0, -2)[kept], None if experts is None else experts.flatten(0, -2)[kept]
            kept = None
        given = () if experts is None else (experts,)
        out = self.mlp(self.post_attention_layernorm(x), adapt, *given)
        x = x + (out if reduce is None else reduce(out))
        return x if kept is None else x.flatten(0, -2)[kept]


class Stack(nn.Module):
    def __init__(self, config: ModelConfig, *, num_embeddings: int) -> None:
        super().__init__()
        # Zeros until weights are loaded or drawn: on the meta device torch imports for 2 s to draw its own.
        embeddings = torch.zeros(num_embeddings, config.hidden_size)
        self.embed_tokens = nn.Embedding.from_pretrained(embeddings, freeze=False)
        kind = DecoderLayer if config.gemma is None else GemmaLayer
        self.layers = nn.ModuleList(kind(config, layer) for layer in range(config.num_layers))
        self.norm = (RMSNorm if config.gemma is None else GemmaNorm)(config.hidden_size, config.rms_norm_eps)
        self.self_conditioning = None if config.gemma is None else SelfConditioning(config)


@dataclass(frozen=True, kw_only=True)
class Training:
    """What a training step needs of the forward of one row of tokens.

    `kept` (N): flat indices into `input_ids`; only their hidden states (N, D) are computed to the end. `experts` (...,
    M, K): each token's experts in the M layers that have experts; the routers weigh them and choose none.
    """

    kept: Tensor
    experts: Tensor | None = None


class Decoder(nn.Module):
    """A diffusion language model: token ids and positions in, hidden states out; `logits` is a separate call.

    With a `shard` of several ranks this is one rank's part. `config` then has that rank's sizes (`sharded`), as its
    cache needs them; `whole_config` has the model's. `vocabulary` is the rank's range of token ids. `reduce` must sum
    a tensor over the ranks. It is applied to embeddings, to the partial sums after o_proj and after the MLP, and to
    logits. Norms and router are whole on every rank.
    """

    def __init__(self, config: ModelConfig, *, shard: Shard | None = None, reduce: Reduce | None = None) -> None:
        super().__init__()
        self.shard = shard or Shard()
        self.reduce = reduce
        self.whole_config = config
        self.config = config = config.sharded(self.shard.size)
        self.vocabulary = self.shard.part(config.vocab_size)
        heads = [config.of_layer(layer) for layer in range(config.num_layers)]
        self._head_configs = list(dict.fromkeys(heads))
        self.rope_kinds = [self._head_configs.index(each) for each in heads]
        self.model = Stack(config, num_embeddings=len(self.vocabulary))
        self.lm_head = nn.Linear(config.hidden_size, len(self.vocabulary), bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        attend: Attend,
        *,
        soft_weight: Tensor | None = None,
        split: Sequence[int] | None = None,
        adapters: TokenAdapters | None = None,
        denoising: Denoising | None = None,
        training: Training | None = None,
    ) -> Tensor:
        """Final hidden states (..., D) of `input_ids` (...) at `positions` (...), or only of `training.kept` (N, D).

        `soft_weight` (...), float32 in [0, 1], mixes each token's embedding with the mask's (`embed`). `split` gives
        the lengths of the rows packed in `input_ids` (T). Each row is then computed in its own calls, so its numbers
        do not depend on the other rows, if `attend` also computes each row by itself. `denoising` marks the tokens
        that Gemma denoises; without it all tokens are context.
        """
        if soft_weight is None:
            rows = pieces(self.embed(input_ids), split)
        else:
            ids, weights = pieces(input_ids, split), pieces(soft_weight, split)
            rows = [self.embed(row, weight) for row, weight in zip(ids, weights, strict=True)]
        denoised = None if denoising is None else denoising.pieces(split)
        if denoised is not None:
            rows = [self.condition(row, part) for row, part in zip(rows, denoised, strict=True)]
        ropes = self.ropes(positions)
        assert training is None or (split is None and adapters is None and denoising is None), "training has one row"
        kept = None if training is None else training.kept
        experts = iter(() if training is None or training.experts is None else training.experts.unbind(-2))
        last = len(self.model.layers) - 1
        for index, layer in enumerate(self.model.layers):
            rope, own_kept = ropes[self.rope_kinds[index]], kept if index == last else None
            more: tuple[Any, ...] = () if self.config.gemma is None else (denoised,)
            if self.config.is_sparse(index) and (chosen := next(experts, None)) is not None:
                more = (chosen,)
            rows = layer(rows, rope, attend, index, split, self.reduce, adapters, own_kept, *more)
        return join([self.model.norm(row) for row in rows])

    def ropes(self, positions: Tensor) -> list[Rope]:
        """The rotations of `positions`, one for each kind of heads (`rope_kinds`)."""
        return [rotary(positions, config) for config in self._head_configs]

    def condition(self, embeddings: Tensor, denoising: Denoising) -> Tensor:
        """Embeddings (..., D); denoised tokens' embeddings are conditioned (`SelfConditioning`)."""
        assert self.model.self_conditioning is not None, f"{self.config.architecture} denoises no drawn tokens"
        conditioned: Tensor = self.model.self_conditioning(embeddings, denoising, self.reduce)
        return conditioned

    def expected_embedding(self, probabilities: Tensor) -> Tensor:
        """The mean (..., D) of the input embeddings under `probabilities` (..., V); ranks call it together."""
        table, own_ids = self.model.embed_tokens.weight, self.vocabulary
        mean = probabilities[..., own_ids.start : own_ids.stop].to(table.dtype) @ table
        return self._scaled(mean if self.reduce is None else self.reduce(mean))

    def embed(self, input_ids: Tensor, soft_weight: Tensor | None = None) -> Tensor:
        """Input embeddings (..., D); with weights w (...), DMax's soft embeddings, in float32 and cast back.

        `e = w E[t] + (1 - w) E[mask]`, rescaled to the norm `w |E[t]| + (1 - w) |E[mask]|`; w = 1 is exactly `E[t]`.
        """
        hard = self._hard(input_ids)
        if soft_weight is None:
            return hard
        token, mask, w = hard.float(), self._mask_embedding().float(), soft_weight[..., None].float()
        mixed = w * token + (1 - w) * mask
        norm = w * token.norm(dim=-1, keepdim=True) + (1 - w) * mask.norm()
        soft = mixed * (norm / (mixed.norm(dim=-1, keepdim=True) + 1e-6))
        return torch.where(w == 1, hard, soft.to(hard.dtype))

    def _hard(self, input_ids: Tensor) -> Tensor:
        """Rows of the embeddings (..., D). Each row lies on one rank."""
        table, own_ids = self.model.embed_tokens, self.vocabulary
        if self.reduce is None:
            return self._scaled(table(input_ids))
        is_own = (input_ids >= own_ids.start) & (input_ids < own_ids.stop)
        own = table((input_ids - own_ids.start) * is_own).masked_fill(~is_own[..., None], 0.0)
        return self._scaled(self.reduce(own))

    def _scaled(self, embeddings: Tensor) -> Tensor:
        """Gemma's embeddings are multiplied by D^1/2, rounded to their dtype."""
        if self.config.gemma is None:
            return embeddings
        return embeddings * torch.tensor(self.config.hidden_size**0.5, dtype=embeddings.dtype).item()

    def _mask_embedding(self) -> Tensor:
        """The embedding (D,) of the mask."""
        weights, mask = self.model.embed_tokens.weight, self.config.mask_token_id
        return weights[mask] if self.reduce is None else self._hard(torch.full((), mask, device=weights.device))

    def logits(self, hidden: Tensor, *, split: Sequence[int] | None = None) -> Tensor:
        """Raw logits (..., V) of hidden states (..., D), in the head's dtype.

        The logits at a position predict its token, or with `config.shift_logits` the next position's token. All ranks
        must call it together.
        """
        own_logits_V = self.own_logits(hidden, split=split)
        if self.reduce is None:
            return own_logits_V
        logits = own_logits_V.new_zeros(*own_logits_V.shape[:-1], self.config.vocab_size)
        logits[..., self.vocabulary.start : self.vocabulary.stop] = own_logits_V
        return self.reduce(logits)

    def own_logits(self, hidden: Tensor, *, split: Sequence[int] | None = None) -> Tensor:
        """This rank's logits, only of `vocabulary`, without communication."""
        logits = join([self.lm_head(row) for row in pieces(hidden, split)])
        if self.config.gemma is None:
            return logits
        cap = self.config.gemma.softcap
        return (logits / cap).tanh() * cap


def init_weights(model: Decoder, *, seed: int, std: float = 0.02) -> None:
    """Draw fresh weights: normal with `std`, output projections scaled down by depth, norms one, biases zero."""
    generator = torch.Generator(device=next(model.parameters()).device).manual_seed(seed)
    depth = (2 * model.config.num_layers) ** -0.5
    outputs = ("o_proj.weight", "down_proj.weight", "experts.down_proj")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim < 2:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
                continue
            parameter.normal_(0.0, std * (depth if name.endswith(outputs) else 1.0), generator=generator)
        for module in model.modules():
            if isinstance(module, Router) and module.config.expert_bias:
                module.expert_bias.zero_()
