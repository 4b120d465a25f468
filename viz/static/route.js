// Where a router sent requests: what it saw of each worker, why it chose one, and what the best one would have been.
//
// fleet.js calls what `makeRoutes` returns. All text goes through textContent (h).
import { button, h, percent, plural, s } from "./parts.js";

const WORKER_WORDS = { starting: "starting", ready: "ready", slow: "slow", dead: "dead", back: "back" };
const OUTCOMES = { "": "on its way", finished: "answered", moved: "not answered: it went elsewhere", cancelled: "its client went away", failed: "its client was told of an error" };
const BAR = 54; // width of a bar in its own units

/** page: {source, state, command(name, body)}. Returns what fleet.js draws of it: {parts, mount, workerCells}. */
export function makeRoutes(page) {
  const { source, state } = page, el = {};
  const routes = () => state.view.routes;
  const many = (n) => n.toLocaleString("en");

  el.policy = h("select", { title: "Who decides from now on", "aria-label": "Routing policy", onchange: () => page.command("route", { policy: el.policy.value }) });
  el.again = button("send again", "The workload once more", () => page.command("send"));
  el.flush = button("flush", "Empty every worker's tree", () => page.command("flush"));
  el.tools = h("span.routetools", { hidden: true }, el.policy, el.again, el.flush);
  el.routesText = h("p.reason", { role: "note" });
  el.table = h("table");
  el.list = h("div.routelist", {}, el.table);
  el.keys = h("div.keys", {}, h("span.key", {}, h("i", { style: { background: "#51cf66" } }), "match: how much of the prompt the router expects there"),
    h("span.key", {}, h("i", { style: { background: "#ffa94d" } }), "load: requests in flight"), h("span.key.limitkey", {}, h("i"), "threshold"), h("span", {}, "best: what the best worker really had when the request was sent, or the chosen one when it began"));
  el.card = h("section.card.routes", {}, h("h2", {}, "Where requests went", el.tools), el.routesText, el.list, el.keys);
  el.sums = h("table");
  el.sumsText = h("small");
  el.sumsCard = h("section.card.policies", {}, h("h2", {}, "By policy", el.sumsText), (el.sumsHost = h("div.ranktable", {}, el.sums)));

  /** One bar of `value` in `most`, with a line at `limit` if it lies within. */
  function bar(value, most, limit, kind, y) {
    const width = (v) => (BAR * Math.min(Math.max(v, 0), most)) / Math.max(most, 1);
    return [s("rect", { x: 0, y, width: BAR, height: 5, class: "track" }), s("rect", { x: 0, y, width: width(value), height: 5, class: kind }),
      ...(limit !== null && limit <= most ? [s("line", { x1: width(limit), x2: width(limit), y1: y - 1, y2: y + 6, class: "limit" })] : [])];
  }

  /** What the router saw of one worker: its match over its load. */
  function workerCell(r, k, mostLoad) {
    const match = r.matches[k] ?? 0, load = r.loads[k] ?? 0, name = routes().workers[k]?.name ?? String(k);
    const title = `${name}: ${many(match)} of ${plural(r.tokens, "token")} expected there, ${plural(load, "request")} in flight${r.worker === k ? "; chosen" : ""}`;
    return h("td.seen" + (r.worker === k ? ".chosen" : ""), { title },
      s("svg", { viewBox: `0 0 ${BAR} 15`, width: BAR, height: 15, "aria-hidden": "true" }, ...bar(match, r.tokens, r.match_limit, "match", 1), ...bar(load, mostLoad, r.load_limit, "load", 9)),
      h("small", {}, `${many(match)}·${load}`));
  }

  function drawRoutes() {
    const { last, workers } = routes();
    const tell = (r) => el.routesText.replaceChildren(...(r ? [h("b", {}, r.id), " goes to ", h("b", {}, workers[r.worker]?.name ?? String(r.worker)), `: ${r.reason}`] : ["no request has come yet"]));
    tell(last[0]);
    const mostLoad = Math.max(4, ...last.flatMap((r) => [...r.loads, r.load_limit ?? 0]));
    const heads = ["request", "went to", ...workers.map((w) => w.name), "found", "best", "regret"];
    if (!el.table.isConnected) el.list.replaceChildren(el.table);
    el.table.replaceChildren(h("tr", {}, ...heads.map((head) => h("th", {}, head))), ...last.map((r) => {
      const found = r.outcome === "finished" ? `${many(r.cached)}/${many(r.tokens)}` : r.outcome || "…", known = (n) => (n === null ? "?" : many(n));
      return h("tr", { "data-request": r.id, title: `${r.policy}: ${r.reason}`, onpointerenter: () => tell(r), onpointerleave: () => tell(last[0]) },
        h("th", {}, r.id), h("td.to", {}, workers[r.worker]?.name ?? String(r.worker)), ...workers.map((_, k) => workerCell(r, k, mostLoad)),
        h("td.n" + (["", "finished"].includes(r.outcome) ? "" : ".bad"), { title: OUTCOMES[r.outcome] ?? r.outcome }, found),
        h("td.n", { title: "prompt tokens that the best worker really had when it was sent; of an answered one at least what was found" }, known(r.best)), h("td.n" + (r.regret > 0 ? ".bad" : ""), { title: "how many of them the chosen one had not when it was sent, and did not find when it began either" }, known(r.regret)));
    }));
    drawTools();
  }

  /** What can be changed while it runs; a recording has none of it. */
  function drawTools() {
    const { route } = source.status;
    el.tools.hidden = !route;
    if (!route) return;
    if (el.policy.childElementCount !== route.policies.length) el.policy.replaceChildren(...route.policies.map((name) => h("option", { value: name }, name)));
    if (document.activeElement !== el.policy) el.policy.value = route.policy;
    el.again.disabled = route.sending || !route.ready;
    el.flush.disabled = !route.ready;
  }

  function drawSums() {
    const { sums } = routes(), heads = ["policy", "tries", "hit rate", "balance", "regret", "moved", "no answer"];
    const titles = ["", "how often it sent a request to a worker: one that moved is sent again", "prompt tokens that the workers found in their trees", "the most loaded worker's share of prompt tokens to compute, over the mean: 1.00 is even", "prompt tokens that another worker had when a request was sent, and the chosen one not, nor found when it began; all tries together", "tries after which the request went elsewhere, if there was another worker: this one died or was full", "tries that were the last, and without a whole answer: the worker broke off, or the client left"];
    if (!el.sums.isConnected) el.sumsHost.replaceChildren(el.sums);
    el.sums.replaceChildren(h("tr", {}, ...heads.map((head, k) => h("th" + (k ? ".n" : ""), { title: titles[k] }, head))), ...sums.map((sum) =>
      h("tr" + (sum.policy === routes().policy ? ".picked" : ""), {}, h("th", {}, sum.policy), h("td.n", {}, many(sum.tries)), h("td.n", {}, percent(sum.cached, sum.tokens)),
        h("td.n", {}, sum.balance === null ? "–" : sum.balance.toFixed(2)), h("td.n", {}, sum.regret === null ? "?" : many(sum.regret)), h("td.n", {}, many(sum.moved)), h("td.n" + (sum.failed ? ".bad" : ""), {}, many(sum.failed)))));
    el.sumsText.textContent = sums.length ? "so far" : "nothing yet";
  }

  /** The head of the table of ranks, and the cells of one, where ranks are workers. */
  const workerHeads = ["worker", "state", "in flight", "sent"];
  function workerCells(rank) {
    const w = routes().workers.find((each) => each.rank === rank);
    if (!w) return [h("th", {}, String(rank)), h("td"), h("td.n"), h("td.n")];
    return [h("th", {}, w.name), h("td", { title: w.why }, h("span.state", { "data-state": w.state }, h("i.dot"), WORKER_WORDS[w.state] ?? w.state)),
      h("td.n", {}, many(w.load)), h("td.n", { title: `${many(w.cached)} of ${plural(w.tokens, "prompt token")} were cached` }, many(w.requests))];
  }

  const nameOf = (rank) => routes().workers.find((each) => each.rank === rank)?.name ?? `worker ${rank}`;

  function mount() {
    if (el.card.isConnected) return;
    document.body.classList.add("routed");
    document.querySelector(".low").prepend(el.card);
    document.querySelector(".fleetside .ranks").after(el.sumsCard);
  }

  const parts = {
    routes: [() => el.list, "Where requests went", drawRoutes, "routes"], policies: [() => el.sumsHost, "The sums", drawSums, "routes"],
  };
  return { parts, mount, drawTools, workerHeads, workerCells, nameOf };
}
