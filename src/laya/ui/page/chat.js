// The chat box talks to /v1/chat/completions as any client does; the explainer asks /ui/route what `laya route` would say.

const turns = [];
let running = null;

function headers() {
  const key = byId("key").value.trim();
  return { "content-type": "application/json", ...(key ? { authorization: `Bearer ${key}` } : {}) };
}

function askForKey() {
  byId("key-field").hidden = false;
  byId("key").focus();
}

async function listModels() {
  const answer = await fetch("/v1/models", { headers: headers(), credentials: "omit" });
  if (answer.status === 401) { byId("key-field").hidden = false; return; }
  if (!answer.ok) return;
  const { data } = await answer.json();
  byId("models").replaceChildren(...data.map((model) => el("option", { value: model.id })));
}

function addTurn(role, text) {
  const shown = el("div", { class: "text" }, text);
  const node = el("div", { class: "turn" }, el("div", { class: "who" }, role), shown);
  byId("turns").hidden = byId("clear").hidden = false;
  byId("turns").append(node);
  byId("turns").scrollTop = byId("turns").scrollHeight;
  return { node, shown, who: node.firstChild };
}

function busy(yes) {
  byId("send").disabled = yes;
  byId("stop").hidden = !yes;
}

// The data of each event of a stream, parsed; ends at [DONE].
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    held += value;
    const parts = held.split(/\r?\n\r?\n/);
    held = parts.pop();
    for (const part of parts) {
      const data = part.split(/\r?\n/).filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trim()).join("\n");
      if (data === "[DONE]") return;
      if (data) yield JSON.parse(data);
    }
  }
}

async function send() {
  const text = byId("message").value.trim();
  if (!text || running) return;
  running = new AbortController();
  busy(true);
  byId("told").textContent = "";
  addTurn("you", text);
  const answer = addTurn("…", "");
  const body = { messages: [...turns, { role: "user", content: text }], stream: true, stream_options: { include_usage: true }, max_tokens: Number(byId("limit").value) || 256 };
  const model = byId("model").value.trim();
  if (model) body.model = model;
  const temperature = byId("temperature").value; // 0 at first: small models ramble at 1. Empty where a backend wants its own.
  if (temperature) body.temperature = Number(temperature);
  try {
    const reply = await converse(body, answer);
    turns.push({ role: "user", content: text }, { role: "assistant", content: reply });
    byId("message").value = "";
  } catch (fault) {
    if (fault.name === "AbortError") byId("told").textContent = "stopped";
    else { answer.node.classList.add("bad"); answer.shown.textContent = fault.message; }
  } finally {
    running = null;
    busy(false);
  }
}

async function converse(body, answer) {
  const began = performance.now();
  const response = await fetch("/v1/chat/completions", { method: "POST", headers: headers(), body: JSON.stringify(body), signal: running.signal, credentials: "omit" });
  const backend = response.headers.get("x-laya-backend") || "nowhere", route = response.headers.get("x-laya-route") || "none";
  answer.who.textContent = `${decodeURIComponent(backend)}, route ${decodeURIComponent(route)}`;
  if (!response.ok) {
    if (response.status === 401) askForKey();
    const told = await response.json().catch(() => null);
    throw new Error(told && told.error ? `${response.status}: ${told.error.message}` : `The answer was ${response.status}.`);
  }
  let text = "", first = 0, usage = null;
  for await (const event of events(response)) {
    if (event.error) throw new Error(event.error.message);
    usage = event.usage || usage;
    const piece = event.choices && event.choices[0] && event.choices[0].delta.content;
    if (!piece) continue;
    first = first || performance.now();
    text += piece;
    const log = byId("turns"), follows = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
    answer.shown.textContent = text;
    if (follows) log.scrollTop = log.scrollHeight;
  }
  tell(began, first, usage);
  return text;
}

function tell(began, first, usage) {
  if (!first) { byId("told").textContent = "an empty answer"; return; }
  const seconds = (performance.now() - first) / 1000, tokens = usage ? usage.completion_tokens : 0;
  const speed = tokens > 1 && seconds > 0 ? `, ${tokens} tokens at ${number((tokens - 1) / seconds)}/s` : "";
  byId("told").textContent = `first token after ${milliseconds(first - began)}${speed}`;
}

function explanation(answer) {
  const rows = [];
  if (answer.route === null) rows.push(el("p", {}, el("b", {}, answer.model), ` is taken by no rule: ${answer.why}`));
  else {
    rows.push(el("p", {}, el("b", {}, answer.model), " goes to route ", el("b", {}, answer.route), ` (${answer.policy})`));
    rows.push(el("p", { class: "quiet" }, `rule ${answer.rule}: ${answer.why}`));
  }
  const lines = answer.classify.map((rule) => {
    const when = Object.entries(rule.when).map(([key, value]) => `${key}: ${JSON.stringify(value)}`).join(", ") || "always";
    return `classify ${rule.rule}: ${when} → ${rule.targets.map((target) => target.backend).join(", ")}`;
  });
  if (!answer.classify.length) lines.push(...answer.targets.map((target) => `target ${target.backend}${target.model ? `, sent as ${target.model}` : ""}, weight ${target.weight}`));
  if (answer.decision) {
    const rule = answer.decision.rule ? `rule ${answer.decision.rule}` : "the route's own targets";
    lines.push(`this message: ${rule} (${answer.decision.why}) → ${answer.decision.targets.map((target) => target.backend).join(", ")}`);
  }
  if (answer.fallback.length) lines.push(`fallback ${answer.fallback.join(", ")}`);
  for (const other of answer.candidates) if (!other.wins) lines.push(`not ${other.rule} (route ${other.route}): ${other.lost_because}`);
  if (lines.length) rows.push(el("ul", {}, lines.map((line) => el("li", {}, line))));
  return rows;
}

async function explain() {
  const asked = new URLSearchParams();
  if (byId("model").value.trim()) asked.set("model", byId("model").value.trim());
  if (byId("message").value.trim()) asked.set("message", byId("message").value.trim());
  const response = await fetch(`/ui/route?${asked}`);
  const answer = await response.json();
  byId("explained").hidden = false;
  byId("explained").replaceChildren(...(response.ok ? explanation(answer) : [el("p", { class: "bad" }, answer.error.message)]));
}

byId("chat").addEventListener("submit", (event) => { event.preventDefault(); send(); });
byId("message").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
});
byId("stop").addEventListener("click", () => running && running.abort());
byId("explain").addEventListener("click", explain);
byId("clear").addEventListener("click", () => {
  turns.length = 0;
  byId("turns").replaceChildren();
  byId("turns").hidden = byId("clear").hidden = byId("explained").hidden = true;
  byId("told").textContent = "";
});
byId("key").value = sessionStorage.getItem("laya-key") || "";
byId("key").addEventListener("change", () => { sessionStorage.setItem("laya-key", byId("key").value); listModels(); });
listModels();
