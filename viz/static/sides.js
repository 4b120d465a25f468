// Several engines side by side, all shown at the same step; the controls drive all of them. What is said below
// them, and of them together, is compare.js' (two policies) or ranks.js' (one engine on several ranks): they
// call `sidesPage`. Data, pool map and helpers are parts.js', the trees tree.js'.
import { FileSource, LiveSource, MARK_COLORS, TIER_WORDS, addressing, button, clamp, fillPool, follower, h, icon, noticing, order, part, percent, plural, remains, s, showSpeed, sizePool, slowBanner, speedMenu, tint, undrawn, until } from "./parts.js";
import { decorate, fit, highlight, listen, morph, walkPath, zoom } from "./tree.js";

export const source = document.getElementById("recording") ? new FileSource() : new LiveSource();
export const COLORS = ["#0b7285", "#7048e8", "#8f5b00", "#1864ab"];
export const state = { i: 0, to: 0, view: null, follow: true, timer: null, ticket: 0, run: "", lastSpoken: -1e9, sizes: new Map() };
export const el = { sides: [] };
const own = {}; // what the page adds, see sidesPage

function build() {
  document.body.classList.add("comparing", own.kind);
  document.getElementById("app").append(
    h("header", {}, h("h1", {}, "minirad ", h("span", {}, own.title)), (el.chips = h("div.chips")),
      h("div.tools", {}, button("projector", "Larger, for the back row (p)", projector), (el.again = button("from the start", own.words.again, () => command("restart"))), ...(own.tools?.() ?? [])),
      (el.status = h("span.status", {}, h("i.dot"), (el.statusText = h("span", {}, "connecting"))))),
    buildTransport(),
    (el.banner = h("section.banner", { hidden: true, role: "alert" })),
    slowBanner(source),
    (el.refused = h("section.banner.refused", { hidden: true, role: "status" })),
    (el.say = h("section.say", {}, (el.sayText = h("span.text")), (el.sayMore = h("span.more")))),
    (el.main = h("main.sides")),
    h("div.low.three", {}, ...own.low()),
    (el.live = h("div.spoken", { role: "status", "aria-live": "polite" })),
    (el.tip = h("div.tip", { hidden: true })));
}

/** As many cards as there are sides. */
function setSides(count) {
  if (el.sides.length === count) return;
  for (const side of el.sides) resized.unobserve(side.pool);
  el.sides = [];
  el.main.replaceChildren(...Array.from({ length: count }, (_, number) => buildSide(number)));
  el.main.dataset.sides = count;
  for (const side of el.sides) resized.observe(side.pool);
}

function buildSide(number) {
  const side = (el.sides[number] = {});
  listen((side.tree = h("div.mr-tree", { role: "img" })), { over: (id, event) => overNode(number, id, event) });
  side.tree.addEventListener("pointerleave", () => tip(null));
  side.pool = h("div.pool", { onpointerover: (e) => overPool(number, e), onpointerleave: () => { brush(number, null); tip(null); } });
  return h("section.card.side" + number, {},
    h("h2", {}, (side.name = h("b.name")), (side.say = h("span.own")), h("span.zoom", {}, button("−", "Smaller", () => zoom(side.tree, 0.8)), button("fit", "The whole tree, however small; again: as much as can be read", () => fit(side.tree)), button("+", "Larger", () => zoom(side.tree, 1.25)))),
    side.tree,
    h("div.poolrow", {}, h("div.facts", {}, (side.hit = h("b")), h("small", {}, "hit rate"), (side.used = h("small")), (side.host = h("small"))), side.pool, h("div.facts.queue", {}, (side.waiting = h("b")), h("small", {}, "waiting"), (side.longest = h("small")))),
    own.foot?.(side));
}

function buildTransport() {
  const go = (name, title, onclick) => h("button.go." + name, { type: "button", title, "aria-label": title, onclick }, icon(name));
  el.play = h("button.go.main", { type: "button", onclick: togglePlay }, icon("play"));
  el.slider = h("input", { type: "range", min: 0, max: 0, value: 0, "aria-label": "Position", oninput: (e) => seek(Number(e.target.value)) });
  el.speed = speedMenu(() => { source.status.speed = Number(el.speed.value); if (source.status.drivable) command("speed", { speed: source.status.speed }); });
  const jump = (kind, letter) => h("button.jump." + kind, { type: "button", title: `To the next ${kind}${own.words.ofWhich} (${letter}); with shift the one before`, onclick: (e) => jumpTo(kind, e.shiftKey ? -1 : 1) }, h("i"), kind);
  return h("nav.bar", { "aria-label": "Time" },
    go("first", "To the start (Home)", () => seek(0)), go("back", "Back (←)", () => seek(state.to - 1)), el.play, go("next", "Forward (→)", forward), go("last", "To the present (End)", toPresent),
    h("div.scrub", {}, (el.marks = s("svg", { class: "marks", preserveAspectRatio: "none", "aria-hidden": "true", viewBox: "0 0 1000 26" })), el.slider), (el.where = h("span.where")),
    ...Object.entries(own.jumps).map(([letter, kind]) => jump(kind, letter)), el.speed);
}

