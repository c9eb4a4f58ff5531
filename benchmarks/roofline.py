"""The least time a decode step can take on a machine, counted from the model, and which experts a step touches.

The count has only the work that no implementation avoids: one read of every weight in use, one read of the prefix's
keys and values for each sequence, one write and one read of the buffer's, and the multiplications. Activations and
logits are not counted: a perfect kernel keeps them on the chip.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from mbd_core.models.decoder import Decoder
from mbd_core.models.flops import head_flops, matrix_flops, pair_flops
from mbd_core.models.mlp import MoE, Router, with_shared
from mbd_core.models.model_config import ModelConfig, MoEConfig
from mbd_core.ops.machine import best_seconds, measure_flops


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """The bytes that one decode step must move and its floating-point operations (two for each multiply-add)."""

    weight_bytes: float
    kv_bytes: float
    flops: float

    @property
    def bytes(self) -> float:
        return self.weight_bytes + self.kv_bytes


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The measured speed of a device: bytes and floating-point operations a second."""

    bandwidth: float
    flops: float


def distinct_experts(num_experts: int, per_token: int, tokens: float) -> float:
    """The mean number of experts that T tokens use if each picks K of E at random: E (1 - (1 - K/E)^T)."""
    return num_experts * (1.0 - (1.0 - per_token / num_experts) ** tokens)


class ForwardCost:
    """The cost of one model's forwards, as a function of their load; the sums over layers are made once.

    `matrix_bytes` and `expert_bytes` are the bytes of one weight in the layers' matrices and in the experts, by
    default `dtype_bytes` (1 for FP8). `ranks` share heads, MLPs, experts and the vocabulary's rows; the cost is one
    rank's. Raises `ValueError` for sizes that do not divide among the ranks, and for Gemma's layers.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype_bytes: float = 2,
        matrix_bytes: float | None = None,
        expert_bytes: float | None = None,
        ranks: int = 1,
    ) -> None:
        if config.gemma is not None:
            raise ValueError(f"the cost of {config.architecture} is not known: Gemma's layers are not counted")
        config = config.sharded(ranks)
        matrix_bytes = dtype_bytes if matrix_bytes is None else matrix_bytes
        expert_bytes = dtype_bytes if expert_bytes is None else expert_bytes
        d, c, moe = config.hidden_size, config.head_dim, config.moe
        attention = d * c * (2 * config.num_heads + 2 * config.num_kv_heads)
        num_sparse = sum(config.is_sparse(layer) for layer in range(config.num_layers))
        dense = (config.num_layers - num_sparse) * 3 * d * config.intermediate_size
        self._moe, self._embedding_bytes = moe, d * dtype_bytes
        self._every_bytes = (config.num_layers * attention + dense) * matrix_bytes
        self._one_expert_bytes = 0.0
        if moe is not None:
            self._every_bytes += num_sparse * (
                d * moe.num_experts * dtype_bytes + 3 * d * moe.shared_size * matrix_bytes
            )
            self._one_expert_bytes = num_sparse * 3 * d * moe.intermediate_size * expert_bytes
        self._head_bytes = config.vocab_size * d * dtype_bytes / ranks
        self.token_flops, self.score_flops = matrix_flops(config), pair_flops(config)
        self.logit_flops = head_flops(config) / ranks
        self.kv_token_bytes = 2 * config.num_layers * config.num_kv_heads * c * dtype_bytes
        """Bytes of one token's keys and values."""
        experts = 0.0 if moe is None else moe.num_experts * self._one_expert_bytes
        tables = self._head_bytes * (1 if config.tie_word_embeddings else 2)
        self.stored_bytes = self._every_bytes + experts + tables
        """Bytes of all weights but norms and biases."""

    def of(
        self,
        *,
        tokens: float,
        scores: float,
        kv_tokens: float,
        logit_tokens: float,
        live_tokens: float | None = None,
        touched_experts: float | None = None,
    ) -> StepCost:
        """The cost of a forward over `tokens`, in which queries meet keys `scores` times and `kv_tokens` of keys and
        values are read or written.

        `logit_tokens` is the number of positions with logits. Of the tokens `live_tokens` choose experts (default:
        all). `touched_experts` is the counted number of experts that a layer's tokens use. The default is the mean for
        independent choices; a router's choices need not be independent.
        """
        weight_bytes = self._every_bytes + tokens * self._embedding_bytes + (self._head_bytes if logit_tokens else 0)
        if self._moe is not None:
            live = tokens if live_tokens is None else live_tokens
            expected = distinct_experts(self._moe.num_experts, self._moe.experts_per_token, live)
            weight_bytes += self._one_expert_bytes * (expected if touched_experts is None else touched_experts)
        return StepCost(
            weight_bytes=weight_bytes,
            kv_bytes=self.kv_token_bytes * kv_tokens,
            flops=tokens * self.token_flops + scores * self.score_flops + logit_tokens * self.logit_flops,
        )


