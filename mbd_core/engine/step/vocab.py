"""The likeliest tokens from logits that a GPU reads once, and that ranks may share in parts.

A greedy step needs the likeliest token of each position and its probability. Three numbers a position summarise a
rank's part of the vocabulary for the other ranks, so they cross instead of the logits.

Shape legend: P positions, V vocabulary or a rank's part of it, G ranks.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from mbd_core.decoding.blocks.sampling import Vocab
from mbd_core.models.decoder import Decoder
from mbd_core.models.layer_parts import Reduce
from mbd_core.models.shard import Shard
from mbd_core.ops.layer.confidence import confidence, part_confidence


class FusedVocab(Vocab):
    """`Vocab` for logits on a GPU: they are read once."""

    def likeliest(self, logits_PV: Tensor) -> tuple[Tensor, Tensor]:
        return confidence(logits_PV, mask_token_id=self.mask_token_id, size=self.size)


@dataclass(frozen=True)
class PartVocab(Vocab):
    """`Vocab` for ranks that share its logits: all call `likeliest` together, and get the same answer to the bit.

    It takes the logits of this rank's `part` of the ids, or of all ids, and reads its part of either; the answer is
    the same.

    reduce  sums a tensor over the ranks
    fused   whether the logits are on a GPU, which reads them once
    """

    part: range
    shard: Shard
    reduce: Reduce
    fused: bool

    def likeliest(self, logits_PV: Tensor) -> tuple[Tensor, Tensor]:
        if logits_PV.shape[-1] != len(self.part):
            logits_PV = logits_PV[:, self.part.start : self.part.stop]
        place_P, logit_P, lse_P = self._likeliest_of_part(logits_PV)
        # Token ids are below 2^24, so exact in float32; a sum with zeros changes nothing.
        shared_G3P = logit_P.new_zeros((self.shard.size, 3, len(logit_P)))
        torch.stack(((place_P + self.part.start).float(), logit_P, lse_P), out=shared_G3P[self.shard.rank])
        token_GP, logit_GP, lse_GP = self.reduce(shared_G3P).unbind(1)
        best_P = logit_GP.amax(0)
        # The lowest id among equals. If all are NaN no id is equal, and any id in range will do.
        token_P = torch.where(logit_GP == best_P, token_GP, torch.inf).amin(0).clamp(max=self.size - 1)
        return token_P.long(), (best_P - lse_GP.logsumexp(0)).exp()

    def _likeliest_of_part(self, logits_PV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The likeliest place (P,) of this part, its logit, and the log-sum-exp of the part (`part_confidence`)."""
        mask, size = self.mask_token_id - self.part.start, self.size - self.part.start
        if self.fused:
            return part_confidence(logits_PV, mask_token_id=mask, size=size)
        wide_PV = logits_PV.float()
        ids_V = torch.arange(wide_PV.shape[-1], device=wide_PV.device)
        barred_V = (ids_V == mask) | (ids_V >= size)
        logit_P, place_P = wide_PV.masked_fill(barred_V, -torch.inf).max(dim=-1)
        return place_P, logit_P, wide_PV.logsumexp(-1)


def whole_vocab(model: Decoder, size: int) -> Vocab:
    """The `Vocab` for logits of the whole vocabulary of `model`, read by one rank: ids from `size` on are padding."""
    on_gpu = model.model.norm.weight.device.type == "cuda"
    return (FusedVocab if on_gpu else Vocab)(model.config.mask_token_id, size)


def shared_vocab(model: Decoder, size: int) -> Vocab:
    """The `Vocab` for logits that all ranks of `model` read together; `whole_vocab` if there is a single rank."""
    if model.reduce is None:
        return whole_vocab(model, size)
    return PartVocab(
        model.config.mask_token_id,
        size,
        part=model.vocabulary,
        shard=model.shard,
        reduce=model.reduce,
        fused=model.model.norm.weight.device.type == "cuda",
    )
