// The live page: draws what viz/web/page.py says about a position, and drives the engine behind it.
//
// The data comes from a source (parts.js): a server or the file itself; the rest does not know which.
import { FileSource, LiveSource, MARK_COLORS, SUM_WORDS, TIER_WORDS, addressing, button, clamp, fillHost, fillPool, follower, h, icon, key, noticing, order, part, percent, plural, remains, s, showSpeed, sizePool, slowBanner, speedMenu, tint, undrawn, until } from "./parts.js";
import { makeDrafts } from "./drafts.js";
import { makeFleet } from "./fleet.js";
import { FOUND, makeWhy, parting, tokenBar, tokenKeys } from "./why.js";
import { decorate, fit, highlight, listen, morph, walkPath, zoom } from "./tree.js";

// ---------------------------------------------------------------- the page

const source = document.getElementById("recording") ? new FileSource() : new LiveSource();
const state = {
  g: "step", i: 0, to: { g: "step", i: 0 }, view: null, // shown; asked for; what is known of it
  follow: true, playing: false, opened: [], height: 400,
  everything: false, quiz: null, quizOn: false, score: [0, 0], ticket: 0, lastSpoken: -1e9, run: "",
  rank: null, // of a stream of other servers: the one that is shown alone
};
const el = {};

function build() {
  const app = document.getElementById("app");
  app.append(
    h("header", {},
      h("h1", {}, "minirad ", (el.kind = h("span", {}, source instanceof FileSource ? "recording" : "live"))),
      (el.chips = h("div.chips")),
      (el.tools = h("div.tools", {}, 
        (el.quizButton = button("quiz", "Quiz: guess the next victim or hit before it is shown (q)", toggleQuiz)),
        button("projector", "Larger, for the back row (p)", () => document.body.classList.toggle("projector")),
        (el.doctorButton = button("doctor", "Prompt doctor: where two prompts part, and what that costs (d)", toggleDoctor)),
        (el.missButton = button("why a miss?", "What a prompt would find at this moment, and why not more (w)", () => miss.toggle())),
        (el.restartButton = button("restart…", "Restart with other settings, or fork from here", () => togglePanel(el.restart))),
        button("?", "Keys", () => togglePanel(el.help)))),
      (el.status = h("span.status", {}, h("i.dot"), (el.statusText = h("span", {}, "connecting"))))),
    buildTransport(),
    (el.banner = h("section.banner", { hidden: true, role: "alert" })),
    slowBanner(source),
    (el.refused = h("section.banner.refused", { hidden: true, role: "status" })),
    (el.serving = h("section.banner.serving", { hidden: true, role: "status" })),
    (el.say = h("section.say", {}, (el.sayText = h("span.text")), (el.sayMore = h("span.more")))),
    (el.why = h("section.panel.why", { hidden: true })),
    (el.ask = h("section.panel.quiz", { hidden: true })),
    (el.restart = h("section.panel.restart", { hidden: true })),
    (el.help = buildHelp()),
    (el.doctor = h("section.panel.doctor", { hidden: true })),
    miss.panel,
    h("main", {},
      h("section.card.treecard", {},
        h("h2", {}, "Radix tree", legend(), h("span.zoom", {}, button("−", "Smaller", () => zoom(el.tree, 0.8)), button("fit", "The whole tree, however small; again: as much as can be read (0, double click)", () => fit(el.tree)), button("+", "Larger", () => zoom(el.tree, 1.25)))),
        (el.tiers = h("p.tiers", { hidden: true }, tierLegend(), (el.sums = h("span.sums")))),
        (el.adapters = h("p.tiers.adapters", { hidden: true })),
        (el.tree = h("div.mr-tree", { role: "img" }))),
      (el.drafts = drafts.card),
      h("section.side", {},
        h("section.card.poolcard", {}, h("h2", {}, "KV pool", (el.poolText = h("small"))), (el.pool = h("div.pool")), drafts.keys,
          (el.hostPart = h("div.hostpart", { hidden: true }, h("h2", {}, "Host memory", (el.hostText = h("small"))), (el.host = h("div.pool.host")),
            h("div.keys", {}, hostKey("both", "a copy"), hostKey("host", "only here"), hostKey("copying", "copying"), hostKey("loading", "loading")))),
          (el.diskPart = h("div.diskpart", { hidden: true }, h("h2", {}, h("span", {}, h("b.letter", {}, "K"), "Disk"), (el.diskText = h("small"))), (el.diskBar = h("div.diskbar", { role: "img" }, h("i"))), (el.diskNow = h("p.disknow"))))),
        h("div.two", {},
          h("section.card", {}, h("h2", {}, "Usage", (el.usageText = h("small"))), (el.usage = h("div.chart")), h("div.keys", {}, key("protected", "#4dabf7"), key("private", "#fcc419"), key("evictable", "#ced4da"), (el.hostKey = h("span.key.hostline", { hidden: true }, h("i"), "host")))),
          h("section.card", {}, h("h2", {}, "Hit rate", (el.hitText = h("small"))), (el.hits = h("div.chart")))))),
    h("div.low", {},
      h("section.card.requests", {},
        h("h2", {}, "Requests", (el.queue = h("small.queue")), h("small", {}, key("waiting", "#dee2e6"), key("prefill", "#f59f00"), key("decode", "#51cf66"), key("deferred", "#b35c00"), h("span.key.passed", {}, h("i"), "passed"), h("span.key.forced", {}, h("i"), "forced"), key("retracted", "#ff8787"))),
        (el.lanes = h("div.lanes")), buildPrompt()),
      h("section.card.eventcard", {},
        h("h2", {}, (el.eventsTitle = h("span", {}, "Events")), h("label.all", {}, h("input", { type: "checkbox", onchange: (e) => { state.everything = e.target.checked; drawEvents(); } }), "all")),
        (el.events = h("ol.events")))),
    (el.live = h("div.spoken", { role: "status", "aria-live": "polite" })),
    (el.tip = h("div.tip", { hidden: true })));
  listen(el.tree, { over: overNode, click: clickNode });
}

function legend() {
  const sample = (name, word) => h("span.sample." + name, {}, h("i"), word);
  return h("span.legend", {}, sample("new", "new"), sample("hit", "hit"), sample("split", "split"), sample("grown", "grown"), sample("locked", "locked"), sample("cached", "cached"), sample("evicted", "evicted"));
}

/** Where a node's KV lies, as its card says it. */
function tierLegend() {
  const sample = (name, sign, word, brief = word) => h("span.tier." + name, {}, h("i", {}, h("u")), h("b", {}, sign), h("span.long", {}, word), h("span.brief", {}, brief));
  return h("span.legend", {}, sample("device", "D", "device"), sample("both", "D+H", "device and host", "both"), sample("host", "H", "host only", "host"), sample("moving", "D→H", "copying"), sample("moving", "H→D", "loading"), sample("disk", "K", "from disk"));
}

const hostKey = (tier, text) => h("span.key", {}, h("i.copy." + tier), text);

function buildTransport() {
  const go = (name, title, onclick) => h("button.go." + name, { type: "button", title, "aria-label": title, onclick }, icon(name));
  el.play = h("button.go.main", { type: "button", onclick: togglePlay }, icon("play"));
  el.modes = h("div.modes", { role: "group", "aria-label": "Step by" });
  el.slider = h("input", { type: "range", min: 0, max: 0, value: 0, "aria-label": "Position", oninput: (e) => seek(Number(e.target.value)) });
  el.speed = speedMenu(setSpeed);
  return h("nav.bar", { "aria-label": "Time" },
    go("first", "To the start (Home)", () => seek(0)), go("back", "Back (←)", () => step(-1)), el.play,
    go("next", "Forward (→)", () => step(1)), go("last", "To the present (End)", toPresent), el.modes,
    h("div.scrub", {}, (el.marks = s("svg", { class: "marks", preserveAspectRatio: "none", "aria-hidden": "true" })), el.slider),
    (el.where = h("span.where")),
    jump("split", "s"), jump("evict", "e"), jump("retract", "r"), jump("gap", "g"), el.speed);
}

function jump(kind, letter) {
  return h("button.jump." + kind, { type: "button", title: `To the next ${kind} (${letter}); with shift the one before`, onclick: (e) => jumpTo(kind, e.shiftKey ? -1 : 1) }, h("i"), kind);
}

function buildHelp() {
  const rows = [["space", "play, pause"], ["← →", "back, forward"], ["Home End", "start, present"], ["s e r", "next split, eviction, retraction (shift: the one before)", ".own"], ["s e g", "next split, eviction, gap (shift: the one before)", ".theirs"], ["a", "all ranks in one tree again", ".theirs"],
    ["1 2 3", "by event, step, scene", ".own"], ["1 2", "by event, step", ".theirs"], ["q", "quiz", ".own"], ["d", "prompt doctor", ".own"], ["w", "why would a prompt miss?"], ["p", "projector"], ["+ − 0", "larger, smaller, fit"], ["12 st · ↷3", "waiting for 12 steps; in 3 of them a request behind it was admitted", ".own"], ["D D+H H · K", "KV on the device, also on the host, on the host only (with a host tier); K: it was read from disk"], ["K X ?", "on disk, external, may be there", ".theirs"], ["► ■", "<|im_start|> and <|im_end|> on a card"], ["¶ t lock", "a line break; tick of the last use; running requests that hold a node"]];
  return h("section.panel.help", { hidden: true }, h("table", {}, ...rows.map(([k, text, kind = ""]) => h("tr" + kind, {}, h("th", {}, k), h("td", {}, text)))));
}

