// One tree picture that moves: shared by the notebook widget, the live page and exported files.
//
// `morph(host, svg, ms)` replaces the Graphviz SVG in `host` by another one and lets every node glide
// from where it was to where it is, by its id (n7; its edge e7). What is new fades in; what has gone
// leaves a red ghost that fades. A camera keeps the picture readable: it never enlarges a small tree
// beyond its natural size, and of one too large to read it shows the part where something happens
// (dragging moves it, Ctrl and the wheel zoom, a double click gives it back or shows the whole).
//
// Knows nothing of engines or recordings, fetches nothing, and sets no text from outside as HTML.

const NATURAL = 1.3; // pixels per point at most: cards are drawn for about this size
const READABLE = 1; // and at least (a card's smallest text is 9 points), before only a part is shown
const SMOOTH_UP_TO = 150; // nodes; more are exchanged without animation
const HOT = ".new, .hit, .evicted, .split, .grown, .demoted, .loaded, .again, .stored, .removed, .focus";
const EASING = "cubic-bezier(.4, 0, .2, 1)";

const still = () => matchMedia("(prefers-reduced-motion: reduce)").matches;

/** SVG text as an element of this document. Parsed as XML: markup in it cannot run. */
function parse(text) {
  const svg = new DOMParser().parseFromString(text.slice(text.indexOf("<svg")), "image/svg+xml").documentElement;
  if (svg.nodeName !== "svg") throw new Error("this is no SVG: " + text.slice(0, 80));
  for (const odd of svg.querySelectorAll("script, foreignObject, a")) odd.remove();
  svg.removeAttribute("width");
  svg.removeAttribute("height");
  return document.importNode(svg, true);
}

/** Groups of a class by id. */
function groups(svg, kind) {
  return new Map([...svg.querySelectorAll("g." + kind)].map((group) => [group.id, group]));
}

/** How far the graph's own coordinates are moved inside the SVG. */
function offset(svg) {
  const found = /translate\(([-\d.]+)[ ,]+([-\d.]+)\)/.exec(svg.querySelector("g.graph").getAttribute("transform"));
  return [Number(found[1]), Number(found[2])];
}

/** A node's box in SVG coordinates, read from its outline: asks the browser for no layout. */
function box(group, [ox, oy]) {
  const shape = group.querySelector("path, polygon, ellipse");
  if (shape.nodeName === "ellipse") {
    const [cx, cy, rx, ry] = ["cx", "cy", "rx", "ry"].map((name) => Number(shape.getAttribute(name)));
    return { x0: cx - rx + ox, y0: cy - ry + oy, x1: cx + rx + ox, y1: cy + ry + oy };
  }
  const numbers = (shape.getAttribute("d") || shape.getAttribute("points")).match(/-?[\d.]+/g).map(Number);
  const xs = numbers.filter((_, i) => i % 2 === 0), ys = numbers.filter((_, i) => i % 2 === 1);
  return { x0: Math.min(...xs) + ox, y0: Math.min(...ys) + oy, x1: Math.max(...xs) + ox, y1: Math.max(...ys) + oy };
}

function boxes(svg) {
  const shift = offset(svg);
  return new Map([...groups(svg, "node")].map(([id, group]) => [id, box(group, shift)]));
}

/** Puts `text` into `host`. Returns what changed: {enter, exit, move} (ids of nodes). */
export function morph(host, text, ms = 350) {
  const before = host.querySelector("svg.tree");
  if (before && host.treeText === text) return { enter: [], exit: [], move: [] };
  const next = parse(text);
  next.classList.add("tree");
  next.setAttribute("preserveAspectRatio", "xMidYMid meet");
  const from = before ? host.treeBoxes : new Map(), to = boxes(next);
  const calm = !before || ms <= 0 || still() || to.size > SMOOTH_UP_TO || from.size > SMOOTH_UP_TO;
  const change = compare(from, to);
  if (before && !calm) animate(before, next, from, to, change, ms);
  host.treeText = text;
  host.treeBoxes = to;
  const camera = cameraOf(host);
  host.querySelector("svg.tree")?.remove();
  host.append(next);
  camera.aim(calm ? 0 : ms);
  relight(host);
  return change;
}

