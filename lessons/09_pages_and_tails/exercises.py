"""What lesson 09 asks for, and its open cases: everything is held against the engine's own parts."""

from __future__ import annotations

import copy
import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from lessons.grading import Exercise, Failure, expect
from lessons.grading.game import said
from lessons.grading.shared import as_ints, whole
from lessons.grading.words import shown
from minirad import events as ev
from minirad.cache.allocator import PageAllocator
from minirad.cache.radix_cache import RadixCache
from minirad.config import EngineConfig, SamplingParams
from minirad.engine import Engine
from minirad.parts import Parts
from minirad.schedule.cache_manager import CacheManager
from minirad.schedule.req_to_token import ReqToTokenPool
from minirad.schedule.request import Request
from minirad.simulate import Script

Tokens = Sequence[int]
Requests = Sequence[tuple[Tokens, Tokens]]

# ---------------------------------------------------------------------- the engine, without a model


class Scripted(Script):
    """A runner without a model: replies are given or made up. The recorder asks how large the model is."""

    model = SimpleNamespace(config=SimpleNamespace(num_parameters=0))


def engine_of(page_size: int, kv_tokens: int = 0, **more: Any) -> Engine:
    """The engine with its own tree, scheduler and cache manager; nothing is computed.

    kv_tokens: 0: more than any case needs. more: further fields of EngineConfig.
    """
    kv_tokens = kv_tokens or 512 * page_size
    sizes = {"kv_tokens": kv_tokens, "page_size": page_size, "max_context": kv_tokens, "chunk_tokens": 2**20}
    config = EngineConfig(**{**sizes, "in_batch_prefix": False, **more})
    script = Scripted()
    rows = ReqToTokenPool(config.max_running, kv_tokens)
    return Engine(parts=Parts(config, script, RadixCache(page_size), rows, script))


def replies(tokens: int, n: int = 1, **more: Any) -> SamplingParams:
    """Exactly so many new tokens for each sample, other ones for each; see Script."""
    return SamplingParams(
        **{"max_new_tokens": tokens, "n": n, "temperature": 1.0, "ignore_eos": True, **more}
    )


def listen(engine: Any, *kinds: type[Any]) -> list[Any]:
    """The list into which events of these kinds go from now on."""
    heard: list[Any] = []
    for kind in kinds:
        engine.bus.subscribe(kind, heard.append)
    return heard


