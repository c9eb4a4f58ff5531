"""The differences that rounding makes in logits are counted as they are defined."""

import pytest
import torch

from benchmarks.fp8 import logit_error


def test_logit_error_counts_what_changed() -> None:
    wide = torch.tensor([[1.0, 2.0, 0.0], [3.0, 1.0, 0.0]])
    error = logit_error(wide, torch.tensor([[2.5, 2.0, 0.0], [3.0, 1.0, 0.0]]))
    assert (error.max_abs, error.mean_abs, error.top1_agreement, error.positions) == (1.5, 0.25, 0.5, 2)
    with pytest.raises(ValueError, match="not of the same positions"):
        logit_error(wide, wide[:1])
