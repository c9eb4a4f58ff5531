"""Several samples in one training sequence: which ones together, so that little of a batch is padding.

Samples of a sequence do not see each other (`mask`), and keep their own positions and weights: losses and gradients
are those of a sequence each. Which samples are together depends on their lengths alone, so every worker knows it of
all workers.
"""

from collections.abc import Sequence

Together = list[list[int]]
"""The samples of each training sequence, by their places in a worker's share of the batch."""


def alone(count: int) -> Together:
    """A sequence for each sample."""
    return [[number] for number in range(count)]


def packed_together(lengths: Sequence[int], max_tokens: int) -> Together:
    """First-fit decreasing: the longest sample first, each into the first sequence of samples that has room for it.

    The samples of a sequence have up to `max_tokens` tokens together; one that has more is alone.
    """
    together: Together = []
    room: list[int] = []
    for number in sorted(range(len(lengths)), key=lambda n: (-lengths[n], n)):
        length = lengths[number]
        place = next((place for place, left in enumerate(room) if length <= left), None)
        if place is None:
            together.append([number])
            room.append(max_tokens - length)
        else:
            together[place].append(number)
            room[place] -= length
    return together


def packed_alike(shares: Sequence[Sequence[int]], max_tokens: int) -> list[Together]:
    """`packed_together` of each worker's share, its samples' lengths; all workers have equally many sequences.

    Workers that hold parts of one model must call it equally often. Who needs fewer sequences divides its fullest.
    """
    packed = [packed_together(lengths, max_tokens) for lengths in shares]
    most = max(map(len, packed))
    for together in packed:
        while len(together) < most:
            fullest = max(together, key=len)
            half = len(fullest) // 2
            together.append(fullest[half:])
            del fullest[half:]
    return packed
