// https://github.com/openai/openai-node
import OpenAI from "openai";
import { zodFunction, zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";
import { kind, model, question, say, take, url } from "./task.mjs";

const client = new OpenAI({ baseURL: url, apiKey: "none", maxRetries: 0 });
const Stock = z.object({ kind: z.enum(["pens", "cups"]), number: z.number().int().min(0).max(99) });
const Take = z.object({
  kind: z.enum(["pens", "cups"]),
  have: z.number().int().min(0).max(99),
  sold: z.number().int().min(0).max(99),
});
const messages = [{ role: "user", content: question }];

if (kind === "chat") {
  const answer = await client.chat.completions.create({ model, messages });
  say({ text: answer.choices[0].message.content });
} else if (kind === "stream") {
  const answer = await client.chat.completions.stream({ model, messages }).finalChatCompletion();
  say({ text: answer.choices[0].message.content });
} else if (kind === "tools") {
  const tool = zodFunction({ name: "take", parameters: Take, function: take, description: "How many are left." });
  const calls = [];
  const runner = client.chat.completions
    .runTools({ model, messages, tools: [tool], tool_choice: "required" }, { maxChatCompletions: 2 })
    .on("functionToolCall", (call) => calls.push(call.name));
  await runner.done();
  say({ calls });
} else if (kind === "structured") {
  const response_format = zodResponseFormat(Stock, "stock");
  const answer = await client.chat.completions.parse({ model, messages, response_format });
  say({ object: answer.choices[0].message.parsed });
} else if (kind === "responses") {
  const tools = [{ type: "function", name: "take", strict: true, parameters: z.toJSONSchema(Take) }];
  const stream = client.responses.stream({ model, input: question, tools, tool_choice: "required" });
  const first = await stream.finalResponse();
  const input = [{ role: "user", content: question }, ...first.output];
  for (const call of first.output.filter((item) => item.type === "function_call")) {
    input.push({ type: "function_call_output", call_id: call.call_id, output: take(JSON.parse(call.arguments)) });
  }
  const parsed = await client.responses.parse({ model, input, text: { format: zodTextFormat(Stock, "stock") } });
  say({ object: parsed.output_parsed });
}
