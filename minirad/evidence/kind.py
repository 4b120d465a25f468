"""One kind of program: what it stands for in the paper, its jobs, and which answers are right."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from minirad.frontend import Job


@dataclass(frozen=True, slots=True)
class Kind:
    """A workload of the paper (Zheng et al. 2024, section 6), made here: no download, seeded.

    name: as the command line has it. paper: what it stands for, with the original's sizes; scaled: what is
    smaller here and why ("": nothing is). jobs: how many programs one run has. make: that many jobs, equal
    for equal seeds. right: whether a job's value is right; None where no answer is known.
    """

    name: str
    title: str
    paper: str
    scaled: str
    jobs: int
    make: Callable[[int, random.Random], tuple[Job, ...]]
    right: Callable[[Job, Any], bool | None]
