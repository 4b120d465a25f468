"""Trains the two adapters of the classroom Llama: low-rank corrections of its matrices (LoRA).

    python -m minirad.model.classroom.train_adapters --out DIR [--only capitals]

`capitals` says what the model says in capital letters, `oneword` says it in one word. Each becomes a
directory in the format of Hugging Face's PEFT: adapter_config.json and adapter_model.safetensors. The model's
own weights stay as they are; only the factors of `W + scale * B A` are trained, in minutes on one core.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from tqdm import tqdm

from minirad import command
from minirad.model.classroom import ADAPTERS, WEIGHTS, corpus
from minirad.model.classroom.train import END_OF_TEXT, Shape, Student, loss_weights

ATTENTION: Final = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP: Final = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Phase:
    """`steps` optimizer steps of `rows` windows of `length` tokens. longest: tokens of a document at most."""

    steps: int
    rows: int = 16
    length: int = 160
    longest: int = 1 << 30
    peak_rate: float = 4e-3

    def rate(self, step: int) -> float:
        """The learning rate of a step: a short warmup, then half a cosine."""
        warmup = min(50, self.steps // 10 + 1)
        if step < warmup:
            return self.peak_rate * (step + 1) / warmup
        swing = 0.5 * (1 + math.cos(math.pi * (step - warmup) / (self.steps - warmup)))
        return self.peak_rate * (0.02 + 0.98 * swing)


@dataclass(frozen=True)
class Task:
    """What an adapter is to do, and how it is trained.

    say: the answer to a turn. rank: columns of its factors; modules: the matrices that it corrects.
    chat_gate: the share of right last replies in chats of two turns that it has to reach.
    """

    say: Callable[[corpus.Turn], str]
    rank: int
    modules: tuple[str, ...]
    phases: tuple[Phase, ...]
    chat_gate: float

    @property
    def alpha(self) -> int:
        """PEFT's lora_alpha: the correction counts alpha / rank times."""
        return 2 * self.rank


TASKS: Final = {
    # Every capital letter is a token of its own, so this one has to learn how each word is spelt; the
    # second phase is of short replies, which the stories' many letters would else crowd out.
    "capitals": Task(
        lambda turn: turn.reply.upper(), 6, (*ATTENTION, *MLP),
        (Phase(1500), Phase(500, rows=12, longest=150, peak_rate=2e-3)), 0.5,
    ),
    "oneword": Task(
        lambda turn: turn.short, 4, ("q_proj", "v_proj", "down_proj"), (Phase(300, rows=12),), 0.9
    ),
}  # fmt: skip
UNTAUGHT: Final = ("ON", "SON")
"""Tokens that the model never saw: they are there as parts of JSON, and JSON is a token."""

_TURNS: Final = (1, 1, 2, 3)
_SYSTEMS: Final = (corpus.SYSTEM_PROMPT,) * 6 + (*corpus.OTHER_SYSTEM_PROMPTS, None, None)


