"""The settings of each batch row's request: one table, a column a setting.

All columns lie in two tensors, so that seating a request takes two copies to the device.

Shape legend: R rows, I whole-number columns, F real-number columns.
"""

import copy
from collections.abc import Callable

import torch
from torch import Tensor

from mbd_core.decoding.blocks.acceptance import ENTROPY_RULES, FALLBACKS
from mbd_core.decoding.blocks.request import Request

_NEVER = 2.0  # a threshold that no confidence exceeds
_ALWAYS = -1.0  # a threshold that every confidence exceeds


class RowSetting:
    """One column: its name and the value that a request gives its row. `RowSettings` holds the column (R,)."""

    dtype: torch.dtype

    def __init__(self, of: Callable[[Request], float]) -> None:
        self.of = of

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name.removesuffix("_R")

    def __get__(self, settings: object, owner: type) -> Tensor:
        raise AttributeError(f"{self.name} is a column of an instance")


class Whole(RowSetting):
    """A setting that is a whole number or a flag."""

    dtype = torch.int64


class Real(RowSetting):
    """A setting that is a real number: a threshold, a bound or a temperature."""

    dtype = torch.float64


def _end(request: Request) -> int:
    """The end of the token budget; with `edit`, which moves tokens across it, the end of the block that holds it."""
    end, size = len(request.prompt) + request.max_tokens, request.decoding.block_size
    return end if request.decoding.edit is None else -(-end // size) * size


def _first_block(request: Request) -> int:
    c, length = request.decoding, len(request.prompt)
    return (request.first_block_start(length + len(request.committed)) - c.grid_origin(length)) // c.block_size


def _tau_t2t(request: Request) -> float:
    c = request.decoding
    if c.t2t:
        return c.t2t.tau
    return _ALWAYS if c.soft else _NEVER


class RowSettings:
    """The settings of each row, all 0 in a free row. The commit of a step advances `first_block` and `forward`.

    first_block  index of the block in slot 0
    origin       position at which block 0 begins
    begin, end   positions [begin, end) may be filled: from the end of prompt and committed tokens to `_end`
    limit        the request's buffer size
    kept         number of blocks that a busy engine leaves the request: 1, or all if it is not adaptive
    forward      forwards that the row took part in; the noise of drawn tokens depends on it

    The other settings are fields of `DecodingConfig` and `Sampling`. If a part is off, either no confidence or every
    confidence exceeds its threshold.
    """

    first_block_R = Whole(_first_block)
    origin_R = Whole(lambda r: r.decoding.grid_origin(len(r.prompt)))
    begin_R = Whole(lambda r: len(r.prompt) + len(r.committed))
    end_R = Whole(_end)
    limit_R = Whole(lambda r: r.decoding.buffer_size)
    kept_R = Whole(lambda r: 1 if r.decoding.adaptive else r.decoding.buffer_size)
    quota_R = Whole(lambda r: r.decoding.tokens_per_step)
    entropy_rule_R = Whole(lambda r: ENTROPY_RULES[r.decoding.entropy.rule] if r.decoding.entropy else 0)
    fallback_R = Whole(lambda r: FALLBACKS[r.decoding.ranking])
    eos_stops_R = Whole(lambda r: not r.ignore_eos)
    sub_block_R = Whole(lambda r: r.decoding.sub_block or r.decoding.block_size)
    carries_R = Whole(lambda r: r.carries)
    edits_R = Whole(lambda r: r.decoding.t2t is not None or r.decoding.edit is not None)
    max_edits_R = Whole(lambda r: r.decoding.t2t.max_edits if r.decoding.t2t else 0)
    softens_R = Whole(lambda r: r.decoding.soft is not None)
    top_k_R = Whole(lambda r: r.sampling.top_k)
    seed_R = Whole(lambda r: r.sampling.seed)
    forward_R = Whole(lambda r: r.first_forward)
    tau_add_R = Real(lambda r: r.decoding.tau_add)
    tau_stable_R = Real(lambda r: _ALWAYS if r.decoding.tau_stable is None else r.decoding.tau_stable)
    tau_semi_R = Real(lambda r: r.decoding.tau_semi)
    tau_m2t_R = Real(lambda r: r.decoding.tau_m2t)
    gamma_R = Real(lambda r: r.decoding.entropy.gamma if r.decoding.entropy else 0.0)
    tau_t2t_R = Real(_tau_t2t)
    stop_confidence_R = Real(lambda r: r.decoding.soft.stop_confidence if r.decoding.soft else _NEVER)
    temperature_R = Real(lambda r: r.sampling.temperature)
    top_p_R = Real(lambda r: r.sampling.top_p)

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self._view([torch.zeros((num_rows, len(t)), dtype=t[0].dtype, device=device) for t in _TABLES])

    def _view(self, columns: list[Tensor]) -> None:
        """Make every setting a view of its column."""
        self.columns = columns
        for table, values in zip(_TABLES, columns, strict=True):
            for column, setting in enumerate(table):
                vars(self)[f"{setting.name}_R"] = values[:, column]

    def head(self, num_rows: int) -> "RowSettings":
        """The first `num_rows` rows over the same memory."""
        view = copy.copy(self)
        view._view([values[:num_rows] for values in self.columns])
        return view

    def write(self, row: int, request: Request) -> None:
        """Write a request's settings into a row; `first_block` is its boundary block."""
        for table, values in zip(_TABLES, self.columns, strict=True):
            values[row] = torch.tensor([setting.of(request) for setting in table], dtype=values.dtype)

    def clear(self, row: int) -> None:
        for values in self.columns:
            values[row] = 0


_TABLES = [[s for s in vars(RowSettings).values() if isinstance(s, kind)] for kind in (Whole, Real)]
