"""What one decoder stack needs to know of a model, whatever family it came from."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes and switches of a decoder stack, and the ids that block diffusion gives a meaning.

    `architecture` is the Hugging Face class name the checkpoint was written for; `block_size` is the diffusion block
    the weights were trained with. Raises `ValueError` where sizes contradict each other.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    rms_norm_eps: float
    max_positions: int
    tie_word_embeddings: bool
    mask_token_id: int
    eos_token_ids: tuple[int, ...]
    block_size: int

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_attention_heads={self.num_heads} is not a multiple of num_key_value_heads={self.num_kv_heads}"
            )
        for name, token in [("mask_token_id", self.mask_token_id), *(("eos_token_id", e) for e in self.eos_token_ids)]:
            if not 0 <= token < self.vocab_size:
                raise ValueError(f"{name}={token} lies outside the vocabulary of {self.vocab_size} tokens")
        if self.mask_token_id in self.eos_token_ids:
            raise ValueError(f"mask_token_id={self.mask_token_id} is also an EOS id; they must differ")
        if self.block_size < 1:
            raise ValueError(f"block_size={self.block_size} must be at least 1")

    @property
    def num_parameters(self) -> int:
        """Parameters of the stack, embeddings counted once when they are tied."""
        attention = self.hidden_size * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        layer = attention + 3 * self.hidden_size * self.intermediate_size + 2 * self.hidden_size + 2 * self.head_dim
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return embeddings + self.num_layers * layer + self.hidden_size
