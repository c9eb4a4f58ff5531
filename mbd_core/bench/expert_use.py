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
from mbd_core.models.moe import MoE, Router, with_shared


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
        touched_E[ids_TK.flatten().clamp(max=num_experts)] = 1  # the last one: shared experts, and no expert
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

    It touches as many experts as independent draws do, whatever the weights are. All chosen experts count alike. The
    router itself runs too, and its choice is dropped: so a step costs what it does with the router, and one operation.
    """

    def __init__(self, like: "Router | UniformRouter", *, num_tokens: int, seed: int) -> None:
        super().__init__()
        self.config: MoEConfig = like.config
        self._router: Router = like._router if isinstance(like, UniformRouter) else like
        device = next(iter(like.state_dict().values())).device
        generator = torch.Generator().manual_seed(seed)
        scores_TE = torch.rand(num_tokens, self.config.num_experts, generator=generator)
        ids_TK = scores_TE.topk(self.config.experts_per_token).indices
        share = self.config.routed_scaling / self.config.experts_per_token
        weights_TK = torch.full(ids_TK.shape, share)
        for num_shared in {0, self.config.num_shared_experts}:
            joint = with_shared(ids_TK, weights_TK, self.config.num_experts, num_shared)
            for name, tensor in zip(("ids", "weights"), joint, strict=True):
                self.register_buffer(f"{name}_{num_shared}", tensor.to(device))
            nobody = torch.tensor(self.config.num_experts + num_shared, device=device)
            self.register_buffer(f"nobody_{num_shared}", nobody)

    def forward(self, x_TD: Tensor, live_T: Tensor | None = None, num_shared: int = 0) -> tuple[Tensor, Tensor]:
        """As `Router.forward`; `num_shared` is 0 or all."""
        tokens = len(x_TD)
        self._router(x_TD, live_T, num_shared)
        ids_TK = self.get_buffer(f"ids_{num_shared}")[:tokens]
        if live_T is not None:
            ids_TK = torch.where(live_T[:, None], ids_TK, self.get_buffer(f"nobody_{num_shared}"))
        return ids_TK, self.get_buffer(f"weights_{num_shared}")[:tokens]


def route_uniformly(model: Decoder, *, num_tokens: int, seed: int = 0) -> Decoder:
    """Give every layer a `UniformRouter` for forwards of at most `num_tokens`; returns the model."""
    for number, layer in enumerate(moe_layers(model)):
        layer.gate = UniformRouter(layer.gate, num_tokens=num_tokens, seed=seed + number)  # type: ignore[assignment]
    return model
