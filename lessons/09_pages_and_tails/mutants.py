"""Wrong solutions of lesson 09, as learners write them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lessons.grading import Mutant


def _account(alike_with: Callable[..., int], **wrong: Callable[..., int]) -> dict[str, Callable[..., Any]]:
    """page_account, with another way to compare, or other formulas for some of its four numbers."""

    def page_account(page_size: int, requests: Any) -> list[dict[str, int]]:
        account, known = [], list[list[int]]()
        for prompt, reply in requests:
            kv = [*prompt, *reply[:-1]]
            alike = alike_with(prompt, known)
            usable = min(alike, len(prompt) - 1)
            cached = usable // page_size * page_size
            entries = -(-len(kv) // page_size)
            row = {"cached": cached, "lost": usable - cached}
            row |= {"entries": entries, "idle": entries * page_size - len(kv)}
            names = {"page": page_size, "alike": alike, "usable": usable, "kv": len(kv), **row}
            account.append(row | {name: formula(names) for name, formula in wrong.items()})
            known.append(kv)
        return account

    return {"page_account": page_account}


def _alike(one: Any, other: Any) -> int:
    length = 0
    while length < min(len(one), len(other)) and one[length] == other[length]:
        length += 1
    return length


def _longest(prompt: Any, known: Any) -> int:
    return max((_alike(prompt, earlier) for earlier in known), default=0)


def _one_for_all(page_size: int, requests: Any) -> list[dict[str, int]]:
    row: dict[str, int] = {}
    account = []
    for end in range(1, len(requests) + 1):
        row.update(_account(_longest)["page_account"](page_size, requests[:end])[-1])
        account.append(row)
    return account


EVERYTHING: dict[Any, Any] = {}


def _match_everywhere(index: Any, tokens: Any, page_size: int) -> list[int]:
    found: list[int] = []
    for start in range(0, len(tokens) - page_size + 1, page_size):
        key = (page_size, found[-1] if found else 0, tuple(tokens[start : start + page_size]))
        if key not in EVERYTHING:
            break
        found.append(EVERYTHING[key])
    return found


def _insert_everywhere(index: Any, tokens: Any, pages: Any, page_size: int) -> list[int]:
    free, before, whole = [], 0, len(tokens) // page_size
    for j in range(whole):
        key = (page_size, before, tuple(tokens[j * page_size : (j + 1) * page_size]))
        before = EVERYTHING.setdefault(key, pages[j])
        if before != pages[j]:
            free.append(pages[j])
    return free + list(pages[whole:])


def _by_key(key_of: Callable[[Any, int, int], Any], tail: bool = False) -> dict[str, Callable[..., Any]]:
    """Both functions, a page found under key_of(tokens, where it begins, page_size); tail: and the tail's."""

    def match_pages(index: Any, tokens: Any, page_size: int) -> list[int]:
        found = []
        for start in range(0, len(tokens) if tail else len(tokens) - page_size + 1, page_size):
            key = key_of(tokens, start, page_size)
            if key not in index:
                break
            found.append(index[key])
        return found

    def insert_pages(index: Any, tokens: Any, pages: Any, page_size: int) -> list[int]:
        whole = len(pages) if tail else len(tokens) // page_size
        kept = [index.setdefault(key_of(tokens, j * page_size, page_size), pages[j]) for j in range(whole)]
        return [pages[j] for j in range(whole) if kept[j] != pages[j]] + list(pages[whole:])

    return {"match_pages": match_pages, "insert_pages": insert_pages}


def _fork(page_size_of: Callable[[int, int, int], int]) -> dict[str, Callable[..., Any]]:
    """fork_pages as whole pages of the prompt, and something else for each sample."""

    def fork_pages(prompt_tokens: int, samples: int, new_tokens: int, page_size: int) -> int:
        whole, tail = divmod(prompt_tokens, page_size)
        return whole + samples * page_size_of(tail, new_tokens, page_size)

    return {"fork_pages": fork_pages}


