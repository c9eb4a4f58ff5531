"""Reads the generation fields of lm-evaluation-harness as an engine's fields."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mbd_core.decoding.blocks.sampling_config import Sampling
from mbd_core.evaluation.tasks.recipes import LONGEST_ANSWER

LIMITS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
SAMPLED = ("temperature", "top_p", "top_k", "seed")


@dataclass(frozen=True, kw_only=True)
class Generation:
    """One generation: its limit, the strings that end it, how tokens are drawn, and decoding fields of its own."""

    max_tokens: int
    stop: tuple[str, ...]
    sampling: Sampling
    decoding: Mapping[str, Any]


def read_generation(fields: Mapping[str, Any]) -> Generation:
    """The generation that a task's `generation_kwargs` (and `--gen_kwargs`) ask for; other names are decoding fields.

    The default limit is 4,096 tokens, or fewer if the model holds fewer. Raises `ValueError` for a value that cannot
    be honoured.
    """
    other_fields = dict(fields)
    until = other_fields.pop("until", None) or []
    stop = (until,) if isinstance(until, str) else tuple(until)
    if not all(isinstance(s, str) for s in stop):
        raise ValueError(f"until={until!r} must be a text or a list of texts")
    limits = {name: other_fields.pop(name) for name in LIMITS if name in other_fields}
    if len(set(limits.values())) > 1:
        raise ValueError(f"{limits} are two limits of one answer; give one")
    limit = next(iter(limits.values()), LONGEST_ANSWER)
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
        raise ValueError(f"{next(iter(limits), '')}={limit!r} must be a whole number of at least 1")
    draws = other_fields.pop("do_sample", None)
    sampling = {name: other_fields.pop(name) for name in SAMPLED if other_fields.get(name) is not None}
    if draws is False:
        sampling["temperature"] = 0.0
    elif draws and not sampling.get("temperature"):
        raise ValueError("do_sample=True needs a temperature above 0")
    return Generation(
        max_tokens=limit, stop=tuple(s for s in stop if s), sampling=Sampling(**sampling), decoding=other_fields
    )
