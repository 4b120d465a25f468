// The page of a stream of other servers: ranks in place of a pool, growth and shares in place of requests.
//
// page.js calls what `makeFleet` returns. All text from the stream goes through textContent (h).
import { button, h, plural, s } from "./parts.js";
import { makeRoutes } from "./route.js";

export const FLEET_WORDS = { connecting: "connecting", replaying: "catching up", live: "live", silent: "silent", lost: "lost" };
const FLEET_LETTERS = "DHKX?";

/** page: {source, state, chartSize, cursor, pickRank(rank or null), ranks(): those that can be shown alone, command}.
 *  Returns what page.js draws of it: {parts(), mount, tipOf, charts, drawTools}. */
export function makeFleet(page) {
  const { source, state } = page, el = {}, routing = makeRoutes(page);
  const routed = () => Boolean(source.meta.fleet.routed); // the ranks are workers behind a router of ours
  const media = () => source.meta.fleet.media;
  const color = (letter) => source.meta.fleet.colours[letter] ?? "#ced4da";
  const many = (n) => n.toLocaleString("en");
  const short = (n) => (n < 10000 ? many(n) : n < 1e6 ? (n / 1e3).toFixed(n < 1e5 ? 1 : 0) + "k" : (n / 1e6).toFixed(1) + "M");

  el.side = h("section.side.fleetside", {},
    h("section.card.ranks", {}, h("h2", {}, (el.ranksTitle = h("span", {}, "Ranks")), (el.ranksText = h("small")), (el.all = button("all ranks", "All ranks in one tree (a)", () => page.pickRank(null)))),
      (el.ranks = h("div.ranktable", {}, (el.table = h("table"))))),
    h("section.card.shares", {}, h("h2", {}, "Shared", (el.sharesText = h("small"))), (el.shares = h("div.chart")), (el.sharesKeys = h("div.keys"))));
  el.growthCard = h("section.card.growth", {}, h("h2", {}, "Growth", (el.growthText = h("small"))), (el.growth = h("div.chart")), (el.growthKeys = h("div.keys")));
  el.legend = h("p.tiers.strips", {}, (el.letters = h("span.legend")), (el.aloneText = h("b.alone")));
  el.wrong = h("section.banner.wrong", { hidden: true, role: "alert" });

  function drawRanks() {
    const { ranks } = state.view.fleet, shown = FLEET_LETTERS.split("").filter((letter) => ranks.some((r) => r.media[letter]));
    const first = routed() ? routing.workerHeads : ["rank", "state", "last", "batches"];
    const rest = routed() ? [] : ["lost", "unknown", "endpoint"], what = routed() ? "worker" : "rank";
    const heads = [...first, ...shown.map((letter) => `${letter} tokens`), ...rest];
    const pickable = page.ranks(), body = ranks.map((r) => {
      const where = r.where.replace(/^tcp:\/\//, "");
      const cells = [
        ...(routed() ? routing.workerCells(r.rank) : [
          h("th", {}, String(r.rank)),
          h("td", {}, h("span.state", { "data-state": r.state }, h("i.dot"), FLEET_WORDS[r.state] ?? r.state)),
          h("td.n", { title: "the last batch's number" }, r.seq < 0 ? "–" : many(r.seq)),
          h("td.n", { title: `${plural(r.batches, "batch").replace("batchs", "batches")}, ${many(r.replayed)} of them from the replay buffer` }, many(r.batches))]),
        ...shown.map((letter) => { const [blocks, tokens] = r.media[letter] ?? [0, 0]; return h("td.n", { title: `${many(tokens)} tokens in ${plural(blocks, "block")} (${media()[letter]})` }, tokens ? short(tokens) : "–", h("small", {}, blocks ? ` ${short(blocks)}` : "")); }),
        ...(routed() ? [] : [h("td.n" + (r.lost ? ".bad" : ""), { title: "batches that were lost" }, many(r.lost)),
          h("td.n", { title: "events and fields that are not known here" }, many(r.unknown)),
          h("td.where", { title: r.where }, where.length > 17 ? "…" + where.slice(-16) : where)]),
      ];
      const able = pickable.includes(r.rank), picked = state.rank === r.rank;
      const pick = () => page.pickRank(picked ? null : r.rank);
      return h("tr" + (able ? ".able" : "") + (picked ? ".picked" : ""), able ? { tabindex: 0, role: "button", "aria-pressed": String(picked), "data-rank": r.rank, title: picked ? `Back to all ${what}s` : `${routed() ? routing.nameOf(r.rank) : `Rank ${r.rank}`} alone`, onclick: pick, onkeydown: (e) => { if (e.key === "Enter" || e.key === " ") { e.preventDefault(); e.stopPropagation(); pick(); } } } : { "data-rank": r.rank }, ...cells);
    });
    const focus = document.activeElement?.closest?.(".ranktable tr")?.dataset.rank;
    if (!el.table.isConnected) el.ranks.replaceChildren(el.table);
    el.table.replaceChildren(h("tr", {}, ...heads.map((head) => h("th", head.endsWith("tokens") ? { title: `tokens and blocks: ${media()[head[0]]}` } : {}, head))), ...body);
    if (focus) el.table.querySelector(`tr[data-rank="${focus}"]`)?.focus();
    const here = ranks.filter((r) => !["connecting", "lost"].includes(r.state)).length, click = pickable.length > 1 ? "click one to see it alone" : "";
    el.ranksTitle.textContent = routed() ? "Workers" : "Ranks";
    el.all.textContent = `all ${what}s`;
    el.ranksText.textContent = state.rank !== null || (routed() && !state.view.fleet.shares.length) ? "" : routed() ? `${sharedWords()}${click && " · " + click}` : `${here} of ${ranks.length} here${click && " · " + click}`;
    el.all.hidden = state.rank === null;
    el.aloneText.textContent = state.rank === null ? "" : `${routed() ? routing.nameOf(state.rank) : `rank ${state.rank}`} alone`;
  }

  /** How many tokens several ranks hold, of how many. */
  function sharedWords() {
    const { shares } = state.view.fleet, sum = (from) => shares.slice(from).reduce((a, b) => a + b, 0);
    return `${many(sum(1))} of ${plural(sum(0), "token").replace(String(sum(0)), many(sum(0)))}${routed() ? " held more than once" : ""}`;
  }

  /** Tokens that one, two, ... ranks hold, as bars. */
  function drawShares() {
    const { shares } = state.view.fleet, [w, height] = page.chartSize(el.shares), total = shares.reduce((a, b) => a + b, 0);
    const columns = Math.max(shares.length, Math.min(state.view.fleet.ranks.length, 8), 1), slot = Math.min(w / columns, 70), each = Math.ceil(24 / slot), top = 14, bottom = height - 14, most = Math.max(...shares, 1);
    const bars = shares.flatMap((tokens, k) => {
      const y = bottom - (tokens / most) * (bottom - top), x = k * slot;
      return [s("rect", { x: x + 2, y, width: Math.max(slot - 4, 1), height: Math.max(bottom - y, tokens ? 1 : 0), rx: 1.5, fill: k ? "#1c7ed6" : "#a5d8ff" }, s("title", {}, `${many(tokens)} tokens are held by exactly ${plural(k + 1, "rank")}`)),
        s("text", { x: x + slot / 2, y: y - 3, "text-anchor": "middle" }, tokens && slot >= 34 ? short(tokens) : ""),
        s("text", { x: x + slot / 2, y: height - 3, "text-anchor": "middle" }, k % each ? "" : String(k + 1))];
    });
    el.shares.replaceChildren(s("svg", { viewBox: `0 0 ${w} ${height}`, role: "img", "aria-label": shares.map((tokens, k) => `${many(tokens)} tokens held by ${plural(k + 1, "rank")}`).join(", ") || "nothing is held" }, s("line", { x1: 0, x2: w, y1: bottom, y2: bottom, class: "axis" }), ...bars));
    el.sharesText.textContent = total ? `${sharedWords()} are held by more than one rank` : "nothing is held";
    el.sharesKeys.replaceChildren("tokens by how many ranks hold them");
  }

  /** Tokens in each kind of medium over time, all copies, stacked; distinct ones as a line; what was lost below. */
  function drawGrowth() {
    const [w, height] = page.chartSize(el.growth), frames = source.frames, n = Math.max(frames.length, 1), now = state.view.frame;
    const letters = FLEET_LETTERS.split("").filter((letter) => frames.some((f) => f.b[letter]));
    const columns = Math.min(n, Math.floor(w / 2)), top = 4, low = height - 3, bottom = height - 22;
    const total = frames.reduce((most, f) => Math.max(most, letters.reduce((sum, l) => sum + (f.b[l] ?? 0), 0), f.d), 1) * 1.05;
    const y = (v) => bottom - (v / total) * (bottom - top), at = (c) => Math.min(Math.floor(((c + 1) * n) / columns) - 1, n - 1);
    const x = (c) => ((w * c) / columns).toFixed(1);
    const layers = letters.map((letter, k) => {
      let up = "", down = "";
      for (let c = 0; c < columns; c++) {
        const b = frames[at(c)]?.b ?? {}, under = letters.slice(0, k).reduce((sum, l) => sum + (b[l] ?? 0), 0), over = under + (b[letter] ?? 0);
        up += `L${x(c)},${y(over).toFixed(1)}L${x(c + 1)},${y(over).toFixed(1)}`;
        down = `L${x(c + 1)},${y(under).toFixed(1)}L${x(c)},${y(under).toFixed(1)}` + down;
      }
      return s("path", { d: up ? `M${up.slice(1)}${down}Z` : "", fill: color(letter) });
    });
    let line = "";
    for (let c = 0; c < columns && frames.length; c++) line += `${c ? "L" : "M"}${x(c)},${y(frames[at(c)].d).toFixed(1)}L${x(c + 1)},${y(frames[at(c)].d).toFixed(1)}`;
    const gone = [];
    for (let c = 0; c < columns && frames.length; c++) {
      let sum = 0;
      for (let f = Math.floor((c * n) / columns); f <= at(c); f++) sum += frames[f].v;
      gone.push(sum);
    }
    const most = Math.max(...gone, 1);
    const bars = gone.flatMap((sum, c) => (sum ? [s("rect", { x: x(c), width: Math.max(w / columns - 0.5, 0.8), y: bottom + 3, height: Math.max((16 * sum) / most, 1.5), fill: "#e03131" }, s("title", {}, `${many(sum)} tokens left a medium`))] : []));
    el.growth.replaceChildren(s("svg", { viewBox: `0 0 ${w} ${height}`, role: "img", "aria-label": growthWords(letters) }, ...layers, s("path", { d: line, class: "line distinct" }), s("line", { x1: 0, x2: w, y1: bottom, y2: bottom, class: "axis" }), ...bars, ...page.cursor((w * (now + 1)) / n, top, low)));
    el.growthText.textContent = (state.rank === null ? "" : "all ranks: ") + growthWords(letters);
    const key = (text, background, kind = "") => h("span.key" + kind, {}, h("i", { style: { background } }), text);
    el.growthKeys.replaceChildren(...letters.map((letter) => key(`${letter} ${media()[letter]}`, color(letter))), key("each token counted once", "", ".distinct"), key("evicted, downwards", "#e03131"));
  }

  function growthWords(letters) {
    const f = source.frames[state.view.frame];
    if (!f) return "nothing yet";
    const parts = letters.filter((letter) => f.b[letter]).map((letter) => `${media()[letter]} ${short(f.b[letter])}`);
    return `${short(f.d)} tokens${parts.length ? "; all copies: " + parts.join(", ") : ""}${f.v ? `; ${short(f.v)} evicted here` : ""}`;
  }

  function drawWrong() {
    const { wrong } = state.view.fleet;
    el.wrong.hidden = !wrong;
    if (el.wrong.textContent !== wrong) el.wrong.textContent = wrong;
  }

  /** What the page says of a stream's node under the pointer. */
  function tipOf(node) {
    const by = {};
    for (const [rank, letter] of Object.entries(node.held)) (by[letter] ??= []).push(rank);
    const held = Object.entries(by).map(([letter, ranks]) => `${letter}: rank${ranks.length > 1 ? "s" : ""} ${ranks.length > 20 ? `${ranks.slice(0, 20).join(", ")} and ${ranks.length - 20} more` : ranks.join(", ")}`);
    return ` ${source.meta.styles[node.status]?.word || "cached"} · ${plural(node.body.size, "token")} in ${plural(node.blocks, "block")}${node.named ? ` · namespace ${node.named}` : ""} · ${held.join(" · ") || "held by no rank"}`;
  }

  /** Into the page, in place of what an engine of our own has there. */
  function mount(own) {
    if (!el.side.isConnected) {
      document.querySelector("main").append(el.side);
      routed() ? routing.mount() : document.querySelector(".low").prepend(el.growthCard);
      own.tiers.before(el.legend);
      own.say.before(el.wrong);
    }
    const cell = (letter, word) => h("span.strip", {}, h("i", { style: { background: color(letter) } }, letter === "DH" ? "D+H" : letter || "–"), word);
    el.letters.replaceChildren(cell("D", "GPU"), cell("H", "CPU"), cell("DH", "both"), cell("K", "disk"), cell("X", "external"), cell("?", "may be there"), cell("", "not held"));
  }

  // As page.js has its own: the place, its name, how it is drawn, and which parts of a view it needs.
  const parts = () => ({
    wrong: [() => el.wrong, "What is wrong", drawWrong, "fleet"], ranks: [() => el.ranks, "The table of ranks", drawRanks, "fleet"],
    shares: [() => el.shares, "What is shared", drawShares, "fleet"],
    ...(routed() ? routing.parts : { growth: [() => el.growth, "Growth", drawGrowth] }),
  });
  return { parts, mount, tipOf, charts: [el.shares, el.growth], drawTools: routing.drawTools };
}
