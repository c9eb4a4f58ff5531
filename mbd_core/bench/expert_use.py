"""Which experts a step touches: counted on the device, and a routing under which they are touched evenly.

Routers with random weights choose alike for most tokens: they touch far fewer experts than as many independent draws
would. A floor that assumes independent draws then lies above what the step must read.

Shape legend: T tokens, K experts a token, E experts.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from mbd_core.models.decoder import Decoder
from mbd_core.models.model_config import MoEConfig
from mbd_core.models.moe import MoE, Router


def moe_layers(model: Decoder) -> list[MoE]:
    """The layers with experts, in their order."""
    return [layer for layer in model.model.modules() if isinstance(layer, MoE)]


@contextmanager
def counted_experts(model: Decoder) -> Iterator[Callable[[], float | None]]:
    """Inside, every eager forward counts. The function gives the mean number of experts that a layer touched in it,
    `None` where no layer has experts; the counts stay on the device until it is called.
    """
    counts: list[Tensor] = []

    def count(num_experts: int, module: nn.Module, arguments: object, chosen: tuple[Tensor, Tensor]) -> None:
        ids_TK, _ = chosen
        touched_E = torch.zeros(num_experts + 1, dtype=torch.int64, device=ids_TK.device)
        touched_E[ids_TK.flatten()] = 1  # the last one is of tokens that go to no expert
        counts.append(touched_E[:num_experts].sum())

    hooks = [
        layer.gate.register_forward_hook(partial(count, layer.gate.config.num_experts)) for layer in moe_layers(model)
    ]
    try:
        yield lambda: float(torch.stack(counts).float().mean()) if counts else None
    finally:
        for hook in hooks:
            hook.remove()


class UniformRouter(nn.Module):
    """Stands in a router's place: the t-th token of a forward has K experts that were drawn once, evenly.

    It touches as many experts as independent draws do, whatever the weights are. All chosen experts count alike.
    """

    def __init__(self, like: "Router | UniformRouter", *, num_tokens: int, seed: int) -> None:
        super().__init__()
        self.config: MoEConfig = like.config
        device = next(iter(like.state_dict().values())).device
        generator = torch.Generator().manual_seed(seed)
        scores_TE = torch.rand(num_tokens, self.config.num_experts, generator=generator)
        ids_TK = scores_TE.topk(self.config.experts_per_token).indices
        self.register_buffer("ids_TK", ids_TK.to(device))
        share = self.config.routed_scaling / self.config.experts_per_token
        self.register_buffer("weights_TK", torch.full(ids_TK.shape, share, device=device))

    def forward(self, x_TD: Tensor, live_T: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Expert ids (T, K) and their float32 weights (T, K); tokens that are not `live_T` go to no expert."""
        tokens = len(x_TD)
        ids_TK = self.get_buffer("ids_TK")[:tokens]
        if live_T is not None:
            ids_TK = ids_TK.masked_fill(~live_T[:, None], self.config.num_experts)
        return ids_TK, self.get_buffer("weights_TK")[:tokens]


def route_uniformly(model: Decoder, *, num_tokens: int, seed: int = 0) -> Decoder:
    """Give every layer a `UniformRouter` for forwards of at most `num_tokens`; returns the model."""
    for number, layer in enumerate(moe_layers(model)):
        layer.gate = UniformRouter(layer.gate, num_tokens=num_tokens, seed=seed + number)  # type: ignore[assignment]
    return model
