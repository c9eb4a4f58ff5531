"""The optimizers of a run: AdamW on everything, or Muon on the layers' matrices and AdamW on the rest."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz

from mbd_core.models.decoder import Decoder
from mbd_core.multitf.config import OptimizerName
from mbd_core.multitf.step.sharding import cut_like, whole
from mbd_core.ops.machine import computes_bfloat16


class ShardedMuon(torch.optim.Muon):
    """Muon for matrices that may be sharded. The momentum stays sharded; each update is computed on whole matrices.

    The orthogonalisation (Newton-Schulz) needs a whole matrix. Each matrix is gathered once a step, and every worker
    computes the matrix's update and applies its own part. Without sharding the updates equal `torch.optim.Muon`'s,
    except for the precision of the orthogonalisation (`orthogonalised`).
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        return None

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        gradient, state, momentum = parameter.grad, self.state[parameter], group["momentum"]
        assert gradient is not None
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        buffer = state["momentum_buffer"]
        buffer.lerp_(gradient, 1 - momentum)
        target = gradient.lerp(buffer, momentum) if group["nesterov"] else buffer
        update = orthogonalised(whole(target), group["ns_coefficients"], num_steps=group["ns_steps"], eps=group["eps"])
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        scale = _adjust_lr(group["lr"], group["adjust_lr_fn"], parameter.shape)
        parameter.add_(cut_like(update, parameter), alpha=-scale)


def orthogonalised(matrix: Tensor, coefficients: Sequence[float], *, num_steps: int, eps: float) -> Tensor:
    """Muon's Newton-Schulz iteration: in bfloat16, as in torch, where the device computes bfloat16, else in float32.

    A CPU that emulates bfloat16 would spend most of an update in these products.
    """
    a, b, c = coefficients
    if computes_bfloat16(matrix.device):
        return _zeropower_via_newtonschulz(matrix, (a, b, c), num_steps, eps)
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = (matrix.T if is_tall else matrix).float()
    x = x / x.norm().clamp(min=eps)
    for _ in range(num_steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


def make_optimizers(
    model: Decoder, name: OptimizerName, *, lr: float, weight_decay: float, betas: tuple[float, float]
) -> list[torch.optim.Optimizer]:
    """The optimizers of the model's trained parameters, sharded or not. The parameters must not move afterwards."""
    parameters = trained_parameters(model)
    if name == "adamw":
        is_fused = next(iter(parameters.values())).device.type == "cuda"
        return [
            torch.optim.AdamW(
                list(parameters.values()), lr=lr, betas=betas, weight_decay=weight_decay, fused=is_fused
            ),
        ]
    matrices = [p for n, p in parameters.items() if is_muons(n, p)]
    adamw_parameters = [p for n, p in parameters.items() if not is_muons(n, p)]
    optimizers: list[torch.optim.Optimizer] = []
    if matrices:
        muon = ShardedMuon(matrices, lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")
        optimizers.append(muon)
    if adamw_parameters:
        optimizers.append(torch.optim.AdamW(adamw_parameters, lr=lr, betas=betas, weight_decay=0.0))
    return optimizers


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The trained parameters, each once, by name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def is_muons(name: str, parameter: Tensor) -> bool:
    """Whether Muon updates this parameter: a matrix of a layer. Stacked experts have three dimensions."""
    return parameter.ndim == 2 and "model.layers" in name
