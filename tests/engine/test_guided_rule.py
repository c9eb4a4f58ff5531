"""The rule of an answer under a grammar as a plain loop over Python lists: dense forwards, no engine, cache or guide.

A forward sees what is decided and masks. Its run goes over the open positions from the left. A forced token needs no
logits: the text must go on with it, or no other is allowed. A choice is the likeliest allowed token, or one drawn
among the allowed. The first `tokens_per_step` choices are taken; a further one where its probability among the
allowed tokens exceeds the threshold, which is lower where the grammar forbids the model's likeliest token.
"""

import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from mbd_core.decoding.blocks.config import DecodingConfig
from mbd_core.decoding.blocks.request import Request
from mbd_core.decoding.blocks.sampling import Draw, Vocab, choose
from mbd_core.decoding.blocks.sampling_config import Sampling
from mbd_core.decoding.grammar.grammar import Grammar
from mbd_core.decoding.grammar.guide import TAU_OVERRULED
from mbd_core.engine.config import EngineConfig
from mbd_core.ops.attention.whole import DenseAttention
from mbd_core.serving.tokens.load import LoadedModel, load_engine

B = 4
OBJECT = {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 99}}
GRAMMARS = {
    "object": Grammar(
        syntax="json_schema",
        text=json.dumps(
            {"type": "object", "properties": OBJECT, "required": ["name", "age"], "additionalProperties": False}
        ),
    ),
    "choice": Grammar(syntax="lark", text='start: "yes, Tom buys 5 pens" | "yes, 12" | "no" | /[0-9]{3,9}/'),
    "characters": Grammar(syntax="json_schema", text='{"enum": ["日本語🙂é", "日本🙃", "übër 日"]}'),
}
METHODS: dict[str, dict[str, Any]] = {
    "single": {"buffer_size": 1, "tau_m2t": 0.5},
    "multi": {"buffer_size": 3, "tau_m2t": 0.3, "tau_add": 0.1},
    "overlap": {"buffer_size": 2, "tau_m2t": 0.9, "tau_add": 0.5},
    "quota": {"buffer_size": 2, "tokens_per_step": 2},
    "sequential": {"buffer_size": 2, "tau_m2t": 1.0},
}


@pytest.fixture(scope="module")
def loaded(tiny_model_dir: Path) -> Iterator[LoadedModel]:
    with load_engine(tiny_model_dir, EngineConfig(max_rows=8, num_pages=300)) as loaded:
        yield loaded


