// The playground: two requests to this server's own API, and the frames of their Block Buffers as they come.
"use strict";

const MOST_FRAMES = 4000; // of a side, kept for the slider
const THRESHOLDS = ["tau_m2t", "tau_add", "tau_semi"];
const CALM = matchMedia("(prefers-reduced-motion: reduce)");
const CALM_MS = 500; // between two drawings where motion is unwelcome
const $ = (id) => document.getElementById(id);

let stop = null; // ends what runs
let beginning; // the last question what is served
let served = []; // of /health: the models with their limits and defaults

class Side {
  constructor(name, slots, method = {}) {
    const section = $("side").content.cloneNode(true).firstElementChild;
    this.name = name;
    this.numSlots = slots;
    this.method = method; // the decoding fields beside slots and thresholds
    this.parts = Object.fromEntries(["h2", ".error", ".slots", ".answer"].map((q) => [q, section.querySelector(q)]));
    this.slider = section.querySelector("input");
    this.at = section.querySelector("output");
    this.counters = Object.fromEntries([...section.querySelectorAll("[data-counter]")].map((e) => [e.dataset.counter, e]));
    this.parts.h2.textContent = `${name}: ${slots === 1 ? "one slot" : `${slots} slots`}`;
    const id = name.toLowerCase();
    section.dataset.side = id;
    this.parts.h2.id = `${id}-title`;
    section.setAttribute("aria-labelledby", `${id}-title`);
    this.slider.id = `${id}-forward`;
    section.querySelector(".forward label").htmlFor = this.slider.id;
    this.slider.addEventListener("input", () => this.showFrame(Number(this.slider.value)));
    this.clear();
    $("sides").append(section);
  }

  clear() {
    Object.assign(this, { frames: [], text: "", tokens: 0, mbd: null, drawn: 0, waiting: false, ended: false });
    this.parts[".error"].hidden = true;
    this.slider.disabled = true;
    this.showFrame(0);
    this.draw();
  }

  fail(message) {
    this.parts[".error"].textContent = message;
    this.parts[".error"].hidden = false;
  }

  // One server-sent event.
  take(kind, data) {
    if (data.error) throw new Error(data.error.message);
    if (kind === "frame") {
      this.frames.push(data.frame);
      if (this.frames.length > MOST_FRAMES) this.frames.shift();
    } else {
      for (const choice of data.choices) {
        this.text += choice.text ?? choice.delta?.content ?? "";
        this.tokens += choice.token_ids?.length ?? 0;
      }
      this.mbd = data.mbd ?? this.mbd;
    }
    this.drawSoon();
  }

  drawSoon() {
    if (this.waiting) return;
    this.waiting = true;
    const draw = () => {
      this.waiting = false;
      if (!this.ended) this.drawLast();
    };
    if (CALM.matches) setTimeout(draw, Math.max(0, CALM_MS - (performance.now() - this.drawn)));
    else requestAnimationFrame(draw);
  }

  drawLast() {
    this.draw();
    this.showFrame(this.frames.length);
  }

  // Nothing comes any more: what is shown is the reader's choice from now on.
  end() {
    this.ended = true;
    this.drawLast();
  }

  draw() {
    this.drawn = performance.now();
    const { mbd } = this;
    const tokens = mbd ? mbd.num_tokens : this.tokens;
    const forwards = mbd ? mbd.num_forwards : (this.frames.at(-1)?.forward ?? 0);
    this.counters.tokens.textContent = String(tokens);
    this.counters.forwards.textContent = String(forwards);
    this.counters.tpf.textContent = forwards ? (tokens / forwards).toFixed(2) : "–";
    this.counters.speed.textContent = mbd?.decode_seconds ? (tokens / mbd.decode_seconds).toFixed(0) : "–";
    if (this.parts[".answer"].textContent !== this.text) this.parts[".answer"].textContent = this.text;
    this.slider.max = String(this.frames.length);
    this.slider.disabled = !this.frames.length;
  }

  // The slots after the k-th frame that is kept, from 1; 0 shows empty slots.
  showFrame(k) {
    const frame = k ? this.frames[k - 1] : null;
    this.slider.value = String(k);
    this.at.textContent = frame ? String(frame.forward) : "0";
    this.slider.setAttribute("aria-valuetext", frame ? `forward ${frame.forward}` : "before the first forward");
    const slots = frame?.slots ?? [];
    const items = [];
    let position = frame?.position ?? 0;
    for (let n = 0; n < this.numSlots; n++) {
      items.push(slots[n] ? slotItem(n, slots[n], position) : emptyItem(n));
      position += slots[n]?.tokens.length ?? 0;
    }
    this.parts[".slots"].replaceChildren(...items);
  }

