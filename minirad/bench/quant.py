"""What a CPU multiplies fastest by, and where the time of a decode step goes.

Two tables, in processor time of one thread, so that other processes count less. (1) Microseconds for all
products of one layer of SmolLM2-135M, and for its head, by rows: float32 as torch and as oneDNN multiply it,
bfloat16, float16 kept by FBGEMM and widened on the way (what quant/ does), torch's weight-only products of 4
bits (a scale and a zero per 32, as Q4_1 has them) and of 8, FBGEMM's of 8 by 8 bits (rows quantised, too),
and a float32 matrix made of 4 bits for each product. So many copies that none stays in a cache. (2) A decode
step: float32 against the GGUF file's own numbers, alone and with a shared prefix: tokens per second, and the
share of products, head, attention and all the rest.
"""

from __future__ import annotations

import argparse
import json
import statistics
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from minirad import command
from minirad.bench.engine import make_prompts
from minirad.bench.operations import Meter
from minirad.bench.tables import cpu_clock, processor, table
from minirad.config import EngineConfig, SamplingParams
from minirad.engine import Engine
from minirad.fast.fused_llama import onednn_linear
from minirad.model.load import SMOLLM2
from minirad.quant.packed import can_pack

LAYER = ((960, 576), (576, 576), (3072, 576), (576, 1536))
HEAD = (49152, 576)
GROUP = 32  # numbers of Q4_1 that share a scale
COLD = 64 << 20  # bytes of float32 that no cache holds
UNSIGNED = 64, 63  # a row's zero point and largest step: seven bits, or AVX2 sums them up wrongly

Product = Callable[[Tensor], Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=_rows, default=(1, 8, 32), metavar="N,..", help="default: 1,8,32")
    parser.add_argument("--model", default=SMOLLM2, help=f"NAME.gguf or {SMOLLM2} (default)")
    parser.add_argument("--requests", type=command.positive, default=32, help="that share a prefix")
    parser.add_argument("--shared", type=command.positive, default=512, help="tokens of it")
    parser.add_argument("--new-tokens", type=command.positive, default=32)
    parser.add_argument("--reps", type=command.positive, default=3, help="runs; the median is shown")
    parser.add_argument("--no-engine", action="store_true", help="products only: needs no model")
    parser.add_argument("--no-products", action="store_true", help="decode steps only")
    parser.add_argument("--json", action="store_true")


def _rows(text: str) -> tuple[int, ...]:
    return tuple(command.positive(each) for each in text.split(","))


def main(args: argparse.Namespace) -> int:
    torch.set_num_threads(1)
    result: dict[str, Any] = {"processor": processor(), "torch": torch.__version__}
    if not args.no_products:
        result["products"] = products(args)
    if not args.no_engine:
        result["steps"] = steps(args)
    print(json.dumps(result, indent=1) if args.json else text(result))
    return 0


# ---------------------------------------------------------------------- products