def step_cost(
    config: ModelConfig,
    *,
    rows: int,
    buffer_size: int,
    prefix: int,
    block_size: int | None = None,
    dtype_bytes: float = 2,
    matrix_bytes: float | None = None,
    expert_bytes: float | None = None,
    logit_tokens: int | None = None,
    touched_experts: float | None = None,
) -> StepCost:
    """The cost of one step of `rows` sequences with `buffer_size` slots each after `prefix` stored tokens.

    `block_size` is by default the model's; `logit_tokens` by default all of the buffer. `ForwardCost` describes the
    other arguments. Raises `ValueError` for counts that are not positive.
    """
    block = config.block_size if block_size is None else block_size
    if min(rows, buffer_size, block) < 1 or prefix < 0:
        raise ValueError(
            f"rows={rows}, buffer_size={buffer_size}, block_size={block} must be at least 1, prefix={prefix} 0 or more"
        )
    tokens = rows * buffer_size * block
    cost = ForwardCost(config, dtype_bytes=dtype_bytes, matrix_bytes=matrix_bytes, expert_bytes=expert_bytes)
    return cost.of(
        tokens=tokens,
        # slot i of a sequence attends to the prefix and slots 0..i
        scores=sum(prefix + (slot + 1) * block for slot in range(buffer_size)) * block * rows,
        kv_tokens=rows * prefix + 2 * tokens,
        logit_tokens=tokens if logit_tokens is None else logit_tokens,
        touched_experts=touched_experts,
    )


def floor_seconds(cost: StepCost, machine: Machine) -> float:
    """The least time of a step: the larger of the times for its bytes and for its operations."""
    return max(cost.bytes / machine.bandwidth, cost.flops / machine.flops)


def measure_bandwidth(device: torch.device, *, num_bytes: int | None = None, repeats: int = 5) -> float:
    """Bytes a second between the device's memory and its cores: the best of a sum (1 pass), a copy (2 passes) and a
    triad (3 passes). The sum only reads, as a decode step almost does.

    Arrays of `num_bytes` each, by default 1 GiB on CUDA and 128 MiB elsewhere; three of them must fit.
    """
    if num_bytes is None:
        num_bytes = 2**30 if device.type == "cuda" else 2**27
    a, b, c = (torch.ones(num_bytes // 4, device=device) for _ in range(3))
    copy = 2 * num_bytes / best_seconds(lambda: a.copy_(b), device, repeats)
    triad = 3 * num_bytes / best_seconds(lambda: torch.add(b, c, alpha=3.0, out=a), device, repeats)
    read = num_bytes / best_seconds(lambda: torch.sum(a), device, repeats)
    return max(read, copy, triad)


def measure_machine(device: torch.device, dtype: torch.dtype) -> Machine:
    """Measure both speeds of this device."""
    return Machine(bandwidth=measure_bandwidth(device), flops=measure_flops(device, dtype))


# Routers with random weights choose alike for most tokens, so they touch far fewer experts than independent draws
# would. A floor that assumes independent draws then lies above the step's real reads. Hence experts are counted on the
# device, and `UniformRouter` touches them evenly.
def moe_layers(model: Decoder) -> list[MoE]:
    """The layers with experts, in their order."""
    return [layer for layer in model.model.modules() if isinstance(layer, MoE)]


@contextmanager
def counted_experts(model: Decoder) -> Iterator[Callable[[], float | None]]:
    """In the block every eager forward counts its experts. The yielded function gives the mean number of experts that
    a layer touched in a forward so far, `None` without such a forward. The counts stay on the device until it is
    called.
    """
    counts: list[Tensor] = []

    def count(num_experts: int, module: nn.Module, arguments: object, choice: tuple[Tensor, Tensor]) -> None:
        ids_TK, _ = choice
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

    It touches the same number of experts as independent draws, whatever the weights are. All chosen experts have the
    same weight. The router itself runs too, and its choice is dropped: a step costs one operation more than with the
    router alone.
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
            no_expert = torch.tensor(self.config.num_experts + num_shared, device=device)
            self.register_buffer(f"nobody_{num_shared}", no_expert)

    def forward(self, x_TD: Tensor, live_T: Tensor | None = None, num_shared: int = 0) -> tuple[Tensor, Tensor]:
        """The same as `Router.forward`; `num_shared` is 0 or all."""
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
