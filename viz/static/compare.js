// Two engines side by side: one workload, one policy apart. The page is sides.js'; here is what sets the two
// apart, in charts and a table, as viz/web/compare.py says it.
import { clamp, h, order, percent, plural, s } from "./parts.js";
import { walkPath } from "./tree.js";
import { COLORS, brush, el, last, pathOf, requestsOf, sidesPage, size, source, state, tip, waitOf } from "./sides.js";

const low = () => [
  h("section.card", {}, h("h2", {}, "Hit rate so far", h("small", {}, "cached prompt tokens / prompt tokens")), (el.hits = h("div.chart"))),
  h("section.card", {}, h("h2", {}, "Wait of each request", h("small", {}, "steps until first admitted")), (el.waits = h("div.chart"))),
  h("section.card.score", {}, h("h2", {}, "So far"), (el.score = h("table")))];

/** The cumulative hit rate of both over the steps, in the colours of their names. */
function drawHits() {
  const [w, height] = size(el.hits), top = 12, bottom = height - 14, n = Math.max(last(), 1), right = w - 46;
  const y = (v) => bottom - v * (bottom - top), x = (f) => 2 + ((right - 2) * f) / n;
  const ends = [];
  const lines = [0, 1].map((number) => {
    const admitted = Object.values(requestsOf(number)).filter((r) => r.hit !== null && !r.sample && r.admitted < state.i).sort((a, b) => a.admitted - b.admitted);
    let cached = 0, prompt = 0, path = "";
    for (const r of admitted) {
      if (path) path += `H${x(r.admitted + 1).toFixed(1)}`;
      cached += r.hit; prompt += r.prompt;
      path += `${path ? "V" : `M${x(r.admitted + 1).toFixed(1)},`}${y(cached / prompt).toFixed(1)}`;
    }
    if (path) ends.push([number, cached / prompt]);
    return s("path", { d: path && `${path}H${x(Math.max(state.i, 1)).toFixed(1)}`, fill: "none", stroke: COLORS[number], "stroke-width": 2 });
  });
  const places = ends.map(([, v]) => y(v) + 4);
  if (ends.length === 2 && Math.abs(places[0] - places[1]) < 12) { const up = ends[0][1] >= ends[1][1] ? 0 : 1, middle = (places[0] + places[1]) / 2; places[up] = middle - 6; places[1 - up] = middle + 6; }
  const names = ends.map(([number, v], k) => s("text", { x: x(state.i) + 5, y: clamp(places[k], 9, height - 2), class: "side" + number }, `${source.meta.names[number]} ${percent(v, 1)}`));
  el.hits.replaceChildren(s("svg", { viewBox: `0 0 ${w} ${height}`, role: "img", "aria-label": state.view.say },
    s("line", { x1: 0, x2: right, y1: y(1), y2: y(1), class: "limit" }), s("line", { x1: 0, x2: right, y1: bottom, y2: bottom, class: "axis" }), ...lines, s("line", { x1: x(state.i), x2: x(state.i), y1: top - 4, y2: bottom, class: "cursor" }), ...names));
  for (const text of names) if (text.getBBox().x + text.getBBox().width > w) { text.setAttribute("text-anchor", "end"); text.setAttribute("x", x(state.i) - 5); }
}

