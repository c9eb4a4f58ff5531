// https://docs.langchain.com/oss/javascript/integrations/chat/openai
import { HumanMessage } from "@langchain/core/messages";
import { tool } from "@langchain/core/tools";
import { ChatOpenAI } from "@langchain/openai";
import { z } from "zod";
import { kind, model as name, question, say, take as left, url } from "./task.mjs";

const Stock = z.object({ kind: z.enum(["pens", "cups"]), number: z.number().int().min(0).max(99) });
const take = tool(left, {
  name: "take",
  description: "How many pens or cups are left.",
  schema: z.object({
    kind: z.enum(["pens", "cups"]),
    have: z.number().int().min(0).max(99),
    sold: z.number().int().min(0).max(99),
  }),
});
const options = { model: name, apiKey: "none", configuration: { baseURL: url }, maxRetries: 0 };
const model = new ChatOpenAI({ ...options, useResponsesApi: kind === "responses" });

if (kind === "chat") {
  say({ text: (await model.invoke(question)).content });
} else if (kind === "stream") {
  let text = "";
  for await (const chunk of await model.stream(question)) text += chunk.content;
  say({ text });
} else if (kind === "tools" || kind === "responses") {
  const messages = [new HumanMessage(question)];
  const first = await model.bindTools([take], { tool_choice: "take" }).invoke(messages);
  messages.push(first);
  for (const call of first.tool_calls) messages.push(await take.invoke(call));
  const second = await model.bindTools([take]).invoke(messages);
  say({ calls: first.tool_calls.map((call) => call.name), text: second.text });
} else if (kind === "structured") {
  const asSchema = await model.withStructuredOutput(Stock, { method: "jsonSchema" }).invoke(question);
  const asCall = await model.withStructuredOutput(Stock, { method: "functionCalling" }).invoke(question);
  say({ object: asSchema, called: asCall });
}
