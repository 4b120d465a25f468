"""What lesson 11 asks for, and its open cases: forks, choices and trees of thought on the engine."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from numbers import Real
from types import ModuleType
from typing import Any, TypeVar

import torch  # noqa: F401  (mapped before the limit on memory is set)

from lessons.grading import Exercise, Failure, expect
from lessons.grading.desk import (
    Call,
    Desk,
    ExactEngine,
    Thinking,
    Thought,
    classroom_engine,
    endless,
    engines,
    forked,
    forking,
    run_program,
    selected,
)
from lessons.grading.shared import whole
from lessons.grading.words import said, shown
from minirad.frontend import ProgramError

D = TypeVar("D", bound=Desk)

MEMORY_MB = 2048

# ---------------------------------------------------------------------- what a fork costs

Fork = tuple[int, tuple[int, ...], int, int]  # prefix, own, new_tokens, chunk

SIDE_BY_SIDE = ((True, True), (False, True))  # hint, parallel
ONE_BY_ONE = ((True, False), (False, False))
BY_HAND: tuple[Fork, ...] = (
    (40, (2, 2, 2, 2, 2), 3, 100),  # the README's
    (40, (2, 2, 2, 2, 2), 1, 512),
    (8, (2, 2, 2, 2), 2, 20),  # the first two fill the step
    (9, (5,), 4, 30),
    (8, (3, 9, 1, 5), 2, 20),  # as many as two lines above, but of other lengths
    (8, (2, 2, 2, 2), 1, 10),  # the first one fills it
    (7, (3, 3, 3), 2, 19),  # one token is left for the second, but one
    (1, (4, 1, 3, 2, 1, 6), 2, 7),
    (20, (1, 12, 12, 1, 1), 2, 64),  # the first is short
    (5, (9, 8, 7, 6, 5, 4, 3), 1, 14),
)


def all_by_hand() -> Iterator[tuple[int, tuple[int, ...], int, int, bool, bool]]:
    """Side by side all of them, one by one some."""
    for place, fork in enumerate(BY_HAND):
        for way in (*SIDE_BY_SIDE, *(ONE_BY_ONE if place % 3 == 0 else ())):
            yield *fork, *way


def prompts_by_hand(impl: ModuleType) -> None:
    """Forks of a few branches, each way."""
    for prefix, own, new, chunk, hint, parallel in all_by_hand():
        check_computed(impl, prefix, own, new, chunk, hint, parallel)


def steps_by_hand(impl: ModuleType) -> None:
    """Forks of a few branches, each way."""
    for prefix, own, new, chunk, hint, parallel in all_by_hand():
        check_steps(impl, prefix, own, new, chunk, hint, parallel)


def check_computed(
    impl: ModuleType, prefix: int, own: tuple[int, ...], new: int, chunk: int, hint: bool, parallel: bool
) -> None:
    """Asks for the tokens of one fork, and the engine."""
    with engines(run=False):
        got = impl.computed_tokens(prefix, list(own), chunk, hint, parallel)
    tokens, _, each = forked(prefix, own, new, chunk, hint, parallel)
    whose = f"the hint {each[0]}, the branches {list(each[1:])}" if hint else f"the branches {list(each)}"
    expect(
        whole(got) == tokens,
        f"computed_tokens(prefix={prefix}, own={list(own)}, chunk={chunk}, hint={hint}, parallel={parallel}) "
        f"gave {shown(got)}; the engine computes {tokens} ({whose})",
        hint=0 if hint or not parallel else 1,
    )


def check_steps(
    impl: ModuleType, prefix: int, own: tuple[int, ...], new: int, chunk: int, hint: bool, parallel: bool
) -> None:
    """Asks for the steps of one fork, and the engine."""
    with engines(run=False):
        got = impl.steps(prefix, list(own), new, chunk, hint, parallel)
    tokens, wanted, _ = forked(prefix, own, new, chunk, hint, parallel)
    expect(
        whole(got) == wanted,
        f"steps(prefix={prefix}, own={list(own)}, new_tokens={new}, chunk={chunk}, hint={hint}, "
        f"parallel={parallel}) gave {shown(got)}; the engine takes {wanted} (and computes {tokens} tokens)",
        hint=2 if not parallel else int(tokens - prefix * hint > chunk),
    )


def lengths_stay(impl: ModuleType) -> None:
    """The list of lengths is the caller's."""
    own = [3, 1, 2]
    impl.computed_tokens(5, own, 20, False, True)
    expect(own == [3, 1, 2], f"computed_tokens changed the list `own` to {own}")


