"""How one request is decoded: the papers' methods and thresholds as one value, checked once."""

from collections.abc import Collection, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Annotated, Any, Literal

from mbd_core.decoding.blocks.canvas_config import Canvas
from mbd_core.decoding.blocks.causal_config import Causal, PlannedRows, Renoise
from mbd_core.decoding.blocks.verify_config import Verify
from mbd_core.fields import MOST, Flag, Ge, Le, check_effects, configuration, load

Fallback = Literal["confidence", "leftmost", "margin", "neg_entropy"]
PromptAttention = Literal["block_causal", "full"]
EntropyRule = Literal["paper", "jetengine"]
EditVariant = Literal["fluxserve", "sglang"]


@configuration()
class T2T:
    """Token-to-token editing (LLaDA2.1; Alg. 5 line 15)."""

    tau: Annotated[float, Ge(0), Le(1)] = 0.5
    """A filled token is replaced when another token is predicted with confidence > tau."""
    max_edits: Annotated[int, Ge(0), Le(MOST)] = 16
    """A complete block is final after this many forwards, even if the last forward edited it. 0 needs `verify`."""


@configuration()
class Soft:
    """Soft parallel decoding (DMax): accept from the left, revise every filled position, feed mixed embeddings."""

    stop_confidence: Annotated[float, Ge(0), Le(1)] = 0.9
    """A complete block is final when every prediction has at least this confidence, when a forward changes nothing, or
    after `block_size` forwards."""


@configuration()
class EntropyBound:
    """Acceptance by a bound on entropy instead of a threshold on confidence (EB sampler, arXiv 2505.24857).

    The open positions of a block are taken in the order of their entropies, the lowest first.
    """

    gamma: Annotated[float, Ge(0)] = 0.35
    """The bound on the sum of the entropies, in nats."""
    rule: EntropyRule = "paper"
    """paper: accept while the entropies *before* the candidate sum to at most gamma. jetengine: accept while the sum
    *with* the candidate is below gamma."""


@configuration()
class Levenshtein:
    """LLaDA2.2's decoding, in which tokens also come and go inside a block; `tau_m2t` is its threshold."""

    tau: Annotated[float, Ge(0), Le(1)] = 0.0
    """A filled position takes a new token, or an edit, whose confidence > tau."""
    variant: EditVariant = "fluxserve"
    """fluxserve: `steps` forwards fill a block's masks. sglang: each forward fills one mask at least, and the mask may
    be predicted. `levenshtein.py` lists the differences."""
    steps: Annotated[int, Ge(1), Le(MOST)] = 32
    """fluxserve: the number of forwards that fill a block's masks."""
    max_post_steps: Annotated[int, Ge(0), Le(MOST)] = 16
    """The forwards of a block after its last original mask is filled; the last of them resolves the block, which means
    that it fills all masks, without edits. 0: the forward that fills the last original mask resolves it."""
    max_steps: Annotated[int, Ge(1), Le(MOST)] = 1000
    """fluxserve: the most forwards of a block; the last of them resolves it."""

    def __post_init__(self) -> None:
        only = ("fluxserve",)
        check_effects(self, "edit", chooser="variant", effects={"steps": only, "max_steps": only})


