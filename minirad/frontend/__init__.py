"""Chats and programs on top of the engine.

* `ChatSession`: one conversation, turn by turn.
* `run`, `run_many`: programs that generate, select, fork and join; see player.py for how they are written.

Does not import torch: the same programs run on a simulation.
"""

from __future__ import annotations

from minirad.frontend.chat import CHATML, ChatSession, Template
from minirad.frontend.player import (
    Asked,
    Job,
    Outcome,
    Program,
    ProgramPlayer,
    Usage,
    play,
    run,
    run_many,
)
from minirad.frontend.state import Branches, Said, State
from minirad.frontend.tasks import ProgramError, Task

__all__ = [
    "CHATML",
    "Asked",
    "Branches",
    "ChatSession",
    "Job",
    "Outcome",
    "Program",
    "ProgramError",
    "ProgramPlayer",
    "Said",
    "State",
    "Task",
    "Template",
    "Usage",
    "play",
    "run",
    "run_many",
]