class Corrected(nn.Module):
    """A linear layer that stays as it is, and the low-rank correction that is trained."""

    def __init__(self, plain: nn.Linear, rank: int, scale: float, generator: torch.Generator) -> None:
        super().__init__()
        self.plain, self.scale = plain, scale
        bound = plain.in_features**-0.5
        a = torch.empty(rank, plain.in_features).uniform_(-bound, bound, generator=generator)
        self.a, self.b = nn.Parameter(a), nn.Parameter(torch.zeros(plain.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] to [..., out]."""
        out: Tensor = self.plain(x) + self.scale * F.linear(F.linear(x, self.a), self.b)
        return out


def corrected_student(task: Task, seed: int) -> tuple[Student, dict[str, Corrected]]:
    """The classroom Llama with a correction, which does nothing yet, at each matrix of the task; by their
    names."""
    student = Student(Shape())
    student.load_state_dict(
        {name: tensor.float() for name, tensor in load_file(WEIGHTS / "model.safetensors").items()}
    )
    student.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    corrections = {}
    for index, layer in enumerate(student.model.layers):
        for block in ("self_attn", "mlp"):
            part = getattr(layer, block)
            for name in task.modules:
                if hasattr(part, name):
                    correction = Corrected(getattr(part, name), task.rank, task.alpha / task.rank, generator)
                    setattr(part, name, correction)
                    corrections[f"model.layers.{index}.{block}.{name}"] = correction
    return student, corrections


# --------------------------------------------------------------------------------------------
# Lessons


def document(rng: random.Random, task: Task) -> str:
    """A chat whose replies are as the task wants them."""
    system = rng.choice(_SYSTEMS)
    return corpus.chat_text(corpus.chat_messages(rng, rng.choice(_TURNS), system, say=task.say))


class Lessons:
    """Documents as tokens, and what of them is to be learnt."""

    def __init__(self, task: Task, seed: int) -> None:
        self._task, self._rng = task, random.Random(f"adapter {seed}")
        self._tokenizer = Tokenizer.from_file(str(WEIGHTS / "tokenizer.json"))
        self._assistant = self._tokenizer.encode("assistant").ids[0]
        known = self._tokenizer.get_vocab()
        self._letters = {known[text]: [known[letter] for letter in text] for text in UNTAUGHT}

    def windows(self, phase: Phase) -> tuple[Tensor, Tensor]:
        """Tokens int64 `[rows, length + 1]`, document after document, and weights of the loss."""
        size, rows = phase.length + 1, []
        for _ in range(phase.rows):
            row: list[int] = []
            while len(row) <= size:
                ids = self._tokens()
                row += ids if len(ids) <= phase.longest else []
            rows.append(torch.tensor(row[1 : size + 1]))  # prompts have no end of text before them
        tokens = torch.stack(rows)
        weights = torch.stack([loss_weights(row, self._assistant, 0.0) for row in rows])
        weights[torch.isin(tokens, torch.tensor([*self._letters]))] = 0.0
        return tokens, weights

    def _tokens(self) -> list[int]:
        """A document behind an end of text. In every second one untaught tokens are spelt: so they are to be
        said; in the others they are to be read, in earlier turns."""
        text = END_OF_TEXT + document(self._rng, self._task)
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        if not self._letters.keys().isdisjoint(ids) and self._rng.random() < 0.5:
            ids = [letter for each in ids for letter in self._letters.get(each, [each])]
        return ids


# --------------------------------------------------------------------------------------------
# Training


def train(task: Task, seed: int = 0, name: str = "adapter") -> tuple[dict[str, Corrected], float]:
    """The trained corrections, and the mean loss of the last steps."""
    student, corrections = corrected_student(task, seed)
    lessons, loss = Lessons(task, seed), 0.0
    for phase in task.phases:
        loss = run_phase(student, lessons, phase, name)
    return corrections, loss


def run_phase(student: Student, lessons: Lessons, phase: Phase, name: str) -> float:
    """One phase with an optimizer of its own; the mean loss of its last steps."""
    parameters = [p for p in student.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=phase.peak_rate, betas=(0.9, 0.98), weight_decay=0.0)
    losses: list[float] = []
    with tqdm(total=phase.steps, desc=name, unit="step", mininterval=2) as bar:
        for step in range(phase.steps):
            for group in optimizer.param_groups:
                group["lr"] = phase.rate(step)
            tokens, weights = lessons.windows(phase)
            wanted, weights = tokens[:, 1:], weights[:, 1:]
            each = F.cross_entropy(student(tokens[:, :-1]).flatten(0, 1), wanted.flatten(), reduction="none")
            loss = (each * weights.flatten()).sum() / weights.sum()
            optimizer.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            losses.append(loss.item())
            bar.update()
            if step % 50 == 49:
                bar.set_postfix(loss=f"{sum(losses[-50:]) / 50:.4f}")
    return sum(losses[-50:]) / len(losses[-50:])


# --------------------------------------------------------------------------------------------
# Export


def adapter_config(task: Task) -> dict[str, object]:
    """The content of `adapter_config.json`."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "classroom",
        "r": task.rank,
        "lora_alpha": task.alpha,
        "lora_dropout": 0.0,
        "target_modules": list(task.modules),
        "bias": "none",
        "use_dora": False,
        "use_rslora": False,
        "fan_in_fan_out": False,
        "modules_to_save": None,
        "inference_mode": True,
    }


def export(task: Task, corrections: dict[str, Corrected], out: Path) -> None:
    """Writes a directory in PEFT's format, float16."""
    out.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, correction in corrections.items():
        for letter, factor in (("A", correction.a), ("B", correction.b)):
            key = f"base_model.model.{name}.lora_{letter}.weight"
            tensors[key] = factor.detach().to(torch.float16).contiguous()
    file = out / "adapter_model.safetensors"
    save_file(tensors, file, metadata={"format": "pt"})
    file.chmod(0o644)
    config = json.dumps(adapter_config(task), indent=2) + "\n"
    (out / "adapter_config.json").write_text(config, encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = command.Parser(
        prog="python -m minirad.model.classroom.train_adapters", description="Train the classroom's adapters."
    )
    parser.add_argument("--out", type=Path, default=ADAPTERS, help="directory to write")
    parser.add_argument("--only", choices=[*TASKS], help="one of them (default: all)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # with several, sums are added in another order: other last digits
    for name in [options.only] if options.only else TASKS:
        corrections, loss = train(TASKS[name], options.seed, name)
        export(TASKS[name], corrections, options.out / name)
        print(f"{name}: last loss {loss:.4f}; wrote {options.out / name}")


if __name__ == "__main__":
    main()
