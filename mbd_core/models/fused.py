"""The inference form of a decoder: the same numbers from fewer, larger operations.

Its layers are `FusedLayer`s or, on a GPU with Triton, `KernelLayer`s. Weights are joined in memory; only the gains of
the heads' norms are stored twice. The decoder itself still loads, saves and runs.

Shape legend: T packed tokens, D hidden.
"""

import torch
from torch import Tensor

from mbd_core.models.decoder import Decoder, DecoderLayer
from mbd_core.models.fused_layer import FusedLayer, Norm, Rotations, fusible
from mbd_core.models.kernel_layer import KernelLayer, PagedAttend, Stream
from mbd_core.models.layer_parts import Attend
from mbd_core.models.lora import TokenAdapters
from mbd_core.models.rope import rotary
from mbd_core.ops.launch import triton_serves


def fuse(model: Decoder, *, num_positions: int, kernels: bool | None = None) -> "FusedDecoder":
    """The inference form of `model`, for positions below `num_positions`.

    `kernels` chooses the Triton kernels of `KernelLayer`; `None` uses them where they run. Parameters of `model` move
    in memory: the parameters of one product become adjacent. A second call moves nothing. The peak memory is the model
    and one layer's joint weights. After weights are replaced, cast or moved to another device, the model must be fused
    again. After weights are overwritten in place, `FusedDecoder.refresh` is enough.
    """
    with torch.inference_mode(False), torch.no_grad():
        return FusedDecoder(model, num_positions=num_positions, kernels=kernels)


class FusedDecoder:
    """A decoder's forward over packed tokens. Layers with FP8 products are not fused and run as in the decoder."""

    def __init__(self, model: Decoder, *, num_positions: int, kernels: bool | None = None) -> None:
        self.decoder = model
        weights = model.model.norm.weight
        self._kernels = triton_serves(weights.device, weights.dtype) if kernels is None else kernels
        form = KernelLayer if self._kernels else FusedLayer
        layers = [layer for layer in model.model.layers if isinstance(layer, DecoderLayer)]
        self._layers = [form(layer, model) if fusible(layer) else layer for layer in layers]
        self._norm = Norm.of(model.model.norm)
        self._rotations = Rotations(model.config, num_positions, weights)

    @property
    def has_kernel_layers(self) -> bool:
        return any(isinstance(layer, KernelLayer) for layer in self._layers)

    @torch.no_grad()
    def refresh(self) -> None:
        """Copies the gains of the heads' norms again, after the decoder's weights were overwritten in place."""
        for layer in self._layers:
            if isinstance(layer, FusedLayer):
                layer.refresh()

    @torch.inference_mode()
    def forward(
        self,
        input_ids_T: Tensor,
        positions_T: Tensor,
        attend: Attend,
        *,
        soft_weight: Tensor | None = None,
        adapters: TokenAdapters | None = None,
        live: Tensor | None = None,
    ) -> Tensor:
        """Final hidden states (T, D), equal to those of `Decoder.forward` except for rounding.

        Tokens that are not `live` (T) go to no expert and so read no expert's weights. Their results are undefined.
        """
        x_TD = self.decoder.embed(input_ids_T, soft_weight)
        if self._kernels:
            return self._by_kernels(x_TD, positions_T, attend, adapters, live)
        rotation = self._rotations.at(positions_T)
        for index, layer in enumerate(self._layers):
            if isinstance(layer, FusedLayer):
                x_TD = layer.forward(x_TD, rotation, attend, index, adapters, live)
            else:
                x_TD = self._whole_layer(layer, x_TD, positions_T, attend, index, adapters)
        return self._norm(x_TD)

    def _by_kernels(
        self, x_TD: Tensor, positions_T: Tensor, attend: Attend, adapters: TokenAdapters | None, live: Tensor | None
    ) -> Tensor:
        """The layers and the last norm, by kernels. A norm's kernel also adds the last sum of the layer before."""
        stream = Stream(x_TD)
        for index, layer in enumerate(self._layers):
            if isinstance(layer, KernelLayer):
                assert isinstance(attend, PagedAttend), "kernels write keys into a cache"
                stream = layer.advance(stream, self._rotations, positions_T, attend, index, adapters, live)
            else:
                assert isinstance(layer, DecoderLayer)
                x_TD = self._whole_layer(layer, stream.total(), positions_T, attend, index, adapters)
                stream = Stream(x_TD)
        return stream.normed(self._norm)[1]

    def _whole_layer(
        self,
        layer: DecoderLayer,
        x_TD: Tensor,
        positions_T: Tensor,
        attend: Attend,
        index: int,
        adapters: TokenAdapters | None,
    ) -> Tensor:
        """A layer that is not fused."""
        rope = rotary(positions_T, self.decoder.config)
        (x_TD,) = layer([x_TD], rope, attend, index, None, self.decoder.reduce, adapters)
        return x_TD
