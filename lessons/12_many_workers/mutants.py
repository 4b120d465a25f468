"""Plausible wrong solutions of lesson 12."""

from __future__ import annotations

from hashlib import blake2b

from lessons.grading import Mutant

_DIGEST = "def digest"
_FIND = "def find_divergence"
_ACCOUNT = "def account"
_OWN = (
    "own = (root.namespace, list(root.tokens), list(root.slots), root.lock_ref, root.hits, root.last_access)"
)
_FIELDS = ("tokens", "slots", "lock_ref", "hits", "last_access")
_TUPLE = 'FIELDS = ("tokens", "slots", "lock_ref", "hits", "last_access")'
_REPR = "repr(own).encode()"
_BELOW = "sorted(digest(child) for child in root.children)"
_ALIKE = "if not path and digest(mine) == told.digest:"
_NAMED = "if getattr(mine, name) != getattr(told, name):"
_STEPS = "sorted(here.keys() | told.children.keys())"
_MISSING = """            if step not in told.children:
                return (*path, step), "only here"
            if step not in here:
                return (*path, step), "only there"
"""
_IMBALANCE = "max(computed) * workers / sum(computed) if any(computed) else 1.0"
_RATE = "sum(route.cached for route in routes) / tokens if tokens else 0.0"
_COMPUTED = "computed[route.worker] += route.tokens - route.cached"
_REGRET = "regret += max(held) - route.held[route.worker]"
_ALIVE = "held = [each for each in route.held if each is not None]"
_LOW = "low = min(worker.load for worker in workers if worker.alive)"
_FREE = "if worker.alive and worker.load <= low + SLACK]"
_ENOUGH = "if 2 * best > len(tokens):"
_NEXT = "worker = min(among, key=lambda at: (workers[at].load, self._chosen.get(at, -1)))"
_KEEP = "self._prompts.setdefault(worker, set()).add(tuple(tokens))"
_FORGET = "        self._prompts.pop(worker, None)"
_SHARED = """    for at, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return at
    return min(len(one), len(other))"""


def _own(node):
    return (node.namespace, node.tokens, node.slots, node.lock_ref, node.hits, node.last_access)


def _walk(node):
    yield node
    for child in node.children:
        yield from _walk(child)


def _hashed(value):
    return blake2b(repr(value).encode(), digest_size=16).digest()


def _digest_of_a_bag(root):
    return _hashed(sorted(_own(node) for node in _walk(root)))


def _digest_one_behind_the_other(root):
    whole = blake2b(digest_size=16)

    def feed(node):
        whole.update(repr(_own(node)).encode())
        for child in sorted(node.children, key=lambda each: (each.namespace, each.tokens)):
            feed(child)

    feed(root)
    return whole.digest()


def _digest_of_paths(root):
    def paths(node, before):
        tokens = before + list(zip(node.tokens, node.slots, strict=True))
        rest = (node.namespace, node.lock_ref, node.hits, node.last_access)
        return [path for c in node.children for path in paths(c, tokens)] or [(tokens, rest)]

    return _hashed(sorted(paths(root, [])))


def _digest_of_two_levels(root):
    return _hashed((_own(root), sorted((_own(c), sorted(map(_own, c.children))) for c in root.children)))


def _digest_since_the_first(root):
    """Ticks are counted from that of the node at the top."""
    first = root.last_access

    def below(node):
        own = (*_own(node)[:-1], node.last_access - first)
        return _hashed((own, sorted(below(child) for child in node.children)))

    return below(root)


_KNOWN = {}


def _digest_remembered(root):
    """What has not got another number of tokens or children is thought to be as before."""
    key = (id(root), len(root.tokens), len(root.children))
    if key not in _KNOWN:
        _KNOWN[key] = (_hashed((_own(root), sorted(map(_digest_remembered, root.children)))), root)
    return _KNOWN[key][0]


def _digest_sorts_the_tree(root):
    root.children.sort(key=_digest_sorts_the_tree)
    return _hashed((_own(root), [_digest_sorts_the_tree(child) for child in root.children]))