def on_the_engine(prefix: int, own: Sequence[int], chunk: int, hint: bool, parallel: bool) -> int:
    """computed_tokens by asking the engine: in `steps`, a wrong one of a student's counts only once."""
    with engines(run=True):
        return forked(prefix, tuple(own), 1, chunk, bool(hint), bool(parallel))[0]


# ---------------------------------------------------------------------- fork

Branches = list[list[int]]
THREE: Branches = [[1, 2], [3], [4, 5, 6]]


def tokens(count: int, first: int = 1000) -> list[int]:
    """So many different ids."""
    return list(range(first, first + count))


def check_fork(
    impl: ModuleType,
    prefix: list[int],
    branches: Branches,
    new: int,
    chunk: int = 512,
    about: str = "",
    kv_tokens: int = 4096,
    before: Callable[[Desk, Call], None] = lambda desk, call: None,
) -> Desk:
    """Has a student fork at a desk; holds requests, tokens, steps and replies against the frontend's fork."""
    where = f"fork of {len(branches)} branches behind {len(prefix)} tokens{about}"
    theirs = run_program(ExactEngine(chunk=chunk), forking, prefix, branches, new)
    desk = Desk(ExactEngine(kv_tokens, chunk))
    desk.before = lambda call: before(desk, call)
    mine, given = copy.deepcopy(prefix), copy.deepcopy(branches)
    replies = impl.fork(desk, mine, given, new)
    expect((mine, given) == (prefix, branches), f"{where}: it changed what it was given")
    same_requests(where, desk, theirs.prompts, [0] * bool(prefix) + [new] * len(branches))
    same_replies(where, replies, theirs.value)
    pinned_in_time(where, desk, prefix, hint=1)
    expect(
        desk.computed == theirs.computed or kv_tokens < 4096,
        f"{where}: the engine computed {desk.computed} prompt tokens, the frontend's fork needs "
        f"{theirs.computed}: is the hint done before the branches are sent?",
    )
    expect(
        desk.steps <= theirs.steps or kv_tokens < 4096,
        f"{where}: it took {desk.steps} steps, the frontend's fork {theirs.steps}: the branches should run "
        "side by side, so send all of them before you wait",
        hint=2,
    )
    return desk


def same_requests(where: str, desk: Desk, prompts: Sequence[Sequence[int]], news: Sequence[int]) -> None:
    """What was sent, one after another."""
    wanted = [Call("send", tuple(prompt), new) for prompt, new in zip(prompts, news, strict=True)]
    got = [call._replace(names=()) for call in desk.requests]
    for number, (mine, theirs) in enumerate(zip(got, wanted, strict=False), start=1):
        words = f"{where}: request {number} was {mine.told}; it should be {theirs.told}"
        expect(mine == theirs, words)
    expect(len(got) == len(wanted), f"{where}: {len(got)} requests were sent, it should be {len(wanted)}")


def same_replies(where: str, replies: Any, wanted: list[list[int]]) -> None:
    expect(isinstance(replies, list), f"{where}: it returned {shown(replies)}, not the list of replies")
    got = [list(reply) for reply in replies]
    words = f"{where}: the replies are {shown(got)}; in the branches' order: {shown(wanted)}"
    expect(got == wanted, words, hint=2)


def pinned_in_time(where: str, desk: Desk, prefix: Sequence[int], hint: int) -> None:
    """One pin of the whole prefix, given back when all requests were done; hint: about giving it back."""
    pins = [call for call in desk.calls if call.kind == "pin"]
    if not prefix:
        return expect(not pins, f"{where}: an empty prefix was pinned")
    expect(len(pins) == 1, f"{where}: {len(pins)} pins were taken, it should be one: of the prefix")
    expect(
        pins[0].number == len(prefix) == len(pins[0].tokens),
        f"{where}: you pinned {len(pins[0].tokens)} tokens, and the tree had {pins[0].number} of them at "
        f"that moment; it should be the prefix, all {len(prefix)}, when its hint is done",
    )
    given_back(where, desk, hint)
    early = next(call.number for call in desk.calls if call.kind == "unpin")
    expect(early == 0, f"{where}: the pin was given back while {early} requests were not done", hint=hint)


def given_back(where: str, desk: Desk, hint: int) -> None:
    expect(not desk.held, f"{where}: the pin was not given back (unpin)", hint=hint)


