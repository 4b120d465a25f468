"""What the SGLang paper says of each ablation (Zheng et al. 2024, arXiv 2312.07104v2), to put ours beside.

Its Figure 8c shows throughput as a share of that with everything on, for four workloads (LLM judge, tree of
thought, 5-shot MMLU, chats with short answers; Llama-7B on an A10G of 24 GB). It prints no numbers: sizes are
read off the plot, and two people reading it differ by a tenth or two. The text says that "each of these
components is required to achieve the best performance".
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
    "no-cache": Ablation(LOWER, "0.15 (MMLU) to 0.5 (chats), read off the plot", ""),
    "dictionary": Ablation(LOWER, "0.35 (tree of thought) to 0.9 (chats), read off the plot", ""),
    "fcfs": Ablation(LOWER, "0.2 (judge) to 1 (MMLU), read off the plot", ""),
    "random": Ablation(LOWER, "0.45 (tree of thought) to 1 (MMLU), read off the plot", ""),
    "no-parallelism": Ablation(LOWER, "0.35 (tree of thought) to 1 (MMLU), read off the plot", ""),
    "no-hint": Ablation(LOWER, "0.5 (judge) to 1 (MMLU), read off the plot", ""),
    "no-in-batch-prefix": Ablation(NOT_THERE, "", ""),
    "neither": Ablation(NOT_THERE, "", ""),
}

assert PAPER.keys() == SETTINGS.keys()