const projector = () => document.body.classList.toggle("projector");
export const last = () => source.frames.length;
/** The engine's step at the end: not every frame is one, some were cut off between two. */
const lastStep = () => source.frames.at(-1)?.s ?? source.meta?.start ?? 0;

// ---------------------------------------------------------------- going somewhere

/** Shows all sides at a step: true; null: a later call has won over this one; false: it failed. */
async function show(i, { hash = true } = {}) {
  i = clamp(i, 0, last());
  const ticket = ++state.ticket, height = Math.round((0.84 * (el.sides[0]?.tree.clientHeight ?? 0) || 240) / 40) * 40;
  state.to = i;
  let view;
  try { view = await source.view("step", i, [], height); }
  catch (error) { if (ticket === state.ticket) { state.to = state.i; notice(error.message); } return ticket === state.ticket ? false : null; }
  if (ticket !== state.ticket) return null;
  Object.assign(state, { i, view });
  draw();
  if (hash) address.write(`#step=${i}`);
  return true;
}

const address = addressing(source, state, () => moving());

function leavePresent() {
  if (state.follow && source.status.playing && source.status.drivable) command("play", { on: false });
  state.follow = false;
}

function seek(i) {
  stopPlaying();
  if (i < last()) leavePresent();
  return show(i);
}

function forward() {
  stopPlaying();
  if (state.to >= last() && nothingLeft()) return false;
  if (source.status.drivable && !source.status.idle) leavePresent(); // one step, and no further
  return advance();
}

/** Says so, where no step is to come by itself. */
function nothingLeft() {
  if (source.done) notice("Nothing is left to do: “from the start” begins anew.");
  return source.done;
}

/** One step on, as `show`; at the present end all engines are asked for one. False also when there is none. */
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
  if (moving()) { stopPlaying(); if (source.status.playing) command("play", { on: false }); return drawTransport(); }
  if (state.to >= last() && !source.status.drivable) return seek(0).then(startTimer);
  if (state.to >= last()) {
    Object.assign(state, { follow: true, wanted: null });
    nothingLeft();
    command("play", { on: true });
    return;
  }
  startTimer();
}

function startTimer() {
  stopPlaying();
  const tick = async () => {
    const more = await advance();
    if (!state.timer) return;
    if (more === false || state.follow) {
      stopPlaying(more === false); // whose notice stands
      if (more !== false && source.status.drivable && !source.status.idle) command("play", { on: true }); // the engines go on from here
      return drawTransport();
    }
    const pace = source.status.drivable ? source.status.speed : Number(el.speed.value);
    state.timer = setTimeout(tick, pace > 0 ? 1000 / pace : 30);
  };
  state.timer = setTimeout(tick, 0);
  drawTransport();
}

function stopPlaying(failed = false) {
  clearTimeout(state.timer);
  state.timer = null;
  state.wanted = null; // somebody goes elsewhere than the address says
  if (!failed) standing.end();
}

const moving = () => Boolean(state.timer) || (source.plays && !source.status.idle && state.follow);

export async function command(name, body) {
  try { return await source.command(name, body); }
  catch (error) { notice(error.message); return null; }
}

// ---------------------------------------------------------------- drawing

const parts = () => ({ transport: [el.where, "The time line", drawTransport], ...own.parts() }); // place, name, drawing
const drawPart = (name) => part(...parts()[name]);

function draw() {
  const pace = source.status.speed > 0 ? 800 / source.status.speed : 60;
  state.view.sides.forEach((view, number) => drawSide(number, view, Math.min(320, moving() ? pace : 320)));
  drawSay();
  document.body.dataset.position = `step ${state.i}`;
  for (const name of Object.keys(parts())) drawPart(name);
  const now = performance.now();
  if (!moving() || now - state.lastSpoken > 2500) { state.lastSpoken = now; el.live.textContent = `${state.view.title}: ${state.view.say}.`; }
}

function drawSay() {
  if (standing.stands()) return;
  el.sayText.replaceChildren(state.view.say + ".");
  el.sayMore.replaceChildren(state.view.title);
  el.say.dataset.kind = state.view.tone ?? "compare";
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
  own.drawSide?.(side, number, view);
  brush(number, null);
}

export function requestsOf(number) {
  const found = {};
  for (const [key, request] of Object.entries(source.requests)) if (key[0] === String(number)) found[request.id] = request;
  return found;
}

/** The engine's steps from a request's arrival to its first admission, or up to what is shown. */
export function waitOf(number, r) {
  const now = state.view.totals[number].steps;
  return Math.min(r.began ?? now, now) - r.came;
}