@torch.inference_mode()
def products(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Microseconds of a layer's four products, and of the head, for each way and number of rows."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for shape in tqdm((*LAYER, HEAD), desc="bench quant", unit="matrix", delay=2, leave=False):
        of = "head" if shape == HEAD else "layer"
        for name, make in ways():
            matrices = [make(torch.randn(shape)) for _ in range(max(1, COLD // (4 * shape[0] * shape[1])))]
            row = found.setdefault((of, name), {"of": of, "way": name})
            for rows in args.rows:
                took = _microseconds(matrices, torch.randn(rows, shape[1]), args.reps)
                row[str(rows)] = row.get(str(rows), 0.0) + took
    return sorted(found.values(), key=lambda row: str(row["of"]), reverse=True)


def ways() -> Iterator[tuple[str, Callable[[Tensor], Product]]]:
    """Names, and what makes of a float32 matrix `[out, in]` something that multiplies rows by it."""
    yield "float32", lambda w: lambda x: F.linear(x, w)
    if torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        yield "float32, oneDNN", lambda w: lambda x: onednn_linear(x, w)
    yield "bfloat16", lambda w: partial(_in_bfloat16, w.bfloat16())
    if can_pack():
        yield "float16, FBGEMM", _float16
        yield "8 by 8 bits, FBGEMM", _eight_by_eight
    yield "4 bits, bfloat16 rows", _four_bits
    yield "8 bits, bfloat16 rows", _eight_bits
    yield "4 bits, made float32", _made_float32


def _in_bfloat16(weight: Tensor, x: Tensor) -> Tensor:
    return F.linear(x.bfloat16(), weight)


def _float16(weight: Tensor) -> Product:
    kept = torch.ops.quantized.linear_prepack_fp16(weight, None)
    return lambda x: torch.ops.quantized.linear_dynamic_fp16(x, kept)


def _eight_by_eight(weight: Tensor) -> Product:
    scales, zeros = weight.abs().amax(1).double() / 127, torch.zeros(len(weight), dtype=torch.int64)
    warnings.filterwarnings(
        "ignore", "torch.quantize_per_tensor", UserWarning
    )  # a later torch may not have it
    quantized = torch.quantize_per_channel(weight, scales, zeros, 0, torch.qint8)
    kept = torch.ops.quantized.linear_prepack(quantized, None)
    zero, steps = UNSIGNED
    multiply = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32

    def product(x: Tensor) -> Any:
        largest = x.abs().amax(-1, keepdim=True)
        return multiply(x / largest, 1 / steps, zero, kept) * largest

    return product


def _four_bits(weight: Tensor) -> Product:
    out, width = weight.shape
    kept = torch.ops.aten._convert_weight_to_int4pack_for_cpu(torch.randint(16, (out, width)).int(), 1)
    scales = torch.rand(width // GROUP, out, 2).bfloat16()
    return lambda x: torch.ops.aten._weight_int4pack_mm_for_cpu(x.bfloat16(), kept, GROUP, scales).float()


def _eight_bits(weight: Tensor) -> Product:
    kept, scales = torch.randint(-128, 128, weight.shape).to(torch.int8), torch.rand(len(weight)).bfloat16()
    return lambda x: torch.ops.aten._weight_int8pack_mm(x.bfloat16(), kept, scales).float()


def _made_float32(weight: Tensor) -> Product:
    groups = weight.shape[0], weight.shape[1] // GROUP, GROUP // 2
    pairs = torch.randint(256, groups, dtype=torch.uint8)
    scale, least = torch.rand(2, *groups[:2], 1).unbind()

    def product(x: Tensor) -> Tensor:
        numbers = torch.cat((pairs & 15, pairs >> 4), -1).float()
        return F.linear(x, torch.addcmul(least, numbers, scale).view(weight.shape))

    return product


def _microseconds(matrices: list[Product], x: Tensor, reps: int) -> float:
    """Of one product, the median of so many rounds over all copies."""
    clock = cpu_clock()[1]
    matrices[0](x)
    times = []
    for _ in range(reps):
        started = clock()
        for product in matrices:
            product(x)
        times.append((clock() - started) / len(matrices) / 1e3)
    return statistics.median(times)


# ---------------------------------------------------------------------- a decode step


def steps(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Tokens per second and shares of decode steps, for each kind of weights: alone, and many at once."""
    rows = []
    kinds: dict[str, str | None] = {"float32": None, "gguf": "gguf"}
    if str(args.model).endswith(".gguf"):  # of which there is no other kind here
        del kinds["float32"]
    for weights, quantization in kinds.items():
        model = Engine(
            EngineConfig(model=args.model, quantization=quantization, device="cpu", kv_tokens=1)
        ).model
        for requests, shared in ((1, 1), (args.requests, args.shared)):
            prompts = make_prompts(requests, shared, 17, model.config.vocab_size)
            longest = len(prompts[0]) + args.new_tokens
            config = EngineConfig(
                device="cpu", kv_tokens=longest * requests, max_running=requests, max_context=longest
            )
            runs = [_decode(Engine(config, model=model), prompts, args.new_tokens) for _ in range(args.reps)]
            middle = sorted(runs, key=lambda run: float(run["tokens/s"]))[len(runs) // 2]
            rows.append({"weights": weights, "requests": requests, **middle})
    return rows


def _decode(engine: Engine, prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
    """Decodes after all prompts are computed; what is measured within costs a few microseconds a call."""
    for prompt in prompts:
        engine.add_request(prompt, SamplingParams(max_new_tokens=new_tokens, ignore_eos=True))
    while engine.step().kind != "decode" or engine.scheduler.waiting:
        pass
    meter, model, attention = Meter(cpu_clock()[1]), engine.runner.faster, engine.attention
    product, head, run = model.product, model.head, attention.run
    model.product = lambda x, w, b: meter("head" if w is head else "products", product, x, w, b)
    attention.run = partial(meter, "attention", run)
    decoded = 0
    while engine.has_work:
        decoded += len(meter("step", engine.step).batch)
    total = {name: sum(times) / 1e6 for name, times in meter.nanoseconds.items()}
    shares = {name: 100 * total[name] / total["step"] for name in ("products", "head", "attention")}
    count = len(meter.nanoseconds["step"])
    return {
        "tokens/s": 1e3 * decoded / total["step"], "ms a step": total["step"] / count,
        **{f"% {name}": share for name, share in shares.items()}, "% rest": 100 - sum(shares.values()),
    }  # fmt: skip


def text(result: dict[str, Any]) -> str:
    """Both tables."""
    lines = [f"{result['processor']}, one thread, torch {result['torch']}"]
    for title, key in (("microseconds of a layer's products, and of the head, by rows", "products"),
                       ("decode steps", "steps")):  # fmt: skip
        rows = result.get(key, [])
        if rows:
            lines += ["", title, "", table(list(rows[0]), [list(row.values()) for row in rows])]
    return "\n".join(lines)
