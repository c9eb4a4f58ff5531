"""https://github.com/openai/openai-python"""

import json
from typing import Literal

import openai
from pydantic import BaseModel, Field
from task import KIND, MODEL, QUESTION, URL, say, take

client = openai.OpenAI(base_url=URL, api_key="none", max_retries=0)


class Stock(BaseModel):
    kind: Literal["pens", "cups"]
    number: int = Field(ge=0, le=99)


class Take(BaseModel):
    """How many pens or cups are left."""

    kind: Literal["pens", "cups"]
    have: int = Field(ge=0, le=99)
    sold: int = Field(ge=0, le=99)


messages = [{"role": "user", "content": QUESTION}]
if KIND == "chat":
    answer = client.chat.completions.create(model=MODEL, messages=messages)
    say(text=answer.choices[0].message.content)
elif KIND == "stream":
    with client.chat.completions.stream(
        model=MODEL, messages=messages, stream_options={"include_usage": True}
    ) as stream:
        for _ in stream:
            pass
        answer = stream.get_final_completion()
    say(text=answer.choices[0].message.content, usage=answer.usage.model_dump())
elif KIND == "tools":
    tools = [openai.pydantic_function_tool(Take)]
    answer = client.chat.completions.parse(model=MODEL, messages=messages, tools=tools, tool_choice="required")
    message = answer.choices[0].message
    messages.append(message)
    for call in message.tool_calls:
        left = take(**call.function.parsed_arguments.model_dump())
        messages.append({"role": "tool", "tool_call_id": call.id, "content": str(left)})
    answer = client.chat.completions.parse(model=MODEL, messages=messages, tools=tools, tool_choice="none")
    say(calls=[call.function.name for call in message.tool_calls], text=answer.choices[0].message.content)
elif KIND == "structured":
    answer = client.chat.completions.parse(model=MODEL, messages=messages, response_format=Stock)
    say(object=answer.choices[0].message.parsed.model_dump())
elif KIND == "completions":
    answer = client.completions.create(model=MODEL, prompt=QUESTION, logprobs=1, max_tokens=16)
    say(text=answer.choices[0].text)
elif KIND == "responses":
    tools = [openai.pydantic_function_tool(Take)["function"] | {"type": "function"}]
    asked = [{"role": "user", "content": QUESTION}]
    with client.responses.stream(model=MODEL, input=asked, tools=tools, tool_choice="required") as stream:
        for _ in stream:
            pass
        first = stream.get_final_response()
    calls = [item for item in first.output if item.type == "function_call"]
    asked += first.output
    for call in calls:
        left = take(**json.loads(call.arguments))
        asked.append({"type": "function_call_output", "call_id": call.call_id, "output": str(left)})
    parsed = client.responses.parse(model=MODEL, input=asked, text_format=Stock)
    say(calls=[call.name for call in calls], object=parsed.output_parsed.model_dump())