def fork_by_hand(impl: ModuleType) -> None:
    """Three branches behind ten tokens."""
    check_fork(impl, tokens(10), THREE, 4)


def fork_of_one(impl: ModuleType) -> None:
    """A fork of one branch, and of two equal ones."""
    check_fork(impl, tokens(6), [[1, 2]], 3)
    check_fork(impl, tokens(6), [[7, 8], [7, 8]], 3)


def fork_in_small_steps(impl: ModuleType) -> None:
    """A step computes less than the prefix."""
    for new in (1, 2):  # with one new token the first branches are done a step before the last
        check_fork(impl, tokens(30), [[n, n + 1] for n in range(8)], new, chunk=12, about=" in steps of 12")


def fork_of_nothing(impl: ModuleType) -> None:
    """An empty prefix."""
    check_fork(impl, [], THREE, 2)


def fork_among_others(impl: ModuleType) -> None:
    """Others are served between the hint and the branches, in a pool of 70 slots."""
    met = []

    def before(desk: Desk, call: Call) -> None:
        if call.kind == "send" and call.number and not met:
            met.append(call)
            desk.other(tokens(30, 2000))
            desk.other(tokens(40, 3000))

    about = ", others being served in between"
    desk = check_fork(impl, tokens(20), THREE, 3, about=about, kv_tokens=70, before=before)
    branches = [desk.cached[call.names[0]] for call in desk.requests[1:]]
    expect(
        branches == [20] * 3,
        f"fork behind 20 tokens{about}: the branches found {branches} of these in the tree: the prefix was "
        "evicted",
    )


def fork_that_is_refused(impl: ModuleType) -> None:
    """The last branch is longer than the pool: desk.send raises ValueError."""
    desk = Desk(ExactEngine(64))
    where = "fork whose last branch is longer than the pool"
    try:
        got = impl.fork(desk, tokens(20), [[1], tokens(90, 3000)], 2)
    except ValueError:
        given_back(f"{where} (desk.send raises ValueError)", desk, hint=1)
    else:
        raise Failure(f"{where}: desk.send raised ValueError, and it returned {shown(got)}", hint=1)


def interrupted(desk: D) -> D:
    """A desk whose wait for more than one request raises an error."""

    def before(call: Call) -> None:
        if call.kind == "wait" and len(desk.answers) > 1:
            raise InterruptedError("the engine was interrupted")

    desk.before = before
    return desk


def fork_that_is_interrupted(impl: ModuleType) -> None:
    """An error comes while it waits for the branches."""
    where = "fork whose wait for the branches raises an error"
    desk = interrupted(Desk(ExactEngine()))
    try:
        got = impl.fork(desk, tokens(20), THREE, 2)
    except InterruptedError:
        given_back(where, desk, hint=1)
    else:
        raise Failure(f"{where}: it returned {shown(got)}; the error should go on to the caller", hint=1)


# ---------------------------------------------------------------------- select

DOG = "<|im_start|>user\nWhat does a dog say?<|im_end|>\n<|im_start|>assistant\n"
FRANCE = "Question 1: What is the capital of France?\nAnswer 1:"


def check_select(impl: ModuleType, text: str, choices: tuple[str, ...]) -> None:
    """Has a student choose with the classroom Llama; holds it against the frontend's select."""
    prefix, ids, place, scores, cost = selected(text, choices)
    where = f"select from {list(choices)} behind {text!r}"
    engine = classroom_engine()
    engine.flush_cache()
    desk = Desk(engine)
    try:
        given = copy.deepcopy(prefix), copy.deepcopy(ids)
        answer = impl.select(desk, *given)
        expect(given == (prefix, ids), f"{where}: it changed what it was given")
        a_place_and_scores(where, answer)
        same_scores(where, answer[1], scores)
        words = f"{where}: it took {shown(answer[0])} of {rounded(scores)}, not {place}"
        expect(answer[0] == place, words, hint=2)
        first = next(iter(desk.requests), None)
        hinted = first is not None and first[:3] == ("send", tuple(prefix), 0)
        words = f"{where}: the first request should be the prefix, sent without new tokens"
        expect(hinted, f"{words}; it was {first.told if first else 'none at all'}")
        count = len(desk.requests)
        expect(count == 1 + len(ids), f"{where}: {count} requests instead of {1 + len(ids)}, hint included")
        expect(
            desk.computed == cost,
            f"{where}: the engine computed {desk.computed} prompt tokens, the frontend's select needs "
            f"{cost}: {len(prefix)} of the prefix, and of each choice its own and one more",
        )
        pinned_in_time(where, desk, prefix, hint=0)
        rounds = desk.steps
        expect(rounds <= 2, f"{where}: it took {rounds} steps, not 2: send all choices before you wait")
    finally:
        desk.close()


