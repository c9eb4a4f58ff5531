"""The dense MLP of a decoder layer: SwiGLU."""

from torch import Tensor, nn
from torch.nn import functional as F

from mbd_core.models.lora import Adapt, adapted


class SwiGLU(nn.Module):
    """`down(silu(gate x) * up x)` on (..., D); `width` is the inner size."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, width, bias=False)
        self.up_proj = nn.Linear(hidden, width, bias=False)
        self.down_proj = nn.Linear(width, hidden, bias=False)

    def forward(self, x: Tensor, adapt: Adapt | None = None) -> Tensor:
        gate, up = adapted(self.gate_proj(x), adapt, "gate_proj", x), adapted(self.up_proj(x), adapt, "up_proj", x)
        inner = F.silu(gate) * up
        return adapted(self.down_proj(inner), adapt, "down_proj", inner)
