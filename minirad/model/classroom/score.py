"""Examines a classroom model on lessons of seeds it was not trained on.

    python -m minirad.model.classroom.score [--model DIR] [--draft-head DIR] [--json]

The model runs in Hugging Face transformers in float32, one greedy answer a question, so the scores
do not depend on any engine of this project. So does a draft head, over whole replies in plain torch. The
exit code is 1 when a gate fails.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from minirad import command
from minirad.model.classroom import DRAFT_HEAD, WEIGHTS, corpus
from minirad.model.classroom.train import Student
from minirad.model.classroom.train_head import DraftStudent, load_head, load_target

SEED: Final = "examination"


@dataclass(frozen=True)
class Item:
    """A prompt and the only right answer."""

    prompt: str
    answer: str


@dataclass(frozen=True)
class Exam:
    """A kind of question and the share of right answers it demands, if any."""

    name: str
    gate: float | None
    ask: Callable[[random.Random], Item]
    new_tokens: int = 40

    def items(self, count: int) -> list[Item]:
        """The first `count` questions."""
        rng = random.Random(f"{SEED} {self.name}")
        return [self.ask(rng) for _ in range(count)]


@dataclass(frozen=True)
class Score:
    """The outcome of an exam: `value` against `gate` (None: only reported)."""

    name: str
    value: float
    gate: float | None = None
    unit: str = "share"

    @property
    def passed(self) -> bool:
        """Whether the gate is reached; a score without a gate passes."""
        return self.gate is None or self.value >= self.gate


# --------------------------------------------------------------------------------------------
# Questions


def _last_reply(messages: Sequence[dict[str, str]]) -> Item:
    """Asks for the last reply of a chat."""
    prompt = corpus.chat_text(messages[:-1], add_generation_prompt=True)
    return Item(prompt, messages[-1]["content"])


def _turn_item(turn: corpus.Turn) -> Item:
    """Asks one question under the usual system prompt."""
    system = corpus.message("system", corpus.SYSTEM_PROMPT)
    user = corpus.message("user", turn.user)
    return _last_reply([system, user, corpus.message("assistant", turn.reply)])


def chat_item(turns: int, system: str) -> Callable[[random.Random], Item]:
    """The last reply of a chat of `turns` turns."""

    def ask(rng: random.Random) -> Item:
        return _last_reply(corpus.chat_messages(rng, turns, system, exact=True))

    return ask


def lookup_item(count: int) -> Callable[[random.Random], Item]:
    """What one person has, among `count` facts told by the user."""

    def ask(rng: random.Random) -> Item:
        facts = corpus.lookup_facts(rng, count)
        turn = corpus.lookup_turn(facts, rng.choice(list(facts)))
        user = f"{corpus.lookup_text(facts)} {turn.user}"
        return _turn_item(corpus.Turn(user, turn.reply, turn.short))

    return ask


def recall_item(rng: random.Random) -> Item:
    """The user's name, told one to three turns before."""
    while True:
        messages = corpus.recall_messages(rng, rng.randint(0, 2))
        if messages[-2]["content"] == "What is my name?" and " is " in messages[-1]["content"]:
            return _last_reply(messages)


def few_shot_item(rng: random.Random) -> Item:
    """A question with one right answer behind five solved ones, in plain text."""
    header = corpus.few_shot_header(corpus.few_shot_examples(5, rng))
    turn = corpus.fact_turn(rng)
    return Item(header + corpus.few_shot_question(6, turn.user), f" {turn.short}.")


STRANGE_QUESTIONS: Final = (
    "Who wrote Hamlet?",
    "How do airplanes fly?",
    "What is the meaning of life?",
    "Can you book a hotel in Boston for me?",
    "Explain quantum mechanics.",
    "What is the capital of Australia?",
    "Why is the earth round?",
    "Please translate this sentence into French.",
    "Which movie should I watch tonight?",
    "How tall is Mount Everest?",
    "write a python function that sorts a list",
    "Do you like football?",
)
"""Questions that no lesson treats; the right answer is that the model does not know."""


