"""How one request is decoded: the papers' methods and thresholds as one value, checked once."""

import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Any, Literal, TypeVar, get_args

from mbd_core.decoding.blocks.canvas_config import Canvas
from mbd_core.decoding.checks import check_choice, check_count, check_share

Fallback = Literal["confidence", "leftmost", "margin", "neg_entropy"]
PromptAttention = Literal["block_causal", "full"]


@dataclass(frozen=True, kw_only=True)
class T2T:
    """Token-to-token editing (LLaDA2.1; Alg. 5 line 15).

    tau        a filled token is replaced when another token is predicted with confidence > tau
    max_edits  after this many forwards a complete block is final, even if the last one edited it
    """

    tau: float = 0.5
    max_edits: int = 16

    def __post_init__(self) -> None:
        check_share("t2t.", "tau", self.tau)
        check_count("t2t.", "max_edits", self.max_edits)


@dataclass(frozen=True, kw_only=True)
class Soft:
    """Soft parallel decoding (DMax): accept from the left, revise every filled position, feed mixed embeddings.

    stop_confidence  a complete block is final when every prediction has confidence >= stop_confidence, when a forward
                     changes nothing, or after `block_size` forwards
    """

    stop_confidence: float = 0.9

    def __post_init__(self) -> None:
        check_share("soft.", "stop_confidence", self.stop_confidence)


@dataclass(frozen=True, kw_only=True)
class DecodingConfig:
    """Every decoding method as one value: block by block (the fields below), or a canvas (`canvas`).

    SingleBD is `buffer_size=1`, MultiBD a larger one (Alg. 4 and 5, Table 4); `t2t` and `soft` add revision. D2F is
    `prompt_attention="full"`. Its cache-only ablation also has `buffer_size=1`; its fully block-causal variant has the
    same thresholds without `prompt_attention` (App. C.5).

    block_size        B, tokens of a diffusion block; it must be the model's
    buffer_size       N_buf, the most blocks of the request that are resident at once
    adaptive          a busy engine may hold the request to fewer blocks (`EngineConfig.block_budget`); without it, its
                      tokens do not depend on how busy the engine is
    tau_add           the next block is activated when the last active one has progress > tau_add
    tau_stable        and, if set, stability > tau_stable: the share of its filled positions whose tokens the last
                      forward predicted again (needs `t2t` or `soft`)
    tau_semi          a block may use the fallback when its predecessor has progress >= tau_semi
    tau_m2t           a masked position becomes a token when its confidence > tau_m2t (1.0: only by fallback)
    tokens_per_step   the fallback: if fewer positions exceed tau_m2t, the best `tokens_per_step` are accepted
    fallback          what "best" means: highest confidence, leftmost (SDAR's sequential remasking), largest lead over
                      the second token, or lowest entropy (D2F's margin_confidence and neg_entropy)
    prompt_attention  how the prompt attends: in blocks, or in full with the block grid beginning at its end (D2F)
    prefix_cache      share stored blocks with other requests; `None`: if that is exact
    t2t, soft         revision of filled positions; `None`: off
    canvas            decode a canvas with a full-attention model instead; then all fields except `block_size` and
                      `prefix_cache` must be left out

    Progress counts editable positions only: not the prompt's remainder in the boundary block, not positions past
    `max_tokens`. Raises `ValueError` naming the field.
    """

    block_size: int
    buffer_size: int = 1
    adaptive: bool = True
    tau_add: float = 0.1
    tau_stable: float | None = None
    tau_semi: float = 0.9
    tau_m2t: float = 0.95
    tokens_per_step: int = 1
    fallback: Fallback = "confidence"
    prompt_attention: PromptAttention = "block_causal"
    prefix_cache: bool | None = None
    t2t: T2T | None = None
    soft: Soft | None = None
    canvas: Canvas | None = None

    def __post_init__(self) -> None:
        for name in ("block_size", "buffer_size", "tokens_per_step"):
            check_count("", name, getattr(self, name))
        for name in ("tau_add", "tau_semi", "tau_m2t"):
            check_share("", name, getattr(self, name))
        if self.tau_stable is not None:
            check_share("", "tau_stable", self.tau_stable)
            if not self.revises:
                raise ValueError(
                    f"tau_stable={self.tau_stable} needs t2t or soft: without them no filled token changes"
                )
        if self.tokens_per_step > self.block_size:
            raise ValueError(f"tokens_per_step={self.tokens_per_step} exceeds block_size={self.block_size}")
        for name, known in (
            ("fallback", get_args(Fallback)),
            ("prompt_attention", get_args(PromptAttention)),
            ("prefix_cache", (None, True, False)),
            ("adaptive", (True, False)),
        ):
            check_choice("", name, getattr(self, name), known)
        for name, kind in (("t2t", T2T), ("soft", Soft), ("canvas", Canvas)):
            value = getattr(self, name)
            if value is not None and not isinstance(value, kind):
                raise ValueError(f"{name}={value!r} must be an object with the fields of {kind.__name__}")
        self._check_parts()

    def _check_parts(self) -> None:
        """Raise `ValueError` for fields that contradict each other."""
        if self.t2t and self.soft:
            raise ValueError("t2t and soft are two ways to revise filled tokens; give one of them")
        if self.soft and (self.tokens_per_step > 1 or self.fallback != "confidence"):
            raise ValueError("soft accepts from the left, at least one token; leave out tokens_per_step and fallback")
        if self.prefix_cache and self.prompt_attention == "full":
            raise ValueError("prefix_cache=True cannot be honoured with prompt_attention='full': the prompt's keys "
                             "depend on the whole prompt")  # fmt: skip
        if self.canvas is not None:
            if self.prefix_cache:
                raise ValueError("prefix_cache=True cannot be honoured with canvas: full attention has no prefix")
            for f in fields(self):
                if f.name in CANVAS_FIELDS:
                    continue
                if getattr(self, f.name) != f.default:
                    raise ValueError(f"{f.name}={getattr(self, f.name)!r} has no meaning with canvas; leave it out")

    @property
    def revises(self) -> bool:
        """Whether a filled position may still change."""
        return self.t2t is not None or self.soft is not None

    @property
    def ranks_by_score(self) -> bool:
        """Whether the fallback ranks positions by margin or entropy, which need a computation of their own."""
        return self.fallback in ("margin", "neg_entropy")

    def grid_origin(self, prompt_length: int) -> int:
        """The first position of the block grid: the prompt's end if the prompt attends in full (D2F), otherwise 0."""
        return prompt_length if self.prompt_attention == "full" else 0