@configuration()
class DecodingConfig:
    """Every decoding method as one value: block by block (the fields below), on a canvas (`canvas`), or after a prefix
    that causal rows store (`causal`, `renoise`).

    SingleBD is `buffer_size=1`, and MultiBD a larger `buffer_size` (Alg. 4 and 5, Table 4). `t2t` and `soft` add
    revision. D2F is `prompt_attention="full"`. Its cache-only ablation also has `buffer_size=1`. Its fully
    block-causal variant has the same thresholds without `prompt_attention` (App. C.5).

    Progress counts editable positions only: not the prompt's remainder in the boundary block, not positions past
    `max_tokens`. Raises `ValueError` naming the field.
    """

    block_size: Annotated[int, Ge(1), Le(MOST)]
    """B, tokens of a diffusion block; it must be the model's."""
    buffer_size: Annotated[int, Ge(1), Le(MOST)] = 1
    """N_buf, the most blocks of the request that are resident at once."""
    adaptive: bool = True
    """A busy engine may give the request fewer blocks (its block budget). With false, the request's tokens do not
    depend on the load. With `causal`, a busy engine may decode single tokens instead of drafts; this changes no token
    except where `thinking` puts in its end."""
    tau_add: Annotated[float, Ge(0), Le(1)] = 0.1
    """The next block is activated when the last active one has progress > tau_add."""
    tau_stable: Annotated[float | None, Ge(0), Le(1)] = None
    """If set, the next block also waits for stability > tau_stable. Stability is the share of the last block's filled
    positions whose tokens the last forward predicted again (needs `t2t` or `soft`)."""
    tau_semi: Annotated[float, Ge(0), Le(1)] = 0.9
    """A block may use the fallback when its predecessor has progress >= tau_semi."""
    tau_m2t: Annotated[float, Ge(0), Le(1)] = 0.95
    """A masked position becomes a token when its confidence > tau_m2t (1: only by fallback)."""
    tokens_per_step: Annotated[int, Ge(1), Le(MOST)] = 1
    """The fallback: if fewer positions than this exceed tau_m2t, this number of the best positions is accepted."""
    fallback: Fallback = "confidence"
    """What "best" means: highest confidence, leftmost (SDAR's sequential remasking), largest lead over the second
    token, or lowest entropy (D2F's margin_confidence and neg_entropy)."""
    entropy: EntropyBound | None = None
    """Accept by a bound on entropy; then `tau_m2t`, `tokens_per_step`, `fallback` and `soft` must be left out."""
    sub_block: Annotated[int | None, Ge(1), Le(MOST), Flag(default="the whole block")] = None
    """Positions of a part of a block; only the leftmost part with masks is filled. It divides `block_size`."""
    carry: bool = False
    """The forward that stores a block also fills the first position of the next one, whatever its confidence (models
    whose logits predict the next position)."""
    prompt_attention: PromptAttention = "block_causal"
    """How the prompt attends: in blocks, or in full with the block grid beginning at its end (D2F)."""
    prefix_cache: Annotated[bool | None, Flag(default="if that is exact")] = None
    """Share stored blocks with other requests."""
    t2t: T2T | None = None
    """Token-to-token editing of filled positions."""
    soft: Soft | None = None
    """Soft parallel decoding."""
    edit: Levenshtein | None = None
    """Insert and delete tokens inside a block (LLaDA2.2); then all fields except `block_size`, `tau_m2t` and
    `prefix_cache` must be left out."""
    canvas: Canvas | None = None
    """Decode a canvas with a full-attention model instead; then all fields except `block_size` and `prefix_cache` must
    be left out."""
    causal: Causal | None = None
    """Decode a model that stores its keys by causal rows (Nemotron-Labs-Diffusion); then all fields except
    `block_size`, `adaptive` and `prefix_cache` must be left out."""
    renoise: Renoise | None = None
    """Decode canvases of drawn tokens with a model that has no mask (DiffusionGemma); then all fields except
    `block_size`, `adaptive` and `prefix_cache` must be left out."""

    verify: Verify | None = None
    """Verify drafts of `buffer_size` blocks at block size 1 (S2D2) or by a larger model; then all fields except
    `block_size`, `buffer_size`, `prefix_cache`, `tau_add`, `tau_semi`, `tau_m2t`, `tokens_per_step`, `sub_block`,
    `carry` and `t2t` must be left out. With several blocks, `sub_block`, `carry` and `t2t` must be left out too."""

    def __post_init__(self) -> None:
        if self.tau_stable is not None and not self.revises:
            raise ValueError(f"tau_stable={self.tau_stable} needs t2t or soft: without them no filled token changes")
        if self.tokens_per_step > self.block_size:
            raise ValueError(f"tokens_per_step={self.tokens_per_step} exceeds block_size={self.block_size}")
        self._check_parts()

    def _check_parts(self) -> None:
        """Raise `ValueError` for fields that contradict each other."""
        if self.sub_block is not None and self.block_size % self.sub_block:
            raise ValueError(f"sub_block={self.sub_block} does not divide block_size={self.block_size}")
        if self.carry and self.revises:
            raise ValueError("carry=True needs filled tokens that stay; leave out t2t and soft, or carry")
        if self.carry and self.prompt_attention == "full":
            raise ValueError("carry=True cannot be honoured with prompt_attention='full': no block ends such a prompt")
        if self.t2t and self.soft:
            raise ValueError("t2t and soft are two ways to revise filled tokens; give one of them")
        if self.edit is not None:
            self._only(FIELDS_WITH["edit"], "edit")
        if self.entropy is not None:
            self._only({f.name for f in fields(self)} - {*REPLACED_BY_ENTROPY, "soft"}, "entropy")
        if self.causal is not None:
            if self.prefix_cache and self.causal.context == "full":
                raise ValueError("prefix_cache=True cannot be honoured with causal.context='full'; leave one out")
            self._only(FIELDS_WITH["causal"], "causal")
        if self.renoise is not None:
            self._only(FIELDS_WITH["renoise"], "renoise")
        if self.t2t is not None and not self.t2t.max_edits and self.verify is None:
            raise ValueError("t2t.max_edits=0 has a meaning only with verify; give at least 1")
        if self.verify is not None:
            self._only(FIELDS_WITH["verify"], "verify")
            if self.verify.draft_model:
                self._only(set(FIELDS_WITH["verify"]) - set(OF_ONE_SLOT), "verify.draft_model")
            if self.verify.exact:
                self._only(set(FIELDS_WITH["verify"]) - set(REPLACED_BY_EXACT), "verify.exact")
            if self.verify.slots == "measured":
                self._only(set(FIELDS_WITH["verify"]) - {"tau_add"}, "verify.slots='measured'")
                if self.buffer_size == 1:
                    raise ValueError(
                        "verify.slots='measured' chooses among several blocks, but buffer_size=1; let buffer_size be "
                        "2 or more"
                    )
            if self.buffer_size > 1:
                self._check_verified_slots(self.verify)
        if self.soft and (self.tokens_per_step > 1 or self.fallback != "confidence"):
            raise ValueError("soft accepts from the left, at least one token; leave out tokens_per_step and fallback")
        if self.prefix_cache and self.prompt_attention == "full":
            raise ValueError(
                "prefix_cache=True cannot be honoured with prompt_attention='full': the prompt's keys "
                "depend on the whole prompt"
            )
        if self.canvas is not None:
            if self.prefix_cache:
                raise ValueError("prefix_cache=True cannot be honoured with canvas: full attention has no prefix")
            self._only(FIELDS_WITH["canvas"], "canvas")

    def _check_verified_slots(self, verify: Verify) -> None:
        """Raises `ValueError` for fields that verification of several slots does not support. The remedy names
        `buffer_size` too, because the request may set it while the refused field is the model's default."""
        for f in fields(self):
            if f.name in OF_ONE_SLOT and getattr(self, f.name) != f.default:
                raise ValueError(
                    f"{f.name} cannot be had with verify and buffer_size={self.buffer_size}; let buffer_size be 1, or "
                    "verify be null"
                )
        if verify.route == "hysteresis":
            raise ValueError(
                "verify.route='hysteresis' follows the drafts of one block and cannot be had with "
                f"buffer_size={self.buffer_size}; let route be span or score, or buffer_size be 1"
            )

    def _only(self, fitting: Collection[str], method: str) -> None:
        """Raises `ValueError` for a field that is set and has no meaning with a method."""
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name not in fitting and value != f.default:
                field = f.name if is_dataclass(value) else f"{f.name}={value!r}"
                raise ValueError(f"{field} has no meaning with {method}; leave it out")

    @property
    def by_parts(self) -> bool:
        """Whether a block is filled part by part, or begins with a carried token."""
        return self.carry or self.sub_block is not None

    @property
    def revises(self) -> bool:
        """Whether a filled position may still change."""
        return self.t2t is not None or self.soft is not None or self.edit is not None

    @property
    def ranking(self) -> Fallback:
        """The score that ranks positions."""
        return self.fallback if self.entropy is None else "neg_entropy"

    @property
    def ranks_by_score(self) -> bool:
        """Whether positions are ranked by margin or entropy, which need a computation of their own."""
        return self.ranking in ("margin", "neg_entropy")

    @property
    def accepts_several(self) -> bool:
        """Whether several positions may be accepted by their rank, not the best alone."""
        return self.entropy is not None or self.tokens_per_step > 1

    def grid_origin(self, prompt_length: int) -> int:
        """The first position of the block grid: the prompt's end if the prompt attends in full (D2F), otherwise 0."""
        return prompt_length if self.attends_in_full else 0

    @property
    def attends_in_full(self) -> bool:
        """Whether the prompt is stored by one row without order."""
        return self.prompt_attention == "full" or (self.planned is not None and self.planned.full)

    @property
    def in_buffer(self) -> bool:
        """Whether its requests decode in slots of the Block Buffer; otherwise a decoder plans their rows."""
        return self.canvas is None and self.planned is None

    @property
    def prefix_method(self) -> str | None:
        """Its name among `ModelConfig.prefix_methods`, if it decodes after a prefix that causal rows store."""
        if self.renoise is not None:
            return "renoise"
        return None if self.causal is None else self.causal.method.replace("_", "-")

    @property
    def planned(self) -> PlannedRows | None:
        """How its requests lie in the cache, if a decoder plans their rows after a stored prefix."""
        if self.verify is not None:
            rows = self.verify.rows(self.block_size, self.buffer_size)
            return replace(rows, seeds=1, gaps=False) if self.carry else rows
        part = self.renoise or self.causal
        return None if part is None else part.rows(self.block_size)


