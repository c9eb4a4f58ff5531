"""https://python.useinstructor.com/integrations/openai/"""

from contextlib import suppress
from typing import Literal

import instructor
import openai
from instructor.core.exceptions import InstructorRetryException
from pydantic import BaseModel, Field
from task import KIND, MODEL, QUESTION, URL, say


class Stock(BaseModel):
    """What somebody has."""

    kind: Literal["pens", "cups"]
    number: int = Field(ge=0, le=99)


plain = openai.OpenAI(base_url=URL, api_key="none", max_retries=0)


def ask(mode, **fields):
    client = instructor.from_openai(plain, mode=mode)
    messages = [{"role": "user", "content": QUESTION}]
    return client.chat.completions.create(
        model=MODEL, response_model=Stock, messages=messages, max_retries=0, **fields
    )


if KIND == "tools":
    say(calls=["Stock"], object=ask(instructor.Mode.TOOLS).model_dump())
elif KIND == "stream":
    client = instructor.from_openai(plain, mode=instructor.Mode.TOOLS)
    parts = client.chat.completions.create_partial(
        model=MODEL, response_model=Stock, messages=[{"role": "user", "content": QUESTION}], max_retries=0
    )
    say(object=list(parts)[-1].model_dump())
elif KIND == "structured":
    modes = (instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS_STRICT)
    objects = [ask(mode).model_dump() for mode in modes]
    with suppress(InstructorRetryException):  # any JSON object is right, and the model gives {}
        ask(instructor.Mode.JSON)
    say(object=objects[0])
elif KIND == "responses":
    client = instructor.from_openai(plain, mode=instructor.Mode.RESPONSES_TOOLS)
    answer = client.responses.create(model=MODEL, response_model=Stock, input=QUESTION)
    say(object=answer.model_dump())