function compare(from, to) {
  const change = { enter: [], exit: [], move: [] };
  for (const id of from.keys()) if (!to.has(id)) change.exit.push(id);
  for (const [id, b] of to) {
    const a = from.get(id);
    if (!a) change.enter.push(id);
    else if (Math.abs(a.x0 - b.x0) + Math.abs(a.y0 - b.y0) > 0.5) change.move.push(id);
  }
  return change;
}

function animate(before, next, from, to, change, ms) {
  const timing = { duration: ms, easing: EASING, fill: "backwards" };
  const olds = groups(before, "node"), news = groups(next, "node");
  const [ox0, oy0] = offset(before), [ox1, oy1] = offset(next);
  const graph = next.querySelector("g.graph");
  for (const id of change.exit) {
    const ghost = olds.get(id).cloneNode(true);
    ghost.removeAttribute("id");
    ghost.setAttribute("class", "ghost");
    ghost.setAttribute("transform", `translate(${ox0 - ox1},${oy0 - oy1})`);
    graph.append(ghost);
    ghost.animate([{ opacity: 1 }, { opacity: 0.8, offset: 0.4 }, { opacity: 0 }], timing).onfinish = () => ghost.remove();
  }
  for (const id of change.enter)
    news.get(id).animate([{ opacity: 0, transform: "translateX(-16px)" }, { opacity: 1, transform: "none" }], timing);
  for (const id of change.move) {
    const a = from.get(id), b = to.get(id);
    const dx = (a.x0 + a.x1 - b.x0 - b.x1) / 2, dy = (a.y0 + a.y1 - b.y0 - b.y1) / 2;
    news.get(id).animate([{ transform: `translate(${dx}px,${dy}px)` }, { transform: "none" }], timing);
  }
  const oldEdges = groups(before, "edge");
  for (const [id, edge] of groups(next, "edge")) {
    const was = oldEdges.get(id)?.querySelector("path")?.getAttribute("d");
    if (was !== edge.querySelector("path").getAttribute("d"))
      edge.animate([{ opacity: 0 }, { opacity: 0, offset: 0.5 }, { opacity: 1 }], timing);
  }
}

// ---------------------------------------------------------------- the camera

function cameraOf(host) {
  return (host.treeCamera ??= makeCamera(host));
}

/** Gives the camera back after it was moved by hand; else shows the whole tree, however small. */
export function fit(host) {
  const camera = cameraOf(host);
  camera.byHand = camera.byHand ? null : camera.whole();
  camera.aim(250);
}

/** Lets the camera look again, where classes of nodes have changed since the picture was put there. */
export function look(host) {
  if (host.querySelector("svg.tree")) cameraOf(host).aim(0);
}

/** Makes the picture larger (factor > 1) or smaller. */
export function zoom(host, factor) {
  const camera = cameraOf(host);
  camera.zoom(factor, 0.5, 0.5);
}

