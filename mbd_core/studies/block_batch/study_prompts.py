"""The prompts of the study, from a JSON-lines file of texts or token ids; all are checked before a model is loaded."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from mbd_core.checkpoint.chat import question_prompt
from mbd_core.json_text import parse_json
from mbd_core.models.model_config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class StudyPrompt:
    """One prompt; `grade` returns the score of an output (0 to 1), `None`: the prompt has no grader."""

    name: str
    ids: tuple[int, ...]
    grade: Callable[[list[int]], float] | None = None


@dataclass(frozen=True, kw_only=True)
class PromptLine:
    """One line of a prompts file: a text or token ids."""

    name: str
    text: str | None = None
    ids: tuple[int, ...] | None = None


def read_prompts(path: Path, *, limit: int | None = None) -> list[PromptLine]:
    """The first `limit` prompts of a file of lines {"prompt": "text"} or {"prompt_ids": [1, 2]}.

    Raises `ValueError` for a file that cannot be read, has no prompt or has a malformed line, which it names.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 ({error.reason})") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from None
    prompts = [_prompt_line(line, number, path) for number, line in enumerate(lines, start=1) if line.strip()]
    if not prompts:
        raise ValueError(f"{path} holds no prompts")
    return prompts[:limit]


def _prompt_line(line: str, number: int, path: Path) -> PromptLine:
    row = parse_json(line, f"{path}, line {number}: it")
    if not isinstance(row, dict) or ("prompt" in row) == ("prompt_ids" in row):
        raise ValueError(f"{path}, line {number}: must be an object with either prompt or prompt_ids")
    name, text, ids = f"line {number}", row.get("prompt"), row.get("prompt_ids")
    if ids is None:
        if not (isinstance(text, str) and text):
            raise ValueError(f"{path}, line {number}: prompt must be a text that is not empty")
        return PromptLine(name=name, text=text)
    if not (ids and isinstance(ids, list) and all(type(i) is int for i in ids)):
        raise ValueError(f"{path}, line {number}: prompt_ids must be a list of token ids that is not empty")
    return PromptLine(name=name, ids=tuple(ids))


def tokenized(lines: Sequence[PromptLine], tokenizer: PreTrainedTokenizerBase | None) -> list[StudyPrompt]:
    """The prompts as token ids; only texts need a tokenizer."""
    prompts = []
    for line in lines:
        ids = line.ids
        if ids is None:
            assert tokenizer is not None and line.text is not None
            ids = tuple(question_prompt(tokenizer, line.text))
        prompts.append(StudyPrompt(name=line.name, ids=ids))
    return prompts


def check_prompts(prompts: Sequence[StudyPrompt], config: ModelConfig, *, max_tokens: int) -> None:
    """Raise `ValueError` for a prompt that is too long for the model, or has an id outside its vocabulary."""
    for prompt in prompts:
        if len(prompt.ids) + max_tokens > config.max_positions:
            raise ValueError(
                f"{prompt.name}: a prompt of {len(prompt.ids)} and --max-tokens {max_tokens} exceed the model's "
                f"{config.max_positions} positions"
            )
        foreign = [i for i in prompt.ids if not 0 <= i < config.vocab_size]
        if foreign:
            raise ValueError(
                f"{prompt.name}: token id {foreign[0]} lies outside the vocabulary of {config.vocab_size}"
            )
