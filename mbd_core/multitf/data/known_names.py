"""Known names of columns and of a turn's fields: names of a conversation's parts, and names that say nothing of it."""

import re
from functools import lru_cache
from typing import Any

CHATS = ("messages", "conversations", "conversation")
PAIRS = (("prompt", "response"), ("question", "answer"), ("instruction", "output"), ("problem", "solution"))
PROMPTS = ("prompt", "question", "instruction", "problem", "query", "input", "inputs")
RESPONSES = ("response", "answer", "output", "solution", "completion", "target", "targets")
CONTEXTS = ("input", "context")
"""Names of columns beside an instruction that hold its subject."""
SYSTEMS = ("system", "system_prompt")
TOOLS = ("tools", "functions")

FLAGS = {"weight": True, "loss": True, "trainable": True, "train": True, "train_on_turn": True, "training": True}
FLAGS |= {"masked": False}
"""Fields that say whether a turn is trained, each with the value that says yes."""
REASONING = ("reasoning_content", "reasoning", "thinking")

LAST = """
id ids idx index uuid guid key hash sha sha1 sha256 md5 ip source sources origin dataset subset config
url urls uri link license licence language languages lang locale country date time timestamp year version
score scores rating ratings rank quality reward likes upvotes views votes difficulty level
tag tags topic topics category categories subject domain genre author annotator annotators creator username
model generator provider moderation toxicity toxic redacted perplexity ppl embedding embeddings length tokens
cost latency state metadata meta
"""
LAST_WORDS = frozenset(LAST.split())
"""A name that ends with one of these words says nothing of a conversation, like `prompt_id` and `score`."""
FIRST_WORDS = frozenset(("score", "scores", "rating", "source", "num"))
"""A name that begins with one of these words says nothing of a conversation either, like `score_chosen`."""
NOTES = frozenset(("meta", "metadata"))
"""Last words of names whose values may be long and say nothing all the same."""
LONG = 300  # characters
WHOLE = """
created created_at updated_at create_time num_turns n_turns turn turns token_count char_count word_count
full_topic topic_name task_type task_name type avatar_url header turn_identifier
parallel_tool_calls tool_choice function_call skip_prompt_formatting
"""
WHOLE_NAMES = frozenset(WHOLE.split())
FIELDS_THAT_SAY = frozenset(("type", "tokens", "state", "function_call", "tool_choice", "reward"))
"""Names that say nothing as columns, but may say something in a turn."""


@lru_cache(maxsize=4096)
def says_nothing(name: str, *, of_turn: bool = False) -> bool:
    """Whether a column of this name, or a field of a turn, is known to say nothing of the conversation."""
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().strip("_")
    if of_turn and snake in FIELDS_THAT_SAY:
        return False
    words = re.split(r"[_\W]+", snake)
    return (
        snake in WHOLE_NAMES or words[-1] in LAST_WORDS or words[0] in FIRST_WORDS or words[:2] == ["index", "level"]
    )


def is_content(name: str, value: Any) -> bool:
    """Whether a value is part of the conversation although its name says nothing: several lines, or a long text."""
    if not isinstance(value, str) or name.lower().split("_")[-1] in NOTES:
        return False
    text = value.strip()
    return "\n" in text or (len(text) > LONG and " " in text)


HINTS = {
    "text": "it is a text whose turns are not told apart: make messages of it, or a prompt and a response",
    "label": "it says which answers are wanted: first remove the rows of unwanted answers from the file",
    "kto_tag": "it says which answers are wanted: first remove the rows of unwanted answers from the file",
    **dict.fromkeys(
        ("rejected_response", "rejected_messages", "non_preferred_output"), "it is an answer that is not wanted"
    ),
    "answers": "it has several answers, or calls: make messages of it, with calls in the assistant's 'tool_calls'",
    "split": "it says which rows are held out: first remove these rows from the file",
    "contents": "it has Gemini's form: make messages of it, each with a role and a content",
    "segments": "its texts are templated: make messages of them, each with a role and a content",
    "chat": "make messages of it, each with a role and a content",
    "completions": "it has several answers to a prompt: make a row of each answer that is to be trained",
    "input_ids": "tokens are not taken, since --model's own tokenizer makes them",
    **dict.fromkeys(
        ("image", "images", "video", "videos", "audio", "audios"), "images, videos and sounds are not read"
    ),
}
"""The reason why common columns are not read, and the remedy."""
