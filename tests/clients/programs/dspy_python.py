"""https://dspy.ai/learn/programming/language_models/"""

from contextlib import suppress
from typing import Literal

import dspy
from dspy.utils.exceptions import AdapterParseError
from task import KIND, MODEL, QUESTION, URL, say
from task import take as left


def take(kind: Literal["pens", "cups"], have: int, sold: int) -> int:
    """How many pens or cups are left."""
    return left(kind, have, sold)


lm = dspy.LM(f"openai/{MODEL}", api_base=URL, api_key="none", model_type="chat", cache=False, num_retries=0)
if KIND == "chat":
    say(text=lm(QUESTION)[0])
elif KIND == "structured":
    dspy.configure(lm=lm, adapter=dspy.JSONAdapter())
    with suppress(AdapterParseError):  # the model's text has not the fields that the prompt asks for
        dspy.Predict("question -> kind: Literal['pens', 'cups'], whole: bool")(question=QUESTION)
    say(text=lm(QUESTION, response_format={"type": "json_object"})[0])
elif KIND == "tools":
    dspy.configure(lm=lm, adapter=dspy.JSONAdapter(use_native_function_calling=True))
    signature = dspy.Signature("question, tools: list[dspy.Tool] -> calls: dspy.ToolCalls")
    with suppress(AdapterParseError):
        dspy.Predict(signature)(question=QUESTION, tools=[dspy.Tool(take)])
    say(text="asked")