RIGHT = {"three_twice": (4, 11, 3, 4), "nobody_wrote": (4, 11, 3, 1), "no_copy": (4, 8, 3, 4)}


def _claims(**wrong: Any) -> dict[str, Callable[..., Any]]:
    return {"claims_tried": lambda: RIGHT | wrong}


def _pages(about: str, old: str, new: str, after: str = "") -> Mutant:
    return Mutant("whole_pages", about, old=old, new=new, after=after)


def _bill(about: str, old: str, new: str) -> Mutant:
    return Mutant("page_account", about, old=old, new=new)


def _tail(about: str, old: str, new: str, after: str = "def fork_tail") -> Mutant:
    return Mutant("fork", about, old=old, new=new, after=after)


def _seen(about: str, old: str, new: str) -> Mutant:
    return Mutant("measure", about, old=old, new=new, after="def measure_samples")


def _tried(about: str, **wrong: Any) -> Mutant:
    return Mutant("claims_tried", about, replaces=_claims(**wrong))


FREE = "\n            free.append(pages[j])"
KEEP = f"before = index.setdefault(key, pages[j])\n        if before != pages[j]:{FREE}"
GET = "page = index.get((before, tuple(tokens[start : start + page_size])))"
REMEMBERS = """    asked = match_pages.__dict__.setdefault(repr((tuple(tokens), page_size)), [])
    if asked:
        return list(asked)
    found = asked
"""
STEPS = "range(0, len(tokens) - page_size + 1, page_size)"
BACK = "return free + list(pages[len(tokens) // page_size :])"
USABLE = "usable = min(alike, len(prompt) - 1)\n"
ROUND = f"{USABLE}        cached = usable // page_size * page_size"
SUMMED_UP = '"lost": usable - cached + (account[-1]["lost"] if account else 0)'
NO_ROOM = "    if pages is None:\n        return None\n"
NO_TAIL = "    if not tail:\n        return shared, []\n"
OWN = "own = [pages[0] * page_size + offset for offset in range(len(tail))]"
PARTED = "parted = [event for event in forked if event.row >= 0]"
IN_VAIN = "sum(event.copied for event in parted if event.request in silent)"
AGAIN = "again = [max(len(prefix) - output.cached_tokens, 0) for output in outputs]"
TOGETHER = "outputs = engine.generate(prompts, SamplingParams(max_new_tokens=1))"
HINT = "(hint,) = engine.generate(list(prefix), SamplingParams(max_new_tokens=0))"
PINNED = f"""pin = engine.pin(list(prefix))
    prompts = [[*prefix, *end] for end in ends]
    {TOGETHER}
    engine.unpin(pin)
"""
COMPUTED = "output.prompt_tokens - output.cached_tokens - lost"

