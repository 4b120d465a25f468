// Two engines side by side: one workload, one policy apart. Both are shown at the same step; the controls
// drive both. Draws what viz/web/compare.py says; data, pool map and helpers are parts.js', the trees tree.js'.
import { FileSource, LiveSource, MARK_COLORS, TIER_WORDS, button, clamp, fillPool, follower, h, icon, order, part, percent, plural, s, sizePool, tint, undrawn, until } from "./parts.js";
import { decorate, fit, highlight, listen, morph, walkPath, zoom } from "./tree.js";

const source = document.getElementById("recording") ? new FileSource() : new LiveSource();
const COLORS = ["#0b7285", "#7048e8"];
const state = { i: 0, to: 0, view: null, follow: true, timer: null, ticket: 0, run: "", lastSpoken: -1e9, sizes: new Map() };
const el = { sides: [] };

function build() {
  document.body.classList.add("comparing");
  document.getElementById("app").append(
    h("header", {}, h("h1", {}, "minirad ", h("span", {}, "side by side")), (el.chips = h("div.chips")),
      h("div.tools", {}, button("projector", "Larger, for the back row (p)", projector), (el.again = button("from the start", "Both engines anew", () => command("restart")))),
      (el.status = h("span.status", {}, h("i.dot"), (el.statusText = h("span", {}, "connecting"))))),
    buildTransport(),
    (el.banner = h("section.banner", { hidden: true, role: "alert" })),
    (el.refused = h("section.banner.refused", { hidden: true, role: "status" })),
    (el.say = h("section.say", {}, (el.sayText = h("span.text")), (el.sayMore = h("span.more")))),
    h("main.sides", {}, buildSide(0), buildSide(1)),
    h("div.low.three", {},
      h("section.card", {}, h("h2", {}, "Hit rate so far", h("small", {}, "cached prompt tokens / prompt tokens")), (el.hits = h("div.chart"))),
      h("section.card", {}, h("h2", {}, "Wait of each request", h("small", {}, "steps until first admitted")), (el.waits = h("div.chart"))),
      h("section.card.score", {}, h("h2", {}, "So far"), (el.score = h("table")))),
    (el.live = h("div.spoken", { role: "status", "aria-live": "polite" })),
    (el.tip = h("div.tip", { hidden: true })));
}

function buildSide(number) {
  const side = (el.sides[number] = {});
  listen((side.tree = h("div.mr-tree", { role: "img" })), { over: (id, event) => overNode(number, id, event) });
  side.tree.addEventListener("pointerleave", () => tip(null));
  side.pool = h("div.pool", { onpointerover: (e) => overPool(number, e), onpointerleave: () => { brush(number, null); tip(null); } });
  return h("section.card.side" + number, {},
    h("h2", {}, (side.name = h("b.name")), (side.say = h("span.own")), h("span.zoom", {}, button("−", "Smaller", () => zoom(side.tree, 0.8)), button("fit", "The whole tree, however small; again: as much as can be read", () => fit(side.tree)), button("+", "Larger", () => zoom(side.tree, 1.25)))),
    side.tree,
    h("div.poolrow", {}, h("div.facts", {}, (side.hit = h("b")), h("small", {}, "hit rate"), (side.used = h("small")), (side.host = h("small"))), side.pool, h("div.facts.queue", {}, (side.waiting = h("b")), h("small", {}, "waiting"), (side.longest = h("small")))));
}

