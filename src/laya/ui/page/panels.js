// What a frame of /ui/events looks like is written down in docs/operating.md.

const drawn = new Map();

// Draws again only what has changed, so that text which somebody selects stays selected.
function panel(id, input, draw) {
  const text = JSON.stringify(input);
  if (drawn.get(id) === text) return;
  drawn.set(id, text);
  byId(id).replaceChildren(...[draw(input)].flat());
}

const STATE_CLASS = { ready: "good", up: "good", running: "good", closed: "good", calm: "good", asleep: "", stopped: "", loading: "warn",
  warming: "warn", waking: "warn", starting: "warn", yielding: "warn", paused: "bad", unloading: "warn", draining: "warn", stopping: "warn", "half-open": "warn", soft: "warn",
  failed: "bad", stuck: "bad", down: "bad", open: "bad", hard: "bad" };

const state = (word) => el("span", { class: `state ${STATE_CLASS[word] ?? ""}` }, word);

function tile(name, big, unit, under, ...more) {
  return el("div", { class: "tile" }, el("div", { class: "name" }, name),
    el("div", { class: "big" }, big, unit ? el("small", {}, ` ${unit}`) : null), ...more, el("div", { class: "under", title: under }, under));
}

function machineTiles(machine) {
  if (!machine) return el("div", { class: "tile" }, el("p", { class: "empty" }, "Reading the machine…"));
  const tiles = [];
  for (const gpu of machine.gpus) {
    const name = machine.gpus.length > 1 ? `GPU ${gpu.index} memory` : "GPU memory";
    if (gpu.lost) { tiles.push(tile(name, "lost", "", "it needs a reset")); continue; }
    const share = gpu.total ? gpu.used / gpu.total : 0;
    tiles.push(tile(name, bytes(gpu.used), `of ${bytes(gpu.total)}`, gpu.name, bar(share, 0.92, 0.97, name)));
  }
  if (!machine.gpus.length) tiles.push(tile("GPU memory", "–", "", "no NVIDIA GPU is visible here"));
  const host = machine.host, used = host.total - host.available;
  const swap = machine.swap.total ? `, swap ${bytes(machine.swap.used)}` : "";
  tiles.push(tile("Host memory", bytes(used), `of ${bytes(host.total)}`, `Laya ${bytes(machine.process.resident)}${swap}`,
    bar(used / host.total, 0.92, 0.97, "Host memory")));
  if (machine.group) {
    const held = machine.group.total - machine.group.available;
    tiles.push(tile("Control group", bytes(held), `of ${bytes(machine.group.total)}`, "the tightest limit here",
      bar(held / machine.group.total, 0.92, 0.97, "Control group")));
  }
  const hot = machine.gpus.filter((gpu) => gpu.temperature_c !== null);
  for (const gpu of hot) {
    const name = hot.length > 1 ? `GPU ${gpu.index} temperature` : "GPU temperature";
    tiles.push(tile(name, `${Math.round(gpu.temperature_c)} °C`, "", "", bar(gpu.temperature_c / 100, 0.8, 0.9, name)));
  }
  if (!hot.length) tiles.push(tile("GPU temperature", "–", "", machine.gpus.length ? "the card does not tell" : ""));
  return tiles;
}

function nowTiles({ minute, history, running, waiting, connections }) {
  const tiles = [
    tile("Requests", number(minute.requests_s), "/s", `${number(connections)} connections`, spark(history.requests, "requests a second, ten minutes")),
    tile("Under way", number(running), "", `at engines and backends`, spark(history.running, "under way, ten minutes")),
    tile("Waiting", number(waiting), "", "in the engines' queues", spark(history.waiting, "waiting, ten minutes")),
    tile("Generated", number(minute.generated_s), "tokens/s", `prompts ${number(minute.prompt_s)} tokens/s`, spark(history.generated, "generated tokens a second, ten minutes")),
  ];
  return tiles;
}

function fact(name, value) {
  return el("div", {}, el("dt", {}, name), el("dd", {}, value));
}

function enginePanel([name, figures, status]) {
  const share = figures.kv_total ? figures.kv_used / figures.kv_total : 0;
  const plan = Object.values(figures.plan).reduce((sum, size) => sum + size, 0);
  const why = status.protected || status.failure || (status.layers ? `layer ${status.layers}` : "");
  return el("div", { class: "engine" },
    el("div", { class: "head" }, el("b", {}, figures.model), figures.model === name ? null : el("span", { class: "quiet" }, name),
      state(status.stuck ? "stuck" : status.state), why ? el("span", { class: "warn quiet" }, why) : null),
    el("dl", { class: "facts" },
      fact("Running", figures.allowed ? `${figures.running} of ${figures.allowed}` : figures.running),
      fact("Waiting", figures.waiting),
      fact("Window", `${number(figures.window)} tokens`),
      fact("Prompts", `${number(figures.prompt_tokens)} tokens`),
      fact("From cache", `${number(figures.cached_tokens)} tokens`),
      fact("Generated", `${number(figures.generated_tokens)} tokens`),
      fact("Preempted", figures.preemptions),
      fact("Planned", plan ? bytes(plan) : "–"),
      fact("KV blocks", `${number(figures.kv_used)} of ${number(figures.kv_total)}`)),
    bar(share, 0.9, 0.98, "KV blocks in use"));
}

