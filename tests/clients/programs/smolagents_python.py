"""https://huggingface.co/docs/smolagents"""

from smolagents import OpenAIServerModel, Tool
from task import KIND, MODEL, QUESTION, URL, say


class Take(Tool):
    name = "take"
    description = "How many pens or cups are left."
    inputs = {  # noqa: RUF012
        "have": {"type": "integer", "description": "how many there were"},
        "sold": {"type": "integer", "description": "how many are gone", "nullable": True},
    }
    output_type = "integer"

    def forward(self, have: int, sold: int | None = None) -> int:
        return have - (sold or 0)


model = OpenAIServerModel(MODEL, api_base=URL, api_key="none", client_kwargs={"max_retries": 0})
messages = [{"role": "user", "content": [{"type": "text", "text": QUESTION}]}]
if KIND == "chat":
    say(text=model(messages, stop_sequences=["Observation:", "Calling tools:"]).content)
elif KIND == "stream":
    say(text="".join(delta.content or "" for delta in model.generate_stream(messages)))
elif KIND == "tools":
    message = model(messages, tools_to_call_from=[Take()])
    say(calls=[call.function.name for call in message.tool_calls])
elif KIND == "structured":
    from smolagents.models import CODEAGENT_RESPONSE_FORMAT

    say(text=model(messages, response_format=CODEAGENT_RESPONSE_FORMAT, max_tokens=64).content)
