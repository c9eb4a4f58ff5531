"""LLaDA2.2's decoding, literal and on the host: a block of fixed length in which tokens come, change and go.

The model predicts two tokens that are edits. Where it predicts DELETE, the token goes and the tokens after it move
left. Where it predicts SPLIT, a mask comes before the token, which moves right with the tokens after it; the block's
last token falls out. Masks pad a block that has lost tokens. A position that is a mask when the block begins is
*original*. It stays original when it is filled, and wherever it moves. Masks that edits bring are not original.

Two programs that serve the model decode differently, and `Levenshtein.variant` names them. Both fill the masks
over a threshold, and a least number of masks if fewer are over it. Both overwrite filled positions. Both count the
forwards after the last original mask is filled, and at `max_post_steps` resolve the block: they fill its masks without
edits. Both escape from a state of the block that recurs. The classes `_Fluxserve` and `_Sglang` hold the differences.

A block is final when a forward has taken its final tokens, because that forward has stored it.

Shape legend: L positions of a block, V vocabulary.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from mbd_core.decoding.blocks.config import DecodingConfig, Levenshtein
from mbd_core.decoding.blocks.request import FinishReason
from mbd_core.decoding.blocks.sampling import log_probability

ESCAPES = 5  # attempts to leave a repeated state


@dataclass(frozen=True)
class EditTokens:
    """The ids that an edit needs: the mask, and the tokens that delete and split."""

    mask: int
    delete: int
    split: int

    @property
    def all(self) -> tuple[int, int, int]:
        return self.mask, self.delete, self.split


@dataclass(frozen=True)
class EditedPosition:
    """A position's content, which moves as one.

    original    it was a mask when the block began
    confidence  the probability of its token in the forward that wrote it
    step        the number of that forward; 0 for a mask and for the prompt
    """

    token: int
    original: bool = False
    confidence: float = 1.0
    step: int = 0


@dataclass(frozen=True)
class Guess:
    """The prediction for a position: its best tokens, the likeliest first, and the likeliest token's probability.
    `calm` is the likeliest token that is neither mask nor edit."""

    tokens: tuple[int, ...]
    confidence: float
    calm: int


class EditedBlock:
    """One block under way; its first `prompt_length` positions are the prompt's, and stay. The base of both variants.

    is_resolved  a forward has resolved it
    done         the last forward saw the final tokens
    """

    def __init__(
        self, tokens: Sequence[int], prompt_length: int, *, threshold: float, rule: Levenshtein, ids: EditTokens
    ) -> None:
        self.prompt_length, self.threshold, self.rule, self.ids = prompt_length, threshold, rule, ids
        self.cells = [EditedPosition(t, i >= prompt_length and t == ids.mask) for i, t in enumerate(tokens)]
        self.done = False
        self.num_steps = self.num_post_steps = 0
        self.is_resolved = False
        self._seen_states: set[tuple[int, ...]] = set()

    @property
    def tokens(self) -> list[int]:
        return [cell.token for cell in self.cells]

    @property
    def masks(self) -> list[int]:
        """Open positions."""
        return [i for i, c in enumerate(self.cells) if i >= self.prompt_length and c.token == self.ids.mask]

    @property
    def original_masks(self) -> list[int]:
        return [i for i in self.masks if self.cells[i].original]

    def advance(self, logits_LV: Tensor, forward: int) -> None:
        """Take in the logits of a forward of `tokens`, the `forward`-th of its answer."""
        raise NotImplementedError

    def _over_threshold(self, guesses: list[Guess], least: int) -> list[int]:
        """The masks over the threshold; if there are fewer than `least`, the `least` most confident masks."""
        masks = self.masks
        confident = [i for i in masks if guesses[i].confidence > self.threshold]
        return (
            confident if len(confident) >= least else sorted(masks, key=lambda i: (-guesses[i].confidence, i))[:least]
        )

    def _revisions(self, guesses: list[Guess]) -> list[int]:
        """The filled positions that their predictions overwrite."""
        filled = [i for i in range(self.prompt_length, len(self.cells)) if self.cells[i].token != self.ids.mask]
        return [
            i for i in filled if guesses[i].confidence > self.rule.tau and guesses[i].tokens[0] != self.cells[i].token
        ]

    def _choices(self, places: Iterable[int], guesses: list[Guess], *, calm: bool) -> dict[int, int]:
        """The new tokens of the places: their likeliest tokens, with `calm` neither a mask nor an edit."""
        return {
            i: guesses[i].calm if calm and guesses[i].tokens[0] in self.ids.all else guesses[i].tokens[0]
            for i in places
        }

    def _apply_edits(self, new_cells: dict[int, EditedPosition]) -> list[EditedPosition]:
        """The block with `new_cells`, after deletions and splits, cut to its length or padded with masks."""
        mask, cells = EditedPosition(self.ids.mask), self.cells[: self.prompt_length]
        for i in range(self.prompt_length, len(self.cells)):
            cell = new_cells.get(i, self.cells[i])
            if cell.token == self.ids.split:
                cells += [mask, self.cells[i]]
            elif cell.token != self.ids.delete:
                cells.append(cell)
        return (cells + [mask] * len(self.cells))[: len(self.cells)]

    def _write(self, tokens: dict[int, int], probs_LV: Tensor, forward: int) -> None:
        new_cells = {
            i: replace(self.cells[i], token=token, confidence=float(probs_LV[i, token]), step=forward)
            for i, token in tokens.items()
        }
        self.cells = self._apply_edits(new_cells)

    def _guesses(self, probs_LV: Tensor) -> list[Guess]:
        """The prediction for every position: tokens enough to pass over the mask, both edits and former tokens."""
        number = min(probs_LV.shape[1], 5 + self.num_steps)
        best = probs_LV.topk(number, dim=-1)
        guesses = []
        for probs, ids in zip(best.values.tolist(), best.indices.tolist(), strict=True):
            candidates = sorted(zip(probs, ids, strict=True), key=lambda pair: (-pair[0], pair[1]))
            tokens = tuple(token for _, token in candidates)
            calm = next(token for token in tokens if token not in self.ids.all)
            guesses.append(Guess(tokens, candidates[0][0], calm))
        return guesses


class _Fluxserve(EditedBlock):
    """FluxServe's variant.

    The mask is never predicted. A schedule of `steps` gives the least number of masks that a forward fills, besides
    the masks that edits brought. The count of forwards after the last original mask begins anew if an original
    position opens again.
    """

    def __init__(
        self, tokens: Sequence[int], prompt_length: int, *, threshold: float, rule: Levenshtein, ids: EditTokens
    ) -> None:
        super().__init__(tokens, prompt_length, threshold=threshold, rule=rule, ids=ids)
        self._num_masks = len(self.masks)
        self.is_resolved = self._num_masks == 0

    def advance(self, logits_LV: Tensor, forward: int) -> None:
        if self.is_resolved:
            self.done = not self.masks
            return
        logits_LV = logits_LV.float().clone()
        logits_LV[:, self.ids.mask] = -torch.inf
        probs_LV = logits_LV.softmax(-1)
        guesses, masks, original = self._guesses(probs_LV), self.masks, self.original_masks
        steps, post = self.rule.steps, self.rule.max_post_steps
        self.num_post_steps = 0 if original else self.num_post_steps + 1
        share, remainder = divmod(self._num_masks, steps)
        least = share + (self.num_steps < remainder) + len(masks) - len(original)
        fills = masks if self.num_steps >= steps else self._over_threshold(guesses, least)
        is_last = self.num_post_steps >= post if post else bool(original) and set(original) <= set(fills)
        is_last = is_last or self.num_steps >= self.rule.max_steps - 1
        fills = masks if is_last else fills
        tokens = self._choices((*fills, *self._revisions(guesses)), guesses, calm=is_last)
        old_tokens = self.tokens
        new_tokens = [tokens.get(i, token) for i, token in enumerate(old_tokens)]
        for _ in range(0 if is_last else ESCAPES):
            if tuple(new_tokens) not in self._seen_states or new_tokens == old_tokens:
                break
            changes = [i for i, token in enumerate(new_tokens) if token != old_tokens[i]]
            i = min(changes, key=lambda i: (guesses[i].confidence, i))
            first, second = guesses[i].tokens[:2]
            tokens[i] = new_tokens[i] = second if new_tokens[i] == first else first
        self._seen_states.add(tuple(new_tokens))
        self._write(tokens, probs_LV, forward)
        self.num_steps += 1
        self.is_resolved = is_last
        self.done = not masks and self.tokens == old_tokens


class _Sglang(EditedBlock):
    """SGLang's variant.

    The mask may be predicted, so that a filled position opens again. Each forward fills at least one mask, besides the
    masks that edits brought. All forwards without original masks count. In a state that recurs, one position takes
    another token.
    """

    def __init__(
        self, tokens: Sequence[int], prompt_length: int, *, threshold: float, rule: Levenshtein, ids: EditTokens
    ) -> None:
        super().__init__(tokens, prompt_length, threshold=threshold, rule=rule, ids=ids)
        self._history: list[set[int]] = [set() for _ in tokens]

    def advance(self, logits_LV: Tensor, forward: int) -> None:
        if self.is_resolved:
            self.done = True
            return
        probs_LV = logits_LV.float().softmax(-1)
        guesses, masks, original = self._guesses(probs_LV), self.masks, self.original_masks
        post, length, mask = self.rule.max_post_steps, len(self.cells), self.ids.mask
        self.num_steps += 1
        self.num_post_steps += not original
        is_last = (self.num_post_steps >= post if post else not original) or self.num_steps > length + post
        if not is_last:
            for i in original:
                if guesses[i].tokens[0] == mask:
                    token = guesses[i].tokens[1]
                    guesses[i] = replace(
                        guesses[i], tokens=guesses[i].tokens[1:], confidence=float(probs_LV[i, token])
                    )
        fills = masks
        if not is_last and original:
            fills = self._over_threshold(guesses, 1 + len(masks) - len(original))
            if not post and set(original) <= set(fills):
                is_last, fills = True, masks
        places = sorted({*fills, *self._revisions(guesses)})
        if not places:
            self.done = True
            return
        tokens = self._choices(places, guesses, calm=is_last)
        old_tokens = self.tokens
        if not is_last and tuple(old_tokens) in self._seen_states:
            changes = [i for i in places if tokens[i] != old_tokens[i]]
            for i in sorted(changes, key=lambda i: (guesses[i].confidence, i))[:1]:
                excluded_tokens = self._history[i] | ({mask} if i in original else set())
                tokens[i] = next(token for token in guesses[i].tokens if token not in excluded_tokens)
        self._seen_states.add(tuple(old_tokens))
        for i, token in tokens.items():
            self._history[i].add(token)
        self._write(tokens, probs_LV, forward)
        self.is_resolved = is_last
        self.done = is_last and self.tokens == old_tokens


VARIANTS: dict[str, type[EditedBlock]] = {"fluxserve": _Fluxserve, "sglang": _Sglang}


def edited_block(tokens: Sequence[int], prompt_length: int, config: DecodingConfig, ids: EditTokens) -> EditedBlock:
    """The block of a request whose configuration has `edit`."""
    assert config.edit is not None
    kind = VARIANTS[config.edit.variant]
    return kind(tokens, prompt_length, threshold=config.tau_m2t, rule=config.edit, ids=ids)


@dataclass
class LevenshteinRun:
    """A request decoded block by block: the tokens and the place of the next forward, and the results of the last.

    The blocks lie on the grid of absolute positions. The last block is decoded whole, because edits move tokens
    across the budget's end; tokens past the budget are cut. An EOS of the answer ends it with the block that holds
    it.

    stored  the final tokens before the block under way, the prompt's included
    """

    prompt: list[int]
    max_tokens: int
    config: DecodingConfig
    ids: EditTokens
    vocab_size: int
    eos: tuple[int, ...] = ()
    stored: list[EditedPosition] = field(init=False)
    block: EditedBlock = field(init=False)
    num_forwards: int = 0
    finish_reason: FinishReason | None = None

    def __post_init__(self) -> None:
        num_stored = len(self.prompt) // self.config.block_size * self.config.block_size
        self.stored = [EditedPosition(token) for token in self.prompt[:num_stored]]
        self.block = self._next_block()

    def _next_block(self) -> EditedBlock:
        remainder = self.prompt[len(self.stored) :]
        masks = [self.ids.mask] * (self.config.block_size - len(remainder))
        return edited_block(remainder + masks, len(remainder), self.config, self.ids)

    @property
    def start(self) -> int:
        """The position at which the block under way begins."""
        return len(self.stored)

    def advance(self, logits_LV: Tensor) -> None:
        """Take in the logits of a forward of `block.tokens`, which stored them at `start`."""
        self.num_forwards += 1
        self.block.advance(logits_LV[:, : self.vocab_size], self.num_forwards)
        if not self.block.done:
            return
        self.stored += self.block.cells
        if any(cell.token in self.eos for cell in self.answer):
            self.finish_reason = "stop"
        elif len(self.stored) >= len(self.prompt) + self.max_tokens:
            self.finish_reason = "length"
        else:
            self.block = self._next_block()

    @property
    def answer(self) -> list[EditedPosition]:
        """The final tokens within the budget."""
        return self.stored[len(self.prompt) : len(self.prompt) + self.max_tokens]

    @property
    def useful(self) -> list[EditedPosition]:
        """The final tokens before the first EOS."""
        end = next((i for i, cell in enumerate(self.answer) if cell.token in self.eos), len(self.answer))
        return self.answer[:end]

    @property
    def log_probs(self) -> list[float]:
        return log_probability(torch.tensor([cell.confidence for cell in self.useful])).tolist()