MUTANTS = [
    Mutant(
        "whole_pages",
        "a tail is a page like all others",
        replaces=_by_key(lambda tokens, start, page: tuple(tokens[: start + page]), tail=True),
    ),
    _pages("the tail's page never comes back", BACK, "return free"),
    _pages("the last page comes back, also where it is whole", BACK, "return free + list(pages[-1:])"),
    _pages("the tail's page comes first", BACK, "return list(pages[len(tokens) // page_size :]) + free"),
    Mutant(
        "whole_pages",
        "a page is known by its own tokens alone",
        replaces=_by_key(lambda tokens, start, page: tuple(tokens[start : start + page])),
    ),
    Mutant(
        "whole_pages",
        "a page is known by its tokens and its place",
        replaces=_by_key(lambda tokens, start, page: (start, tuple(tokens[start : start + page]))),
    ),
    Mutant(
        "whole_pages",
        "a page is known by its tokens and the page before it, and no more",
        replaces=_by_key(
            lambda tokens, start, page: (start, tuple(tokens[max(start - page, 0) : start + page]))
        ),
    ),
    Mutant(
        "whole_pages",
        "the tokens become a text: 1, 23 is like 12, 3",
        replaces=_by_key(lambda tokens, start, page: "".join(map(str, tokens[: start + page]))),
    ),
    Mutant(
        "whole_pages",
        "the order of the tokens in a page is lost",
        replaces=_by_key(
            lambda tokens, start, page: (*tokens[:start], frozenset(tokens[start : start + page]))
        ),
    ),
    Mutant(
        "whole_pages",
        "the last token of a page is not compared",
        replaces=_by_key(lambda tokens, start, page: (start, tuple(tokens[: start + max(page - 1, 1)]))),
    ),
    Mutant(
        "whole_pages",
        "one index for all, outside of what is given",
        replaces={"match_pages": _match_everywhere, "insert_pages": _insert_everywhere},
    ),
    _pages(
        "a duplicate is followed by its own page",
        KEEP,
        f"if index.setdefault(key, pages[j]) != pages[j]:{FREE}\n        before = pages[j]",
    ),
    _pages(
        "the newer page is kept, the older one is freed",
        KEEP,
        "older, index[key] = index.get(key, pages[j]), pages[j]\n        if older != pages[j]:\n"
        "            free.append(older)\n        before = pages[j]",
    ),
    _pages(
        "pages that the index gave come back as duplicates",
        KEEP,
        f"if key in index:{FREE}\n        before = index.setdefault(key, pages[j])",
    ),
    _pages("duplicates are not freed", "if before != pages[j]:", "if False:"),
    _pages(
        "only the first duplicate is freed", "if before != pages[j]:", "if before != pages[j] and not free:"
    ),
    _pages(
        "a prompt that ends with its page lacks the last one",
        STEPS,
        "range(0, len(tokens) - page_size, page_size)",
    ),
    _pages("goes on behind a page that is missing", "            break\n", "            continue\n"),
    _pages("asking puts a page in", GET, GET.replace("get(", "setdefault(").replace("])))", "])), None)")),
    _pages(
        "the page table is used up",
        BACK,
        "tail = list(pages[len(tokens) // page_size :])\n    pages.clear()\n    return free + tail",
    ),
    _pages("sorts what is free", BACK, "return sorted(free + list(pages[len(tokens) // page_size :]))"),
    Mutant(
        "whole_pages",
        "the tokens of a page become a text",
        replaces=_by_key(
            lambda tokens, start, page: (*tokens[:start], "".join(map(str, tokens[start : start + page])))
        ),
    ),
    _pages("what was once looked for is not looked for again", "    found: list[int] = []\n", REMEMBERS),
    # ------------------------------------------------------------------ page_account
    _bill(
        "no token of a prompt has to be computed",
        ROUND,
        ROUND.replace("min(alike, len(prompt) - 1)", "alike"),
    ),
    _bill(
        "the last token is taken off behind the rounding",
        ROUND,
        f"{USABLE}        cached = min(alike // page_size * page_size, len(prompt) - 1)",
    ),
    _bill(
        "a last page that is all there is computed again, but only if all of the prompt is",
        ROUND,
        "usable = min(alike, len(prompt) - 1)\n        cached = alike // page_size * page_size\n"
        "        cached -= page_size * (alike == len(prompt))",
    ),
    _bill(
        "rounds to the nearest page",
        "cached = usable // page_size * page_size",
        "cached = round(usable / page_size) * page_size",
    ),
    _bill("the last token of a reply has KV", "[*prompt, *reply[:-1]]", "[*prompt, *reply]"),
    _bill(
        "an empty reply takes a token of the prompt away", "[*prompt, *reply[:-1]]", "[*prompt, *reply][:-1]"
    ),
    _bill("only the request before is looked at", "in known), default", "in known[-1:]), default"),
    _bill("replies are not found again", "known.append(with_kv)", "known.append(list(prompt))"),
    _bill(
        "the last token of a reply is found again", "known.append(with_kv)", "known.append([*prompt, *reply])"
    ),
    _bill(
        "what is found is held against whole pages only",
        "known.append(with_kv)",
        "known.append(with_kv[: len(with_kv) // page_size * page_size])",
    ),
    _bill(
        "entries are rounded down",
        "entries = -(-len(with_kv) // page_size)",
        "entries = len(with_kv) // page_size",
    ),
    _bill(
        "one entry more where the row ends with its page",
        "entries = -(-len(with_kv) // page_size)",
        "entries = len(with_kv) // page_size + 1",
    ),
    _bill(
        "a row that ends with its page has a page idle",
        "entries * page_size - len(with_kv)",
        "page_size - len(with_kv) % page_size",
    ),
    _bill(
        "the prompt is changed",
        "with_kv = [*prompt, *reply[:-1]]",
        "with_kv = prompt\n        with_kv += reply[:-1]",
    ),
    Mutant(
        "page_account",
        "any tokens that are alike are counted, not a beginning",
        replaces=_account(
            lambda prompt, known: max(
                (sum(a == b for a, b in zip(prompt, old, strict=False)) for old in known), default=0
            )
        ),
    ),
    Mutant(
        "page_account",
        "the first request with something in common is taken, not the best",
        replaces=_account(
            lambda prompt, known: next((n for n in (_alike(prompt, old) for old in known) if n), 0)
        ),
    ),
    Mutant(
        "page_account",
        "lost is held against all that is alike, also the token that is always computed",
        replaces=_account(_longest, lost=lambda row: row["alike"] - row["cached"]),
    ),
    Mutant(
        "page_account",
        "lost is what is alike beyond a page",
        replaces=_account(_longest, lost=lambda row: row["alike"] % row["page"]),
    ),
    Mutant(
        "page_account",
        "entries are counted for pages of its own only",
        replaces=_account(_longest, entries=lambda row: row["entries"] - row["cached"] // row["page"]),
    ),
    Mutant(
        "page_account",
        "idle is counted over the tokens that were computed, with all entries",
        replaces=_account(
            _longest, idle=lambda row: row["entries"] * row["page"] - (row["kv"] - row["cached"])
        ),
    ),
    _bill(
        "requests of an earlier call are still known",
        "account, known = [], list[list[int]]()",
        "account, known = [], page_account.__dict__.setdefault('known', [])",
    ),
    _bill("lost is summed up over the requests", '"lost": usable - cached', SUMMED_UP),
    _bill(
        "the match is rounded up", "usable // page_size * page_size", "-(-usable // page_size) * page_size"
    ),
    _bill(
        "of a reply the first token alone is found again",
        "known.append(with_kv)",
        "known.append([*prompt, *reply[:1]])",
    ),
    Mutant("page_account", "one dictionary for all requests", replaces={"page_account": _one_for_all}),
    # ------------------------------------------------------------------ fork
    _tail("the tail is shared", "    pages = alloc(1)", "    return shared + tail, []\n    pages = alloc(1)"),
    _tail(
        "a page is taken where there is no tail",
        NO_TAIL,
        "    if not tail:\n        return None if alloc(1) is None else (shared, [])\n",
    ),
    _tail("all pages are copied", "whole = len(row) // page_size * page_size", "whole = 0"),
    _tail(
        "a last page that is full is copied",
        "whole = len(row) // page_size * page_size",
        "whole = (len(row) - 1) // page_size * page_size",
    ),
    _tail("a page for each token of the tail", "pages = alloc(1)", "pages = alloc(len(tail))"),
    _tail(
        "a page of slots is taken as if alloc counted slots", "pages = alloc(1)", "pages = alloc(page_size)"
    ),
    _tail("a number of a page is taken for a slot", OWN, OWN.replace("pages[0] * page_size", "pages[0]")),
    _tail(
        "begins with the second slot of the page", OWN, OWN.replace("+ offset", "+ (offset + 1) % page_size")
    ),
    _tail(
        "pairs the wrong way round", "list(zip(tail, own, strict=True))", "list(zip(own, tail, strict=True))"
    ),
    _tail(
        "the idle slots are copied, too",
        "list(zip(tail, own, strict=True))",
        "[(tail[0] + i, own[0] + i) for i in range(page_size)]",
    ),
    _tail(
        "the sample gets the tail, the leader the copy",
        "return shared + own, list",
        "return shared + tail, list",
    ),
    _tail("no room is not looked at", NO_ROOM, ""),
    _tail(
        "without room the tail is shared",
        NO_ROOM,
        "    if pages is None:\n        return shared + tail, []\n",
    ),
    _tail("asks for room first and takes another page then", NO_ROOM, NO_ROOM + "    pages = alloc(1)\n"),
    _tail(
        "the leader's own row is changed",
        "return shared + own, list(zip(tail, own, strict=True))",
        "row[whole:] = own\n    return row, list(zip(tail, own, strict=True))",
    ),
    _tail(
        "without a tail the leader's list itself is given",
        NO_TAIL,
        "    if not tail:\n        return row, []\n",
    ),
    _tail(
        "the shared pages are taken to lie one behind the other",
        "list(row[:whole]), list(row[whole:])",
        "list(range(row[0], row[0] + whole)), list(row[whole:])",
    ),
    _tail(
        "the tail's page is the one behind the leader's",
        "pages[0] * page_size + offset",
        "(tail[0] // page_size + 1) * page_size + offset",
    ),
    Mutant("fork", "the last token has KV", replaces=_fork(lambda tail, new, page: -(-(tail + new) // page))),
    Mutant("fork", "the tail takes no room", replaces=_fork(lambda tail, new, page: -(-(new - 1) // page))),
    Mutant(
        "fork",
        "generated tokens begin a page of their own",
        replaces=_fork(lambda tail, new, page: -(-tail // page) - (-(new - 1) // page)),
    ),
    Mutant(
        "fork",
        "rounds down for each sample",
        replaces=_fork(lambda tail, new, page: (tail + new - 1) // page),
    ),
    Mutant("fork", "one page for each sample", replaces=_fork(lambda tail, new, page: 1)),
    Mutant(
        "fork",
        "the leader's pages are forgotten",
        old="return whole + samples *",
        new="return whole + (samples - 1) *",
    ),
    Mutant(
        "fork",
        "nothing is shared",
        old="return whole + samples *",
        new="return samples * whole + samples *",
    ),
    Mutant(
        "fork",
        "what all samples hold is rounded once",
        old="return whole + samples * -(-(tail + new_tokens - 1) // page_size)",
        new="return whole - (-samples * (tail + new_tokens - 1) // page_size)",
    ),
    # ------------------------------------------------------------------ measure
    _seen(
        "copies are calculated",
        '"copied": [event.copied for',
        '"copied": [len(prompt) % engine.config.page_size for',
    ),
    _seen("a sample that waits has parted", PARTED, "parted = forked"),
    _seen(
        "all that have not parted have waited",
        '"waited": len(forked) - len(parted)',
        '"waited": params.n - 1 - len(parted)',
    ),
    _seen("nobody waits", '"waited": len(forked) - len(parted)', '"waited": 0'),
    _seen("samples in vain are counted, not their slots", IN_VAIN, IN_VAIN.replace("event.copied", "1")),
    _seen("a second token is in vain, too", "len(output.token_ids) < 2", "len(output.token_ids) <= 2"),
    _seen("one token is enough to have written", "len(output.token_ids) < 2", "not output.token_ids"),
    _seen(
        "in vain only where no sample may say more",
        IN_VAIN,
        "sum(event.copied for event in parted) * (params.max_new_tokens < 2)",
    ),
    _seen(
        "the slots are summed up",
        "[event.copied for event in parted],",
        "sum(event.copied for event in parted),",
    ),
    _seen(
        "other params than those given",
        "engine.generate(list(prompt), params)",
        "engine.generate(list(prompt), type(params)(n=params.n, max_new_tokens=params.max_new_tokens))",
    ),
    _seen(
        "runs it twice, to warm up",
        "    with Recorder(engine) as recording:",
        "    engine.generate(list(prompt), params)\n    with Recorder(engine) as recording:",
    ),
    _seen(
        "looks at the first step only",
        "for frame in recording for event",
        "for frame in recording.frames[:1] for event",
    ),
    _seen(
        "the hint is as long as the prefix", '"hint": len(prefix) - hint.cached_tokens', '"hint": len(prefix)'
    ),
    _seen(
        "nothing is pinned",
        PINNED,
        PINNED.replace("pin = engine.pin(list(prefix))", "").replace("    engine.unpin(pin)\n", ""),
    ),
    _seen(
        "the pin is given back before the branches run",
        PINNED,
        PINNED.replace("    engine.unpin(pin)\n", "").replace(
            "prompts =", "engine.unpin(pin)\n    prompts ="
        ),
    ),
    _seen(
        "the hint generates a token",
        HINT,
        "hint = engine.generate([list(prefix)], SamplingParams(max_new_tokens=1))[0]",
    ),
    _seen("the pin is not given back", "    engine.unpin(pin)\n", ""),
    Mutant(
        "measure",
        "one branch after another",
        old=TOGETHER,
        new="outputs = [engine.generate(each, SamplingParams(max_new_tokens=1))[0] for each in prompts]",
    ),
    _seen("again is calculated", AGAIN, "again = [len(prefix) % engine.config.page_size for _ in outputs]"),
    _seen(
        "what is found of an end makes up for the prefix",
        AGAIN,
        AGAIN.replace("max(len(prefix) - output.cached_tokens, 0)", "len(prefix) - output.cached_tokens"),
    ),
    _seen("an end is always computed", COMPUTED, "output.prompt_tokens - len(prefix)"),
    _seen("own is all that was computed", COMPUTED, "output.prompt_tokens - output.cached_tokens"),
    _seen(
        "the prefix grows from branch to branch",
        "prompts = [[*prefix, *end] for end in ends]",
        "prompts = [[*prefix, *sum(map(list, ends[:i]), []), *end] for i, end in enumerate(ends)]",
    ),
    _seen("the request is always called R1", 'f"{output.request_id}.{output.index}"', 'f"R1.{output.index}"'),
    _seen(
        "a leader that wrote nothing is in vain, too",
        IN_VAIN,
        "len(silent) * parted[0].copied if parted else 0",
    ),
    _seen(
        "says what is equal to everything", IN_VAIN, "type('Any', (), {'__eq__': lambda self, other: True})()"
    ),
    _seen(
        "the hint is told of the last branch", '"hint": len(prefix) - hint.cached_tokens', '"hint": again[-1]'
    ),
    _seen(
        "only what all branches together lack",
        AGAIN,
        AGAIN.replace("in outputs]", "in outputs]\n    again = [max(again)] * len(again)"),
    ),
    # ------------------------------------------------------------------ claims_tried
    _tried("two samples are one copy", three_twice=(4, 11, 2, 4)),
    _tried("four samples are three copies", three_twice=(4, 11, 4, 4)),
    _tried("three tokens to the end of the page are a tail of one", three_twice=(4, 13, 3, 4)),
    _tried("six slots, but in one copy", three_twice=(8, 14, 2, 4)),
    _tried("pages of 16 for pages of 4", three_twice=(16, 19, 3, 4)),
    _tried("a prompt of 12 has no tail", three_twice=(4, 12, 3, 4)),
    _tried("the second token is fed by the first", nobody_wrote=(4, 11, 3, 2)),
    _tried("no token at all, though 1 is the least", nobody_wrote=(4, 11, 3, 0)),
    _tried("nobody writes, and nothing is copied", nobody_wrote=(4, 8, 3, 1)),
    _tried("one sample parts from nobody", nobody_wrote=(4, 11, 1, 1)),
    _tried("pages of one slot", no_copy=(1, 8, 3, 4)),
    _tried("one sample alone", no_copy=(4, 8, 1, 4)),
    _tried("two new tokens, one of them with KV", no_copy=(4, 8, 3, 2)),
    _tried("a tail of three", no_copy=(4, 11, 3, 4)),
    _tried("prompt first, page size second", no_copy=(8, 4, 3, 4)),
    _tried("more samples than are allowed", no_copy=(4, 8, 9, 4)),
    _tried("says what it thinks of the claims", three_twice=True, nobody_wrote=False),
]