def a_place_and_scores(where: str, answer: Any) -> None:
    pair = isinstance(answer, tuple) and len(answer) == 2
    expect(pair, f"{where}: it returned {shown(answer)}, not (place, scores)", hint=2)


def rounded(scores: Sequence[float]) -> str:
    return "[" + ", ".join(f"{float(score):.3f}" for score in scores) + "]"


def same_scores(where: str, got: Any, scores: list[float]) -> None:
    numbers = isinstance(got, list) and all(isinstance(each, Real) for each in got)
    expect(numbers, f"{where}: the scores are {shown(got)}, not a list of numbers")
    right = len(got) == len(scores) and all(abs(a - b) < 1e-3 for a, b in zip(got, scores, strict=True))
    expect(right, f"{where}: the scores are {rounded(got)}; they should be {rounded(scores)}", hint=1)


def choices_by_hand(impl: ModuleType) -> None:
    """Three answers of different lengths."""
    check_select(impl, FRANCE, (" Rome", " Paris.", " The capital of France is Paris."))


def long_choices(impl: ModuleType) -> None:
    """A long answer that is likelier token by token, and less likely as a whole."""
    check_select(impl, DOG, ("woof", "A cow says moo."))


def one_choice(impl: ModuleType) -> None:
    """There is one choice only."""
    answer = impl.select(Scripted(ExactEngine()), [5, 6], [[1]])
    expect(
        answer == (0, [-1.0]), f"select from the only choice [1], with a score of -1, gave {shown(answer)}"
    )


def no_choice(impl: ModuleType) -> None:
    """What cannot be chosen from."""
    wrong: dict[str, tuple[list[int], list[list[int]]]] = {
        "an empty prefix": ([], [[1], [2]]), "no choices": ([5], []), "an empty choice": ([5], [[1], []]),
        "two equal choices": ([5], [[1, 2], [3], [1, 2]]),
    }  # fmt: skip
    for what, (prefix, choices) in wrong.items():
        desk = Scripted(ExactEngine())
        try:
            got = impl.select(desk, prefix, choices)
        except ValueError:
            expect(not desk.calls, f"select with {what}: ValueError, but only after {len(desk.calls)} calls")
        except (ArithmeticError, LookupError, TypeError) as error:
            raise Failure(f"select with {what}: {said(error)}; it should raise ValueError") from error
        else:
            words = f"select with {what} returned {shown(got)}; it should raise ValueError"
            raise Failure(words, hint=2 if "equal" in what else 0)


@dataclass
class Scripted(Desk):
    """A desk whose scores are given: for equal ones, -1 where nothing is given. The engine has no model."""

    table: dict[tuple[int, ...], list[float]] = field(default_factory=dict)

    def wait(self, names: Sequence[str]) -> list[list[Any]]:
        asked = {call.names[0]: call for call in self.requests}
        answers = zip(names, super().wait(names), strict=True)
        return [self.scores(asked[name], answer) for name, answer in answers]

    def scores(self, call: Call, answer: list[Any]) -> list[Any]:
        if call.kind == "send":
            return answer
        return self.table.get(call.tokens, [-1.0] * (len(call.tokens) - call.number))


def equal_scores(impl: ModuleType) -> None:
    """Choices with the same mean: the first one is taken."""
    desk = Scripted(ExactEngine())
    desk.table = {
        (5, 6, 1): [-3.0],
        (5, 6, 2, 3): [-1.0, -2.0],
        (5, 6, 2): [-1.5],
        (5, 6, 3, 2): [-2.5, -0.5],
    }
    choices = [[1], [2, 3], [2], [3, 2]]
    where = f"select from {choices} behind [5, 6], with log-probabilities {list(desk.table.values())}"
    answer = impl.select(desk, [5, 6], choices)
    a_place_and_scores(where, answer)
    same_scores(where, answer[1], [-3.0, -1.5, -1.5, -1.5])
    expect(answer[0] == 1, f"{where}: it took {shown(answer[0])}; the first of the best is 1", hint=2)
    given_back(where, desk, hint=0)


