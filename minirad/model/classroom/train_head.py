"""Trains a draft head (EAGLE-1's, see minirad/speculative/head.py) for a classroom model.

    python -m minirad.model.classroom.train --draft-head OUT

The model's weights stay as they are. The head is one decoder layer: from the hidden state of token i and from
token i + 1 it guesses the hidden state of token i + 1, and so, by the model's own norm and output, token
i + 2. Drafts behind the first are made from guesses, so the training feeds the head with its own (as HASS and
the training-time test of EAGLE-3 do), two in a row at first and four later; EAGLE-1 adds noise instead.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from tqdm import tqdm

from minirad.model.classroom.train import (
    Course,
    Layer,
    Lessons,
    Phase,
    Shape,
    Student,
    made,
    rotary_table,
    rotate,
    write_lessons,
)

ARCHITECTURE: Final = "EagleDraftHead"


@dataclass(frozen=True)
class HeadPhase(Phase):
    """Steps in which `depth` drafts are made one from the other."""

    depth: int


@dataclass(frozen=True)
class HeadCourse(Course):
    """As a model's course; the loss is `feature_weight` parts of features beside one part of tokens."""

    phases: tuple[HeadPhase, ...]
    feature_weight: float = 0.1


COURSE: Final = HeadCourse(
    documents=12_000,
    phases=(HeadPhase(1_400, 2, 192, 2), HeadPhase(700, 3, 256, 4), HeadPhase(150, 1, 1_024, 4)),
    peak_rate=4e-3,
    final_rate=2e-5,
    warmup=60,
    weight_decay=0.01,
    prompt_weight=0.0,
)


# --------------------------------------------------------------------------------------------
# Head


