"""The MLPs of a decoder layer: dense SwiGLU, and the mixture of experts with its router and shared experts.

`Router` covers three routers: LLaDA2's grouped sigmoid router, whose offset changes the choice of experts but not
their weights; LLaDA2.2's router, which chooses for a whole block; and the softmax router of SDAR-MoE (Qwen3-MoE). All
compute in float32, whatever the model's dtype.

Shape legend: T tokens, D hidden, E experts, G groups, K experts a token, F expert width, S shared experts, N blocks,
B block size.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mbd_core.models.layer_parts import together
from mbd_core.models.lora import Adapt, adapted
from mbd_core.models.model_config import ModelConfig, MoEConfig
from mbd_core.ops.experts.choice import ExpertsKernel, resolve_experts
from mbd_core.ops.experts.expert_products import SharedExperts, expert_parts
from mbd_core.ops.launch import triton_serves
from mbd_core.ops.layer.residual_norm import ExpertParts
from mbd_core.ops.layer.router import route


class SwiGLU(nn.Module):
    """`down(silu(gate x) * up x)` on (..., D); `width` is the inner size."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, width, bias=False)
        self.up_proj = nn.Linear(hidden, width, bias=False)
        self.down_proj = nn.Linear(width, hidden, bias=False)

    def forward(self, x: Tensor, adapt: Adapt | None = None) -> Tensor:
        gate, up = together((self.gate_proj, self.up_proj), x)
        gate, up = adapted(gate, adapt, "gate_proj", x), adapted(up, adapt, "up_proj", x)
        inner = self.act(gate) * up
        return adapted(self.down_proj(inner), adapt, "down_proj", inner)

    @staticmethod
    def act(gate: Tensor) -> Tensor:
        return F.silu(gate)


class Router(nn.Module):
    """Chooses each token's experts and their weights.

    With an `expert_capacity` the tokens must be whole blocks of `block_size`, one after another.
    """

    expert_bias: Tensor

    def __init__(self, hidden: int, config: MoEConfig, *, block_size: int = 1) -> None:
        super().__init__()
        self.config, self.block_size = config, block_size
        self.weight = nn.Parameter(torch.empty(config.num_experts, hidden))
        if config.expert_bias:
            self.register_buffer("expert_bias", torch.zeros(config.num_experts, dtype=torch.float32))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Moves the module, and keeps `expert_bias` in float32: in bfloat16 it would change the choice of experts."""
        original = self.expert_bias if self.config.expert_bias else None
        super()._apply(fn, recurse)
        if original is not None and self.expert_bias.dtype != torch.float32:
            self.expert_bias = original.to(self.expert_bias.device)
        return self

    def check_blocks(self, num_tokens: int) -> None:
        """Raises `ValueError` if the router chooses for whole blocks and the last block is incomplete."""
        if self.config.expert_capacity and num_tokens % self.block_size:
            raise ValueError(
                f"{num_tokens} tokens are no whole number of blocks of {self.block_size} tokens, which choose their "
                "experts together; fill the last block"
            )

    def logits(self, x_TD: Tensor) -> Tensor:
        """Float32 scores (T, E) before sigmoid or softmax."""
        return F.linear(x_TD.float(), self.weight.float())

    def forward(
        self, x_TD: Tensor, live_T: Tensor | None = None, num_shared: int = 0, given_TK: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Expert ids (T, K + S) and their float32 weights (T, K + S).

        The last S = `num_shared` columns are the shared experts, E to E + S - 1. Tokens that are not `live_T` go to
        the sentinel E + S, which is no expert. `given_TK` replaces the choice of ids; this router then only weighs
        them.
        """
        c = self.config
        self.check_blocks(len(x_TD))
        if given_TK is None and torch.is_inference_mode_enabled() and triton_serves(x_TD.device, x_TD.dtype):
            return route(
                product_in_float32(x_TD, self.weight),
                per_token=c.experts_per_token,
                sigmoid=c.score == "sigmoid",
                bias_E=self.expert_bias if c.expert_bias else None,
                num_groups=c.num_groups,
                kept_groups=c.topk_groups,
                normalizes=c.norm_topk_prob and c.experts_per_token > 1,
                scaling=c.routed_scaling,
                num_shared=num_shared,
                live_T=live_T,
                capacity=c.expert_capacity,
                block_size=self.block_size,
            )
        logits_TE = self.logits(x_TD)
        scores_TE = logits_TE.sigmoid() if c.score == "sigmoid" else logits_TE.softmax(dim=-1)
        ids_TK = self._choose(scores_TE) if given_TK is None else given_TK.long()
        weights_TK = scores_TE.gather(-1, ids_TK)
        if c.norm_topk_prob and c.experts_per_token > 1:
            weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + 1e-20)
        weights_TK = weights_TK * c.routed_scaling
        if num_shared:
            ids_TK, weights_TK = with_shared(ids_TK, weights_TK, c.num_experts, num_shared)
        if live_T is not None:
            ids_TK = ids_TK.masked_fill(~live_T[:, None], c.num_experts + num_shared)
        return ids_TK, weights_TK

    def _choose(self, scores_TE: Tensor) -> Tensor:
        """The experts (T, K) of these scores."""
        c = self.config
        choice_TE = scores_TE + self.expert_bias if c.expert_bias else scores_TE
        if c.expert_capacity:
            choice_NBE = choice_TE.unflatten(0, (-1, self.block_size))
            best_NE = choice_NBE.amax(1)
            kept_NE = torch.zeros_like(best_NE, dtype=torch.bool)
            kept_NE = kept_NE.scatter(-1, best_NE.topk(c.expert_capacity, dim=-1).indices, True)
            choice_TE = choice_NBE.masked_fill(~kept_NE[:, None], -torch.inf).flatten(0, 1)
        elif c.num_groups > 1:
            choice_TGe = choice_TE.unflatten(-1, (c.num_groups, -1))
            best_TG = choice_TGe.topk(2, dim=-1).values.sum(-1)
            kept_TG = torch.zeros_like(best_TG, dtype=torch.bool)
            kept_TG = kept_TG.scatter(-1, best_TG.topk(c.topk_groups, dim=-1).indices, True)
            choice_TE = choice_TGe.masked_fill(~kept_TG[..., None], -torch.inf).flatten(-2)
        return choice_TE.topk(c.experts_per_token, dim=-1).indices


