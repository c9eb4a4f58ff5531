"""Muon's orthogonalisation: torch's own where bfloat16 is computed, the same iteration in float32 elsewhere."""

import pytest
import torch
from torch.optim._muon import _zeropower_via_newtonschulz

from mbd_core.multitf.step import optimizers
from mbd_core.multitf.step.optimizers import orthogonalised

COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def matrix(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("shape", [(24, 64), (64, 24), (32, 32)])
def test_in_float32_it_is_torch_s_iteration_without_its_rounding(
    shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimizers, "computes_bfloat16", lambda device: False)
    update = orthogonalised(matrix(*shape), COEFFICIENTS, num_steps=5, eps=1e-7)
    rounded = _zeropower_via_newtonschulz(matrix(*shape), COEFFICIENTS, 5, 1e-7)
    assert update.dtype == torch.float32
    torch.testing.assert_close(update, rounded.float(), atol=0.03, rtol=0)
    singular = torch.linalg.svdvals(update)
    assert singular.min() > 0.3 and singular.max() < 1.3


def test_a_device_with_bfloat16_takes_torch_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizers, "computes_bfloat16", lambda device: True)
    update = orthogonalised(matrix(16, 8), COEFFICIENTS, num_steps=5, eps=1e-7)
    assert torch.equal(update, _zeropower_via_newtonschulz(matrix(16, 8), COEFFICIENTS, 5, 1e-7))