function buildTransport() {
  const go = (name, title, onclick) => h("button.go." + name, { type: "button", title, "aria-label": title, onclick }, icon(name));
  el.play = h("button.go.main", { type: "button", onclick: togglePlay }, icon("play"));
  el.slider = h("input", { type: "range", min: 0, max: 0, value: 0, "aria-label": "Position", oninput: (e) => seek(Number(e.target.value)) });
  el.speed = h("select", { title: "Steps per second", "aria-label": "Speed", onchange: () => { source.status.speed = Number(el.speed.value); if (source.status.drivable) command("speed", { speed: source.status.speed }); } },
    ...[[0.5, "½ /s"], [1, "1 /s"], [3, "3 /s"], [8, "8 /s"], [0, "max"]].map(([value, text]) => h("option", { value, selected: value === 3 }, text)));
  const jump = (kind, letter) => h("button.jump." + kind, { type: "button", title: `To the next ${kind} of either (${letter}); with shift the one before`, onclick: (e) => jumpTo(kind, e.shiftKey ? -1 : 1) }, h("i"), kind);
  return h("nav.bar", { "aria-label": "Time" },
    go("first", "To the start (Home)", () => seek(0)), go("back", "Back (←)", () => seek(state.to - 1)), el.play, go("next", "Forward (→)", forward), go("last", "To the present (End)", toPresent),
    h("div.scrub", {}, (el.marks = s("svg", { class: "marks", preserveAspectRatio: "none", "aria-hidden": "true", viewBox: "0 0 1000 26" })), el.slider), (el.where = h("span.where")),
    jump("split", "s"), jump("evict", "e"), jump("retract", "r"), el.speed);
}

const projector = () => document.body.classList.toggle("projector");
const last = () => source.frames.length;

// ---------------------------------------------------------------- going somewhere

/** Shows both sides at a step. Later calls win over earlier ones that are still under way. */
async function show(i, { hash = true } = {}) {
  i = clamp(i, 0, last());
  const ticket = ++state.ticket, height = Math.round((0.84 * el.sides[0].tree.clientHeight || 240) / 40) * 40;
  state.to = i;
  let view;
  try { view = await source.view("step", i, [], height); }
  catch (error) { if (ticket === state.ticket) { state.to = state.i; notice(error.message); } return false; }
  if (ticket !== state.ticket) return false;
  Object.assign(state, { i, view });
  draw();
  if (hash) { clearTimeout(state.addressing); state.addressing = setTimeout(() => history.replaceState(null, "", `#step=${i}`), moving() ? 500 : 0); }
  return true;
}

function leavePresent() {
  if (state.follow && source.status.playing && source.status.drivable) command("play", { on: false });
  state.follow = false;
}

function seek(i) {
  stopPlaying();
  if (i < last()) leavePresent();
  return show(i);
}

function forward() { stopPlaying(); return advance(); }

/** One step on; at the present end both engines are asked for one. False when there is none. */
async function advance() {
  const target = state.to + 1;
  if (target > last()) {
    if (!source.status.drivable || source.status.idle) return false;
    const before = last();
    if (!(await command("step"))) return false;
    await until(() => last() > before);
  }
  state.follow = target >= last();
  return show(target);
}

function toPresent() { stopPlaying(); state.follow = true; return show(last()); }

function jumpTo(kind, direction) {
  const frame = source.mark(kind, Math.max(state.to - 1, direction < 0 ? 0 : -1), direction);
  if (frame === null) return notice(`No ${direction < 0 ? "earlier" : "further"} ${kind}.`);
  seek(frame + 1);
}

function togglePlay() {
  if (state.timer || (source.status.playing && state.follow)) { stopPlaying(); if (source.status.playing) command("play", { on: false }); return drawTransport(); }
  if (state.to >= last() && !source.status.drivable) return seek(0).then(startTimer);
  if (state.to >= last()) { state.follow = true; command("play", { on: true }); return; }
  startTimer();
}

function startTimer() {
  stopPlaying();
  const pace = source.status.drivable ? source.status.speed : Number(el.speed.value);
  const tick = async () => {
    const more = await advance();
    if (!state.timer) return;
    if (!more || state.follow) {
      stopPlaying();
      if (source.status.drivable && !source.status.idle) { state.follow = true; command("play", { on: true }); }
      return drawTransport();
    }
    state.timer = setTimeout(tick, pace > 0 ? 1000 / pace : 30);
  };
  state.timer = setTimeout(tick, 0);
  drawTransport();
}

