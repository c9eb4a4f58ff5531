"""A small model beside the engine's own, which drafts for it: the conditions for such a pair.

A page holds the keys of its tokens under both models, each in a cache of its own. So both models share tables, owners,
and hashes of prefixes.
"""

from mbd_core.decoding.causal.drafted import DraftPair
from mbd_core.engine.config import EngineConfig
from mbd_core.models.decoder import Decoder
from mbd_core.models.model_config import ModelConfig


def draft_pair(model: ModelConfig, draft: ModelConfig) -> DraftPair:
    """The decoders' knowledge of the two models. The large model judges by its autoregressive mode if it has one."""
    return DraftPair(
        mask_token_id=draft.mask_token_id,
        shift=draft.shift_logits,
        predicts_next="ar" in model.ar_methods or model.shift_logits,
    )


def check_pair(large: ModelConfig, small: ModelConfig, config: EngineConfig, *, vocab_limit: int | None) -> None:
    """Raises `ValueError` if the small model cannot draft for the large model; `vocab_limit` is the tokenizer's
    size."""
    subject = f"the draft model, a {small.architecture},"
    drafts = small.attention == "block_causal" and small.has_mask
    if not drafts or (small.moe is not None and small.moe.expert_capacity):
        raise ValueError(f"{subject} cannot draft: give a model that fills masks in blocks")
    judges = "ar" in large.ar_methods or (large.attention == "block_causal" and large.has_mask)
    if not judges or (large.moe is not None and large.moe.expert_capacity):
        raise ValueError(
            f"{subject} cannot be had: {large.architecture} has no mode that judges token by token, neither an "
            "autoregressive one nor block size 1; leave it out"
        )
    wanted = vocab_limit or large.vocab_size
    if small.vocab_size < wanted or (vocab_limit is None and small.vocab_size != wanted):
        raise ValueError(
            f"{subject} has a vocabulary of {small.vocab_size} tokens, the model one of {wanted}: give two models of "
            "one tokenizer"
        )
    positions = config.positions(large.max_positions)
    if small.max_positions < positions:
        raise ValueError(
            f"{subject} has {small.max_positions} positions, fewer than the {positions} of a sequence; let "
            f"max_model_len be at most {small.max_positions}"
        )


def check_loaded_pair(model: Decoder, draft: Decoder, config: EngineConfig, *, vocab_limit: int | None) -> None:
    """Raises `ValueError` as `check_pair` does, and for two models that were loaded differently."""
    check_pair(model.config, draft.config, config, vocab_limit=vocab_limit)
    if model.shard.size > 1 or draft.shard.size > 1:
        raise ValueError("a draft model cannot be had with tensor parallelism yet; leave one of them out")
    weights, others = model.model.norm.weight, draft.model.norm.weight
    if (weights.dtype, weights.device) != (others.dtype, others.device):
        raise ValueError(
            f"the draft model is in {others.dtype} on {others.device}, the model in {weights.dtype} on "
            f"{weights.device}: load both alike"
        )
