"""https://openai.github.io/openai-agents-python/models/"""

from typing import Literal

import openai
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from pydantic import BaseModel, Field
from task import KIND, MODEL, QUESTION, URL, say
from task import take as left


class Stock(BaseModel):
    """What somebody has."""

    kind: Literal["pens", "cups"]
    number: int = Field(ge=0, le=99)


@function_tool
def take(kind: Literal["pens", "cups"], have: int, sold: int) -> int:
    """How many pens or cups are left."""
    return left(kind, have, sold)


set_tracing_disabled(True)
client = openai.AsyncOpenAI(base_url=URL, api_key="none", max_retries=0)
chat = OpenAIChatCompletionsModel(MODEL, client)
responses = OpenAIResponsesModel(MODEL, client)
required = ModelSettings(tool_choice="required")
if KIND == "chat":
    say(text=Runner.run_sync(Agent("a", instructions="Be brief.", model=chat), QUESTION).final_output)
elif KIND == "stream":
    import asyncio

    async def run() -> str:
        streamed = Runner.run_streamed(Agent("a", model=responses), QUESTION)
        async for _ in streamed.stream_events():
            pass
        return streamed.final_output

    say(text=asyncio.run(run()))
elif KIND == "tools":
    answer = Runner.run_sync(Agent("a", tools=[take], model=chat, model_settings=required), QUESTION)
    say(calls=["take"], text=answer.final_output)
elif KIND == "structured":
    answers = [
        Runner.run_sync(Agent("a", output_type=Stock, model=m), QUESTION).final_output for m in (chat, responses)
    ]
    for model in (chat, responses):  # an answer is a call, or text of the form
        Runner.run_sync(Agent("a", output_type=Stock, tools=[take], model=model), QUESTION)
    say(object=answers[0].model_dump())
elif KIND == "responses":
    answer = Runner.run_sync(Agent("a", tools=[take], model=responses, model_settings=required), QUESTION)
    say(calls=["take"], text=answer.final_output)