class Books:
    """The engine's tree, pages and rows, and no more: requests begin, compute everything, and end."""

    def __init__(self, page_size: int, num_pages: int = 400) -> None:
        self.page_size = page_size
        self.bus = ev.EventBus()
        self.allocator = PageAllocator(num_pages * page_size, page_size)
        # Pages are handed out as in a pool that has been in use for long: scattered.
        self.allocator._stack = np.arange(1, num_pages + 1) * 37 % (num_pages + 1)
        self.rows = ReqToTokenPool(32, num_pages * page_size)
        self.manager = CacheManager(RadixCache(page_size, bus=self.bus), self.allocator, self.rows, self.bus)
        self.freed = listen(self, ev.SlotsFreed)
        self.begun = 0

    def begin(self, tokens: Tokens) -> tuple[Request, list[int]]:
        """A request with this prompt, all of which gets KV; and the pages that the tree had of it."""
        self.begun += 1
        prompt = np.array(tokens, dtype=np.int64)
        request = Request(f"R{self.begun}", prompt, SamplingParams(max_new_tokens=1), 0, self.begun)
        match = self.manager.lock(request.key())
        self.manager.attach(request, match, self.manager.cached(request, match.length))
        if not self.manager.extend(request, request.length):
            raise AssertionError("the grader's pool is too small")
        return request, (match.slots[:: self.page_size] // self.page_size).tolist()

    def row(self, request: Request) -> list[int]:
        return [int(slot) for slot in self.rows.rows[request.row, : request.kv_len]]

    def pages(self, request: Request) -> list[int]:
        return [slot // self.page_size for slot in self.row(request)[:: self.page_size]]

    def end(self, request: Request) -> list[int]:
        """Commits a request for the last time; returns the pages that came back, in the order of its row."""
        self.freed.clear()
        self.manager.commit(request, finished=True)
        slots = [slot for event in self.freed for slot in event.slots]
        return list(dict.fromkeys(slot // self.page_size for slot in slots))


# ---------------------------------------------------------------------- pages


class Twins:
    """A student's index beside the engine's tree: the same requests, with the engine's page numbers."""

    def __init__(self, impl: ModuleType, page_size: int) -> None:
        self.impl, self.books, self.index = impl, Books(page_size), dict[Any, Any]()
        self.running: dict[str, tuple[Request, list[int]]] = {}
        self.story: list[str] = []

    @property
    def where(self) -> str:
        before = "..., " if len(self.story) > 5 else ""
        return f"with pages of {self.books.page_size}: {before}{', '.join(self.story[-5:])}"

    def begin(self, name: str, tokens: Tokens) -> None:
        """A request begins: it takes what the index has of its prompt."""
        self.story.append(f"{name} begins with {said(list(tokens))}")
        given, before = list(tokens), repr(self.index)
        answer = self.impl.match_pages(self.index, given, self.books.page_size)
        got = as_ints(answer, f"{self.where}: match_pages")
        request, wanted = self.books.begin(tokens)
        words = f"{self.where}: match_pages gave {said(got)}, the engine's tree has the pages {said(wanted)}"
        whole = len(got) <= len(tokens) // self.books.page_size
        expect(whole, f"{words} (its tokens fill {len(tokens) // self.books.page_size} pages)", hint=2)
        expect(got == wanted, words, hint=0 if len(got) > len(wanted) else 1)
        expect(given == list(tokens), f"{self.where}: match_pages must not change the tokens")
        expect(repr(self.index) == before, f"{self.where}: match_pages must not change the index")
        self.running[name] = request, list(tokens)

    def end(self, name: str) -> None:
        """It ends: what is free, by the student's index and by the engine's cache manager."""
        self.story.append(f"{name} ends")
        request, tokens = self.running.pop(name)
        pages, whole = self.books.pages(request), len(tokens) // self.books.page_size
        taken = request.protected_len // self.books.page_size
        given = list(tokens), list(pages)
        answer = self.impl.insert_pages(self.index, *given, self.books.page_size)
        got, wanted = as_ints(answer, f"{self.where}: insert_pages"), self.books.end(request)
        words = f"{self.where} (its pages are {said(pages)}): insert_pages gave {said(got)} back"
        words += f", the engine frees {said(wanted)}"
        expect(got == wanted, words, hint=self._hint(got, wanted, pages[:taken], pages[taken:whole]))
        expect(given == (tokens, pages), f"{self.where}: insert_pages must not change tokens or pages")

    @staticmethod
    def _hint(got: list[int], wanted: list[int], taken: list[int], own: list[int]) -> int:
        """Which hint fits: a wrong key (0), duplicates (1), or the tail (2).

        taken: pages that the request had from the index. own: the whole ones that it computed.
        """
        extra, missing = set(got) - set(wanted), set(wanted) - set(got)
        if extra:
            return 1 if extra & set(taken) or not extra & set(own) else 0
        return 1 if missing & set(own) else 2

    def run(self, *prompts: Tokens) -> None:
        """One request after another, each to its end."""
        for prompt in prompts:
            name = f"R{self.books.begun + 1}"
            self.begin(name, prompt)
            self.end(name)


def pages_by_hand(impl: ModuleType) -> None:
    """A prompt of 11 tokens, pages of 4, and others that begin like it."""
    twins = Twins(impl, 4)
    prompt = list(range(10, 21))
    twins.run(prompt, prompt, prompt[:8], prompt[:7], prompt[:3], [*prompt[:6], 99, 98, 97], [1, 2])


def the_tail_comes_back(impl: ModuleType) -> None:
    """No tail, a tail, nothing but a tail."""
    for page_size in (1, 2, 5):
        twins = Twins(impl, page_size)
        for length in (3, 4, 5, 6, 10, 11):
            twins.run([100 * length + i for i in range(length)])


def the_same_page_after_another_beginning(impl: ModuleType) -> None:
    """Equal tokens in a page, but others before them."""
    twins = Twins(impl, 2)
    twins.run([1, 2, 3, 4, 5, 6], [7, 8, 3, 4, 5, 6], [3, 4, 5, 6], [7, 8, 3, 4, 5, 6, 9])
    twins.run([3, 4, 3, 4, 3, 4], [3, 4, 3, 4], [5, 6], [1, 2, 5, 6], [1, 23], [12, 3])


def two_at_once(impl: ModuleType) -> None:
    """Two requests compute the same beginning side by side; the second goes on from the first one's pages."""
    twins = Twins(impl, 2)
    twins.begin("A", [1, 2, 3, 4])
    twins.begin("B", [1, 2, 3, 4, 5, 6, 7, 8])
    twins.begin("C", [1, 2, 9, 9, 5, 6])
    for name in "ABC":
        twins.end(name)
    twins.run([1, 2, 3, 4, 5, 6, 7, 8, 9, 9], [1, 2, 9, 9, 5, 6, 7])


def its_own_pages_stay(impl: ModuleType) -> None:
    """A chat: each turn begins with the pages of the one before, and is longer."""
    twins = Twins(impl, 3)
    turns = [[5, 6, 7, 8], [5, 6, 7, 8, 9, 10, 11], [5, 6, 7, 8, 9, 10, 11, 12, 13]]
    twins.run(*turns, [*turns[-1], 1])


def all_of_it_was_there(impl: ModuleType) -> None:
    """A prompt that ends with a page, twice: the last page is computed again, and is a duplicate."""
    twins = Twins(impl, 4)
    twins.run([1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4])


def two_indexes(impl: ModuleType) -> None:
    """Two indexes in turn: none knows of the other."""
    one, two = Twins(impl, 2), Twins(impl, 3)
    for prompt in ([1, 2, 3, 4, 5, 6], [1, 2, 3, 9, 9, 9], [1, 2, 3, 4, 5, 6, 7]):
        one.run(prompt)
        two.run(prompt[::-1], prompt)


# ---------------------------------------------------------------------- page_account

ACCOUNT = ("cached", "lost", "entries", "idle")


def same_number(mine: Any, theirs: int) -> bool:
    """Whether a student's number is this one; numpy's are numbers, too, what calls itself equal is none."""
    return isinstance(mine, int | np.integer) and not isinstance(mine, bool) and int(mine) == theirs


def engines_account(page_size: int, requests: Requests) -> list[dict[str, int]]:
    """What the engine says of these requests, with pages of this size and with pages of one token."""
    rows = _run_one_by_one(page_size, requests)
    fine = rows if page_size == 1 else _run_one_by_one(1, requests)
    return [
        {"cached": row["cached"], "lost": one["cached"] - row["cached"],
         "entries": row["entries"], "idle": row["idle"]}
        for row, one in zip(rows, fine, strict=True)
    ]  # fmt: skip


def _run_one_by_one(page_size: int, requests: Requests) -> list[dict[str, int]]:
    """Serves requests with given replies; looks at each one's row in the moment when it ends."""
    longest = sum(len(prompt) + len(reply) + page_size for prompt, reply in requests)
    engine = engine_of(page_size, -(-longest // page_size) * page_size)
    account = []

    def look(event: ev.Committed) -> None:
        if event.finished:
            (request,) = engine.scheduler.requests()
            slots = engine.rows.rows[request.row, : event.committed]
            entries = len(np.unique(slots // page_size))
            idle = entries * page_size - event.committed
            account.append({"cached": request.cached_tokens, "entries": entries, "idle": idle})

    engine.bus.subscribe(ev.Committed, look)
    for number, (prompt, reply) in enumerate(requests, start=1):
        engine.runner.given[f"R{number}"] = tuple(reply)
        engine.generate([list(prompt)], replies(len(reply)))
    return account


def check_account(impl: ModuleType, page_size: int, requests: Requests) -> None:
    """A student's account beside the engine's, request by request."""
    given = copy.deepcopy(requests)
    where = f"page_account({page_size}, ...)"
    answer = impl.page_account(page_size, requests)
    expect(given == requests, f"{where} must not change the requests")
    expect(
        isinstance(answer, list) and len(answer) == len(requests),
        f"{where} of {len(requests)} requests returned {shown(answer)}; a list with a dictionary for each "
        "is asked for",
    )
    for number, (mine, theirs) in enumerate(zip(answer, engines_account(page_size, requests), strict=True)):
        prompt, reply = requests[number]
        what = f"{where}: request {number + 1}, {said(list(prompt))} with reply {said(list(reply))}"
        repeated = any(prompt == earlier for earlier, _ in requests[:number])
        expect(isinstance(mine, dict), f"{what}: {shown(mine)} is no dictionary")
        for name in ACCOUNT:
            expect(name in mine, f'{what}: "{name}" is missing in {shown(mine)}')
            expect(
                same_number(mine[name], theirs[name]),
                f'{what}: "{name}" is {shown(mine[name])} in your account, the engine says {theirs[name]}',
                hint=2 if name in ("entries", "idle") else 0 if name == "lost" or repeated else 1,
            )
        extra = sorted(map(str, set(mine) - set(ACCOUNT)))
        expect(not extra, f"{what}: {', '.join(extra)} was not asked for")


def one_request(impl: ModuleType) -> None:
    """One request alone: nothing is cached, and its last page may be partly idle."""
    for page_size in (1, 4):
        for prompt, reply in ((11, 4), (12, 1), (9, 4), (1, 1), (8, 0), (7, 9)):
            check_account(impl, page_size, [(list(range(prompt)), list(range(50, 50 + reply)))])


def the_same_again(impl: ModuleType) -> None:
    """The same prompt again: one token is always computed, and with it its page."""
    for length in (8, 9, 10, 4, 1):
        prompt = list(range(length))
        check_account(impl, 4, [(prompt, [70, 71]), (prompt, [70, 71]), (prompt, [80])])


def a_chat_goes_on(impl: ModuleType) -> None:
    """Each turn begins with the prompt and the reply of the one before."""
    for page_size in (1, 2, 4, 16):
        prompt, requests = [1, 2, 3, 4, 5, 6, 7], []
        for turn in range(4):
            reply = [100 * turn + 20 + i for i in range(2 + turn)]
            requests.append((prompt, reply))
            prompt = [*prompt, *reply, 900 + turn, 901, 902]
        check_account(impl, page_size, requests)


def the_best_of_several(impl: ModuleType) -> None:
    """The longest match may be of any earlier request, and part in the middle of a page."""
    first, second = [1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 5, 60, 61]
    requests = [
        (first, [10]),
        (second, [62, 63]),
        (first[:7], [1]),
        ([*second, 62, 63, 64], [1]),
        ([7, 8], [9]),
        ([70, *first[1:]], [9]),
    ]
    for page_size in (1, 3, 4):
        check_account(impl, page_size, requests)


def nothing_to_serve(impl: ModuleType) -> None:
    """No request at all."""
    check_account(impl, 4, [])


# ---------------------------------------------------------------------- fork


def fork_both(
    impl: ModuleType,
    page_size: int,
    prompt: Tokens,
    samples: int,
    before: Sequence[Tokens] = (),
    spare: int = -1,
) -> None:
    """The engine forks a request, and so does the student, on two pools that are alike.

    before: prompts of requests that ran first. spare: pages that are free when it forks; -1: plenty.
    """
    theirs, ours = (_computed(page_size, prompt, before, spare) for _ in range(2))
    row = ours[0].row(ours[1])
    asked: list[Any] = []

    def alloc(count: int) -> list[int] | None:
        asked.append(count)
        free = ours[0].allocator.available // page_size
        slots = ours[0].allocator.alloc(count * page_size)
        expect(slots is not None or count > free, "the grader's pool")
        return None if slots is None else [int(slot) // page_size for slot in slots[::page_size]]

    for index in range(1, samples):
        free = ours[0].allocator.available // page_size
        where = f"fork_tail({said(row)}, {page_size}, alloc) with {free} pages free"
        given = list(row)
        asked.clear()
        answer = impl.fork_tail(given, page_size, alloc)
        expect(given == row, f"{where} must not change the leader's row")
        own = not (isinstance(answer, tuple | list) and answer and answer[0] is given)
        expect(own, f"{where}: it gave the leader's own list: when one row grows, so does the other", hint=0)
        wanted = _engines_fork(*theirs, index)
        _same_fork(where, answer, wanted, row, page_size, free - ours[0].allocator.available // page_size)


def _computed(page_size: int, prompt: Tokens, before: Sequence[Tokens], spare: int) -> tuple[Books, Request]:
    """A pool in which a prompt has just been computed and committed."""
    books = Books(page_size, 64)
    for tokens in before:
        request, _ = books.begin(tokens)
        books.end(request)
    leader, _ = books.begin(prompt)
    books.manager.commit(leader, finished=False)
    if spare >= 0:
        books.manager.make_room(books.manager.room)  # evicts all that nobody holds
        books.allocator.alloc(books.allocator.available - spare * page_size)
    return books, leader


def _engines_fork(
    books: Books, leader: Request, index: int
) -> tuple[list[int], list[tuple[int, int]]] | None:
    sample = leader.branch(index)
    source = books.manager.fork(leader, sample)
    if source is None:
        return None
    row = books.row(sample)
    return row, list(zip(source.tolist(), row[len(row) - len(source) :], strict=True))


def _same_fork(
    where: str, answer: Any, wanted: tuple[list[int], list[tuple[int, int]]] | None, row: list[int],
    page_size: int, taken: int,
) -> None:  # fmt: skip
    if wanted is None:
        expect(answer is None, f"{where}: there is no room, None is asked for, it gave {shown(answer)}")
        expect(taken == 0, f"{where}: it gave None, but {taken} pages were taken and are lost")
        return
    try:
        slots, copies = answer
        pairs = [(operator.index(one), operator.index(other)) for one, other in copies]
    except (TypeError, ValueError):
        words = f"{where}: it gave {shown(answer)}; (row, copies) is asked for"
        raise Failure(words + (": the pool has room enough" if answer is None else ""), hint=2) from None
    got = as_ints(slots, where)
    whole, tail = len(row) // page_size * page_size, len(row) % page_size
    needed = -(-tail // page_size)
    words = f"{where}: its row is {said(got)}"
    expect(len(got) == len(row), f"{words}: {len(got)} slots for {len(row)} tokens")
    expect(
        got[:whole] == row[:whole],
        f"{words}: the whole pages should be shared, they are {said(row[:whole])}", hint=0,
    )  # fmt: skip
    shared = [slot for slot in got[whole:] if slot in row]
    expect(
        not shared,
        f"{words}: {said(shared)} {'is' if len(shared) == 1 else 'are'} the leader's: who writes behind it "
        "writes into the leader's page",
        hint=0,
    )
    expect(taken == needed, f"{where}: new pages: {taken} taken, {needed} needed", hint=2)
    expect(got == wanted[0], f"{words}; the engine's sample has {said(wanted[0])}", hint=1)
    words = f"{where}: copies are {said(pairs)}, the engine copies {said(wanted[1])}"
    expect(pairs == wanted[1], words, hint=1)


def fork_by_hand(impl: ModuleType) -> None:
    """Three samples of a prompt of 11 tokens, pages of 4."""
    fork_both(impl, 4, range(11), 3)


def every_tail(impl: ModuleType) -> None:
    """All lengths of tails, also none; pages of 1, 2, 3, 4 and 16."""
    for page_size in (1, 2, 3, 4, 16):
        for length in range(1, 2 * page_size + 2):
            fork_both(impl, page_size, range(length), 3)


def shared_pages_lie_apart(impl: ModuleType) -> None:
    """The leader's whole pages came from the tree, and do not lie side by side."""
    before = [list(range(6)), [*range(6), 50, 51, 52], list(range(100, 107))]
    fork_both(impl, 3, [*range(6), 50, 51, 52, 60, 61, 62, 63], 4, before)
    fork_both(impl, 4, [*range(4), 50, 51, 52, 60, 61, 62, 63], 2, before)


def a_full_pool(impl: ModuleType) -> None:
    """No page is free: a tail has no room, no tail needs none."""
    fork_both(impl, 4, range(11), 3, spare=0)
    fork_both(impl, 4, range(12), 3, spare=0)
    fork_both(impl, 4, range(11), 4, spare=2)
    fork_both(impl, 4, range(3), 2, spare=0)
    fork_both(impl, 1, range(3), 3, spare=0)


@cache
def engines_pages(prompt: int, samples: int, page_size: int, steps: int) -> list[int]:
    """Pages in use on the engine when each sample has 1, 2, ... new tokens."""
    need = prompt + samples * (steps + 2 * page_size) + page_size
    engine = engine_of(page_size, -(-need // page_size) * page_size)
    engine.add_request(list(range(prompt)), replies(steps + 1, samples))
    found = []
    for _ in range(steps):
        engine.step()
        found.append(engine.allocator.num_pages - engine.allocator.available // page_size)
    return found


def check_pages(impl: ModuleType, prompt: int, samples: int, page_size: int, steps: int = 6) -> None:
    for new_tokens, wanted in enumerate(engines_pages(prompt, samples, page_size, steps), start=1):
        got = impl.fork_pages(prompt, samples, new_tokens, page_size)
        expect(
            same_number(got, wanted),
            f"fork_pages(prompt_tokens={prompt}, samples={samples}, new_tokens={new_tokens}, "
            f"page_size={page_size}) is {shown(got)}; on the engine {wanted} pages are in use then",
            hint=2,
        )


def pages_while_they_run(impl: ModuleType) -> None:
    """Samples grow token by token; pages of 1, 2, 4."""
    for prompt, samples, page_size in ((11, 3, 4), (8, 3, 4), (8, 1, 4), (3, 2, 4), (5, 3, 1), (7, 5, 2)):
        check_pages(impl, prompt, samples, page_size)


# ---------------------------------------------------------------------- measure


class Watch:
    """What really happens on an engine, heard by the grader while a student's function measures."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.added = listen(engine, ev.RequestAdded)
        self.forked = listen(engine, ev.RequestForked)
        self.allocated = listen(engine, ev.SlotsAllocated)
        self.retracted = listen(engine, ev.RequestRetracted)
        self.finished = listen(engine, ev.RequestFinished)
        self.pins: list[Any] = []
        self.unpinned_at: list[int] = []  # how many requests had ended then
        engine.pin, engine.unpin = self._pin, self._unpin  # type: ignore[method-assign]
        self._copied: list[int] = []
        self._copy, engine.runner.copy_slots = engine.runner.copy_slots, self._count

    def _pin(self, *arguments: Any, **more: Any) -> Any:
        pin = Engine.pin(self.engine, *arguments, **more)
        self.pins.append((len(self.finished), pin))
        return pin

    def _unpin(self, pin: Any) -> None:
        Engine.unpin(self.engine, pin)
        self.unpinned_at.append(len(self.finished))

    def _count(self, source: Any, target: Any) -> None:
        self._copied.append(len(source))
        self._copy(source, target)

    def samples(self) -> dict[str, Any]:
        parted = [event for event in self.forked if event.row >= 0]
        copied = [event.copied for event in parted]
        assert [count for count in copied if count] == self._copied
        written = {event.request: 0 for event in parted}
        for event in self.allocated:
            if event.request in written:
                written[event.request] += len(event.slots)
        silent = [event.copied for event in parted if written[event.request] == event.copied]
        return {"copied": copied, "waited": len(self.forked) - len(parted), "in_vain": sum(silent)}


def told(event: ev.RequestAdded) -> str:
    return f"{len(event.token_ids)} tokens, {event.max_new_tokens} new, n={event.n}"


ASKED = ("n", "max_new_tokens", "temperature", "top_p", "top_k", "ignore_eos", "seed")


def as_list(value: Any) -> Any:
    """A number or numbers as they can be compared; a list is asked for where there are several."""
    if not isinstance(value, list | tuple | np.ndarray):
        return int(value) if isinstance(value, int | np.integer) and not isinstance(value, bool) else None
    return [as_list(each) for each in value]


HINT_OF = {"copied": 1, "waited": 1, "in_vain": 2, "hint": 2, "again": 2, "own": 2}


def same_numbers(where: str, answer: Any, truth: Mapping[str, Any]) -> None:
    expect(isinstance(answer, dict), f"{where} returned {shown(answer)}, not a dictionary")
    for name, value in truth.items():
        expect(name in answer, f'{where}: "{name}" is missing in {shown(answer)}')
        expect(
            as_list(answer[name]) == as_list(value),
            f'{where}: "{name}" is {shown(answer[name])}; what happened on this engine is {value}',
            hint=HINT_OF[name],
        )
    extra = sorted(map(str, set(answer) - set(truth)))
    expect(not extra, f"{where}: {', '.join(extra)} was not asked for")


def check_samples(
    impl: ModuleType, what: str, engine: Engine, prompt: Tokens, params: SamplingParams
) -> None:
    """A student measures on an engine; the grader listens."""
    watch, where = Watch(engine), f"measure_samples on {what}, {len(prompt)} tokens, n={params.n}"
    given = list(prompt)
    answer = impl.measure_samples(engine, given, params)
    ran = [list(event.token_ids) for event in watch.added]
    expect(
        ran == [list(prompt)],
        f"{where}: it should run this prompt once; it ran: {'; '.join(map(told, watch.added)) or 'nothing'}",
        hint=0,
    )
    for name in ASKED:
        was, wanted = getattr(watch.added[0], name), getattr(params, name)
        expect(was == wanted, f"{where}: it ran with {name}={was}; params says {name}={wanted}", hint=0)
    expect(not engine.has_work, f"{where}: the engine has not come to the end of its work")
    expect(given == list(prompt), f"{where}: the prompt was changed")
    same_numbers(where, answer, watch.samples())


def check_branches(
    impl: ModuleType, what: str, engine: Engine, prefix: Tokens, ends: Sequence[Tokens]
) -> None:
    """The same for a fork into branches."""
    watch, where = Watch(engine), f"measure_branches on {what}, {len(prefix)} tokens, {len(ends)} branches"
    admitted, order = listen(engine, ev.RequestAdmitted), listen(engine, ev.RequestAdded, ev.RequestAdmitted)
    given = list(prefix), [list(end) for end in ends]
    answer = impl.measure_branches(engine, *given)
    wanted = [(list(prefix), 0), *(([*prefix, *end], 1) for end in ends)]
    ran = [(list(event.token_ids), event.max_new_tokens) for event in watch.added]
    expect(
        ran == wanted,
        f"{where}: it should run the prefix (nothing new), then each branch (one new token); it ran "
        f"{'; '.join(map(told, watch.added)) or 'nothing'}",
        hint=0,
    )
    expect(not engine.has_work, f"{where}: the engine has not come to the end of its work")
    expect(given == (list(prefix), [list(end) for end in ends]), f"{where}: prefix or ends were changed")
    expect(bool(watch.pins), f"{where}: the prefix was not pinned", hint=0)
    expect(watch.pins[0][0] == 1, f"{where}: pin when the prefix is in the tree, before the branches", hint=0)
    expect(not engine._pins, f"{where}: the pin was not given back", hint=0)
    held = watch.unpinned_at[-1] == len(watch.finished)
    expect(held, f"{where}: the pin was given back before the branches had run", hint=0)
    sent = [isinstance(event, ev.RequestAdded) for event in order[2 : 2 + len(ends)]]
    expect(
        all(sent), f"{where}: the branches should be sent together: one ran before the last was sent", hint=0
    )
    cached = {event.request: event.cached for event in admitted if event.attempt == 1}
    hint, *branches = [cached[event.request] for event in watch.added]
    again = [max(len(prefix) - each, 0) for each in branches]
    own = [
        len(prefix) + len(end) - each - lost for end, each, lost in zip(ends, branches, again, strict=True)
    ]
    same_numbers(where, answer, {"hint": len(prefix) - hint, "again": again, "own": own})


def generous(engine: Engine) -> Engine:
    """Changes an engine so that a fork shares a page less, and copies it."""
    fork, page = engine.cache_manager.fork, engine.config.page_size

    def copies_more(leader: Request, sample: Request) -> Any:
        shared = leader.protected_len
        leader.protected_len = max(shared - page, 0)
        try:
            return fork(leader, sample)
        finally:
            leader.protected_len = shared

    engine.cache_manager.fork = copies_more  # type: ignore[method-assign]
    return engine


def fragile(engine: Engine) -> Engine:
    """Changes an engine so that its second sample fails when it should part: it neither parts nor waits."""
    fork = engine.cache_manager.fork

    def fails(leader: Request, sample: Request) -> Any:
        if sample.id.endswith(".2"):
            raise RuntimeError("this engine lets no second sample part")
        return fork(leader, sample)

    engine.cache_manager.fork = fails  # type: ignore[method-assign]
    return engine


def measured_by_hand(impl: ModuleType) -> None:
    """Three samples of 11 tokens, pages of 4; and three of 12."""
    check_samples(impl, "pages of 4", engine_of(4), range(11), replies(4, 3))
    check_samples(impl, "pages of 4", engine_of(4), range(12), replies(4, 3))
    check_samples(impl, "pages of 1", engine_of(1), range(11), replies(4, 2))


def measured_in_vain(impl: ModuleType) -> None:
    """Samples that end with their first token, all of them or some."""
    check_samples(impl, "pages of 4", engine_of(4), range(11), replies(1, 3))
    for seed in (1, 2, 3):
        some = replies(3, 6, ignore_eos=False, seed=seed)
        check_samples(impl, "pages of 4 (replies end when they like)", engine_of(4), range(10), some)


def measured_where_room_is_short(impl: ModuleType) -> None:
    """A pool in which not all samples find room at once."""
    check_samples(impl, "pages of 4, 5 of them in all", engine_of(4, 20), range(11), replies(2, 4))
    check_samples(impl, "pages of 4, 4 of them in all", engine_of(4, 16), range(11), replies(1, 4))


def measured_where_all_is_otherwise(impl: ModuleType) -> None:
    """An engine without a radix tree, one with a warm tree, one that was changed."""
    check_samples(
        impl, "an engine without a radix tree", engine_of(4, radix_cache=False), range(11), replies(3, 3)
    )
    check_samples(impl, "a changed engine", generous(engine_of(4)), range(11), replies(3, 3))
    check_samples(impl, "an engine with a fault", fragile(engine_of(4)), range(11), replies(3, 4))
    in_parts = engine_of(4, chunk_tokens=8)
    check_samples(impl, "an engine that computes 8 tokens a step", in_parts, range(19), replies(3, 3))
    check_samples(
        impl, "an engine whose keys are pairs", engine_of(4, bigram_keys=True), range(12), replies(3, 3)
    )
    warm = engine_of(4)
    warm.generate([list(range(10))], replies(3, 2))
    check_samples(impl, "a warm engine", warm, range(15), replies(3, 3))


def branches_by_hand(impl: ModuleType) -> None:
    """A prefix of 11 tokens and three branches, pages of 4."""
    ends = [[50, 51], [60], [70, 71, 72, 73, 74]]
    check_branches(impl, "pages of 4", engine_of(4), range(11), ends)
    check_branches(impl, "pages of 1", engine_of(1), range(11), ends)


def branches_elsewhere(impl: ModuleType) -> None:
    """Pages of 16, no tree, a warm tree, equal branches, one branch."""
    ends = [[50, 51], [60], [70, 71, 72, 73, 74]]
    check_branches(impl, "pages of 16", engine_of(16), range(40), ends)
    check_branches(impl, "an engine without a radix tree", engine_of(4, radix_cache=False), range(11), ends)
    warm = engine_of(2)
    warm.generate([[*range(11), 60, 61, 62]], replies(2))
    check_branches(impl, "a warm engine", warm, range(11), [[60, 61, 62, 63, 64], [60], [5]])
    check_branches(impl, "pages of 4", engine_of(4), range(8), [[1, 2], [1, 2]])
    check_branches(impl, "pages of 4", engine_of(4), range(3), [[1, 2]])


# ---------------------------------------------------------------------- claims_tried


def try_out(name: str, experiment: Any) -> dict[str, Any]:
    """Runs an experiment on the engine: what was copied, and who wrote how much."""
    where = f'claims_tried: "{name}" is {shown(experiment)}'
    numbers = list(map(whole, experiment)) if isinstance(experiment, tuple | list) else []
    hint = {"three_twice": 1, "nobody_wrote": 2}.get(name, 0)
    expect(len(numbers) == 4 and None not in numbers, f"{where}; four whole numbers are asked for", hint=hint)
    limits = (16, 64, 8, 8)
    expect(
        all(1 <= each <= most for each, most in zip(experiment, limits, strict=True)),
        f"{where}; the least is (1, 1, 1, 1), the most {limits}",
        hint=hint,
    )
    page_size, prompt, samples, new_tokens = map(int, experiment)
    engine = engine_of(page_size)
    watch = Watch(engine)
    engine.generate([list(range(prompt))], replies(new_tokens, samples))
    found = watch.samples()
    slots = Counter[str]()  # of a sample without a tail that wrote nothing there is no event
    for event in watch.allocated:
        slots[event.request] += len(event.slots)
    first = found["copied"]
    written = [slots["R1"] - prompt, *(slots[event.request] - event.copied for event in watch.forked)]
    return {"where": where, "page_size": page_size, "copied": first, "written": written}


def tried(impl: ModuleType) -> None:
    """Your three experiments, run on the engine."""
    answer = impl.claims_tried()
    names = ("three_twice", "nobody_wrote", "no_copy")
    expect(isinstance(answer, dict), f"claims_tried returned {shown(answer)}, not a dictionary")
    missing = [name for name in names if name not in answer]
    expect(not missing, f"claims_tried: {', '.join(missing)} is missing")
    three, silent, none = (try_out(name, answer[name]) for name in names)
    expect(three["page_size"] == 4, f"{three['where']}: pages of 4 are asked for", hint=1)
    expect(
        [each for each in three["copied"] if each] == [3, 3],
        f"{three['where']}: on the engine {said(three['copied'])} slots are copied, it should be 3 twice",
        hint=1,
    )
    words = f"{silent['where']}: the samples write KV of {said(silent['written'])} tokens of their own"
    expect(not any(silent["written"]), f"{words}; nobody should", hint=2)
    expect(sum(silent["copied"]) > 0, f"{silent['where']}: nothing is copied on the engine", hint=1)
    expect(none["page_size"] > 1, f"{none['where']}: pages must be larger than one slot")
    writers = sum(count >= 2 for count in none["written"])
    words = f"{none['where']}: the samples write KV of {said(none['written'])} tokens of their own"
    expect(writers >= 2, f"{words}; two of them or more should write two or more", hint=2)
    expect(
        not sum(none["copied"]), f"{none['where']}: the engine copies {said(none['copied'])} slots", hint=0
    )


Case = Callable[..., None]
PAGES: Sequence[Case] = (
    pages_by_hand, the_tail_comes_back, the_same_page_after_another_beginning, two_at_once,
    its_own_pages_stay, all_of_it_was_there, two_indexes,
)  # fmt: skip
ACCOUNTS: Sequence[Case] = (
    one_request, the_same_again, a_chat_goes_on, the_best_of_several, nothing_to_serve,
)  # fmt: skip
FORKS: Sequence[Case] = (
    fork_by_hand, every_tail, shared_pages_lie_apart, a_full_pool, pages_while_they_run,
)  # fmt: skip
MEASURES: Sequence[Case] = (
    measured_by_hand, measured_in_vain, measured_where_room_is_short, measured_where_all_is_otherwise,
    branches_by_hand, branches_elsewhere,
)  # fmt: skip

HINTS = {
    "whole_pages": (
        "A page is found by its tokens and by what stands before it: a key of two parts, the number of the "
        "index's page before it (0 at the beginning, page 0 is nobody's) and the tokens of this page.",
        "Walk along the whole pages. index.setdefault(key, page) puts a page in if there is none, and "
        "returns the one that is there: if that is another one, yours is free. Go on from what it returned, "
        "not from yours.",
        "What follows the last whole page is a tail: it is never matched and never in the index. "
        "pages[len(tokens) // page_size :] is empty or its page, and comes back.",
    ),
    "page_account": (
        'Three roundings in this order: what is alike, at most len(prompt) - 1, down to whole pages. "lost" '
        "is what the last of them takes away.",
        "Keep of every request that has ended the tokens that have KV: prompt and reply without its last "
        "token. A new prompt matches the one with which it has the longest beginning in common.",
        "Entries and idle slots are counted over the tokens that have KV: prompt + reply[:-1]. The last "
        "page counts as an entry also where it is not full.",
    ),
    "fork": (
        "The whole pages are shared: the very same slots, in a list of the sample's own. The tail's page is "
        "not: the next token of both would go into the same slot.",
        "Each slot of row[len(row) // page_size * page_size :] is copied to the same offset of one new page: "
        "page * page_size + 0, 1, 2, ...",
        "Without a tail nothing is needed, and nothing can fail. Of the prompt only whole pages count once; "
        "each sample, the leader too, has pages for tail + new_tokens - 1 tokens of its own.",
    ),
    "measure": (
        "Run what is asked for and nothing else, once, and look at events and outputs. Every pin is given "
        "back with engine.unpin, when the branches have ended.",
        "RequestForked has all of it: copied, and row, which is -1 where a sample found no room. A sample "
        "that waits has not parted: nothing is copied for it. Its id is the request's with its index: R1.2.",
        "Who has a reply of at most one token wrote nothing. For branches: output.cached_tokens come first "
        "in a prompt, so the prefix lacks len(prefix) - cached_tokens of its tokens, or none.",
    ),
    "claims_tried": (
        "A prompt that ends with its page has no tail.",
        "With pages of 4 a prompt of 4k + 3 tokens has a tail of 3; all samples but the leader get a copy.",
        "A sample's first token is drawn from the logits of the prompt. It gets KV only when it is fed back, "
        "to draw a second one.",
    ),
}

EXERCISES = [
    Exercise("whole_pages", 3, PAGES, HINTS["whole_pages"], functions=("match_pages", "insert_pages")),
    Exercise("page_account", 3, ACCOUNTS, HINTS["page_account"]),
    Exercise("fork", 3, FORKS, HINTS["fork"], functions=("fork_tail", "fork_pages")),
    Exercise("measure", 2, MEASURES, HINTS["measure"], functions=("measure_samples", "measure_branches")),
    Exercise("claims_tried", 1, [tried], HINTS["claims_tried"]),
]
