"""Wrong solutions of lesson 05, as learners write them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lessons.grading import Mutant

TRUTH: dict[str, Any] = {
    "tokens_from_cache": 16,
    "pages_from_cache": 1,
    "tokens_computed": 24,
    "pages_of_its_own": 2,
    "claim_holds": False,
}


def _claims(**wrong: Any) -> dict[str, Callable[..., Any]]:
    return {"claim_of_the_tail": lambda: TRUTH | wrong}


SLOTS = "slots = torch.as_tensor(pages)[position // page_size] * page_size + position % page_size"
ASKING = "asking = torch.arange(kv_len - tokens, kv_len)"
HIDE = 'scores = scores.masked_fill((position > asking[:, None])[:, None, :], float("-inf"))'
LSE = "scores.logsumexp(dim=-1)"
COUNT = "count = -(-length // page_size)"
INDPTR = "indptr = np.concatenate(([0], np.cumsum(count)))"
LINES = "rows[row, :stop:page_size] // page_size for row, stop"
LAST = "last = length - (count - 1) * page_size"
MERGED = "return weight_a * out_a + weight_b * out_b, lse"
ADDED = "lse = torch.logaddexp(lse_a, lse_b)"
MUTANTS = [
    Mutant("gather_attention", "the pool read in order, no page table", old=SLOTS, new="slots = position"),
    Mutant(
        "gather_attention",
        "pages in rising order",
        old="torch.as_tensor(pages)[",
        new="torch.as_tensor(sorted(pages))[",
    ),
    Mutant(
        "gather_attention",
        "page numbers taken for slots",
        old=SLOTS,
        new="slots = torch.as_tensor(pages)[position // page_size] + position % page_size",
    ),
    Mutant(
        "gather_attention",
        "the last page is read to its end",
        old="position = torch.arange(kv_len)",
        new="position = torch.arange(-(-kv_len // page_size) * page_size)",
    ),
    Mutant(
        "gather_attention",
        "all pages of the line are read",
        old="position = torch.arange(kv_len)",
        new="position = torch.arange(len(pages) * page_size)",
    ),
    Mutant("gather_attention", "queries see what comes later", old=HIDE, new="pass"),
    Mutant(
        "gather_attention",
        "queries do not see themselves",
        old="position > asking[:, None]",
        new="(position >= asking[:, None]) & (position > 0)",
    ),
    Mutant(
        "gather_attention",
        "the first query is at position 0",
        old=ASKING,
        new="asking = torch.arange(tokens)",
    ),
    Mutant(
        "gather_attention",
        "the first query is one too early",
        old=ASKING,
        new="asking = torch.arange(kv_len - tokens - 1, kv_len - 1).clamp(min=0)",
    ),
    Mutant(
        "gather_attention",
        "heads repeated in the wrong order",
        old="k = k_pool[slots].repeat_interleave(group, dim=1)",
        new="k = k_pool[slots].repeat(1, group, 1)",
    ),
    Mutant(
        "gather_attention",
        "values of the first head for all",
        old="v = v_pool[slots].repeat_interleave(group, dim=1)",
        new="v = v_pool[slots][:, :1].repeat(1, heads, 1)",
    ),
    Mutant("gather_attention", "no scale", old=" * scale", new=""),
    Mutant("gather_attention", "its own scale", old=" * scale", new=" * q.shape[-1] ** -0.5"),
    Mutant(
        "gather_attention",
        "softmax over the heads",
        old="scores.softmax(dim=-1)",
        new="scores.softmax(dim=1)",
    ),
    Mutant("gather_attention", "keys for values", old="v = v_pool[slots]", new="v = k_pool[slots]"),
    Mutant(
        "gather_attention", "lse to the base 2", old=LSE, new="scores.logsumexp(dim=-1) / 0.6931471805599453"
    ),
    Mutant(
        "gather_attention", "exp without the maximum taken out", old=LSE, new="scores.exp().sum(dim=-1).log()"
    ),
    Mutant(
        "gather_attention",
        "lse before the mask",
        old=HIDE,
        new="free = scores.logsumexp(dim=-1)\n    " + HIDE + "\n    return "
        'torch.einsum("ths,shd->thd", scores.softmax(dim=-1), v), free',
    ),
    Mutant(
        "gather_attention",
        "everything masked over the whole pool",
        old="k = k_pool[slots]",
        new="chosen = torch.zeros(len(k_pool), 1, 1)\n    chosen[slots] = 1\n"
        "    v_pool = v_pool + 0 * (v_pool * chosen).sum()\n    k = k_pool[slots]",
    ),
    Mutant("ragged_pages", "rounded down", old=COUNT, new="count = np.maximum(length // page_size, 1)"),
    Mutant(
        "ragged_pages",
        "one page too many when the last is full",
        old=COUNT,
        new="count = length // page_size + 1",
    ),
    Mutant("ragged_pages", "no 0 in front", old=INDPTR, new="indptr = np.cumsum(count)"),
    Mutant(
        "ragged_pages", "counts, not a running sum", old=INDPTR, new="indptr = np.concatenate(([0], count))"
    ),
    Mutant(
        "ragged_pages",
        "tokens, not pages",
        old=INDPTR,
        new="indptr = np.concatenate(([0], np.cumsum(length)))",
    ),
    Mutant("ragged_pages", "a full last page counts 0", old=LAST, new="last = length % page_size"),
    Mutant(
        "ragged_pages", "what is free of the last page", old=LAST, new="last = count * page_size - length + 1"
    ),
    Mutant("ragged_pages", "index of the last slot", old=LAST, new="last = (length - 1) % page_size"),
    Mutant("ragged_pages", "slots, not pages", old=LINES, new="rows[row, :stop:page_size] for row, stop"),
    Mutant("ragged_pages", "a page per token", old=LINES, new="rows[row, :stop] // page_size for row, stop"),
    Mutant(
        "ragged_pages",
        "rows in order, whatever the batch",
        old="in zip(row_ids, lengths, strict=True)",
        new="in enumerate(lengths)",
    ),
    Mutant(
        "ragged_pages",
        "padded to the longest",
        old=LINES,
        new="rows[row, : max(lengths) : page_size] // page_size for row, stop",
    ),
    Mutant("merge", "the mean of both", old=MERGED, new="return (out_a + out_b) / 2, lse"),
    Mutant("merge", "added up", old=MERGED, new="return out_a + out_b, lse"),
    Mutant("merge", "weights swapped", old=MERGED, new="return weight_b * out_a + weight_a * out_b, lse"),
    Mutant(
        "merge",
        "lse as the weight",
        old=MERGED,
        new="return (lse_a[..., None] * out_a + lse_b[..., None] * out_b) / (lse_a + lse_b)[..., None], lse",
    ),
    Mutant(
        "merge",
        "the larger lse is kept",
        old=MERGED,
        new="return weight_a * out_a + weight_b * out_b, torch.maximum(lse_a, lse_b)",
    ),
    Mutant(
        "merge", "lse added up", old=MERGED, new="return weight_a * out_a + weight_b * out_b, lse_a + lse_b"
    ),
    Mutant(
        "merge", "exp without the maximum taken out", old=ADDED, new="lse = (lse_a.exp() + lse_b.exp()).log()"
    ),
    Mutant(
        "merge",
        "the larger side wins",
        old=MERGED,
        new="return torch.where((lse_a > lse_b).unsqueeze(-1), out_a, out_b), lse",
    ),
    Mutant(
        "merge",
        "the maximum of a -inf side is taken out",
        old=ADDED,
        new="lse = lse_a + (1 + (lse_b - lse_a).exp()).log()",
    ),
    Mutant(
        "merge",
        "one weight for all heads",
        old="weight_b = (lse_b - lse).exp().unsqueeze(-1)",
        new="weight_b = (lse_b - lse).exp().mean(dim=1, keepdim=True).unsqueeze(-1)",
    ),
    Mutant(
        "merge",
        "written into the first result",
        old=MERGED,
        new="out_a.mul_(weight_a).add_(weight_b * out_b)\n    return out_a, lse",
    ),
    Mutant("claim_of_the_tail", "believes the claim", replaces=_claims(claim_holds=True)),
    Mutant(
        "claim_of_the_tail",
        "shares all that is alike",
        replaces=_claims(tokens_from_cache=20, tokens_computed=20),
    ),
    Mutant("claim_of_the_tail", "counts the torn page", replaces=_claims(pages_from_cache=2)),
    Mutant(
        "claim_of_the_tail", "shares up to the end of the torn page", replaces=_claims(tokens_from_cache=32)
    ),
    Mutant("claim_of_the_tail", "computes what differs", replaces=_claims(tokens_computed=20)),
    Mutant("claim_of_the_tail", "one token more is computed", replaces=_claims(tokens_computed=25)),
    Mutant("claim_of_the_tail", "pages rounded down", replaces=_claims(pages_of_its_own=1)),
    Mutant("claim_of_the_tail", "all pages are its own", replaces=_claims(pages_of_its_own=3)),
    Mutant(
        "claim_of_the_tail",
        "one answer is missing",
        replaces={"claim_of_the_tail": lambda: {k: v for k, v in TRUTH.items() if k != "tokens_computed"}},
    ),
]


def _instead(name: str, about: str, code: str) -> Mutant:
    """`code` defines `name`; the right function is at hand as _right_<name>."""
    return Mutant(name, about, f"def {name}(", f"{code.strip()}\n\n\ndef _right_{name}(")


K_READ = "k = k_pool[slots].repeat_interleave(group, dim=1)"
V_READ = "v = v_pool[slots].repeat_interleave(group, dim=1)"
SCORES = 'scores = torch.einsum("thd,shd->ths", q, k) * scale'
OUT = 'return torch.einsum("ths,shd->thd", scores.softmax(dim=-1), v), scores.logsumexp(dim=-1)'
MUTANTS += [
    # ------------------------------------------------------------ gather_attention
    # scores of about -300 for all that a query sees
    *(
        Mutant("gather_attention", f"hidden keys get {low}", old='float("-inf")', new=low)
        for low in ("-100.0", "-1e4")
    ),
    Mutant(
        "gather_attention",
        "the largest score of all queries is taken off",
        old=OUT,
        new="top = scores.max()\n    weights = (scores - top).exp()\n    total = weights.sum(dim=-1)\n"
        '    return torch.einsum("ths,shd->thd", weights / total.unsqueeze(-1), v), total.log() + top',
    ),
    # pages above 255; slots above 32767; above 2048
    Mutant(
        "gather_attention",
        "pages are bytes",
        old="torch.as_tensor(pages)[",
        new="torch.as_tensor(pages).to(torch.uint8).long()[",
    ),
    Mutant(
        "gather_attention", "slots are int16", old=SLOTS, new=SLOTS + "\n    slots = slots.short().long()"
    ),
    # more than 64 tokens
    Mutant(
        "gather_attention",
        "sees the last 64 tokens and no more",
        old="position > asking[:, None]",
        new="(position > asking[:, None]) | (position <= asking[:, None] - 64)",
    ),
    # two layers or two requests one after the other: same pages, other pool
    Mutant(
        "gather_attention",
        "gathers once per page list, whatever is in the pool",
        old=f"    {K_READ}\n    {V_READ}\n",
        new="    seen = gather_attention.__dict__.setdefault('seen', {})\n"
        "    key = (tuple(int(p) for p in pages), kv_len, page_size, tuple(k_pool.shape), "
        "heads)\n    if key not in seen:\n"
        "        seen[key] = (k_pool[slots].repeat_interleave(group, dim=1), "
        "v_pool[slots].repeat_interleave(group, dim=1))\n    k, v = seen[key]\n",
    ),
    # ------------------------------------------------------------ ragged_pages
    # page numbers above 32767; more than 127 pages, or 32767
    Mutant(
        "ragged_pages",
        "indices are int16",
        old="np.concatenate(lines).astype(np.int32)",
        new="np.concatenate(lines).astype(np.int16)",
    ),
    Mutant(
        "ragged_pages",
        "indices through float32",
        old=LINES,
        new="(rows[row, :stop:page_size].astype(np.float32) // page_size).astype(np.int64) for row, stop",
    ),
    Mutant("ragged_pages", "indptr is int16", old="indptr.astype(np.int32)", new="indptr.astype(np.int16)"),
    Mutant("ragged_pages", "last_page_len is int8", old="last.astype(np.int32)", new="last.astype(np.int8)"),
    # pages of 3
    Mutant(
        "ragged_pages",
        "pages by a shift: for powers of two only",
        old=LINES,
        new="rows[row, :stop:page_size] >> (page_size.bit_length() - 1) for row, stop",
    ),
    Mutant(
        "ragged_pages",
        "the last length by a mask: for powers of two only",
        old=LAST,
        new="last = ((length - 1) & (page_size - 1)) + 1",
    ),
    _instead(
        "ragged_pages",
        "remembers batches",
        """