function stopPlaying() { clearTimeout(state.timer); state.timer = null; }

const moving = () => Boolean(state.timer) || (source.status.playing && !source.status.idle && state.follow);

async function command(name, body) {
  try { return await source.command(name, body); }
  catch (error) { notice(error.message); return null; }
}

// ---------------------------------------------------------------- drawing

const PARTS = { // place, name, drawing
  transport: [() => el.where, "The time line", drawTransport], hits: [() => el.hits, "The hit rate", drawHits],
  waits: [() => el.waits, "The waits", drawWaits], score: [() => el.score, "The table", drawScore],
};
const drawPart = (name) => part(PARTS[name][0](), ...PARTS[name].slice(1));

function draw() {
  const pace = source.status.speed > 0 ? 800 / source.status.speed : 60;
  state.view.sides.forEach((view, number) => drawSide(number, view, Math.min(320, moving() ? pace : 320)));
  el.sayText.replaceChildren(state.view.say + ".");
  el.sayMore.replaceChildren(state.view.title);
  el.say.dataset.kind = "compare";
  document.body.dataset.position = `step ${state.i}`;
  for (const name of Object.keys(PARTS)) drawPart(name);
  const now = performance.now();
  if (!moving() || now - state.lastSpoken > 2500) { state.lastSpoken = now; el.live.textContent = `${state.view.title}: ${state.view.say}.`; }
}

function drawSide(number, view, ms) {
  const side = el.sides[number], totals = state.view.totals[number], failed = view.failed ?? {};
  part(side.tree, "The tree", () => {
    morph(side.tree, view.svg, side.drawn ? ms : 0);
    side.drawn = true;
    decorate(side.tree, (id) => tint(id));
  }, failed.svg);
  side.tree.setAttribute("aria-label", `Tree of ${source.meta.names[number]}: ${view.say}`);
  part(side.pool, "The pool", () => fillPool(side.pool, view.pool), failed.pool);
  const [free] = view.usage, waiting = Object.entries(view.requests).filter(([, r]) => r.waiting).map(([id]) => id);
  side.name.textContent = source.meta.names[number];
  side.say.textContent = totals.done ? `done after ${plural(totals.steps, "step")}` : view.say;
  side.say.title = view.say;
  side.say.dataset.kind = totals.done ? "" : view.kind;
  side.hit.textContent = percent(totals.cached, totals.prompt);
  side.used.textContent = `${source.meta.kv_tokens - free} of ${source.meta.kv_tokens} used`;
  side.host.textContent = view.host ? `${view.host_used} on the host` : "";
  side.host.title = view.host ? `${view.host_used} of ${source.meta.host_tokens} slots of host memory` : "";
  side.waiting.textContent = waiting.length;
  const waits = waiting.map((id) => requestsOf(number)[id]).filter(Boolean).map((r) => [waitOf(number, r), r.id]).sort((a, b) => b[0] - a[0] || order(a[1]) - order(b[1]));
  side.longest.textContent = waits.length && waits[0][0] > 1 ? `${waits[0][1]}: ${plural(waits[0][0], "step")}` : " ";
  for (const name of ["nodes", "usage", "requests"]) if (failed[name]) side.say.replaceChildren(undrawn(`“${name}”`, failed[name]));
  brush(number, null);
}

function requestsOf(number) {
  const found = {};
  for (const [key, request] of Object.entries(source.requests)) if (key[0] === String(number)) found[request.id] = request;
  return found;
}

/** Steps from a request's arrival to its first admission, or up to what is shown. */
function waitOf(number, r) {
  const now = state.view.totals[number].steps;
  return Math.min(r.hit !== null ? r.admitted : now, now) - r.added;
}

