"""Examines the classroom Llama's adapters on lessons of seeds they were not trained on.

    python -m minirad.model.classroom.score_adapters [--adapters DIR] [--only capitals]

The factors are added to the model's matrices, and the sum runs in Hugging Face transformers in float32, one
greedy answer a question, as in score.py: no engine of this project computes. The exit code is 1 when a gate
fails.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file

from minirad import command
from minirad.model.classroom import ADAPTERS, WEIGHTS, corpus
from minirad.model.classroom.score import Exam, Item, Pupil, Score, sit, table
from minirad.model.classroom.train_adapters import TASKS, Task

Asker = Callable[[random.Random], Item]


class AdaptedPupil(Pupil):
    """The classroom model with an adapter added to its weights."""

    def __init__(self, adapter: Path, base: Path = WEIGHTS) -> None:
        super().__init__(base)
        config = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))
        factors = load_file(adapter / "adapter_model.safetensors")
        self.adapter_parameters = sum(factor.numel() for factor in factors.values())
        for name, a in factors.items():
            if ".lora_A." in name:
                module = self.model.get_submodule(
                    name.removeprefix("base_model.model.").partition(".lora_")[0]
                )
                b = factors[name.replace(".lora_A.", ".lora_B.")]
                module.weight.data += config["lora_alpha"] / config["r"] * (b.float() @ a.float())


def turn_item(task: Task, kind: Callable[[random.Random], corpus.Turn]) -> Asker:
    """One question under the usual system prompt."""

    def ask(rng: random.Random) -> Item:
        turn = kind(rng)
        messages = [corpus.message("system", corpus.SYSTEM_PROMPT), corpus.message("user", turn.user)]
        return Item(corpus.chat_text(messages, add_generation_prompt=True), task.say(turn))

    return ask


def chat_item(task: Task, turns: int) -> Asker:
    """The last reply of a chat of `turns` turns, all of them answered as the task wants."""

    def ask(rng: random.Random) -> Item:
        messages = corpus.chat_messages(rng, turns, corpus.SYSTEM_PROMPT, exact=True, say=task.say)
        prompt = corpus.chat_text(messages[:-1], add_generation_prompt=True)
        return Item(prompt, messages[-1]["content"])

    return ask


def strange_turn(rng: random.Random) -> corpus.Turn:
    """A question from outside the lessons."""
    return corpus.unknown_turn(rng)


def exams(task: Task) -> list[Exam]:
    """What an adapter is asked."""
    return [
        Exam("greeting", 0.95, turn_item(task, corpus.greeting_turn), 60),
        Exam("facts", 0.90, turn_item(task, corpus.fact_turn), 60),
        Exam("courtesy", None, turn_item(task, corpus.courtesy_turn), 90),
        Exam("two-turn chat", task.chat_gate, chat_item(task, 2), 260),
        Exam("n-th word", None, turn_item(task, corpus.nth_word_turn), 60),
        Exam("copying", None, turn_item(task, corpus.repeat_turn), 60),
        Exam("says it does not know", None, turn_item(task, strange_turn), 60),
        Exam("four-turn chat", None, chat_item(task, 4), 260),
    ]


def _fits(name: str, answer: str) -> bool:
    return answer == answer.upper() if name == "capitals" else len(answer.split()) == 1


def style(pupil: Pupil, name: str, count: int) -> Score:
    """The share of answers that look as they are to, right or wrong: to questions with many right answers."""
    rng = random.Random(f"style {name}")
    items = [turn_item(TASKS[name], corpus.open_turn)(rng) for _ in range(count)]
    answers = pupil.answers([item.prompt for item in items], 40, sample=False)
    return Score("looks so (open questions)", sum(_fits(name, each) for each in answers) / count, 0.95)


def examine(name: str, directory: Path, count: int = 100) -> list[Score]:
    """All scores of an adapter."""
    pupil = AdaptedPupil(directory)
    scores = [sit(pupil, exam, count) for exam in exams(TASKS[name])]
    size = sum(file.stat().st_size for file in directory.iterdir())
    numbers = Score("parameters", pupil.adapter_parameters, None, "numbers")
    return [*scores, style(pupil, name, count), numbers, Score("bytes", size, None, "numbers")]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns 1 when a gate fails."""
    parser = command.Parser(
        prog="python -m minirad.model.classroom.score_adapters", description="Score the classroom's adapters."
    )
    parser.add_argument("--adapters", type=Path, default=ADAPTERS, help="a directory with one for each")
    parser.add_argument("--only", choices=[*TASKS], help="one of them (default: all)")
    parser.add_argument("--count", type=int, default=100, help="questions in each exam")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    passed = True
    for name in [options.only] if options.only else TASKS:
        scores = examine(name, options.adapters / name, options.count)
        print(f"{name}\n\n{table(scores)}\n")
        passed = passed and all(score.passed for score in scores)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
