"""Chat templates of our own, each with calls in a form that released models have.

They are small: turns between marks, the tools as JSON, and calls as the form of the same name shows them.
"""

SHOW_TOOLS = "{% for tool in tools or [] %}TOOL {{ tool | tojson }}\n{% endfor %}"
BEGIN_TURN = (
    SHOW_TOOLS + "{% for m in messages %}"
    "{% if m['role'] == 'tool' %}<|user|>RESULT {{ m['content'] }}"
    "{% elif m['role'] == 'assistant' %}<|assistant|>{{ m['content'] if m['content'] else '' }}"
    "{% set ns = namespace(first=true) %}"
)
END_TURN = (
    "<|endoftext|>{% else %}<|user|>{{ m['content'] }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
EACH = "{% for call in m.tool_calls or [] %}{% set f = call.function %}"


def template(calls: str) -> str:
    """A template whose turns of the assistant end with `calls`."""
    return BEGIN_TURN + calls + END_TURN


def _tagged(key_begin: str, key_end: str, value_end: str) -> str:
    value = "{{ v if v is string else v | tojson }}"
    return f"{{% for k, v in f.arguments.items() %}}{key_begin}{{{{ k }}}}{key_end}{value}{value_end}{{% endfor %}}"


LIST = "{% if m.tool_calls %}BEGIN" + EACH + "ONE{% if not loop.last %}, {% endif %}{% endfor %}END{% endif %}"
LITERAL = (
    "{%- macro literal(v) -%}"
    "{%- if v is none -%}null{%- elif v is boolean -%}{{ 'true' if v else 'false' }}"
    "{%- elif v is string -%}{{ '<|\"|>' + v + '<|\"|>' }}"
    "{%- elif v is mapping -%}{{ '{' }}{%- for k, w in v | dictsort -%}"
    "{{ ',' if not loop.first }}{{ k }}:{{ literal(w) }}{%- endfor -%}{{ '}' }}"
    "{%- elif v is sequence -%}[{%- for w in v -%}{{ ',' if not loop.first }}{{ literal(w) }}{%- endfor -%}]"
    "{%- else -%}{{ v }}{%- endif -%}{%- endmacro -%}"
)
PYTHON_LITERAL = (
    "{%- macro python(v) -%}"
    "{%- if v is none -%}None{%- elif v is boolean -%}{{ 'True' if v else 'False' }}"
    "{%- elif v is string -%}{{ v | tojson }}"
    "{%- elif v is mapping -%}{{ '{' }}{%- for k, w in v.items() -%}"
    "{{ ', ' if not loop.first }}{{ k | tojson }}: {{ python(w) }}{%- endfor -%}{{ '}' }}"
    "{%- elif v is sequence -%}[{%- for w in v -%}{{ ', ' if not loop.first }}{{ python(w) }}{%- endfor -%}]"
    "{%- else -%}{{ v | tojson }}{%- endif -%}{%- endmacro -%}"
)
KEYWORDS = (
    "{{ f.name }}({% for k, v in f.arguments.items() %}{{ ', ' if not loop.first }}{{ k }}={{ python(v) }}"
    "{% endfor %})"
)
NAMED_JSON = '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}'
GAP = "{{ '\\n' if m['content'] or not loop.first }}"

TEMPLATES = {
    "hermes": template(EACH + GAP + f"<tool_call>\n{NAMED_JSON}}}\n</tool_call>{{% endfor %}}"),
    "xml": template(
        EACH
        + GAP
        + "<tool_call>\n<function={{ f.name }}>\n"
        + _tagged("<parameter=", ">\n", "\n</parameter>\n")
        + "</function>\n</tool_call>{% endfor %}"
    ),
    "glm": template(
        EACH
        + GAP
        + "<tool_call>{{ f.name + '\\n' }}"
        + _tagged("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n")
        + "</tool_call>{% endfor %}"
    ),
    "glm-compact": template(
        EACH
        + "<tool_call>{{ f.name }}"
        + _tagged("<arg_key>", "</arg_key><arg_value>", "</arg_value>")
        + "</tool_call>{% endfor %}"
    ),
    "llama": template(
        "{% if m.tool_calls and m.tool_calls | length > 1 %}{{ raise_exception('one call at once') }}{% endif %}"
        + EACH
        + '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}{% endfor %}'
    ),
    "pythonic": PYTHON_LITERAL + template(LIST.replace("BEGIN", "[").replace("ONE", KEYWORDS).replace("END", "]")),
    "lfm": PYTHON_LITERAL
    + template(
        LIST.replace("BEGIN", "<|tool_call_start|>[").replace("ONE", KEYWORDS).replace("END", "]<|tool_call_end|>")
    ),
    "mistral": template(
        LIST.replace("BEGIN", "[TOOL_CALLS] [")
        .replace(
            "ONE",
            "{% if call.id | length != 9 %}{{ raise_exception('ids have length 9') }}{% endif %}"
            + NAMED_JSON
            + ', "id": "{{ call.id }}"}',
        )
        .replace("END", "]")
    ),
    "mistral-args": template(EACH + "[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}{% endfor %}"),
    "gemma": LITERAL
    + template(
        EACH
        + "<|tool_call>call:{{ f.name }}{{ '{' }}{% for k, v in f.arguments | dictsort %}"
        + "{{ ',' if not loop.first }}{{ k }}:{{ literal(v) }}{% endfor %}{{ '}' }}<tool_call|>{% endfor %}"
    ),
    "deepseek": template(
        "{% if m.tool_calls and m['content'] is none %}<｜tool▁calls▁begin｜>"
        + EACH
        + "{{ '\\n' if not loop.first }}<｜tool▁call▁begin｜>{{ call.type }}<｜tool▁sep｜>"
        + "{{ f.name + '\\n```json\\n' + f.arguments + '\\n```' }}<｜tool▁call▁end｜>{% endfor %}"
        + "<｜tool▁calls▁end｜>{% endif %}"
    ),
    "deepseek-short": template(
        "{% if m.tool_calls %}<｜tool▁calls▁begin｜>"
        + EACH
        + "<｜tool▁call▁begin｜>{{ f.name }}<｜tool▁sep｜>{{ f.arguments | tojson }}<｜tool▁call▁end｜>{% endfor %}"
        + "<｜tool▁calls▁end｜>{% endif %}"
    ),
}
"""Templates by the name of their form."""
OPENS_THOUGHTS = TEMPLATES["hermes"].replace(
    "{% if add_generation_prompt %}<|assistant|>", "{% if add_generation_prompt %}<|assistant|><think>\n"
)