@contextmanager
def recorded_experts(model: nn.Module) -> Iterator[list[list[Tensor]]]:
    """Inside it, collects the expert ids (T, K) of each call, one list for each router of `model`, in layer order."""
    routers = [module for module in model.modules() if isinstance(module, Router)]
    calls: list[list[Tensor]] = [[] for _ in routers]

    def watch(own_calls: list[Tensor]) -> Callable[..., None]:
        def keep(router: Router, _: Any, chosen: tuple[Tensor, Tensor]) -> None:
            own_calls.append(chosen[0][:, : router.config.experts_per_token])

        return keep

    handles = [router.register_forward_hook(watch(own)) for router, own in zip(routers, calls, strict=True)]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def with_shared(ids_TK: Tensor, weights_TK: Tensor, num_experts: int, num_shared: int) -> tuple[Tensor, Tensor]:
    """Ids and weights (T, K + S): the chosen experts, then the shared experts with weight 1."""
    shared = torch.arange(num_experts, num_experts + num_shared, device=ids_TK.device).expand(len(ids_TK), -1)
    return torch.cat((ids_TK, shared), 1), torch.cat((weights_TK, torch.ones_like(shared, dtype=torch.float32)), 1)


def product_in_float32(x_TD: Tensor, weight_ED: Tensor) -> Tensor:
    """`x @ weight^T` (T, E) in float32. On CUDA, narrow factors are not widened first."""
    if x_TD.is_cuda and x_TD.dtype == weight_ED.dtype != torch.float32:
        return torch.mm(x_TD, weight_ED.t(), out_dtype=torch.float32)
    return F.linear(x_TD.float(), weight_ED.float())


@functools.cache
def experts_kernel(
    device: torch.device,
    dtype: torch.dtype,
    expert_size: int,
    hidden_size: int,
    *,
    differentiable: bool,
    gelu: bool = False,
) -> ExpertsKernel:
    """`resolve_experts`, cached for each setting. The Triton kernels have no backward pass; the others do."""
    return resolve_experts(
        device,
        dtype,
        expert_size=expert_size,
        hidden_size=hidden_size,
        has_triton=False if differentiable else None,
        gelu=gelu,
    )


def kernel_for(gate_EFD: Tensor) -> ExpertsKernel:
    """The implementation for experts with these weights, in the current autocast and gradient mode."""
    _, width, hidden = gate_EFD.shape
    differentiable = torch.is_grad_enabled()
    return experts_kernel(gate_EFD.device, _product_dtype(gate_EFD), width, hidden, differentiable=differentiable)


