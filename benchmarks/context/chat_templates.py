"""The public chat formats of released families, shortened to the text around an answer.

Each has a Jinja template of plain turns, and the control tokens, such as `<|im_start|>`, that are one token each. All
other markers are plain text, as for the family's own tokenizer.
"""

from dataclasses import dataclass

LOOP, END_LOOP = "{% for m in messages %}", "{% endfor %}"


@dataclass(frozen=True)
class ChatForm:
    """A template, and the control tokens that it writes."""

    controls: tuple[str, ...]
    template: str


def _turns(
    *controls: str, before: str = "", turn: str, begins: str, roles: dict[str, str] | None = None, trim: bool = False
) -> ChatForm:
    """Turns that are all written alike: `turn` with ROLE and TEXT; `begins` opens the answer."""
    names = str(roles or {})
    content = "m['content'] | trim" if trim else "m['content']"
    body = turn.replace("ROLE", "{{ " + names + ".get(m['role'], m['role']) }}").replace(
        "TEXT", "{{ " + content + " }}"
    )
    return ChatForm(controls, f"{before}{LOOP}{body}{END_LOOP}{{% if add_generation_prompt %}}{begins}{{% endif %}}")


def _two_kinds(
    *controls: str, before: str = "", question: str, answer: str, begins: str = "", trim: bool = False
) -> ChatForm:
    """Questions and answers that are written differently; TEXT stands for the content in both."""
    content = "{{ m['content'] | trim }}" if trim else "{{ m['content'] }}"
    question, answer = question.replace("TEXT", content), answer.replace("TEXT", content)
    return ChatForm(
        controls,
        f"{before}{LOOP}{{% if m['role'] == 'assistant' %}}{answer}{{% else %}}{question}{{% endif %}}{END_LOOP}"
        f"{{% if add_generation_prompt %}}{begins}{{% endif %}}",
    )


CHAT_ML = ("<|im_start|>", "<|im_end|>")
LLAMA_3 = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
PHI = ("<|user|>", "<|assistant|>", "<|end|>")
THOUGHTS = (
    "{% set text = m['content'] %}{% if '</think>' in text and not loop.last %}"
    "{% set text = text.split('</think>')[-1].lstrip('\\n') %}{% endif %}"
)

