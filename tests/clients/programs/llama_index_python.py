"""https://developers.llamaindex.ai/python/examples/llm/openai_like"""

from typing import Literal

from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, Field
from task import KIND, MODEL, QUESTION, URL, say
from task import take as left


class Stock(BaseModel):
    """What somebody has."""

    kind: Literal["pens", "cups"]
    number: int = Field(ge=0, le=99)


def take(kind: Literal["pens", "cups"], have: int, sold: int) -> int:
    """How many pens or cups are left."""
    return left(kind, have, sold)


llm = OpenAILike(
    model=MODEL,
    api_base=URL,
    api_key="none",
    context_window=1000,
    is_chat_model=True,
    is_function_calling_model=True,
    max_retries=0,
)
messages = [ChatMessage(role="user", content=QUESTION)]
if KIND == "chat":
    say(text=llm.chat(messages).message.content)
elif KIND == "stream":
    say(text="".join(chunk.delta for chunk in llm.stream_chat(messages)))
elif KIND == "tools":
    tools = [FunctionTool.from_defaults(take)]
    answer = llm.chat_with_tools(tools, chat_history=messages, tool_required=True)
    calls = llm.get_tool_calls_from_response(answer)
    messages.append(answer.message)
    for call in calls:
        output = tools[0](**call.tool_kwargs)
        messages.append(
            ChatMessage(role="tool", content=str(output), additional_kwargs={"tool_call_id": call.tool_id})
        )
    second = llm.chat_with_tools(tools, chat_history=messages)
    say(calls=[call.tool_name for call in calls], text=second.message.content)
elif KIND == "structured":
    say(object=llm.structured_predict(Stock, PromptTemplate(QUESTION)).model_dump())
elif KIND == "completions":
    plain = OpenAILike(model=MODEL, api_base=URL, api_key="none", context_window=1000, max_tokens=16, max_retries=0)
    say(text=plain.complete(QUESTION).text)
