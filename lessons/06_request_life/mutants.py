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
