"""The tiny models' tokenizer: byte-level BPE whose merges stay within a word, a digit or a line's indentation.

Every word of its training tasks is one token, and every digit is one token, so arithmetic is written digit by digit.
Any other text is encoded by byte tokens and decodes to itself.
"""

from collections.abc import Iterable

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

MASK, EOS, USER, ASSISTANT = "<|mask|>", "<|endoftext|>", "<|user|>", "<|assistant|>"
PIECES = r" ?\d| ?[A-Za-z_]+|\n *| ?[^\sA-Za-z_\d]+|\s+"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}<|assistant|>{{ message['content'] }}<|endoftext|>"
    "{% else %}<|user|>{{ message['content'] }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def train_tokenizer(texts: Iterable[str], *, vocab_size: int, min_frequency: int = 20) -> PreTrainedTokenizerFast:
    """Learn merges from pairs that occur at least `min_frequency` times in `texts`; returns a Hugging Face tokenizer
    with mask, EOS and chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=min_frequency,
        special_tokens=[MASK, EOS, USER, ASSISTANT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        mask_token=MASK,
        eos_token=EOS,
        pad_token=EOS,
        additional_special_tokens=[USER, ASSISTANT],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
    )