def compute_experts(
    x_TD: Tensor, gate_EFD: Tensor, up_EFD: Tensor, down_EDF: Tensor, ids_TK: Tensor, weights_TK: Tensor
) -> Tensor:
    """The weighted experts of each token (T, D), as `ops.experts.loop_experts` defines them."""
    dtype = _product_dtype(x_TD)
    x, gate, up, down = (t.to(dtype) for t in (x_TD, gate_EFD, up_EFD, down_EDF))
    return kernel_for(gate_EFD).call(x, gate, up, down, ids_TK, weights_TK).to(x_TD.dtype)


def _product_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype of `tensor`'s products. Grouped products and kernels do not follow autocast themselves."""
    device = tensor.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else tensor.dtype


class Experts(nn.Module):
    """All experts of a layer as stacked weights, the layout of fused training checkpoints.

    The implementation depends on the device, the dtype (autocast's if it is on) and whether gradients are recorded. In
    some implementations a token's result depends on the other tokens of the call, so a batch-invariant forward makes
    one call per row.
    """

    def __init__(self, hidden: int, config: MoEConfig) -> None:
        super().__init__()
        e, f = config.num_experts, config.intermediate_size
        self.gate_proj = nn.Parameter(torch.empty(e, f, hidden))
        self.up_proj = nn.Parameter(torch.empty(e, f, hidden))
        self.down_proj = nn.Parameter(torch.empty(e, hidden, f))

    def forward(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        return compute_experts(x_TD, self.gate_proj, self.up_proj, self.down_proj, ids_TK, weights_TK)

    def fuses(self, num_assignments: int) -> bool:
        """Whether inference uses the kernels for few tokens with this number of assignments of tokens to experts."""
        return kernel_for(self.gate_proj).fuses(num_assignments, len(self.gate_proj))

    def parts(
        self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, shared: SharedExperts | None = None
    ) -> ExpertParts:
        """The results of `forward` before their sum, with `shared` among the experts. Only if `fuses` is true."""
        stacks = self.gate_proj, self.up_proj, self.down_proj
        return expert_parts(x_TD, *stacks, ids_TK, weights_TK, shared=shared)


class MoE(nn.Module):
    """The sum of each token's weighted experts and of the shared experts, on (..., D)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.moe is not None
        self.gate = Router(config.hidden_size, config.moe, block_size=config.block_size)
        self.experts = Experts(config.hidden_size, config.moe)
        shared = config.moe.shared_size
        self.shared_experts = SwiGLU(config.hidden_size, shared) if shared else None

    def routed(self, x_TD: Tensor, live_T: Tensor | None = None, given_TK: Tensor | None = None) -> Tensor:
        """The weighted experts alone. Tokens that are not `live_T` go to no expert and get zero."""
        given = {} if given_TK is None else {"given_TK": given_TK}
        out_TD: Tensor = self.experts(x_TD, *self.gate(x_TD, live_T, **given))
        return out_TD

    def fuses(self, num_tokens: int) -> bool:
        """Whether inference uses the kernels for few tokens with this number of tokens."""
        return self.experts.fuses(num_tokens * self.gate.config.experts_per_token)

    def parts(self, x_TD: Tensor, live_T: Tensor | None, *, shares: bool) -> ExpertParts:
        """The results of `routed` before their sum; with `shares`, of the whole layer. Only if `fuses` is true."""
        if not shares:
            return self.experts.parts(x_TD, *self.gate(x_TD, live_T))
        mlp = self.shared_experts
        assert mlp is not None
        shared = SharedExperts(mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight)
        ids_TK, weights_TK = self.gate(x_TD, live_T, self.gate.config.num_shared_experts)
        return self.experts.parts(x_TD, ids_TK, weights_TK, shared)

    def forward(self, x: Tensor, adapt: Adapt | None = None, given: Tensor | None = None) -> Tensor:
        """The whole MLP (..., D); `given` (..., K) replaces the router's choice of experts."""
        self.gate.check_blocks(x.shape[-2])  # each sequence alone
        out = self.routed(x.flatten(0, -2), given_TK=None if given is None else given.flatten(0, -2)).view_as(x)
        return out if self.shared_experts is None else out + self.shared_experts(x, adapt)
