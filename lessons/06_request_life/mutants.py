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
    # slot 7 was freed in an earlier life, came back, and is a duplicate now
    *(
        _wraps(
            name,
            "a slot that was freed once is not freed again, in its next life",
            "mine = []\nright(tree, request, mine)\nfreed.extend(slot for slot in mine if slot not in freed)",
        )
        for name in _BOTH
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
        "the root stays locked: its lock is not given back",
        "    tree.unlock(request.node)\n",
        "    if request.protected:\n        tree.unlock(request.node)\n",
        after=_ONE,
    ),
    # what was there before the commit is a tail of a page's length less one
    Mutant(
        "commit_unfinished",
        "the tail is freed when there are duplicates",
        "    request.protected, request.node = aligned, node\n",
        "    if prefix_len > request.protected:\n        freed.extend(request.row[aligned:])\n"
        "    request.protected, request.node = aligned, node\n",
    ),
    # ------------------------------------------------------------ commit_finished
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
    # ------------------------------------------------------------ plan_chunks
    # pages of 3
    Mutant(
        "plan_chunks",
        "whole pages by a mask: for powers of two only",
        "// page_size * page_size",
        "& ~(page_size - 1)",
        after="def plan_chunks",
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
    # ------------------------------------------------------------ page_owners
    # protected == len(row): [-0:] is everything
    Mutant(
        "page_owners",
        "who owns nothing owns all that it reads",
        "for slot in row[protected:]:",
        "for slot in row[-(len(row) - protected) :]:",
    ),
    Mutant(
        "page_owners",
        "looks at every page's first slot of the tree only",
        "for slot in tree_slots:",
        "for slot in tree_slots[::page_size]:",
    ),
    # pages of 3
    Mutant(
        "page_owners",
        "the page by a shift: for powers of two only",
        'claims[slot // page_size].add("tree")',
        'claims[slot >> (page_size.bit_length() - 1)].add("tree")',
    ),
    Mutant(
        "page_owners",
        "names in the order of their length",
        "sorted(names) for page",
        "sorted(names, key=lambda n: (len(n), n)) for page",
    ),
]
