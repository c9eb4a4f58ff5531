"""https://ai.pydantic.dev/models/openai/"""

from contextlib import suppress
from typing import Literal

from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput, PromptedOutput
from pydantic_ai.exceptions import UnexpectedModelBehavior
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from task import KIND, MODEL, QUESTION, URL, say
from task import take as left


class Stock(BaseModel):
    """What somebody has."""

    kind: Literal["pens", "cups"]
    number: int = Field(ge=0, le=99)


def take(kind: Literal["pens", "cups"], have: int, sold: int) -> int:
    """How many pens or cups are left."""
    return left(kind, have, sold)


provider = OpenAIProvider(base_url=URL, api_key="none")
model = OpenAIChatModel(MODEL, provider=provider)
if KIND == "chat":
    agent = Agent(model, instructions="Be brief.")
    first = agent.run_sync(QUESTION)
    with suppress(UnexpectedModelBehavior):  # the model's second answer is empty
        agent.run_sync(QUESTION, message_history=first.all_messages())
    say(text=first.output)
elif KIND == "stream":
    answer = Agent(model).run_stream_sync(QUESTION)
    say(text="".join(answer.stream_text(delta=True)))
elif KIND == "tools":
    answer = Agent(model, tools=[take]).run_sync(QUESTION)
    forced = Agent(model, output_type=take).run_sync(QUESTION)
    say(calls=["take"], text=answer.output, left=forced.output)
elif KIND == "structured":
    objects = [Agent(model, output_type=form).run_sync(QUESTION).output for form in (Stock, NativeOutput(Stock))]
    with suppress(UnexpectedModelBehavior):  # any JSON object is right, and the model gives {}
        Agent(model, output_type=PromptedOutput(Stock)).run_sync(QUESTION)
    Agent(model, output_type=NativeOutput(Stock), tools=[take]).run_sync(QUESTION)
    say(object=objects[0].model_dump())
elif KIND == "responses":
    answer = Agent(OpenAIResponsesModel(MODEL, provider=provider), output_type=Stock).run_sync(QUESTION)
    say(object=answer.output.model_dump())
