"""The masked cross-entropy of MultiTF (paper Eqs. B.11, B.13): one weighted sum, its weights come with the batch."""

import torch
from torch import Tensor
from torch.nn import functional as F

from mbd_core.models.decoder import Decoder
from mbd_core.multitf.mask import dual_stream_mask
from mbd_core.multitf.sample import IGNORE, MultiTFBatch
from mbd_core.ops.attention_dense import DenseAttention


def multitf_loss(model: Decoder, batch: MultiTFBatch) -> tuple[Tensor, Tensor]:
    """Mean over samples of the weighted masked CE (a scalar with gradient), and the accuracy on masked tokens.

    The LM head runs on masked positions only; a batch without any gives a zero loss.
    """
    mask = dual_stream_mask(batch.stream, batch.block, batch.first)[:, None]
    hidden = model(batch.input_ids, batch.positions, DenseAttention(mask))
    chosen = batch.labels != IGNORE
    logits = model.logits(hidden[chosen]).float()
    labels = batch.labels[chosen]
    losses = F.cross_entropy(logits, labels, reduction="none")
    loss = (losses * batch.weights[chosen]).sum() / batch.num_samples
    with torch.no_grad():
        accuracy = (logits.argmax(-1) == labels).float().sum() / max(1, labels.numel())
    return loss, accuracy
