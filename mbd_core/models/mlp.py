"""The dense MLP of a decoder layer: SwiGLU."""

from torch import Tensor, nn
from torch.nn import functional as F


class SwiGLU(nn.Module):
    """`down(silu(gate x) * up x)` on (..., D); `width` is the inner size."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, width, bias=False)
        self.up_proj = nn.Linear(hidden, width, bias=False)
        self.down_proj = nn.Linear(width, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
