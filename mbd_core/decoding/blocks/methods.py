"""Decoding methods by name, the rows of the papers' tables; and a model's measured front, on which `speed` chooses.

`METHODS` is the one list of methods: sweeps and benchmarks name its entries and change fields of them. `TABLE_4` is
the MBD-LMs paper's Table 4, one entry for each model and task family: the SingleBD row, and the MultiBD row, which the
trained MBD-LM shares with the training-free baseline. `NAMED_METHODS` is `METHODS` with the rows of Table 4 by name,
as `table-4/LLaDA2-Mini/math/multi`. `D2F_TABLE_8` is the D2F paper's Table 8.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from mbd_core.decoding.blocks.config import decoding_config
from mbd_core.fields import configuration, load

MethodFields = Mapping[str, Any]

SINGLE, MULTI = "single", "multi"

_S2D2_HYSTERESIS = {"route": "hysteresis", "tau_on": 1.0, "tau_off": -5.0, "cost_of": "confident"}

METHODS: dict[str, MethodFields] = {
    # block by block; for the first two the model's own defaults decide all other fields
    SINGLE: {"buffer_size": 1},
    MULTI: {},
    "single-bd-riding-store": {"buffer_size": 2, "tau_add": 1.0},
    "multi-bd": {"buffer_size": 4, "tau_add": 0.1, "tau_semi": 0.9},
    "fast-dllm-v2": {"tau_m2t": 0.9, "sub_block": 8, "carry": True},
    "multi-bd-fast-dllm-v2": {"buffer_size": 2, "tau_m2t": 0.9, "sub_block": 8, "carry": True},
    "eb": {"entropy": {"gamma": 0.35}},
    "eb-jetengine": {"entropy": {"gamma": 0.35, "rule": "jetengine"}},
    "t2t": {"tau_m2t": 0.7, "t2t": {"tau": 0.5}},
    "multi-bd-t2t": {"buffer_size": 2, "tau_m2t": 0.7, "t2t": {"tau": 0.5}},
    "dmax": {"tau_m2t": 0.5, "soft": {}},
    "multi-bd-dmax": {"buffer_size": 2, "tau_m2t": 0.5, "tau_stable": 0.5, "soft": {}},
    "llada2.2": {"tau_m2t": 0.5, "edit": {}},
    "llada2.2-sglang": {"tau_m2t": 0.5, "edit": {"variant": "sglang"}},
    # drafts that the same model verifies at block size 1 (S2D2): its settings for SDAR, Fast-dLLM v2 and LLaDA2.1
    "verified": {"tau_m2t": 0.85, "verify": {}},
    "verified-exact": {"verify": {"exact": True, "store": "causal", "lead": "causal"}},
    "verified-two-sizes": {"verify": {"exact": True, "store": "causal", "lead": "causal", "draft_model": True}},
    "s2d2-sdar-b4": {"tau_m2t": 0.85, "verify": {"route": "score", "store": "causal", "lead": "causal"}},
    "s2d2-sdar-b16": {"tau_m2t": 0.85, "verify": {"store": "causal", "lead": "causal"}},
    "s2d2-fast-4": {"tau_m2t": 0.9, "sub_block": 4, "carry": True, "verify": _S2D2_HYSTERESIS},
    "s2d2-fast-16": {"tau_m2t": 0.9, "sub_block": 16, "carry": True, "verify": _S2D2_HYSTERESIS},
    "s2d2-fast-32": {"tau_m2t": 0.9, "sub_block": 32, "carry": True, "verify": {"min_span": 8}},
    "s2d2-llada2-conservative": {
        "tau_m2t": 0.95,
        "t2t": {"tau": 0.9, "max_edits": 0},
        "verify": {"route": "score", "cost": 4.0, "tau_score": -5.0},
    },
    "s2d2-llada2-quality": {
        "tau_m2t": 0.7,
        "t2t": {"tau": 0.5, "max_edits": 0},
        "verify": {"route": "score", "cost": 4.0},
    },
    # models that store their keys by causal rows
    "ar": {"causal": {"method": "ar"}},
    "linear-spec": {"causal": {}},
    "linear-spec-ahead": {"causal": {"block_length": 8, "ahead": True}},
    "linear-spec-0.7": {"causal": {"tau": 0.7}},
    "dlm": {"causal": {"method": "dlm", "tau": 0.9}},
    # models without a mask
    "renoise": {"renoise": {}},
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
    "d3llm": {"canvas": {"multi_block": {}}},
    "d3llm-cache": {"canvas": {"multi_block": {"cache_delay": 2}}},
}

Family = Literal["math", "code"]


def _rows(single: MethodFields, multi: MethodFields) -> dict[str, MethodFields]:
    return {"single": {"buffer_size": 1, **single}, "multi": {**single, **multi}}


def _both(single: MethodFields, multi: MethodFields, code: MethodFields) -> dict[Family, dict[str, MethodFields]]:
    return {"math": _rows(single, multi), "code": _rows(single, {**multi, **code})}


_LLADA2 = {"buffer_size": 2, "tau_add": 0.1, "tau_semi": 0.9}

TABLE_4: dict[str, dict[Family, dict[str, MethodFields]]] = {
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


NAMED_METHODS: dict[str, MethodFields] = METHODS | {
    f"table-4/{model}/{family}/{row}": fields
    for model, families in TABLE_4.items()
    for family, rows in families.items()
    for row, fields in rows.items()
}


def _d2f(max_tokens: int, block: int, tau_add: float, tau_m2t: float = 0.9) -> MethodFields:
    return {
        "block_size": block,
        "buffer_size": max_tokens // block,
        "tau_add": tau_add,
        "tau_semi": 0.95,
        "tau_m2t": tau_m2t,
        "prompt_attention": "full",
    }


D2F_TABLE_8: dict[str, MethodFields] = {
    "LLaDA/gsm8k": _d2f(512, 64, 0.7),
    "LLaDA/mbpp": _d2f(512, 32, 0.9),
    "LLaDA/humaneval": _d2f(512, 32, 0.1),
    "LLaDA/math": _d2f(512, 32, 0.1),
    "Dream/gsm8k": _d2f(256, 32, 0.1),
    "Dream/mbpp": _d2f(256, 48, 0.1),
    "Dream/humaneval": _d2f(256, 32, 0.9, 0.95),
    "Dream/math": _d2f(256, 64, 0.1),
}


# A model's measured Pareto front of accuracy against speed, and the decoding that stands at each of its points.

KEY = "speed_front"  # of generation_config.json


@configuration()
class SpeedPoint:
    """A measured decoding configuration: percent right, and tokens per forward."""

    decoding: Mapping[str, Any]
    accuracy: float
    tpf: float


@dataclass(frozen=True, kw_only=True)
class SpeedFront:
    """Measured points, each faster and less accurate than the point before it, and the tasks of the measurement.

    `speed` runs along their tokens per forward: 0 is the first point, the most accurate; 1 the last, the fastest.
    """

    points: tuple[SpeedPoint, ...]
    tasks: tuple[str, ...] = ()
    num_samples: int = 0

    def __post_init__(self) -> None:
        if not self.points:
            raise ValueError(f"{KEY}: it has no points")
        for slow, fast in zip(self.points, self.points[1:], strict=False):
            if not (slow.tpf < fast.tpf and slow.accuracy > fast.accuracy):
                raise ValueError(
                    f"{KEY}: accuracy {fast.accuracy:g} at {fast.tpf:g} tokens per forward follows accuracy "
                    f"{slow.accuracy:g} at {slow.tpf:g}; each point must be faster and less accurate than the last"
                )

    @property
    def speeds(self) -> list[float]:
        """The speed at which each point stands, rounded to four digits."""
        first, last = self.points[0].tpf, self.points[-1].tpf
        return [round((p.tpf - first) / (last - first), 4) if last > first else 0.0 for p in self.points]

    def at(self, speed: float) -> tuple[float, SpeedPoint]:
        """The speed of the point nearest to `speed`, and the point. Of two equally near points it is the slower."""
        return min(zip(self.speeds, self.points, strict=True), key=lambda pair: (abs(pair[0] - speed), pair[0]))

    def health_fields(self) -> dict[str, Any]:
        """The front as `/health` names it."""
        points = [{"speed": s, **asdict(p)} for s, p in zip(self.speeds, self.points, strict=True)]
        return {"tasks": list(self.tasks), "num_samples": self.num_samples, "points": points}

    def generation_fields(self) -> dict[str, Any]:
        """The front as `generation_config.json` holds it, under `KEY`."""
        return {"tasks": list(self.tasks), "num_samples": self.num_samples, "points": [asdict(p) for p in self.points]}


def read_front(generation: Mapping[str, Any], *, block_size: int) -> SpeedFront | None:
    """The front in a `generation_config.json`, `None` if it has none.

    Raises `ValueError` if the value is no front, or if the model cannot honour a decoding in it.
    """
    front = generation.get(KEY)
    if front is None:
        return None
    if not isinstance(front, Mapping) or not isinstance(front.get("points"), list):
        raise ValueError(f"{KEY} must be an object with a list of points; write it with jobs/report_sweep.py front")
    points = []
    for number, point in enumerate(front["points"]):
        numbers = [point.get(name) for name in ("accuracy", "tpf")] if isinstance(point, Mapping) else []
        if not numbers or any(isinstance(n, bool) or not isinstance(n, int | float) for n in numbers):
            raise ValueError(f"{KEY}.points.{number}: needs the numbers accuracy and tpf, and decoding")
        if not isinstance(point.get("decoding"), Mapping):
            raise ValueError(f"{KEY}.points.{number}: decoding must be an object")
        try:
            decoding_config(generation, point["decoding"], block_size=block_size)
        except ValueError as error:
            raise ValueError(f"{KEY}.points.{number}: {error}") from None
        points.append(load(SpeedPoint, point, path=f"{KEY}.points.{number}."))
    return SpeedFront(
        points=tuple(points), tasks=tuple(front.get("tasks", ())), num_samples=int(front.get("num_samples", 0))
    )


def pareto_points(candidates: Iterable[SpeedPoint]) -> tuple[SpeedPoint, ...]:
    """The Pareto front, the slowest point first: of any two points, one is faster and the other more accurate."""
    front: list[SpeedPoint] = []
    for point in sorted(candidates, key=lambda p: (-p.tpf, -p.accuracy)):
        if not front or point.accuracy > front[-1].accuracy:
            front.append(point)
    return tuple(reversed(front))