@dataclass
class Literal:
    """One answer: `decided` tokens and their probabilities, of which the first `placed` stand in blocks. Of the
    blocks from `first` on so many are `resident`."""

    loaded: LoadedModel
    request: Request
    decided: list[tuple[int, float]] = field(default_factory=list)
    placed: int = 0
    resident: int = 1
    forwards: int = 0

    def __post_init__(self) -> None:
        self.matcher, _ = self.loaded.engine._grammars._matcher(self.request.grammar)
        self.model, self.prompt = self.loaded.engine.model, self.request.prompt
        (self.eos,) = self.model.config.eos_token_ids
        self.vocab = Vocab(self.model.config.mask_token_id, len(self.loaded.tokenizer))
        self.first = len(self.prompt) // B
        self.force()

    @property
    def ended(self) -> bool:
        return bool(self.decided) and self.decided[-1][0] == self.eos

    def force(self) -> None:
        """Decide all tokens that must follow: by the text, or because no other token is allowed."""
        while not self.ended:
            tokens = [] if self.matcher.is_stopped() else self.matcher.compute_ff_tokens()
            if not tokens:
                tokens = self.allowed().nonzero().flatten().tolist()
                if len(tokens) != 1:
                    return
            self.decided += [(token, 1.0) for token in tokens]
            if not self.ended:
                self.matcher.consume_tokens(tokens)

    def allowed(self) -> torch.Tensor:
        never = self.loaded.engine._grammars._forbidden
        ids = range(self.vocab.size)
        if self.matcher.is_stopped():
            return torch.tensor([t == self.eos for t in ids])
        return torch.tensor([t not in never and self.matcher.validate_tokens([t]) == 1 for t in ids])

    def open_places(self, active: list[int]) -> list[int]:
        """Positions of `active` blocks that hold no token yet."""
        filled = len(self.prompt) + self.placed
        return [p for block in active for p in range(block * B, block * B + B) if p >= filled]

    def place(self, active: list[int]) -> None:
        """Put decided tokens into open positions; behind an EOS its block is filled with EOS."""
        room = len(self.open_places(active))
        new = min(room, len(self.decided) - self.placed)
        self.placed += new
        if self.ended and self.placed == len(self.decided):
            rest = -(len(self.prompt) + self.placed) % B
            self.decided += [(self.eos, 1.0)] * rest
            self.placed += rest

    def complete(self) -> int:
        """How many resident blocks are complete, from the front."""
        return min(self.resident, (len(self.prompt) + self.placed) // B - self.first)

    def activate(self, final: int) -> None:
        config, filled = self.request.decoding, len(self.prompt) + self.placed
        begin = max((self.first + self.resident - 1) * B, len(self.prompt))
        editable = (self.first + self.resident) * B - begin
        progress = min(max(filled - begin, 0), editable) / editable
        has_eos = any(token == self.eos for token, _ in self.decided[: self.placed])
        ready = final == self.resident or progress > config.tau_add
        if ready and not has_eos and self.resident < config.buffer_size:
            self.resident += 1

    def logits(self, places: list[int]) -> torch.Tensor:
        length, config = (self.first + self.resident) * B, self.model.config
        tokens = [*self.prompt, *(token for token, _ in self.decided[: self.placed])]
        ids = torch.tensor([tokens + [config.mask_token_id] * (length - len(tokens))])
        block_L = torch.arange(length) // B
        attention = DenseAttention((block_L[None, :] <= block_L[:, None])[None, None])
        with torch.no_grad():
            hidden = self.model(ids, torch.arange(length)[None], attention)[0]
            return self.model.logits(hidden[[p - config.shift_logits for p in places]]).float()

    def run(self, places: list[int]) -> None:
        """Decide a run of tokens at these positions, with the logits of at most one block's worth of them."""
        config, logits = self.request.decoding, self.logits(places)
        start, choices = len(self.decided), 0
        while (i := len(self.decided) - start) < min(len(places), B) and not self.ended:
            masked = torch.where(self.pad(self.allowed(), logits.shape[1]), logits[i], -1e30)
            token, confidence = (x.item() for x in choose(masked[None], self.vocab, self.draw(places[i])))
            own = self.vocab.exclude_(logits[i].clone(), -torch.inf)
            overruled = config.tau_m2t < 1 and own.max() > masked.max()
            tau = min(config.tau_m2t, TAU_OVERRULED) if overruled else config.tau_m2t
            if choices >= config.tokens_per_step and confidence <= tau:
                break
            choices += 1
            self.decided.append((int(token), confidence))
            if token != self.eos:
                self.matcher.consume_token(int(token))
                self.force()

    def pad(self, allowed: torch.Tensor, size: int) -> torch.Tensor:
        return torch.nn.functional.pad(allowed, (0, size - len(allowed)))

    def draw(self, place: int) -> Draw | None:
        sampling, one = self.request.sampling, torch.ones(1, dtype=torch.int64)
        if not sampling.draws:
            return None
        return Draw(
            temperature_P=one * sampling.temperature,
            top_p_P=one * sampling.top_p,
            top_k_P=one * sampling.top_k,
            seed_P=one * sampling.seed,
            position_P=one * place,
            forward_P=one * (self.forwards - 1),
        )

    def decode(self) -> None:
        final = 0  # leading resident blocks that the next forward stores
        while True:
            self.activate(final)
            active = list(range(self.first + final, self.first + self.resident))
            self.place(active)
            final = self.complete()
            active = [block for block in active if block >= self.first + final]
            self.forwards += 1
            if self.open_places(active) and not self.ended:
                self.run(self.open_places(active))
                self.place(active)
            self.first, self.resident = self.first + final, self.resident - final
            stored = self.first * B - len(self.prompt)
            if any(token == self.eos for token, _ in self.decided[: max(stored, 0)]):
                return
            if self.resident == 0:
                self.resident = 1
            final = self.complete()


@pytest.mark.parametrize("method", list(METHODS))
@pytest.mark.parametrize("name", list(GRAMMARS))
def test_the_engine_decodes_by_the_written_rule(loaded: LoadedModel, method: str, name: str) -> None:
    for seed in range(6):
        rng = random.Random(seed)
        request = Request(
            request_id=str(seed),
            prompt=tuple(rng.choices(range(20, 300), k=rng.randint(1, 13))),
            max_tokens=80,
            decoding=DecodingConfig(block_size=B, **METHODS[method]),
            sampling=Sampling(temperature=(0.0, 1.0)[seed % 2], top_p=(1.0, 0.9)[seed % 3 == 0], seed=seed),
            grammar=GRAMMARS[name],
            logprobs=True,
        )
        literal = Literal(loaded, request)
        literal.decode()
        tokens = [token for token, _ in literal.decided]
        output = loaded.engine.generate([request])[0]
        assert list(output.tokens) == tokens[: tokens.index(literal.eos)]
        assert output.counts.num_forwards == literal.forwards
        assert output.piece.logprobs is not None
        confidence = [c for _, c in literal.decided[: len(output.tokens)]]
        assert [math.exp(p) for p in output.piece.logprobs] == pytest.approx(confidence, abs=1e-4)
