"""A request's raw counts, from which every rate is computed; `a + b` adds each count."""

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Counts:
    """A request's raw counts.

    num_prompt_tokens     tokens of its prompt
    num_tokens            useful tokens: generated before EOS, at most max_tokens
    num_forwards          NFE: forwards that its blocks took part in, store-only forwards included
    num_store_forwards    of num_forwards, the forwards that decoded none of its blocks (SingleBD's bubble)
    num_positions         positions of its rows in num_forwards: of resident blocks, of the masks' copies that a
                          judgement looks at, of both models where two decode
    num_prefill_forwards  forwards that carried only its prompt, or repeated forwards that a preemption undid; not NFE
    decode_seconds        wall time of the steps counted in num_forwards
    num_cached_tokens     tokens of the prompt that came from the prefix cache
    num_drafted_tokens    drafted tokens that a verification judged (`linear_spec`, `verify`); of these
                          `num_confirmed_tokens` were accepted, and the others refused or not reached
    num_preemptions       how often the request was preempted
    queue_seconds         wall time from its arrival at the engine to its first batch row
    prompt_seconds        from its first batch row to the end of its prompt's own forwards; 0 if the prefix cache held
                          the whole prompt
    """

    num_prompt_tokens: int = 0
    num_tokens: int = 0
    num_forwards: int = 0
    num_store_forwards: int = 0
    num_prefill_forwards: int = 0
    decode_seconds: float = 0.0
    num_cached_tokens: int = 0
    num_drafted_tokens: int = 0
    num_confirmed_tokens: int = 0
    num_positions: int = 0
    num_preemptions: int = 0
    queue_seconds: float = field(default=0.0, compare=False)
    prompt_seconds: float = field(default=0.0, compare=False)

    def __add__(self, other: "Counts") -> "Counts":
        """The counts of two requests, or of two parts of one request."""
        return Counts(**{name: value + vars(other)[name] for name, value in vars(self).items()})

    @property
    def tpf(self) -> float:
        """Useful tokens per forward."""
        return self.num_tokens / self.num_forwards if self.num_forwards else 0.0
