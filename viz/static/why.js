// Why would it miss? The panel in which a prompt is typed or a request log pasted, and what answers look like:
// a bar of tokens by cause, and the place where two prompts part. The prompt doctor draws with the same two.
//
// page.js calls what `makeWhy` returns. All text goes through textContent (h).
import { button, h, key, plural } from "./parts.js";

// Each cause's colour, and its word below a bar; minirad/why/answer.py has the causes.
export const FOUND = "#74c0fc";
const CAUSE_LOOKS = {
  new: ["#dee2e6", "never seen"], differs: ["#ff8787", "differs"], evicted: ["#ffa94d", "evicted"], flushed: ["#ffc078", "flushed"],
  weights: ["#e599f7", "old weights"], host: ["#96f2d7", "host only"], hole: ["#63e6be", "behind a hole"], namespace: ["#b197fc", "another salt or rank"], adapter: ["#9775fa", "another adapter"],
  running: ["#ffe066", "computed now"], aborted: ["#fcc2d7", "aborted"], retracted: ["#faa2c1", "retracted"], failed: ["#f783ac", "failed"], unkept: ["#eebefa", "not kept"],
  large: ["#d0bfff", "larger than the cache"], forgotten: ["#ced4da", "forgotten"], unknown: ["#adb5bd", "unknown"], page: ["#e9ecef", "no whole page"], logprobs: ["#f1f3f5", "log-probabilities"], last: ["#868e96", "the last token"],
};
const lookOf = (cause) => CAUSE_LOOKS[cause] ?? ["#adb5bd", cause];

/** A bar of tokens, [[tokens, colour, word, title], ...]; `label`: the same in a sentence. */
export function tokenBar(parts, label) {
  const total = parts.reduce((sum, [tokens]) => sum + tokens, 0);
  return h("div.tokens", { role: "img", "aria-label": label },
    ...parts.filter(([tokens]) => tokens).map(([tokens, background, , title]) => h("i", { style: { flexGrow: tokens, background }, title: `${plural(tokens, "token")}: ${title}` }, tokens / total > 0.08 ? String(tokens) : "")));
}

export const tokenKeys = (parts) => h("div.keys", {}, ...[...new Map(parts.map(([, colour, word]) => [word, colour]))].map(([word, colour]) => key(word, colour)));

/** Two prompts where they part: what is before, and of each [name, the part that differs, what follows]. */
export function parting(before, ...rows) {
  const line = (text) => text.replaceAll("\n", "¶");
  return rows.map(([name, marked, after = ""]) => h("div.diverge", {}, h("b", {}, name), h("code", {}, h("span.same", {}, line(before)), h("mark.bad", {}, line(marked) || "end"), line(after))));
}

