"""Plausible wrong solutions of lesson 06."""

from __future__ import annotations

from lessons.grading import Mutant

_ONE = "def commit_unfinished"
_END = "def commit_finished"

MUTANTS = [
    # ------------------------------------------------------------ commit_unfinished
    Mutant(
        "commit_unfinished",
        "no remap: the classic silent bug",
        "    request.row[:aligned] = tree.path_slots(node)\n",
        "",
    ),
    Mutant(
        "commit_unfinished",
        "remapped from the old protected on, with the path's first slots",
        "request.row[:aligned] = tree.path_slots(node)",
        "request.row[request.protected : prefix_len] = "
        "tree.path_slots(node)[: prefix_len - request.protected]",
    ),
    Mutant(
        "commit_unfinished",
        "remapped before the duplicates are read",
        "    freed.extend(request.row[request.protected : prefix_len])\n"
        "    request.row[:aligned] = tree.path_slots(node)\n",
        "    request.row[:aligned] = tree.path_slots(node)\n"
        "    freed.extend(request.row[request.protected : prefix_len])\n",
    ),
    Mutant(
        "commit_unfinished",
        "duplicates are never freed: a leak",
        "    freed.extend(request.row[request.protected : prefix_len])\n",
        "",
        after=_ONE,
    ),
    Mutant(
        "commit_unfinished",
        "frees from the start of the row",
        "request.row[request.protected : prefix_len]",
        "request.row[:prefix_len]",
        after=_ONE,
    ),
    Mutant(
        "commit_unfinished",
        "frees what is new in the tree",
        "request.row[request.protected : prefix_len]",
        "request.row[request.protected : aligned]",
        after=_ONE,
    ),
    Mutant(
        "commit_unfinished",
        "off by one: the last duplicate is kept",
        "request.row[request.protected : prefix_len]",
        "request.row[request.protected : prefix_len - 1]",
        after=_ONE,
    ),
    Mutant(
        "commit_unfinished",
        "unlocks before it locks",
        "    tree.lock(node)  # before the old one is let go\n    tree.unlock(request.node)\n",
        "    tree.unlock(request.node)\n    tree.lock(node)\n",
    ),
    Mutant(
        "commit_unfinished",
        "the old lock is never given back",
        "    tree.unlock(request.node)\n",
        "",
        after=_ONE,
    ),
    Mutant(
        "commit_unfinished",
        "the new end is not locked",
        "    tree.lock(node)  # before the old one is let go\n    tree.unlock(request.node)\n",
        "    tree.unlock(request.node)\n",
    ),
    Mutant(
        "commit_unfinished",
        "locked again at each commit, the old one kept",
        "    tree.unlock(request.node)\n",
        "    tree.lock(request.node)\n",
        after=_ONE,
    ),
    Mutant(
        "commit_unfinished",
        "protected is what was there before",
        "request.protected, request.node = aligned, node",
        "request.protected, request.node = prefix_len, node",
    ),
    Mutant(
        "commit_unfinished",
        "protected includes the tail",
        "request.protected, request.node = aligned, node",
        "request.protected, request.node = len(request.tokens), node",
    ),
    Mutant(
        "commit_unfinished",
        "the node is not moved on",
        "request.protected, request.node = aligned, node",
        "request.protected = aligned",
    ),
    Mutant(
        "commit_unfinished",
        "the tail is thrown away",
        "request.row[:aligned] = tree.path_slots(node)",
        "request.row[:] = tree.path_slots(node)",
    ),
    # ------------------------------------------------------------ commit_finished
    Mutant("commit_finished", "the tail is not freed", "    freed.extend(request.row[whole:])\n", ""),
    Mutant(
        "commit_finished",
        "the tail is freed from prefix_len on",
        "freed.extend(request.row[whole:])",
        "freed.extend(request.row[prefix_len:])",
    ),
    Mutant(
        "commit_finished",
        "duplicates are not freed",
        "    freed.extend(request.row[request.protected : prefix_len])\n",
        "",
        after=_END,
    ),
    Mutant(
        "commit_finished",
        "everything is freed, as without a tree",
        "freed.extend(request.row[request.protected : prefix_len])",
        "freed.extend(request.row[:whole])",
        after=_END,
    ),
    Mutant(
        "commit_finished",
        "nothing is inserted: only what was protected stays",
        "prefix_len, _ = tree.insert(request.tokens, request.row)",
        "prefix_len = len(request.row)",
    ),
    Mutant("commit_finished", "the lock is kept", "    tree.unlock(request.node)\n", "", after=_END),
    Mutant(
        "commit_finished",
        "unlocks where the pages end, not what is held",
        "    prefix_len, _ = tree.insert(request.tokens, request.row)\n",
        "    prefix_len, request.node = tree.insert(request.tokens, request.row)\n",
    ),
    Mutant("commit_finished", "the row is kept", "    request.row.clear()\n", ""),
    Mutant(
        "commit_finished",
        "page size forgotten: no tail at all",
        "whole = len(request.tokens) // tree.page_size * tree.page_size",
        "whole = len(request.tokens)",
    ),
    Mutant(
        "commit_finished",
        "one page too much is freed",
        "whole = len(request.tokens) // tree.page_size * tree.page_size",
        "whole = max(len(request.tokens) - 1, 0) // tree.page_size * tree.page_size",
    ),
    Mutant(
        "commit_finished",
        "given back before it is inserted",
        "    prefix_len, _ = tree.insert(request.tokens, request.row)\n",
        "    tree.unlock(request.node)\n    prefix_len, _ = tree.insert(request.tokens, request.row)\n"
        "    tree.lock(request.node)\n",
    ),
    # ------------------------------------------------------------ plan_chunks
    Mutant(
        "plan_chunks",
        "a prompt that is cached whole is not computed at all",
        "min(cached[number], length - 1)",
        "min(cached[number], length)",
    ),
    Mutant(
        "plan_chunks",
        "hits are not cut to pages",
        "min(cached[number], length - 1) // page_size * page_size",
        "min(cached[number], length - 1)",
    ),
    Mutant(
        "plan_chunks",
        "cut to pages first, then one less",
        "min(cached[number], length - 1) // page_size * page_size",
        "min(cached[number] // page_size * page_size, length - 1)",
    ),
    Mutant(
        "plan_chunks",
        "hits are ignored",
        "start = min(cached[number], length - 1) // page_size * page_size",
        "start = 0",
    ),
    Mutant(
        "plan_chunks",
        "a new step for every request",
        "    for number, length in enumerate(lengths):\n",
        "    for number, length in enumerate(lengths):\n        left = 0\n",
    ),
    Mutant(
        "plan_chunks",
        "the budget is never used up",
        "            left -= stop - start\n",
        "            left -= 0\n",
    ),
    Mutant(
        "plan_chunks",
        "chunks are cut to whole pages, too",
        "            stop = min(start + left, length)\n",
        "            stop = min(start + max(left // page_size * page_size, 1), length)\n",
    ),
    Mutant(
        "plan_chunks",
        "the budget is counted in positions, not in tokens computed",
        "            left -= stop - start\n",
        "            left = max(left - stop, 0)\n",
    ),
    Mutant(
        "plan_chunks",
        "whole prompts only",
        "            stop = min(start + left, length)\n",
        "            stop = length\n            left = max(left, length - start)\n",
    ),
    Mutant(
        "plan_chunks",
        "every step may go one over",
        "                left = chunk_tokens\n",
        "                left = chunk_tokens + 1\n",
    ),
    # ------------------------------------------------------------ page_owners
    Mutant(
        "page_owners", "a row claims all that it reads", "for slot in row[protected:]:", "for slot in row:"
    ),
    Mutant(
        "page_owners",
        "the last protected slot is claimed, too",
        "for slot in row[protected:]:",
        "for slot in row[max(protected - 1, 0) :]:",
    ),
    Mutant(
        "page_owners",
        "the last slot of a row is left out",
        "for slot in row[protected:]:",
        "for slot in row[protected:-1]:",
    ),
    Mutant(
        "page_owners",
        "slots taken for pages",
        'claims[slot // page_size].add("tree")',
        'claims.get(slot, set()).add("tree")',
    ),
    Mutant(
        "page_owners",
        "free pages taken for slots",
        'claims[page].add("free")',
        'claims.get(page // page_size, set()).add("free")',
    ),
    Mutant(
        "page_owners",
        "the last one to claim gets it",
        "claims[slot // page_size].add(name)",
        "claims[slot // page_size] = {name}",
    ),
    Mutant(
        "page_owners",
        "pages that nobody claims are left out",
        "for page, names in claims.items()}",
        "for page, names in claims.items() if names}",
    ),
    Mutant("page_owners", "pages from 0 on", "range(1, num_pages + 1)", "range(num_pages + 1)"),
    Mutant("page_owners", "not sorted", "{page: sorted(names)", "{page: sorted(names, reverse=True)"),
    Mutant(
        "page_owners",
        "what nobody claims is called free",
        "{page: sorted(names)",
        '{page: sorted(names) or ["free"]',
    ),
]


