// The panel of drafts: for each decoding request what was guessed, what the model accepted, and which slots came
// back; or what its grammar forced (jump-forward); and the pool's cells in which these tokens lie. Only pages of
// engines with drafts or jump-forward have it.
//
// page.js calls what `makeDrafts` returns; the data is viz/web/drafts.py's. All text goes through textContent (h).
import { h } from "./parts.js";

const FATES = {
  held: "a draft, not verified yet", accepted: "a draft that the model accepted", rejected: "a rejected draft: not given back yet",
  returned: "free: given back, its draft was rejected", last: "the model says the same, and the reply ends with it",
  forced: "forced by the grammar: computed with the others, not sampled",
};
const STAGES = { draft: "1 draft", verify: "2 verify", return: "3 roll back", force: "forced" };

const fateKey = (fate, word) => h("span.key", {}, h("i.draft", { "data-draft": fate }), word);

/** page: {source, state, light(requests or null)}. Returns {card, keys, mount, draw, paint, tipOf}. */
export function makeDrafts(page) {
  const { source, state } = page, el = {};
  let painted = [];

  const card = h("section.card.draftcard", { hidden: true },
    h("h2", {}, (el.title = h("span", {})), (el.stages = h("span.stages", {}, ...Object.entries(STAGES).map(([name, word]) => h("span", { "data-stage": name }, word)))),
      (el.keys = h("span.draftkeys", {}, ...Object.entries({ held: "drafted", accepted: "accepted", rejected: "rejected", forced: "forced" }).map(([fate, word]) => h("span.tok", { "data-fate": fate }, word)), h("span.tok.own", {}, "the model's own")))),
    (el.lines = h("div.draftlines")), (el.sums = h("p.draftsums")));
  const keys = h("div.keys.poolkeys", { hidden: true }, fateKey("held", "draft"), fateKey("accepted", "accepted"), fateKey("rejected", "rejected"), fateKey("returned", "given back"), fateKey("forced", "forced"));

  /** Shown or not, as the run on view has drafts or jump-forward; of either only with its own keys. */
  function mount() {
    const { speculative, jump_forward } = source.meta, on = Boolean(speculative || jump_forward);
    document.body.classList.toggle("drafting", on);
    document.body.classList.toggle("jumping", Boolean(jump_forward));
    card.hidden = keys.hidden = !on;
    el.title.textContent = speculative ? (jump_forward ? "Drafts and forced tokens" : "Drafts") : "Forced tokens";
    for (const each of [...el.stages.children, ...el.keys.children, ...keys.children]) {
      const { fate, stage, draft } = { ...each.dataset, draft: each.firstElementChild?.dataset.draft }, name = fate ?? stage ?? draft;
      each.hidden = name?.startsWith("force") ? !jump_forward : Boolean(name) && !speculative;
    }
  }

  function draw() {
    const drafts = state.view.drafts;
    if (!drafts) return;
    const { lines, sums, now } = drafts, byStep = new Set(lines.map((line) => line.step)).size > 1;
    for (const stage of el.stages.children) stage.classList.toggle("on", stage.dataset.stage === now);
    el.stages.classList.toggle("single", Boolean(now));
    const said = [
      ...(sums.drafted ? [`acceptance length ${sums.length.toFixed(2)}`] : []), `${sums.a_pass.toFixed(2)} tokens a forward pass`,
      ...(sums.forced ? [`${sums.forced} of ${sums.tokens} tokens forced`] : []), ...(sums.drafted ? [`${sums.accepted} of ${sums.drafted} drafted tokens accepted`] : []),
    ];
    el.sums.textContent = sums.drafted || sums.forced ? `so far: ${said.join(" · ")}` : source.meta.speculative ? "nothing drafted yet" : "nothing forced yet";
    el.sums.title = "Up to the moment on view. Acceptance length: tokens that a pass with drafts yields in the mean; a forward pass over three requests counts as three";
    el.lines.replaceChildren(...(lines.length ? lines.map((line) => lineOf(line, byStep)) : [h("p.hint", {}, state.view.frame < 0 ? "This is the start." : "No request is decoded here.")]));
    (el.lines.querySelector(".on") ?? (byStep ? el.lines.lastElementChild : el.lines.firstElementChild))?.scrollIntoView({ block: "nearest" });
  }

  function lineOf({ request, step, stage, tokens, own, say, now }, byStep) {
    const chip = ([text, fate]) => h("span.tok", { "data-fate": fate, title: FATES[fate] }, text);
    return h("div.draftline" + (now ? ".on" : "") + (stage === "none" ? ".idle" : ""), { "data-request": request, "data-stage": stage, onpointerenter: () => page.light([request]), onpointerleave: () => page.light(null) },
      h("b", {}, request), byStep ? h("small.step", {}, `step ${step}`) : "",
      h("span.toks", {}, ...tokens.map(chip), ...(own.length && tokens.length ? [h("i.then", {}, "→")] : []), ...own.map((text) => h("span.tok.own", { title: "the model said this itself" }, text))),
      h("span.fate", {}, say));
  }

  /** Marks the cells of drafts; `host` has been filled. */
  function paint(host) {
    for (const cell of painted) delete cell.dataset.draft;
    painted = [];
    const cells = host.children, per = cells.length > 1 ? cells[1].dataset.page - cells[0].dataset.page : 1;
    for (const [fate, request, runs] of state.view.drafts?.pages ?? [])
      for (const [first, count] of runs)
        for (let page = first; page < first + count; page++) {
          const cell = cells[Math.floor((page - 1) / per)];
          if (!cell || (fate === "returned" && "nR".includes(cell.dataset.owner[0] || " "))) continue; // somebody else has it by now
          Object.assign(cell.dataset, { draft: fate, drafter: request });
          painted.push(cell);
        }
  }

  /** What a cell is, if drafts lie there. */
  const tipOf = (cell) => (cell.dataset.draft ? `${cell.dataset.drafter}: ${FATES[cell.dataset.draft]}` : "");

  return { card, keys, mount, draw, paint, tipOf };
}
