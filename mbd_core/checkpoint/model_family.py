"""A model family as data: its config.json keys, supported settings, names of tensors; and keys of all families."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Json = Mapping[str, Any]
# A checkpoint as Hugging Face writes it, or as torch.distributed.checkpoint does.
Format = Literal["hf", "dcp"]
# One tensor an expert, a layer's experts stacked, or the decoder's own tensors.
ExpertLayout = Literal["per_expert", "fused", "decoder"]
# The names in a block-diffusion folder that is made of an autoregressive folder: dllm's A2D's, SDAR's or Fast-dLLM's.
DiffusionLayout = Literal["a2d", "sdar", "fast-dllm-v2"]


@dataclass(frozen=True, kw_only=True)
class ModelFamily:
    """One architecture.

    model_types         the `model_type`s of published checkpoints; we write the first
    expert_model_types  if given, the `model_type` to write for single ("per_expert") and stacked ("fused") experts
    keys, moe_keys      the config.json key of each field of `ModelConfig` and of `MoEConfig`
    spellings           other names of keys, such as transformers 5's -> the names in `keys`
    defaults            values of keys (by config.json name) that published files leave out
    fixed               settings of config.json for which only this value is supported
    harmless            keys that are not read because no value changes the network's results: they concern training,
                        generation, other software, or a part that `fixed` switches off
    accepted            keys that are not read, with the values that do not change the network; a list may hold any of
                        these values. Any other key is refused (`check_keys`)
    rope_scaling        whether its files may scale rotary frequencies, in `rope_scaling` or `rope_parameters`
    rope_parameters     whether we write transformers 5's `rope_parameters`, instead of `rope_theta` and `rope_scaling`
    head_dim_follows    whether a missing head size is the hidden size divided by the number of heads
    kv_heads_follow     whether a missing number of key/value heads is the number of heads
    switches            fields of `ModelConfig` that follow from the architecture; `moe_switches` fields of `MoEConfig`
    text                the key of config.json that holds the text model's settings, if they are nested. Such a model
                        has `GemmaLayers`, whose keys are `gemma_keys` (`gemma_config.py`)
    skipped             prefixes of the names of unused tensors (other modalities). A folder made from such a
                        checkpoint keeps these tensors unchanged
    names               our module -> the checkpoint's name for it (`{i}` a layer, `{e}` an expert); modules with the
                        same name there are stored in one tensor, one after another
    published           ids of the released vocabulary, for folders whose files leave them out and whose `vocab_size`
                        is one of `vocab_sizes`; the tokenizer must agree (`tokenizer.load_tokenizer`)
    decoding            the method of folders whose generation_config.json names none, as fields of `DecodingConfig`
    generation          a release's key in generation_config.json -> the field of that method
    """

    model_types: tuple[str, ...]
    keys: Mapping[str, str]
    spellings: Mapping[str, str] = field(default_factory=dict)
    defaults: Json = field(default_factory=dict)
    fixed: Json = field(default_factory=dict)
    harmless: frozenset[str] = frozenset()
    accepted: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    rope_scaling: bool = True
    rope_parameters: bool = False
    head_dim_follows: bool = False
    kv_heads_follow: bool = False
    switches: Json = field(default_factory=dict)
    moe_keys: Mapping[str, str] | None = None
    moe_switches: Json = field(default_factory=dict)
    text: str | None = None
    gemma_keys: Mapping[str, str] = field(default_factory=dict)
    skipped: tuple[str, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)
    expert_model_types: Mapping[str, str] | None = None
    vocab_sizes: tuple[int, ...] = ()
    published: Json = field(default_factory=dict)
    decoding: Json = field(default_factory=dict)
    generation: Mapping[str, str] = field(default_factory=dict)


# Keys that transformers 4 and 5 write into any config.json, and keys of trainers and engines.
OF_ANY_MODEL = frozenset(
    [
        "_attn_implementation",
        "_attn_implementation_autoset",
        "_commit_hash",
        "_experts_implementation",
        "_moe_implementation",
        "_name_or_path",
        "add_cross_attention",
        "attention_dropout",
        "attn_implementation",
        "auto_map",
        "bad_words_ids",
        "begin_suppress_tokens",
        "bos_token_id",
        "chunk_size_feed_forward",
        "cross_attention_hidden_size",
        "debug",
        "decoder_start_token_id",
        "diversity_penalty",
        "do_sample",
        "dtype",
        "early_stopping",
        "embedding_dropout",
        "encoder_no_repeat_ngram_size",
        "exponential_decay_length_penalty",
        "finetuning_task",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "fuse_cross_entropy",
        "gradient_checkpointing",
        "hidden_dropout",
        "id2label",
        "initializer_range",
        "is_decoder",
        "is_encoder_decoder",
        "label2id",
        "length_penalty",
        "max_length",
        "micro_forward",
        "min_length",
        "moe_implementation",
        "no_repeat_ngram_size",
        "num_beam_groups",
        "num_beams",
        "num_labels",
        "num_return_sequences",
        "output_attentions",
        "output_dropout",
        "output_hidden_states",
        "output_scores",
        "pad_token_id",
        "prefix",
        "pretraining_tp",
        "problem_type",
        "remove_invalid_values",
        "repetition_penalty",
        "residual_dropout",
        "return_dict",
        "return_dict_in_generate",
        "sep_token_id",
        "skip_checkpoint",
        "suppress_tokens",
        "task_specific_params",
        "temperature",
        "tf_legacy_loss",
        "tie_encoder_decoder",
        "tokenizer_class",
        "top_k",
        "top_p",
        "torch_dtype",
        "torchscript",
        "transformers.js_config",
        "transformers_version",
        "typical_p",
        "unsloth_fixed",
        "unsloth_version",
        "use_bfloat16",
        "use_cache",
    ]
)
OF_ANY_MOE = frozenset(
    [
        "ep_size",
        "output_router_logits",
        "router_aux_loss_coef",
        "router_z_loss_coef",
        "use_deepep",
    ]
)
# Keys of a window that `fixed` switches off, or of layers without a window.
WINDOW = frozenset(("max_window_layers", "sliding_window"))
# Keys of OLMo's configuration, which LLaDA uses: initial weights, and parts that `fixed` switches off.
# `block_group_size` renames tensors, which the check of tensors notices.
OLMO = frozenset(
    [
        "alibi_bias_max",
        "attention_layer_norm_with_affine",
        "block_group_size",
        "flash_attention",
        "init_cutoff_factor",
        "init_device",
        "init_fn",
        "init_std",
        "mlp_ratio",
        "precision",
        "tie_word_embeddings",
    ]
)
READ_IN_ANY = frozenset(
    [
        "architectures",
        "embedding_size",
        "head_dim",
        "model_type",
        "quantization_config",
        "rope_parameters",
    ]
)
EVERYWHERE: dict[str, tuple[Any, ...]] = {"layer_types": ("full_attention",), "pruned_heads": ({},)}
