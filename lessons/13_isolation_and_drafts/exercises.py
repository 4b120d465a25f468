"""What lesson 13 asks for, and its open cases: held against the engine's keys, tree, pool and drafts."""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import product
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch  # noqa: F401  (mapped before the limit on memory is set)

from lessons.grading import Exercise, Failure, expect
from lessons.grading.shared import as_ints, whole
from lessons.grading.words import shown
from minirad.cache.allocator import PageAllocator
from minirad.cache.radix_cache import RadixCache, RadixKey
from minirad.config import AdapterKey, EngineConfig, SamplingParams
from minirad.observe import events as ev
from minirad.rooms import room
from minirad.schedule.cache_manager import CacheManager
from minirad.schedule.req_to_token import ReqToTokenPool
from minirad.schedule.request import Request

# ---------------------------------------------------------------------- namespaces


class Asked(NamedTuple):
    """A request as space_of sees it."""

    salt: Hashable
    adapter: str
    loaded: Mapping[str, str]

    def engines_key(self) -> Hashable:
        """What the engine's rule (minirad.config.namespace) gives it, its adapter named by its weights."""
        return AdapterKey(self.loaded[self.adapter], self.salt) if self.adapter else self.salt

    def __str__(self) -> str:
        return f"space_of({self.salt!r}, {self.adapter!r}, {dict(self.loaded)!r})"


def copied(value: Any) -> Any:
    """An equal value that is another object, where Python makes one."""
    if isinstance(value, tuple):
        return tuple(copied(each) for each in value)
    return "".join(list(value)) if isinstance(value, str) else value


def space(impl: ModuleType, asked: Asked) -> Hashable:
    """A student's namespace of a request; `loaded` is the student's own copy."""
    loaded = {copied(name): copied(digest) for name, digest in asked.loaded.items()}
    before = dict(loaded)
    found: Hashable = impl.space_of(copied(asked.salt), copied(asked.adapter), loaded)
    expect(loaded == before, f"{asked} changed `loaded` to {loaded!r}")
    try:
        first = hash(found)
        loaded.clear()  # somebody loads other adapters while the request runs
        expect(
            hash(found) == first, f"{asked}: when `loaded` changes, so does the namespace that it returned"
        )
    except TypeError:
        raise Failure(f"{asked} returned {shown(found)}, which cannot be hashed") from None
    return found


def share_alike(impl: ModuleType, requests: Sequence[Asked]) -> list[Hashable]:
    """Who shares under a student's namespaces shares under the engine's, and the other way round.

    Both go into a real tree, all with the same tokens. Returns the student's namespaces.
    """
    tokens, slots = [5, 6, 7], [1, 2, 3]
    trees = RadixCache(), RadixCache()
    firsts: tuple[dict[Hashable, Asked], dict[Hashable, Asked]] = {}, {}
    spaces = []
    for asked in requests:
        keys = space(impl, asked), asked.engines_key()
        spaces.append(keys[0])
        ours, theirs = (tree.peek(RadixKey(tokens, key)) for tree, key in zip(trees, keys, strict=True))
        if ours > theirs:
            raise Failure(
                f"{asked} finds the KV of {firsts[0][keys[0]]}: both have the namespace {shown(keys[0])}, "
                "and that KV is not theirs to share",
                hint=_too_little(asked, firsts[0][keys[0]]),
            )
        if theirs > ours:
            other = firsts[1][keys[1]]
            words = f"{asked} and {other} have the same salt and the same weights, but not the same namespace"
            hint = 1 if asked.adapter else 0
            raise Failure(f"{words}: {shown(keys[0])} and {shown(space(impl, other))}", hint=hint)
        for tree, first, key in zip(trees, firsts, keys, strict=True):
            tree.insert(RadixKey(tokens, key), slots)
            first.setdefault(key, asked)
    return spaces


def _too_little(one: Asked, other: Asked) -> int:
    """Which hint helps: the digest is missing, or the salt and the adapter can be taken for one another."""
    same_salt = type(one.salt) is type(other.salt) and one.salt == other.salt
    return 1 if same_salt and one.adapter == other.adapter else 2