function drawHeader() {
  const meta = source.meta, kind = meta.compare ?? "";
  const same = [meta.schedule_policy, meta.eviction_policy].find((policy) => !meta.names.includes(policy));
  el.chips.replaceChildren(...[meta.title, meta.model, `pool ${meta.kv_tokens} · page ${meta.page_size}`, `both: ${same}`, meta.host_tokens ? `host ${meta.host_tokens} · ${meta.host_write}` : ""].map((text) => h("span.chip", {}, text ?? "")));
  document.title = `minirad: ${kind.replace(",", " or ")}`;
}

function drawStatus() {
  const { error, playing, idle, drivable, notices } = source.status;
  el.statusText.textContent = error ? "engine stopped" : source.lost ? "connection lost, trying again" : !error && source.run === "" ? "the engines start" : !drivable ? `recording of ${plural(last(), "step")}`
    : idle ? "both are done" : playing ? "engines running" : `paused at step ${last()}`;
  el.status.dataset.kind = error || source.lost ? "error" : drivable && playing && !idle ? "on" : "off";
  el.banner.hidden = !error;
  el.banner.textContent = `An engine stopped with an error: ${error}. What it did until then can still be looked at.`;
  const refused = source.status.refused || source.meta?.refused || ""; // a file has no status, only what was known at its end
  el.refused.hidden = !refused;
  if (el.refused.textContent !== refused) el.refused.textContent = refused;
  el.again.hidden = !drivable;
  if (notices?.length && notices.at(-1) !== state.noticed) notice((state.noticed = notices.at(-1)));
  if (document.activeElement !== el.speed && drivable) el.speed.value = String([0.5, 1, 3, 8, 0].reduce((a, b) => (Math.abs(b - source.status.speed) < Math.abs(a - source.status.speed) ? b : a)));
}

function notice(text) {
  el.say.dataset.kind = "notice";
  el.sayText.replaceChildren(text);
  el.live.textContent = text;
}

function drawTransport() {
  el.slider.max = last();
  el.slider.value = state.i;
  el.slider.style.setProperty("--at", `${last() ? (100 * state.i) / last() : 0}%`);
  el.where.textContent = `${state.i} / ${last()}`;
  el.play.replaceChildren(icon(moving() ? "pause" : "play"));
  el.play.title = moving() ? "Pause (space)" : "Play (space)";
  el.play.setAttribute("aria-label", el.play.title);
  if (el.marks.dataset.key === `${last()} ${source.run}`) return;
  el.marks.dataset.key = `${last()} ${source.run}`;
  const lines = source.frames.flatMap((frame, f) => frame.sides.flatMap((side, number) => (side?.m ?? []).map((kind) => {
    const x = Math.round((1000 * (f + 1)) / Math.max(last(), 1));
    return s("line", { x1: x, x2: x, y1: number ? 16 : 2, y2: number ? 24 : 10, stroke: MARK_COLORS[kind], "stroke-width": 2, "vector-effect": "non-scaling-stroke" });
  })));
  el.marks.replaceChildren(...lines);
}

// ---------------------------------------------------------------- the two in one chart

const size = (host) => state.sizes.get(host) ?? [host.clientWidth || 300, host.clientHeight || 100];

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
  const wait = (number, id) => { const r = both[number][id]; return r && r.added < state.view.totals[number].steps ? waitOf(number, r) : 0; };
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

// ---------------------------------------------------------------- brushing

const pathOf = (number, id) => { const view = state.view.sides[number]; return view.requests[id]?.path ?? view.left[id] ?? []; };

/** Lights nodes and their pages of one side: those of a node, or of a request. null: nothing. */
function brush(number, what) {
  const side = el.sides[number], nodes = new Set(what?.node !== undefined ? [what.node] : what?.request ? pathOf(number, what.request) : []);
  highlight(side.tree, [...nodes]);
  side.pool.classList.toggle("brushing", Boolean(what) && (nodes.size > 0 || Boolean(what.request)));
  for (const cell of side.pool.children) {
    const owner = cell.dataset.owner;
    cell.classList.toggle("lit", Boolean(what && owner) && (owner[0] === "R" ? owner === what.request : nodes.has(Number(owner.slice(1)))));
  }
}