function drawHeader() {
  const meta = source.meta;
  setSides(meta.names.length);
  el.chips.replaceChildren(...[meta.title, meta.model, `pool ${meta.kv_tokens} · page ${meta.page_size}`, own.chip(meta), meta.host_tokens ? `host ${meta.host_tokens} · ${meta.host_write}` : ""].map((text) => h("span.chip", {}, text ?? "")));
  document.title = `minirad: ${own.named(meta)}`;
}

function drawStatus() {
  const { error, playing, idle, drivable, notices } = source.status;
  el.statusText.textContent = error ? "engine stopped" : source.lost ? "connection lost, trying again" : !error && source.run === "" ? own.words.start : !drivable ? `recording of ${plural(lastStep() - (source.meta?.start ?? 0), "step")}`
    : idle ? own.words.done : playing ? own.words.running : `paused at step ${lastStep()}`;
  el.status.dataset.kind = error || source.lost ? "error" : drivable && playing && !idle ? "on" : "off";
  el.banner.hidden = !error;
  el.banner.textContent = `${own.words.stopped}: ${error}. ${remains(source.lost)}.`;
  const refused = source.status.refused || source.meta?.refused || ""; // a file has no status, only what was known at its end
  el.refused.hidden = !refused;
  if (el.refused.textContent !== refused) el.refused.textContent = refused;
  el.again.hidden = !drivable;
  own.drawStatus?.(source.status);
  if (notices?.length && notices.at(-1) !== state.noticed) notice((state.noticed = notices.at(-1)));
  if (document.activeElement !== el.speed && drivable) showSpeed(el.speed, source.status.speed);
}

const standing = noticing(el, () => state.view && drawSay());
/** holds: whether it is true at the step on view; by default as long as it stands. */
export function notice(text, holds) {
  standing.tell(text, holds);
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
  const lines = source.frames.flatMap((frame, f) => own.lanes(frame).map(([kind, lane]) => {
    const x = Math.round((1000 * (f + 1)) / Math.max(last(), 1));
    return s("line", { x1: x, x2: x, y1: lane ? 16 : 2, y2: lane ? 24 : 10, stroke: MARK_COLORS[kind], "stroke-width": 2, "vector-effect": "non-scaling-stroke" });
  }));
  el.marks.replaceChildren(...lines);
}

// ---------------------------------------------------------------- brushing

export const pathOf = (number, id) => { const view = state.view.sides[number]; return view.requests[id]?.path ?? view.left[id] ?? []; };

/** Lights nodes and their pages of one side: those of a node, or of a request. null: nothing. */
export function brush(number, what) {
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

export function tip(event, ...content) {
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
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("select, input[type=text]")) return;
  if (event.key === " " && event.target.matches("button")) return;
  const keys = { " ": togglePlay, ArrowLeft: () => seek(state.to - 1), ArrowRight: forward, Home: () => seek(0), End: toPresent, p: projector };
  const kind = own.jumps[event.key.toLowerCase()];
  const go = keys[event.key] ?? (kind && (() => jumpTo(kind, event.key in own.jumps ? 1 : -1)));
  if (!go) return;
  event.preventDefault();
  go();
}

/** The step that the address names, or null. */
const fromHash = () => { const found = /^#step=(\d+)$/.exec(location.hash); return found ? Number(found[1]) : null; };

const followOn = follower(state, last, show);
source.onchange((what) => {
  if (what === "run") {
    stopPlaying();
    const again = state.run !== "";
    Object.assign(state, { run: source.run ?? "file", i: 0, to: 0, view: null, follow: true, noticed: "", wanted: again || address.followed() ? null : fromHash() ?? (source instanceof FileSource ? 0 : null) });
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
    if (state.wanted !== null && last()) { // all that there is has come: the address asks for more
      state.wanted = null;
      show(last());
    }
    drawStatus();
    if (state.view) drawTransport();
  }
});

/** How large a chart is, as measured at the last change. */
export const size = (host) => state.sizes.get(host) ?? [host.clientWidth || 300, host.clientHeight || 100];

const charts = () => Object.entries(parts()).filter(([, [host]]) => host.matches(".chart"));
const resized = new ResizeObserver(() => {
  for (const [, [host]] of charts()) state.sizes.set(host, [host.clientWidth, host.clientHeight]);
  if (state.view) { for (const side of el.sides) sizePool(side.pool); for (const [name] of charts()) drawPart(name); }
});

/** Builds the page and starts it. page: kind (its class), title, words, chip(meta), named(meta), low() (cards),
 *  parts() (name -> [place, name, drawing]), jumps (key -> kind of mark), lanes(frame) ([kind, lane] of its marks),
 *  and perhaps tools() (buttons), foot(side), drawSide(side, number, view), drawStatus(status). */
export function sidesPage(page) {
  Object.assign(own, page);
  build();
  for (const [, [host]] of charts()) resized.observe(host);
  document.addEventListener("keydown", onKey);
  window.addEventListener("hashchange", () => {
    const i = fromHash();
    if (i === null) return;
    standing.end();
    if (address.followed()) return toPresent(); // back to where the page was
    leavePresent();
    show(i); // and the address is of a page that does not follow
  });
  source.start();
}