TWO = {"capitals": "d1", "oneword": "d2"}
NEXT_WEEK = {"capitals": "d1", "oneword": "d3"}
RENAMED = {"shouting": "d1", "oneword": "d2"}


def nobodys_space(impl: ModuleType) -> None:
    """Neither salt nor adapter."""
    for loaded in ({}, TWO):
        asked = Asked(None, "", loaded)
        found = space(impl, asked)
        expect(
            found is None, f"{asked} gave {shown(found)}; with neither salt nor adapter it is None", hint=0
        )
    for salt in ("ann", "", 0, ()):
        asked = Asked(salt, "", {})
        expect(
            space(impl, asked) is not None, f"{asked} gave None: {salt!r} is a salt like any other", hint=0
        )


def tenants_and_adapters(impl: ModuleType) -> None:
    """Two tenants and two adapters."""
    share_alike(
        impl,
        [
            Asked(salt, name, TWO)
            for salt in (None, "ann", "bob", "ann")
            for name in ("", "capitals", "oneword")
        ],
    )


def a_name_loaded_again(impl: ModuleType) -> None:
    """An adapter loaded again under its name; the same weights under another name."""
    share_alike(
        impl,
        [
            Asked(None, "oneword", TWO), Asked(None, "oneword", NEXT_WEEK), Asked(None, "oneword", TWO),
            Asked("ann", "oneword", TWO), Asked("ann", "oneword", NEXT_WEEK),
            Asked(None, "capitals", TWO), Asked(None, "shouting", RENAMED), Asked("ann", "shouting", RENAMED),
        ],
    )  # fmt: skip


def adapters_that_are_not_there(impl: ModuleType) -> None:
    """An adapter that is not loaded."""
    for asked in (Asked(None, "twoword", TWO), Asked("ann", "oneword", {}), Asked(None, "d1", TWO)):
        try:
            found = impl.space_of(asked.salt, asked.adapter, dict(asked.loaded))
        except ValueError as error:
            expect(
                asked.adapter in str(error),
                f"{asked}: the ValueError says {shown(str(error))}; it should name {asked.adapter!r}",
                hint=1,
            )
        except (LookupError, TypeError, AttributeError) as error:
            words = f"{asked} raised {type(error).__name__}; a ValueError should come: it is not loaded"
            raise Failure(words, hint=1) from error
        else:
            raise Failure(f"{asked} gave {shown(found)}; a ValueError should come: it is not loaded", hint=1)


SALTS = (
    None, "", 0, -1, -2, "0", "None", "ann", "Ann", " ann", "1", 1, 1.0, "x", "x1", "1x", "d1", "d2",
    "capitals", "oneword", (), ("ann",), ("ann", "d1"), ("d1", "ann"), ("oneword", "d2"), (None, "d1"),
    "anncapitals", "annd1", "ann|d1", "ann:d1", "d1:ann", "ann/oneword",
)  # fmt: skip
LONG = {"capitals": "d1" * 12 + "a", "oneword": "d1" * 12 + "b"}  # each begins as the other does, and as d1
LOADS = (
    {}, TWO, NEXT_WEEK, RENAMED, LONG, {"capitals": "d2", "oneword": "d1"}, {"a": "1", "b": "11", "1": "ann"},
)  # fmt: skip


def everybody() -> Iterator[Asked]:
    """Each salt with each adapter that is loaded, at each time."""
    for loaded in LOADS:
        yield from (Asked(salt, name, loaded) for salt in SALTS for name in ("", *loaded))


def spaces_of_everybody(impl: ModuleType) -> None:
    """Many salts, adapters and reloads."""
    share_alike(impl, list(everybody()))


def salts_that_look_like_namespaces(impl: ModuleType) -> None:
    """Salts that are somebody else's namespace, or a part of it."""
    names = ("", "capitals", "oneword")
    requests = [Asked(salt, name, TWO) for salt in (None, "ann", ("d1",)) for name in names]
    for _ in range(3):
        found = share_alike(impl, requests)
        salts = dict.fromkeys(
            [each for space in found for each in (*parts_of(space), str(space)) if is_plain(each)]
        )
        known = {request.salt for request in requests}
        fresh = [salt for salt in salts if salt not in known][:16]
        requests += [Asked(salt, name, TWO) for salt in fresh for name in names]


