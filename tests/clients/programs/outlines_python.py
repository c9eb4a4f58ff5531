"""https://dottxt-ai.github.io/outlines/latest/features/models/openai/ and .../vllm/"""

import json
from typing import Literal

import openai
import outlines
from pydantic import BaseModel, Field
from task import KIND, MODEL, QUESTION, URL, say


class Stock(BaseModel):
    """What somebody has."""

    kind: Literal["pens", "cups"]
    number: int = Field(ge=0, le=99)


client = openai.OpenAI(base_url=URL, api_key="none", max_retries=0)
model = outlines.from_openai(client, MODEL)
if KIND == "chat":
    say(text=model(QUESTION))
elif KIND == "stream":
    say(text="".join(model.stream(QUESTION)))
elif KIND == "structured":
    say(object=json.loads(model(QUESTION, Stock)))
elif KIND == "vllm":
    vllm = outlines.from_vllm(client, MODEL)
    answers = [vllm(QUESTION, form) for form in (Stock, Literal["pens", "cups"], outlines.types.Regex("[0-9]{2}"))]
    say(object=json.loads(answers[0]), others=answers[1:])
elif KIND == "sglang":
    sglang = outlines.from_sglang(client, MODEL)
    answers = [sglang(QUESTION, form) for form in (Stock, Literal["pens", "cups"], outlines.types.Regex("[0-9]{2}"))]
    say(object=json.loads(answers[0]), others=answers[1:])