/** page: {source, state, light(node ids or null), linked(text)}. Returns {panel, toggle, pick, moved, path}. */
export function makeWhy(page) {
  const { source, state } = page, el = {};
  const asked = { ticket: 0, timer: null, busy: false, from: "", at: "" };
  let path = [];

  const way = (value, text) => h("option", { value }, text);
  const panel = h("section.panel.miss", { hidden: true },
    h("h2", {}, "Why would it miss?", (el.when = h("small")), button("×", "Close (Esc)", () => toggle())),
    (el.text = h("textarea", { spellcheck: false, rows: 4, maxLength: 900000, "aria-label": "A prompt, or a request log", placeholder: "Type a prompt, or paste a request log: JSON lines with messages or prompt", oninput: () => { asked.from = ""; el.request.hidden = true; el.request.replaceChildren(); askSoon(); } })),
    h("div.how", {},
      (el.way = h("select", { "aria-label": "What it is", onchange: () => askSoon(0) }, way("", "by its looks"), way("prompt", "a prompt"), way("chat", "a chat question"), way("log", "a request log"), way("ids", "token ids"))),
      (el.request = h("select", { "aria-label": "Request of the log", hidden: true, onchange: () => askSoon(0) })),
      (el.lora = h("select", { "aria-label": "Adapter", hidden: true, onchange: () => askSoon(0) })),
      (el.hint = h("span.hint"))),
    (el.result = h("div.result", { "aria-live": "polite" })));

  function toggle() {
    if (!source.why) return;
    page.toggle(panel);
    if (panel.hidden) return light([]);
    const adapters = source.meta.adapters ?? [], chosen = el.lora.value;
    el.lora.hidden = !adapters.length;
    el.lora.replaceChildren(...[...adapters.slice(-1), ...adapters.slice(0, -1)].map(([name]) => h("option", { value: name }, name ? `under ${name}` : "no adapter")));
    el.lora.value = adapters.some(([name]) => name === chosen) ? chosen : "";
    el.hint.textContent = source.meta.no_text || (source.meta.fleet ? "" : "or click a request below");
    el.text.focus();
    asked.at = "";
    moved();
  }

  /** A request of our own is asked about, with its very tokens. */
  async function pick(id) {
    const leader = id.split(".")[0];
    try {
      const { text } = await source.command("prompt", { request: leader });
      Object.assign(asked, { from: leader });
      if (!el.lora.hidden) el.lora.value = source.requests[leader]?.lora ?? "";
      el.text.value = text;
      el.way.value = "";
      el.request.hidden = true;
      el.request.replaceChildren();
      askSoon(0);
    } catch (error) { el.result.replaceChildren(h("p.bad", {}, error.message)); }
  }

  const position = () => `${source.run} ${state.g} ${state.i}`;

  /** Another position is on view: the question is asked again, of that moment; while it plays, now and then. */
  function moved() {
    if (!panel.hidden && asked.timer === null && asked.at !== position() && el.text.value.trim()) askIn(300);
  }

  /** What is asked has changed: answers that are under way are no longer wanted. */
  function askSoon(after = 300) {
    asked.ticket++;
    askIn(after);
  }

  function askIn(after) {
    clearTimeout(asked.timer);
    asked.timer = setTimeout(() => { asked.timer = null; askNow(); }, after);
  }

  async function askNow() {
    if (asked.busy) return askIn(100);
    if (!el.text.value.trim()) { light([]); return el.result.replaceChildren(); }
    const { ticket } = asked, { g, i } = state;
    asked.at = position();
    asked.busy = true;
    try {
      const found = await source.why({ text: el.text.value, as: el.way.value, request: el.request.value, from: asked.from, lora: el.lora.value, g, i });
      if (panel.hidden) return;
      if (ticket !== asked.ticket) return;
      if (found.wait) { el.when.textContent = found.wait; askIn(50); }
      else draw(found);
    } catch (error) {
      if (ticket !== asked.ticket) return;
      light([]);
      el.when.textContent = "";
      const known = error.message === source.meta.no_text; // said beside the text already
      el.hint.classList.toggle("bad", known);
      el.result.replaceChildren(known ? "" : h("p.bad", {}, error.message));
    } finally {
      asked.busy = false;
      moved();
    }
  }

  function light(nodes) {
    path = nodes;
    page.light(null);
  }

  function draw(found) {
    const { answers, requests } = found;
    el.hint.classList.remove("bad");
    el.when.textContent = `at ${found.moment}`;
    el.request.hidden = requests.length < 2;
    if ([...el.request.options].map((o) => o.value).join("\n") !== requests.join("\n")) el.request.replaceChildren(...requests.map((name) => h("option", { value: name }, name)));
    el.request.value = found.request;
    const used = [];
    const rows = answers.map((answer) => {
      const parts = [[answer.cached, FOUND, "found", "found in the cache"], ...answer.losses.map((loss) => [loss.tokens, ...lookOf(loss.cause), loss.say])];
      used.push(...parts.filter(([tokens]) => tokens));
      const [first, ...reasons] = answer.say.split("; ");
      const differs = answer.losses.find((loss) => loss.cause === "differs");
      const own = h("div.answer" + (answer.rank === null ? "" : ".rank"), { tabindex: 0, onpointerenter: () => page.light(answer.path), onpointerleave: () => page.light(null), onfocus: () => page.light(answer.path), onblur: () => page.light(null) },
        h("p.verdict", {}, h("b", {}, first + "; "), ...page.linked(reasons.join("; "))), tokenBar(parts, answer.say));
      return { own, differs };
    });
    const shown = new Set(), places = rows.flatMap(({ differs }) => { // ranks part from the same prompt more often than not
      const place = differs && JSON.stringify([differs.start, differs.ours_text, differs.theirs_text]);
      if (!place || shown.has(place)) return [];
      shown.add(place);
      return [h("div.parting", {}, h("p.hint", {}, `Where they part, token ${differs.start}:`), ...parting(differs.before_text ?? "", ["asked", differs.ours_text ?? ""], [differs.other || "there", differs.theirs_text ?? ""]))];
    });
    el.result.replaceChildren(h("p.hint", {}, taken(found)), ...rows.map(({ own }) => own), tokenKeys(used), ...places.slice(0, 3),
      found.notes.length ? h("ul.notes", {}, ...found.notes.map((note) => h("li", {}, note))) : "");
    light(answers.reduce((longest, { path: one }) => (one.length > longest.length ? one : longest), []));
  }

  const TAKEN = { prompt: "a prompt", chat: "a chat question", log: "a request log", ids: "token ids" };
  const taken = (found) => `Read as ${TAKEN[found.as]}${found.requests.length ? ` of ${plural(found.requests.length, "request")}: ${found.request}` : ""}, ${plural(found.tokens, "token")}.`;

  /** Another run has no such request: what is in the text is a typed one. */
  const forget = () => { asked.from = ""; };

  return { panel, toggle, pick, moved, forget, path: () => (panel.hidden ? [] : path) };
}