function togglePanel(panel) {
  for (const other of [el.why, el.restart, el.help, el.doctor, miss.panel]) if (other !== panel) other.hidden = true;
  if (panel === el.restart && panel.hidden) fillRestart();
  panel.hidden = !panel.hidden;
}

// ---------------------------------------------------------------- going somewhere

/** Shows a position: true; null: a later call has won over this one, which was still under way; false: it failed. */
async function show(g, i, { hash = true } = {}) {
  i = clamp(i, 0, source.count(g) - 1);
  const ticket = ++state.ticket;
  state.to = { g, i };
  const started = performance.now();
  state.height = Math.round((0.84 * chartSize(el.tree)[1]) / 40) * 40 || 400; // in steps, so that views are found again
  let view;
  const { rank } = state;
  try { view = await source.view(g, i, [...state.opened], state.height, rank); }
  catch (error) {
    if (ticket === state.ticket) { state.to = { g: state.g, i: state.i }; notice(error.message); }
    return ticket === state.ticket ? false : null;
  }
  if (ticket !== state.ticket) return null;
  Object.assign(state, { g, i, view });
  const arrived = performance.now();
  draw();
  document.body.dataset.drawing = (performance.now() - arrived).toFixed(1);
  document.body.dataset.latency = (performance.now() - started).toFixed(1);
  if (hash) address.write(`#${g}=${i}`);
  for (const near of [i + 1, i - 1]) // so that the next click finds its answer here
    if (!state.follow && near >= 0 && near < source.count(g)) source.view(g, near, [...state.opened], state.height, rank).catch(() => {});
  return true;
}

const address = addressing(source, state, () => moving());

function leavePresent() {
  if (state.follow && source.status.playing && source.status.drivable) command("play", { on: false }, true);
  state.follow = false;
}

function seek(i) {
  stopPlaying();
  if (i < source.count(state.to.g) - 1) leavePresent();
  closeQuiz();
  return show(state.to.g, i);
}

async function step(direction) {
  stopPlaying();
  if (direction < 0) { leavePresent(); closeQuiz(); return show(state.to.g, state.to.i - 1); }
  return byHand();
}

/** One step, and no further. */
function byHand() {
  if (state.to.i >= source.count(state.to.g) - 1 && nothingLeft()) return false;
  if (source.status.drivable && !source.status.idle) leavePresent();
  return advance();
}

/** Says so, where no step is to come by itself. */
function nothingLeft() {
  if (source.done) notice("Nothing is left to do: submit a prompt, or restart.");
  return source.done;
}

/** One position on, as `show`; at the present end the engine is asked for one. False also when there is none. */
async function advance() {
  if (state.quiz) return false;
  const { g, i } = state.to, target = i + 1;
  if (target >= source.count(g)) {
    if (!source.status.drivable || source.status.idle) return false;
    const before = source.frames.length;
    try { await source.command("step"); } catch (error) { notice(error.message); return false; }
    await until(() => source.frames.length > before);
    if (g === "scene" && target >= source.count("scene")) return show("scene", i);
  }
  if (state.quizOn) {
    let next;
    try { next = await source.view(g, Math.min(target, source.count(g) - 1), [...state.opened], state.height); }
    catch (error) { notice(error.message); return false; }
    if (next.quiz && (next.quiz.ask !== "victim" || state.view.nodes[next.quiz.answer])) { askQuiz(next.quiz, target); return true; }
  }
  state.follow = target === source.count(g) - 1 && !state.quizOn;
  return show(g, target);
}

function toPresent() { stopPlaying(); closeQuiz(); state.follow = true; return show(state.to.g, source.count(state.to.g) - 1); }

function setGranularity(g) {
  if (!modes().includes(g)) return;
  const frame = source.frameAt(state.to.g, state.to.i);
  closeQuiz();
  standing.end();
  if (g === "event") leavePresent(); // they come faster than they can be looked at
  return show(g, source.positionOf(g, frame));
}

function jumpTo(kind, direction) {
  const frame = source.mark(kind, Math.max(source.frameAt(state.to.g, state.to.i), direction < 0 ? 0 : -1), direction);
  if (frame === null) return notice(`No ${direction < 0 ? "earlier" : "further"} ${{ split: "split", evict: "eviction", retract: "retraction", gap: "gap" }[kind]}${source.status.playing ? " yet" : ""}.`);
  stopPlaying();
  leavePresent();
  closeQuiz();
  show(state.to.g, source.positionOf(state.to.g, frame));
}

// Playing: in the past a timer of this page; at the present the engine's own pace.

