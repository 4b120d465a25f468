"""Compiles every Triton kernel for a card that is not here, as the engine launches them, and launches none.

`python tests/gpu/compile_only.py 90 227` (a compute capability, and KiB that a program may share) prints a
JSON line for each kernel that it compiles, and for each that nothing launched. In a process of its own: in
the interpreter nothing compiles.
"""

# ruff: noqa: E402

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"  # before Triton is imported

import numpy as np
import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

from support import tiny_config
from test_ops import model_of

from minirad.attention import BatchEntry, build_metadata
from minirad.fast import early_launch, few_tokens, kernels
from minirad.fast.cascade_decode import CascadeDecode
from minirad.fast.fused_llama import FusedLlama
from minirad.fast.paged import TorchPagedAttention
from minirad.fast.sampling_kernels import draw
from minirad.fast.short_decode import LIMITS, MANY_REQUESTS, ShortDecode
from minirad.kv import KVPool
from minirad.model.llama import LlamaModel, random_weights

LLAMA_1B = {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "head_dim": 64,
            "num_key_value_heads": 8, "num_hidden_layers": 1, "vocab_size": 4096}  # fmt: skip


class Card:
    """What Triton asks its driver before it compiles."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_only(capability: int, shared: int) -> set[str]:
    """From now on a launch compiles for this card, prints, and is named in what is returned."""
    triton.runtime.driver.set_active(Card(capability))
    run, seen, launched = JITFunction.run, set[str](), set[str]()
    early = {"EARLY": True, "launch_pdl": True} if capability >= 90 else {"EARLY": False}
    early_launch.launch_options = lambda device: early
    for module in (kernels, sys.modules["minirad.fast.short_decode"]):
        module.launch_options = early_launch.launch_options  # type: ignore[attr-defined]
    sys.modules["minirad.fast.short_decode"].share_most = id  # type: ignore[attr-defined]
    few_tokens.room = lambda device: shared << 10

    def compiled(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        launched.add(self.__name__)
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        if kernel.hash not in seen:
            seen.add(kernel.hash)
            print(json.dumps(told(self.__name__, options, kernel)), flush=True)
        return kernel

    JITFunction.run = compiled
    return launched


def resources(kernel: Any) -> dict[str, int]:
    """Registers of a thread, and bytes that did not find room in them."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        said = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
    found = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", said.stdout))
    return {"registers": int(found["REG"]), "spilled": int(found["STACK"]) + int(found["LOCAL"])}


def told(name: str, options: dict[str, Any], kernel: Any) -> dict[str, Any]:
    """shared: bytes; writes_first: stores in front of where it waits for the kernel before it to end."""
    lines = kernel.asm["ptx"].splitlines()
    waits = [at for at, line in enumerate(lines) if "griddepcontrol.wait" in line]
    stores = [at for at, line in enumerate(lines) if re.search(r"\b(st|red|atom)\.(\w+\.)*global", line)]
    return {
        "kernel": name, "alone": bool(options.get("ALONE")),
        "early": bool(options.get("EARLY")), "waits": len(waits), "stores": len(stores),
        "writes_first": sum(at < waits[0] for at in stores) if waits else 0,
        "shared": kernel.metadata.shared, "warps": kernel.metadata.num_warps,
        **resources(kernel),
    }  # fmt: skip


def left_out(launched: set[str]) -> set[str]:
    """minirad/fast's kernels that were not launched, but for those that others call."""
    modules = [module for name, module in sys.modules.items() if name.startswith("minirad.fast.")]
    made = {
        each.__name__: each.raw_src
        for module in modules
        for each in vars(module).values()
        if isinstance(each, JITFunction) and each.fn.__module__ == module.__name__
    }
    body = "\n".join(line for source in made.values() for line in source if not line.startswith("def "))
    return {name for name in made if name not in launched and not re.search(rf"\b{name}\(", body)}


# ---------------------------------------------------------------------- what the engine launches


def steps(plain: LlamaModel) -> None:
    """Of one token, of a few by each of the cuts that fit, and of more than those."""
    model = FusedLlama(plain)
    rows, pool = np.arange(1, 201)[:, None], model.new_pool(201)
    for count in (1, *few_tokens.CUTS, 200):
        entries = [BatchEntry(row, 0, 1) for row in range(count)]
        meta = build_metadata(rows, entries, 1, torch.device("cpu"))
        every = torch.arange(count)
        tokens, backend = torch.zeros(count, dtype=torch.int64), TorchPagedAttention()
        model.forward(tokens, meta, pool, backend, every)
        model.compute(tokens.int(), meta, pool, backend)


def attention(dim: int, heads: int, kv_heads: int, requests: int, page: int, tokens: int) -> None:
    pool = KVPool(1, 64 * page, kv_heads, dim, dtype=torch.bfloat16, device="cpu")
    q = torch.zeros(requests, heads, dim, dtype=torch.bfloat16)
    lists = [torch.zeros(size, dtype=torch.int32) for size in (requests + 1, 64, requests)]
    own = ShortDecode(heads, kv_heads, dim, dim**-0.5, *lists, page, tokens)
    table, rows = torch.zeros((requests, 64), dtype=torch.int32), lists[2]
    for made in (own, CascadeDecode(own, table, rows, torch.ones(1, dtype=torch.int32))):
        made.run(0, q, pool, dim**-0.5)


def choices(dtype: torch.dtype) -> None:
    logits = torch.zeros(3, 128256, dtype=dtype)
    greedy: Tensor = kernels.greedy(logits)
    rows, numbers = torch.arange(3), torch.ones(3, 4, dtype=torch.float64)
    for limits in (True, False):
        draw(logits, rows, numbers, greedy, top_k=limits, top_p=limits)


def pages() -> None:
    table, indptr, slots = (torch.zeros(shape, dtype=torch.int32) for shape in ((4, 64), 5, 4))
    kernels.fill_pages(table, slots, indptr, slots, torch.zeros(256, dtype=torch.int32), 16, 64, 0)
    chosen = torch.zeros(2, 4, dtype=torch.float64)
    kernels.fill_pages(table, slots, indptr, slots, table.flatten(), 16, 64, 0, chosen[0], slots)
    kernels.to_host(chosen, torch.zeros_like(chosen))


def main(capability: int, shared: int) -> None:
    launched = compile_only(capability, shared)
    config = tiny_config(**LLAMA_1B)
    steps(LlamaModel(config, random_weights(config, 0, dtype=torch.bfloat16, device="cpu")))
    wide = tiny_config(**{**LLAMA_1B, "num_attention_heads": 16, "head_dim": 128})
    steps(LlamaModel(wide, random_weights(wide, 0, dtype=torch.bfloat16, device="cpu")))
    steps(model_of("few, biases", torch.float16, "cpu"))
    steps(model_of("odd sizes", torch.bfloat16, "cpu"))
    sizes = (
        (64, 1, 16), (64, 4, 1), (64, 17, 16), (64, 33, 16), (64, MANY_REQUESTS + 1, 16), (128, 4, 16),
        (128, 17, 16), (256, 64, 1),
    )  # fmt: skip
    for dim, requests, page in sizes:
        for tokens in (*sorted({limit for limits in LIMITS.values() for limit in limits}), 0):
            attention(dim, 32, 8, requests, page, tokens)
    choices(torch.bfloat16)
    choices(torch.float32)
    pages()
    for name in sorted(left_out(launched)):
        print(json.dumps({"kernel": name, "never": True}))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
