"""https://docs.langchain.com/oss/python/integrations/chat/openai"""

from typing import Literal

from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field
from task import KIND, MODEL, QUESTION, URL, say
from task import take as left


class Stock(BaseModel):
    """What somebody has."""

    kind: Literal["pens", "cups"]
    number: int = Field(ge=0, le=99)


@tool
def take(kind: Literal["pens", "cups"], have: int, sold: int) -> int:
    """How many pens or cups are left."""
    return left(kind, have, sold)


model = ChatOpenAI(model=MODEL, base_url=URL, api_key="none", max_retries=0)
if KIND == "chat":
    say(text=model.invoke(QUESTION).content)
elif KIND == "stream":
    say(text="".join(chunk.content for chunk in model.stream(QUESTION)))
elif KIND in ("tools", "responses"):
    if KIND == "responses":
        model = ChatOpenAI(model=MODEL, base_url=URL, api_key="none", max_retries=0, use_responses_api=True)
    messages = [HumanMessage(QUESTION)]
    call_message = model.bind_tools([take], tool_choice="take").invoke(messages)
    messages.append(call_message)
    messages += [take.invoke(call) for call in call_message.tool_calls]
    answer = model.bind_tools([take]).invoke(messages)
    say(calls=[call["name"] for call in call_message.tool_calls], text=answer.text)
elif KIND == "structured":
    objects = [
        model.with_structured_output(Stock, method=method).invoke(QUESTION)
        for method in ("json_schema", "function_calling")
    ]
    say(object=objects[0].model_dump())