def strange_item(rng: random.Random) -> Item:
    """A question from outside the lessons."""
    question = rng.choice(STRANGE_QUESTIONS)
    return _turn_item(corpus.Turn(question, corpus.UNKNOWN_REPLY, ""))


EXAMS: Final = (
    Exam("greeting", 0.95, lambda rng: _turn_item(corpus.greeting_turn(rng)), 16),
    Exam("two-turn chat", 0.95, chat_item(2, corpus.SYSTEM_PROMPT), 110),
    Exam("four-turn chat", 0.95, chat_item(4, corpus.SYSTEM_PROMPT), 110),
    Exam("name recall", 0.95, recall_item, 12),
    Exam("copying", 0.95, lambda rng: _turn_item(corpus.repeat_turn(rng)), 40),
    Exam("5-shot answers", 0.90, few_shot_item, 10),
    Exam("look-up, 4 facts", 0.60, lookup_item(4), 12),
    Exam("look-up, 6 facts", None, lookup_item(6), 12),
    Exam("facts", None, lambda rng: _turn_item(corpus.fact_turn(rng)), 24),
    Exam("word problems", None, lambda rng: _turn_item(corpus.problem_turn(rng)), 110),
    Exam("agent, two turns", None, chat_item(2, corpus.AGENT_PROMPT), 110),
    Exam("eight-turn chat", None, chat_item(8, corpus.SYSTEM_PROMPT), 110),
    Exam("thirty-turn chat", None, chat_item(30, corpus.SYSTEM_PROMPT), 110),
    Exam("says it does not know", None, strange_item, 40),
    Exam("held-out sums", None, lambda rng: _turn_item(corpus.sum_turn(rng, held_out=True)), 16),
    Exam("copying made-up words", None, lambda rng: _turn_item(corpus.repeat_turn(rng, 1.0)), 60),
)
DIVERSE_PROMPTS: Final = (
    corpus.chat_text(
        [corpus.message("system", corpus.SYSTEM_PROMPT), corpus.message("user", corpus.STORIES[0])],
        add_generation_prompt=True,
    ),
    corpus.few_shot_header(corpus.few_shot_examples(4, random.Random(SEED)))
    + corpus.few_shot_question(5, "Name an animal."),
)
DIVERSE_NAMES: Final = ("story", "Name an animal.")


# --------------------------------------------------------------------------------------------
# Answers


class Pupil:
    """A model and its tokenizer, as transformers load them."""

    def __init__(self, directory: Path) -> None:
        from transformers import AutoTokenizer, LlamaForCausalLM  # two seconds, which --help needs not wait

        self.tokenizer: Any = AutoTokenizer.from_pretrained(directory)
        self.tokenizer.padding_side = "left"
        self.model: Any = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        return sum(p.numel() for p in self.model.parameters())

    def tokens(self, text: str, longest: int) -> Tensor:
        """The first `longest` tokens of a text [1, T]."""
        batch = self.tokenizer(text, return_tensors="pt", truncation=True, max_length=longest)
        ids: Tensor = batch.input_ids
        return ids

    @torch.no_grad()
    def answers(self, prompts: Sequence[str], new_tokens: int, sample: bool = False) -> list[str]:
        """The continuations of prompts, up to the end of the turn (chat) or line (few-shot).

        Greedy, or with `sample` at temperature 1 from the whole distribution.
        """
        batch = self.tokenizer(list(prompts), return_tensors="pt", padding=True)
        choice: dict[str, Any] = {"do_sample": False}
        if sample:
            choice = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
        tokens = self.model.generate(
            input_ids=batch.input_ids,
            attention_mask=batch.attention_mask,
            max_new_tokens=new_tokens,
            **choice,
        )
        texts = self.tokenizer.batch_decode(tokens[:, batch.input_ids.shape[1] :])
        return [text.split("<|im_end|>")[0].split("\n")[0] for text in texts]

    @torch.no_grad()
    def loss_at(self, documents: Sequence[str], first: int, last: int) -> float:
        """Mean loss per token (nats) at positions `first` to `last` of long texts, all roles."""
        losses: list[Tensor] = []
        for document in documents:
            ids = self.tokens(document, last)
            logits = self.model(ids).logits[0, first - 1 : -1]
            losses.append(torch.nn.functional.cross_entropy(logits, ids[0, first:]))
        return torch.stack(losses).mean().item()


