"""The Group-Aware Dual-Stream Mask as one predicate (paper Eqs. B.6 to B.9).

A training sequence is `[x_t^1; ...; x_t^n; x_0]`: one noisy stream per layout and one clean stream they share. A token
carries three numbers, and who sees whom follows from them alone:

    stream  0 for the clean tokens, 1..n for the noisy stream of layout n, -1 for padding
    block   beta, its block
    first   alpha, the first block of its noise-group; for a clean token its block + 1

    i sees j  iff  j is clean and beta(j) < alpha(i)                                        (B.8 and, for clean i, B.9)
              or   i, j share a noisy stream and a group (alpha(i) = alpha(j)) and beta(j) <= beta(i)           (B.7)

Native D2F is one noisy stream in one group: block 0 is the prompt, the response's blocks follow.

With one layout of two groups of two blocks (columns are keys):

             noisy 1 2 3 4   clean 1 2 3 4
    noisy 1        x               .
    noisy 2        x x             . .
    noisy 3            x           x x .
    noisy 4            x x         x x . .
    clean 1                        x
    clean 2                        x x
    clean 3                        x x x
    clean 4                        x x x x
"""

from torch import Tensor


def dual_stream_mask(stream: Tensor, block: Tensor, first: Tensor) -> Tensor:
    """Who may attend to whom: (..., L) int tensors -> (..., L, L) bool, rows are queries.

    Padding (stream -1) is seen by nobody else; a padded query sees itself, so that no softmax row is empty.
    """
    si, sj = stream[..., :, None], stream[..., None, :]
    bi, bj = block[..., :, None], block[..., None, :]
    fi, fj = first[..., :, None], first[..., None, :]
    to_clean = (sj == 0) & (bj < fi) & (si >= 0)
    in_group = (si == sj) & (sj > 0) & (fi == fj) & (bj <= bi)
    itself = (stream < 0).diag_embed()
    return to_clean | in_group | itself


def block_causal_mask(block: Tensor) -> Tensor:
    """The clean half alone: (..., L) block indices -> (..., L, L), own and earlier blocks are seen (Eq. B.9)."""
    return block[..., None, :] <= block[..., :, None]


def whole_sequence_mask(stream: Tensor) -> Tensor:
    """Every token sees every other: (..., L) -> (..., L, L); padding as in `dual_stream_mask`."""
    here = stream >= 0
    return here[..., None, :] & here[..., :, None] | (~here).diag_embed()
