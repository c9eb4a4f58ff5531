"""The forms of calls that are known, each after the chat template of a released model.

The order matters: a form whose text contains another form's text stands before the other form.
"""

from dataclasses import replace
from typing import Literal, get_args

from mbd_core.calls.form import ID, CallForm, JsonArguments, LiteralArguments, TaggedArguments

JSON = JsonArguments()
PYTHON = LiteralArguments(
    begin="(",
    end=")",
    key_end="=",
    separator=", ",
    quotes=('"', "'"),
    escapes=True,
    inner_key_end=": ",
    quotes_keys=True,
    words={True: "True", False: "False", None: "None"},
)
SINGLE_QUOTED = replace(PYTHON, quotes=("'", '"'))

HERMES = CallForm(
    name="hermes",
    arguments=JSON,
    mark="<tool_call>",
    head='<tool_call>\n{"name": "',
    middle='", "arguments": ',
    tail="}\n</tool_call>",
    between="\n",
)
"""Hermes, Qwen2.5, Qwen3, LLaDA2. A template that says nothing of tools gets this form too."""

XML = CallForm(
    name="xml",
    arguments=TaggedArguments(key_begin="<parameter=", key_end=">\n", value_end="\n</parameter>\n"),
    mark="<tool_call>",
    head="<tool_call>\n<function=",
    middle=">\n",
    tail="</function>\n</tool_call>",
    between="\n",
)
"""Qwen3-Coder, Qwen3.5, Nemotron 3."""

GLM = CallForm(
    name="glm",
    arguments=TaggedArguments(key_begin="<arg_key>", key_end="</arg_key>\n<arg_value>", value_end="</arg_value>\n"),
    mark="<tool_call>",
    head="<tool_call>",
    middle="\n",
    tail="</tool_call>",
    between="\n",
)
"""GLM-4.5 and 4.6. GLM-4.7 writes this form without line breaks (`GLM_COMPACT`)."""
GLM_COMPACT = replace(
    GLM,
    name="glm-compact",
    arguments=TaggedArguments(key_begin="<arg_key>", key_end="</arg_key><arg_value>", value_end="</arg_value>"),
    middle="",
    between="",
)

LLAMA = CallForm(
    name="llama",
    arguments=JSON,
    mark="",
    head='{"name": "',
    middle='", "parameters": ',
    tail="}",
    several=False,
    text_before=False,
)
"""Llama 3.1 to 3.3: one call is the whole answer."""

PYTHONIC = CallForm(
    name="pythonic", arguments=PYTHON, mark="", begin="[", head="", between=", ", end="]", text_before=False
)
"""Llama 3.2 and 4: a list of Python's calls is the whole answer."""
LFM = replace(
    PYTHONIC,
    name="lfm",
    mark="<|tool_call_start|>",
    begin="<|tool_call_start|>[",
    end="]<|tool_call_end|>",
    text_before=True,
    gap="",
)
"""LFM2: the same list between marks."""

MISTRAL = CallForm(
    name="mistral",
    arguments=JSON,
    mark="[TOOL_CALLS]",
    begin="[TOOL_CALLS] [",
    head='{"name": "',
    middle='", "arguments": ',
    tail=f', "id": "{ID}"}}',
    between=", ",
    end="]",
    gap="",
)
"""Mistral's tokenizers v3 to v7: a JSON list with ids."""
MISTRAL_ARGS = CallForm(
    name="mistral-args", arguments=JSON, mark="[TOOL_CALLS]", head="[TOOL_CALLS]", middle="[ARGS]", gap=""
)
"""Mistral's tokenizers from v11 on: a mark before each name and its arguments; v11 has the id between them."""

GEMMA = CallForm(
    name="gemma",
    arguments=LiteralArguments(
        begin="{",
        end="}",
        key_end=":",
        separator=",",
        quotes=('<|"|>',),
        escapes=False,
        inner_key_end=":",
        quotes_keys=False,
        sorted_keys=True,
    ),
    mark="<|tool_call>",
    head="<|tool_call>call:",
    tail="<tool_call|>",
    gap="",
)
"""Gemma 4 and DiffusionGemma."""

DEEPSEEK = CallForm(
    name="deepseek",
    arguments=JSON,
    mark="<｜tool▁calls▁begin｜>",
    begin="<｜tool▁calls▁begin｜>",
    head="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
    middle="\n```json\n",
    tail="\n```<｜tool▁call▁end｜>",
    between="\n",
    end="<｜tool▁calls▁end｜>",
    gap="",
)
"""DeepSeek V3 and R1."""
DEEPSEEK_SHORT = replace(
    DEEPSEEK,
    name="deepseek-short",
    head="<｜tool▁call▁begin｜>",
    middle="<｜tool▁sep｜>",
    tail="<｜tool▁call▁end｜>",
    between="",
)
"""DeepSeek V3.1."""

FORMS: tuple[CallForm, ...] = (
    HERMES,
    XML,
    GLM,
    GLM_COMPACT,
    GEMMA,
    DEEPSEEK,
    DEEPSEEK_SHORT,
    MISTRAL,
    replace(MISTRAL, begin="[TOOL_CALLS]["),
    replace(MISTRAL, begin="[TOOL_CALLS] [", tail="}"),
    replace(MISTRAL, begin="[TOOL_CALLS][", tail="}"),
    replace(MISTRAL_ARGS, middle=f"[CALL_ID]{ID}[ARGS]"),
    MISTRAL_ARGS,
    LFM,
    replace(LFM, arguments=SINGLE_QUOTED),
    LLAMA,
    PYTHONIC,
    replace(PYTHONIC, arguments=SINGLE_QUOTED),
)
"""Every form with its variants; the variants of a form share its name."""
CallFormName = Literal[
    "hermes",
    "xml",
    "glm",
    "glm-compact",
    "gemma",
    "deepseek",
    "deepseek-short",
    "mistral",
    "mistral-args",
    "lfm",
    "llama",
    "pythonic",
]
FORM_NAMES: tuple[str, ...] = get_args(CallFormName)


def form_named(name: str) -> CallForm:
    """The first form of this name."""
    return next(form for form in FORMS if form.name == name)