def a_choice_that_is_refused(impl: ModuleType) -> None:
    """The last choice is longer than the pool: desk.score raises ValueError."""
    where = "select whose last choice is longer than the pool"
    desk = Scripted(ExactEngine(64))
    try:
        got = impl.select(desk, tokens(20), [[1], tokens(90, 3000)])
    except ValueError:
        given_back(f"{where} (desk.score raises ValueError)", desk, hint=0)
    else:
        raise Failure(f"{where}: desk.score raised ValueError, and it returned {shown(got)}")


def select_that_is_interrupted(impl: ModuleType) -> None:
    """An error comes while it waits for the choices."""
    where = "select whose wait for the choices raises an error"
    desk = interrupted(Scripted(ExactEngine()))
    try:
        got = impl.select(desk, [5, 6], [[1], [2]])
    except InterruptedError:
        given_back(where, desk, hint=0)
    else:
        raise Failure(f"{where}: it returned {shown(got)}; the error should go on to the caller")


# ---------------------------------------------------------------------- explore


def everything(reply: Sequence[int]) -> bool:
    """Every thought is promising."""
    return True


def nothing(reply: Sequence[int]) -> bool:
    """No thought is promising."""
    return False


def some(reply: Sequence[int]) -> bool:
    """Three of four thoughts are promising."""
    return sum(reply) % 4 > 0


def bush(widths: Sequence[int], new: int = 3, size: int = 3, first: int = 1) -> Thought:
    """A tree of thought with so many children at each level; a thought's ids are its own."""
    below = range(widths[0] if widths else 0)
    children = [bush(widths[1:], new, size, 10 * first + 1000 * place + 100) for place in below]
    return Thought(tuple(tokens(size, first)), new, tuple(children))


def crooked() -> Thought:
    """Long and short ways, thoughts of one token, thoughts with one child."""
    deep = Thought((7, 8), 1, (Thought((9,), 5, (Thought((10, 11, 12), 2),)),))
    wide = Thought((20,) * 6, 3, (Thought((21,), 1), Thought((22, 23), 6), Thought((24,), 2)))
    return Thought((1, 2, 3, 4), 2, (Thought((5,), 3), deep, wide, Thought((6,) * 9, 1)))


def check_explore(
    impl: ModuleType,
    thought: Thought,
    promising: Callable[[list[int]], bool],
    kv_tokens: int,
    most_steps: int | None = None,
) -> None:
    """Runs a student's program in a pool of that size; most_steps: what it may take (None: any number)."""
    best = endless(thought, promising)
    where = (
        f"explore of a tree with {len(best.ways)} ways (all {thought.all} slots, the longest way "
        f"{thought.longest}) in a pool of {kv_tokens}"
    )
    try:
        ran = run_program(ExactEngine(kv_tokens), impl.explore, thought, promising, kv_tokens)
    except ProgramError as error:
        raise Failure(f"{where}: {error}", hint=2) from error
    same_ways(where, ran.value, best)
    expect(
        ran.computed == best.computed,
        f"{where}: the engine computed {ran.computed} prompt tokens; {best.computed} are enough. "
        "What was evicted was needed again, or somebody computed a token twice",
        hint=1,
    )
    expect(
        ran.late == 0,
        f"{where}: a pin was let go, and then {ran.late} requests went on from what it had held. Join when "
        "all branches are done (where nobody joins, the player takes the pins away when the pool is full)",
        hint=1,
    )
    if most_steps is not None:
        expect(
            ran.steps <= most_steps,
            f"{where}: it took {ran.steps} steps, {most_steps} are enough: what fits side by side runs at "
            "once",
            hint=2,
        )


def same_ways(where: str, got: Any, best: Thinking) -> None:
    """The ends of all ways, in order."""
    expect(isinstance(got, list), f"{where}: it returned {shown(got)}, not a list of ways")
    ways = [list(way) for way in got]
    expect(len(ways) == len(best.ways), f"{where}: {len(ways)} ways were returned, not {len(best.ways)}")
    expect(sorted(ways) == sorted(best.ways), f"{where}: the ways do not hold the tokens that they should")
    expect(ways == best.ways, f"{where}: the right ways, but not in the tree's order")


def a_thought_alone(impl: ModuleType) -> None:
    """No children, or a thought that is not promising."""
    expect(inspect.iscoroutinefunction(inspect.unwrap(impl.explore)), "explore is an `async def` function")
    check_explore(impl, Thought((1, 2, 3), 4), everything, 40)
    check_explore(impl, bush([3]), nothing, 40)