# The fields that may be set beside a method that replaces decoding block by block in slots.
FIELDS_WITH: dict[str, tuple[str, ...]] = {
    "edit": ("block_size", "tau_m2t", "prefix_cache", "edit"),
    "canvas": ("block_size", "prefix_cache", "canvas"),
    "causal": ("block_size", "adaptive", "prefix_cache", "causal"),
    "renoise": ("block_size", "adaptive", "prefix_cache", "renoise"),
    "verify": (
        "block_size",
        "buffer_size",
        "prefix_cache",
        "tau_add",
        "tau_semi",
        "tau_m2t",
        "tokens_per_step",
        "sub_block",
        "carry",
        "t2t",
        "verify",
    ),
}
REPLACED_BY_EXACT = ("tau_semi", "tau_m2t", "tokens_per_step", "t2t")
OF_ONE_SLOT = ("sub_block", "carry", "t2t")
REPLACED_BY_ENTROPY = ("tau_m2t", "tokens_per_step", "fallback")
REPLACED_BY_SOFT = ("t2t", "entropy")


def read_decoding(values: Mapping[str, Any]) -> DecodingConfig:
    """Reads a whole configuration from JSON values. Raises `ValueError` for an unknown, missing or refused field."""
    return load(DecodingConfig, values, noun="decoding field")