def _instead(name: str, about: str, code: str) -> Mutant:
    """`code` defines `name`; the right function is at hand as _right_<name>."""
    return Mutant(name, about, f"def {name}(", f"{code.strip()}\n\n\ndef _right_{name}(")


def _wraps(name: str, about: str, body: str) -> Mutant:
    """`body` is the function's; it may call right(tree, request, freed)."""
    lines = "\n".join(f"    {line}" if line else "" for line in body.strip().splitlines())
    code = f"def {name}(tree, request, freed):\n    right = _right_{name}\n{lines}"
    return _instead(name, about, code)


_BOTH = ("commit_unfinished", "commit_finished")
_FREES = "    freed.extend(request.row[request.protected : prefix_len])\n"
MUTANTS += [
    # ------------------------------------------------------------ both commits
    # a list `freed` that holds something already
    *(
        _wraps(
            name, "freed[:] = instead of appending", "mine = []\nright(tree, request, mine)\nfreed[:] = mine"
        )
        for name in _BOTH
    ),
    *(
        _wraps(
            name,
            "replaces what was freed before, when there is something to free",
            "mine = []\nright(tree, request, mine)\nif mine:\n    freed[:] = mine",
        )
        for name in _BOTH
    ),
    # slot 7 was freed in an earlier life, came back, and is a duplicate now
    *(
        _wraps(
            name,
            "a slot that was freed once is not freed again, in its next life",
            "mine = []\nright(tree, request, mine)\nfreed.extend(slot for slot in mine if slot not in freed)",
        )
        for name in _BOTH
    ),
    *(
        _wraps(
            name,
            "what was freed before in this process is not freed again",
            f"mine = []\nright(tree, request, mine)\nknown = {name}.__dict__.setdefault('known', set())\n"
            "freed.extend(slot for slot in mine if slot not in known)\nknown.update(mine)",
        )
        for name in _BOTH
    ),
    # more than one duplicate
    *(
        Mutant(
            name,
            "only the first page of the duplicates is freed",
            "request.row[request.protected : prefix_len]",
            "request.row[request.protected : min(prefix_len, request.protected + tree.page_size)]",
            after=after,
        )
        for name, after in zip(_BOTH, (_ONE, _END), strict=True)
    ),
    # protected 4, prefix_len 8: right when nothing was protected
    *(
        Mutant(
            name,
            "duplicates are freed only when the request had nothing protected",
            "request.row[request.protected : prefix_len]",
            "request.row[request.protected : prefix_len * (request.protected == 0)]",
            after=after,
        )
        for name, after in zip(_BOTH, (_ONE, _END), strict=True)
    ),
    # prefix_len < aligned: some are duplicates, some are new
    *(
        Mutant(
            name,
            "duplicates are freed only when all of it was there",
            "request.row[request.protected : prefix_len]",
            f"request.row[request.protected : prefix_len * (prefix_len == {whole})]",
            after=after,
        )
        for name, after, whole in zip(_BOTH, (_ONE, _END), ("aligned", "whole"), strict=True)
    ),
    # pages of 3
    Mutant(
        "commit_unfinished",
        "whole pages by a mask: for powers of two only",
        "aligned = len(request.tokens) // tree.page_size * tree.page_size",
        "aligned = len(request.tokens) & ~(tree.page_size - 1)",
    ),
    Mutant(
        "commit_finished",
        "whole pages by a mask: for powers of two only",
        "whole = len(request.tokens) // tree.page_size * tree.page_size",
        "whole = len(request.tokens) & ~(tree.page_size - 1)",
    ),
    # ------------------------------------------------------------ commit_unfinished
    # some duplicates and something new behind them
    Mutant(
        "commit_unfinished",
        "remapped only when all of it was there",
        "request.row[:aligned] = tree.path_slots(node)",
        "request.row[:aligned] = tree.path_slots(node) if prefix_len == aligned else request.row[:aligned]",
    ),
    Mutant(
        "commit_unfinished",
        "remapped only when something of it was new",
        "request.row[:aligned] = tree.path_slots(node)",
        "request.row[:aligned] = tree.path_slots(node) if prefix_len < aligned else request.row[:aligned]",
    ),
    Mutant(
        "commit_unfinished",
        "only the first page of the duplicates is remapped",
        "request.row[:aligned] = tree.path_slots(node)",
        "end = min(prefix_len, request.protected + tree.page_size)\n"
        "    request.row[request.protected : end] = tree.path_slots(node)[request.protected : end]",
    ),
    Mutant(
        "commit_unfinished",
        "the last duplicate is not remapped",
        "request.row[:aligned] = tree.path_slots(node)",
        "request.row[: prefix_len - 1] = tree.path_slots(node)[: prefix_len - 1] if prefix_len else []",
    ),
    Mutant(
        "commit_unfinished",
        "remapped only when nothing was protected",
        "request.row[:aligned] = tree.path_slots(node)",
        "request.row[:aligned] = request.row[:aligned] if request.protected else tree.path_slots(node)",
    ),
    Mutant(
        "commit_unfinished",
        "remapped only when something was protected",
        "request.row[:aligned] = tree.path_slots(node)",
        "request.row[:aligned] = tree.path_slots(node) if request.protected else request.row[:aligned]",
    ),
    # everything was there already
    Mutant(
        "commit_unfinished",
        "nothing is locked when nothing was new",
        "    tree.lock(node)  # before the old one is let go\n    tree.unlock(request.node)\n",
        "    if prefix_len < aligned or node is request.node:\n        tree.lock(node)\n"
        "    tree.unlock(request.node)\n",
    ),
    Mutant(
        "commit_unfinished",
        "the old lock stays when nothing was new",
        "    tree.unlock(request.node)\n",
        "    if prefix_len < aligned:\n        tree.unlock(request.node)\n",
        after=_ONE,
    ),
    Mutant(
        "commit_unfinished",
        "the old lock stays while something was protected by it",
        "    tree.unlock(request.node)\n",
        "    if not request.protected:\n        tree.unlock(request.node)\n",
        after=_ONE,
    ),
    Mutant(
        "commit_unfinished",
        "the root stays locked: its lock is not given back",
        "    tree.unlock(request.node)\n",
        "    if request.protected:\n        tree.unlock(request.node)\n",
        after=_ONE,
    ),
    Mutant(
        "commit_unfinished",
        "protected grows by what was new only, the next commit frees what is the tree's",
        "    request.protected, request.node = aligned, node\n",
        "    request.protected, request.node = max(request.protected, prefix_len), node\n",
    ),
    # a request that has less than a page
    Mutant(
        "commit_unfinished",
        "less than a page is freed, as if it had ended",
        "    request.protected, request.node = aligned, node\n",
        "    if not aligned:\n        freed.extend(request.row)\n"
        "    request.protected, request.node = aligned, node\n",
    ),
    # what was there before the commit is a tail of a page's length less one
    Mutant(
        "commit_unfinished",
        "the tail is freed when there are duplicates",
        "    request.protected, request.node = aligned, node\n",
        "    if prefix_len > request.protected:\n        freed.extend(request.row[aligned:])\n"
        "    request.protected, request.node = aligned, node\n",
    ),
    Mutant(
        "commit_unfinished",
        "the tail leaves the row when there are duplicates",
        "    request.protected, request.node = aligned, node\n",
        "    if prefix_len > request.protected:\n        del request.row[aligned:]\n"
        "    request.protected, request.node = aligned, node\n",
    ),
    # two requests that end at one node: locked once for each
    Mutant(
        "commit_unfinished",
        "a node that is locked is not locked again",
        "    tree.lock(node)  # before the old one is let go\n    tree.unlock(request.node)\n",
        "    if prefix_len < aligned or not getattr(node, 'lock_ref', 0):\n        tree.lock(node)\n"
        "    tree.unlock(request.node)\n",
    ),
    # ------------------------------------------------------------ commit_finished
    Mutant(
        "commit_finished",
        "either duplicates or the tail, not both",
        "    freed.extend(request.row[whole:])\n",
        "    if prefix_len <= request.protected:\n        freed.extend(request.row[whole:])\n",
    ),
    Mutant(
        "commit_finished",
        "the tail is freed only when there are duplicates",
        "    freed.extend(request.row[whole:])\n",
        "    if prefix_len > request.protected:\n        freed.extend(request.row[whole:])\n",
    ),
    # no tail: [-0:] is everything
    Mutant(
        "commit_finished",
        "no tail is all of the row",
        "request.row[whole:]",
        "request.row[-(len(request.row) - whole) :]",
    ),
    Mutant(
        "commit_finished",
        "of the tail only one slot is freed",
        "request.row[whole:]",
        "request.row[whole : whole + 1]",
    ),
    Mutant(
        "commit_finished",
        "less than a page is never freed",
        "    freed.extend(request.row[whole:])\n",
        "    if whole:\n        freed.extend(request.row[whole:])\n",
    ),
    # with a tree that evicts at once what nobody holds
    Mutant(
        "commit_finished",
        "unlocks before it inserts",
        "    prefix_len, _ = tree.insert(request.tokens, request.row)\n",
        "    tree.unlock(request.node)\n    tree.lock(request.node)\n"
        "    prefix_len, _ = tree.insert(request.tokens, request.row)\n",
    ),
    Mutant(
        "commit_finished",
        "the root's lock is not given back",
        "    tree.unlock(request.node)\n",
        "    if request.protected:\n        tree.unlock(request.node)\n",
        after=_END,
    ),
    Mutant(
        "commit_finished",
        "unlocks the root instead when nothing was new",
        "    tree.unlock(request.node)\n",
        "    if prefix_len < whole or not whole:\n        tree.unlock(request.node)\n",
        after=_END,
    ),
    Mutant(
        "commit_finished",
        "the row stays when there was no tail",
        "    request.row.clear()\n",
        "    if len(request.row) > whole:\n        request.row.clear()\n",
    ),
    # ------------------------------------------------------------ plan_chunks
    # pages of 4, 8 tokens, all cached: 4 to 8 are computed
    Mutant(
        "plan_chunks",
        "one token less than cached, which ends inside a page",
        "start = min(cached[number], length - 1) // page_size * page_size",
        "start = cached[number] // page_size * page_size\n        start -= start == length",
    ),
    Mutant(
        "plan_chunks",
        "cut to pages only when pages are cut anyway",
        "start = min(cached[number], length - 1) // page_size * page_size",
        "start = min(cached[number], length - 1)\n"
        "        start = start // page_size * page_size if cached[number] < length else start",
    ),
    # pages of 3
    Mutant(
        "plan_chunks",
        "whole pages by a mask: for powers of two only",
        "// page_size * page_size",
        "& ~(page_size - 1)",
        after="def plan_chunks",
    ),
    # a prompt of three steps
    Mutant(
        "plan_chunks",
        "a prompt is cut once: the second piece takes all that is left",
        "            stop = min(start + left, length)\n",
        "            stop = min(start + left, length) if not steps[:-1] or (number, start) "
        "!= (number, steps[-2][-1][2]) "
        "or steps[-2][-1][0] != number else length\n"
        "            left = max(left, stop - start)\n",
    ),
    # a prompt that ends with the step, and another one behind it; at the very end
    Mutant(
        "plan_chunks",
        "an empty step at the end when all fits exactly",
        "    return steps\n",
        "    return steps + [[]] if steps and left == 0 and len(steps) > 3 else steps\n",
    ),
    # lists that are looked at afterwards
    _instead(
        "plan_chunks",
        "changes `cached`",
        """
def plan_chunks(lengths, cached, chunk_tokens, page_size=1):
    steps = _right_plan_chunks(lengths, cached, chunk_tokens, page_size)
    if isinstance(cached, list):
        cached[:] = [min(hit, size - 1) // page_size * page_size for hit, size in zip(cached, lengths)]
    return steps
""",
    ),
    # the same question twice
    _instead(
        "plan_chunks",
        "what is left of a step is remembered in the next call",
        """
_LEFT = {}


def plan_chunks(lengths, cached, chunk_tokens, page_size=1):
    steps = _LEFT.setdefault((chunk_tokens, page_size, tuple(lengths), tuple(cached)), [])
    steps += _right_plan_chunks(lengths, cached, chunk_tokens, page_size)
    return steps
""",
    ),
    # three requests, the first of which does not fit
    _instead(
        "plan_chunks",
        "prompts that are cached to their end go first",
        """
def plan_chunks(lengths, cached, chunk_tokens, page_size=1):
    order = sorted(range(len(lengths)), key=lambda i: cached[i] < lengths[i])
    sorted_in = [lengths[i] for i in order], [cached[i] for i in order]
    steps = _right_plan_chunks(*sorted_in, chunk_tokens, page_size)
    return [[(order[i], a, b) for i, a, b in step] for step in steps]
""",
    ),
    # a chunk that is no multiple of the page
    _instead(
        "plan_chunks",
        "a chunk is cut to whole pages when it is longer than one",
        """
def plan_chunks(lengths, cached, chunk_tokens, page_size=1):
    chunk = chunk_tokens // page_size * page_size or chunk_tokens
    return _right_plan_chunks(lengths, cached, chunk, page_size)
""",
    ),
    # nobody at all
    Mutant(
        "plan_chunks",
        "nobody there: one empty step",
        "    return steps\n",
        "    return steps or [[]]\n",
    ),
    # ------------------------------------------------------------ page_owners
    # protected == len(row): [-0:] is everything
    Mutant(
        "page_owners",
        "who owns nothing owns all that it reads",
        "for slot in row[protected:]:",
        "for slot in row[-(len(row) - protected) :]:",
    ),
    # protected 2 with pages of 4; a row that is broken
    Mutant(
        "page_owners",
        "looks at every page's first slot of a row only",
        "for slot in row[protected:]:",
        "for slot in row[protected::page_size]:",
    ),
    Mutant(
        "page_owners",
        "looks at every page's first slot of the tree only",
        "for slot in tree_slots:",
        "for slot in tree_slots[::page_size]:",
    ),
    Mutant(
        "page_owners",
        "only slots that begin a page count",
        "for slot in row[protected:]:",
        "for slot in [s for s in row[protected:] if s % page_size == 0 or len(row) - protected < page_size]:",
    ),
    # pages of 3
    Mutant(
        "page_owners",
        "the page by a shift: for powers of two only",
        'claims[slot // page_size].add("tree")',
        'claims[slot >> (page_size.bit_length() - 1)].add("tree")',
    ),
    # three requests on one page
    Mutant(
        "page_owners",
        "names no more than two",
        "sorted(names) for page",
        "sorted(names)[:2] for page",
    ),
    # a request on a page of the tree
    Mutant(
        "page_owners",
        "a page of the tree is nobody else's",
        "            claims[slot // page_size].add(name)\n",
        '            if "tree" not in claims[slot // page_size]:\n'
        "                claims[slot // page_size].add(name)\n",
    ),
    Mutant(
        "page_owners",
        "a free page is nobody else's",
        "            claims[slot // page_size].add(name)\n",
        '            if "free" not in claims[slot // page_size]:\n'
        "                claims[slot // page_size].add(name)\n",
    ),
    Mutant(
        "page_owners",
        "a free page is not the tree's",
        '        claims[slot // page_size].add("tree")\n',
        '        if "free" not in claims[slot // page_size]:\n'
        '            claims[slot // page_size].add("tree")\n',
    ),
    # names in an order of their own
    Mutant(
        "page_owners",
        "free and tree first, then the names",
        "sorted(names) for page",
        "sorted(names, key=lambda n: (n not in ('free', 'tree'), n)) for page",
    ),
    Mutant(
        "page_owners",
        "names in the order of their length",
        "sorted(names) for page",
        "sorted(names, key=lambda n: (len(n), n)) for page",
    ),
    # a request whose row begins with what it owns (protected 0)
    Mutant(
        "page_owners",
        "a request that borrowed nothing owns nothing",
        "for slot in row[protected:]:",
        "for slot in row[protected:] if protected else ():",
    ),
]