function makeCamera(host) {
  const camera = { view: null, byHand: null, ticket: 0, size: null };
  // Measured once and at changes: asking after every exchange would make the browser lay out at once.
  const measure = () => (camera.size = [host.clientWidth || 800, host.clientHeight || 400]);
  const size = () => camera.size ?? measure();

  const wanted = () => {
    const svg = host.querySelector("svg.tree");
    const all = svg.dataset.whole ??= svg.getAttribute("viewBox");
    const [, , w, h] = all.split(/[ ,]+/).map(Number);
    const [width, height] = size();
    const scale = Math.min(NATURAL, Math.max(READABLE, Math.min(width / w, height / h)));
    const vw = width / scale, vh = height / scale;
    const action = boxOfAction(svg, host.treeBoxes, vw, vh);
    // Of what does not fit: the beginning, moved on as little as shows where something happens.
    const place = (extent, shown, low, high) => {
      if (extent <= shown) return (extent - shown) / 2;
      return Math.min(Math.max(high + 14 - shown, 0), Math.max(low - 14, 0), extent - shown);
    };
    return [place(w, vw, action.x0, action.x1), place(h, vh, action.y0, action.y1), vw, vh];
  };

  const show = (view) => {
    camera.view = view;
    const svg = host.querySelector("svg.tree");
    if (!svg) return;
    svg.setAttribute("viewBox", view.map((n) => n.toFixed(2)).join(" "));
    const [, , w, h] = (svg.dataset.whole ?? svg.getAttribute("viewBox")).split(/[ ,]+/).map(Number);
    const [x, y, vw, vh] = view; // shadows at the edges behind which there is more
    const more = { left: x > 8, top: y > 8, right: x + vw < w - 8, bottom: y + vh < h - 8 };
    for (const [edge, is] of Object.entries(more)) host.classList.toggle("more-" + edge, is);
  };

  /** All of it; null where that is what the camera shows anyway. */
  camera.whole = () => {
    const svg = host.querySelector("svg.tree");
    if (!svg) return null;
    const [, , w, h] = (svg.dataset.whole ?? svg.getAttribute("viewBox")).split(/[ ,]+/).map(Number), [width, height] = size();
    const scale = Math.min(width / w, height / h), vw = width / scale, vh = height / scale;
    return scale < READABLE ? [(w - vw) / 2, (h - vh) / 2, vw, vh] : null;
  };

  camera.aim = (ms) => {
    const ticket = ++camera.ticket, from = camera.view, to = camera.byHand ?? wanted();
    if (!from || ms <= 0) return show(to);
    show(from);
    const start = performance.now();
    const frame = (now) => {
      if (ticket !== camera.ticket) return;
      const t = Math.min(1, Math.max(0, (now - start) / ms)), eased = t * t * (3 - 2 * t);
      show(from.map((value, i) => value + (to[i] - value) * eased));
      if (t < 1) requestAnimationFrame(frame);
    };
    requestAnimationFrame(frame);
    setTimeout(() => ticket === camera.ticket && show(to), ms + 80); // a hidden tab gets no frames
  };

  camera.zoom = (factor, fx, fy) => {
    const [x, y, w, h] = camera.byHand ?? camera.view, [width] = size();
    const scale = Math.min(4, Math.max(0.05, (width / w) * factor)), k = width / scale / w;
    camera.byHand = [x + w * (1 - k) * fx, y + h * (1 - k) * fy, w * k, h * k];
    camera.ticket++;
    show(camera.byHand);
  };

  // The plain wheel scrolls what the tree stands in: a picture must not catch the reader.
  host.addEventListener("wheel", (event) => {
    if (!event.ctrlKey || !host.querySelector("svg.tree")) return;
    event.preventDefault();
    const edge = host.getBoundingClientRect();
    camera.zoom(Math.exp(-event.deltaY / 400), (event.clientX - edge.x) / edge.width, (event.clientY - edge.y) / edge.height);
  }, { passive: false });
  let grip = null;
  host.addEventListener("pointerdown", (event) => {
    if (event.button === 0 && camera.view) grip = { x: event.clientX, y: event.clientY, view: camera.byHand ?? camera.view, moved: false };
  });
  host.addEventListener("pointermove", (event) => {
    if (!grip || !(event.buttons & 1)) return;
    const dx = event.clientX - grip.x, dy = event.clientY - grip.y;
    if (!grip.moved && Math.hypot(dx, dy) < 4) return;
    grip.moved = true;
    const [x, y, w, h] = grip.view, scale = w / size()[0];
    camera.byHand = [x - dx * scale, y - dy * scale, w, h];
    camera.ticket++;
    show(camera.byHand);
  });
  host.addEventListener("click", (event) => {
    if (grip?.moved) event.stopPropagation(); // that was a drag
    grip = null;
  }, true);
  host.addEventListener("dblclick", () => fit(host));
  if (typeof ResizeObserver !== "undefined")
    new ResizeObserver(() => { measure(); if (host.querySelector("svg.tree")) camera.aim(0); }).observe(host);
  return camera;
}

