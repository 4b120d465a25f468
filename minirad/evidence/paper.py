"""What the SGLang paper says of each ablation (Zheng et al. 2024, arXiv 2312.07104v2), to put ours beside.

Its Figure 8c shows throughput as a share of that with everything on, for four workloads: LLM judge, tree of
thought, 5-shot MMLU, chats with short answers; Llama-7B on an A10G of 24 GB. It prints no numbers, nor does
the text, which says that "each of these components is required to achieve the best performance". So sizes
are rough: read off the plot, where one reader differs from another by a tenth or two.

Its Figures 8a and 8b are of the tree of thought, "partially disabling matched tokens at runtime": from a hit
rate near 0 to one near 1 the batch about doubles (20 to 40), throughput triples (0.4k to 1.2k tokens/s) and
the time to the first token halves (20 s to 10 s); read off the plot, too. Where nothing can hit (ShareGPT),
100 requests took 74.3 s, of which the tree's upkeep took 0.2 s (text of section 6.3).
"""

from __future__ import annotations

from dataclasses import dataclass

from minirad.evidence.ablations import FULL, SETTINGS


@dataclass(frozen=True, slots=True)
class Ablation:
    """sign: of throughput against "full"; size: its share of it; note: where ours differs, and why."""

    sign: str
    size: str
    note: str


LOWER, NOT_THERE = "lower", "not measured"

PAPER: dict[str, Ablation] = {
    FULL: Ablation("1", "1", ""),
    "no-cache": Ablation(
        LOWER, "0.15 (MMLU) to 0.5 (chats), read off the plot",
        "Lower wherever programs share a beginning, most where prompts are long and nothing is generated; "
        "even in the JSON kinds, which share nothing. The classroom Llama is so small that a step costs "
        "more than its tokens: tokens computed differ by more than time does.",
    ),
    "dictionary": Ablation(
        LOWER, "0.35 (tree of thought) to 0.9 (chats), read off the plot",
        "Lower where prompts share a beginning that nobody has asked for as such (examples, an agent's "
        "template, documents). Little or nothing where all that is shared was a hint or a turn, and so is "
        "an entry: judge, tree of thought. The paper has both lower, so its table must find less; of it "
        "the text says only that it is simple.",
    ),
    "fcfs": Ablation(
        LOWER, "0.2 (judge) to 1 (MMLU), read off the plot",
        "In chats nearly as low as no cache, as in the paper: until a chat's next turn comes, the others "
        "have taken its room. Lower than the paper's in mmlu-like, where questions of five subjects come "
        "in turn; equal where the pool holds what all share (react, rag, hellaswag-like), and in the tree "
        "of thought, which computes more and waits less: who does not look at the tree does not wait for "
        "a prefix of the batch, either.",
    ),
    "random": Ablation(
        LOWER, "0.45 (tree of thought) to 1 (MMLU), read off the plot",
        "As fcfs, but for chats: some next turns come before the others have taken the room.",
    ),
    "no-parallelism": Ablation(
        LOWER, "0.35 (tree of thought) to 1 (MMLU), read off the plot",
        "More steps wherever a program branches or chooses, the same where it asks for one thing at a "
        "time (react, rag, chats). Less than in the paper's judge and tree of thought, because the other "
        "programs fill the batch, up to what the pool holds; alone (latency) a tree of thought takes "
        "nearly three times as long. mmlu-like is lower, too, since its four answers are a `select` where "
        "the paper decodes one token.",
    ),
    "no-hint": Ablation(
        LOWER, "0.5 (judge) to 1 (MMLU), read off the plot",
        "Lower where a hint carries new text, such as the question before a `select`'s choices: a request "
        "that has 32 tokens cached does not wait for others of its batch. Not lower after a `gen`: of "
        "what a fork shares then the tree has all but the last token, so its hint saves a token a branch "
        "and costs a step in which nobody decodes (tree and skeleton of thought are faster without).",
    ),
    "no-in-batch-prefix": Ablation(
        NOT_THERE, "",
        "More tokens where programs that begin alike come together, cold. Where they send hints, these "
        "wait for each other, and the rest finds them.",
    ),
    "neither": Ablation(
        NOT_THERE, "",
        "No frontend hint in an engine like the paper's, which had no in-batch prefix.",
    ),
}  # fmt: skip

assert PAPER.keys() == SETTINGS.keys()
