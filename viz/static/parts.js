// What the live page and the comparison of two engines have in common: small helpers, the data, the pool.
//
// Data comes from a source: `LiveSource` (a WebSocket and fetch, same origin only, all addresses
// relative to the page's) or `FileSource` (everything inside the file). All text from outside goes through
// textContent; nothing is fetched from anywhere else.

/** h("div.card#x", {onclick, title, ...}, children...): an element; strings become text. */
export function h(spec, props = {}, ...children) {
  const [, tag, rest] = /^(\w+)(.*)$/.exec(spec);
  const element = document.createElement(tag);
  for (const part of rest.match(/[.#][\w-]+/g) ?? []) part[0] === "#" ? (element.id = part.slice(1)) : element.classList.add(part.slice(1));
  for (const [name, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(element.style, value);
    else if (name in element && name !== "list") element[name] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export const SVG = "http://www.w3.org/2000/svg";
export function s(tag, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

export const ICONS = {
  first: "M6 5h2v14H6zM20 5v14L9 12z", back: "M17 5v14L6 12z", play: "M8 5v14l11-7z",
  pause: "M7 5h4v14H7zM14 5h4v14h-4z", forward: "M8 5v14l11-7z", next: "M7 5v14l9-7zM17 5h2v14h-2z", last: "M16 5h2v14h-2zM4 5v14l11-7z",
};
export const icon = (name) => s("svg", { viewBox: "0 0 24 24", class: "icon", "aria-hidden": "true" }, s("path", { d: ICONS[name] }));
export const clamp = (x, low, high) => Math.min(Math.max(x, low), high);
export const percent = (part, whole) => (whole ? Math.round((100 * part) / whole) : 0) + "%";
export const plural = (n, word) => `${n} ${word}${n === 1 ? "" : "s"}`;

/** A stable soft colour of a node or request, the same on its card, its pages and its lane. */
export function tint(owner, light = 78) {
  const number = Number(owner.replace(/\D+/g, "")) || 0;
  return `hsl(${(number * 137.508 + 205) % 360} ${owner[0] === "R" ? 45 : 70}% ${light}%)`;
}

// ---------------------------------------------------------------- where the data comes from

export class Source {
  constructor() {
    this.frames = [];
    this.requests = {};
    this.meta = {};
    this.status = { playing: false, idle: true, drivable: false, speed: 3, error: "", notices: [] };
    this.offsets = [0];
    this.listeners = [];
  }
  onchange(listener) { this.listeners.push(listener); }
  tell(what) { for (const listener of this.listeners) listener(what); }
  addFrames(frames) {
    for (const frame of frames) {
      this.frames.push(frame);
      this.offsets.push(this.offsets.at(-1) + frame.e);
    }
  }
  count(g) {
    if (g === "step") return this.frames.length + 1;
    return (g === "event" ? this.offsets.at(-1) : this.frames.at(-1)?.c ?? 0) + 1;
  }
  /** The frame in which a position lies; -1 for the start. */
  frameAt(g, i) {
    if (i <= 0) return -1;
    if (g === "step") return Math.min(i, this.frames.length) - 1;
    const key = g === "event" ? (f) => this.offsets[f + 1] >= i : (f) => this.frames[f].c > i;
    let low = 0, high = this.frames.length;
    while (low < high) { const mid = (low + high) >> 1; key(mid) ? (high = mid) : (low = mid + 1); }
    return g === "event" ? low : low - 1;
  }
  positionOf(g, frame) {
    if (frame < 0) return 0;
    return g === "step" ? frame + 1 : g === "event" ? this.offsets[frame + 1] : this.frames[frame].c;
  }
  /** The next frame (direction -1: the last one before) that has a mark of a kind, or null. */
  mark(kind, frame, direction) {
    for (let f = frame + direction; f >= 0 && f < this.frames.length; f += direction)
      if (this.frames[f].m.includes(kind)) return f;
    return null;
  }
  granularities() { return ["event", "step", "scene"]; }
  /** Whether an engine plays; not one that is broken, or out of reach. */
  get plays() { return Boolean(this.status.playing && !this.status.error && !this.lost); }
  /** Whether no step is to come by itself. */
  get done() { return Boolean(this.status.drivable && this.status.idle && !this.status.serving && !this.lost); }
}

/** What the server says of a learner's file that does not come back: which it is, and where in it. */
export function slowBanner(source) {
  const place = h("section.banner.slow", { hidden: true, role: "status" });
  source.onchange(() => {
    const { slow = "" } = source.status;
    place.hidden = !slow;
    if (place.textContent !== slow) place.textContent = slow;
  });
  return place;
}

const NOTICE = 6000, RETRY = 1000, SILENT = 30000; // milliseconds; the server says something every ten seconds

export class LiveSource extends Source {
  constructor() {
    super();
    this.run = "";
    this.views = new Map();
    this.lost = false;
  }
  /** Opens the stream of news, and again whenever it ends; it goes on behind the last that came. */
  start() {
    const address = new URL("stream", document.baseURI);
    address.protocol = address.protocol.replace("http", "ws");
    if (this.last) address.searchParams.set("since", this.last);
    const socket = new WebSocket(address);
    let silence;
    const heard = () => { clearTimeout(silence); silence = setTimeout(() => socket.close(), SILENT); };
    heard();
    socket.onmessage = (message) => {
      heard();
      const { event, id, data } = JSON.parse(message.data);
      this.last = id;
      if (this.lost) { this.lost = false; this.tell("status"); }
      if (event === "run") this.begin(data);
      else if (event === "frames") this.grow(data);
      else if (event === "status") { this.status = data; this.tell("status"); }
    };
    socket.onclose = () => {
      clearTimeout(silence);
      this.lost = true;
      this.tell("status");
      setTimeout(() => this.start(), RETRY);
    };
  }
  begin(hello) {
    if (hello.kind !== (this.kind ??= hello.kind)) return location.reload(); // another server is here now, with a page of its own
    Object.assign(this, { run: hello.run, meta: hello.meta, choices: hello.choices, settings: hello.settings, status: hello.status });
    Object.assign(this, { frames: [], requests: {}, offsets: [0] });
    this.views.clear();
    this.tell("run");
  }
  grow(news) {
    if (news.run !== this.run) return;
    this.addFrames(news.frames.slice(Math.max(this.frames.length - news.from, 0)));
    Object.assign(this.requests, news.requests);
    this.tell("frames");
  }
  view(g, i, opened = [], height = 400, rank = null) {
    const growing = g === "scene" && i === this.count("scene") - 1;
    const key = `${g} ${i} ${opened} ${height} ${rank} ${growing ? this.frames.length : ""}`;
    if (!this.views.has(key)) {
      const query = new URLSearchParams({ run: this.run, g, i, open: opened.join(","), height, rank: rank ?? "" });
      const promise = fetch("view?" + query).catch(silent).then(answer);
      const forget = () => this.views.delete(key);
      promise.then((view) => view.failed && forget(), forget); // what failed is asked for again
      this.views.set(key, promise);
      if (this.views.size > 300) this.views.delete(this.views.keys().next().value);
    }
    return this.views.get(key);
  }
  command(name, body = {}) {
    return post("do/" + name, body);
  }
  /** What a prompt would find, and why not more. */
  why(body) { return post("why", { run: this.run, ...body }); }
}

const silent = () => { throw new Error("the server does not answer"); };
const post = (where, body) => fetch(where, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) }).catch(silent).then(answer);

export async function answer(response) {
  const data = await response.json();
  if (!response.ok) throw new Error(data.error ?? response.statusText);
  return data;
}

export class FileSource extends Source {
  async start() {
    const text = document.getElementById("recording").textContent;
    const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    const data = JSON.parse(await new Response(stream).text());
    Object.assign(this, { meta: data.meta, requests: data.requests, stored: data.views, shared: data.shared });
    this.alone = data.alone ?? {}; // of a stream: the views of each rank alone
    this.ranks = Object.keys(this.alone).map(Number);
    this.known = Object.fromEntries(Object.entries(data.views).map(([g, views]) => [g, Object.keys(views).map(Number)]));
    this.addFrames(data.frames);
    this.tell("run");
    this.tell("frames");
    this.tell("status");
  }
  granularities() { return Object.keys(this.stored ?? { step: 0 }); }
  async view(g, i, opened, height, rank = null) {
    if (rank !== null && !this.alone[rank][g]) // by event a rank alone is shown as its step ends
      return { ...(await this.view("step", this.positionOf("step", this.frameAt(g, i)), opened, height, rank)), g, i };
    const known = this.known[g];
    let index = i;
    if (!(i in this.stored[g])) index = known.filter((k) => k <= i).at(-1) ?? known[0]; // thinned out
    const packed = (rank === null ? this.stored : this.alone[rank])[g][index];
    return packed.sides ? { ...packed, i, sides: packed.sides.map((side) => this.unpacked(side)) } : { ...this.unpacked(packed), i };
  }
  unpacked(view) {
    const nodes = Object.fromEntries(Object.entries(view.nodes).map(([id, n]) => [id, { ...n, body: this.shared[n.body] }]));
    return { ...view, svg: this.shared[view.svg], nodes };
  }
  command() { return Promise.reject(new Error("this is a file: there is no engine to drive")); }
}

/** Keeps a page at the present: `newest` is its last position, `show` draws one. The next one is asked for when the
 *  one before is there, or none would ever be shown of those that come faster than they can be drawn. */
export function follower(state, newest, show) {
  let later = null;
  const follow = () => {
    follow.pending = true;
    clearTimeout(later);
    requestAnimationFrame(async () => {
      const { run } = state, i = newest();
      let shown = null;
      try { if (state.follow) shown = await show(i); } finally { follow.pending = false; }
      if (!state.follow || state.wanted != null) return;
      if (state.run !== run || newest() > i) follow();
      else if (shown === false) later = setTimeout(follow, RETRY); // nothing newer may come
    });
  };
  follow.pending = false;
  return follow;
}

/** The page's position as its address (history.state.follow: the page followed, and the address may be behind).
 *  `moving`: whether it changes by itself; then it is written no oftener than browsers allow. */
export function addressing(source, state, moving) {
  let now = "", later = null;
  return {
    write: (hash) => {
      now = hash;
      if (!moving()) { clearTimeout(later); later = null; } // what is due later may be of a page that followed
      later ??= setTimeout(() => { later = null; history.replaceState({ follow: state.follow }, "", now); }, moving() ? 500 : 0);
    },
    /** Whether it means the present, of a page that follows again. */
    followed: () => Boolean(history.state?.follow) && source instanceof LiveSource,
  };
}

/** A notice stands for a while, also where the page goes on by itself; what somebody does ends it.
 *  `el`: the page's parts. `draw` draws the sentence that it stands in the place of. A notice that `holds()` only
 *  for a time ends with that. */
export function noticing(el, draw) {
  let until = 0, later = null, still = () => true;
  return {
    tell: (text, holds = () => true) => {
      if (!holds()) return;
      still = holds;
      until = performance.now() + NOTICE;
      clearTimeout(later);
      later = setTimeout(draw, NOTICE + 20);
      el.say.dataset.kind = "notice";
      el.sayText.replaceChildren(text);
      el.sayMore.replaceChildren();
      el.live.textContent = text;
    },
    end: () => { until = 0; clearTimeout(later); },
    /** Whether it still stands; then the sentence is drawn afterwards. */
    stands: () => {
      if (!still()) until = 0;
      return performance.now() < until;
    },
  };
}

/** The news of what was asked for; on a busy machine it may take its time. */
export function until(condition, ms = 20000) {
  const start = performance.now();
  return new Promise((done) => {
    const look = () => (condition() || performance.now() - start > ms ? done() : setTimeout(look, 5));
    look();
  });
}

// ---------------------------------------------------------------- pieces of pages

/** What can be looked at of what has stopped with an error: nothing new, once its program has ended, too. */
export const remains = (lost, what = "it did") => (lost ? "Its program has ended, too: what is not on view is gone" : `What ${what} until then can still be looked at`);

const SPEEDS = [[0.5, "½ /s"], [1, "1 /s"], [3, "3 /s"], [8, "8 /s"], [0, "max"]]; // steps per second; 0: as fast as it goes

/** The menu of speeds. */
export const speedMenu = (onchange) => h("select", { title: "Steps per second", "aria-label": "Speed", onchange }, ...SPEEDS.map(([value, text]) => h("option", { value, selected: value === 3 }, text)));

/** Chooses the engine's speed in the menu; one that the menu does not have gets an entry, as long as it is so. */
export function showSpeed(menu, speed) {
  const value = String(speed), has = () => [...menu.options].some((option) => option.value === value);
  for (const option of menu.querySelectorAll(".other")) if (option.value !== value) option.remove();
  if (!has()) [...menu.options].find((option) => Number(option.value) > speed || option.value === "0").before(h("option.other", { value }, `${Number(speed.toPrecision(4))} /s`));
  menu.value = value;
}

/** Draws one part of a page in its place; one that cannot be drawn (`reason`: the server could not) says so
 *  there, and the others are drawn all the same. */
export function part(place, name, draw, reason = "") {
  place.querySelector(":scope > .undrawn")?.remove();
  try {
    if (!reason) return draw();
  } catch (error) {
    console.error(error);
    reason = error.message;
  }
  place.replaceChildren(undrawn(name, reason));
  return null;
}

export const undrawn = (name, reason) => h("p.undrawn", { title: reason }, `${name} cannot be drawn: ${reason}`);

export const button = (text, title, onclick, kind = "") => h("button" + kind, { type: "button", title, onclick }, text);
export const key = (text, color) => h("span.key", {}, h("i", { style: { background: color } }), text);
export const MARK_COLORS = { split: "#e8890c", evict: "#e03131", retract: "#9c36b5", gap: "#1864ab" };
export const order = (id) => { const [a, b = 0] = id.slice(1).split(".").map(Number); return a * 1000 + b; };

const MOST_CELLS = 4096;

/** The cells of a map, made anew if there must be more or less, each with the page that it shows. */
function cellsOf(host, runs) {
  const pages = runs.flatMap(([page, length]) => Array(length).fill(page));
  const per = Math.max(1, Math.ceil(pages.length / MOST_CELLS)), cells = Math.ceil(pages.length / per);
  if (host.childElementCount !== cells) {
    host.replaceChildren(...Array.from({ length: cells }, (_, c) => {
      const cell = document.createElement("i");
      cell.dataset.page = c * per + 1;
      return cell;
    }));
    sizePool(host);
  }
  return [...host.children].map((cell, c) => [cell, pages[c * per]]);
}

/** Draws a pool map, [[owner, pages], ...], into `host`: a cell per page (of a large pool: per few). */
export function fillPool(host, pool) {
  for (const [cell, owner] of cellsOf(host, pool)) {
    if (cell.dataset.owner === owner) continue;
    cell.dataset.owner = owner;
    cell.className = owner === "" ? "" : { n: "node", R: "private", x: "freed" }[owner[0]];
    cell.style.setProperty("--c", owner === "" || owner[0] === "x" ? "" : tint(owner));
  }
}

/** Draws host memory, [[[node, tier], pages], ...], into `host`: what is a copy, what lies only there. */
export function fillHost(host, runs) {
  for (const [cell, [node, tier]] of cellsOf(host, runs)) {
    const look = node + tier;
    if (cell.dataset.look === look) continue;
    cell.dataset.look = look;
    cell.dataset.owner = node ? "n" + node : "";
    cell.className = node ? "copy " + tier : "";
    cell.style.setProperty("--c", node ? tint("n" + node) : "");
  }
}

export const TIER_WORDS = { device: "on the device", copying: "on the device, being copied to the host", both: "on the device and on the host", loading: "coming back from the host", host: "on the host only" };
export const SUM_WORDS = { copied: "copied", demoted: "demoted", loaded: "loaded back", again: "computed again", host_evicted: "gone from the host" };

/** As many columns as make the cells as large as the space allows. */
export function sizePool(host) {
  const { clientWidth: w, clientHeight: height } = host, cells = host.childElementCount;
  let best = 8;
  for (let columns = 8; columns <= 160; columns++) {
    const size = (w - 2 * (columns - 1)) / columns;
    best = columns;
    if (Math.ceil(cells / columns) * (size + 2) <= height + 2) break;
  }
  host.style.setProperty("--columns", best);
}
