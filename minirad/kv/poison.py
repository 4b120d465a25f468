"""A debugging aid: freed slots are filled with NaN, so that any read of them shows at once.

A read of freed KV gives NaN logits instead of a plausible wrong word. engine.py finds this file by name where
the configuration says `poison_freed`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from minirad.kv.kv_pool import KVPool


def freed_pages(pool: KVPool, page_size: int) -> Callable[[Any], None]:
    """What fills the pages of freed slots (int64 numbers) with NaN."""

    def fill(slots: Any) -> None:
        pages = np.unique(slots // page_size)
        whole = (pages[:, None] * page_size + np.arange(page_size)).reshape(-1)
        pool.poison(torch.from_numpy(whole).to(pool.device))

    return fill
