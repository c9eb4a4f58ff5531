// https://openai.github.io/openai-agents-js/guides/models/
import { Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, run, setTracingDisabled, tool } from "@openai/agents";
import OpenAI from "openai";
import { z } from "zod";
import { kind, model as name, question, say, take as left, url } from "./task.mjs";

setTracingDisabled(true);
const client = new OpenAI({ baseURL: url, apiKey: "none", maxRetries: 0 });
const chat = new OpenAIChatCompletionsModel(client, name);
const responses = new OpenAIResponsesModel(client, name);
const Stock = z.object({ kind: z.enum(["pens", "cups"]), number: z.number().int().min(0).max(99) });
const take = tool({
  name: "take",
  description: "How many pens or cups are left.",
  parameters: z.object({ kind: z.enum(["pens", "cups"]), have: z.number().int(), sold: z.number().int() }),
  execute: left,
});

if (kind === "chat") {
  say({ text: (await run(new Agent({ name: "a", instructions: "Be brief.", model: chat }), question)).finalOutput });
} else if (kind === "stream") {
  const stream = await run(new Agent({ name: "a", model: responses }), question, { stream: true });
  for await (const _ of stream);
  say({ text: stream.finalOutput });
} else if (kind === "tools") {
  const modelSettings = { toolChoice: "required" };
  for (const model of [chat, responses])
    say({ calls: ["take"], text: (await run(new Agent({ name: "a", model, tools: [take], modelSettings }), question)).finalOutput });
} else if (kind === "structured") {
  for (const model of [chat, responses])
    say({ object: (await run(new Agent({ name: "a", model, outputType: Stock }), question)).finalOutput });
}