function overNode(number, id, event) {
  const node = id && state.view.sides[number].nodes[id.slice(1)];
  if (!node || id[0] !== "n") { brush(number, null); return tip(null); }
  brush(number, { node: Number(id.slice(1)) });
  tip(event, h("b", {}, id), ` ${source.meta.styles[node.status]?.word || "cached"}${node.tier ? ` · ${TIER_WORDS[node.tier]}` : ""} · ${plural(node.body.size, "token")} · lock ${node.lock} · last use t ${node.t}`, h("pre", {}, node.body.text));
}

function overPool(number, event) {
  const owner = event.target.dataset?.owner ?? "";
  brush(number, owner[0] === "R" ? { request: owner } : owner ? { node: Number(owner.slice(1)) } : null);
  tip(owner ? event : null, h("b", {}, owner[0] === "R" ? owner : "n" + owner.slice(1)), owner[0] === "R" ? "'s own, not in the tree yet" : owner[0] === "x" ? " was evicted" : ` ${state.view.sides[number].nodes[owner.slice(1)]?.body.text.slice(0, 90) ?? ""}`);
}

function tip(event, ...content) {
  el.tip.hidden = !event;
  if (!event) return;
  el.tip.replaceChildren(...content);
  const { offsetWidth: w, offsetHeight: height } = el.tip, zoomed = document.body.classList.contains("projector") ? 1.3 : 1;
  const x = event.clientX / zoomed, y = event.clientY / zoomed;
  el.tip.style.left = `${clamp(x + 14, 4, innerWidth / zoomed - w - 8)}px`;
  el.tip.style.top = `${y + 18 + height > innerHeight / zoomed ? y - height - 12 : y + 18}px`;
}

// ---------------------------------------------------------------- keys, and the start

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("select")) return;
  if (event.key === " " && event.target.matches("button")) return;
  const keys = { " ": togglePlay, ArrowLeft: () => seek(state.to - 1), ArrowRight: forward, Home: () => seek(0), End: toPresent, p: projector,
    s: () => jumpTo("split", 1), S: () => jumpTo("split", -1), e: () => jumpTo("evict", 1), E: () => jumpTo("evict", -1), r: () => jumpTo("retract", 1), R: () => jumpTo("retract", -1) };
  if (!(event.key in keys)) return;
  event.preventDefault();
  keys[event.key]();
}

const fromHash = () => { const found = /^#step=(\d+)$/.exec(location.hash); return found ? Number(found[1]) : null; };

const followOn = follower(state, last, show);
source.onchange((what) => {
  if (what === "run") {
    stopPlaying();
    const again = state.run !== "";
    Object.assign(state, { run: source.run ?? "file", i: 0, to: 0, view: null, follow: true, wanted: again ? null : fromHash() ?? (source instanceof FileSource ? 0 : null) });
    drawHeader();
    show(0, { hash: false });
  } else if (what === "frames") {
    if (state.wanted !== null && state.wanted <= last()) {
      const i = state.wanted;
      state.wanted = null;
      state.follow = i === last() && !(source instanceof FileSource);
      show(i);
    } else if (state.follow && state.wanted === null && !followOn.pending) {
      followOn();
    } else if (state.view) drawTransport();
    drawStatus();
  } else {
    drawStatus();
    if (state.view) drawTransport();
  }
});

build();
document.addEventListener("keydown", onKey);
window.addEventListener("hashchange", () => { const i = fromHash(); if (i !== null) { leavePresent(); show(i, { hash: false }); } });
const resized = new ResizeObserver(() => {
  for (const host of [el.hits, el.waits]) state.sizes.set(host, [host.clientWidth, host.clientHeight]);
  if (state.view) { for (const side of el.sides) sizePool(side.pool); drawPart("hits"); drawPart("waits"); }
});
for (const host of [el.hits, el.waits, el.sides[0].pool, el.sides[1].pool]) resized.observe(host);
source.start();