def small_pools(impl: ModuleType) -> None:
    """The pool holds the longest way, and not a token more."""
    for thought, promising in ((bush([2, 2]), everything), (crooked(), some)):
        check_explore(impl, thought, promising, thought.longest)


def long_beginnings(impl: ModuleType) -> None:
    """The root takes much of the pool: below it less fits side by side."""
    leaves = tuple(Thought((place,), 4) for place in (30, 40, 50))
    check_explore(
        impl, Thought((1, 2, 3, 4, 5, 6, 7, 8), 2, leaves), everything, sum(leaf.all for leaf in leaves)
    )
    long, slow = Thought((1, 2, 3, 4, 5, 6, 7, 8), 2), Thought((1, 2), 8)
    for root, new, kv_tokens in ((long, 5, 25), (slow, 4, 24)):
        leaves = tuple(Thought((place,), new) for place in (30, 40, 50))
        family = tuple(Thought((place, place), 1, leaves) for place in (10, 20))
        check_explore(impl, Thought(root.tokens, root.new_tokens, family), everything, kv_tokens)


def middling_pools(impl: ModuleType) -> None:
    """Something fits side by side, not everything. The steps are those of the contract."""
    for thought, steps in ((bush([2, 3]), 18), (crooked(), 27)):
        middle = thought.own + max(child.all for child in thought.children)
        check_explore(impl, thought, everything, middle, steps)


def large_pools(impl: ModuleType) -> None:
    """Everything fits side by side, also below a long way."""
    for thought, steps in ((bush([2, 3]), 11), (crooked(), 17), (bush([1, 1, 1, 2], 2), 14)):
        check_explore(impl, thought, everything, thought.all, steps)


EXERCISES = [
    Exercise(
        "computed_tokens", 2, [prompts_by_hand, lengths_stay],
        hints=(
            "Own tokens are computed in any case. By how many requests is the prefix computed?",
            "By all that the first step takes on. Fill its chunk by hand: each branch takes prefix + own "
            "tokens, and the one that takes the last token is among them.",
            "Start with filled = 0 and add prefix + own for each branch, as long as filled < chunk. The "
            "prefix is computed by so many.",
        ),
    ),
    Exercise(
        "steps", 2, [steps_by_hand],
        hints=(
            "Three parts: the hint (a step or none), computing prompts, decoding. How many tokens has each "
            "request when its prompt is computed?",
            "Side by side, each step of computing is full: the tokens of the branches divided by the chunk, "
            "rounded up. The hint's own tokens are computed before.",
            "One after another, each branch takes new_tokens steps: the first one computes its prompt and "
            "gives a token.",
        ),
        stands_on={"computed_tokens": on_the_engine},
    ),
    Exercise(
        "fork", 3,
        [
            fork_by_hand, fork_of_one, fork_in_small_steps, fork_of_nothing, fork_among_others,
            fork_that_is_refused, fork_that_is_interrupted,
        ],
        hints=(
            "Say in which order the desk is to be called, before you write: send, wait, pin, send, send, "
            "send, wait, unpin. Where there is no prefix, only the branches are left.",
            "Put all that happens while the pin is held between try: and finally:, the waiting as well.",
            "Send all branches and collect their names; then one desk.wait(names) gives the replies in "
            "order.",
        ),
    ),
    Exercise(
        "select", 2,
        [
            no_choice, equal_scores, one_choice, a_choice_that_is_refused, select_that_is_interrupted,
            choices_by_hand, long_choices,
        ],
        hints=(
            "It is fork, with desk.score for the choices; the hint and the pin are the same. Refuse what "
            "cannot be chosen from before you send anything.",
            "desk.score(prefix + choice, len(prefix)) answers with the choice's own log-probabilities; the "
            "score is their mean.",
            "scores.index(max(scores)) is the first of the best. Two choices are equal if their tokens are: "
            "compare them as tuples, in a set.",
        ),
        seconds=60,
    ),
    Exercise(
        "explore", 3, [a_thought_alone, small_pools, long_beginnings, middling_pools, large_pools],
        hints=(
            "It calls itself: await explore(branch, child, promising, left) for each branch and its child. "
            "And await stands before gen, fork, each and join, too.",
            "Does everything below fit into room? Add up tokens and new tokens of the thought and all below "
            "it. If not: one child to its end, then the next. And join when the branches are done.",
            "left is room less the thought's own tokens and new_tokens. `await branches.each(child)` runs "
            "all at once, with async def child(branch, index); a loop with await in it one after another.",
        ),
        seconds=30,
    ),
]  # fmt: skip