def decoding_config(defaults: Mapping[str, Any], overrides: Mapping[str, Any], *, block_size: int) -> DecodingConfig:
    """A request's config: `overrides`, its own fields, replace the fields of `defaults` (`generation_config.json`).

    Other keys in `defaults` are ignored, because Hugging Face keeps many settings there. If the two decode by
    different methods of `FIELDS_WITH`, the method of `overrides` counts. `entropy` and the fields that it replaces
    drop each other in the same way, and so do `soft` and the fields that it replaces. If only `overrides` names
    `verify`, the `buffer_size` of `defaults` is MultiBD's and does not count. Raises `ValueError` for an unknown key
    in `overrides`, and for a `block_size` that is not the model's.
    """
    names = [f.name for f in fields(DecodingConfig)]
    unknown = sorted(set(overrides) - set(names))
    if unknown:
        raise ValueError(f"unknown decoding field '{unknown[0]}'; known: {', '.join(names)}")
    for source in (defaults, overrides):
        if source.get("block_size", block_size) != block_size:
            raise ValueError(f"block_size={source['block_size']} cannot be honoured: the model has {block_size}")
    values = {k: v for k, v in defaults.items() if k in names}
    for method, method_fields in FIELDS_WITH.items():
        if overrides.get(method) is not None:
            values = {k: v for k, v in values.items() if k in method_fields}
        elif set(overrides) - set(method_fields):
            values.pop(method, None)
    if (verify := overrides.get("verify")) is not None:
        if defaults.get("verify") is None:
            values.pop("buffer_size", None)  # the slots of MultiBD
        if isinstance(verify, Mapping) and verify.get("exact"):
            replaced = {*REPLACED_BY_EXACT, *(("tau_add",) if verify.get("slots") == "measured" else ())}
            values = {k: v for k, v in values.items() if k not in replaced}
    named = {name for name, value in overrides.items() if value is not None}
    for method, replaced_fields in (("entropy", REPLACED_BY_ENTROPY), ("soft", REPLACED_BY_SOFT)):
        if method in named:
            values = {k: v for k, v in values.items() if k not in replaced_fields}
        elif named & set(replaced_fields):
            values.pop(method, None)
    return read_decoding(values | dict(overrides) | {"block_size": block_size})