def _find_with(*, first=None, asks_before=False, alike_late=False):
    """A search that is right but for what is said."""

    def find(mine, ask, digest):
        path = ()
        while True:
            told = ask(path)
            if not alike_late and digest(mine) == told.digest:
                return None
            here = {(child.namespace, child.tokens[0]): child for child in mine.children}
            steps = sorted(here.keys() | told.children.keys())
            lacking = [step for step in steps if step not in here or step not in told.children]
            unlike = [s for s in steps if s not in lacking and digest(here[s]) != told.children[s]]
            own = [name for name in _FIELDS if getattr(mine, name) != getattr(told, name)]
            if own and not (first == "below" and (lacking or unlike)):
                return path, own[0]
            if asks_before and lacking:
                try:
                    ask((*path, lacking[0]))
                except Exception:
                    return (*path, lacking[0]), "only here"
            order = lacking + unlike if first == "lacking" else unlike + lacking if first == "unlike" else []
            order = order or sorted(lacking + unlike)
            if not order:
                return None
            if order[0] in lacking:
                return (*path, order[0]), "only here" if order[0] in here else "only there"
            path, mine = (*path, order[0]), here[order[0]]

    return find


def _find_asks_each_child(mine, ask, digest):
    """Depth first, and each node is asked about."""

    def look(node, path):
        told = ask(path)
        for name in _FIELDS:
            if getattr(node, name) != getattr(told, name):
                return path, name
        here = {(child.namespace, child.tokens[0]): child for child in node.children}
        for step in sorted(here.keys() | told.children.keys()):
            if step not in told.children:
                return (*path, step), "only here"
            if step not in here:
                return (*path, step), "only there"
            if (found := look(here[step], (*path, step))) is not None:
                return found
        return None

    return look(mine, ())


def _find_one_level(mine, ask, digest):
    told = ask(())
    if digest(mine) == told.digest:
        return None
    for name in _FIELDS:
        if getattr(mine, name) != getattr(told, name):
            return (), name
    here = {(child.namespace, child.tokens[0]): child for child in mine.children}
    for step in sorted(here.keys() | told.children.keys()):
        if step not in told.children or step not in here:
            return (step,), "only here" if step in here else "only there"
        if digest(here[step]) != told.children[step]:
            other = ask((step,))
            for name in _FIELDS:
                if getattr(here[step], name) != getattr(other, name):
                    return (step,), name
    return None


def _find_with_its_own_digest(mine, ask, digest):
    return _find_with()(mine, ask, _digest_remembered)


def _find_goes_back(mine, ask, digest):
    """It asks about a node once for its digest, and once for the rest."""
    if ask(()).digest == digest(mine):
        return None
    return _find_with()(mine, ask, digest)


_SUMS = [0] * 64


def _account_goes_on(routes, workers):
    """The list of what was computed is the module's."""
    tokens = sum(route.tokens for route in routes)
    for route in routes:
        _SUMS[route.worker] += route.tokens - route.cached
    computed = _SUMS[:workers]
    regret = sum(max(h for h in r.held if h is not None) - r.held[r.worker] for r in routes)
    return {
        "hit_rate": sum(route.cached for route in routes) / tokens if tokens else 0.0,
        "computed": computed,
        "imbalance": max(computed) * workers / sum(computed) if any(computed) else 1.0,
        "regret": regret,
    }