FORMS: dict[str, ChatForm] = {
    "SDAR, Qwen2.5, Dream (ChatML)": _turns(
        *CHAT_ML, turn="<|im_start|>ROLE\nTEXT<|im_end|>\n", begins="<|im_start|>assistant\n"
    ),
    "Qwen3 (earlier thoughts dropped)": ChatForm(
        CHAT_ML,
        LOOP
        + THOUGHTS
        + "<|im_start|>{{ m['role'] }}\n{{ text }}<|im_end|>\n"
        + END_LOOP
        + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    ),
    "LLaDA": _turns(
        "<|startoftext|>",
        *LLAMA_3[1:],
        before="<|startoftext|>",
        turn="<|start_header_id|>ROLE<|end_header_id|>\n\nTEXT<|eot_id|>",
        begins="<|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    "LLaDA2, Ling": _turns(
        "<|role_end|>",
        turn="<role>ROLE</role>TEXT<|role_end|>",
        begins="<role>ASSISTANT</role>",
        roles={"system": "SYSTEM", "user": "HUMAN", "assistant": "ASSISTANT"},
    ),
    "Llama 2": _two_kinds("<s>", "</s>", question="<s>[INST] TEXT [/INST]", answer=" TEXT </s>", trim=True),
    "Llama 3": _turns(
        *LLAMA_3,
        before="<|begin_of_text|>",
        turn="<|start_header_id|>ROLE<|end_header_id|>\n\nTEXT<|eot_id|>",
        begins="<|start_header_id|>assistant<|end_header_id|>\n\n",
        trim=True,
    ),
    "Mistral 0.2": _two_kinds("<s>", "</s>", before="<s>", question="[INST] TEXT [/INST]", answer="TEXT</s>"),
    "Mistral 0.3": _two_kinds(
        "<s>", "</s>", "[INST]", "[/INST]", before="<s>", question="[INST] TEXT[/INST]", answer=" TEXT</s>"
    ),
    "Gemma": _turns(
        "<bos>",
        "<start_of_turn>",
        "<end_of_turn>",
        before="<bos>",
        turn="<start_of_turn>ROLE\nTEXT<end_of_turn>\n",
        begins="<start_of_turn>model\n",
        roles={"assistant": "model"},
        trim=True,
    ),
    "Phi-3": _turns(*PHI, turn="<|ROLE|>\nTEXT<|end|>\n", begins="<|assistant|>\n"),
    "Phi-4": _turns(
        *CHAT_ML,
        "<|im_sep|>",
        turn="<|im_start|>ROLE<|im_sep|>TEXT<|im_end|>",
        begins="<|im_start|>assistant<|im_sep|>",
    ),
    "Zephyr": _turns("</s>", turn="<|ROLE|>\nTEXT</s>\n", begins="<|assistant|>\n"),
    "Vicuna": _two_kinds("</s>", question="USER: TEXT ", answer="ASSISTANT: TEXT</s>", begins="ASSISTANT:"),
    "Alpaca": _two_kinds(
        "</s>",
        question="### Instruction:\nTEXT\n\n",
        answer="### Response:\nTEXT</s>\n\n",
        begins="### Response:\n",
    ),
    "DeepSeek V3": _two_kinds(
        "<|begin|>",
        "<|User|>",
        "<|Assistant|>",
        "<|end_of_sentence|>",
        before="<|begin|>",
        question="<|User|>TEXT",
        answer="<|Assistant|>TEXT<|end_of_sentence|>",
        begins="<|Assistant|>",
    ),
    "DeepSeek R1 (thoughts dropped)": ChatForm(
        ("<|begin|>", "<|User|>", "<|Assistant|>", "<|end_of_sentence|>"),
        "<|begin|>"
        + LOOP
        + "{% if m['role'] == 'assistant' %}{% set text = m['content'].split('</think>')[-1] %}"
        + "<|Assistant|>{{ text }}<|end_of_sentence|>{% else %}<|User|>{{ m['content'] }}{% endif %}"
        + END_LOOP
        + "{% if add_generation_prompt %}<|Assistant|>{% endif %}",
    ),
    "Command R": _two_kinds(
        "<|START_OF_TURN_TOKEN|>",
        "<|END_OF_TURN_TOKEN|>",
        "<|USER_TOKEN|>",
        "<|CHATBOT_TOKEN|>",
        question="<|START_OF_TURN_TOKEN|><|USER_TOKEN|>TEXT<|END_OF_TURN_TOKEN|>",
        answer="<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>TEXT<|END_OF_TURN_TOKEN|>",
        begins="<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
        trim=True,
    ),
    "Granite 3": _turns(
        "<|start_of_role|>",
        "<|end_of_role|>",
        "<|end_of_text|>",
        turn="<|start_of_role|>ROLE<|end_of_role|>TEXT<|end_of_text|>\n",
        begins="<|start_of_role|>assistant<|end_of_role|>",
    ),
    "OLMo 2": _two_kinds(
        "<|endoftext|>",
        before="<|endoftext|>",
        question="<|user|>\nTEXT\n",
        answer="<|assistant|>\nTEXT<|endoftext|>\n",
        begins="<|assistant|>\n",
    ),
    "OpenChat": _two_kinds(
        "<|end_of_turn|>",
        question="GPT4 Correct User: TEXT<|end_of_turn|>",
        answer="GPT4 Correct Assistant: TEXT<|end_of_turn|>",
        begins="GPT4 Correct Assistant:",
    ),
    "Falcon": _two_kinds("<|endoftext|>", question="User: TEXT\n\n", answer="Falcon: TEXT\n\n", begins="Falcon:"),
}