function togglePlay() {
  if (source.status.stream) { // nothing here plays: it happens elsewhere
    if (!state.follow) return toPresent();
    state.follow = false;
    return address.write(`#${state.g}=${state.i}`);
  }
  if (canPause()) { stopPlaying(); if (source.status.playing) command("play", { on: false }); return drawTransport(); }
  if (state.to.i >= source.count(state.to.g) - 1 && !source.status.drivable) return seek(0).then(startTimer);
  if (state.to.i >= source.count(state.to.g) - 1 && !state.quizOn) {
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
    const more = state.quiz ? true : await advance();
    if (!state.timer) return;
    const arrived = state.follow && !state.quizOn;
    if (more === false || arrived) {
      stopPlaying(more === false); // whose notice stands
      if (more !== false && source.status.drivable && !source.status.idle) command("play", { on: true }); // the engine goes on from here
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

function setSpeed() {
  source.status.speed = Number(el.speed.value);
  if (source.status.drivable) command("speed", { speed: source.status.speed });
}

async function command(name, body, quiet = false) {
  try { return await source.command(name, body); }
  catch (error) { if (!quiet) notice(error.message); return null; }
}

// ---------------------------------------------------------------- drawing

// Each part of the page: its place, its name, how it is drawn, and which parts of a view it needs.
const PARTS = {
  tree: [() => el.tree, "The tree", drawTree, "svg"], say: [() => el.sayMore, "This sentence", drawSay],
  transport: [() => el.where, "The time line", drawTransport], policy: [() => el.policyChip, "The policy", drawPolicy],
  pool: [() => el.pool, "The pool", drawPool, "pool", "usage"], host: [() => el.host, "Host memory", drawHost, "host"],
  disk: [() => el.diskNow, "The disk", drawDisk, "disk"],
  usage: [() => el.usage, "Usage", drawUsage, "usage"], hits: [() => el.hits, "The hit rate", drawHits],
  drafts: [() => el.drafts, "The drafts", () => drafts.draw(), "drafts"],
  lanes: [() => el.lanes, "The requests", drawLanes, "requests"], events: [() => el.events, "The events", drawEvents, "events"],
};

const theirs = makeFleet({ source, state, chartSize: (host) => chartSize(host), cursor: (...at) => cursor(...at), pickRank, command: (...asked) => command(...asked), ranks: () => (source instanceof FileSource ? source.ranks : state.view.fleet.ranks.map((r) => r.rank)) });
const miss = makeWhy({ source, state, toggle: (panel) => togglePanel(panel), light: (nodes) => brush(nodes && { nodes, requests: [] }), linked: (text) => linked(text) });
const drafts = makeDrafts({ source, state, light: (requests) => brush(requests && { nodes: [], requests }) });
const fleetParts = () => ({ ...Object.fromEntries(["tree", "say", "transport"].map((name) => [name, PARTS[name]])), ...theirs.parts(), events: PARTS.events });
const partsNow = () => (source.meta.fleet ? fleetParts() : PARTS);

/** One rank of a stream alone, or (null) all in one tree. */
function pickRank(rank) {
  state.rank = rank;
  standing.end();
  state.opened.length = 0;
  return show(state.g, state.i);
}

function drawPart(name) {
  const [place, words, drawing, ...needs] = partsNow()[name], failed = state.view.failed ?? {};
  return part(place(), words, drawing, needs.map((need) => failed[need]).find(Boolean));
}

function draw() {
  const change = drawPart("tree") ?? { enter: [], exit: [], move: [] };
  document.body.dataset.position = `${state.view.g} ${state.view.i}`;
  document.body.dataset.change = `${change.enter.length} ${change.exit.length} ${change.move.length}`;
  for (const name of Object.keys(partsNow())) if (name !== "tree") drawPart(name);
  drawFork();
  brush(null);
  speak();
  miss.moved();
}

function drawTree() {
  const view = state.view, pace = source.status.speed > 0 ? 800 / source.status.speed : 60;
  const change = morph(el.tree, view.svg, state.first === undefined ? 0 : Math.min(380, moving() ? pace : 320));
  state.first = false;
  decorate(el.tree, (id) => tint(id));
  el.tree.setAttribute("aria-label", `Radix tree with ${plural(view.count ?? Object.keys(view.nodes).length, "node")}. ${view.say}`);
  return change;
}

function drawSay() {
  const view = state.view;
  if (standing.stands()) return;
  el.say.dataset.kind = view.kind;
  el.sayText.replaceChildren(...linked(view.say));
  el.sayMore.replaceChildren(view.title);
  if (view.why.length && !state.quizOn) {
    el.sayMore.append(" · ", button("why this victim?", "The policy's key, and who would have been next", () => togglePanel(el.why), ".link"));
    drawWhy();
  } else el.why.hidden = true;
  const placed = Object.values(partsNow()).flatMap((one) => one.slice(3));
  for (const [name, reason] of Object.entries(view.failed ?? {})) if (!placed.includes(name)) el.sayMore.append(undrawn(`“${name}”`, reason));
}

/** Text with n7 and R3 as things that can be pointed at. A quiz must not hear who would be next. */
function linked(text) {
  if (state.quizOn) text = text.replace(/, next would be n\d+/g, "");
  return text.split(/\b(n\d+|R\d+(?:\.\d+)?)\b/).map((part, i) => {
    if (i % 2 === 0) return document.createTextNode(part);
    const nodes = part[0] === "n" ? [Number(part.slice(1))] : [], requests = part[0] === "R" ? [part] : [];
    return h("b.ref", { onpointerenter: () => brush({ nodes, requests }), onpointerleave: () => brush(null), onclick: () => requests.length && walkRequest(part) }, part);
  });
}

const KEY_OF = { lru: "last_access", mru: "last_access", fifo: "created", filo: "created", lfu: "hits", priority: "priority", slru: "hits", brrip: "hits" };

function drawWhy() {
  const tables = state.view.why.slice(0, 4).map((victim) => {
    const names = { id: "leaf", last_access: "last use", created: "created", hits: "hits", priority: "priority", tokens: "tokens" };
    const row = (c) => h("tr" + (c.id === victim.node ? ".victim" : c.id === victim.runner_up ? ".runner" : ""), { onpointerenter: () => brush({ nodes: [c.id], requests: [] }), onpointerleave: () => brush(null) },
      ...Object.keys(names).map((name) => h("td" + (name === KEY_OF[victim.policy] ? ".key" : ""), {}, name === "id" ? `n${c.id}` : String(c[name]))),
      h("td", {}, c.id === victim.node ? "evicted" : c.id === victim.runner_up ? "would be next" : ""));
    return h("div", {}, h("p", {}, ...linked(`n${victim.node}: ${victim.reason}. `), `Policy ${victim.policy}; ${plural(victim.others, "unlocked leaf").replace("leafs", "leaves")} to choose from.`),
      h("table", {}, h("tr", {}, ...Object.values(names).map((name) => h("th", {}, name)), h("th")), ...victim.candidates.slice(0, 6).map(row)));
  });
  const hidden = state.view.why.length - tables.length;
  el.why.replaceChildren(...tables, hidden > 0 ? h("p", {}, `and ${hidden} more in this ${state.view.g}`) : "");
}

const standing = noticing(el, () => state.view && drawPart("say"));
/** holds: whether it is true at the position on view; by default as long as it stands. */
function notice(text, holds) {
  standing.tell(text, holds);
}

/** Whether a request waits on view; one that is not there yet will. */
function waitsOnView(id) {
  const live = state.view.requests[id];
  return live ? live.waiting : (source.requests[id]?.end ?? Infinity) > state.view.frame;
}

const moving = () => Boolean(state.timer) || (source.plays && !source.status.idle && state.follow);
/** Also an engine that waits for requests: those that come are computed at once, or wait. */
const canPause = () => moving() || (Boolean(source.status.serving) && source.plays && state.follow);

function speak() {
  const now = performance.now();
  if (moving() && now - state.lastSpoken < 2500) return; // not faster than can be listened to
  state.lastSpoken = now;
  el.live.textContent = `${state.view.title}: ${state.view.say}.`;
}

function drawHeader() {
  const meta = source.meta;
  const chip = (text, title) => h("span.chip", { title }, text);
  el.chips.replaceChildren(chip(meta.title ?? "", "workload"), chip(meta.model ?? "", "model"),
    meta.fleet ? chip(meta.page_size ? `blocks of ${plural(meta.page_size, "token")}` : "", "as the servers store them") : chip(`pool ${meta.kv_tokens} · page ${meta.page_size}`, "KV tokens in the pool · tokens per page"),
    ...(meta.disk ? [chip(`host ${meta.host_tokens} · disk ${megabytes(meta.disk.bytes)}`, `tokens in host memory, ${meta.host_write} · most that may lie in the folder ${meta.disk.folder}`)] : meta.host_tokens ? [chip(`host ${meta.host_tokens} · ${meta.host_write}`, "tokens in host memory · when copies are made")] : []),
    ...(meta.speculative ? [chip(meta.bigram_keys ? `${meta.speculative} · pairs` : `drafts: ${meta.speculative}`, `where drafts come from${meta.bigram_keys ? " · the tree's units are bigrams" : ""}`)] : []),
    ...(meta.jump_forward ? [chip("jump-forward", "what a grammar forces is computed in one pass, not sampled")] : []),
    ...(meta.bigram_keys && !meta.speculative ? [chip("pairs of tokens", "the tree's units are bigrams")] : []),
    (el.policyChip = chip("", "schedule policy · eviction policy at the moment on view")));
  document.body.classList.toggle("tiered", Boolean(meta.host_tokens));
  el.tiers.hidden = el.hostPart.hidden = el.hostKey.hidden = !meta.host_tokens;
  document.body.classList.toggle("disked", Boolean(meta.disk));
  el.diskPart.hidden = !meta.disk;
  drawAdapters();
  drafts.mount();
  drawPolicy();
  document.title = `minirad${source instanceof FileSource ? "" : " live"}: ${meta.title ?? ""}`;
  document.body.classList.toggle("fleet", Boolean(meta.fleet));
  if (meta.fleet) theirs.mount(el);
  el.modes.replaceChildren(...modes().map((g, n) => h("button", { type: "button", title: `By ${g} (${n + 1})`, "aria-pressed": String(g === state.g), disabled: !source.granularities().includes(g), onclick: () => setGranularity(g) }, g)));
  document.body.classList.toggle("drivable", Boolean(source.status.drivable));
}

/** A stream tells of no requests, with which scenes begin. */
const modes = () => ["event", "step", "scene"].filter((g) => !source.meta.fleet || g !== "scene");

/** The eviction policy may have changed in the middle of the run. */
function drawPolicy() {
  const policy = source.meta.fleet ? "" : state.view?.policy ?? source.meta.eviction_policy;
  el.policyChip.textContent = [source.meta.schedule_policy, policy].filter(Boolean).join(" · ");
  el.policyChip.classList.toggle("changed", Boolean(policy) && policy !== source.meta.eviction_policy);
}

function drawStatus() {
  const { error, playing, idle, drivable, notices } = source.status;
  const frames = source.frames.length;
  const refused = source.status.refused || source.meta?.refused || ""; // a file has no status, only what was known at its end
  el.refused.hidden = !refused;
  if (el.refused.textContent !== refused) el.refused.textContent = refused;
  drawServing(source.lost ? null : source.status.serving);
  const noneServed = refused && !Object.keys(source.requests).length;
  const starting = !error && source.run === "";
  const { stream } = source.status;
  const text = error ? (stream ? "stopped" : "engine stopped") : stream && !source.lost ? stream.text : source.lost ? "connection lost, trying again" : starting ? "the engine starts" : !drivable ? `recording of ${plural(frames, "step")}`
    : idle && (playing || !source.status.serving) ? (noneServed ? "no request was taken" : source.status.serving ? "waiting for requests" : Object.keys(source.requests).length ? "all requests done" : "no request yet") : playing ? "engine running" : `engine paused at step ${source.frames.at(-1)?.s ?? 0}`;
  el.statusText.textContent = text;
  el.status.dataset.kind = error || source.lost ? "error" : stream ? stream.kind : drivable && playing && !idle ? "on" : "off";
  el.banner.hidden = !error;
  el.banner.textContent = `${stream ? "This page stopped listening" : "The engine stopped"} with an error: ${error}. ${remains(source.lost, stream ? "came" : "it did")}; the terminal has the details.`;
  if (notices?.length && notices.at(-1) !== state.noticed) notice((state.noticed = notices.at(-1)));
  document.body.classList.toggle("drivable", Boolean(drivable));
  document.body.classList.toggle("listening", Boolean(stream));
  if (el.policy) {
    const { policy = "" } = source.status, names = source.choices?.eviction_policy ?? [];
    if (el.policy.childElementCount !== names.length) el.policy.replaceChildren(...names.map((name) => h("option", { value: name }, name)));
    el.policy.disabled = !policy;
    if (policy && document.activeElement !== el.policy) el.policy.value = policy;
  }
  el.restartButton.hidden = !drivable && !error; // needs an engine; a file has no tokenizer either
  el.doctorButton.hidden = source instanceof FileSource || Boolean(source.meta.fleet);
  el.missButton.hidden = source instanceof FileSource; // it is asked of the server
  el.quizButton.hidden = Boolean(source.meta.fleet);
  if (source.meta.fleet || source.status.serving) el.restartButton.hidden = true;
  if (source.meta.fleet) theirs.drawTools();
  el.kind.textContent = drivable || error || starting || stream ? "live" : "recording";
  el.quizButton.setAttribute("aria-pressed", String(state.quizOn));
  if (document.activeElement !== el.speed && drivable) showSpeed(el.speed, source.status.speed);
}

/** Where requests can be sent to this page's engine or router, how, and what holds them up. */
function drawServing(serving) {
  el.serving.hidden = !serving;
  if (serving && el.serving.textContent !== serving.text + serving.example) el.serving.replaceChildren(h("span", {}, serving.text), h("code", {}, serving.example));
}

function drawTransport() {
  const count = source.count(state.g);
  el.slider.max = count - 1;
  el.slider.value = state.i;
  el.slider.style.setProperty("--at", `${count > 1 ? (100 * state.i) / (count - 1) : 0}%`);
  el.where.textContent = `${state.i} / ${count - 1}`;
  const running = canPause();
  el.play.replaceChildren(icon(running ? "pause" : "play"));
  el.play.title = running ? "Pause (space)" : "Play (space)";
  el.play.setAttribute("aria-label", el.play.title);
  for (const b of el.modes.children) b.setAttribute("aria-pressed", String(b.textContent === state.g));
  drawMarks(count);
}

function drawMarks(count) {
  const key = `${state.g} ${source.frames.length} ${source.run}`;
  if (el.marks.dataset.key === key) return;
  el.marks.dataset.key = key;
  el.marks.setAttribute("viewBox", "0 0 1000 26");
  const seen = new Set(), lines = [];
  source.frames.forEach((frame, f) => {
    for (const kind of frame.m) {
      const x = Math.round((1000 * source.positionOf(state.g, f)) / Math.max(count - 1, 1));
      if (seen.has(kind + x)) continue;
      seen.add(kind + x);
      lines.push(s("line", { x1: x, x2: x, y1: kind === "evict" ? 14 : 3, y2: kind === "evict" ? 24 : 12, stroke: MARK_COLORS[kind], "stroke-width": 2, "vector-effect": "non-scaling-stroke" }));
    }
  });
  el.marks.replaceChildren(...lines);
}

// ---------------------------------------------------------------- pool

function drawPool() {
  const { pool, usage } = state.view, page = source.meta.page_size;
  fillPool(el.pool, pool);
  drafts.paint(el.pool);
  const [free, evictable, guarded, own] = usage;
  const total = source.meta.kv_tokens || free + evictable + guarded + own;
  el.poolText.textContent = `${total - free} of ${total} slots used · ${free} free` + (page > 1 ? ` · ${page} per page` : "");
}

/** Host memory, and what this step or scene moved between the tiers. */
function drawHost() {
  const { host, host_used: used, host_only: only, tier_sums: sums } = state.view;
  if (!host) return;
  fillHost(el.host, host);
  el.hostText.textContent = `${used} of ${source.meta.host_tokens} slots used · ${only} only here`;
  const told = Object.entries(SUM_WORDS).filter(([name]) => sums[name]).map(([name, words]) => `${sums[name]} ${words}`);
  el.sums.textContent = told.length ? `this ${state.view.g}: ${told.join(", ")}` : "";
  el.sums.title = told.length ? `tokens: ${told.join(", ")}` : "";
}

const megabytes = (bytes) => `${(bytes / 1e6).toLocaleString("en", { maximumFractionDigits: bytes < 1e7 ? 1 : 0 })} MB`;
const many = (n, word) => plural(n, word).replace(String(n), n.toLocaleString("en"));

/** The folder of the third tier, and what went to it and came from it, now and so far. */
function drawDisk() {
  const { disk, g } = state.view, { meta } = source;
  if (!meta.disk) return;
  const { now, total } = disk, known = disk.files !== null;
  el.diskText.textContent = known ? `${many(disk.files, "file")} · ${many(disk.tokens, "token")} · ${megabytes(disk.bytes)} of ${megabytes(meta.disk.bytes)}` : `not told yet · at most ${megabytes(meta.disk.bytes)}`;
  el.diskBar.firstChild.style.width = known ? `max(${percent(disk.bytes, meta.disk.bytes)}, ${disk.bytes ? 2 : 0}px)` : "0";
  el.diskBar.setAttribute("aria-label", el.diskText.textContent);
  const took = (us) => `${(us / 1000).toLocaleString("en", { maximumFractionDigits: 1 })} ms`;
  const moved = [now.read && h("b.read", {}, `${now.read} read in ${took(now.read_us)}`), now.written && h("b.written", {}, `${now.written} written in ${took(now.written_us)}`), now.late && h("b.lost", {}, `${many(now.late, "reading")} too late`), now.lost && h("b.lost", {}, `${many(now.lost, "block")} off the disk`)].filter(Boolean);
  el.diskNow.replaceChildren(
    h("span.came" + (total.read ? ".some" : ""), { title: `in ${many(total.read_blocks, "block")}, ${took(total.read_us)} of waiting` }, h("b", {}, total.read.toLocaleString("en")), ` ${total.read === 1 ? "token" : "tokens"} came from disk`),
    h("span", { title: `in ${many(total.written_blocks, "block")}, ${took(total.written_us)} beside the steps` }, h("b", {}, total.written.toLocaleString("en")), " written"),
    h("span.moved", { title: moved.map((one) => one.textContent).join(", ") }, ...(moved.length ? [`this ${g}: `, ...moved.flatMap((one, k) => (k ? [", ", one] : [one]))] : [])));
}

/** The adapters' names in their colours, as on the cards below the root. */
function drawAdapters() {
  const known = source.meta.adapters ?? [];
  el.adapters.hidden = !known.length;
  document.body.classList.toggle("adapted", known.length > 0);
  el.adapters.replaceChildren(h("span", {}, "adapters:"), ...known.map(([name]) => adapterTag(name)), h("span.hint", {}, "equal tokens, other keys and values: never shared by two"));
  if (!el.lora) return;
  el.lora.hidden = !known.length;
  el.lora.replaceChildren(...[...known.slice(-1), ...known.slice(0, -1)].map(([name]) => h("option", { value: name }, name || "no adapter")));
}

function adapterTag(name) {
  const [, background] = source.meta.adapters.find(([one]) => one === name) ?? ["", "#5c636a"];
  return h("span.adapter", { style: { background }, title: name ? `under adapter ${name}` : "under no adapter" }, name || "no adapter");
}

function slotText(owner, pageNumber, tier = "slots") {
  const page = source.meta.page_size;
  if (owner[0] !== "n") return owner[0] === "R" ? [`${owner}'s own, not in the tree yet`] : owner[0] === "x" ? [`free: n${owner.slice(1)} was evicted`] : ["free"];
  const node = state.view.nodes[owner.slice(1)];
  if (!node) return ["in a fold of the tree"];
  let before = 0;
  for (const [first, length] of node.body[tier] ?? []) {
    if (pageNumber * page >= first && pageNumber * page < first + length) { before += pageNumber * page - first; break; }
    before += length;
  }
  const pieces = node.body.pieces, context = (a, b) => pieces.slice(Math.max(a, 0), b).join("");
  return [`token ${before + 1}${page > 1 ? `–${Math.min(before + page, node.body.size)}` : ""} of ${node.body.size}: `, h("code", {}, context(before - 8, before), h("mark", {}, context(before, before + page)), context(before + page, before + page + 8))];
}

// ---------------------------------------------------------------- charts

const sizes = new Map(); // measured at changes only: asking in the middle of drawing makes the browser lay out
const chartSize = (host) => sizes.get(host) ?? [host.clientWidth || 240, host.clientHeight || 90];
const measure = () => { for (const host of [el.usage, el.hits, el.tree, ...theirs.charts]) sizes.set(host, [host.clientWidth, host.clientHeight]); };

function drawUsage() {
  const [w, height] = chartSize(el.usage), frames = source.frames, now = state.view.frame, first = source.meta.start ?? 0;
  const peak = frames.reduce((most, f) => Math.max(most, f.u[1] + f.u[2] + f.u[3]), 0);
  // Of a pool that is hardly used all would lie within a pixel of the axis: then the chart ends above the peak.
  const pool = source.meta.kv_tokens || Math.max(peak, 1), cut = peak < pool / 8, total = cut ? Math.max(peak, 1) * 1.15 : pool;
  const n = Math.max(frames.length, 1), columns = Math.min(n, Math.floor(w / 2)), top = 4, bottom = height - 3;
  const y = (v) => bottom - (v / total) * (bottom - top), x = (f) => (w * f) / n;
  const layers = [["#4dabf7", (u) => u[2]], ["#fcc419", (u) => u[3]], ["#ced4da", (u) => u[1]]];
  const shapes = layers.map(([color], k) => {
    let up = "", down = "";
    for (let c = 0; c < columns; c++) {
      const f = Math.floor((c * n) / columns), u = frames[f]?.u ?? [0, 0, 0, 0];
      const low = layers.slice(0, k).reduce((sum, [, part]) => sum + part(u), 0), high = low + layers[k][1](u);
      const x0 = x(f).toFixed(1), x1 = x(Math.floor(((c + 1) * n) / columns)).toFixed(1);
      up += `L${x0},${y(high).toFixed(1)}L${x1},${y(high).toFixed(1)}`;
      down = `L${x1},${y(low).toFixed(1)}L${x0},${y(low).toFixed(1)}` + down;
    }
    return s("path", { d: up ? `M${up.slice(1)}${down}Z` : "", fill: color });
  });
  el.usage.replaceChildren(s("svg", { viewBox: `0 0 ${w} ${height}`, role: "img", "aria-label": usageWords() },
    ...shapes, hostLine(frames, w, top, bottom), ...(cut ? [] : [s("line", { x1: 0, x2: w, y1: top, y2: top, class: "limit" })]), s("line", { x1: 0, x2: w, y1: bottom, y2: bottom, class: "axis" }),
    ...cursor(x(now + 1), top, bottom)));
  el.usageText.textContent = cut ? `at most ${peak} of ${pool}` : `over ${plural((frames.at(-1)?.s ?? first) - first, "step")}`;
  el.usage.title = usageWords();
}

/** How full host memory is, as a dashed line: the top of the chart is all of it. */
function hostLine(frames, w, top, bottom) {
  const total = source.meta.host_tokens, n = Math.max(frames.length, 1);
  if (!total || !frames.length) return "";
  const step = Math.max(1, Math.floor((2 * n) / w)), points = [];
  for (let f = 0; f < n; f += step) points.push(`${((w * (f + 0.5)) / n).toFixed(1)},${(bottom - ((frames[f].h ?? 0) / total) * (bottom - top)).toFixed(1)}`);
  return s("path", { d: "M" + points.join("L"), class: "hostline" });
}

function usageWords() {
  const [free, evictable, guarded, own] = state.view.usage;
  const host = source.meta.host_tokens ? `; ${state.view.host_used} of ${source.meta.host_tokens} on the host (dashed)` : "";
  return `${guarded} protected, ${own} private, ${evictable} evictable, ${free} free${host}`;
}

const cursor = (x, top, bottom) => [s("line", { x1: x, x2: x, y1: top - 3, y2: bottom, class: "cursor" })];

/** H = 1 - C / sum of prompt tokens, C = prompt tokens computed; each request at its first admission. */
function drawHits() {
  const now = state.view.frame;
  const admitted = Object.values(source.requests).filter((r) => r.hit !== null && !r.sample && r.admitted <= now).sort((a, b) => a.admitted - b.admitted || order(a.id) - order(b.id));
  const [w, height] = chartSize(el.hits), top = 12, bottom = height - 14;
  let cached = 0, prompt = 0;
  const all = admitted.map((r) => { cached += r.hit; prompt += r.prompt; return { r, cumulative: cached / prompt }; });
  const shown = all.slice(-Math.max(6, Math.floor(w / 11))), slot = w / Math.max(shown.length, 8), y = (v) => bottom - v * (bottom - top);
  const bars = shown.map(({ r }, k) => {
    const bar = s("rect", { x: k * slot + 1, width: Math.max(slot - 2, 1), y: y(Math.max(r.hit / r.prompt, 0.012)), height: bottom - y(Math.max(r.hit / r.prompt, 0.012)), rx: 1.5, class: "bar", "data-request": r.id }, s("title", {}, `${r.id} ${r.label || r.text}: ${r.hit} of ${r.prompt} prompt tokens from the cache${r.why ? `: ${r.why}` : ""}`));
    bar.addEventListener("pointerenter", () => brush({ nodes: [], requests: [r.id] }));
    bar.addEventListener("pointerleave", () => brush(null));
    bar.addEventListener("click", () => walkRequest(r.id));
    return bar;
  });
  const line = shown.map(({ cumulative }, k) => `${k ? "L" : "M"}${(k + 0.5) * slot},${y(cumulative).toFixed(1)}`).join("");
  el.hits.replaceChildren(s("svg", { viewBox: `0 0 ${w} ${height}`, role: "img", "aria-label": `cumulative hit rate ${percent(cached, prompt)}` },
    s("line", { x1: 0, x2: w, y1: y(1), y2: y(1), class: "limit" }), s("line", { x1: 0, x2: w, y1: bottom, y2: bottom, class: "axis" }), ...bars, s("path", { d: line, class: "line" }),
    ...(shown.length ? [s("text", { x: 1, y: height - 2 }, shown[0].r.id), s("text", { x: shown.length * slot - 1, y: height - 2, "text-anchor": "end" }, shown.length > 4 ? shown.at(-1).r.id : "")] : [])));
  el.hitText.replaceChildren("H = ", h("b", {}, percent(cached, prompt)));
  el.hits.title = `H = 1 − C / Σ prompt tokens = 1 − ${prompt - cached} / ${prompt}`;
}

// ---------------------------------------------------------------- requests

const WINDOW = 130; // frames that the time line shows at once

function drawLanes() {
  const now = state.view.frame, total = source.frames.length;
  let from = 0, to = Math.max(total, 12);
  if (total > WINDOW) { from = clamp(now - WINDOW + 30, 0, total - WINDOW); to = from + WINDOW; }
  const shown = Object.values(source.requests).filter((r) => r.added <= Math.max(now, 0) && (r.end ?? total) >= from).sort((a, b) => order(a.id) - order(b.id)).slice(-60);
  const left = (f) => `${(100 * (clamp(f, from, to) - from)) / (to - from)}%`;
  const width = (a, b) => `${(100 * (clamp(b, from, to) - clamp(a, from, to))) / (to - from)}%`;
  const longest = longestWaiter(now);
  el.lanes.replaceChildren(...shown.map((r) => {
    const bars = r.segs.filter(([, a]) => a <= now).map(([kind, a, b]) => {
      return h("i." + kind, { style: { left: left(a), width: width(a, Math.min(b ?? now + 1, now + 1)) }, title: kind });
    });
    const live = state.view.requests[r.id];
    const known = r.hit !== null && r.admitted <= now;
    for (const [a, b, reason] of r.defers) if (a <= now && b >= from) bars.push(h("b.defer", { style: { left: left(a), width: width(a, Math.min(b, now + 1)) }, onpointermove: (e) => tip(e, h("b", {}, r.id), " looked at and left waiting: " + reason) , onpointerleave: () => tip(null) }));
    for (const [f, by] of r.passed) if (f <= now && f >= from) bars.push(h("b.pass", { style: { left: left(f + 0.5) }, onpointermove: (e) => tip(e, h("b", {}, r.id), ` passed over by ${by.join(", ")}`), onpointerleave: () => tip(null) }));
    for (const [f, count] of r.forced ?? []) if (f <= now && f >= from) bars.push(h("b.force", { style: { left: left(f), width: width(f, f + 1) }, onpointermove: (e) => tip(e, h("b", {}, r.id), ` ${plural(count, "token")} forced by its grammar: computed, not sampled`), onpointerleave: () => tip(null) }));
    const wait = live?.waiting ? waited(r, now) : 0, passed = r.passed.filter(([f]) => f <= now).length;
    const told = h("span.hitbar" + (wait ? ".wait" : ""), { title: wait ? `waits for ${plural(wait, "step")}; in ${passed} of them a request behind it was admitted` : known ? `${r.hit} of ${r.prompt} prompt tokens from the cache${r.disk ? `, ${r.disk} of them from disk` : ""}${r.why ? `: ${r.why}` : ""}` : "not admitted yet" },
      h("em", { style: { width: known && !wait ? percent(r.hit, r.prompt) : "0" } }), r.disk && known && !wait ? h("em.disk", { style: { left: percent(Math.max(r.hit - r.disk, 0), r.prompt), width: percent(Math.min(r.disk, r.hit), r.prompt) } }) : "", h("span", {}, wait ? `${wait} st${passed ? ` · ↷${passed}` : ""}` : known ? `${r.hit}/${r.prompt}` : `–/${r.prompt}`));
    return h("div.lane" + (live ? (live.waiting ? ".waits" : ".runs") : "") + (r.id === longest?.id ? ".longest" : ""), { "data-request": r.id, tabindex: 0, title: known && r.why ? `${r.text}\n${r.hit} of ${r.prompt} tokens from the cache; computed: ${r.why}` : r.text, role: "button", "aria-label": `${r.id} ${r.label || ""}: ${r.text}`,
      onpointerenter: () => brush({ nodes: [], requests: [r.id] }), onpointerleave: () => brush(null), onclick: () => pickRequest(r.id), onkeydown: (e) => e.key === "Enter" && pickRequest(r.id) },
      h("span.who", {}, h("b", {}, r.id), " ", r.lora === undefined ? "" : adapterTag(r.lora), r.label || r.text), ...(r.reply && r.end <= now ? [h("span.reply", { title: r.reply }, r.reply)] : r.lora === undefined ? [] : [h("span.reply")]), h("span.track", {}, ...bars, h("u", { style: { left: left(now + 1) } })), told);
  }));
  drawQueue(longest, now);
  requestAnimationFrame(() => { // to the latest, in whole lanes
    if (!el.lanes.matches(":hover")) el.lanes.scrollTop = Math.floor((el.lanes.scrollHeight - el.lanes.clientHeight) / 20) * 20;
  });
}

const waitSince = (r, now) => (r.segs.findLast(([, a]) => a <= now) ?? r.segs[0])[1];
/** Engine steps; what is done by hand between two of them makes frames that are none. */
const waited = (r, now) => (source.frames[now]?.s ?? source.meta.start ?? 0) - (source.frames[waitSince(r, now) - 1]?.s ?? source.meta.start ?? 0);

/** Who has waited longest at a frame; null when none waits for more than a step. */
function longestWaiter(now) {
  const waiting = Object.values(source.requests).filter((r) => r.added <= now && state.view.requests[r.id]?.waiting);
  waiting.sort((a, b) => waitSince(a, now) - waitSince(b, now) || order(a.id) - order(b.id));
  return waiting.length && waited(waiting[0], now) > 1 ? waiting[0] : null;
}

function drawQueue(longest, now) {
  const waiting = Object.values(state.view.requests).filter((r) => r.waiting).length;
  const passed = longest?.passed.filter(([f]) => f <= now).length;
  el.queue.replaceChildren(...(longest ? [`${waiting} wait · longest `, ...linked(longest.id), `: ${plural(waited(longest, now), "step")}` + (passed ? `, passed ${passed === 1 ? "once" : passed + "×"}` : "")] : [waiting ? `${waiting} waiting` : ""]));
}

/** Lights the path of a request from the root down, as far as it is (still) in the tree. */
async function walkRequest(id) {
  const path = state.view.requests[id]?.path ?? state.view.left[id] ?? [];
  if (!path.length) return notice(`Nothing of ${id} is in the tree at this moment.`);
  brush({ nodes: path, requests: [id] });
  await walkPath(el.tree, path.map((n) => "n" + n));
}

// ---------------------------------------------------------------- events

function drawEvents() {
  const { events, g } = state.view;
  const shown = events.filter((e) => state.everything || !e.small || (g === "event" && e.on));
  el.eventsTitle.textContent = `Events of ${g === "event" ? "this step" : "this " + g}`;
  const items = shown.map((e) => h("li" + (e.on && g === "event" ? ".on" : "") + (e.later ? ".later" : ""), { onpointerenter: () => brush(e), onpointerleave: () => brush(null) },
    h("em." + e.kind, {}, e.tag), h("span", {}, ...linked(e.text))));
  for (const [k, item] of items.entries()) item.mrEvent = shown[k];
  const hidden = events.length - shown.length;
  el.events.replaceChildren(...items, hidden ? h("li.rest", {}, `${plural(hidden, "smaller event")}${source.meta.fleet ? "" : " (tokens, slots, locks)"}: tick “all”`) : "");
  if (!events.length) el.events.replaceChildren(h("li.rest", {}, state.view.frame < 0 ? "none: this is the start" : "none"));
  el.events.querySelector(".on")?.scrollIntoView({ block: "nearest" });
}

// ---------------------------------------------------------------- brushing

function overNode(id, event) {
  if (!id || id === "n0" || id[0] === "f") { brush(null); return tip(null); }
  const number = Number(id.slice(1)), node = state.view.nodes[number];
  brush({ nodes: [number], requests: requestsOn(number), exact: true });
  const where = node?.tier ? ` · ${TIER_WORDS[node.tier]}` : "";
  if (node && source.meta.fleet) return tip(event, h("b", {}, id), theirs.tipOf(node), h("pre", {}, node.body.text));
  if (node) tip(event, h("b", {}, id), ` ${source.meta.styles[node.status]?.word || "cached"}${where} · ${plural(node.body.size, "token")} · lock ${node.lock} · last use t ${node.t} · created t ${node.created} · ${plural(node.hits, "hit")}` + (node.disk ? " · read from disk" : "") + (node.lora ? ` · adapter ${node.lora}` : node.space ? ` · namespace ${node.space}` : "") + (node.priority ? ` · priority ${node.priority}` : ""), h("pre", {}, node.body.text));
}

function clickNode(id) {
  if (state.quiz?.ask === "victim" && id[0] === "n") return answerQuiz(Number(id.slice(1)));
  if (id[0] !== "f") return;
  state.opened.push(Number(id.slice(1)));
  show(state.g, state.i);
}

function requestsOn(number) {
  return Object.entries(state.view.requests).filter(([, r]) => r.path.includes(number)).map(([id]) => id);
}

/** Lights what belongs together: nodes, their pages, requests, events. null: nothing. */
function brush(what) {
  const nodes = new Set(what?.nodes ?? []), requests = new Set(what?.requests ?? []);
  if (what && !what.exact) for (const id of requests) for (const n of state.view?.requests[id]?.path ?? []) nodes.add(n);
  highlight(el.tree, what ? [...nodes] : miss.path());
  const direct = new Set(what?.exact ? [] : requests);
  const active = Boolean(what) && (nodes.size > 0 || direct.size > 0);
  el.pool.classList.toggle("brushing", active);
  el.host.classList.toggle("brushing", active);
  for (const cell of [...el.pool.children, ...el.host.children]) {
    const owner = cell.dataset.owner;
    const drafter = cell.dataset.draft && cell.dataset.drafter; // of a rejected draft nobody owns the cell any more
    cell.classList.toggle("lit", Boolean(active && (owner || drafter)) && (direct.has(drafter) || (owner[0] === "R" ? direct.has(owner) : nodes.has(Number(owner.slice(1))))));
  }
  for (const lane of el.lanes.children) lane.classList.toggle("lit", requests.has(lane.dataset.request));
  for (const bar of el.hits.querySelectorAll(".bar")) bar.classList.toggle("lit", requests.has(bar.dataset.request));
  for (const item of el.events.children) {
    const e = item.mrEvent;
    item.classList.toggle("lit", Boolean(e) && Boolean(what) && (e.nodes.some((n) => (what.nodes ?? []).includes(n)) || (!what.exact && e.requests.some((r) => requests.has(r)))));
  }
}

function overPool(event) {
  const cell = event.target.closest?.(".pool i");
  if (!cell) { brush(null); return tip(null); }
  const owner = cell.dataset.owner, number = Number(cell.dataset.page);
  if (owner[0] === "R") brush({ nodes: [], requests: [owner] });
  else if (owner) brush({ nodes: [Number(owner.slice(1))], requests: requestsOn(Number(owner.slice(1))), exact: true });
  else brush(null);
  tip(event, h("b", {}, `${source.meta.page_size > 1 ? "page" : "slot"} ${number}`), owner[0] === "n" ? ` · ${owner} · ` : " · ", ...slotText(owner, number), drafts.tipOf(cell) && ` · ${drafts.tipOf(cell)}`);
}

function overHost(event) {
  const cell = event.target.closest?.(".pool i"), number = Number(cell?.dataset.page);
  if (!cell) { brush(null); return tip(null); }
  const node = Number(cell.dataset.owner.slice(1)), tier = state.view.nodes[node]?.tier;
  node ? brush({ nodes: [node], requests: [], exact: true }) : brush(null);
  tip(event, h("b", {}, `host ${source.meta.page_size > 1 ? "page" : "slot"} ${number}`), node ? ` · n${node}, ${TIER_WORDS[tier]} · ` : " · ", ...(node ? slotText(cell.dataset.owner, number, "host") : ["free"]));
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

// ---------------------------------------------------------------- prompts and settings

function buildPrompt() {
  el.as = "chat";
  const mode = (name, title) => button(name, title, () => setMode(name), ".mode");
  el.modeButtons = h("div.modes", { role: "group", "aria-label": "Send as" }, mode("chat", "As the first question of a chat"), mode("agent", "Behind the long prompt that all agents share"), mode("raw", "As it is: nothing shared"));
  el.prompt = h("input.prompt", { type: "text", placeholder: "Ask something, e.g. What is the capital of France?", maxLength: 12000, "aria-label": "Prompt", oninput: whatIf, onkeydown: (e) => { if (e.key === "Enter") submit(); } });
  el.whatif = h("div.whatif", { "aria-live": "polite" });
  el.lora = h("select.lora", { hidden: true, title: "Under which adapter", "aria-label": "Adapter", onchange: whatIf });
  el.evictCount = h("input.count", { type: "number", min: 1, value: 50, "aria-label": "Tokens to evict" });
  el.policy = h("select", { title: "Who is evicted from now on", "aria-label": "Eviction policy", onchange: () => command("policy", { policy: el.policy.value }).then((done) => (done ? toPresent() : (el.policy.value = source.status.policy))) });
  setTimeout(() => setMode("chat"));
  return h("div.ask", {},
    h("div.row", {}, el.modeButtons, el.lora, el.prompt, button("submit", "Add the request (Enter)", submit, ".go-primary"),
      h("span.sep"), button("step", "One engine step", () => advanceFromPresent()), h("span.joined", {}, button("evict", "Evict at least so many tokens now", () => command("evict", { tokens: Number(el.evictCount.value) }).then((a) => a && toPresent())), el.evictCount, el.policy), button("flush", "Empty the tree (refused while requests live)", () => command("flush").then((a) => a && toPresent()))),
    el.whatif);
}

const EXAMPLES = { chat: "What is the capital of France?", agent: "What color is the sky?", raw: "lamp lamp river stone cloud" };

function setMode(name) {
  const old = el.as;
  el.as = name;
  for (const b of el.modeButtons.children) b.setAttribute("aria-pressed", String(b.textContent === name));
  if (!el.prompt.value && old !== name) el.prompt.value = EXAMPLES[name];
  whatIf();
}

let peekTimer = null, peekTicket = 0, peeking = null; // one at a time: a busy engine would hold all of a browser's connections
function whatIf() {
  clearTimeout(peekTimer);
  const ticket = ++peekTicket;
  if (!el.prompt.value || !source.status.drivable) { el.whatif.replaceChildren(h("span.hint", {}, "While you type: how much of the prompt would hit.")); return; }
  peekTimer = setTimeout(async () => {
    await peeking;
    if (ticket !== peekTicket) return;
    const found = await (peeking = command("peek", { text: el.prompt.value, as: el.as, lora: el.lora.value }, true));
    if (ticket !== peekTicket) return;
    if (!found) return el.whatif.replaceChildren(); // nothing is known of this text
    const cut = (text, end) => (text.length <= 70 ? text : end ? "…" + text.slice(-68) : text.slice(0, 68) + "…");
    const line = (text) => text.replaceAll("\n", "¶");
    el.whatif.replaceChildren(
      h("b" + (found.hit + found.back ? ".some" : ""), {}, `${found.hit} of ${plural(found.tokens, "token")} would hit${found.back ? `, ${found.back} more would be loaded back from the host` : ""}${state.i < source.count(state.g) - 1 ? " (at the present)" : ""}`),
      found.too_long ? h("b.bad", {}, ` too long: at most ${found.limit} tokens fit with the reply`) : "",
      h("code", {}, h("mark", {}, line(cut(found.hit_text, true))), line(cut(found.rest_text, false))));
  }, 60);
}

async function submit() {
  if (state.sending) return;
  const past = state.i < source.count(state.g) - 1, text = el.prompt.value;
  state.sending = true;
  const done = await command("submit", { text, as: el.as, lora: el.lora.value });
  state.sending = false;
  if (!done) return;
  if (el.prompt.value === text) el.prompt.value = "";
  whatIf();
  await toPresent();
  notice(`${done.request} waits in the queue${past ? ": a prompt goes to the present, so that is shown now" : ""}${source.status.playing ? "" : "; press step or play"}.`, () => waitsOnView(done.request));
}

async function advanceFromPresent() {
  stopPlaying();
  if (state.i < source.count(state.g) - 1) await show(state.g, source.count(state.g) - 1);
  byHand();
}

function fillRestart() {
  if (!source.choices) return el.restart.replaceChildren(h("p", {}, source.status.error ? "There is no engine to restart: run python -m viz.live again." : "This is a recording in a file: there is no engine to restart. Run python -m viz.live."));
  const now = source.settings, fields = {}, known = source.choices.workload;
  const ours = known.includes(now.workload) ? known : [now.workload, ...known]; // one of a file is kept
  const select = (name, label, values, set) => h("label", {}, label, (fields[name] = h("select", {}, ...values.map((v) => h("option", { value: v, selected: String(v) === String(set || now[name]) }, String(v))))));
  const host = h("input", { type: "number", min: 0, max: 1000000, step: 16, value: now.host_kv_tokens ?? 0 });
  const forms = h("div.fields", {},
    select("workload", "workload", ours), select("schedule_policy", "schedule", source.choices.schedule_policy), select("eviction_policy", "eviction", source.choices.eviction_policy, source.status.policy), select("page_size", "page size", source.choices.page_size),
    h("label", {}, "pool (tokens)", (fields.kv_tokens = h("input", { type: "number", min: 16, max: 1000000, step: 16, value: source.meta.kv_tokens }))),
    h("label", {}, "host memory", (fields.host_kv_tokens = host)), select("host_write", "copied", source.choices.host_write));
  const values = () => Object.fromEntries(Object.entries(fields).map(([name, field]) => [name, field.value]));
  fields.workload.addEventListener("change", () => { if (fields.workload.value !== now.workload) fields.kv_tokens.value = ""; });
  const go = (name) => async () => {
    const buttons = el.restart.querySelectorAll("button"), frame = el.fork.frame;
    for (const b of buttons) b.disabled = true; // one run is enough
    if (await command(name, { ...values(), frame })) el.restart.hidden = true;
    for (const b of buttons) b.disabled = !source.status.drivable;
  };
  el.restart.replaceChildren(forms,
    button("restart", "The workload from the start, with these settings", go("restart"), ".go-primary"),
    (el.fork = button("", "The requests that had come by now, replayed on a new engine with these settings", go("fork"))),
    h("p.hint", {}, "Fork: the requests up to the position on view come again, at the same steps, to a new engine with these settings."));
  if (!source.status.drivable) for (const b of el.restart.querySelectorAll("button")) b.disabled = true;
  drawFork();
}

/** The button says which step is forked from, and forks from that one. */
function drawFork() {
  if (el.fork) Object.assign(el.fork, { frame: state.view?.frame ?? 0, textContent: `fork from step ${state.view?.step ?? 0}` });
}

// ---------------------------------------------------------------- the prompt doctor

const RULES = "You answer in one sentence. You never guess. You are polite. You say so when you do not know.";
const clockPrompt = (time, question) => `<|im_start|>system\nIt is ${time}.\n${RULES}<|im_end|>\n<|im_start|>user\n${question}<|im_end|>\n<|im_start|>assistant\n`;
const doctor = { sides: {}, next: "a", ticket: 0, timer: null };

/** A click on a request's lane: its path; with the doctor open, the next of the two prompts. */
function pickRequest(id) {
  if (!miss.panel.hidden) return miss.pick(id);
  if (el.doctor.hidden) return walkRequest(id);
  fillPrompt(doctor.next, id);
}

function toggleDoctor() {
  if (source instanceof FileSource) return;
  if (!doctor.sides.a) buildDoctor();
  const ids = Object.values(source.requests).filter((r) => !r.sample && !r.before).map((r) => r.id).sort((a, b) => order(a) - order(b));
  for (const side of ["a", "b"]) {
    const { pick } = doctor.sides[side], now = pick.value;
    pick.replaceChildren(h("option", { value: "" }, "typed"), ...ids.map((id) => h("option", { value: id }, `${id} ${source.requests[id].label || source.requests[id].text}`.slice(0, 48))));
    pick.value = ids.includes(now) ? now : "";
  }
  togglePanel(el.doctor);
  if (!el.doctor.hidden && !doctor.sides.a.text.value) ids.length > 1 ? (fillPrompt("a", ids.at(-2)), fillPrompt("b", ids.at(-1))) : doctorExample();
}

function buildDoctor() {
  const side = (name) => {
    const pick = h("select", { "aria-label": `Prompt ${name}`, onchange: () => fillPrompt(name, pick.value) });
    const text = h("textarea", { spellcheck: false, rows: 6, maxLength: 24000, "aria-label": `Text of prompt ${name}`, placeholder: "Type a prompt, or pick a request", oninput: () => { pick.value = ""; consultSoon(); }, onfocus: () => (doctor.next = name) });
    doctor.sides[name] = { pick, text };
    return h("div.prompt", {}, h("label", {}, h("b", {}, name.toUpperCase()), pick), text);
  };
  el.doctor.replaceChildren(h("h2", {}, "Prompt doctor", h("small", {}, "What would B find in the cache after A? Pick two requests here or click them in the list below."), button("an example", "A clock in the system prompt", doctorExample), button("×", "Close (Esc)", () => togglePanel(el.doctor))),
    h("div.pair", {}, side("a"), side("b")), (doctor.result = h("div.result", { "aria-live": "polite" })));
}

function doctorExample() {
  for (const [name, time, question] of [["a", "09:14", "Who are you?"], ["b", "09:15", "What is the capital of France?"]]) Object.assign(doctor.sides[name].text, { value: clockPrompt(time, question) }), (doctor.sides[name].pick.value = "");
  consultSoon();
}

async function fillPrompt(name, id) {
  const { pick, text } = doctor.sides[name];
  doctor.next = name === "a" ? "b" : "a";
  if (!id) return text.focus();
  const found = await command("prompt", { request: id });
  if (!found) return;
  text.value = found.text;
  pick.value = id;
  consultSoon();
}

function consultSoon() {
  clearTimeout(doctor.timer);
  const ticket = ++doctor.ticket;
  doctor.timer = setTimeout(async () => {
    const { a, b } = doctor.sides;
    if (!a.text.value || !b.text.value) return doctor.result.replaceChildren();
    await doctor.asking;
    if (ticket !== doctor.ticket) return;
    try {
      const asked = source.command("doctor", { a: a.text.value, b: b.text.value, from_a: a.pick.value, from_b: b.pick.value });
      doctor.asking = asked.catch(() => {});
      const found = await asked;
      if (ticket === doctor.ticket) drawDiagnosis(found);
    } catch (error) { doctor.result.replaceChildren(h("p.bad", {}, error.message)); }
  }, 200);
}

/** B's tokens: found, equal in front but not found (in no whole page; the last one), lost behind the difference, its own. */
function partsOf(d) {
  const total = d.tokens[1], last = d.position === total ? Math.min(d.position - d.shared, 1) : 0;
  return [[d.shared, FOUND, "found", "found in the cache"],
    [d.position - d.shared - last, "#c3fae8", "equal, but in no whole page", "equal to A's, but they fill no whole page"],
    [last, "#868e96", "equal, but the last token", "equal to A's, but the last token is always computed"],
    [d.lost, "#ff8787", "lost: equal, but behind the difference", "equal to A's, but behind the difference: lost"],
    [Math.max(total - d.position - d.lost, 0), "#dee2e6", "B's own", "B's own (short runs that are equal are not looked for)"]].filter(([tokens]) => tokens);
}

function drawDiagnosis(d) {
  const line = (text) => text.replaceAll("\n", "¶"), sentence = (text) => text[0].toUpperCase() + text.slice(1) + ".";
  const parts = partsOf(d), better = d.better;
  doctor.result.replaceChildren(h("p.verdict", {}, sentence(d.verdict)),
    tokenBar(parts, d.say), tokenKeys(parts),
    ...(d.equal ? [] : parting("…" + d.before, ...["A", "B"].map((name, k) => [name, d.token[k], d.after[k] && d.after[k] + "…"]))),
    better ? h("div.cure", {}, h("p", {}, h("b", {}, `Saves ${plural(better.saved, "token")}: `), `move the ${better.parts} that differ behind what is common; ${d.outcome}.`), h("p", {}, "Move: ", ...better.moved.slice(0, 4).flatMap((text) => [h("code.moved", {}, line(text.trim()).slice(0, 120)), " "])),
      h("pre", {}, better.second)) : d.equal ? "" : h("p", {}, `Lost: ${d.loss}; no other order of its lines or sentences was found that would save any.`));
}

// ---------------------------------------------------------------- quiz

function toggleQuiz() {
  state.quizOn = !state.quizOn;
  closeQuiz();
  if (state.quizOn) { leavePresent(); stopPlaying(); notice("Quiz: go forward or press play. You are asked before the next victim, and before the next hit, is shown."); }
  else { standing.end(); if (state.view) drawPart("say"); }
  if (state.view) drawTransport();
  if (state.view) drawEvents();
  drawStatus();
}

function closeQuiz() { state.quiz = null; if (el.ask) el.ask.hidden = true; }

function askQuiz(quiz, target) {
  state.quiz = { ...quiz, target };
  const input = h("input", { type: "number", min: 0, max: quiz.of, "aria-label": "Tokens", onkeydown: (e) => e.key === "Enter" && typed() });
  const typed = () => input.value !== "" && answerQuiz(Number(input.value)); // an empty box is no 0
  el.ask.replaceChildren(
    ...(quiz.ask === "victim"
      ? [h("b", {}, `Room is needed, and the policy is ${quiz.policy}. Which leaf goes? `), "Click it in the tree."]
      : [h("b", {}, `${quiz.request} (${quiz.label || quiz.text}) is admitted: how many of its ${quiz.of} tokens does the tree match? `), input, button("answer", "", typed, ".go-primary")]),
    " ", button("tell me", "No answer, no point", () => answerQuiz(null), ".link"), h("span.score", {}, `${state.score[0]} of ${state.score[1]} right`));
  el.ask.hidden = false;
  if (quiz.ask === "hit") input.focus();
}

async function answerQuiz(guess) {
  const { answer: right, ask, reason, target, request } = state.quiz;
  if (guess !== null) { state.score[1]++; if (guess === right) state.score[0]++; }
  closeQuiz();
  standing.end();
  await show(state.g, target);
  const truth = ask === "victim" ? `n${right}: ${reason}` : `${request} matched ${right}`;
  const verdict = guess === null ? "" : guess === right ? "Right! " : ask === "victim" ? `Not n${guess}. ` : `Not ${guess}. `;
  el.sayText.replaceChildren(h("b", {}, verdict), ...linked(truth));
  el.say.dataset.kind = guess === right ? "new" : "evict";
  el.sayMore.replaceChildren(`${state.score[0]} of ${state.score[1]} right`);
}

// ---------------------------------------------------------------- keys, and the start

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target.matches("input:not([type=range]):not([type=checkbox]), textarea, select")) { if (event.key === "Escape") event.target.blur(); return; }
  if (event.key === " " && event.target.matches("button")) return;
  const keys = {
    " ": togglePlay, ArrowLeft: () => step(-1), ArrowRight: () => step(1), Home: () => seek(0), End: toPresent,
    s: () => jumpTo("split", 1), S: () => jumpTo("split", -1), e: () => jumpTo("evict", 1), E: () => jumpTo("evict", -1), r: () => jumpTo("retract", 1), R: () => jumpTo("retract", -1),
    ...(source.meta.fleet ? { g: () => jumpTo("gap", 1), G: () => jumpTo("gap", -1), a: () => pickRank(null), r: () => {}, R: () => {} } : { q: toggleQuiz, d: toggleDoctor }),
    1: () => setGranularity("event"), 2: () => setGranularity("step"), 3: () => setGranularity("scene"), p: () => document.body.classList.toggle("projector"),
    "+": () => zoom(el.tree, 1.25), "-": () => zoom(el.tree, 0.8), 0: () => fit(el.tree), Escape: () => { for (const panel of [el.why, el.restart, el.help, el.doctor, miss.panel]) panel.hidden = true; brush(null); },
    w: miss.toggle,
  };
  if (!(event.key in keys)) return;
  event.preventDefault();
  keys[event.key]();
}

/** The position that the address names, or null. */
function fromHash() {
  const found = /^#(event|step|scene)=(-?\d+)$/.exec(location.hash);
  return found && source.granularities().includes(found[1]) ? [found[1], Math.max(Number(found[2]), 0)] : null;
}

const followOn = follower(state, () => source.count(state.to.g) - 1, (i) => show(state.to.g, i));
source.onchange((what) => {
  if (what === "run") {
    stopPlaying();
    closeQuiz();
    const again = state.run !== "", other = again && state.run.split(".")[1] !== source.run.split(".")[1]; // server
    if (other) state.rank = null;
    for (const { pick } of Object.values(doctor.sides)) pick.length = Math.min(pick.length, 1); // its requests are gone
    miss.forget();
    Object.assign(state, { run: source.run ?? "file", i: 0, view: null, opened: [], follow: !state.quizOn, noticed: "" });
    state.wanted = again || address.followed() ? null : fromHash() ?? (source instanceof FileSource ? ["step", 0] : null);
    if (!source.granularities().includes(state.to.g)) state.to.g = "step";
    drawHeader();
    show(state.to.g, 0, { hash: again });
  } else if (what === "frames") {
    if (state.wanted && state.wanted[1] < source.count(state.wanted[0])) {
      const [g, i] = state.wanted;
      state.wanted = null;
      state.follow = i === source.count(g) - 1;
      show(g, i);
    } else if (state.follow && !state.wanted && !followOn.pending) {
      followOn();
    } else if (state.view) drawTransport();
    if (el.prompt?.value) whatIf();
    drawStatus();
  } else if (what === "status") {
    if (state.wanted && source.frames.length) { // all that there is has come: the address asks for more
      const [g] = state.wanted;
      state.wanted = null;
      show(g, source.count(g) - 1);
    }
    drawStatus();
    if (state.view) drawTransport();
  }
});

build();
document.addEventListener("keydown", onKey);
el.pool.addEventListener("pointerover", overPool);
el.host.addEventListener("pointerover", overHost);
for (const map of [el.pool, el.host]) map.addEventListener("pointerleave", () => { brush(null); tip(null); });
el.tree.addEventListener("pointerleave", () => tip(null));
window.addEventListener("hashchange", () => {
  if (!location.hash) return;
  standing.end();
  if (address.followed()) return toPresent(); // back to where the page was
  const to = fromHash() ?? [state.to.g, state.to.i]; // what is no position is answered with the one on view
  if (to[1] < source.count(to[0]) - 1) leavePresent();
  show(...to); // writes the address anew: it may have asked for more than there is
});
const resized = new ResizeObserver(() => { measure(); if (state.view) { sizePool(el.pool); sizePool(el.host); for (const name of ["shares", "growth", "usage", "hits"]) if (name in partsNow()) drawPart(name); } });
for (const host of [el.pool, el.host, el.usage, el.hits, el.tree, ...theirs.charts]) resized.observe(host);
source.start();
