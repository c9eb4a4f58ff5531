"""Model folders whose chat templates have rules of their own, and such as take tools."""

import json
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


QWEN = (
    "{% for tool in tools or [] %}TOOLS {{ tool | tojson }}{% endfor %}"
    "{% for m in messages %}"
    "{% if m['role'] == 'tool' %}<|user|>RESULT {{ m['content'] }}"
    "{% elif m['role'] == 'assistant' %}<|assistant|>{{ m['content'] }}"
    "{% for call in m.tool_calls or [] %}"
    '<tool_call>\n{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n'
    "</tool_call>"
    "{% endfor %}<|endoftext|>"
    "{% else %}<|user|>{{ m['content'] }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
OTHER_FORM = QWEN.replace("<tool_call>", "[CALL]").replace("</tool_call>", "[/CALL]")


def tool_folder(folder: Path, target: Path, *, template: str | None = None, marks: str | None = None) -> Path:
    """A copy of a tiny model's folder with 4,096 positions; with another template; and with the marks of calls as
    tokens in place of its last two, `marks` being "added" or "special"."""
    from family_models import rewrite
    from transformers import AddedToken, AutoTokenizer

    shutil.copytree(folder, target)
    rewrite(target / "config.json", max_position_embeddings=4096)
    if marks is not None:
        path = target / "tokenizer.json"
        model = json.loads(path.read_text())["model"]
        last = sorted(model["vocab"], key=lambda text: model["vocab"][text])[-2:]
        model["vocab"] = {text: number for text, number in model["vocab"].items() if text not in last}
        model["merges"] = [pair for pair in model["merges"] if "".join(pair) not in last]
        rewrite(path, model=model)
    tokenizer = AutoTokenizer.from_pretrained(target)
    if template is not None:
        tokenizer.chat_template = template
    if marks is not None:
        special = marks == "special"
        tokenizer.add_tokens([AddedToken(mark, special=special) for mark in ("<tool_call>", "</tool_call>")])
    tokenizer.save_pretrained(target)
    return target
