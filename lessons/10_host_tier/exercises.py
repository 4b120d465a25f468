"""What lesson 10 asks for, and its open cases.

A story plays requests twice: on the engine's tree with the student's function in it, and on one without.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from lessons.grading import Exercise, Failure, expect
from lessons.grading.tiers import Side, Twins

Case = Callable[[ModuleType], None]


def story(name: str, about: str, words: str, hint: int = 0, **setup: Any) -> Case:
    """A case: these moves, with the function `name` laid in. about: what is tried; hint: answers a failure.

    words: 123 serves the prompt [1, 2, 3], -6 evicts 6 tokens, S:123 starts a request, S. ends it.
    """
    moves = [_move(word) for word in words.split()]

    def case(impl: ModuleType) -> None:
        try:
            Twins(impl, name, **setup).play(*moves)
        except Failure as failure:
            raise Failure(f"{about} {failure.words}", failure.pictures, failure.hint or hint) from failure

    case.__doc__ = about
    return case


def _move(word: str) -> tuple[Any, ...]:
    if word.startswith("-"):
        return "evict", int(word[1:])
    if word.endswith("."):
        return "end", word[:-1]
    *name, tokens = word.split(":")
    prompt = [int(digit) for digit in tokens]
    return ("start", name[0], prompt) if name else ("serve", prompt)


def tell(about: str, words: str, **setup: Any) -> tuple[str, str, dict[str, Any]]:
    return about, words, setup


def stories(name: str, *told: tuple[str, str, dict[str, Any]]) -> list[Case]:
    return [story(name, about, words, **setup) for about, words, setup in told]


# ---------------------------------------------------------------------- write_through

WRITTEN = stories(
    "write_through",
    tell("One request.", "123"),
    tell("A prompt that goes on behind another.", "123 12345 12345", hint=1),
    tell("Two prompts that part.", "1234 129 12345"),
    tell("A prompt that is larger than the host.", "123456 129", host=4),
    tell("A node without a copy in the middle of the path.", "123456 129 1234567", host=4, hint=2),
    tell("A copy takes the place of an older one.", "123 -3 4567", host=4, hint=2),
    tell("The first copy goes wrong.", "123 12345", fails=(1,), hint=2),
    tell("Two nodes without a copy, and room for the first.", "12 12345", host=4, fails=(1,), hint=2),
    tell("The same node's copy goes wrong twice.", "123 12345 123456", fails=(1, 2), hint=2),
    tell("Only what is hit twice.", "123 123 123 1234 1234 456 1234", host_write="write_through_selective"),
    tell("Of what a prompt matches, only the beginning is hit twice.",
         "12 13111 13", host_write="write_through_selective"),
    tell("Hit twice, and refused once.",
         "123 123 123 1234 1234 123 1234", host_write="write_through_selective", fails=(1,)),
    tell("Two prompts that part, of which the beginning is hit more often.",
         "1234 129 128 12345 1299", host_write="write_through_selective", device=20),
)  # fmt: skip

# ---------------------------------------------------------------------- make_host_room

ROOM = stories(
    "make_host_room",
    tell("There is room.", "123 456", host=6),
    tell("The oldest goes, and no more than that.", "123 456 -6 78", host=6),
    tell("Two have to go.", "123 456 -6 6789", host=6),
    tell("The oldest goes, not the longest.", "12 3456 -6 7", host=6),
    tell("The older one was used again.", "123 456 -6 1239 -9 78", host=7, hint=2),
    tell("A chain, from its end.", "12 1234 -4 5 -1 678", host=4, hint=1),
    tell("A parent is older than another leaf, and goes as soon as its last child has gone.",
         "12 1234 5 -5 678", host=5),
    tell("What lies on the device as well keeps its copy.", "123 456", host=4, hint=1),
    tell("More than the whole host.", "12 -2 34567", host=4, hint=2),
    tell("As much as the whole host.", "12 -2 3456", host=4, hint=2),
    tell("All that may go is too little.", "45 -2 123 6789", host=6),
    tell("A child on the host protects its parent.",
         "12 123 9 -9 123 -9 56", host=4, load_back_threshold=9, hint=1),
    tell("What is about to be loaded is held.",
         "123 -3 456 1239", device=4, host=4, host_write="write_back", hint=1),
    tell("One is held, another is not.",
         "123 8 -4 456 1239", device=4, host=6, host_write="write_back", hint=1),
)  # fmt: skip

# ---------------------------------------------------------------------- evict

EVICTIONS = stories(
    "evict",
    tell("The oldest is demoted.", "123 456 -1"),
    tell("It was used again.", "123 456 123 -1"),
    tell("Two, for more tokens than one has.", "123 456 789 -4"),
    tell("More than there is.", "123 456 -50"),
    tell("No copy, and no write_back: it leaves the tree.", "123 456 -1", host=2, hint=1),
    tell("No copy, and no write_back, though the host has room: its copy went wrong before.",
         "123 456 -1", fails=(1,), hint=1),
    tell("Under write_back it is copied first.", "123 456 -1 -1", host_write="write_back", hint=1),
    tell("Under write_back, and the copy goes wrong.",
         "123 456 -1 -1", host_write="write_back", fails=(1,), hint=1),
    tell("Under write_back, and the host is too small.",
         "123 4 -9", host_write="write_back", host=2, hint=1),
    tell("A child on the host does not protect its parent.", "12 1234 -2 -2"),
    tell("A chain in one call.", "12 1234 12345 -4"),
    tell("A child on the device protects its parent.", "12 123 124 9 -2"),
    tell("What a running request reads stays.", "S:123 456 -9 S. -1"),
    tell("Not copied again after it was loaded.", "123 -3 1234 -9", host_write="write_back", hint=1),
    tell("No copy of the parent: what hangs below goes along.",
         "12 1234 456 -2 -3 -1", host_write="write_back", fails=(2,), hint=2),
    tell("No copy of the parent, and several hang below.",
         "1 12 123 124 -3 -1", host_write="write_back", fails=(4,), hint=2),
    tell("What goes along from the host is not counted.",
         "12 12345 -3 456 789 -4", host_write="write_back", fails=(2,), hint=2),
    tell("Its copy takes the place of what hangs below it.",
         "12 1234 -2 -2", host_write="write_back", host=3, hint=2),
    tell("Its copy takes the place of what hangs below it, and then goes wrong.",
         "12 1234 -2 -2", host_write="write_back", host=3, fails=(2,), hint=2),
)  # fmt: skip

# ---------------------------------------------------------------------- load_back

LOADS = stories(
    "load_back",
    tell("All of it is on the host.", "1234 -4 12345"),
    tell("Nothing is.", "123 1234 456"),
    tell("A part is.", "12 12345 -3 123456"),
    tell("Two nodes of it are.", "12 12345 -5 123456"),
    tell("As many as the threshold.", "1234 -4 12345", load_back_threshold=4),
    tell("One less than the threshold.", "1234 -4 12345678", load_back_threshold=5),
    tell("Too few, though the device's part and the host's are enough together.",
         "12 12345 -3 123456", load_back_threshold=4),
    tell("Its last token is computed in any case: one less is saved.",
         "1234 -4 1234", load_back_threshold=4),
    tell("Its last token is computed in any case, and three saved are enough.",
         "1234 -4 1234", load_back_threshold=3),
    tell("Only the last token is on the host.", "123 1234 -1 1234"),
    tell("Two tokens are on the host, of which one is of use.",
         "123 12345 -2 12345", load_back_threshold=1),
    tell("Room has to be made: what lacks, not more.", "1234 -4 56 78 12349", device=7, hint=1),
    tell("There is room already.", "1234 -4 56 12349", device=7, hint=1),
    tell("There is just room.", "1234 -4 56 1234", device=6, hint=1),
    tell("Below the threshold nothing is evicted for it.",
         "1234 -4 56 78 12349", device=7, load_back_threshold=5, hint=2),
    tell("No room can be made.", "1234 -4 S:5678 12349 S. 12349", device=7, hint=1),
    tell("Room for the first of two nodes is not enough.",
         "12 1234 -4 S:5678 12349 S. 12349", device=7, hint=1),
    tell("What has to go is copied, and the host is full.",
         "123 -3 456 1239", device=4, host=4, host_write="write_back", hint=2),
    tell("Two nodes to load, what has to go is copied, and the host is full.",
         "1 123 -3 456 1239 4569", device=4, host=4, host_write="write_back", hint=2),
)  # fmt: skip

# ---------------------------------------------------------------------- break_even

Times = Sequence[tuple[int, float]]


def asked(impl: ModuleType, loads: Times, prefills: Times, wanted: int | None, hint: int = 0) -> None:
    """One call of break_even, and what it should return."""
    got = impl.break_even(list(loads), list(prefills))
    right = got is None if wanted is None else not isinstance(got, bool | None) and got == wanted
    words = f"break_even({_said(loads)}, {_said(prefills)}) returned {got!r} instead of {wanted}"
    expect(right, words, hint=hint)


def _said(times: Times) -> str:
    return "[" + ", ".join(f"({tokens}, {seconds:.6g})" for tokens, seconds in times) + "]"


def line(start: float, slope: float, *tokens: int) -> Times:
    """Measurements without noise."""
    return [(each, start + slope * each) for each in tokens]


def by_hand(impl: ModuleType) -> None:
    """A load takes 2.85 ms and 0.01 ms a token, a pass 8 ms and 0.11 ms a token: 2.85 / 0.1 = 28.5."""
    asked(impl, line(0.00285, 0.00001, 10, 100, 400), line(0.008, 0.00011, 1, 50, 200), 29, 1)


def passes_cost_the_same(impl: ModuleType) -> None:
    """However long a pass takes to be launched: it is launched either way."""
    loads = line(0.0105, 0.001, 1, 10, 100)
    for start in (0.0, 0.001, 0.5):
        asked(impl, loads, line(start, 0.003, 1, 20, 50), 6, 1)


def at_least_one(impl: ModuleType) -> None:
    """Copies that cost next to nothing to begin."""
    asked(impl, line(0.0001, 0.001, 1, 10), line(0.2, 0.003, 1, 20), 1, 2)
    asked(impl, line(-0.02, 0.001, 1, 10), line(0.2, 0.003, 1, 20), 1, 2)


def never(impl: ModuleType) -> None:
    """A token is fetched more slowly than it is computed."""
    asked(impl, line(0.01, 0.003, 1, 10, 30), line(0.2, 0.001, 1, 20, 30), None, 2)
    asked(impl, line(-0.01, 0.003, 1, 10, 30), line(0.2, 0.001, 1, 20, 30), None, 2)


def in_any_order(impl: ModuleType) -> None:
    """Measurements in any order, some of them repeated."""
    asked(impl, line(0.0105, 0.001, 100, 1, 10, 1), line(0.1, 0.003, 50, 1, 50, 20), 6)


def least_squares(impl: ModuleType) -> None:
    """Noise: the line through all points, not the one through two of them."""
    loads = [(10, 0.0151), (20, 0.0118), (30, 0.0142), (40, 0.0159)]
    prefills = [(10, 0.0300), (20, 0.0560), (30, 0.0710), (40, 0.0840)]
    asked(impl, loads, prefills, 8)


def the_engine_takes_the_quicker_way(impl: ModuleType) -> None:
    """The engine with this threshold: for each length it takes the way that is quicker."""
    for start, slope, computing in ((0.0105, 0.001, 0.003), (0.0333, 0.001, 0.004), (0.01, 0.003, 0.001)):
        loads, prefills = line(start, slope, 1, 10, 100), line(0.05, computing, 1, 20, 50)
        got = impl.break_even(loads, prefills)
        fine = got is None or (not isinstance(got, bool) and got == int(got) >= 1)
        expect(fine, f"break_even returned {got!r}: a whole number of tokens is asked for, or None")
        threshold = 10**9 if got is None else int(got)
        for length in range(1, 24):
            fetched, quicker = _fetches(length, threshold), start + slope * length < computing * length
            words = (
                f"a load takes {start:g} + {slope:g} n seconds, n tokens more make a pass {computing:g} n "
                f"longer. With the threshold {got} the engine {'fetches' if fetched else 'computes'} "
                f"{length} tokens"
            )
            expect(fetched == quicker, words, hint=1)


def _fetches(length: int, threshold: int) -> bool:
    """Whether the engine loads so many tokens back from the host, with a threshold of so many."""
    side = Side({}, (), 64, 64, load_back_threshold=threshold)
    side.play(("start", "first", range(length)), ("end", "first"), ("evict", length))
    side.play(("start", "again", range(length + 1)))
    return side.manager.loaded_tokens > 0


EVEN = (
    by_hand, passes_cost_the_same, at_least_one, never, in_any_order, least_squares,
    the_engine_takes_the_quicker_way,
)  # fmt: skip

EXERCISES = [
    Exercise(
        "write_through", 2, WRITTEN,
        hints=(
            "Walk the path from the top. Of each node ask: has it a copy? Has it hits enough?",
            "A node that has a copy (node.on_host) is passed over, and the walk goes on below it.",
            "When tiers.copy says False, leave the loop. Add up node.size of what this call copied.",
        ),
    ),
    Exercise(
        "make_host_room", 2, ROOM,
        hints=(
            "As long as too few slots are free: who may go now? Take the oldest, then look again.",
            "May go: not on_device, nothing in below, not held. Each tiers.remove changes tiers.nodes() and "
            "tiers.host_free.",
            "min(those, key=lambda node: node.last_access). Compare num_tokens with tiers.host_size before "
            "you begin.",
        ),
    ),
    Exercise(
        "evict", 4, EVICTIONS,
        hints=(
            'As in lesson 03, but "leaf" means: no child on the device.',
            "A victim has a copy, or gets one now (write_back, and tiers.copy says True): demote it. Else it "
            "leaves the tree.",
            "Before a node is removed all of node.below is, and before each of these what hangs below it. "
            "Ask for below after the copy was tried. Only the victim's own tokens count as freed.",
        ),
    ),
    Exercise(
        "load_back", 2, LOADS,
        hints=(
            "Three numbers first: what does the host's part hold? How much of the whole match is of "
            "use? How much of the device's part alone?",
            "What lacks is the host's part less tiers.device_free; evict that, and only if it is more than "
            "0. Look at tiers.device_free again before you load.",
            "Decide, hold, evict, load or not, release, in this order; no way out between hold and release.",
        ),
    ),
    Exercise(
        "break_even", 2, EVEN,
        hints=(
            "Two lines over n: what a load of n tokens takes, and what n more tokens add to a pass.",
            "The second line goes through 0: the pass's own a is paid either way. The first does not: every "
            "copy is begun.",
            "a + b_load * n < b_pass * n. If b_pass is not larger, there is no such n. Else the next whole "
            "number above a / (b_pass - b_load), and never less than 1.",
        ),
    ),
]  # fmt: skip
