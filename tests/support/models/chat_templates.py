"""Model folders whose chat template has rules of its own."""

import shutil
from pathlib import Path

REFUSAL = "Conversation roles must alternate user/assistant/user/assistant/..."
ALTERNATE = (
    "{% for m in messages if m['role'] != 'system' %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('" + REFUSAL + "') }}{% endif %}"
    "{% endfor %}"
)


def with_strict_template(folder: Path, target: Path) -> Path:
    """A copy of a model folder whose chat template refuses turns that do not alternate, as many released ones do."""
    from transformers import AutoTokenizer

    shutil.copytree(folder, target)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = ALTERNATE + tokenizer.chat_template
    tokenizer.save_pretrained(target)
    return target
