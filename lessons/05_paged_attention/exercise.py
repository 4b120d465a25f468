"""Lesson 05: attention that reads scattered pages. Fill in the functions; README.md says what and why.

    pytest lessons/05_paged_attention        grades this file

Shapes are written in brackets: T queries, H query heads, K key/value heads (H is a multiple of K), D
numbers per head. Query head h belongs to key/value head h // (H // K).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from torch import Tensor


def gather_attention(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    pages: Sequence[int],
    kv_len: int,
    page_size: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Causal attention of one request whose keys and values lie in scattered pages.

    q: float [T, H, D], the queries of the request's LAST T tokens, positions kv_len - T to kv_len - 1.
    k_pool, v_pool: float [num_slots, K, D], one layer of the pool. Token i of the request lies in slot
        pages[i // page_size] * page_size + i % page_size.
    pages: the request's line of the page table, in order; there may be more entries than it needs.
    kv_len: how many tokens the request has, T of them new.
    scale: factor of q . k before the softmax; any number, so scores may be large (+-100,000).

    A query at position p sees the tokens 0 to p. Other slots are not its business: they may hold anything,
    NaN too (and 0 * NaN is NaN: a mask over all slots is not enough).

    Returns (out, lse):
        out [T, H, D]: softmax(scale * q . k) @ v
        lse [T, H]: log(sum(exp(scale * q . k))) over the tokens that the query sees (natural logarithm)
    Nothing that was given is changed.
    """
    raise NotImplementedError("todo: gather_attention")


def ragged_pages(
    rows: npt.NDArray[np.int64], row_ids: Sequence[int], lengths: Sequence[int], page_size: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """The page table without padding, as FlashInfer wants it.

    rows: int64 [max_rows, max_context]; rows[r, i] is the slot of token i of the request in row r; token i
        lies at offset i % page_size of its page. What a row holds beyond its length means nothing.
    row_ids, lengths: the batch of B requests; request b is in row row_ids[b] and has lengths[b] >= 1 tokens.

    `rows` is not changed. Returns three integer arrays (indptr, indices, last_page_len):
        indptr [B + 1]: request b's pages are indices[indptr[b]:indptr[b + 1]]; indptr[0] == 0
        indices [indptr[-1]]: all page numbers, request after request
        last_page_len [B]: how many slots of each request's last page are used, 1 to page_size
    """
    raise NotImplementedError("todo: ragged_pages")


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Joins two results of attention, of the same queries over DIFFERENT keys, into the one over all keys.

    out_a, out_b: [T, H, D], each a softmax over its own keys only.
    lse_a, lse_b: [T, H], the log of each one's sum of exp(scores). They may be large (+-1000): exp of them
        overflows, the exp of a difference to the larger one does not. -inf on one side means: no keys there,
        for this query and head (another one may have keys on that side).

    Returns (out, lse) over both sets of keys. Nothing that was given is changed.
    """
    raise NotImplementedError("todo: merge")


def claim_of_the_tail() -> dict[str, int | bool]:
    """A published claim, and what the engine says.

    The cache has pages of 16 tokens. A prompt of 40 tokens is in the tree. A second prompt of 40 tokens
    agrees with it in its first 20. A text about this says:

        "20 matched tokens: the second request reads page 0 and 4 tokens of page 1 from the cache."

    Return a dictionary with these keys:
        "tokens_from_cache"   tokens that the second request does not compute
        "pages_from_cache"    pages that it shares with the first
        "tokens_computed"     tokens of the second prompt that are computed
        "pages_of_its_own"    new pages that it needs for its prompt
        "claim_holds"         True or False: are 4 tokens of a second page shared?
    """
    raise NotImplementedError("todo: claim_of_the_tail")
