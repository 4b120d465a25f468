"""Without a card: every kernel compiles for cards of three kinds, and keeps the rules of an early start.

Triton brings what it takes to compile for a card that is not there. The interpreter (test_interpreted.py)
says whether a kernel is right, and lets pass what does not compile; this says that it compiles and fits.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("triton") is None, reason="needs the package triton"),
]
HERE = Path(__file__).parent
# An A100, an H100 or H200, a new card for games: compute capability, and KiB that a program may share
CARDS = {80: 163, 90: 227, 120: 99}
# Kernels in front of, and behind, what waits for the host anyway
ORDINARY = {"_narrow", "_settle", "_weigh", "_draw", "_pages_kernel", "_to_host_kernel"}


@pytest.mark.parametrize("capability", CARDS)
def test_every_kernel_compiles_for_a_card_that_is_not_here(capability: int, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(HERE / "compile_only.py"), str(capability), str(CARDS[capability])],
        env={**os.environ, "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) > 50 and [row for row in rows if "never" in row] == []
    for row in rows:
        assert row["shared"] <= CARDS[capability] << 10, row
        # the cascade's queries fill all registers, and so do 64 programs' answers; some may lie in the cache
        full = row["kernel"] == "shared_attention" or row["alone"]
        one = row["kernel"] == "products_added" and capability == 120
        assert row["spilled"] <= (128 if full else 8 if one else 0), row
        early = capability >= 90 and row["kernel"] not in ORDINARY
        assert (row["early"], row["waits"]) == (early, int(early)), row
        assert row["writes_first"] == 0 < row["stores"], row  # before the kernel in front has ended