class DraftStudent(nn.Module):
    """A draft head, for training only: whole windows, no KV cache. Tensors bear the file's names."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_norm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.hidden_norm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.fc = nn.Linear(2 * shape.hidden_size, shape.hidden_size, bias=False)
        self.layers = nn.ModuleList([Layer(shape)])
        cos, sin = rotary_table(shape.max_position_embeddings, shape.head_dim, shape.rope_theta)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    @property
    def layer(self) -> Layer:
        """The decoder layer."""
        only = self.layers[0]
        assert isinstance(only, Layer)
        return only

    def begin_as(self, target: Student, scale: float) -> None:
        """Begins as the target's last layer on the hidden state, nearly alone: closer to it than chance.

        scale: the deviation of the target's hidden states: what the layer adds is then neither lost nor all.
        """
        self.layer.load_state_dict(target.model.layers[-1].state_dict())
        size = self.shape.hidden_size
        with torch.no_grad():
            nn.init.normal_(self.fc.weight[:, :size], std=0.1 * size**-0.5)
            self.fc.weight[:, size:] = torch.eye(size)
            self.embed_norm.weight.fill_(scale)
            self.hidden_norm.weight.fill_(scale)

    def drafts(self, next_embeddings: Tensor, hidden: Tensor, depth: int) -> list[Tensor]:
        """Features of `depth` drafts in a row at every place.

        Args:
            next_embeddings: [B, T, hidden], unit p's token p + 1.
            hidden: [B, T, hidden], the target's hidden state of token p.

        Returns:
            For each j in 1 to `depth`, [B, T, hidden]: unit p's guess at the hidden state of token p + 1,
            where that of token p is itself the guess of draft j - 1. The first j - 1 units have none: noise.
        """
        features: list[Tensor] = []
        keys: list[Tensor] = []
        values: list[Tensor] = []
        layer = self.layer
        for _ in range(depth):
            x = self.fc(torch.cat((self.embed_norm(next_embeddings), self.hidden_norm(hidden)), dim=-1))
            x = x + self._attend(layer.input_layernorm(x), keys, values)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
            features.append(x)
            hidden = x.roll(1, dims=1)
        return features

    def _attend(self, x: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        """Attention of draft j = len(keys) + 1, whose keys and values are appended.

        Unit p sees true ones up to p - j + 1, and behind them those of its own earlier drafts: of draft s the
        one at p - (j - s).
        """
        attention, length = self.layer.self_attn, x.shape[1]
        cos, sin = self.cos[:length], self.sin[:length]
        groups = self.shape.num_attention_heads // self.shape.num_key_value_heads

        def heads(y: Tensor) -> Tensor:
            return y.view(*y.shape[:2], -1, self.shape.head_dim).transpose(1, 2)

        q = rotate(heads(attention.q_proj(x)), cos, sin)
        keys.append(rotate(heads(attention.k_proj(x)), cos, sin).repeat_interleave(groups, dim=1))
        values.append(heads(attention.v_proj(x)).repeat_interleave(groups, dim=1))
        depth = len(keys)
        if depth == 1:
            out = F.scaled_dot_product_attention(q, keys[0], values[0], is_causal=True)
        else:
            q = q * self.shape.head_dim**-0.5
            seen = torch.ones(length, length, dtype=torch.bool, device=x.device).tril(1 - depth)
            scores = [(q @ keys[0].mT).masked_fill(~seen, float("-inf"))]
            shifts = [depth - s for s in range(2, depth + 1)]
            scores += [
                (q * k.roll(by, dims=2)).sum(-1, keepdim=True) for k, by in zip(keys[1:], shifts, strict=True)
            ]
            chances = torch.cat(scores, dim=-1).softmax(dim=-1)
            out = chances[..., :length] @ values[0]
            for i, (v, by) in enumerate(zip(values[1:], shifts, strict=True)):
                out = out + chances[..., length + i, None] * v.roll(by, dims=2)
        mixed: Tensor = attention.o_proj(out.transpose(1, 2).flatten(2))
        return mixed


def normed(x: Tensor) -> Tensor:
    """Vectors [..., hidden] whose mean square is 1."""
    return F.rms_norm(x, x.shape[-1:])


def load_target(directory: Path) -> tuple[Student, Shape]:
    """The model in a classroom directory, frozen, in float32. ValueError for what is none."""
    file = directory / "config.json"
    config, names = json.loads(file.read_text(encoding="utf-8")), Shape.__dataclass_fields__
    missing = [name for name in names if not isinstance(config, dict) or name not in config]
    if missing:
        raise ValueError(f"{file} is no classroom Llama's: it does not say {missing[0]}")
    shape = Shape(**{name: config[name] for name in names})
    target = Student(shape)
    fill(target, directory)
    return target.eval().requires_grad_(False), shape


def fill(student: nn.Module, directory: Path) -> None:
    """Takes the weights in a directory, in float32. ValueError for those of something else."""
    file = directory / "model.safetensors"
    try:
        student.load_state_dict({name: tensor.float() for name, tensor in load_file(file).items()})
    except (SafetensorError, RuntimeError) as error:
        raise ValueError(f"{file} does not fit {type(student).__name__}: {error}") from error


# --------------------------------------------------------------------------------------------
# Training


class HeadTrainer:
    """The head, its target, lessons and optimizer."""

    def __init__(self, student: DraftStudent, target: Student, lessons: Lessons, course: HeadCourse) -> None:
        self.student, self.target, self.lessons, self.course = student, target, lessons, course
        decayed = [p for p in student.parameters() if p.dim() >= 2]
        plain = [p for p in student.parameters() if p.dim() < 2]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": decayed, "weight_decay": course.weight_decay},
                {"params": plain, "weight_decay": 0.0},
            ],
            lr=course.rate(0),
            betas=(0.9, 0.98),
        )

    def loss(self, begins: Tensor, phase: HeadPhase) -> Tensor:
        """The mean loss of the drafts in windows that begin at `begins` [B], where the assistant speaks."""
        places = begins[:, None] + torch.arange(phase.length + 2)
        tokens, weights = self.lessons.tokens[places], self.lessons.weights[places[:, 2:]]
        with torch.no_grad():
            hidden = self.target.hidden(tokens[:, :-1])  # [B, T + 1, hidden]
            embedded = self.target.model.embed_tokens(tokens[:, 1:-1])
            counts = weights > 0
            wanted = hidden[:, 1:]
            chances = self.target.logits(wanted[counts]).softmax(-1)
        loss = torch.zeros(())
        for j, features in enumerate(self.student.drafts(embedded, hidden[:, :-1], phase.depth)):
            has = counts.clone()
            has[:, :j] = False
            guessed = features[has]
            tokens_loss = F.cross_entropy(self.target.logits(guessed), chances[has[counts]])
            # Whoever reads features norms them first, so their lengths do not matter.
            feature_loss = F.smooth_l1_loss(normed(guessed), normed(wanted[has]))
            loss = loss + tokens_loss + self.course.feature_weight * feature_loss
        return loss / phase.depth

    def run(self, seed: int) -> float:
        """All phases; returns the mean loss of the last 50 steps."""
        generator = torch.Generator().manual_seed(seed)
        recent: list[float] = []
        done = 0
        with tqdm(total=self.course.steps, desc="draft head", unit="step", mininterval=2) as bar:
            for phase in self.course.phases:
                starts = self.lessons.starts
                fits = starts[starts + phase.length + 2 < len(self.lessons.tokens)]
                for _ in range(phase.steps):
                    begins = fits[torch.randint(len(fits), (phase.rows,), generator=generator)]
                    for group in self.optimizer.param_groups:
                        group["lr"] = self.course.rate(done)
                    loss = self.loss(begins, phase)
                    self.optimizer.zero_grad(set_to_none=True)
                    loss.backward()  # type: ignore[no-untyped-call]
                    nn.utils.clip_grad_norm_(self.student.parameters(), 1.0)
                    self.optimizer.step()
                    recent = [*recent[-49:], loss.item()]
                    done += 1
                    bar.update()
                    if done % 20 == 0:
                        bar.set_postfix(loss=f"{sum(recent) / len(recent):.4f}", depth=phase.depth)
        return sum(recent) / len(recent)


def head_config(shape: Shape) -> dict[str, Any]:
    """The content of a head's `config.json`."""
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    sizes = {name: getattr(shape, name) for name in names}
    return {"architectures": [ARCHITECTURE], **sizes, "dtype": "float16"}


