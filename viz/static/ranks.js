// One engine on several ranks: each has a tree and a pool of its own, and all must be the same. The page is
// sides.js'; here is what rank 0 sent, whether the digests were equal, and both over time (viz/web/ranks.py).
import { MARK_COLORS, button, h, plural, s } from "./parts.js";
import { look } from "./tree.js";
import { command, el, last, notice, sidesPage, size, source, state } from "./sides.js";

MARK_COLORS.differ = "#e03131";
const EQUAL = "#2b8a3e";
const bytes = (n) => (n < 1e4 ? `${n.toLocaleString("en")} ${n === 1 ? "byte" : "bytes"}` : n < 1e6 ? `${(n / 1e3).toFixed(1)} KB` : `${(n / 1e6).toFixed(1)} MB`);

const low = () => [
  h("section.card.sent", {}, h("h2", {}, "Sent by rank 0 in this step", (el.bytes = h("small"))), (el.told = h("ul.told")), (el.ask = buildAsk())),
  h("section.card", {}, h("h2", {}, "Bytes sent, step by step", h("small", {}, "below: equal digests")), (el.sizes = h("div.chart"))),
  h("section.card.score", {}, h("h2", {}, "So far"), (el.score = h("table")))];

/** A prompt for rank 0: so one sees what is sent of it. */
function buildAsk() {
  el.prompt = h("input", { type: "text", placeholder: "a prompt of yours", "aria-label": "A prompt of yours", maxLength: 4000 });
  return h("form.row", { hidden: true, onsubmit: submit }, el.prompt, h("button", { type: "submit", title: "Rank 0 sends it with the next step" }, "submit"));
}

async function submit(event) {
  event.preventDefault();
  if (state.sending) return;
  const text = el.prompt.value;
  state.sending = true;
  const answer = await command("submit", { text, as: "chat" });
  state.sending = false;
  if (!answer) return;
  if (el.prompt.value === text) el.prompt.value = "";
  notice(`${answer.request} waits at rank 0: the others hear of it with the next step.`, () => !source.requests[`1 ${answer.request}`]);
}

function tools() {
  el.workload = h("select", { title: "Another workload, from the start", "aria-label": "Workload", onchange: () => command("restart", { workload: el.workload.value }) });
  el.plant = button("plant a difference", "Changes a lock_ref at rank 0 and tells nobody: the digests of the next step must differ", () => command("plant"));
  return [el.workload, el.plant];
}

/** Under a rank's tree: the digest of all it holds. */
const foot = (side) => (side.digest = h("div.digest"));

function drawDigest(side, number, view) {
  const { digest, unlike } = state.view, own = unlike.filter(([rank]) => rank === source.meta.numbers[number]);
  const nodes = new Set(unlike.flatMap(([, , named]) => named.map((n) => "n" + n)));
  for (const node of side.tree.querySelectorAll("g.node")) node.classList.toggle("unlike", nodes.has(node.id));
  if (nodes.size || side.looked) look(side.tree);
  side.looked = nodes.size > 0; // the camera goes back, too
  const { at } = state.view;
  if (at[number] < at[0]) side.say.textContent = `as it was after step ${at[number]}: its step ${at[0]} did not come`;
  const [kind, text] = own.length ? ["bad", own[0][1].replace(/^step \d+: /, "")]
    : digest ? ["good", digest] : unlike.length ? ["", number ? "" : "the others are compared with this one"] : ["", state.i ? "no digest here" : ""];
  side.digest.dataset.look = kind;
  side.digest.title = digest ? `Digest of tree, free pages, rows and queue after this step: ${digest}` : text;
  side.digest.replaceChildren(h("b", {}, { bad: "≠", good: "=" }[kind] ?? ""), ...(kind === "good" ? ["digest ", h("code", {}, (digest.match(/.{1,4}/g) ?? []).slice(0, 8).join(" "))] : [text]));
}

function drawTold() {
  const { told } = state.view;
  const row = (word, ...what) => h("li", {}, h("em." + word, {}, word), ...what);
  el.bytes.textContent = told ? bytes(told.bytes) : "";
  const rows = !told ? [h("li.rest", {}, state.i ? "Nothing: this was between two steps." : "Nothing yet.")] : [
    ...told.requests.map(([id, text, prompt]) => row("request", h("b", {}, id), ` ${text} `, h("small", {}, prompt ? plural(prompt, "prompt token") : ""))),
    ...told.aborts.map(([id, text]) => row("abort", h("b", {}, id), ` ${text}`)),
    ...told.other.map((text) => row("other", text)),
    ...(told.more ? [h("li.rest", {}, `and ${told.more.toLocaleString("en")} more`)] : []),
    ...(told.requests.length + told.aborts.length + told.other.length ? [] : [h("li.rest", {}, "Only the word to take a step.")]),
    h("li.rest", {}, h("b", {}, "No slots, no drawn tokens: "), "each rank decides these by itself.")];
  el.told.replaceChildren(...rows);
}