  get summary() {
    if (!this.mbd) return `${this.name} was stopped`;
    const judged = this.mbd.num_drafted_tokens;
    const by = this.mbd.draft_model ? ` (drafts of ${this.mbd.draft_model})` : "";
    const verdict = judged ? `, ${this.mbd.num_confirmed_tokens} of ${judged} drafted tokens confirmed${by}` : "";
    return `${this.name}: ${this.mbd.num_tokens} tokens in ${this.mbd.num_forwards} forwards, ${this.mbd.tpf.toFixed(2)} per forward${verdict}`;
  }
}

function element(name, kind, text = "") {
  const made = document.createElement(name);
  if (kind) made.className = kind;
  made.textContent = text;
  return made;
}

function emptyItem(n) {
  const item = element("li", "slot empty");
  const head = element("p");
  head.append(element("span", "", `Slot ${n + 1}`), element("span", "chip", "empty"));
  item.append(head);
  return item;
}

function slotItem(n, slot, position) {
  const item = element("li", `slot ${slot.state}`);
  const masked = slot.tokens.filter((t) => t === null).length;
  const head = element("p");
  head.append(element("span", "", `Slot ${n + 1}`), element("span", `chip ${slot.state}`, slot.state));
  const count = element("p");
  const changes = slot.edited.length ? `, ${slot.edited.length} edited` : "";
  const verdict = slot.judged ? `, ${slot.confirmed.length} of ${slot.judged} drafted confirmed` : "";
  count.append(element("span", "", `${masked} masked, ${slot.accepted.length} accepted${changes}${verdict}`));
  const cells = element("div", "cells");
  cells.setAttribute("aria-hidden", "true"); // the counts say it, and the committed text is below
  slot.tokens.forEach((token, offset) => {
    const kinds = ["cell"];
    if (token === null) kinds.push("masked");
    else if (position + offset < 0) kinds.push("known");
    if (slot.accepted.includes(offset)) kinds.push("new");
    if (slot.edited.includes(offset)) kinds.push("edited");
    if (slot.confirmed?.includes(offset)) kinds.push("confirmed");
    if (slot.refused?.includes(offset)) kinds.push("refused");
    const draft = token === null ? (slot.drafted_texts?.[offset] ?? null) : null;
    if (draft !== null) kinds.push("drafted");
    const cell = element("span", kinds.join(" "), shown(slot.texts[offset] ?? draft));
    cell.dataset.position = String(position + offset);
    cells.append(cell);
  });
  item.append(head, count, cells);
  return item;
}

// A token's text, with its white space visible.
function shown(text) {
  return text === null ? "" : text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "␣");
}

function headers() {
  const key = $("key").value;
  return { "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) };
}

// How the chosen model decodes if not in a Block Buffer: it has no frames, no slots and no thresholds of theirs.
function withoutBuffer() {
  const defaults = served.find((m) => m.name === $("model").value)?.defaults;
  if (defaults?.canvas) return ["Canvas", "The whole sequence at once"];
  if (defaults?.causal) return ["Causal", defaults.causal.method === "ar" ? "Token by token" : "Drafts that are judged from left to right"];
  if (defaults?.renoise) return ["Renoise", "A block that is drawn anew in each forward"];
  return null;
}

// The decoding of a side. A verified one has the threshold alone: its only block begins where the last one ends.
function decodingOf({ numSlots, method }) {
  const thresholds = method.verify ? ["tau_m2t"] : THRESHOLDS;
  const slots = method.verify ? {} : { buffer_size: numSlots };
  return { ...slots, ...Object.fromEntries(thresholds.map((t) => [t, Number($(t).value)])), ...method };
}

function body(side) {
  const temperature = Number($("temperature").value);
  const prompt = $("prompt").value;
  const chat = $("route").value === "chat";
  return {
    model: $("model").value,
    ...(chat ? { messages: [{ role: "user", content: prompt }] } : { prompt }),
    max_tokens: Number($("tokens").value),
    stream: true,
    ...(!withoutBuffer() && { frames: true }),
    return_token_ids: true,
    temperature, ...(temperature && { seed: 1 }),
    ...(!withoutBuffer() && { decoding: decodingOf(side) }),
  };
}

async function run(side, signal) {
  try {
    const route = $("route").value === "chat" ? "v1/chat/completions" : "v1/completions";
    const asked = { method: "POST", headers: headers(), body: JSON.stringify(body(side)), signal };
    const answer = await fetch(route, asked);
    if (!answer.ok) throw new Error(await refusal(answer));
    for await (const [kind, data] of events(answer.body)) side.take(kind, data);
  } catch (error) {
    if (error.name !== "AbortError") side.fail(error.message);
  } finally {
    side.end();
  }
}

async function refusal(answer) {
  try {
    return (await answer.json()).error.message;
  } catch {
    return `the server answered ${answer.status}`;
  }
}

// Type and data of each server-sent event, up to [DONE].
async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Error("the answer was cut");
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const fields = new Map(part.split("\n").map((line) => [line.slice(0, line.indexOf(":")), line.slice(line.indexOf(":") + 1).trim()]));
      if (fields.get("data") === "[DONE]") return;
      yield [fields.get("event") ?? "message", JSON.parse(fields.get("data"))];
    }
  }
}

