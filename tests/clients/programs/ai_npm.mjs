// https://ai-sdk.dev/providers/openai-compatible-providers
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, isStepCount, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import { kind, model as name, question, say, take as left, url } from "./task.mjs";

const provider = createOpenAICompatible({ name: "mbd", baseURL: url, supportsStructuredOutputs: true, includeUsage: true });
const model = provider(name);
const shared = { model, prompt: question, maxRetries: 0 };
const Stock = z.object({ kind: z.enum(["pens", "cups"]), number: z.number().int().min(0).max(99) });
const take = tool({
  description: "How many pens or cups are left.",
  inputSchema: z.object({
    kind: z.enum(["pens", "cups"]),
    have: z.number().int().min(0).max(99),
    sold: z.number().int().min(0).max(99),
  }),
  execute: async (input) => left(input),
});
const atMostTwo = (isStepCount ?? stepCountIs)(2);

if (kind === "chat") {
  say({ text: (await generateText(shared)).text });
} else if (kind === "stream") {
  const { textStream, usage } = streamText(shared);
  let text = "";
  for await (const piece of textStream) text += piece;
  say({ text, usage: await usage });
} else if (kind === "tools") {
  const { steps } = await generateText({ ...shared, tools: { take }, toolChoice: "required", stopWhen: atMostTwo });
  say({ calls: steps.flatMap((step) => step.toolCalls.map((call) => call.toolName)) });
} else if (kind === "structured") {
  const whole = await generateText({ ...shared, output: Output.object({ schema: Stock }) });
  const streamed = streamText({ ...shared, output: Output.object({ schema: Stock }) });
  for await (const _ of streamed.partialOutputStream);
  say({ object: whole.output, streamed: await streamed.output });
} else if (kind === "responses") {
  const responses = createOpenAI({ baseURL: url, apiKey: "none" })(name);
  const providerOptions = { openai: { store: false } };
  const asked = { ...shared, model: responses, providerOptions, tools: { take }, toolChoice: "required" };
  const { steps } = await generateText({ ...asked, stopWhen: atMostTwo });
  say({ calls: steps.flatMap((step) => step.toolCalls.map((call) => call.toolName)) });
}