_KNOWN = {}


def ragged_pages(rows, row_ids, lengths, page_size):
    key = (tuple(row_ids), tuple(lengths), page_size, rows.shape)
    if key not in _KNOWN:
        _KNOWN[key] = _right_ragged_pages(rows, row_ids, lengths, page_size)
    return _KNOWN[key]
""",
    ),
    # ------------------------------------------------------------ merge
    Mutant(
        "merge",
        "one row without keys on the right: nothing is taken from there",
        old=ADDED,
        new="if bool((lse_b == float('-inf')).any()):\n"
        "        return out_a.clone(), lse_a.clone()\n    lse = torch.logaddexp(lse_a, lse_b)",
    ),
    Mutant(
        "merge",
        "one row without keys on the left: nothing is taken from there",
        old=ADDED,
        new="if bool((lse_a == float('-inf')).any()):\n"
        "        return out_b.clone(), lse_b.clone()\n    lse = torch.logaddexp(lse_a, lse_b)",
    ),
    Mutant(
        "merge",
        "no keys stands for an lse of -100",
        old=ADDED,
        new="lse_a, lse_b = lse_a.clamp(min=-100), lse_b.clamp(min=-100)\n"
        "    lse = torch.logaddexp(lse_a, lse_b)",
    ),
    # +-1000 in one call
    Mutant(
        "merge",
        "the largest lse of all is taken off",
        old=ADDED,
        new="top = torch.maximum(lse_a.max(), lse_b.max())\n"
        "    lse = ((lse_a - top).exp() + (lse_b - top).exp()).log() + top",
    ),
    # lse 0 and -4.5
    Mutant(
        "merge",
        "a side that is more than 4 smaller is left out",
        old=ADDED,
        new="far = (lse_a - lse_b).abs() > 4\n"
        "    lse = torch.where(far, torch.maximum(lse_a, lse_b), torch.logaddexp(lse_a, "
        "lse_b))\n    lse_a = torch.where(far & (lse_a < lse_b), float('-inf'), lse_a)\n"
        "    lse_b = torch.where(far & (lse_b < lse_a), float('-inf'), lse_b)",
    ),
]
