"""The settings of each batch row's request, one column a setting, and the positions of its blocks.

All columns are in two tensors, so that seating a request takes two copies to the device.

Shape legend: R rows, I whole-number columns, F real-number columns.
"""

import copy

import torch
from torch import Tensor

from mbd_core.decoding.blocks.acceptance import ENTROPY_RULES, FALLBACKS
from mbd_core.decoding.blocks.arrays import array_of
from mbd_core.decoding.blocks.request import Request

_WHOLE = (
    "first_block",
    "origin",
    "begin",
    "end",
    "limit",
    "kept",
    "quota",
    "entropy_rule",
    "fallback",
    "eos_stops",
    "sub_block",
    "carries",
    "edits",
    "max_edits",
    "softens",
    "top_k",
    "seed",
    "forward",
)
_REAL = (
    "tau_add",
    "tau_stable",
    "tau_semi",
    "tau_m2t",
    "gamma",
    "tau_t2t",
    "stop_confidence",
    "temperature",
    "top_p",
)
_NEVER = 2.0  # a threshold that no confidence exceeds
_ALWAYS = -1.0  # a threshold that every confidence exceeds


class RowSettings:
    """The settings of each row, all 0 in a free row. The commit of a step advances `first_block` and `forward`.

    first_block  index of the block in slot 0
    origin       position at which block 0 begins
    begin, end   positions [begin, end) may be filled: from the prompt's end to the end of the token budget, or where
                 tokens come and go, of its last block
    limit        the request's buffer size
    kept         how many of these blocks a busy engine leaves it: 1, or all if the request is not adaptive
    forward      forwards that the row took part in; the noise of drawn tokens depends on it

    The others are the fields of `DecodingConfig` and `Sampling`. A threshold of a part that is off has a value that no
    confidence exceeds, or one that every confidence exceeds.
    """

    first_block_R: Tensor
    origin_R: Tensor
    begin_R: Tensor
    end_R: Tensor
    limit_R: Tensor
    kept_R: Tensor
    quota_R: Tensor
    entropy_rule_R: Tensor
    fallback_R: Tensor
    eos_stops_R: Tensor
    sub_block_R: Tensor
    carries_R: Tensor
    edits_R: Tensor
    max_edits_R: Tensor
    softens_R: Tensor
    top_k_R: Tensor
    seed_R: Tensor
    forward_R: Tensor
    tau_add_R: Tensor
    tau_stable_R: Tensor
    tau_semi_R: Tensor
    tau_m2t_R: Tensor
    gamma_R: Tensor
    tau_t2t_R: Tensor
    stop_confidence_R: Tensor
    temperature_R: Tensor
    top_p_R: Tensor

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self._view(
            torch.zeros((num_rows, len(_WHOLE)), dtype=torch.int64, device=device),
            torch.zeros((num_rows, len(_REAL)), dtype=torch.float64, device=device),
        )

    def _view(self, whole_RI: Tensor, real_RF: Tensor) -> None:
        """Make every setting a view of its column."""
        self.columns = (whole_RI, real_RF)
        for names, values in zip((_WHOLE, _REAL), self.columns, strict=True):
            for column, name in enumerate(names):
                setattr(self, f"{name}_R", values[:, column])

    @property
    def places(self) -> dict[str, int]:
        """The column of each setting, in its own one of the two tensors."""
        return {name: column for names in (_WHOLE, _REAL) for column, name in enumerate(names)}

    def head(self, num_rows: int) -> "RowSettings":
        """The first `num_rows` rows over the same memory."""
        view = copy.copy(self)
        view._view(*(values[:num_rows] for values in self.columns))
        return view

    @property
    def host(self) -> "RowSettings":
        """On a CPU, the same as numpy arrays of the same memory; else itself."""
        if not self.columns[0].is_cpu:
            return self
        view = copy.copy(self)
        view._view(*map(array_of, self.columns))
        return view

    def write(self, row: int, request: Request, *, block_size: int) -> None:
        """Write a request's settings into a row; `first_block` is its boundary block."""
        config, sampling, length = request.decoding, request.sampling, len(request.prompt)
        origin, begin = config.grid_origin(length), length + len(request.committed)
        end = length + request.max_tokens
        if config.edit is not None:  # tokens move across the budget's end
            end = -(-end // block_size) * block_size
        whole = {
            "first_block": (request.first_block_start(begin) - origin) // block_size,
            "origin": origin,
            "begin": begin,
            "end": end,
            "limit": config.buffer_size,
            "kept": 1 if config.adaptive else config.buffer_size,
            "quota": config.tokens_per_step,
            "entropy_rule": ENTROPY_RULES[config.entropy.rule] if config.entropy else 0,
            "fallback": FALLBACKS[config.ranking],
            "eos_stops": not request.ignore_eos,
            "sub_block": config.sub_block or block_size,
            "carries": request.carries,
            "edits": config.t2t is not None or config.edit is not None,
            "max_edits": config.t2t.max_edits if config.t2t else 0,
            "softens": config.soft is not None,
            "top_k": sampling.top_k,
            "seed": sampling.seed,
            "forward": request.first_forward,
        }
        real = {
            "tau_add": config.tau_add,
            "tau_stable": _ALWAYS if config.tau_stable is None else config.tau_stable,
            "tau_semi": config.tau_semi,
            "tau_m2t": config.tau_m2t,
            "gamma": config.entropy.gamma if config.entropy else 0.0,
            "tau_t2t": config.t2t.tau if config.t2t else _ALWAYS if config.soft else _NEVER,
            "stop_confidence": config.soft.stop_confidence if config.soft else _NEVER,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
        }
        whole_RI, real_RF = self.columns
        whole_RI[row] = torch.tensor([whole[name] for name in _WHOLE])
        real_RF[row] = torch.tensor([real[name] for name in _REAL], dtype=torch.float64)

    def clear(self, row: int) -> None:
        for values in self.columns:
            values[row] = 0
