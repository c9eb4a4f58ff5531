"""https://github.com/anthropics/anthropic-sdk-python"""

import json

import anthropic
from task import KIND, MODEL, QUESTION, URL, say, take

client = anthropic.Anthropic(base_url=URL.removesuffix("/v1"), api_key="none", max_retries=0)
messages = [{"role": "user", "content": QUESTION}]
schema = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["pens", "cups"]},
        "have": {"type": "integer", "minimum": 0, "maximum": 99},
        "sold": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["kind", "have", "sold"],
    "additionalProperties": False,
}
tools = [{"name": "take", "description": "How many pens or cups are left.", "input_schema": schema}]

if KIND == "chat":
    answer = client.messages.create(
        model=MODEL, max_tokens=64, messages=messages, system="Count.", stop_sequences=["!"]
    )
    counted = client.messages.count_tokens(model=MODEL, messages=messages, system="Count.")
    assert counted.input_tokens == answer.usage.input_tokens + answer.usage.cache_read_input_tokens
    say(text=answer.content[0].text)
elif KIND == "stream":
    asked = {"model": MODEL, "max_tokens": 64, "messages": messages, "extra_body": {"decoding": {"buffer_size": 4}}}
    asked["thinking"] = {"type": "enabled", "budget_tokens": 32}
    with client.messages.stream(**asked) as stream:
        for _ in stream:
            pass
        answer = stream.get_final_message()
    whole = client.messages.create(**asked)
    assert [block.text for block in answer.content] == [block.text for block in whole.content]
    assert answer.stop_reason == whole.stop_reason
    say(text=answer.content[0].text, usage=answer.usage.model_dump())
elif KIND == "tools":
    asked = {"model": MODEL, "max_tokens": 200, "tools": tools}
    with client.messages.stream(**asked, messages=messages, tool_choice={"type": "any"}) as stream:
        for _ in stream:
            pass
        first = stream.get_final_message()
    assert first.stop_reason == "tool_use"
    calls = [block for block in first.content if block.type == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": c.id, "content": str(take(**c.input))} for c in calls]
    messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
    answer = client.messages.create(**asked, messages=messages, tool_choice={"type": "none"})
    say(calls=[call.name for call in calls], text=answer.content[0].text)
elif KIND == "structured":
    form = {"format": {"type": "json_schema", "schema": schema}}
    answer = client.messages.create(model=MODEL, max_tokens=200, messages=messages, output_config=form)
    say(object=take(**json.loads(answer.content[0].text)))