function backendState(backend) {
  if (backend.process) return backend.process.state;  // a command that is started on demand
  if (backend.healthy === false || backend.breaker === "open") return "down";
  return backend.healthy === null ? "not probed" : "up";
}

function backendTable(backends) {
  const rows = Object.entries(backends).map(([name, backend]) => {
    const process = backend.process || {}, told = [];
    if (backend.asked_for_rest_s) told.push(`rests ${backend.asked_for_rest_s} s`);
    if (process.waiting) told.push(`${process.waiting} waiting`);
    if (process.next_try_s !== undefined) told.push(`next try in ${process.next_try_s} s`);
    if (process.starts > 1) told.push(`started ${process.starts} times`);
    const tip = [...told, ...(process.output || []).slice(-5)].join("\n");  // the command's last lines
    return [[name, "strong", name], state(backendState(backend)), state(backend.breaker), String(backend.inflight), [told.join(", "), "quiet", tip || null]];
  });
  return table([["Name"], ["State"], ["Breaker"], ["In flight", "n"], ["", "wide-only"]], rows);
}

function latencyTable(lines) {
  if (!lines.length) return el("p", { class: "empty" }, "Nothing was timed in the last minute.");
  return table([["Stage"], ["Count", "n wide-only"], ["p50", "n"], ["p95", "n"], ["p99", "n"]], lines.map((line) => [
    [line.stage, "strong"], number(line.count), milliseconds(line.p50), milliseconds(line.p95), milliseconds(line.p99),
  ]));
}

const OUTCOME_CLASS = { ok: "good", client_error: "warn", refused: "warn", client_closed: "", upstream_error: "bad", engine_error: "bad" };

const outcome = (row) => el("span", {}, row.status || "–", el("span", { class: "wide-only" }, ` ${row.outcome.replaceAll("_", " ")}`));

function recentTable(rows) {
  if (!rows.length) return el("p", { class: "empty" }, "No request yet. The chat box makes one.");
  return table([["Time"], ["Model"], ["Route", "wide-only"], ["Backend"], ["API", "wide-only"], ["Outcome", "status"], ["Took", "n"], ["Tokens", "n wide-only"]], rows.map((row) => [
    clockTime(row.at), [row.model || "–", "strong", row.model], [row.route || "–", "", row.route], [row.backend || "–", "", row.backend], row.api,
    [outcome(row), OUTCOME_CLASS[row.outcome] ?? "", `${row.client}, ${row.id}`],
    milliseconds(row.ms), row.tokens ? `${number(row.tokens[0])} + ${number(row.tokens[1])}` : "",
  ]));
}

function show(frame) {
  const { components, figures } = frame;
  const engines = Object.entries(figures), backends = components.backends || {};
  const inflight = Object.values(backends).reduce((sum, backend) => sum + backend.inflight, 0);
  const running = engines.reduce((sum, [, f]) => sum + f.running, inflight), waiting = engines.reduce((sum, [, f]) => sum + f.waiting, 0);
  panel("machine", frame.machine && { ...frame.machine, age_s: null }, machineTiles);
  panel("now", { minute: frame.minute, history: frame.history, running, waiting, connections: components.server.connections }, nowTiles);
  panel("engines", engines.map(([name, f]) => [name, f, components.engines[name] || {}]), (all) => all.map(enginePanel));
  panel("backends", backends, backendTable);
  panel("latency", frame.minute.latency, latencyTable);
  panel("recent", frame.recent, recentTable);
  byId("s-engines").hidden = !engines.length;
  byId("s-backends").hidden = !Object.keys(backends).length;
  document.querySelector("main").className = !engines.length || !Object.keys(backends).length ? "one" : "both";
  byId("outcomes").textContent = Object.entries(frame.outcomes).map(([name, count]) => `${number(count)} ${name.replaceAll("_", " ")}`).join(", ");
  byId("role").textContent = frame.role === "serve" ? "router and engine" : frame.role;
  byId("ready").className = `state ${frame.ready ? "good" : "bad"}`;
  byId("ready").textContent = components.server.draining ? "draining" : frame.ready ? "ready" : "not ready";
  byId("about").textContent = `${frame.version}, up ${duration(frame.uptime_s)}`;
  notices(frame);
}

function notices({ components, machine }) {
  const said = [];
  if (components.watchdog && components.watchdog.level !== "calm") said.push(`Memory protection is ${components.watchdog.level}: ${components.watchdog.why}.`);
  if (components.config && components.config.state !== "ok") said.push(`The last reload was refused. ${components.config.error || "The log says why."}`);
  if (machine && machine.age_s > 10) said.push(`The machine's figures are ${Math.round(machine.age_s)} s old: a driver does not answer.`);
  byId("notice").textContent = said.join(" ");
  byId("notice").hidden = !said.length;
}