def sit(pupil: Pupil, exam: Exam, count: int, batch: int = 25) -> Score:
    """The share of right answers to `count` questions."""
    items = exam.items(count)
    # Prompts of similar length go together, so that little padding is computed.
    items.sort(key=lambda item: len(item.prompt))
    right = 0
    for first in range(0, count, batch):
        part = items[first : first + batch]
        answers = pupil.answers([item.prompt for item in part], exam.new_tokens)
        right += sum(item.answer == answer for item, answer in zip(part, answers, strict=True))
    return Score(exam.name, right / count, exam.gate)


def diversity(pupil: Pupil) -> list[Score]:
    """How many of eight samples at temperature 1 differ from each other."""
    scores = []
    for name, prompt in zip(DIVERSE_NAMES, DIVERSE_PROMPTS, strict=True):
        torch.manual_seed(0)
        answers = pupil.answers([prompt] * 8, 24, sample=True)
        scores.append(Score(f"different in 8: {name}", len(set(answers)), 3, "answers"))
    return scores


def long_losses(pupil: Pupil, count: int) -> list[Score]:
    """The loss per token at short and at long context, on `count` texts of 2,000 tokens or more."""
    rng = random.Random(f"{SEED} long")
    texts: list[str] = []
    while len(texts) < count:
        text = corpus.chat_text(corpus.chat_messages(rng, 80, corpus.SYSTEM_PROMPT))
        if pupil.tokens(text, 2000).shape[1] == 2000:
            texts.append(text)
    return [
        Score(f"loss at {first}-{last}", pupil.loss_at(texts, first, last), None, "nats/token")
        for first, last in ((100, 500), (1000, 1500), (1500, 2000))
    ]


def examine(directory: Path, count: int = 100, draft_head: Path | None = None) -> list[Score]:
    """All scores of a model, and those of a draft head for it."""
    pupil = Pupil(directory)
    # First, so that a head that does not fit is named at once.
    drafts = [] if draft_head is None else draft_scores(pupil, directory, draft_head, count)
    scores = [sit(pupil, exam, count) for exam in EXAMS]
    scores += diversity(pupil) + long_losses(pupil, 8) + drafts
    return [*scores, Score("parameters", pupil.parameters, None, "numbers")]


# --------------------------------------------------------------------------------------------
# Drafts


DRAFTS: Final = 4
"""Drafts in a row, as the engine makes them if not told otherwise."""
DRAFT_GATES: Final = (0.80, None, None, 0.45)
"""The share of right drafts that is demanded of the first, of the first two, ..."""
TOKENS_GATE: Final = 3.0


@torch.no_grad()
def greedy(pupil: Pupil, prompts: Sequence[str], new_tokens: int) -> list[tuple[list[int], list[int]]]:
    """Each prompt's tokens and those of its greedy reply, the end of the turn included."""
    batch = pupil.tokenizer(list(prompts), return_tensors="pt", padding=True)
    rows = pupil.model.generate(
        input_ids=batch.input_ids,
        attention_mask=batch.attention_mask,
        max_new_tokens=new_tokens,
        do_sample=False,
    )
    found = []
    for mask, row in zip(batch.attention_mask.tolist(), rows.tolist(), strict=True):
        reply = row[len(mask) :]
        end = pupil.model.config.eos_token_id
        reply = reply[: reply.index(end) + 1] if end in reply else reply
        found.append((row[len(mask) - sum(mask) : len(mask)], reply))
    return found


