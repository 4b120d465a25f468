"""Trains the classroom Llama from nothing: lessons, tokenizer, model, export.

    python -m minirad.model.classroom.train --out DIR --device auto --seed 0

makes a Hugging Face directory. The preset `gpu` takes minutes on a large GPU and made the committed
weights; `cpu` is a shorter course for two processor cores. The model is a Llama whose modules carry
the names of Hugging Face's, so that its `state_dict` is the file's content.

    python -m minirad.model.classroom.train --draft-head DIR

trains a draft head for a finished model (train_head.py), in minutes on one processor core.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any, Final, TypeVar

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from tqdm import tqdm

from minirad import command
from minirad.model.classroom import WEIGHTS, corpus

END_OF_TEXT: Final = "<|endoftext|>"
TURN_START: Final = "<|im_start|>"
TURN_END: Final = "<|im_end|>"
SPECIAL_TOKENS: Final = (END_OF_TEXT, TURN_START, TURN_END)
"""Their positions here are their token ids."""

CHAT_TEMPLATE: Final = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@dataclass(frozen=True)
class Shape:
    """The sizes of the model."""

    vocab_size: int = 1024
    hidden_size: int = 160
    intermediate_size: int = 448
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    max_position_embeddings: int = 2048
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5


@dataclass(frozen=True)
class Phase:
    """`steps` optimizer steps of `rows` windows of `length` tokens."""

    steps: int
    rows: int
    length: int


SomeCourse = TypeVar("SomeCourse", bound="Course")


@dataclass(frozen=True)
class Course:
    """A whole training: how many documents are written and how they are read."""

    documents: int
    phases: tuple[Phase, ...]
    peak_rate: float = 3e-3
    final_rate: float = 3e-5
    warmup: int = 300
    weight_decay: float = 0.05
    prompt_weight: float = 0.2
    """Weight of the loss on tokens the assistant does not say; those it says weigh 1."""
    shape: Shape = field(default_factory=Shape)

    @property
    def steps(self) -> int:
        """Optimizer steps of all phases."""
        return sum(phase.steps for phase in self.phases)

    def with_steps(self: SomeCourse, steps: int) -> SomeCourse:
        """This course stretched or shrunk to about `steps` steps, at least one in each phase."""
        phases = tuple(
            replace(phase, steps=max(1, round(phase.steps * steps / self.steps))) for phase in self.phases
        )
        return replace(self, phases=phases, warmup=min(self.warmup, max(1, steps // 10)))

    def rate(self, step: int) -> float:
        """The learning rate of a step: linear warmup, then half a cosine."""
        if step < self.warmup:
            return self.peak_rate * (step + 1) / self.warmup
        progress = (step - self.warmup) / max(1, self.steps - self.warmup)
        swing = 0.5 * (1 + math.cos(math.pi * progress))
        return self.final_rate + (self.peak_rate - self.final_rate) * swing


PRESETS: Final = {
    # Many small steps of short windows teach copying; the long ones at the end only have to carry
    # it over to far distances.
    "gpu": Course(
        documents=400_000,
        phases=(Phase(40_000, 16, 256), Phase(20_000, 16, 512), Phase(8_000, 8, 2048)),
    ),
    "cpu": Course(
        documents=60_000,
        phases=(Phase(6_000, 12, 256), Phase(400, 6, 512), Phase(100, 2, 2048)),
        warmup=150,
    ),
}


# --------------------------------------------------------------------------------------------
# Tokenizer


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE tokenizer that keeps every digit a token of its own."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    specials = [AddedToken(text, special=True, normalized=False) for text in SPECIAL_TOKENS]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # Line ends at the end of a text would be merged to one token there and stay two elsewhere.
    tokenizer.train_from_iterator((text.rstrip("\n") for text in texts), trainer)
    return tokenizer


# --------------------------------------------------------------------------------------------
# Lessons as tokens


@dataclass
class Lessons:
    """All documents in one row of tokens.

    `tokens` int64 [N]; `weights` float32 [N], the weight of the loss on each token; `starts` int64
    [D], where documents begin.
    """

    tokens: Tensor
    weights: Tensor
    starts: Tensor


def _encode_chunk(job: tuple[str, str, int]) -> Tensor:
    """The tokens of one chunk of documents, each behind an end-of-text token: int16 [n]."""
    tokenizer_json, seed, count = job
    tokenizer = Tokenizer.from_str(tokenizer_json)
    texts = [END_OF_TEXT + text for text in corpus.documents(seed, count)]
    encodings = tokenizer.encode_batch(texts, add_special_tokens=False)
    return torch.tensor([i for e in encodings for i in e.ids], dtype=torch.int16)


def loss_weights(tokens: Tensor, assistant: int, prompt_weight: float) -> Tensor:
    """The weight of the loss on each token [N]: 1 in replies and plain text, else less."""
    end_of_text, turn_start = (SPECIAL_TOKENS.index(t) for t in (END_OF_TEXT, TURN_START))
    following = torch.roll(tokens, -1)
    opens = (tokens == end_of_text) | (tokens == turn_start)
    is_reply = (tokens == turn_start) & (following == assistant)
    is_plain = (tokens == end_of_text) & (following != turn_start)
    part_weights = torch.where(is_reply | is_plain, 1.0, prompt_weight)[opens]
    part_of_token = torch.cumsum(opens, 0) - 1
    return part_weights[part_of_token.clamp(min=0)]


def write_lessons(
    tokenizer: Tokenizer, course: Course, seed: int | str, workers: int, chunk: int = 5_000
) -> Lessons:
    """Writes and encodes the documents of a course; the same whatever the number of workers.

    Each `chunk` documents have a seed of their own, so another `chunk` gives other documents.
    """
    spec = tokenizer.to_str()
    chunks = [
        (spec, f"{seed}/{first}", min(chunk, course.documents - first))
        for first in range(0, course.documents, chunk)
    ]
    progress: Callable[..., Any] = tqdm
    if workers > 1 and len(chunks) > 1:
        with ProcessPoolExecutor(workers) as pool:
            parts = list(progress(pool.map(_encode_chunk, chunks), "lessons", len(chunks), unit="chunk"))
    else:
        parts = [_encode_chunk(job) for job in progress(chunks, "lessons", unit="chunk")]
    tokens = torch.cat(parts).long()
    assistant = tokenizer.encode("assistant").ids[0]
    weights = loss_weights(tokens, assistant, course.prompt_weight)
    # A document begins behind its end-of-text token: prompts have no such token before them.
    starts = (tokens == SPECIAL_TOKENS.index(END_OF_TEXT)).nonzero().flatten() + 1
    return Lessons(tokens, weights, starts)


# --------------------------------------------------------------------------------------------
# Model


def rotary_table(length: int, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines [length, head_dim] of the rotary position embedding."""
    frequencies = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = torch.outer(torch.arange(length, dtype=torch.float64), frequencies)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().float(), angles.sin().float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns heads [B, H, T, D] by their positions' angles."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin


class Attention(nn.Module):
    """Causal grouped-query attention."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        queries = shape.num_attention_heads * shape.head_dim
        keys = shape.num_key_value_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, queries, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, keys, bias=False)
        self.o_proj = nn.Linear(queries, shape.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[B, T, hidden] to [B, T, hidden]."""
        rows, length, _ = x.shape
        groups = self.shape.num_attention_heads // self.shape.num_key_value_heads

        def heads(y: Tensor) -> Tensor:
            return y.view(rows, length, -1, self.shape.head_dim).transpose(1, 2)

        q = rotate(heads(self.q_proj(x)), cos, sin)
        k = rotate(heads(self.k_proj(x)), cos, sin).repeat_interleave(groups, dim=1)
        v = heads(self.v_proj(x)).repeat_interleave(groups, dim=1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        mixed: Tensor = self.o_proj(out.transpose(1, 2).reshape(rows, length, -1))
        return mixed


class FeedForward(nn.Module):
    """The gated feed-forward part of a layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, hidden] to [B, T, hidden]."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """Attention and feed-forward, each on a normed copy of the stream it adds to."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = FeedForward(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[B, T, hidden] to [B, T, hidden]."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Stack(nn.Module):
    """Embedding, layers and the last norm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)


class Student(nn.Module):
    """A Llama with tied embeddings, for training only: it has no KV cache."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.model = Stack(shape)
        cos, sin = rotary_table(shape.max_position_embeddings, shape.head_dim, shape.rope_theta)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self._initialize(shape)

    def _initialize(self, shape: Shape) -> None:
        """Normal weights; those that add to the stream are smaller, by the number of additions."""
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                continue
            deviation = 0.02 if "embed" in name else parameter.shape[1] ** -0.5
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                deviation /= math.sqrt(2 * shape.num_hidden_layers)
            nn.init.normal_(parameter, std=deviation)

    def hidden(self, tokens: Tensor) -> Tensor:
        """Tokens [B, T] to what the last layer gives [B, T, hidden], before the last norm."""
        length = tokens.shape[1]
        x: Tensor = self.model.embed_tokens(tokens)
        for layer in self.model.layers:
            x = layer(x, self.cos[:length], self.sin[:length])
        return x

    def logits(self, x: Tensor) -> Tensor:
        """Hidden states [..., hidden] to logits [..., vocabulary]."""
        return F.linear(self.model.norm(x), self.model.embed_tokens.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens [B, T] to logits [B, T, vocabulary]."""
        return self.logits(self.hidden(tokens))


# --------------------------------------------------------------------------------------------
# Training


class Trainer:
    """The student, the lessons and the optimizer on one device.

    On a GPU, whose launches would take longer than this small model's arithmetic, one step of
    each phase is recorded as a CUDA graph and replayed.
    """

    def __init__(self, student: Student, lessons: Lessons, course: Course, device: str) -> None:
        self.course = course
        self.device = device
        self.on_gpu = device.startswith("cuda")
        self.student = student.to(device)
        self.tokens = lessons.tokens.to(device)
        self.weights = lessons.weights.to(device)
        self.starts = lessons.starts
        decayed = [p for p in student.parameters() if p.dim() >= 2]
        plain = [p for p in student.parameters() if p.dim() < 2]
        self.rate = torch.tensor(course.rate(0), device=device)
        self.optimizer = torch.optim.AdamW(
            [
                {"params": decayed, "weight_decay": course.weight_decay},
                {"params": plain, "weight_decay": 0.0},
            ],
            lr=self.rate if self.on_gpu else course.rate(0),
            betas=(0.9, 0.98),
            fused=self.on_gpu,
            capturable=self.on_gpu,
        )

    def step(self, begins: Tensor, length: int) -> Tensor:
        """One optimizer step on the windows that begin at `begins` [B]; returns the mean loss."""
        places = begins[:, None] + torch.arange(length + 1, device=self.device)
        window, weights = self.tokens[places], self.weights[places[:, 1:]]
        logits = self.student(window[:, :-1])
        losses = F.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten(), reduction="none")
        loss = (losses * weights.flatten()).sum() / weights.sum()
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.student.parameters(), 1.0)
        self.optimizer.step()
        return loss.detach()

    def _draw(self, phase: Phase, generator: torch.Generator) -> Tensor:
        """Where the windows of all steps of a phase begin: int64 [steps, rows]."""
        fits = self.starts[self.starts + phase.length < len(self.tokens)]
        picks = torch.randint(len(fits), (phase.steps, phase.rows), generator=generator)
        return fits[picks].to(self.device)

    def _set_rate(self, step: int) -> None:
        rate = self.course.rate(step)
        if self.on_gpu:
            self.rate.fill_(rate)
        else:
            for group in self.optimizer.param_groups:
                group["lr"] = rate

    def _recorded_step(self, begins: Tensor, length: int) -> Callable[[Tensor], Tensor]:
        """`step` as a CUDA graph, called with the next `begins`.

        Recording needs some real steps first; `begins` [W, B] are their windows.
        """
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for warm in begins:
                self.step(warm, length)
        torch.cuda.current_stream().wait_stream(side)
        self.optimizer.zero_grad(set_to_none=True)
        static = begins[0].clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = self.step(static, length)

        def replay(next_begins: Tensor) -> Tensor:
            static.copy_(next_begins)
            graph.replay()
            return loss

        return replay

    def run(self, seed: int) -> float:
        """All phases; returns the mean loss of the last 100 steps."""
        generator = torch.Generator().manual_seed(seed)
        done, recent = 0, torch.zeros(100, device=self.device)
        with tqdm(total=self.course.steps, desc="training", unit="step", mininterval=2) as bar:
            for phase in self.course.phases:
                begins = self._draw(phase, generator)
                self._set_rate(done)
                run_step = self._recorded_step(begins[:3], phase.length) if self.on_gpu else None
                for row in begins:
                    self._set_rate(done)
                    loss = run_step(row) if run_step else self.step(row, phase.length)
                    recent[done % 100] = loss
                    done += 1
                    bar.update()
                    if done % 500 == 0:
                        bar.set_postfix(loss=f"{recent.mean().item():.4f}", length=phase.length)
        return recent[: min(done, 100)].mean().item()


# --------------------------------------------------------------------------------------------
# Export


def model_config(shape: Shape) -> dict[str, Any]:
    """The content of `config.json`."""
    ids = {text: number for number, text in enumerate(SPECIAL_TOKENS)}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_hidden_layers,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": shape.max_position_embeddings,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": shape.rope_theta,
        "rope_parameters": {"rope_theta": shape.rope_theta, "rope_type": "default"},
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": ids[TURN_END],
        "pad_token_id": ids[END_OF_TEXT],
        "dtype": "float16",
    }


def tokenizer_config(shape: Shape) -> dict[str, Any]:
    """The content of `tokenizer_config.json`."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": False,
        "add_prefix_space": False,
        "bos_token": None,
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "unk_token": None,
        "additional_special_tokens": [TURN_START],
        "clean_up_tokenization_spaces": False,
        "model_max_length": shape.max_position_embeddings,
        "chat_template": CHAT_TEMPLATE,
    }


def export(student: Student, tokenizer: Tokenizer, shape: Shape, out: Path) -> None:
    """Writes a Hugging Face directory with float16 weights."""
    out.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: tensor.to("cpu", torch.float16).contiguous() for name, tensor in student.state_dict().items()
    }
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)
    tokenizer.save(str(out / "tokenizer.json"), pretty=False)
    config = model_config(shape)
    generation = {key: config[key] for key in ("eos_token_id", "pad_token_id")}
    for name, content in (
        ("config.json", config),
        ("tokenizer_config.json", tokenizer_config(shape)),
        ("generation_config.json", generation),
    ):
        (out / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def train(course: Course, out: Path, device: str = "cpu", seed: int = 0, workers: int = 1) -> float:
    """Writes lessons, trains on them and exports to `out`; returns the last mean loss."""
    made(out)
    torch.manual_seed(seed)
    torch.set_float32_matmul_precision("high")
    sample = corpus.documents(f"{seed}/tokenizer", min(20_000, course.documents))
    tokenizer = train_tokenizer(sample, course.shape.vocab_size)
    lessons = write_lessons(tokenizer, course, seed, workers)
    student = Student(course.shape)
    parameters = sum(p.numel() for p in student.parameters())
    print(f"{len(lessons.tokens):,} tokens of lessons, {parameters:,} parameters, {device}")
    loss = Trainer(student, lessons, course, device).run(seed)
    export(student, tokenizer, course.shape, out)
    return loss


def made(out: Path) -> None:
    """A directory is made, and can be written in: known before hours of training, not behind them."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=out):
        pass


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = command.Parser(
        prog="python -m minirad.model.classroom.train", description="Train the classroom Llama."
    )
    kind = parser.add_mutually_exclusive_group(required=True)
    kind.add_argument("--out", type=Path, help="train a model, and write this directory")
    kind.add_argument(
        "--draft-head", type=Path, help="train a draft head for --model; the directory to write"
    )
    parser.add_argument("--model", type=Path, help="with --draft-head: a model's directory (default: ours)")
    parser.add_argument("--device", help="with --out: auto, cpu or cuda (default: auto)")
    parser.add_argument("--preset", choices=[*PRESETS, "auto"], help="with --out (default: auto)")
    parser.add_argument(
        "--steps", type=command.positive, help="stretch or shrink the course to about this many steps"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=command.positive, default=os.cpu_count() or 1)
    options = parser.parse_args(arguments)
    return command.run(parser.prog, lambda: _main(options))


def _main(options: argparse.Namespace) -> int:
    for name in ("model",) if options.out else ("device", "preset"):
        if getattr(options, name) is not None:
            other = "--draft-head" if options.out else "--out"
            raise ValueError(f"--{name} {getattr(options, name)} goes with {other}")
    if options.draft_head:
        heads: Any = import_module("minirad.model.classroom.train_head")  # builds on this module
        plan = heads.COURSE.with_steps(options.steps) if options.steps else heads.COURSE
        model = options.model or WEIGHTS
        loss = heads.train_head(model, options.draft_head, plan, options.seed, options.workers)
        print(f"last loss {loss:.4f}; wrote {options.draft_head}")
        return 0
    device = options.device or "auto"
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    preset = options.preset or "auto"
    if preset == "auto":
        preset = "gpu" if device.startswith("cuda") else "cpu"
    course = PRESETS[preset]
    if options.steps:
        course = course.with_steps(options.steps)
    loss = train(course, options.out, device, options.seed, options.workers)
    print(f"last loss {loss:.4f}; wrote {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