MUTANTS = [
    # ------------------------------------------------------------ digest
    Mutant("digest", "children as they stand in the list", _BELOW, "[digest(c) for c in root.children]"),
    Mutant(
        "digest",
        "children by their first tokens: two namespaces",
        _BELOW,
        "[digest(c) for c in sorted(root.children, key=lambda each: each.tokens[0])]",
    ),
    Mutant("digest", "namespace forgotten", "own = (root.namespace, ", "own = ("),
    Mutant("digest", "slots forgotten", "list(root.slots), ", ""),
    Mutant("digest", "slots without their order", "list(root.slots)", "sorted(root.slots)"),
    Mutant("digest", "tokens without their order", "list(root.tokens)", "sorted(root.tokens)"),
    Mutant("digest", "only the first token of an edge", "list(root.tokens)", "root.tokens[:1]"),
    Mutant("digest", "a token is one byte", "list(root.tokens)", "[t % 256 for t in root.tokens]"),
    Mutant("digest", "locked or not", "root.lock_ref", "root.lock_ref > 0"),
    Mutant("digest", "hits forgotten", "root.hits, ", ""),
    Mutant("digest", "last_access forgotten", "root.hits, root.last_access)", "root.hits)"),
    Mutant("digest", "locks and hits added up", "root.lock_ref, root.hits", "root.lock_ref + root.hits"),
    Mutant("digest", "names count", "own = (root.namespace, ", "own = (root.name, root.namespace, "),
    Mutant("digest", "no separators", _REPR, '"".join(map(str, own)).encode()'),
    Mutant(
        "digest",
        "tokens without a separator",
        _REPR,
        "repr(own).replace(', ', '').encode()",
    ),
    Mutant("digest", "Python's hash of a text", _REPR, "b'%d' % hash(own[0]) + repr(own[1:]).encode()"),
    Mutant("digest", "children as a set, as it stands", _BELOW, "{digest(child) for child in root.children}"),
    Mutant("digest", "Python's hash of all of it", _REPR, "b'%d' % hash((*map(str, own),))"),
    Mutant(
        "digest", "what is below a node, without itself", "whole.update(repr(own).encode())", "pass", _DIGEST
    ),
    Mutant("digest", "eight bytes, twice", "    return whole.digest()", "    return whole.digest()[:8] * 2"),
    Mutant("digest", "32 bytes", "digest_size=16", "digest_size=32", "def digest"),
    Mutant("digest", "a hexadecimal text", "whole.digest()", "whole.hexdigest()"),
    Mutant("digest", "a bag of nodes: not who hangs below whom", replaces={"digest": _digest_of_a_bag}),
    Mutant(
        "digest", "one behind the other: child or sibling", replaces={"digest": _digest_one_behind_the_other}
    ),
    Mutant("digest", "whole paths: not where they are cut", replaces={"digest": _digest_of_paths}),
    Mutant("digest", "two levels below the root", replaces={"digest": _digest_of_two_levels}),
    Mutant("digest", "ticks since the root's", replaces={"digest": _digest_since_the_first}),
    Mutant("digest", "remembered from call to call", replaces={"digest": _digest_remembered}),
    Mutant("digest", "sorts the tree's own lists", replaces={"digest": _digest_sorts_the_tree}),
    # ------------------------------------------------------------ find_divergence
    Mutant("find_divergence", "slots before tokens", '"tokens", "slots"', '"slots", "tokens"'),
    Mutant("find_divergence", "hits before locks", '"lock_ref", "hits"', '"hits", "lock_ref"'),
    Mutant("find_divergence", "last_access before hits", '"hits", "last_access"', '"last_access", "hits"'),
    Mutant("find_divergence", "never looks whether they are alike", _ALIKE, "if False:"),
    Mutant("find_divergence", "last_access is not compared", _TUPLE, _TUPLE.replace(', "last_access"', "")),
    Mutant(
        "find_divergence",
        "tokens and slots as far as both go",
        _NAMED,
        "a, b = getattr(mine, name), getattr(told, name)\n"
        "            if a[: len(b)] != b[: len(a)] if isinstance(a, list) else a != b:",
    ),
    Mutant("find_divergence", "the same objects, not equal ones", _NAMED, _NAMED.replace("!=", "is not")),
    Mutant(
        "find_divergence",
        "slots as sets",
        _NAMED,
        "a, b = getattr(mine, name), getattr(told, name)\n"
        "            if set(a) != set(b) if name == 'slots' else a != b:",
    ),
    Mutant(
        "find_divergence",
        "only here and only there changed places",
        _MISSING,
        _MISSING.replace("only here", "x").replace("only there", "only here").replace('"x"', '"only there"'),
    ),
    Mutant(
        "find_divergence",
        "the path ends at the parent of what is missing",
        'return (*path, step), "only here"',
        'return path, "only here"',
    ),
    Mutant(
        "find_divergence",
        "steps as texts: 10 before 9",
        _STEPS,
        f"{_STEPS[:-1]}, key=lambda step: repr(step))",
    ),
    Mutant(
        "find_divergence", "tokens before namespaces", _STEPS, f"{_STEPS[:-1]}, key=lambda step: step[::-1])"
    ),
    Mutant("find_divergence", "the last of several", _STEPS, f"{_STEPS[:-1]}, reverse=True)"),
    Mutant("find_divergence", "in the order in which I made them", _STEPS, "[*here, *told.children]"),
    Mutant("find_divergence", "only my own children", _STEPS, "sorted(here)"),
    Mutant("find_divergence", "only rank 0's children", _STEPS, "sorted(told.children)"),
    Mutant(
        "find_divergence",
        "namespaces forgotten",
        "here = {(child.namespace, child.tokens[0]): child",
        'here = {("", child.tokens[0]): child',
    ),
    Mutant(
        "find_divergence",
        "the path is a list",
        "return path, name",
        "return list(path), name",
    ),
    Mutant("find_divergence", "the path begins anew", "path, mine = (*path, step)", "path, mine = (step,)"),
    Mutant(
        "find_divergence",
        "children before the node itself",
        replaces={"find_divergence": _find_with(first="below")},
    ),
    Mutant(
        "find_divergence",
        "what is missing before all else",
        replaces={"find_divergence": _find_with(first="lacking")},
    ),
    Mutant(
        "find_divergence", "what is missing last", replaces={"find_divergence": _find_with(first="unlike")}
    ),
    Mutant(
        "find_divergence",
        "asks about what is missing",
        replaces={"find_divergence": _find_with(asks_before=True)},
    ),
    Mutant("find_divergence", "asks about every node", replaces={"find_divergence": _find_asks_each_child}),
    Mutant(
        "find_divergence",
        "another digest than rank 0's",
        replaces={"find_divergence": _find_with_its_own_digest},
    ),
    Mutant("find_divergence", "looks one level deep", replaces={"find_divergence": _find_one_level}),
    Mutant("find_divergence", "asks about the root twice", replaces={"find_divergence": _find_goes_back}),
    # ------------------------------------------------------------ account
    Mutant(
        "account",
        "a mean of shares",
        _RATE,
        "sum(r.cached / r.tokens for r in routes) / len(routes) if tokens else 0.0",
    ),
    Mutant("account", "cached over computed", "/ tokens if tokens", "/ sum(computed) if any(computed)"),
    Mutant("account", "no tokens divide by zero", "/ tokens if tokens else 0.0", "/ tokens"),
    Mutant("account", "in per cent", _RATE, f"100 * ({_RATE})"),
    Mutant("account", "rounded to two places", _RATE, f"round({_RATE}, 2)"),
    Mutant("account", "hits by what was held", "sum(route.cached for", "sum(route.held[route.worker] for"),
    Mutant("account", "sent, not computed", "+= route.tokens - route.cached", "+= route.tokens"),
    Mutant(
        "account", "computed by what was held", _COMPUTED, _COMPUTED.replace("cached", "held[route.worker]")
    ),
    Mutant("account", "requests, not tokens", "+= route.tokens - route.cached", "+= 1"),
    Mutant("account", "the mean of those that worked", "* workers / sum", "* sum(map(bool, computed)) / sum"),
    Mutant(
        "account",
        "the most over the least",
        _IMBALANCE,
        "max(computed) / min(computed) if min(computed) else 1.0",
    ),
    Mutant(
        "account",
        "a mean without its fraction",
        _IMBALANCE,
        "max(computed) / max(sum(computed) // workers, 1) if any(computed) else 1.0",
    ),
    Mutant("account", "nothing computed: 0", "if any(computed) else 1.0", "if any(computed) else 0.0"),
    Mutant("account", "nothing computed divides by zero", " if any(computed) else 1.0", ""),
    Mutant(
        "account",
        "only workers that got something",
        "computed = [0] * workers",
        "computed = [0] * (max((r.worker for r in routes), default=-1) + 1)",
    ),
    Mutant("account", "regret against what was cached", _REGRET, "regret += max(held) - route.cached"),
    Mutant(
        "account", "regret as a number of requests", _REGRET, "regret += max(held) > route.held[route.worker]"
    ),
    Mutant(
        "account",
        "the others' best: regret below zero",
        _REGRET,
        "others = [h for at, h in enumerate(route.held) if at != route.worker and h is not None]\n"
        "        regret += max(others, default=0) - route.held[route.worker]",
    ),
    Mutant("account", "regret of the last alone", _REGRET, _REGRET.replace("+=", "=")),
    Mutant("account", "dead workers break it", _ALIVE, "held = route.held"),
    Mutant("account", "a mean regret", '"regret": regret', '"regret": regret / max(len(routes), 1)'),
    Mutant(
        "account",
        "it sorts what it was given",
        _ALIVE,
        f"route.held.sort(key=lambda h: -1 if h is None else h); {_ALIVE}",
    ),
    Mutant("account", "it goes on where the last call ended", replaces={"account": _account_goes_on}),
    # ------------------------------------------------------------ Router
    Mutant("Router", "the dead are the least loaded", _LOW, "low = min(worker.load for worker in workers)"),
    Mutant("Router", "the dead are chosen", _FREE, "if worker.load <= low + SLACK]"),
    Mutant("Router", "less than SLACK", _FREE, _FREE.replace("<=", "<")),
    Mutant("Router", "one more than SLACK", _FREE, "if worker.alive and worker.load <= low + SLACK + 1]"),
    Mutant("Router", "loads do not count", _FREE, "if worker.alive]"),
    Mutant(
        "Router",
        "SLACK as a load, not a difference",
        _FREE,
        "if worker.alive and worker.load <= max(low, SLACK)]",
    ),
    Mutant(
        "Router",
        "who is overloaded and has most keeps others from it",
        "free = [at for at, worker in enumerate(workers) if worker.alive and worker.load <= low + SLACK]\n"
        "        sent = {at: self._longest(at, tokens) for at in free}\n"
        "        best = max(sent.values())",
        "free = [at for at, worker in enumerate(workers) if worker.alive and worker.load <= low + SLACK]\n"
        "        sent = {at: self._longest(at, tokens) for at in range(len(workers)) if workers[at].alive}\n"
        "        best = max(sent.values())\n"
        "        best = best if any(sent[at] == best for at in free) else 0",
    ),
    Mutant("Router", "any match counts", _ENOUGH, "if best:"),
    Mutant("Router", "a twentieth counts", _ENOUGH, "if 20 * best > len(tokens):"),
    Mutant("Router", "nothing but the whole prompt counts", _ENOUGH, "if best == len(tokens):"),
    Mutant("Router", "nine tenths", _ENOUGH, "if 10 * best > 9 * len(tokens):"),
    Mutant("Router", "thirty tokens count", _ENOUGH, "if best > 30:"),
    Mutant("Router", "matches do not count", _ENOUGH, "if False:"),
    Mutant(
        "Router", "always the first of equals", _NEXT, "worker = min(among, key=lambda at: workers[at].load)"
    ),
    Mutant(
        "Router",
        "turns before loads",
        _NEXT,
        "worker = min(among, key=lambda at: (self._chosen.get(at, -1), workers[at].load))",
    ),
    Mutant(
        "Router",
        "by chance among equals",
        _NEXT,
        _NEXT.replace("self._chosen.get(at, -1)", "__import__('random').random()"),
    ),
    Mutant(
        "Router",
        "the one that got fewest prompts, whatever its load",
        _NEXT,
        "worker = min(among, key=lambda at: len(self._prompts.get(at, ())))",
    ),
    Mutant(
        "Router",
        "an index among the free",
        "        return worker, f",
        "        return free.index(worker), f",
    ),
    Mutant(
        "Router",
        "chosen is sent",
        "        self._choices += 1",
        "        self.sent(worker, tokens)\n        self._choices += 1",
    ),
    Mutant("Router", "only the last prompt", _KEEP, "self._prompts[worker] = {tuple(tokens)}"),
    Mutant("Router", "only the first prompt", _KEEP, "self._prompts.setdefault(worker, {tuple(tokens)})"),
    Mutant(
        "Router",
        "only the first 32 tokens of a prompt",
        _KEEP,
        "self._prompts.setdefault(worker, set()).add(tuple(tokens[:32]))",
    ),
    Mutant("Router", "never forgets", _FORGET, "        pass", "def forget"),
    Mutant("Router", "forgets all workers", _FORGET, "        self._prompts.clear()", "def forget"),
    Mutant(
        "Router",
        "forgets one that knows nothing: an error",
        _FORGET,
        "        del self._prompts[worker]",
        "def forget",
    ),
    Mutant(
        "Router", "tokens in common, wherever they stand", _SHARED, "    return len(set(one) & set(other))"
    ),
    Mutant(
        "Router",
        "tokens in common at the same place",
        _SHARED,
        "    return sum(a == b for a, b in zip(one, other, strict=False))",
    ),
    Mutant(
        "Router",
        "only a prompt that this one goes on",
        _SHARED,
        "    return len(other) if tuple(one[: len(other)]) == other else 0",
    ),
    Mutant("Router", "the shortest beginning in common", "return max((_shared", "return min((_shared"),
    Mutant(
        "Router",
        "all routers share what was sent",
        "    def __init__(self) -> None:\n        self._prompts: dict[int, set[tuple[int, ...]]] = {}\n",
        "    _prompts: dict[int, set[tuple[int, ...]]] = {}\n\n    def __init__(self) -> None:\n",
    ),
]
