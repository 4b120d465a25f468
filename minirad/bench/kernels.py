"""What a decode step takes without the engine: each way of computing it, captured in a CUDA graph.

    python -m minirad bench kernels [--json] [--shape llama-3.2-1b] [--tiles] [--cuts 16]

- steps: all of a model but attention, by batch size: in plain torch, with the fused kernels between torch's
  products, and for up to 128 tokens with the kernels of fast/one_token.py and few_tokens.py; as
  milliseconds, and as a share of what reading the weights at the speed of a copy takes;
- attention: one layer of it by requests and tokens, FlashInfer's and fast/short_decode.py's;
- cascade: one layer of attention to 100 tokens of one's own and so many that all share, read by each
  request and read once for all (fast/cascade_decode.py);
- with --tiles: the one-token kernels are cut in other ways, one matrix after the other, each tried in the
  whole step; the best stays. The figures in `Tiles` come from such a search;
- with --cuts 16: the same for the kernels of up to so many tokens, and the figures in `CUTS` (without
  attention, whose programs take room beside these: LOG.md says how the last ones were found).

Needs an NVIDIA GPU with Triton. Does not look at what the host does meanwhile (`bench gpu`).
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minirad.attention.metadata import AttentionMetadata, BatchEntry, build_metadata
from minirad.attention.radix_attention import AttentionBackend
from minirad.bench.dummy import SHAPES, dummy_model
from minirad.bench.gpu import copy_bandwidth, weight_bytes
from minirad.bench.tables import table
from minirad.fast.few_tokens import CUTS, FEW, Cut, Cuts, FewTokens, room
from minirad.fast.flashinfer import FlashInferAttention, what_is_missing
from minirad.fast.fused_llama import FusedLlama, fused_runs
from minirad.fast.one_token import OneToken, Tile, Tiles
from minirad.kv.kv_pool import KVPool
from minirad.model.llama import LlamaModel

Row = dict[str, Any]

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CASES = ((1, 300), (1, 2000), (4, 300), (16, 150), (16, 600), (64, 150), (128, 150), (256, 600))
SHARED_CASES = (
    (256, 128), (256, 256), (256, 512), (256, 1024), (256, 2000), (128, 256), (128, 512), (128, 1024),
    (64, 512), (64, 1024), (64, 2000), (16, 2000), (16, 4000), (8, 16000),
)  # fmt: skip
OWN = 100  # tokens of each request beside the shared ones
ROWS, WARPS, TURNS = (1, 2, 4, 8, 16), (2, 4, 8, 16), (1, 2, 4)
SPLITS, FIRST, BLOCKS, STAGES = (1, 2, 4, 8), (64, 128, 256, 512), (64, 128), (2, 3, 4, 5, 6)
TOKENS = (16, 32, 64, 128)  # of a program
# A thread that holds fewer elements of a matrix asks for too little at a time, one with more runs out of
# registers.
ELEMENTS_OF_A_THREAD = (16, 128)


class NoAttention:
    """A backend that gives the queries back: what is left is the model's own time."""

    name = "none"
    reads_pool_only = True

    def plan(self, metadata: AttentionMetadata, pool: KVPool) -> None: ...

    def write(
        self, layer_id: int, metadata: AttentionMetadata, k: Tensor, v: Tensor, pool: KVPool
    ) -> None: ...

    def run(self, layer_id: int, q: Tensor, pool: KVPool, scale: float) -> Tensor:
        return q