def parts_of(space: Any) -> list[Any]:
    """A namespace, and what it is made of where it is made of tuples."""
    parts = [part for each in space for part in parts_of(each)] if isinstance(space, tuple) else []
    return [space, *parts]


def is_plain(value: Any) -> bool:
    """Whether a caller could send it as a salt: texts, numbers, and tuples of these."""
    if isinstance(value, tuple) and type(value) is tuple:
        return all(map(is_plain, value))
    return value is None or type(value) in (str, int)


# ---------------------------------------------------------------------- adapters


def is_outdated(asked: Asked, now: Mapping[str, str]) -> bool:
    """Whether nobody can ask for a request's namespace now: none that the engine gives out is equal."""
    return bool(asked.adapter) and asked.engines_key() not in {
        AdapterKey(d, asked.salt) for d in now.values()
    }


def says_outdated(impl: ModuleType, asked: Asked, now: Mapping[str, str], hint: int = 1) -> None:
    """A student's word on one namespace."""
    its, then = space(impl, asked), dict(now)
    got = impl.outdated(its, then)
    expect(then == now, f"outdated changed `loaded` to {then!r}")
    wanted = is_outdated(asked, now)
    why = f"{'its weights are not loaded now' if wanted else 'it can still be asked for'}, so {wanted}"
    words = f"outdated({shown(its)}, {dict(now)!r}) is {shown(got)} for the namespace of {asked}: {why}"
    expect(isinstance(got, bool | np.bool_) and bool(got) is wanted, words, hint=hint)


def reloads_by_hand(impl: ModuleType) -> None:
    """Loaded again with other weights, renamed, taken out, loaded back."""
    for asked, now in (
        (Asked(None, "oneword", TWO), NEXT_WEEK),
        (Asked(None, "oneword", TWO), TWO),
        (Asked("ann", "oneword", TWO), NEXT_WEEK),
        (Asked("ann", "capitals", TWO), NEXT_WEEK),
        (Asked("ann", "capitals", TWO), RENAMED),
        (Asked(None, "oneword", NEXT_WEEK), TWO),
        (Asked(None, "capitals", TWO), {}),
    ):
        says_outdated(impl, asked, now)
    for salt in (None, "ann", "d2", ("oneword", "d2")):
        for now in (TWO, {}):
            says_outdated(impl, Asked(salt, "", TWO), now, hint=2)


def spaces_at_all_times(impl: ModuleType) -> None:
    """Every namespace at every time."""
    salts = (None, "", 0, "ann", "d1", "d2", ("d2",), ("oneword", "d2"))
    for then, now in product(LOADS, (*LOADS, {"d2": "d9"}, {"d1": "x", "ann": "d3"})):
        for salt, name in product(salts, ("", *then)):
            says_outdated(impl, Asked(salt, name, then), now, hint=1 if name else 2)


def salts_that_look_outdated(impl: ModuleType) -> None:
    """Salts that are an adapter's namespace."""
    spaces = [
        space(impl, Asked(salt, name, TWO)) for salt in (None, "ann") for name in ("capitals", "oneword")
    ]
    for salt in filter(is_plain, spaces):
        for now in ({}, TWO, NEXT_WEEK):
            for name in ("", "capitals"):
                says_outdated(impl, Asked(salt, name, TWO), now, hint=2)


# ---------------------------------------------------------------------- bigrams


def as_pairs(values: Any, where: str) -> list[tuple[int, int]]:
    """What a student's function returned as a list of pairs."""
    expect(isinstance(values, list), f"{where} returned {shown(values)}, which is no list")
    for value in values:
        expect(isinstance(value, tuple), f"{where}: {shown(value)} is among its pairs; a pair is a tuple")
    try:
        return [(operator.index(first), operator.index(second)) for first, second in values]
    except (TypeError, ValueError):
        raise Failure(f"{where} returned {shown(values)}: that are not pairs of tokens") from None


