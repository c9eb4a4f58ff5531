"""The settings of the study of verified decoding: thresholds alone, and drafts that the same weights verify."""

from collections.abc import Mapping
from typing import Any, Literal

SUBJECTS = {
    "tiny-bd": "gsm-mini",
    "tiny-mbd": "gsm-mini",
    "ledger-bd": "ledger-mini",
    "ledger-mbd": "ledger-mini",
    "smollm2-bd": "gsm-mini",
    "smollm2-mbd": "gsm-mini",
}
"""The models, each with its task. Those named `bd` were trained by teacher forcing, the others by MultiTF."""

TAUS = (0.5, 0.7, 0.8, 0.9, 0.95, 0.99)
ROUTED_TAUS = (0.8, 0.95)  # where a route leaves some drafts to the threshold
SLOTS = (1, 2, 4)
BY_SLOTS = {"exact": (1, 2), "span": (1, 2, 4, 8)}
"""The numbers of slots in which every draft is verified. A block begins no further block before some of it is kept, so
an exact answer leaves a third slot empty."""

SettingFamily = Literal["threshold", "verified"]
Width = Literal["one slot", "several slots"]
THRESHOLD = "threshold"

_EXACT = {"exact": True, "store": "causal", "lead": "causal"}
_CONFIDENT = {"route": "score", "cost_of": "confident"}
_HYSTERESIS = {"route": "hysteresis", "cost_of": "confident"}  # the paper's for Fast-dLLM v2
_CAUSAL = {"route": "score", "store": "causal", "lead": "causal"}  # the paper's for SDAR, blocks of 4


def settings() -> dict[str, Mapping[str, Any]]:
    """Every setting by name: a method of a sweep, whose name ends with its slots."""
    found: dict[str, Mapping[str, Any]] = {}
    for slots in SLOTS:
        for tau in TAUS:
            found[f"{THRESHOLD} {tau:g} in {slots}"] = {"buffer_size": slots, "tau_m2t": tau}
        for tau in ROUTED_TAUS:
            found[f"score at {tau:g} in {slots}"] = {"buffer_size": slots, "tau_m2t": tau, "verify": _CONFIDENT}
    for slots in BY_SLOTS["span"]:
        found[f"span in {slots}"] = {"buffer_size": slots, "verify": {}}
    for slots in BY_SLOTS["exact"]:
        found[f"exact in {slots}"] = {"buffer_size": slots, "verify": _EXACT}
    found["hysteresis at 0.9 in 1"] = {"buffer_size": 1, "tau_m2t": 0.9, "verify": _HYSTERESIS}
    found["score with causal keys at 0.85 in 1"] = {"buffer_size": 1, "tau_m2t": 0.85, "verify": _CAUSAL}
    return found


def family_of(name: str) -> SettingFamily:
    return "threshold" if name.startswith(THRESHOLD) else "verified"


def slots_of(name: str) -> int:
    return int(name.rsplit(" in ", 1)[1])


def width_of(name: str) -> Width:
    return "one slot" if slots_of(name) == 1 else "several slots"
