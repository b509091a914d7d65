"use strict";
// Names of models, clients and backends come from outside: they reach the page as text nodes only, never as markup.

function el(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined).map((child) => child instanceof Node ? child : String(child)));
  return node;
}

const byId = (id) => document.getElementById(id);

function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  while (count >= 1024 && at < units.length - 1) { count /= 1024; at += 1; }
  return `${count >= 100 || at < 2 ? Math.round(count) : count.toFixed(1)} ${units[at]}`;
}

function number(value) {
  if (value >= 1e6) return `${(value / 1e6).toFixed(1)} M`;
  if (value >= 1e4) return `${(value / 1e3).toFixed(1)} k`;
  return Number.isInteger(value) ? String(value) : value.toFixed(value < 10 ? 1 : 0);
}

function milliseconds(value) {
  if (value >= 10000) return `${(value / 1000).toFixed(0)} s`;
  if (value >= 1000) return `${(value / 1000).toFixed(1)} s`;
  if (value >= 100) return `${value.toFixed(0)} ms`;
  if (value >= 1) return `${value.toFixed(1)} ms`;
  return `${(value * 1000).toFixed(0)} µs`;
}

function duration(seconds) {
  if (seconds < 90) return `${Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  if (seconds < 129600) return `${Math.round(seconds / 3600)} h`;
  return `${Math.round(seconds / 86400)} d`;
}

function clockTime(at) {
  return new Date(at * 1000).toLocaleTimeString([], { hour12: false });
}

function bar(share, warn, bad, label) {
  const percent = Math.max(0, Math.min(1, share || 0)) * 100;
  const fill = el("span");
  fill.style.width = `${percent.toFixed(1)}%`;
  const level = share >= bad ? "bar bad" : share >= warn ? "bar warn" : "bar";
  return el("div", { class: level, role: "meter", "aria-label": label, "aria-valuemin": 0, "aria-valuemax": 100, "aria-valuenow": percent.toFixed(0) }, fill);
}

function spark(values, label) {
  const space = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(space, "svg");
  for (const [name, value] of Object.entries({ class: "spark", viewBox: "0 0 120 30", preserveAspectRatio: "none", role: "img", "aria-label": label })) svg.setAttribute(name, value);
  const shown = [...Array(Math.max(0, 120 - values.length)).fill(0), ...values];
  const most = Math.max(...shown, 1e-9);
  const points = shown.map((value, at) => `${(at * 120 / 119).toFixed(1)},${(28.5 - 27 * value / most).toFixed(1)}`);
  for (const [kind, d] of [["area", `M0,30 L${points.join(" L")} L120,30 Z`], ["line", `M${points.join(" L")}`]]) {
    const path = document.createElementNS(space, "path");
    path.setAttribute("class", kind);
    path.setAttribute("d", d);
    svg.append(path);
  }
  return svg;
}

function table(columns, rows) {
  // A column: [title, class]. A cell: text, a node, or [text, class, tooltip].
  const head = el("tr", {}, columns.map(([title, kind]) => el("th", { class: kind, scope: "col" }, title)));
  const body = rows.map((cells) => el("tr", {}, cells.map((cell, at) => {
    const [value, kind, title] = Array.isArray(cell) ? cell : [cell, "", null];
    const classes = [columns[at][1], kind].filter(Boolean).join(" ");
    return el("td", { class: classes || null, title }, value);
  })));
  return el("table", {}, el("thead", {}, head), el("tbody", {}, body));
}