def engines_pairs(key: RadixKey) -> list[tuple[int, int]]:
    """A key's units."""
    return [(int(first), int(second)) for first, second in key.tokens.reshape(-1, 2)]


def pairs_by_hand(impl: ModuleType) -> None:
    """[7, 8, 9, 4], one token, none."""
    for tokens in ([7, 8, 9, 4], [7], [], [5, 5, 5], list(range(20, 50))):
        wanted = engines_pairs(RadixKey(tokens, is_bigram=True))
        given = list(tokens)
        got = as_pairs(impl.to_pairs(given), f"to_pairs({tokens})")
        expect(given == tokens, f"to_pairs({tokens}) changed its argument to {given}")
        expect(got == wanted, f"to_pairs({tokens}) gave {got} instead of {wanted}")


def tokens_by_hand(impl: ModuleType) -> None:
    """Pairs back to tokens, and pairs that do not meet."""
    for tokens in ([7, 8, 9, 4], [7, 8], [5, 5, 5], [0, 1, 0, 1, 0]):
        pairs = engines_pairs(RadixKey(tokens, is_bigram=True))
        given = list(pairs)
        got = as_ints(impl.to_tokens(given), f"to_tokens({pairs})")
        expect(given == pairs, f"to_tokens({pairs}) changed its argument to {given}")
        expect(got == tokens, f"to_tokens({pairs}) gave {got} instead of {tokens}")
    got = as_ints(impl.to_tokens([]), "to_tokens([])")
    expect(got == [], f"to_tokens([]) gave {got} instead of []")
    for pairs in ([(1, 2), (3, 4)], [(1, 2), (2, 3), (2, 4)], [(1, 2), (1, 2)], [(0, 0), (0, 1), (0, 1)]):
        try:
            found = impl.to_tokens(list(pairs))
        except ValueError:
            continue
        raise Failure(f"to_tokens({pairs}) gave {shown(found)}; these do not meet: a ValueError should come")


def request_of(tokens: Sequence[int], pairs: bool) -> Request:
    """A request of the engine's with these tokens."""
    return Request("R1", np.array(tokens), SamplingParams(max_new_tokens=1), 0, 0, is_bigram=pairs)


def manager_of(tree: RadixCache, page_size: int) -> CacheManager:
    """The engine's cache manager over a tree and a small pool."""
    return CacheManager(tree, PageAllocator(4 * page_size, page_size), ReqToTokenPool(2, 16), ev.EventBus())