def export_head(student: DraftStudent, out: Path) -> None:
    """Writes a head's directory, with float16 weights."""
    out.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: tensor.to("cpu", torch.float16).contiguous() for name, tensor in student.state_dict().items()
    }
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)
    text = json.dumps(head_config(student.shape), indent=2) + "\n"
    (out / "config.json").write_text(text, encoding="utf-8")


def load_head(directory: Path, shape: Shape) -> DraftStudent:
    """A head as it was exported, in float32."""
    student = DraftStudent(shape)
    fill(student, directory)
    return student.eval().requires_grad_(False)


def train_head(model: Path, out: Path, course: HeadCourse = COURSE, seed: int = 0, workers: int = 1) -> float:
    """Writes lessons, trains a head for the model in `model` and exports it to `out`; the last mean loss."""
    torch.manual_seed(seed)
    target, shape = load_target(model)
    made(out)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    lessons = write_lessons(tokenizer, course, f"{seed}/head", workers)
    student = DraftStudent(shape)
    with torch.no_grad():
        student.begin_as(target, target.hidden(lessons.tokens[None, : course.phases[0].length]).std().item())
    parameters = sum(p.numel() for p in student.parameters())
    print(f"{len(lessons.tokens):,} tokens of lessons, {parameters:,} parameters")
    loss = HeadTrainer(student, target, lessons, course).run(seed)
    export_head(student, out)
    return loss