/** A bar for what each step's message weighed; below it how its digests compared. */
function drawSizes() {
  const [w, height] = size(el.sizes), top = 12, bottom = height - 12, n = Math.max(last(), 1), right = w - 4;
  const most = Math.max(1, ...source.frames.map((frame) => frame.t[3])), wide = Math.max((right - 2) / n, 1);
  const x = (f) => 2 + ((right - 2) * f) / n, y = (v) => bottom - (v / most) * (bottom - top);
  const per = Math.max(1, Math.ceil(n / Math.max(right, 1))); // of a long run a bar is the most of several steps
  const bars = [];
  for (let f = 0; f < source.frames.length; f += per) {
    const some = source.frames.slice(f, f + per), sent = Math.max(...some.map((frame) => frame.t[3])), agreed = Math.min(...some.map((frame) => frame.a));
    const news = some.some((frame) => frame.t[0] + frame.t[1] + frame.t[2] > 0), slim = Math.max(wide * per - (wide > 3 ? 1 : 0), 1);
    if (sent) bars.push(s("rect", { class: "bar" + (news ? " news" : ""), x: x(f), width: slim, y: Math.min(y(sent), bottom - 1), height: Math.max(bottom - y(sent), 1) }));
    if (agreed) bars.push(s("rect", { x: x(f), width: slim, y: bottom + 4, height: 5, fill: agreed < 0 ? MARK_COLORS.differ : EQUAL, opacity: agreed < 0 ? 1 : 0.55 }));
  }
  el.sizes.replaceChildren(s("svg", { viewBox: `0 0 ${w} ${height}`, role: "img", "aria-label": `bytes sent by step, at most ${most}` },
    s("line", { x1: 0, x2: right, y1: bottom, y2: bottom, class: "axis" }), ...bars, s("text", { x: 2, y: 9 }, `at most ${bytes(most)}`), s("line", { x1: x(state.i), x2: x(state.i), y1: top - 4, y2: bottom, class: "cursor" })));
}

function drawScore() {
  const { sums, totals } = state.view, evicted = totals.map((each) => each.evicted.toLocaleString("en"));
  const rows = [
    ["sent by rank 0", bytes(sums.bytes)], ["in it: requests, aborts", `${sums.requests}, ${sums.aborts}`], ["in it: slots, drawn tokens", "0, 0"],
    ["each rank: slots taken", sums.slots.toLocaleString("en")], ["each rank: tokens drawn", sums.tokens.toLocaleString("en")],
    ["each rank: tokens evicted", (new Set(evicted).size > 1 ? evicted : evicted.slice(0, 1)).join(", ")], ["equal digests", `${sums.agreed} of ${plural(sums.steps, "step")}`]];
  el.score.replaceChildren(...rows.map(([name, value]) => h("tr", {}, h("td", {}, name), h("td", {}, value))));
}

function drawStatus({ drivable, idle, error }) {
  if (drivable && idle && !error && source.frames.at(-1)?.m.includes("differ")) {
    el.statusText.textContent = "stopped: the ranks differ";
    el.status.dataset.kind = "error";
  }
  for (const tool of [el.workload, el.plant, el.ask]) tool.hidden = !drivable;
  const names = source.choices?.workload ?? [], now = source.settings?.workload ?? "";
  if (el.workload.childElementCount !== names.length) el.workload.replaceChildren(...names.map((name) => h("option", { value: name }, name)));
  if (document.activeElement !== el.workload && names.includes(now)) el.workload.value = now;
}

sidesPage({
  kind: "tp", title: "ranks side by side", low, tools, foot, drawStatus, drawSide: drawDigest,
  words: { again: "The engine anew, on all ranks", start: "the ranks start", done: "all is done", running: "the ranks are running", stopped: "The run has ended with an error", ofWhich: "" },
  chip: (meta) => `tp ${meta.tp}`,
  named: (meta) => plural(meta.tp, "rank"),
  parts: () => ({ told: [el.told, "What was sent", drawTold], sizes: [el.sizes, "The bytes", drawSizes], score: [el.score, "The table", drawScore] }),
  jumps: { s: "split", e: "evict", r: "retract", d: "differ" },
  lanes: (frame) => frame.m.map((kind) => [kind, kind === "differ" ? 1 : 0]),
});