def units_of(tokens: Sequence[int], slots: int, page_size: int) -> list[tuple[int, int]]:
    """The units that the engine passes on of a request with KV for so many tokens (Request.committed_key)."""
    request = request_of(tokens, pairs=True)
    request.kv_len = slots
    pairs = engines_pairs(request.committed_key())
    return pairs[: len(pairs) // page_size * page_size]


def commits_alike(impl: ModuleType, tokens: list[int], row: list[int], page_size: int) -> None:
    """A student's commit passes on what the engine does."""
    where = f"commit({tokens}, {row}, {page_size})"
    given = list(tokens), list(row)
    got = impl.commit(*given, page_size)
    expect(given == (tokens, row), f"{where} changed what it was given")
    expect(
        isinstance(got, tuple) and len(got) == 3, f"{where} returned {shown(got)}, not (pairs, slots, tail)"
    )
    wanted = units_of(tokens, len(row), page_size)
    pairs = as_pairs(got[0], where)
    hint = 1
    expect(pairs == wanted, f"{where}: the tree takes the pairs {wanted}, not {pairs}", hint=hint)
    for what, slots, part in (("slots", got[1], row[: len(wanted)]), ("tail", got[2], row[len(wanted) :])):
        found = as_ints(slots, f"{where}, its {what},")
        expect(slots is not given[1], f"{where}: the {what} are the row that it was given; return a new list")
        expect(found == part, f"{where}: the {what} should be {part}, not {found}", hint=hint)


def commit_by_hand(impl: ModuleType) -> None:
    """A prompt whose next token is unknown; a reply in mid-course; one that is over."""
    commits_alike(impl, [7, 8, 9, 4], [20, 21, 22, 23], 1)
    commits_alike(impl, [7, 8, 9, 4, 6], [20, 21, 22, 23], 1)
    commits_alike(impl, [7, 8, 9, 4, 6, 3], [20, 21], 1)
    commits_alike(impl, [7, 8, 9, 4, 6], [40, 41, 42, 43, 8], 4)


def commits_of_all_lengths(impl: ModuleType) -> None:
    """All lengths up to 10, pages of 1 to 4."""
    for page in (1, 2, 3, 4):
        for length in range(1, 11):
            tokens = [(3 * at) % 7 for at in range(length)]
            for slots in range(length + 1):
                commits_alike(impl, tokens, [100 - 4 * (at // page) + at % page for at in range(slots)], page)


@cache
def engines_hits() -> list[tuple[int, int, int, bool, int]]:
    """(common, length, page_size, pairs, tokens of the prompt that the engine does not compute again)."""
    found = []
    for page, pairs in product((1, 2, 3, 4), (False, True)):
        manager = manager_of(RadixCache(page), page)
        for length in range(1, 11):
            for common in range(length + 1):
                found.append((common, length, page, pairs, cached_by(manager, common, length, pairs)))
    return found


def cached_by(manager: CacheManager, common: int, length: int, pairs: bool) -> int:
    """What the engine takes from its tree for a prompt whose first `common` tokens lie in it."""
    cached = manager.cache
    cached.reset()
    prompt = [*range(1, common + 1), *range(500, 500 + length - common)]
    text = [*range(1, common + 1), *range(900, 910)]
    cached.insert(RadixKey(text, None, pairs), list(range(len(text) - pairs)))
    request = request_of(prompt, pairs)
    return manager.cached(request, int(cached.match_prefix(request.key()).length))


def hits_of_all_lengths(impl: ModuleType) -> None:
    """All prompts up to 10 tokens, with tokens and with pairs."""
    for hit in engines_hits():
        hits_alike(impl, *hit)


def hits_alike(impl: ModuleType, common: int, length: int, page: int, pairs: bool, wanted: int) -> None:
    """A student's cached_tokens against the engine's."""
    got = impl.cached_tokens(common, length, page, pairs)
    expect(
        whole(got) == wanted,
        f"cached_tokens({common}, {length}, {page}, {pairs}) gave {shown(got)}; the engine takes {wanted} "
        f"from the cache: {common} of {length} tokens in common, pages of {page}, "
        f"{'pairs' if pairs else 'tokens'} as units",
        hint=2,
    )


# ---------------------------------------------------------------------- accept


class Ends:
    """Whether a reply is over, by a rule; remembers what it was asked."""

    def __init__(self, last: Iterable[int] = (), most: int = 99) -> None:
        self.last, self.most = tuple(last), most
        self.asked: list[list[int]] = []

    def over(self, tokens: Sequence[int]) -> bool:
        return bool(tokens) and (tokens[-1] in self.last or len(tokens) >= self.most)

    def __call__(self, tokens: Sequence[int]) -> bool:
        self.asked.append(list(tokens))
        return self.over(tokens)

    def __str__(self) -> str:
        if self.last:
            return f"a reply that ends with {' or '.join(map(str, self.last))}"
        return f"a reply with room for {self.most} more" if self.most < 99 else "a reply that goes on"


def engine_accepts(draft: list[int], chosen: Sequence[int], ends: Ends) -> tuple[list[int], int]:
    """What the engine's own rule says (Verified._accept in minirad/speculative/runner.py)."""
    request = SimpleNamespace(token_mask=None)
    draws = [
        SimpleNamespace(ahead=at, request=request, result=SimpleNamespace(error="", tokens=[(token, 0.0)]))
        for at, token in enumerate(chosen)
    ]
    result = SimpleNamespace(tokens=[], accepted=0, error="")
    judge = SimpleNamespace(_has_ended=lambda request, run: ends.over([token for token, _ in run]))
    room("speculative.runner").Verified._accept(judge, result, draft, draws, 0)
    return [token for token, _ in result.tokens], result.accepted


def accepts_alike(impl: ModuleType, draft: list[int], chosen: list[int], ends: Ends) -> None:
    """A student's accept against the engine's."""
    where = f"accept({draft}, {chosen}), {ends}"
    given = list(draft), list(chosen)
    answer = impl.accept(*given, ends)
    expect(given == (draft, chosen), f"{where}: it changed what it was given")
    both = isinstance(answer, tuple) and len(answer) == 2
    expect(both, f"{where}: it returned {shown(answer)}, not (tokens, kept)")
    wanted, kept = engine_accepts(draft, chosen, ends)
    tokens = as_ints(answer[0], where)
    expect(tokens == wanted, f"{where}: the reply gets {wanted}, not {tokens}", hint=0)
    words = f"{where}: so many drafts keep their slots: {kept}, not {shown(answer[1])}"
    expect(answer[1] == kept, words, hint=1)
    for asked in ends.asked:
        words = f"{where}: ends was asked about {asked}, and the reply gets {wanted}"
        expect(asked == wanted[: len(asked)] and bool(asked), words, hint=2)


def accept_by_hand(impl: ModuleType) -> None:
    """All right, the last one wrong, the first one wrong, no draft, a right guess that ends the reply."""
    accepts_alike(impl, [4, 5, 6], [4, 5, 6, 7], Ends())
    accepts_alike(impl, [4, 5, 6], [4, 5, 9, 7], Ends())
    accepts_alike(impl, [4, 5, 6], [9, 5, 6, 7], Ends())
    accepts_alike(impl, [4, 5, 6], [4, 9, 6, 7], Ends())
    accepts_alike(impl, [], [8], Ends())
    accepts_alike(impl, [4, 2, 6], [4, 2, 6, 7], Ends(last=[2]))
    accepts_alike(impl, [4, 5, 6], [4, 5, 6, 2], Ends(last=[2]))
    accepts_alike(impl, [2, 5], [2, 5, 6], Ends(last=[2]))


def accepts_of_all_drafts(impl: ModuleType) -> None:
    """All drafts of up to three tokens, each 0 or 1."""
    rules = [{}, {"last": [1]}, {"most": 1}, {"most": 2}, {"most": 3}]
    for size in range(4):
        for draft, chosen in product(product((0, 1), repeat=size), product((0, 1), repeat=size + 1)):
            for rule in rules if size < 3 else rules[:2]:
                accepts_alike(impl, list(draft), list(chosen), Ends(**rule))


def accepts_of_many(impl: ModuleType) -> None:
    """Longer drafts; what is behind the first wrong one is no token at all."""
    for size in (5, 8):
        draft = [7, 7, 3, 7, 5, 7, 7, 1][:size]
        for right in range(size + 1):
            chosen = [*draft[:right], 9, *[-1] * (size - right)]
            accepts_alike(impl, draft, chosen, Ends())
            accepts_alike(impl, draft, chosen, Ends(last=[3, 9]))
            accepts_alike(impl, draft, chosen, Ends(most=right or 1))


# ---------------------------------------------------------------------- roll back

CONFIG = EngineConfig(draft_tokens=99)


class Pool:
    """The engine's own pool with one request in it, whose pages are not in order."""

    def __init__(self, page_size: int, length: int, free_pages: int) -> None:
        self.page, self.length, self.bus = page_size, length, ev.EventBus()
        pages = -(-length // page_size)
        allocator = PageAllocator((pages + free_pages) * page_size, page_size)
        taken = allocator.alloc((pages + free_pages) * page_size)
        assert taken is not None
        for at in [*range(0, pages + free_pages, 2), *range(1, pages + free_pages, 2)]:
            allocator.free(taken[at * page_size : (at + 1) * page_size])
        self.rows = ReqToTokenPool(2, 64)
        self.manager = CacheManager(RadixCache(page_size), allocator, self.rows, self.bus)
        self.freed: list[int] = []
        self.bus.subscribe(ev.SlotsFreed, lambda event: self.freed.extend(event.slots))
        self.request = Request("R1", np.arange(length), SamplingParams(max_new_tokens=40), 0, 0)
        self.request.row = self.rows.alloc()
        assert self.manager.extend(self.request, length)

    @property
    def row(self) -> list[int]:
        """The slots of the request."""
        return [int(slot) for slot in self.rows.rows[self.request.row, : self.request.kv_len]]

    def drafts_with_room(self, wanted: int, left: int) -> int:
        """How many the engine gives slots (DraftingEngine._room_for_drafts); they are taken back."""
        request = self.request
        request.params = SamplingParams(max_new_tokens=left)
        drafter = SimpleNamespace(propose=lambda request, most: min(wanted, most))
        engine = SimpleNamespace(
            cache_manager=self.manager, config=CONFIG, runner=SimpleNamespace(drafter=drafter)
        )
        count = int(room("speculative.engine").DraftingEngine._room_for_drafts(engine, request, 0))
        self.manager.take_back(request, self.length)
        return count

    def rolled_back(self, drafts: int, kept: int) -> tuple[list[int], list[int], list[int]]:
        """The row with so many drafts, the row after the engine took the others back, the slots it freed."""
        assert self.manager.extend(self.request, self.length + drafts)
        before, self.freed = self.row, []
        self.manager.take_back(self.request, self.length + kept, "rejected")
        after, freed = self.row, list(self.freed)
        self.manager.take_back(self.request, self.length)
        return before, after, freed


@cache
def engines_room() -> list[tuple[int, int, int, int, int, int]]:
    """(wanted, left, length, free, page_size, drafts that the engine gives slots)."""
    found = []
    for page, length, pages in product((1, 3, 4), range(1, 6), range(3)):
        pool = Pool(page, length, pages)
        for wanted, left in product((0, 1, 2, 4, 7), (1, 2, 4, 9)):
            count = pool.drafts_with_room(wanted, left)
            found.append((wanted, left, length, pages * page, page, count))
    return found


def room_for_all(impl: ModuleType) -> None:
    """Rows of up to 5 tokens, up to two free pages, pages of 1, 3 and 4."""
    for wanted, left, length, free, page, count in engines_room():
        got = impl.room_for(wanted, left, length, free, page)
        expect(
            whole(got) == count,
            f"room_for(wanted={wanted}, left={left}, length={length}, free={free}, page_size={page}) gave "
            f"{shown(got)}; the engine gives slots to {count}",
            hint=0,
        )


@cache
def engines_rolls() -> list[tuple[list[int], int, int, int, list[int], list[int]]]:
    """(row, length, kept, page_size, the row after it, the slots that the engine freed)."""
    found = []
    for page, length in product((1, 2, 3, 4), range(1, 6)):
        pool = Pool(page, length, 6)
        for drafts in range(6):
            for kept in range(drafts + 1):
                before, after, freed = pool.rolled_back(drafts, kept)
                found.append((before, length, kept, page, after, freed))
    return found


def rolls_alike(
    impl: ModuleType, row: list[int], length: int, kept: int, page: int, after: list[int], freed: list[int]
) -> None:
    """A student's roll_back against the engine's."""
    where = f"roll_back({row}, length={length}, kept={kept}, page_size={page})"
    given = list(row)
    answer = impl.roll_back(given, length, kept, page)
    expect(given == row, f"{where} changed the row it was given to {given}; return a new one")
    both = isinstance(answer, tuple) and len(answer) == 2
    expect(both, f"{where} returned {shown(answer)}, not (row, freed)")
    got, back = (as_ints(part, where) for part in answer)
    expect(answer[0] is not given, f"{where} returned the row that it was given; return a new one")
    expect(got == after, f"{where}: the row goes on as {after}, not {got}", hint=1)
    expect(back == freed, f"{where}: free again are {freed}, not {back}", hint=2)


def roll_back_by_hand(impl: ModuleType) -> None:
    """Four drafts in pages of 1 and of 4."""
    rolls_alike(impl, [41, 42, 43, 44, 45], 1, 3, 1, [41, 42, 43, 44], [45])
    rolls_alike(impl, [41, 42, 43, 44, 45], 1, 4, 1, [41, 42, 43, 44, 45], [])
    rolls_alike(impl, [8, 9, 10, 11, 4, 5], 2, 1, 4, [8, 9, 10], [4, 5])
    rolls_alike(impl, [8, 9, 10, 11, 4, 5], 2, 2, 4, [8, 9, 10, 11], [4, 5])
    rolls_alike(impl, [8, 9, 10, 11, 4, 5], 2, 3, 4, [8, 9, 10, 11, 4], [])


def rolls_of_all(impl: ModuleType) -> None:
    """Rows of up to 5 tokens and 5 drafts, pages of 1 to 4."""
    for row, length, kept, page, after, freed in engines_rolls():
        rolls_alike(impl, row, length, kept, page, after, freed)


EXERCISES = [
    Exercise(
        "namespaces",
        2,
        [
            nobodys_space,
            tenants_and_adapters,
            a_name_loaded_again,
            adapters_that_are_not_there,
            spaces_of_everybody,
            salts_that_look_like_namespaces,
        ],
        functions=("space_of",),
        hints=(
            "Three cases: neither salt nor adapter, a salt alone, an adapter with a salt or without. What "
            "has to be in the key of each?",
            "The name is only there to look the digest up: two names of one digest share, one name with two "
            "digests does not. A name that is not in `loaded` is a ValueError.",
            "A salt may be any value, also one that you return for somebody else. Begin each key with a word "
            "of your own that says which case it is, and keep salt and digest in places of their own.",
        ),
    ),
    Exercise(
        "adapters",
        2,
        [reloads_by_hand, spaces_at_all_times, salts_that_look_outdated],
        functions=("outdated",),
        hints=(
            "You made the namespace, so you know where its digest lies. Which of the three cases can be "
            "outdated at all?",
            "Look for the digest among loaded.values(): the name may be another one by now. The answer is "
            "True or False.",
            "None and a salt alone are never outdated, whatever the salt looks like: ask first which case "
            "it is.",
        ),
    ),
    Exercise(
        "bigrams",
        3,
        [pairs_by_hand, tokens_by_hand, commit_by_hand, commits_of_all_lengths, hits_of_all_lengths],
        functions=("to_pairs", "to_tokens", "commit", "cached_tokens"),
        hints=(
            "How many pairs are n tokens, and how many tokens do k pairs spell? And no pairs? Each pair "
            "begins with the token that the pair before it ends with.",
            "commit: a unit needs its pair and its slot, so the smaller number of both counts; then whole "
            "pages. The tail is the rest of the row.",
            "cached_tokens: units in common first (of pairs one less, never below 0), then at most "
            "length - 1, and whole pages last.",
        ),
    ),
    Exercise(
        "accept",
        2,
        [accept_by_hand, accepts_of_all_drafts, accepts_of_many],
        hints=(
            "Go on token by token, as without drafts. Which of chosen comes in any case? When is the next "
            "one of it worth something, and when is it too late for it?",
            "Each kept draft has a token behind it, and the first token came without one: len(tokens) - 1. A "
            "right guess that ends the reply keeps nothing.",
            "Ask ends about the tokens that joined so far, from the first one that this pass gave: [a], then "
            "[a, b], ... and never about a draft that does not hold.",
        ),
    ),
    Exercise(
        "roll_back",
        3,
        [room_for_all, roll_back_by_hand, rolls_of_all],
        functions=("room_for", "roll_back"),
        hints=(
            "room_for has three limits: what is wanted, what could still hold, what has room. How many slots "
            "of the page in which the row ends has nobody used yet?",
            "The row ends at length + kept: the tokens that have KV. The token that joined last has none.",
            "Round the row's end up to a whole page: the slots from there on go back, those before it stay.",
        ),
    ),
]
