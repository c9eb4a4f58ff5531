"""https://docs.litellm.ai/docs/providers/openai_compatible"""

import json
from typing import Literal

import litellm
from pydantic import BaseModel, Field
from task import KIND, MODEL, QUESTION, URL, say, take

litellm.num_retries = 0
tools = [
    {
        "type": "function",
        "function": {
            "name": "take",
            "description": "How many pens or cups are left.",
            "parameters": {
                "type": "object",
                "properties": {
                    "kind": {"type": "string", "enum": ["pens", "cups"]},
                    "have": {"type": "integer", "minimum": 0, "maximum": 99},
                    "sold": {"type": "integer", "minimum": 0, "maximum": 99},
                },
                "required": ["kind", "have", "sold"],
                "additionalProperties": False,
            },
        },
    }
]


class Stock(BaseModel):
    kind: Literal["pens", "cups"]
    number: int = Field(ge=0, le=99)


def ask(messages, provider="openai", **fields):
    return litellm.completion(model=f"{provider}/{MODEL}", api_base=URL, api_key="none", messages=messages, **fields)


messages = [{"role": "user", "content": QUESTION}]
if KIND == "chat":
    say(text=ask(messages).choices[0].message.content)
elif KIND == "stream":
    chunks = list(ask(messages, stream=True, stream_options={"include_usage": True}))
    whole = litellm.stream_chunk_builder(chunks, messages=messages)
    say(text=whole.choices[0].message.content)
elif KIND == "tools":
    message = ask(messages, tools=tools, tool_choice="required").choices[0].message
    messages.append(message)
    for call in message.tool_calls:
        left = take(**json.loads(call.function.arguments))
        messages.append({"role": "tool", "tool_call_id": call.id, "name": call.function.name, "content": str(left)})
    second = ask(messages, tools=tools)
    say(calls=[call.function.name for call in message.tool_calls], text=second.choices[0].message.content)
elif KIND == "structured":
    say(object=json.loads(ask(messages, response_format=Stock).choices[0].message.content))
elif KIND == "vllm":  # the provider for vLLM's servers
    first = ask(messages, "hosted_vllm", reasoning_effort="low", top_k=20, temperature=0.7, seed=1).choices[0].message
    messages += [first.model_dump(), {"role": "user", "content": QUESTION}]
    say(text=ask(messages, "hosted_vllm").choices[0].message.content)
elif KIND == "responses":
    answer = litellm.responses(model=f"openai/{MODEL}", api_base=URL, api_key="none", input=QUESTION)
    say(text=answer.output_text)
