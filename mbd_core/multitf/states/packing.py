"""Several samples in one training sequence, grouped so that little of a batch is padding.

Samples of a sequence do not see each other (`mask.py`) and keep their own positions and weights. Losses and gradients
equal a separate sequence's for each. The grouping depends on the samples' lengths alone, so every worker knows the
grouping of all workers.
"""

from collections.abc import Sequence

Together = list[list[int]]
"""The samples of each training sequence, as indices into a worker's share of the batch."""


def alone(count: int) -> Together:
    """A sequence for each sample."""
    return [[number] for number in range(count)]


def packed_together(lengths: Sequence[int], max_tokens: int) -> Together:
    """First-fit decreasing: the longest sample first, each into the first sequence of samples that has room for it.

    The samples of a sequence have up to `max_tokens` tokens together; a longer sample is alone.
    """
    groups: Together = []
    room: list[int] = []
    for number in sorted(range(len(lengths)), key=lambda n: (-lengths[n], n)):
        length = lengths[number]
        place = next((place for place, room_left in enumerate(room) if length <= room_left), None)
        if place is None:
            groups.append([number])
            room.append(max_tokens - length)
        else:
            groups[place].append(number)
            room[place] -= length
    return groups


def packed_alike(shares: Sequence[Sequence[int]], max_tokens: int) -> list[Together]:
    """`packed_together` of each worker's samples' lengths; all workers get the same number of sequences.

    Workers with parts of one model must call it equally often. A worker with fewer sequences divides its fullest
    sequence.
    """
    packings = [packed_together(lengths, max_tokens) for lengths in shares]
    most_groups = max(map(len, packings))
    for groups in packings:
        while len(groups) < most_groups:
            fullest = max(groups, key=len)
            half = len(fullest) // 2
            groups.append(fullest[half:])
            del fullest[half:]
    return packings
