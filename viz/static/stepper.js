// One output of the notebook stepper: a tree (tree.js), the KV pool, requests and events around it, and the
// controls. Everything that is pressed goes to Python as {do, value}; what comes back is drawn.
//
// Draws the dictionary that viz/notebook/panels.py makes, and lights what belongs together: point at a node, a
// page, a request or an event, and its kin light up in all four. A click keeps it lit; a click on a
// request walks its path through the tree. All text is set as text, never as HTML; nothing is fetched.

import * as tree from "./tree.js";

const NS = "http://www.w3.org/2000/svg";
const FREE = "#eef0f3", PRIVATE = "#343a40";
const PHASES = ["waiting", "prefill", "decode", "paused", "retracted"];
const KEYS = { ArrowRight: "forward", ArrowLeft: "back", Home: "first", End: "last" };
const PLAY_MS = 900;

/** An element with class, text and children; text is never read as HTML. */
function make(name, className = "", text = "", children = []) {
  const element = document.createElement(name);
  if (className) element.className = className;
  if (text) element.textContent = text;
  element.append(...children);
  return element;
}

function shape(name, attributes) {
  const element = document.createElementNS(NS, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  return element;
}

function card(title, className, body, ...aside) {
  const head = make("h3", "", "", [make("span", "", title), ...aside]);
  return make("section", "mr-card " + className, "", [head, body]);
}

// ---------------------------------------------------------------- kin: what belongs together

const nothing = () => ({ nodes: new Set(), pages: new Set(), host: new Set(), requests: new Set(), events: new Set() });

function addRanges(set, ranges) {
  for (const [first, last] of ranges) for (let page = first; page <= last; page++) set.add(page);
}

function ofNodes(data, nodes) {
  const kin = nothing();
  nodes.forEach((node) => kin.nodes.add(node));
  data.host?.cells.forEach((node, i) => kin.nodes.has(node) && kin.host.add(i + 1));
  data.pool.cells.forEach((owner, i) => owner > 0 && kin.nodes.has(owner) && kin.pages.add(i + 1));
  data.requests.forEach((r) => r.path.some((node) => kin.nodes.has(node)) && kin.requests.add(r.id));
  data.events.forEach((e, i) => e.nodes.some((node) => kin.nodes.has(node)) && kin.events.add(i));
  return kin;
}

function ofRequest(data, request) {
  const kin = nothing();
  kin.requests.add(request.id);
  request.path.forEach((node) => kin.nodes.add(node));
  if (request.pages.length) addRanges(kin.pages, request.pages);
  else data.pool.cells.forEach((owner, i) => owner > 0 && kin.nodes.has(owner) && kin.pages.add(i + 1));
  data.events.forEach((e, i) => e.requests.includes(request.id) && kin.events.add(i));
  return kin;
}

function ofEvent(data, index) {
  const event = data.events[index], kin = nothing();
  kin.events.add(index);
  event.nodes.forEach((node) => kin.nodes.add(node));
  event.requests.forEach((id) => kin.requests.add(id));
  if (event.host) addRanges(kin.host, event.host);
  else data.host?.cells.forEach((node, i) => kin.nodes.has(node) && kin.host.add(i + 1));
  addRanges(kin.pages, event.pages);
  if (!event.pages.length)
    data.pool.cells.forEach((owner, i) => owner > 0 && kin.nodes.has(owner) && kin.pages.add(i + 1));
  return kin;
}

const hostKin = (data, page) => (data.host.cells[page - 1] ? ofNodes(data, [data.host.cells[page - 1]]) : nothing());

function ofPage(data, page) {
  const owner = data.pool.cells[page - 1];
  if (owner > 0) return ofNodes(data, [owner]);
  const kin = nothing();
  kin.pages.add(page);
  if (owner < 0) {
    const request = data.requests.find((r) => r.id === data.pool.names[-owner - 1]);
    return request ? ofRequest(data, request) : kin;
  }
  return kin;
}

// ---------------------------------------------------------------- the KV pool

/** A map of the pool that changes only the squares that changed. Returns {svg, draw, light}. */
function poolMap(point, kindOf = ownerKind) {
  const svg = shape("svg", { class: "mr-pool", role: "img" });
  let squares = [], looks = [], columns = 0, lit = new Set();
  const pageAt = (event) => Number(event.target.closest?.("rect")?.dataset.page ?? 0) || null;
  let last = null;
  const tell = (page) => { if (page !== last) point((last = page)); };
  svg.addEventListener("pointerover", (event) => tell(pageAt(event)));
  svg.addEventListener("pointerleave", () => tell(null));

  const lay = (count) => {
    columns = Math.max(16, Math.ceil(Math.sqrt(count * 3)));
    const rows = Math.max(1, Math.ceil(count / columns));
    svg.setAttribute("viewBox", `0 0 ${columns * 10} ${rows * 10}`);
    squares = Array.from({ length: count }, (_, i) =>
      shape("rect", { x: (i % columns) * 10 + 0.6, y: Math.floor(i / columns) * 10 + 0.6, width: 8.8, height: 8.8, rx: 1.6, "data-page": i + 1 }));
    looks = [];
    svg.replaceChildren(...squares);
  };
  const draw = (pool) => {
    if (pool.cells.length !== squares.length) lay(pool.cells.length);
    svg.setAttribute("aria-label", `${pool.title ?? "KV pool"}: ${pool.books}`);
    pool.cells.forEach((owner, i) => {
      const fill = owner > 0 ? pool.colours[(owner - 1) % pool.colours.length] : owner < 0 ? PRIVATE : FREE;
      const kind = kindOf(pool, owner, i);
      if (looks[i] === fill + kind) return;
      const square = squares[i];
      square.dataset.look = looks[i] = fill + kind;
      square.setAttribute("fill", fill);
      square.setAttribute("class", kind);
    });
  };
  const light = (pages) => {
    for (const page of lit) if (!pages.has(page)) squares[page - 1]?.classList.remove("lit");
    for (const page of pages) squares[page - 1]?.classList.add("lit");
    svg.classList.toggle("dimmed", pages.size > 0);
    lit = new Set(pages);
  };
  return { svg, draw, light };
}

function ownerKind(pool, owner, i) {
  return owner === 0 ? "free" : owner < 0 ? "private" : pool.locked[i] === "1" ? "locked" : "cached";
}

const TIER_TEXT = { both: "a copy of what is also on the device", host: "the only copy", copying: "being copied", loading: "being loaded back" };

function hostText(data, page) {
  const { host, pool } = data, node = host.cells[page - 1], text = host.texts[page - 1];
  const word = pool.page_size > 1 ? "page" : "slot";
  return node ? `host ${word} ${page}: n${node}, ${TIER_TEXT[host.tiers[page - 1]]}${text ? ` “${text}”` : ""}` : `host ${word} ${page}: free`;
}

function pageText(data, page) {
  const { pool } = data, owner = pool.cells[page - 1];
  const word = pool.page_size > 1 ? "page" : "slot";
  if (owner === 0) return `${word} ${page}: free`;
  if (owner < 0) return `${word} ${page}: private to ${pool.names[-owner - 1]}`;
  const text = pool.texts[page - 1], users = data.requests.filter((r) => r.path.includes(owner) && !r.ended);
  const lock = pool.locked[page - 1] === "1" ? "protected" : "evictable";
  const who = users.length ? `, used by ${users.map((r) => r.id).join(", ")}` : "";
  return `${word} ${page}: n${owner}, ${lock}${text ? ` “${text}”` : ""}${who}`;
}

/** What a node holds, in one line. */
function nodeText(data, node) {
  if (data.ranks) return `n${node}: ${data.ranks.nodes[node] ?? "not in this picture"}`;
  const { pool } = data, pages = pool.cells.flatMap((owner, i) => (owner === node ? [i] : []));
  const copies = data.host ? data.host.cells.flatMap((owner, i) => (owner === node ? [i] : [])) : [];
  if (!pages.length && copies.length) return `n${node}: ${copies.length * pool.page_size} tokens, on the host only`;
  if (!pages.length) return `n${node}: evicted`;
  const users = data.requests.filter((r) => r.path.includes(node) && !r.ended).map((r) => r.id);
  const size = pages.length * pool.page_size, lock = pool.locked[pages[0]] === "1" ? "protected" : "evictable";
  const who = users.length ? `, used by ${users.join(", ")}` : "";
  const tier = copies.length ? `, ${TIER_TEXT[data.host.tiers[copies[0]]].replace("a copy of what is also on the device", "with a copy on the host")}` : "";
  return `n${node}: ${size} ${size === 1 ? "token" : "tokens"}, ${lock}${tier}${who}`;
}

// ---------------------------------------------------------------- requests and events

function lane(request, span, point, click) {
  const [begin, end] = span, share = (step) => ((step - begin) / Math.max(end - begin, 1)) * 100 + "%";
  const bar = make("div", "bar");
  for (const [phase, first, last] of request.spans) {
    const piece = make("i", PHASES.includes(phase) ? phase : "");
    piece.style.left = share(first - 1);
    piece.style.width = ((last - first + 1) / Math.max(end - begin, 1)) * 100 + "%";
    piece.title = first === last ? `${phase}, step ${first}` : `${phase}, steps ${first} to ${last}`;
    bar.append(piece);
  }
  const hit = request.cached >= 0 ? `${request.cached}/${request.prompt} hit` : `${request.prompt} tokens`;
  const element = make("li", "", "", [
    make("b", "", request.id), make("span", "hit", hit), bar, make("span", "ended", request.ended),
  ]);
  element.title = request.text;
  element.tabIndex = 0;
  element.addEventListener("pointerenter", () => point(request));
  element.addEventListener("pointerleave", () => point(null));
  element.addEventListener("click", () => click(request));
  element.addEventListener("keydown", (event) => { if (event.key === "Enter") click(request); });
  return element;
}

function eventLine(event, index, point, click) {
  const element = make("li", event.kind, "", [make("em", "", event.tag), make("span", "", event.text)]);
  element.addEventListener("pointerenter", () => point(index));
  element.addEventListener("pointerleave", () => point(null));
  element.addEventListener("click", () => click(index));
  return element;
}

function legend(...names) {
  return make("small", "legend", "", names.map(([name, className]) => make("span", "", "", [make("i", className), name])));
}

// ---------------------------------------------------------------- the controls

function button(text, tip, act) {
  const element = make("button", "", text);
  element.type = "button";
  element.title = tip;
  element.addEventListener("click", act);
  return element;
}

function field(kind, tip, attributes = {}) {
  const element = make(kind);
  element.setAttribute("aria-label", tip);
  element.title = tip;
  return Object.assign(element, attributes);
}

const row = (...children) => make("div", "mr-row", "", children);
const labelled = (text, element) => make("label", "", text + " ", [element]);
const whole = (input) => Math.max(0, Math.trunc(Number(input.value) || 0));

/** Sets a list's entries where they changed, and the chosen one. */
function choose(select, values, chosen, word = (value) => value) {
  if (JSON.stringify(values) !== select.dataset.values) {
    select.dataset.values = JSON.stringify(values);
    select.replaceChildren(...values.map((value) => Object.assign(make("option", "", word(value)), { value })));
  }
  select.value = chosen ?? values[0];
}

/** Going through positions. Returns {row, draw, arrived, toggle, stop}. */
function moving(send) {
  let now = null, asked = false, next = null, timer = 0, held = false;
  // While Python draws, a dragged slider asks for nothing more, and then for where it is by then.
  const go = (index) => {
    if (asked) next = index;
    else if ((asked = index !== now.index)) send("go", index);
  };
  const arrived = () => {
    const wanted = next;
    asked = false;
    next = null;
    if (wanted !== null) go(wanted);
  };
  const first = button("|◀", "first (Home)", () => send("first")), back = button("◀", "back (left arrow)", () => send("back"));
  const forward = button("▶", "forward (right arrow)", () => send("forward")), last = button("▶|", "last (End)", () => send("last"));
  const stop = () => { clearInterval(timer); timer = 0; play.textContent = "play"; };
  const tick = () => { if (now.index + 1 >= now.count) stop(); else if (!asked) go(now.index + 1); };
  const toggle = () => {
    if (timer) return stop();
    timer = setInterval(tick, PLAY_MS);
    play.textContent = "pause";
  };
  const play = button("play", "one position after the other (space)", toggle);
  const by = field("select", "event, step or scene");
  by.addEventListener("change", () => send("granularity", by.value));
  const slider = field("input", "position", { type: "range", min: 0 }), where = make("span", "where");
  slider.addEventListener("input", () => { held = true; go(Number(slider.value)); });
  slider.addEventListener("change", () => { held = false; });
  const draw = (controls) => {
    now = controls;
    first.disabled = back.disabled = !now.back;
    forward.disabled = !now.forward;
    choose(by, now.granularities, now.granularity, (name) => "by " + name);
    slider.max = Math.max(now.count - 1, 1);
    if (!held && next === null) slider.value = now.index;
    where.textContent = `${now.index} of ${now.count - 1}`;
  };
  return { row: row(first, back, forward, last, play, by, slider, where), draw, arrived, toggle, stop };
}

/** Jumps, reasons, the quiz and its question. Returns {rows, draw}. */
function asking(send) {
  const jumps = make("span", "mr-row");
  const quiz = button("quiz", "going forward asks first", () => send("quiz", quiz.getAttribute("aria-pressed") !== "true"));
  const text = make("span"), choice = field("select", "your answer"), number = field("input", "your answer", { type: "number", value: 0 });
  const answer = button("answer", "see whether it is right", () => send("answer", choice.hidden ? String(whole(number)) : choice.value));
  const question = row(text, choice, number, answer);
  question.classList.add("question");
  const draw = (now) => {
    if (!jumps.children.length)
      jumps.append(...now.jumps.map(([kind, word]) => button("next " + word, "to the next " + word, () => send("jump", kind))));
    now.jumps.forEach(([, , there], i) => { jumps.children[i].disabled = !there; });
    quiz.hidden = now.quiz === null; // a stream has nothing to ask about
    quiz.setAttribute("aria-pressed", now.quiz);
    question.hidden = !now.question;
    if (!now.question) return;
    text.textContent = now.question.text;
    const { choices } = now.question;
    choice.hidden = !choices.length;
    number.hidden = choices.length > 0;
    if (choices.length) choose(choice, choices, choices.includes(choice.value) ? choice.value : choices[0]);
  };
  return { rows: [row(jumps, button("why this victim?", "the policy's key and the runner-up", () => send("why")), quiz), question], draw };
}

/** Prompts, the engine and forks. Returns {part, draw}. */
function driving(send) {
  let taken = 0;
  const forkable = []; // what each field of the next fork was told
  const text = field("input", "prompt", { type: "text", placeholder: "Type a prompt" });
  const chat = field("input", "the text becomes a chat message", { type: "checkbox" });
  const submit = button("submit", "queue this prompt (Enter)", () => send("submit", text.value));
  submit.classList.add("primary");
  text.addEventListener("input", () => send("type", text.value));
  text.addEventListener("keydown", (event) => { if (event.key === "Enter") submit.click(); });
  chat.addEventListener("change", () => send("chat", chat.checked));
  const hits = make("div", "hits");
  const step = button("step", "one step of the engine", () => send("step"));
  const run = button("run to end", "steps until nothing is left to do", () => send("run"));
  const tokens = field("input", "how many tokens", { type: "number", min: 1, value: 20 });
  const policy = field("select", "who is evicted from now on"), present = make("span", "present");
  policy.addEventListener("change", () => send("policy", policy.value));
  const fields = make("span", "mr-row");
  const fork = button("fork from here", "the requests so far, on a new engine", () =>
    send("fork", Object.fromEntries([...fields.querySelectorAll("select, input")].map((box) => [box.name, box.tagName === "SELECT" ? box.value : whole(box)]))));
  const original = button("original", "back to where it was forked", () => send("original"));
  const part = make("div", "mr-driving", "", [
    row(text, labelled("as chat", chat), submit, button("agent", "a question behind the agents' long shared prompt", () => send("agent")),
      button("raw", "words that share nothing", () => send("raw"))),
    hits,
    row(step, run, button("evict", "at least so many tokens", () => send("evict", whole(tokens))), tokens, labelled("by", policy),
      button("flush", "empty the cache", () => send("flush")), present),
    row(fork, fields, original),
  ]);
  const forkField = ([name, label, choices, value]) => {
    const box = field(choices ? "select" : "input", `${label}: of the new engine`, { name, ...(choices ? {} : { type: "number" }) });
    if (choices) choose(box, choices, value);
    else box.value = value;
    return labelled(label, box);
  };
  const draw = (now) => {
    if (now.taken !== taken) text.value = "";
    taken = now.taken;
    chat.checked = now.chat;
    hits.textContent = now.because ? `${now.hits}; ${now.because}` : now.hits;
    hits.classList.toggle("refused", now.refused);
    step.disabled = run.disabled = !now.step;
    choose(policy, now.policies, now.policy);
    policy.disabled = !now.policy;
    present.textContent = now.present;
    original.disabled = !now.original;
    now.fork.forEach((told, i) => {
      const text = JSON.stringify(told);
      if (forkable[i] === text) return; // what was chosen for the next fork stays
      forkable[i] = text;
      if (fields.children[i]) fields.children[i].replaceWith(forkField(told));
      else fields.append(forkField(told));
    });
  };
  return { part, draw };
}

// ---------------------------------------------------------------- the whole

function build(model, el) {
  let data = null, held = nothing(), ticket = 0;
  const send = (name, value = null) => model.send({ do: name, value });
  const moves = moving(send), asks = asking(send), drives = driving(send);
  const root = make("div", "mr-stepper");
  root.tabIndex = 0;
  root.setAttribute("aria-label", "Radix cache, step by step: arrow keys step, space plays");

  const title = make("b"), sentence = make("span"), note = make("p", "note");
  const say = make("div", "mr-say", "", [make("p", "", "", [title, sentence]), note]);
  say.setAttribute("role", "status");
  say.setAttribute("aria-live", "polite");

  const host = make("div", "mr-tree");
  host.style.height = model.get("height");
  const pool = poolMap((page) => (page ? hover(ofPage(data, page), pageText(data, page)) : hover(null)));
  const books = make("small", "books"), about = make("p", "about", "\u00a0");
  const requests = make("ul", "mr-requests"), events = make("ol", "mr-events");
  const states = legend(["new", "new"], ["hit", "hit"], ["split", "split"], ["locked", "locked"], ["cached", "cached"], ["evicted", "evicted"]);
  const tiers = make("p", "tiers", "KV: D device · D+H also on the host · H host only (dotted) · D→H copying · H→D loading (dashed)");
  tiers.hidden = true;
  const phases = legend(...PHASES.map((phase) => [phase, phase]));
  const host2 = poolMap((page) => (page ? hover(hostKin(data, page), hostText(data, page)) : hover(null)), (part, owner, i) => (owner ? "copy " + part.tiers[i] : "free"));
  const hostBooks = make("small", "books"), sums = make("p", "sums");
  const hostPart = make("div", "host-part", "", [make("h3", "", "", [make("span", "", "Host memory"), hostBooks]), host2.svg,
    legend(["a copy", "both"], ["only here", "host"], ["being copied", "copying"], ["being loaded", "loading"]), sums]);
  hostPart.hidden = true;
  const poolPart = make("div", "", "", [pool.svg, hostPart]), ranks = make("ul", "ranks"); // a stream has no pool
  const poolCard = card("KV pool", "pool-card", make("div", "", "", [poolPart, ranks, about]), books);
  const requestsCard = card("Requests", "requests-card", requests, phases);
  root.append(
    say,
    make("div", "mr-main", "", [
      card("Radix tree", "tree-card", make("div", "", "", [tiers, host]), states),
      make("div", "mr-side", "", [poolCard, card("Events", "events-card", events)]),
    ]),
    requestsCard,
  );
  const output = make("div", "mr-output", "", [moves.row, ...asks.rows, root]);
  output.dataset.lmSuppressShortcuts = "true"; // else JupyterLab takes the keys
  el.append(output);

  const show = (kin) => {
    tree.highlight(host, kin.nodes);
    pool.light(kin.pages);
    if (data?.host) host2.light(kin.host);
    [...requests.children].forEach((li) => li.classList.toggle("lit", kin.requests.has(li.dataset.id)));
    [...events.children].forEach((li, i) => li.classList.toggle("lit", kin.events.has(i)));
  };
  const hover = (kin, text = "") => {
    ticket++;
    about.textContent = text || "\u00a0";
    show(kin ?? held);
  };
  const hold = (kin) => {
    const same = JSON.stringify([...kin.nodes, ...kin.pages]) === JSON.stringify([...held.nodes, ...held.pages]);
    held = same ? nothing() : kin;
    show(held);
  };
  const walk = async (request) => {
    const mine = ++ticket, kin = ofRequest(data, request);
    held = kin;
    show({ ...kin, nodes: new Set() });
    for (let i = 1; i <= request.path.length; i++) {
      if (mine !== ticket) return;
      tree.highlight(host, request.path.slice(0, i));
      await new Promise((done) => setTimeout(done, 240));
    }
  };
  const nodeNumber = (id) => Number(id.slice(1));

  tree.listen(host, {
    over: (id) => {
      if (!id || id === "n0" || id[0] !== "n") return hover(null);
      hover(ofNodes(data, [nodeNumber(id)]), nodeText(data, nodeNumber(id)));
    },
    click: (id) => {
      if (id[0] === "f") send("open", nodeNumber(id));
      else if (id !== "n0") hold(ofNodes(data, [nodeNumber(id)]));
    },
  });
  // The wheel scrolls the notebook; with Ctrl it zooms the tree.
  host.closest(".mr-card").addEventListener("wheel", (event) => { if (!event.ctrlKey) event.stopPropagation(); }, { capture: true });
  root.addEventListener("keydown", (event) => {
    if (!(KEYS[event.key] || event.key === " ") || event.altKey || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    event.stopPropagation();
    if (event.key === " ") moves.toggle();
    else send(KEYS[event.key]);
  });

  const drawLists = () => {
    const steps = data.requests.flatMap((r) => r.spans.flatMap(([, first, last]) => [first, last]));
    const range = [Math.max(Math.min(...steps, data.step) - 1, data.step - 200), data.step];
    requests.replaceChildren(...data.requests.map((request) => {
      const item = lane(request, range, (r) => hover(r && ofRequest(data, r), r ? r.text : ""), walk);
      item.dataset.id = request.id;
      return item;
    }));
    requests.scrollTop = requests.scrollHeight;
    events.replaceChildren(...data.events.map((event, i) =>
      eventLine(event, i, (at) => hover(at === null ? null : ofEvent(data, at)), (at) => hold(ofEvent(data, at)))));
    if (data.granularity === "event") events.lastElementChild?.classList.add("now");
    events.scrollTop = data.granularity === "event" ? events.scrollHeight : 0;
    show(held);
  };
  const drawHost = () => {
    host2.draw({ ...data.host, title: "Host memory", colours: data.pool.colours });
    host2.light(held.host);
    hostBooks.textContent = data.host.books;
    sums.textContent = data.host.sums;
    sums.hidden = !data.host.sums;
  };
  let waiting = 0;
  const draw = () => {
    data = JSON.parse(model.get("payload"));
    if (!data.pool) return;
    const start = performance.now();
    held = nothing();
    ticket++;
    if (data.svg) tree.morph(host, data.svg, data.ms);
    tree.highlight(host, []);
    pool.draw(data.pool);
    pool.light(held.pages);
    hostPart.hidden = tiers.hidden = !data.host;
    if (data.host) drawHost();
    title.textContent = data.title;
    sentence.textContent = data.sentence;
    note.textContent = data.message;
    note.hidden = !data.message;
    say.className = "mr-say " + data.kind;
    books.textContent = (data.ranks ?? data.pool).books;
    poolPart.hidden = requestsCard.hidden = Boolean(data.ranks);
    ranks.hidden = !data.ranks;
    if (data.ranks) {
      poolCard.querySelector("h3 span").textContent = "Ranks";
      ranks.replaceChildren(...data.ranks.lines.map((line) => make("li", "", line)));
    }
    root.dataset.index = data.index;
    root.dataset.cost = (performance.now() - start).toFixed(2);
    clearTimeout(waiting);
    waiting = setTimeout(drawLists); // the tree first: it is what one looks at
    drawControls(); // they came in the same message, and say where we are now
    moves.arrived();
  };
  const drawControls = () => {
    const now = JSON.parse(model.get("controls"));
    if (!now.jumps) return;
    moves.draw(now);
    asks.draw(now);
    if (!now.engine) return; // a recording drives nothing
    if (!drives.part.parentElement) output.append(drives.part);
    drives.draw(now.engine);
  };
  model.on("change:payload", draw);
  model.on("change:controls", drawControls);
  drawControls();
  draw();
  return () => {
    moves.stop();
    model.off("change:payload", draw);
    model.off("change:controls", drawControls);
  };
}

export default { render: ({ model, el }) => build(model, el) };