/** A pair of bars for each request: how long it waited under either policy. */
function drawWaits() {
  const [w, height] = size(el.waits), top = 12, bottom = height - 14, both = [requestsOf(0), requestsOf(1)];
  const ids = [...new Set(both.flatMap((known) => Object.values(known).filter((r) => !r.sample && r.added < state.i).map((r) => r.id)))].sort((a, b) => order(a) - order(b)).slice(-Math.max(8, Math.floor(w / 9)));
  const wait = (number, id) => { const r = both[number][id]; return r && r.came < state.view.totals[number].steps ? waitOf(number, r) : 0; };
  const most = Math.max(4, ...ids.flatMap((id) => [wait(0, id), wait(1, id)]));
  const slot = (w - 4) / Math.max(ids.length, 12), y = (v) => bottom - (v / most) * (bottom - top);
  const groups = ids.map((id, k) => {
    const waits = [wait(0, id), wait(1, id)], x = 2 + k * slot, bar = Math.max(slot / 2 - 1, 1.5);
    const group = s("g", { class: "waits", "data-request": id }, s("rect", { x, y: 0, width: slot, height, fill: "transparent" }),
      ...waits.map((v, number) => s("rect", { x: x + number * (bar + 0.5), width: bar, y: Math.min(y(v), bottom - 1), height: Math.max(bottom - y(v), 1), fill: COLORS[number] })));
    group.addEventListener("pointerenter", (e) => { for (const number of [0, 1]) brush(number, { request: id }); const r = both[0][id] ?? both[1][id]; tip(e, h("b", {}, id), ` ${r.label || r.text}: waited ${source.meta.names.map((name, number) => `${plural(waits[number], "step")} under ${name}`).join(", ")}`); });
    group.addEventListener("pointerleave", () => { for (const number of [0, 1]) brush(number, null); tip(null); });
    group.addEventListener("click", () => { for (const number of [0, 1]) walkPath(el.sides[number].tree, pathOf(number, id).map((n) => "n" + n)); });
    return group;
  });
  el.waits.replaceChildren(s("svg", { viewBox: `0 0 ${w} ${height}`, role: "img", "aria-label": "waits of each request" }, s("line", { x1: 0, x2: w, y1: bottom, y2: bottom, class: "axis" }), s("text", { x: 1, y: 9 }, plural(most, "step")), ...groups,
    ...(ids.length ? [s("text", { x: 1, y: height - 2 }, ids[0]), s("text", { x: Math.max(ids.length * slot, 40), y: height - 2, "text-anchor": "end" }, ids.length > 3 ? ids.at(-1) : "")] : [])));
}

function drawScore() {
  const [a, b] = state.view.totals;
  const rows = [["hit rate", (t) => t.hit, (t) => percent(t.cached, t.prompt), 1], ["prompt tokens computed", (t) => t.prompt - t.cached, null, 0], ["mean wait (steps)", (t) => t.wait, (t) => t.wait.toFixed(1), -1],
    ["worst wait", (t) => t.worst, (t) => `${t.worst}${t.worst ? ` (${t.worst_id})` : ""}`, -1], ["tokens evicted", (t) => t.evicted, null, 0], ["retractions", (t) => t.retracted, null, -1], ["requests done", (t) => t.finished, (t) => `${t.finished} of ${t.requests}`, 0]];
  const cell = (value, shown, t, better) => h("td" + (better ? ".better" : ""), {}, shown ? shown(t) : String(value(t)));
  el.score.replaceChildren(h("tr", {}, h("th"), ...source.meta.names.map((name, number) => h("th.side" + number, {}, name))),
    ...rows.map(([name, value, shown, sign]) => h("tr", {}, h("td", {}, name), cell(value, shown, a, sign && sign * (value(a) - value(b)) > 1e-9), cell(value, shown, b, sign && sign * (value(b) - value(a)) > 1e-9))));
}

sidesPage({
  kind: "policies", title: "side by side", low,
  words: { again: "Both engines anew", start: "the engines start", done: "both are done", running: "engines running", stopped: "An engine stopped with an error", ofWhich: " of either" },
  chip: (meta) => `both: ${[meta.schedule_policy, meta.eviction_policy].find((policy) => !meta.names.includes(policy))}`,
  named: (meta) => (meta.compare ?? "").replace(",", " or "),
  parts: () => ({ hits: [el.hits, "The hit rate", drawHits], waits: [el.waits, "The waits", drawWaits], score: [el.score, "The table", drawScore] }),
  jumps: { s: "split", e: "evict", r: "retract" },
  lanes: (frame) => frame.sides.flatMap((side, number) => (side?.m ?? []).map((kind) => [kind, number])),
});
