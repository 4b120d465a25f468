"""Why did it miss? A tree with a memory, and an answer for each request.

    memory = Memory()                      # everything that ever was in a cache (memory.py)
    asked = Asked.of(tokens, page_size=16)
    print(why(memory, asked).describe())   # how far it hits, and why not further (answer.py)

Memory is fed from an engine's events (recorded.py), from a log that is replayed (history.py), or by hand.
"""

from minirad.why.answer import CAUSES, Answer, Asked, Loss, why
from minirad.why.memory import Departure, Memory

__all__ = ["CAUSES", "Answer", "Asked", "Departure", "Loss", "Memory", "why"]
