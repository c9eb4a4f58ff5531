"""A batch's attention in groups of queries: a noise-group, or a clean stream, with the keys that it sees.

A query of a noise-group sees the clean tokens before the group, and the group's blocks up to its own (`mask.py`). So a
group has few keys, compared with a sequence of many noisy streams such as a rollout's.
"""

import numpy as np
from torch import Tensor

from mbd_core.models.layer_parts import Attend
from mbd_core.multitf.states.batch import MultiTFBatch
from mbd_core.multitf.states.mask import sees_in_streams
from mbd_core.ops.attention.grouped import GroupedAttention, QueryGroup


def stream_groups(batch: MultiTFBatch, sample: Tensor) -> list[QueryGroup]:
    """The groups of a batch, by flat places; padding is in none. `sample` (S, L): each token's sample within its
    row."""
    columns = [column.cpu().numpy() for column in (batch.stream, batch.block, batch.first, sample)]
    length, groups = batch.stream.shape[1], []
    for row, numbers in enumerate(zip(*columns, strict=True)):
        stream, block, first, own_sample = numbers
        kind = np.where(stream > 0, first, 0)
        keyed = np.stack([own_sample, stream, kind])[:, stream >= 0]
        for at_sample, at_stream, at_first in np.unique(keyed, axis=1).T:
            in_sample = own_sample == at_sample
            queries = (in_sample & (stream == at_stream) & (kind == at_first)).nonzero()[0]
            is_clean = in_sample & (stream == 0) & (block < first[queries].max())
            keys = is_clean.nonzero()[0] if at_stream == 0 else np.concatenate((is_clean.nonzero()[0], queries))
            sides = [tuple(column[places] for column in numbers) for places in (queries, keys)]
            sees = sees_in_streams(
                *(tuple(column[at] for column in side) for side, at in zip(sides, _PAIRS, strict=True))
            )
            groups.append(QueryGroup(row * length + queries, row * length + keys, sees))
    return groups


_PAIRS = ((slice(None), None), (None, slice(None)))


class StreamAttention:
    """The attention of one batch, in groups. In the last layer only the tokens of `kept` (N), flat places, are
    queries; `None`: all."""

    def __init__(self, batch: MultiTFBatch, sample: Tensor, *, num_layers: int, kept: Tensor | None) -> None:
        groups, device = stream_groups(batch, sample), batch.stream.device
        self.last = num_layers - 1
        self.whole = GroupedAttention.of(groups, batch.stream.numel(), device)
        self.kept = self.whole
        if kept is not None:
            is_kept = np.zeros(batch.stream.numel(), dtype=bool)
            is_kept[kept.cpu().numpy()] = True
            self.kept = GroupedAttention.of(
                [found for each in groups if (found := _of(each, is_kept))], len(is_kept), device
            )

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        attend: Attend = self.kept if layer == self.last else self.whole
        return attend(layer, q, k, v)


def _of(group: QueryGroup, is_kept: np.ndarray) -> QueryGroup | None:
    """A group's kept queries, with the keys that they see; `None` if no query is kept."""
    kept = is_kept[group.queries]
    if not kept.any():
        return None
    is_seen = group.sees[kept].any(0)
    return QueryGroup(group.queries[kept], group.keys[is_seen], group.sees[kept][:, is_seen])
