"""Decoding methods by name: the rows of the papers' tables as fields of `DecodingConfig`, without the block size.

`METHODS` is the one list of methods: sweeps and benchmarks name its entries and change fields of them. `TABLE_4` is
the MBD-LMs paper's Table 4, one entry for each model and task family: the SingleBD row, and the MultiBD row, which the
trained MBD-LM shares with the training-free baseline. `NAMED_METHODS` has its rows by name beside `METHODS`, as
`table-4/LLaDA2-Mini/math/multi`. `D2F_TABLE_8` is the D2F paper's Table 8.
"""

from collections.abc import Mapping
from typing import Any, Literal

Fields = Mapping[str, Any]

SINGLE, MULTI = "single", "multi"

METHODS: dict[str, Fields] = {
    # block by block; for the first two the model's own defaults decide all other fields
    SINGLE: {"buffer_size": 1},
    MULTI: {},
    "single-bd-riding-store": {"buffer_size": 2, "tau_add": 1.0},
    "multi-bd": {"buffer_size": 4, "tau_add": 0.1, "tau_semi": 0.9},
    "t2t": {"tau_m2t": 0.7, "t2t": {"tau": 0.5}},
    "multi-bd-t2t": {"buffer_size": 2, "tau_m2t": 0.7, "t2t": {"tau": 0.5}},
    "dmax": {"tau_m2t": 0.5, "soft": {}},
    "multi-bd-dmax": {"buffer_size": 2, "tau_m2t": 0.5, "tau_stable": 0.5, "soft": {}},
    # full-attention models, block by block
    "d2f": {"buffer_size": 8, "tau_add": 0.1, "tau_semi": 0.95, "tau_m2t": 0.9, "prompt_attention": "full"},
    "d2f-cache-only": {"buffer_size": 1, "tau_m2t": 0.9, "prompt_attention": "full"},
    "d2f-block-causal": {"buffer_size": 8, "tau_add": 0.1, "tau_semi": 0.95, "tau_m2t": 0.9},
    # full-attention models, on a canvas
    "llada": {"canvas": {"accept": "quota"}},
    "llada-random": {"canvas": {"accept": "quota", "score": "random"}},
    "dream-entropy": {"canvas": {"block_length": None, "accept": "schedule", "score": "neg_entropy"}},
    "dream-maskgit-plus": {"canvas": {"block_length": None, "accept": "schedule"}},
    "dream-margin": {"canvas": {"block_length": None, "accept": "schedule", "score": "margin"}},
    "dream-origin": {"canvas": {"block_length": None, "accept": "origin"}},
    "fast-dllm": {"canvas": {}},
    "fast-dllm-prefix": {"canvas": {"cache": "prefix"}},
    "fast-dllm-dual": {"canvas": {"cache": "dual"}},
    "fast-dllm-factor": {"canvas": {"cache": "dual", "accept": "factor"}},
    "dllm-cache": {"canvas": {"refresh": {}}},
    "local-leap": {"canvas": {"leap": {}}},
    "block-batch": {"canvas": {"branches": {}}},
}

Family = Literal["math", "code"]


def merge_fields(base: Fields, changes: Fields) -> dict[str, Any]:
    """`base` with the fields of `changes` replaced. Parts in both ("t2t", "canvas") are merged field by field."""
    parts = {
        name: merge_fields(base[name], part)
        for name, part in changes.items()
        if isinstance(part, Mapping) and isinstance(base.get(name), Mapping)
    }
    return {**base, **changes, **parts}


def _rows(single: Fields, multi: Fields) -> dict[str, Fields]:
    return {"single": {"buffer_size": 1, **single}, "multi": {**single, **multi}}


def _both(single: Fields, multi: Fields, code: Fields) -> dict[Family, dict[str, Fields]]:
    return {"math": _rows(single, multi), "code": _rows(single, {**multi, **code})}


_LLADA2 = {"buffer_size": 2, "tau_add": 0.1, "tau_semi": 0.9}

TABLE_4: dict[str, dict[Family, dict[str, Fields]]] = {
    "LLaDA2-Mini-DMax": {
        "math": _rows({"tau_m2t": 0.5, "soft": {}}, {**_LLADA2, "tau_stable": 0.5}),
        "code": _rows({"tau_m2t": 0.65, "soft": {}}, {**_LLADA2, "tau_add": 0.9, "tau_stable": 0.5}),
    },
    "LLaDA2-Mini": _both({"tau_m2t": 0.95}, _LLADA2, {"tau_add": 0.9}),
    "LLaDA2-Mini-CAP": _both({"tau_m2t": 0.95}, _LLADA2, {"tau_add": 0.9}),
    "SDAR-8B-Chat-b32": _both({"tau_m2t": 0.95}, {**_LLADA2, "buffer_size": 4}, {"tau_add": 0.9}),
    "SDAR-8B-Chat-b4": _both(
        {"tau_m2t": 0.95},
        {"buffer_size": 4, "tau_add": 0.1, "tau_semi": 0.25},
        {"tau_add": 0.75, "tau_semi": 0.75},
    ),
    "LLaDA2.1-Mini": _both({"tau_m2t": 0.7, "t2t": {"tau": 0.5}}, _LLADA2, {"tau_add": 0.9}),
}


NAMED_METHODS: dict[str, Fields] = METHODS | {
    f"table-4/{model}/{family}/{row}": fields
    for model, families in TABLE_4.items()
    for family, rows in families.items()
    for row, fields in rows.items()
}


def _d2f(max_tokens: int, block: int, tau_add: float, tau_m2t: float = 0.9) -> Fields:
    return {
        "block_size": block,
        "buffer_size": max_tokens // block,
        "tau_add": tau_add,
        "tau_semi": 0.95,
        "tau_m2t": tau_m2t,
        "prompt_attention": "full",
    }


D2F_TABLE_8: dict[str, Fields] = {
    "LLaDA/gsm8k": _d2f(512, 64, 0.7),
    "LLaDA/mbpp": _d2f(512, 32, 0.9),
    "LLaDA/humaneval": _d2f(512, 32, 0.1),
    "LLaDA/math": _d2f(512, 32, 0.1),
    "Dream/gsm8k": _d2f(256, 32, 0.1),
    "Dream/mbpp": _d2f(256, 48, 0.1),
    "Dream/humaneval": _d2f(256, 32, 0.9, 0.95),
    "Dream/math": _d2f(256, 64, 0.1),
}