def captured_ms(call: Callable[[], Any], replays: int = 20, rounds: int = 3) -> float:
    """Milliseconds of one replay of `call`, captured: the median of `rounds` means."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), torch.inference_mode():
        for _ in range(2):  # compiles kernels, chooses algorithms
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode(), torch.cuda.graph(graph):
        call()
    graph.replay()
    times: list[float] = []
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / replays)
    return statistics.median(times)


def decode_batch(requests: int, tokens: int, page_size: int, device: torch.device) -> AttentionMetadata:
    """So many requests, each of which decodes its last token of `tokens`; pages in random order."""
    pages = -(-tokens // page_size)
    order = 1 + np.random.default_rng(0).permutation(requests * pages)
    rows = (order[:, None] * page_size + np.arange(page_size)).reshape(requests, -1)
    return build_metadata(
        rows, [BatchEntry(row, tokens - 1, tokens) for row in range(requests)], page_size, device
    )


def step_call(model: LlamaModel, metadata: AttentionMetadata, pool: KVPool) -> Callable[[], Tensor]:
    tokens = torch.arange(metadata.num_tokens, device=model.device)
    backend = NoAttention()
    if isinstance(model, FusedLlama):
        return lambda: model.compute(tokens, metadata, pool, backend)
    return lambda: model.forward(tokens, metadata, pool, backend, tokens)


def steps(model: LlamaModel, weights_ms: float, measure: Callable[[Callable[[], Any]], float]) -> list[Row]:
    """Every way of computing a step, by batch size. model: a plain one."""
    fused = FusedLlama(model)
    short, few = fused.one_token, fused.few_tokens
    pool, rows = model.new_pool(max(BATCHES) + 1), []
    for batch in BATCHES:
        decode = decode_batch(batch, 1, 1, model.device)
        row: Row = {"batch": batch, "torch_ms": measure(step_call(model, decode, pool))}
        call = step_call(fused, decode, pool)
        fused.one_token, fused.few_tokens = None, ()
        row["fused_ms"], row["short_ms"] = measure(call), None
        fused.one_token, fused.few_tokens = short, few
        if batch == 1 or any(batch <= each.most for each in few):
            row["short_ms"] = measure(call)
        row["share"] = weights_ms / (row["short_ms"] or row["fused_ms"])
        rows.append(row)
    return rows


def attention(model: LlamaModel, page_size: int) -> list[Row]:
    """Microseconds of one layer's attention, the mean over all layers' pools."""
    from minirad.fast.short_decode import ShortDecode, cut_until

    c, device = model.config, model.device
    shape, scale = (c.heads, c.kv_heads, c.head_dim), c.head_dim**-0.5
    longest = max(requests * (tokens + page_size) for requests, tokens in CASES)
    pool = model.new_pool(-(-longest // page_size + 1) * page_size)
    flashinfer, rows = None, []
    if not what_is_missing(device, model.dtype, c.head_dim):
        flashinfer = FlashInferAttention(*shape, device=device)
    for requests, tokens in CASES:
        batch = decode_batch(requests, tokens, page_size, device)
        indptr, last = (torch.from_numpy(a).to(device) for a in (batch.kv_indptr, batch.last_page_len))
        short = ShortDecode(
            *shape, scale, indptr, batch.kv_indices, last, page_size, cut_until(requests, tokens)
        )
        q = torch.randn((requests, c.heads, c.head_dim), device=device).to(model.dtype)
        row: Row = {"requests": requests, "tokens": tokens, "page_size": page_size, "flashinfer_us": None}
        if flashinfer is not None:
            flashinfer.plan(batch, pool)
            row["flashinfer_us"] = _layer_us(flashinfer, q, pool, scale)
        row["short_us"] = _layer_us(short, q, pool, scale)
        rows.append(row)
    return rows


def cascade(model: LlamaModel, page_size: int) -> list[Row]:
    """Microseconds of one layer's attention to shared tokens: read by each request, and read once."""
    from minirad.fast.cascade_decode import CascadeDecode
    from minirad.fast.short_decode import ShortDecode, cut_until

    c, device, rows = model.config, model.device, []
    shape, scale = (c.heads, c.kv_heads, c.head_dim), c.head_dim**-0.5
    longest = max(requests * (OWN + page_size) + shared for requests, shared in SHARED_CASES)
    pool = model.new_pool((longest // page_size + 2) * page_size)
    for requests, shared in SHARED_CASES:
        skip, numbers = shared // page_size, torch.arange(requests, dtype=torch.int32, device=device)
        own = decode_batch(requests, OWN, page_size, device)
        first = 1 + int(own.kv_indices.max())
        pages = own.kv_indices.view(requests, -1)
        table = torch.cat((torch.arange(first, first + skip, device=device).expand(requests, -1), pages), 1)
        table, count = table.int(), torch.full((1,), skip * page_size, dtype=torch.int32, device=device)
        last = torch.from_numpy(own.last_page_len).to(device)
        each = table.shape[1] * torch.arange(requests + 1, dtype=torch.int32, device=device)
        alone = ShortDecode(
            *shape, scale, each, table.flatten(), last, page_size, cut_until(requests, shared + OWN)
        )
        indptr = torch.from_numpy(own.kv_indptr).to(device)
        together = CascadeDecode(
            ShortDecode(
                *shape, scale, indptr, own.kv_indices, last, page_size, cut_until(requests, OWN)
            ), table, numbers, count,
        )  # fmt: skip
        q = torch.randn((requests, c.heads, c.head_dim), device=device).to(model.dtype)
        row: Row = {"requests": requests, "shared": skip * page_size, "page_size": page_size}
        for name, backend in (("short_us", alone), ("cascade_us", together)):
            row[name] = _layer_us(backend, q, pool, scale)
        rows.append(row)
    return rows


def _layer_us(backend: AttentionBackend, q: Tensor, pool: KVPool, scale: float) -> float:
    layers = range(pool.num_layers)
    return captured_ms(lambda: [backend.run(layer, q, pool, scale) for layer in layers]) / len(layers) * 1e3


def tiles_to_try(inputs: int, rows_per_result: int, turns: tuple[int, ...]) -> Iterator[Tile]:
    """Tiles that give each thread a sensible part of the matrix."""
    least, most = ELEMENTS_OF_A_THREAD
    for rows in ROWS:
        for warps in WARPS:
            if least <= rows * rows_per_result * inputs / (32 * warps) <= most:
                yield from (Tile(rows, warps, turn) for turn in turns)


def quickest(
    best: Any, choices: Mapping[str, Iterable[Any]], use: Callable[[Any], None], measure: Callable[[], float]
) -> tuple[Any, list[Row]]:
    """One matrix after the other, the choice with which the whole step is quickest; and all that was tried.

    best: a dataclass with a field for each matrix, to begin with. use: makes the step one of such choices.
    """
    tried: list[Row] = []
    for name, some in choices.items():
        found: list[tuple[float, Any]] = []
        for choice in some:
            use(dataclasses.replace(best, **{name: choice}))
            found.append((measure(), choice))
            tried.append({"matrix": name, **dataclasses.asdict(choice), "step_ms": found[-1][0]})
        if found:
            best = dataclasses.replace(best, **{name: min(found, key=lambda pair: pair[0])[1]})
    return best, tried


def best_tiles(model: LlamaModel, measure: Callable[[Callable[[], Any]], float]) -> tuple[Tiles, list[Row]]:
    """The quickest tiles that were found, and all that were tried."""
    c, fused, pool = model.config, FusedLlama(model), model.new_pool(2)
    call = step_call(fused, decode_batch(1, 1, 1, model.device), pool)

    def use(tiles: Tiles) -> None:
        fused.one_token = OneToken(model.inv_freq, c.max_position_embeddings, c.rms_eps, tiles)

    choices = {
        "gate_up": tiles_to_try(c.hidden, 2, TURNS), "down": tiles_to_try(c.intermediate, 1, (1,)),
        "o": tiles_to_try(c.heads * c.head_dim, 1, (1,)), "qkv": tiles_to_try(c.hidden, 2, (1,)),
        "head": tiles_to_try(c.hidden, 1, TURNS),
    }  # fmt: skip
    return quickest(Tiles(), choices, use, lambda: measure(call))


def cuts_to_try(
    usual: Cut, size: tuple[int, int], tokens: int, room: int, splits: tuple[int, ...]
) -> Iterator[Cut]:
    """Cuts of a matrix of this size that lie in `room` bytes, in so many stretches of columns."""
    blocks = [most for most in TOKENS if most <= tokens]
    for numbers in itertools.product(splits, FIRST, BLOCKS, STAGES, [usual.rows], [usual.warps], blocks):
        cut = Cut(*numbers)
        if cut.fits(*size) and cut.within(room, tokens) == cut:
            yield cut


def best_cuts(
    model: LlamaModel, tokens: int, measure: Callable[[Callable[[], Any]], float]
) -> tuple[Cuts, list[Row]]:
    """As `best_tiles`, for `tokens` at a time; those that are used are among what is tried."""
    c, fused, pool = model.config, FusedLlama(model), model.new_pool(tokens + 1)
    one, usual = fused.one_token, Cuts.of(c, tokens, model.device)
    assert one is not None
    call = step_call(fused, decode_batch(tokens, 1, 1, model.device), pool)

    def use(cuts: Cuts) -> None:
        fused.few_tokens = (FewTokens(c, one, tokens, cuts),)

    choices = {}
    for name in ("gate_up", "down", "o", "qkv", "head")[: 5 if tokens <= FEW else 4]:
        matrix: Tensor = model.head if name == "head" else getattr(model.layers[0], name)
        cut: Cut = getattr(usual, name)
        splits = SPLITS if name in ("o", "down") else (1,)  # the others add nothing up
        others = cuts_to_try(cut, (len(matrix), matrix.shape[1]), tokens, room(model.device), splits)
        choices[name] = list(dict.fromkeys([cut, *others]))
    return quickest(usual, choices, use, lambda: measure(call))


def show(rows: list[Row]) -> str:
    return table(list(rows[0]), [list(row.values()) for row in rows])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="figures for programs instead of tables")
    parser.add_argument("--shape", choices=list(SHAPES), default="llama-3.2-1b")
    parser.add_argument("--tiles", action="store_true", help="search for better tiles: about a minute")
    parser.add_argument("--cuts", type=int, choices=list(CUTS), help="search for better cuts: some minutes")


def main(args: argparse.Namespace) -> int:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not fused_runs(device, torch.bfloat16, 64):
        raise ValueError("bench kernels needs an NVIDIA GPU and Triton; `bench gpu` runs anywhere")
    model = dummy_model(args.shape, torch.bfloat16, device)
    bandwidth = copy_bandwidth(device)
    weights_ms = weight_bytes(model) / bandwidth * 1e3
    result: Row = {
        "gpu": torch.cuda.get_device_name(device), "shape": args.shape,
        "copy_gb_per_s": bandwidth / 1e9, "weights_ms": weights_ms,
        "steps": steps(model, weights_ms, captured_ms),
        "attention": [row for page in (1, 16) for row in attention(model, page)],
        "cascade": [row for page in (1, 16) for row in cascade(model, page)],
    }  # fmt: skip
    if args.tiles:
        best, tried = best_tiles(model, captured_ms)
        result |= {"tiles": dataclasses.asdict(best), "tried": tried}
    if args.cuts:
        cuts, tried = best_cuts(model, args.cuts, captured_ms)
        result |= {"cuts": dataclasses.asdict(cuts), "cuts tried": tried}
    if args.json:
        print(json.dumps(result, indent=1))
        return 0
    print(f"{result['gpu']}, {args.shape}: reading the weights takes {weights_ms:.3f} ms")
    for name in ("steps", "attention", "cascade", "tried", "cuts tried"):
        if name in result:
            print(f"\n{name}\n{show(result[name])}")
    for name in ("tiles", "cuts"):
        if name in result:
            print(f"\n{result[name]}")
    return 0