CANVAS_FIELDS = ("block_size", "prefix_cache", "canvas")
T = TypeVar("T")


def from_fields(kind: type[T], values: Mapping[str, Any], *, path: str = "") -> T:
    """Build a config dataclass and its parts from JSON values; `ValueError` names an unknown or invalid field."""
    by_name = {f.name: f for f in fields(kind)}  # type: ignore[arg-type]
    unknown = sorted(set(values) - by_name.keys())
    if unknown:
        raise ValueError(f"unknown decoding field '{path}{unknown[0]}'; known: {', '.join(by_name)}")
    missing = [n for n, f in by_name.items() if n not in values and f.default is MISSING]
    if missing:
        raise ValueError(f"decoding field '{path}{missing[0]}' is missing")
    hints = typing.get_type_hints(kind)
    return kind(**{n: _from_json(hints[n], v, f"{path}{n}") for n, v in values.items()})


def _from_json(hint: Any, value: Any, path: str) -> Any:
    part = next((a for a in typing.get_args(hint) if is_dataclass(a)), None) if _is_union(hint) else None
    if part is not None and isinstance(value, Mapping):
        return from_fields(typing.cast(type, part), value, path=f"{path}.")
    return value


def _is_union(hint: Any) -> bool:
    return isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union


def decoding_config(defaults: Mapping[str, Any], overrides: Mapping[str, Any], *, block_size: int) -> DecodingConfig:
    """A request's config: `overrides`, its own fields, replace those in `defaults` (`generation_config.json`).

    Other keys in `defaults` are ignored, because Hugging Face keeps many settings there. If one of the two names
    `canvas` and the other decodes block by block, the method of `overrides` counts. Raises `ValueError` for an unknown
    key in `overrides`, and for a `block_size` in either that is not the model's.
    """
    names = [f.name for f in fields(DecodingConfig)]
    unknown = sorted(set(overrides) - set(names))
    if unknown:
        raise ValueError(f"unknown decoding field '{unknown[0]}'; known: {', '.join(names)}")
    for source in (defaults, overrides):
        if source.get("block_size", block_size) != block_size:
            raise ValueError(f"block_size={source['block_size']} cannot be honoured: the model has {block_size}")
    values = {k: v for k, v in defaults.items() if k in names}
    if overrides.get("canvas") is not None:
        values = {k: v for k, v in values.items() if k in CANVAS_FIELDS}
    elif set(overrides) - set(CANVAS_FIELDS):
        values.pop("canvas", None)
    return from_fields(DecodingConfig, values | dict(overrides) | {"block_size": block_size})