async function runBoth(event) {
  event.preventDefault();
  stop?.abort();
  $("stop").disabled = false;
  await beginning; // a key that was just given: what is served may still be on its way
  if (!served.length) await (beginning = begin());
  stop = new AbortController();
  const { signal } = stop;
  const sides = makeSides();
  $("status").textContent = "Decoding…";
  if ($("turns").checked) {
    for (const side of sides) if (!signal.aborted) await run(side, signal);
  } else {
    await Promise.all(sides.map((side) => run(side, signal)));
  }
  if (stop.signal !== signal) return; // another run has begun
  $("stop").disabled = true;
  const failed = sides.some((side) => !side.parts[".error"].hidden);
  $("status").textContent = failed ? "A request failed; the reason stands with its answer." : `${sides.map((s) => s.summary).join(". ")}.`;
}

function makeSides() {
  $("sides").replaceChildren();
  const other = withoutBuffer();
  if (other) {
    const side = new Side(other[0], 1);
    side.parts.h2.textContent = `${other[1]}: this model has no Block Buffer to show`;
    return [side];
  }
  const sides = [new Side("SingleBD", 1)];
  if ($("slots").value) sides.push(new Side("MultiBD", Number($("slots").value)));
  if ($("verified").checked) sides.push(new Side("Verified", 1, { verify: {} }));
  return sides;
}

function showValues() {
  for (const output of document.querySelectorAll("form output")) output.textContent = Number($(output.htmlFor.value).value).toFixed(2);
}

function chooseModel() {
  stop?.abort();
  const model = served.find((m) => m.name === $("model").value);
  const most = withoutBuffer() ? 1 : (model?.most ?? 4);
  const sizes = Array.from({ length: Math.max(0, most - 1) }, (_, i) => i + 2);
  $("slots").replaceChildren(...sizes.map((n) => new Option(String(n), String(n), n === Math.min(4, most), n === Math.min(4, most))));
  $("run").textContent = sizes.length ? "Run both" : "Run";
  for (const name of THRESHOLDS) if (typeof model?.defaults?.[name] === "number") $(name).value = String(model.defaults[name]);
  showValues();
  makeSides();
}

async function begin() {
  try {
    const state = await (await fetch("health", { headers: headers() })).json();
    if (!state.models) $("status").textContent = "This server says what it serves to whoever has one of its API keys; give one.";
    served = (state.models ?? []).map(({ name, replicas }) => {
      const one = replicas.find((r) => r.engine);
      return { name, most: one?.engine.buffer_size, defaults: one?.defaults };
    });
    $("model").replaceChildren(...served.map((m) => new Option(m.name, m.name)));
  } catch {
    $("status").textContent = "The server does not say what it serves; reload the page to ask again.";
  }
  chooseModel();
}

$("form").addEventListener("submit", runBoth);
$("form").addEventListener("input", showValues);
$("verified").addEventListener("change", () => {
  stop?.abort();
  makeSides();
});
$("model").addEventListener("change", chooseModel);
$("key").addEventListener("change", () => (beginning = begin()));
$("stop").addEventListener("click", () => stop?.abort());
beginning = begin();