/** What is to be seen when not everything fits: the nodes to which something happens, else those in use. */
function boxOfAction(svg, all, vw, vh) {
  const found = (kinds) => [...groups(svg, "node")].filter(([, group]) => group.matches(kinds)).map(([id]) => all.get(id));
  const unlike = found(".unlike"), happens = unlike.length ? unlike : found(HOT), hot = happens.length ? happens : found(".locked");
  if (!hot.length) return { x0: 0, y0: 0, x1: 0, y1: 0 };
  const last = happens.length ? hot[hot.length - 1] : hot[0]; // too far apart to be seen together: one of them
  const around = (low, high, shown) => {
    const from = Math.min(...hot.map((b) => b[low])), to = Math.max(...hot.map((b) => b[high]));
    return to - from <= shown - 28 ? [from, to] : [last[low], last[high]];
  };
  const [x0, x1] = around("x0", "x1", vw), [y0, y1] = around("y0", "y1", vh);
  return { x0, y0, x1, y1 };
}

// ---------------------------------------------------------------- pointing at things

/** Lights nodes (ids such as "n7" or numbers) with the edges that lead to them, and dims the rest. */
export function highlight(host, ids) {
  host.treeLit = [...ids].map((id) => (typeof id === "number" ? "n" + id : id));
  relight(host);
}

function relight(host) {
  const svg = host.querySelector("svg.tree"), lit = new Set(host.treeLit ?? []);
  if (!svg) return;
  svg.classList.toggle("dimmed", lit.size > 0);
  for (const [id, group] of groups(svg, "node")) group.classList.toggle("lit", lit.has(id));
  for (const [id, group] of groups(svg, "edge")) group.classList.toggle("lit", lit.has("n" + id.slice(1)));
}

/** Lights a path node by node, from the root down. Returns a promise of its end. */
export async function walkPath(host, ids, ms = 260) {
  for (let i = 1; i <= ids.length; i++) {
    highlight(host, ids.slice(0, i));
    await new Promise((done) => setTimeout(done, still() ? 0 : ms));
  }
}

/** Calls back with ids of nodes ("n7", folded ones "f7"): over(id or null), click(id). */
export function listen(host, { over = () => {}, click = () => {} }) {
  const idOf = (event) => event.target.closest?.("g.node")?.id ?? null;
  let last = null;
  const tell = (id, event) => { if (id !== last) over((last = id), event); };
  host.addEventListener("pointerover", (event) => tell(idOf(event), event));
  host.addEventListener("pointerleave", (event) => tell(null, event));
  host.addEventListener("click", (event) => { const id = idOf(event); if (id) click(id, event); });
}

/** Gives every card a bar in its owner's colour, colorOf("n7"): the one its pages have in a pool map. */
export function decorate(host, colorOf) {
  const svg = host.querySelector("svg.tree");
  if (!svg) return;
  const [ox, oy] = offset(svg);
  for (const [id, group] of groups(svg, "node")) {
    if (!/^n[1-9]/.test(id) || group.querySelector(".owner")) continue;
    const b = host.treeBoxes.get(id), bar = document.createElementNS("http://www.w3.org/2000/svg", "rect");
    const attributes = { class: "owner", x: b.x0 - ox - 6, y: b.y0 - oy + 5, width: 4, height: Math.max(b.y1 - b.y0 - 10, 2), rx: 2, fill: colorOf(id) };
    for (const [name, value] of Object.entries(attributes)) bar.setAttribute(name, value);
    group.append(bar);
  }
}

// ---------------------------------------------------------------- as a notebook widget

/** anywidget. Traits: svg, ms; lit (ids to light); hovered and picked (set from here), height (CSS). */
function render({ model, el }) {
  const host = document.createElement("div");
  host.className = "mr-tree";
  if (model.get("height")) host.style.height = model.get("height");
  el.append(host);
  const tell = (name, value) => { model.set(name, value); model.save_changes(); };
  const draw = () => {
    const start = performance.now();
    morph(host, model.get("svg"), model.get("ms") ?? 350);
    host.dataset.cost = (performance.now() - start).toFixed(2);
  };
  listen(host, { over: (id) => tell("hovered", id ?? ""), click: (id) => tell("picked", id) });
  model.on("change:svg", draw);
  model.on("change:lit", () => highlight(host, model.get("lit") ?? []));
  draw();
  highlight(host, model.get("lit") ?? []);
}

export default { render };