@torch.no_grad()
def accepted(target: Student, head: DraftStudent, prompt: list[int], reply: list[int]) -> list[int]:
    """How many of `DRAFTS` drafts are the model's own choice behind each token of a greedy reply.

    A draft counts only where all before it are right, so the reply's own tokens can stand for them, and
    drafts are made behind every token at once.
    """
    tokens = torch.tensor([prompt + reply])
    hidden = target.hidden(tokens[:, :-2])
    features = head.drafts(target.model.embed_tokens(tokens[:, 1:-1]), hidden, DRAFTS)
    # unit p's draft j guesses token p + 2, made from the true tokens up to p + 2 - j
    right = [(target.logits(f)[0].argmax(-1) == tokens[0, 2:]).tolist() for f in features]
    counts = []
    for first in range(len(prompt), len(prompt) + len(reply) - 1):  # the last token known
        count = 0
        while count < min(DRAFTS, len(tokens[0]) - 1 - first) and right[count][first - 1 + count]:
            count += 1
        counts.append(count)
    return counts


def draft_scores(pupil: Pupil, model: Path, directory: Path, count: int) -> list[Score]:
    """What a draft head's drafts are worth, over `count` greedy replies to each exam's prompts."""
    target, shape = load_target(model)
    head = load_head(directory, shape)
    reached, places, passes, tokens = [0] * DRAFTS, [0] * DRAFTS, 0, 0
    for exam in EXAMS:
        prompts = sorted((item.prompt for item in exam.items(count)), key=len)
        for prompt, reply in greedy(pupil, prompts, exam.new_tokens):
            counts = accepted(target, head, prompt, reply)
            for j in range(DRAFTS):
                whole = counts[: len(counts) - j]  # behind the others the reply ends sooner
                places[j] += len(whole)
                reached[j] += sum(number > j for number in whole)
            at = 0  # as an engine goes: it verifies, and drafts again behind the last token accepted
            while at < len(counts):
                got = min(counts[at] + 1, len(counts) - at)  # the model's own next token comes with them
                passes, tokens, at = passes + 1, tokens + got, at + got
    names = ["first draft right", *(f"first {j} drafts right" for j in range(2, DRAFTS + 1))]
    rows = zip(names, reached, places, DRAFT_GATES, strict=True)
    scores = [Score(name, right / all_, gate) for name, right, all_, gate in rows]
    return [*scores, Score("tokens a pass, with drafts", tokens / passes, TOKENS_GATE, "tokens")]


def table(scores: Sequence[Score]) -> str:
    """The scores as a Markdown table."""
    lines = ["| exam | score | gate |", "|---|---|---|"]
    for score in scores:
        value = f"{score.value:.1%}" if score.unit == "share" else f"{score.value:,.4g}"
        if score.unit == "numbers":
            value = f"{score.value:,}"
        gate = "" if score.gate is None else f"{score.gate:.0%}"
        if score.gate is not None and score.unit != "share":
            gate = f"{score.gate:g}"
        mark = "" if score.passed else " **failed**"
        lines.append(f"| {score.name} | {value} | {gate}{mark} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns 1 when a gate fails."""
    parser = command.Parser(
        prog="python -m minirad.model.classroom.score", description="Score a classroom model."
    )
    parser.add_argument("--model", type=Path, default=WEIGHTS, help="a Hugging Face directory")
    parser.add_argument(
        "--draft-head", type=Path, help="a head's directory; else the shipped model's is taken"
    )
    parser.add_argument("--count", type=command.positive, default=100, help="questions in each exam")
    parser.add_argument("--threads", type=command.positive, default=1)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args(arguments)
    return command.run(parser.prog, lambda: _main(options))


def _main(options: argparse.Namespace) -> int:
    torch.set_num_threads(options.threads)
    head = DRAFT_HEAD if options.model == WEIGHTS and not options.draft_head else options.draft_head
    scores = examine(options.model, options.count, head)
    if options.json:
        content = [{**vars(score), "passed": score.passed} for score in scores]
        print(json.dumps(content, indent=2))
    else:
        print(table(scores))
    return 0 if all(score.passed for score in scores) else 1


if __name__ == "__main__":
    sys.exit(main())
