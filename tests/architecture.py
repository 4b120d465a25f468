"""The map of the code, read from its imports: the rooms, who may import whom, the reading path, the anchors.

    python tests/architecture.py            draws the generated parts of the documents again
    python tests/architecture.py --check    says what would change, and exits with 1

ROOMS is the one place where it is written who may import whom. Imports are read from the source, also those
inside functions (`lazy`), `import_module("minirad.x")` and `room("x")`; not those under TYPE_CHECKING, which
do not run, and not what may be deleted and is asked for by `room`.
"""

from __future__ import annotations

import ast
import difflib
import fnmatch
import io
import re
import sys
import textwrap
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
MAY_BE_DELETED = ("minirad.fast", "minirad.tiers", "minirad.speculative", "minirad.adapters", "minirad.quant")
DOCUMENTS = ("ARCHITECTURE.md", "CONTRIBUTING.md", "README.md")


@dataclass(frozen=True)
class Room:
    """Modules that belong together. modules: patterns; the first room that fits a module is its room.

    may: the rooms whose modules these may import, beside their own. torch: False where `import` of these
    modules must not bring torch, not even through others.
    """

    what: str
    modules: tuple[str, ...]
    may: tuple[str, ...] = ()
    torch: bool = False


_BASE = ("words", "policies", "config", "events")
_COMPUTE = (*_BASE, "cache", "schedule", "kv", "attention", "model")
_OUTSIDE = (*_BASE, "cache", "schedule", "model", "observe", "engine", "classroom")

# From the bottom up. A room imports only what stands above it in this table, so there is no circle of rooms.
ROOMS: dict[str, Room] = {
    "words": Room(
        "errors and checks, outputs, texts, how a command ends, when the collector rests",
        ("minirad", "minirad.errors", "minirad.outputs", "minirad.text", "minirad.rooms",
         "minirad.command", "minirad.collector"),
    ),
    "policies": Room(
        "which leaf is evicted first, and which request is tried first",
        ("minirad.cache.eviction", "minirad.cache.node", "minirad.cache.other_policies",
         "minirad.schedule.policies", "minirad.schedule.other_policies"),
        ("words",),
    ),
    "config": Room(
        "every size and choice, checked, and the options that say them",
        ("minirad.config", "minirad.options"),
        ("words", "policies"),
    ),
    "events": Room(
        "what the engine tells: one small record for each decision",
        ("minirad.events", "minirad.observe", "minirad.observe.event", "minirad.observe.events",
         "minirad.observe.bus", "minirad.observe.snapshot"),
        ("words",),
    ),
    "cache": Room(
        "what is remembered: the radix tree, and which pages are free",
        ("minirad.cache", "minirad.cache.*"),
        _BASE,
    ),
    "schedule": Room(
        "which request runs next, and which slots it owns",
        ("minirad.schedule", "minirad.schedule.*"),
        (*_BASE, "cache"),
    ),
    "kv": Room(
        "where keys and values lie",
        ("minirad.kv", "minirad.kv.kv_pool", "minirad.kv.poison"),
        ("words",),
        torch=True,
    ),
    "attention": Room(
        "how tokens attend: the plan of a batch, the layer, the backend to read",
        ("minirad.attention", "minirad.attention.*"),
        ("words", "kv"),
        torch=True,
    ),
    "classroom": Room(
        "lessons, training and scores of the model that is part of the project",
        ("minirad.model.classroom", "minirad.model.classroom.*"),
        ("words",),
        torch=True,
    ),
    "model": Room(
        "what is computed: a Llama, its weights, how a token is drawn",
        ("minirad.model", "minirad.model.*", "minirad.bench.dummy"),
        ("words", "config", "kv", "attention"),
        torch=True,
    ),
    "parts": Room(
        "the seam: what an engine is made of, a runner and texts",
        ("minirad.parts", "minirad.tokenizing"),
        (*_BASE, "cache", "schedule"),
    ),
    "observe": Room(
        "events are kept, written to files, played again, and told in other engines' words",
        ("minirad.observe.*", "minirad.record", "minirad.recording_file", "minirad.snapshot",
         "minirad.cache.kv_events"),
        (*_BASE, "cache", "schedule"),
    ),
    "fleet": Room(
        "the cache of a foreign server, from the KV events that it publishes",
        ("minirad.fleet", "minirad.fleet.*"),
        ("words", "policies", "config", "events", "observe"),
    ),
    "machine": Room(
        "what computes on this machine: the plain runner, the device, the pool's size",
        ("minirad.runner", "minirad.machine"),
        (*_COMPUTE, "parts"),
        torch=True,
    ),
    "engine": Room(
        "step() = schedule -> launch -> read -> commit, and the calls around it",
        ("minirad.engine", "minirad.process_result", "minirad.generate", "minirad.transaction",
         "minirad.intake"),
        (*_BASE, "cache", "schedule", "parts", "observe"),
    ),
    "tiers": Room(
        "a second tier of the cache, in host memory, and a third on a disk; may be deleted",
        ("minirad.tiers", "minirad.tiers.*", "minirad.cache.hiradix_cache", "minirad.kv.host_tier"),
        (*_BASE, "cache", "schedule", "kv", "observe"),
        torch=True,
    ),
    "fast": Room(
        "the same, faster: CUDA graphs, fused kernels, a step ahead; may be deleted",
        ("minirad.fast", "minirad.fast.*"),
        (*_COMPUTE, "parts", "machine"),
        torch=True,
    ),
    "speculative": Room(
        "several tokens a pass: drafts, verified by the model; may be deleted",
        ("minirad.speculative", "minirad.speculative.*"),
        (*_COMPUTE, "parts", "observe", "machine", "engine", "classroom"),
        torch=True,
    ),
    "adapters": Room(
        "LoRA: several fine-tuned models that share one set of weights; may be deleted",
        ("minirad.adapters", "minirad.adapters.*"),
        (*_COMPUTE, "parts", "machine", "classroom"),
        torch=True,
    ),
    "quant": Room(
        "quantised weights read straight from GGUF files, for the CPU; may be deleted",
        ("minirad.quant", "minirad.quant.*"),
        (*_COMPUTE, "parts", "machine"),
        torch=True,
    ),
    "ranks": Room(
        "one engine in several processes, each with a part of the model and a tree of its own",
        ("minirad.ranks", "minirad.ranks.*"),
        (*_COMPUTE, "parts", "observe", "machine", "engine"),
        torch=True,
    ),
    "frontend": Room(
        "programs that fork, choose and chat",
        ("minirad.frontend", "minirad.frontend.*", "minirad.grammar", "minirad.programs"),
        ("words", "config", "classroom"),
    ),
    "logs": Room(
        "request logs and agents' transcripts as people have them: named parts of prompts, and their tokens",
        ("minirad.logs", "minirad.logs.*"),
        ("words", "policies", "model", "classroom"),
    ),
    "labs": Room(
        "experiments: workloads, traces, an engine without a model, the paper's theorem and figure",
        ("minirad.simulate", "minirad.traces", "minirad.theorem", "minirad.doctor", "minirad.workloads",
         "minirad.figure3", "minirad.optimum", "minirad.own_code",
         "minirad.own_policy", "minirad.replies"),
        (*_OUTSIDE, "parts", "frontend", "logs"),
    ),
    "evidence": Room(
        "the paper's workloads as programs, each part of the engine switched off in turn, and the limits",
        ("minirad.evidence", "minirad.evidence.*"),
        (*_OUTSIDE, "parts", "frontend", "logs", "labs"),
    ),
    "why": Room(
        "why a request missed: a tree with a memory, an answer for each, and what to change",
        ("minirad.why", "minirad.why.*"),
        (*_OUTSIDE, "parts", "frontend", "logs", "labs"),
    ),
    "server": Room(
        "the OpenAI API in front of the engine, over HTTP",
        ("minirad.server", "minirad.server.*"),
        (*_BASE, "cache", "schedule", "parts", "observe", "engine", "machine", "fleet", "frontend"),
    ),
    "route": Room(
        "several workers behind a router: policies, what they know, and an oracle that judges them",
        ("minirad.route", "minirad.route.*"),
        (*_OUTSIDE, "parts", "frontend", "logs", "labs", "fleet", "server"),
    ),
    "bench": Room(
        "measurements",
        ("minirad.bench", "minirad.bench.*"),
        (*_OUTSIDE, "kv", "attention", "parts", "machine", "fleet", "frontend", "labs", "tiers", "fast",
         "quant", "server", "evidence"),
        torch=True,
    ),
    "commands": Room(
        "the command line",
        ("minirad.__main__",),
        (*_BASE, "observe", "engine", "ranks", "frontend"),
    ),
    "draw": Room(
        "a recording becomes a view, and the view pictures",
        ("viz", "viz.view", "viz.view.*", "viz.draw", "viz.draw.*", "viz.kv", "viz.page",
         "viz.trace", "viz.tree", "viz.words"),
        ("words", "events", "model", "observe", "fleet"),
    ),
    "grading": Room(
        "the course: lessons, and how they are graded",
        ("lessons", "lessons.*"),
        (*_BASE, "cache", "schedule", "kv", "attention", "observe", "engine", "labs", "tiers", "draw",
         "ranks", "route", "parts", "classroom", "frontend", "fleet"),
        torch=True,
    ),
    "pages": Room(
        "what is opened: the live page, the gallery, the notebook's widget",
        ("viz.*",),
        (*_OUTSIDE, "fleet", "ranks", "frontend", "labs", "logs", "server", "route", "bench", "why", "draw",
         "grading", "evidence"),
        torch=True,
    ),
}  # fmt: skip

# What is loaded by name, `room("x")` or `import_module("minirad.x")`, although it cannot be deleted; and why.
LOOKED_UP: dict[str, str] = {
    "minirad.machine": "brings torch, which engine.py does without",
    "minirad.transaction": "for those who read how a request goes, Ctrl-C is another story",
    "minirad.generate": "stands on top of `step`, and the engine only passes on to it",
    "minirad.ranks.engine": "several processes are another story",
    "minirad.snapshot": "looks at everything, and nothing needs it to run",
    "minirad.observe.snapshot": "looks at everything, and nothing needs it to run",
    "minirad.observe.check": "looks at everything, and nothing needs it to run",
    "minirad.observe.describe": "looks at everything, and nothing needs it to run",
    "minirad.cache.versions": "new weights in a running engine are another story",
    "minirad.schedule.dfs_weight": "one policy of six, as long as the other five",
    "minirad.schedule.other_policies": "read fcfs and lpm first: the others are more of the same",
    "minirad.cache.other_policies": "read lru first: the others are more of the same",
    "minirad.cache.any_tree": "a student's tree with all that the engine asks for: ours has it",
    "minirad.kv.poison": "a debugging aid, and brings torch",
    "minirad.model.classroom.train_head": "builds on train.py, which is started by its command",
    "minirad.model.smollm2": "reads GGUF files, which only one model needs",
    "minirad.bench.dummy": "random weights, for measurements only",
    "minirad.route.simulated": "several workers behind a router stand on top of one",
}

# In which order to read; a module of the path that is not named here comes last.
READING = (
    "engine", "parts", "request", "intake", "scheduler", "policies", "admission", "preemption", "stats",
    "node", "radix_cache", "prefix_cache", "eviction", "allocator", "cache_manager", "req_to_token", "runner",
    "metadata", "radix_attention", "kv_pool", "llama", "sampler", "process_result", "outputs", "rooms",
)  # fmt: skip

# ------------------------------------------------------------------ modules and imports


class Import(NamedTuple):
    """`importer` names `imported`.

    lazy: inside a function, so not at import time. by_name: `import_module("minirad.x")` or `room("x")`.
    """

    importer: str
    imported: str
    lazy: bool = False
    by_name: bool = False


@cache
def modules() -> dict[str, Path]:
    """Every module of minirad, viz and lessons by its dotted name."""
    found = {}
    for top in ("minirad", "viz", "lessons"):
        for file in sorted((ROOT / top).rglob("*.py")):
            parts = file.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


@cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(modules()[module].read_text(encoding="utf-8"))


def is_package(module: str) -> bool:
    return modules()[module].name == "__init__.py"


@cache
def is_old_path(module: str) -> bool:
    """Only passes on names of a module that moved, so that the old path can still be imported."""
    if is_package(module):
        return False
    body = [node for node in tree_of(module).body if not isinstance(node, ast.Expr)]
    ours = [node for node in body if isinstance(node, ast.ImportFrom | ast.Import) and _names(node)]
    others = [node for node in body if not isinstance(node, ast.ImportFrom | ast.Import)]
    renames = [node for node in others if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name)]
    rest = [node for node in others if node not in renames]
    if not ours or not all(isinstance(node, ast.Assign) for node in rest):
        return False
    return {ast.unparse(node.targets[0]) for node in rest} <= {"__all__", "sys.modules[__name__]"}


def _names(node: ast.AST) -> list[str]:
    """The modules of the project that an import statement names."""
    if isinstance(node, ast.Import):
        return [each.name for each in node.names if each.name in modules()]
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        found = []
        for each in node.names:
            whole = f"{node.module}.{each.name}"
            if whole in modules():
                found.append(whole)
            elif node.module in modules():
                found += [node.module, *_home(node.module, each.name)]
        return list(dict.fromkeys(found))
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("import_module", "room"):
        name = getattr(node.args[0], "value", None)
        name = f"minirad.{name}" if getattr(node.func, "id", "") == "room" else name
        return [name] if name in modules() and not str(name).startswith(MAY_BE_DELETED) else []
    return []


def _home(package: str, name: str) -> list[str]:
    """The module from which a package's __init__ has this name, also where it loads it when first used."""
    if not is_package(package):
        return []
    for node in ast.walk(tree_of(package)):
        if isinstance(node, ast.ImportFrom) and node.module in modules():
            here = [each.asname or each.name for each in node.names]
            if name in here:
                return [node.module]
    return []


@cache
def imports(module: str) -> tuple[Import, ...]:
    """What a module imports of the project, wherever the import stands, but for TYPE_CHECKING."""
    found: dict[str, Import] = {}
    text = modules()[module].read_text(encoding="utf-8")
    into_expressions = "import_module(" in text or "room(" in text  # most files need no look into them

    def visit(node: ast.AST, lazy: bool) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for other in node.orelse:
                visit(other, lazy)
            return
        for name in _names(node):
            if name != module and (name not in found or found[name].lazy):
                found[name] = Import(module, name, lazy, isinstance(node, ast.Call))
        lazy = lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            if into_expressions or not isinstance(child, ast.expr):
                visit(child, lazy)

    visit(tree_of(module), False)
    return tuple(found.values())


def circles() -> list[list[str]]:
    """Groups of modules that import each other, directly or through others (Tarjan).

    Imports inside functions count; what is loaded by name does not, see LOOKED_UP.
    """
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    groups: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for each in imports(name):
            if each.by_name:
                continue
            if each.imported not in index:
                visit(each.imported)
                low[name] = min(low[name], low[each.imported])
            elif each.imported in stack:
                low[name] = min(low[name], index[each.imported])
        if low[name] == index[name]:
            at = stack.index(name)
            groups.append(sorted(stack[at:]))
            del stack[at:]

    for name in modules():
        if name not in index:
            visit(name)
    return sorted(group for group in groups if len(group) > 1)


@cache
def room_of(module: str) -> str:
    """The room of a module; ValueError if it has none."""
    exact = [name for name, room in ROOMS.items() if module in room.modules]
    if exact:
        return exact[0]
    for name, room in ROOMS.items():
        if any(fnmatch.fnmatchcase(module, pattern) for pattern in room.modules):
            return name
    raise ValueError(f"{module} is in no room: say in tests/architecture.py to which it belongs")


def breaches() -> list[Import]:
    """Imports that ROOMS does not allow. An old path that passes names on is not asked."""
    found = []
    for module in modules():
        if is_old_path(module):
            continue
        room = ROOMS[room_of(module)]
        for each in imports(module):
            allowed = (room_of(module), *room.may)
            if room_of(each.imported) not in allowed and not (each.by_name or is_old_path(each.imported)):
                found.append(each)
    return found


def is_a_lesson(module: str) -> bool:
    """A file in lessons/NN_name/, which is loaded by its path."""
    return re.match(r"lessons\.\d\d_", module) is not None


def looked_up() -> set[str]:
    """What is loaded by name although it cannot be deleted."""
    return {each.imported for module in modules() for each in imports(module) if each.by_name}


def uses_of_old_paths() -> list[Import]:
    """The project itself uses the new paths."""
    ours = [m for m in modules() if not is_a_lesson(m)]  # lessons name what students may import
    return [each for m in ours for each in imports(m) if is_old_path(each.imported)]


def brings_torch(module: str) -> list[str]:
    """The chain of imports by which `import module` brings torch; [] if it does not."""
    todo: list[list[str]] = [[module]]
    seen = {module}
    while todo:
        chain = todo.pop(0)
        if _imports_torch(chain[-1]):
            return [*chain, "torch"]
        parts = chain[-1].split(".")
        parents = [".".join(parts[:n]) for n in range(1, len(parts))]
        now = [each.imported for each in imports(chain[-1]) if not each.lazy]
        for name in (*parents, *now):
            if name not in seen:
                seen.add(name)
                todo.append([*chain, name])
    return []


@cache
def _imports_torch(module: str) -> bool:
    def visit(node: ast.AST) -> bool:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            return False
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return any(map(visit, node.orelse))
        if isinstance(node, ast.Import) and any(each.name.split(".")[0] == "torch" for each in node.names):
            return True
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            return True
        return any(visit(child) for child in ast.iter_child_nodes(node) if not isinstance(child, ast.expr))

    return visit(tree_of(module))


# ------------------------------------------------------------------ the reading path


def code_lines(text: str) -> int:
    """Lines that are neither blank nor comment nor docstring."""
    docs: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(getattr(first.value, "value", None), str):
                docs.update(range(first.lineno, (first.end_lineno or 0) + 1))
    layout = (
        tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER,
    )  # fmt: skip
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in layout:
            code.update(range(token.start[0], token.end[0] + 1))
    return len(code - docs)


def reading_path() -> list[str]:
    """engine.py, runner.py and all that they import from minirad, in the order in which to read.

    Lazy imports count; events, config, errors, and what is loaded by name do not.
    """
    todo, seen = ["minirad.engine", "minirad.runner"], set()
    while todo:
        module = todo.pop()
        if module in seen or is_package(module) or module.split(".")[-1] in ("events", "config", "errors"):
            continue
        seen.add(module)
        todo += [each.imported for each in imports(module) if not each.by_name]
    order = {name: at for at, name in enumerate(READING)}
    return sorted(seen, key=lambda module: (order.get(module.split(".")[-1], len(order)), module))


class Function(NamedTuple):
    """lines: of all, decorators and docstring included; code: without blanks, comments and docstring."""

    name: str
    text: str

    @property
    def lines(self) -> int:
        return len(self.text.splitlines())

    @property
    def code(self) -> int:
        return code_lines(textwrap.dedent(self.text))


def functions(module: str) -> Iterator[Function]:
    """Every function and method of a module by its qualified name, with its length."""
    text = modules()[module].read_text(encoding="utf-8").splitlines()

    def visit(node: ast.AST, inside: str) -> Iterator[Function]:
        for child in ast.iter_child_nodes(node):
            name = inside
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                name = f"{inside}.{child.name}".strip(".")
                if not isinstance(child, ast.ClassDef):
                    first = min([child.lineno, *(each.lineno for each in child.decorator_list)])
                    yield Function(name, "\n".join(text[first - 1 : child.end_lineno]))
            if not isinstance(child, ast.expr):
                yield from visit(child, name)

    yield from visit(tree_of(module), "")


def own_calls(module: str, method: str, deep: bool = True) -> list[str]:
    """A method, and the methods of its class that it calls as `self.x()`; deep: and those that these call."""
    owner = method.split(".")[0]
    bodies = {
        f"{owner}.{node.name}": node
        for each in tree_of(module).body
        if isinstance(each, ast.ClassDef) and each.name == owner
        for node in each.body
        if isinstance(node, ast.FunctionDef)
    }
    found, todo = [method], [method]
    while todo:
        for node in ast.walk(bodies[todo.pop(0)]):
            if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("self."):
                name = f"{owner}.{ast.unparse(node.func).removeprefix('self.')}"
                if name in bodies and name not in found:
                    found.append(name)
                    todo += [name] if deep else []
    return found


# ------------------------------------------------------------------ anchors: file and line of a name

# [engine.py:212](minirad/engine.py#L212) `Engine.add_request`
ANCHOR = re.compile(
    r"\[(?P<file>[\w.]+):(?P<line>\d+)\]\((?P<path>[\w./]+)#L(?P<at>\d+)\) `(?P<what>[^`\n]+)`"
)


@dataclass
class Place:
    """Where something is defined."""

    path: str
    line: int


@cache
def definitions() -> dict[str, list[Place]]:
    """Classes, functions and methods by qualified name, and fields and tables by theirs."""
    found: dict[str, list[Place]] = {}

    def visit(node: ast.AST, inside: str, path: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                name = f"{inside}.{child.name}".strip(".")
                found.setdefault(name, []).append(Place(path, child.lineno))
                visit(child, name, path)
            elif isinstance(child, ast.Assign | ast.AnnAssign):
                targets = child.targets if isinstance(child, ast.Assign) else [child.target]
                for target in targets:
                    if isinstance(target, ast.Name):
                        name = f"{inside}.{target.id}".strip(".")
                        found.setdefault(name, []).append(Place(path, child.lineno))

    for module, file in modules().items():
        if not is_a_lesson(module):
            visit(tree_of(module), "", file.relative_to(ROOT).as_posix())
    return found


@cache
def source_lines() -> dict[tuple[str, int], str]:
    """Every line of code by its file and number."""
    return {
        (path, number): line
        for path, file in ((file.relative_to(ROOT).as_posix(), file) for file in modules().values())
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1)
    }


def find(what: str, path: str) -> Place:
    """Where a name is defined, or where a line of code stands; ValueError if that is not one place.

    path: where it was. What is found twice is looked for there.
    """
    if re.fullmatch(r"[\w.]+", what):
        places = definitions().get(what, [])
        here = [place for place in places if place.path == path]
        near_by = [place for place in places if place.path.split("/")[0] == path.split("/")[0]]
        for chosen in (here, near_by, places):
            if len(chosen) == 1:
                return chosen[0]
        if places:
            raise ValueError(f"`{what}` is defined in {', '.join(f'{p.path}:{p.line}' for p in places)}")
        last = what.split(".")[-1]
        near = [name for name in definitions() if name.split(".")[-1] == last]
        near = near or difflib.get_close_matches(what, list(definitions()), 3)
        raise ValueError(f"`{what}` is defined nowhere; there are: {', '.join(near) or 'none like it'}")
    places = [Place(*place) for place, line in source_lines().items() if what in line]
    here = [place for place in places if place.path == path] or places
    if len(here) != 1:
        raise ValueError(f"`{what}` stands in {len(here)} lines, not in one; it was in {path}")
    return here[0]


def with_anchors(text: str) -> tuple[str, list[str]]:
    """The text with every anchor's file and line brought up to date, and what could not be found."""
    lost: list[str] = []

    def renew(match: re.Match[str]) -> str:
        try:
            place = find(match["what"], match["path"])
        except ValueError as error:
            lost.append(str(error))
            return match[0]
        file = place.path.rsplit("/", 1)[-1]
        return f"[{file}:{place.line}]({place.path}#L{place.line}) `{match['what']}`"

    return ANCHOR.sub(renew, text), lost


ROSETTA = "lessons/ROSETTA.md"
HELD = re.compile(r"`(?P<path>[\w/]+\.py)` `(?P<name>[A-Za-z_]\w*)`")


def with_rosetta(text: str) -> tuple[str, list[str]]:
    """The Rosetta table with our own files where they are now: `cache/radix_cache.py` `RadixCache`.

    Names that are gone are returned, those without a file, too.
    """
    known = {name for full in definitions() for name in (full, full.split(".")[-1])}
    lost: list[str] = []

    def renew(match: re.Match[str]) -> str:
        try:
            place = find(match["name"], f"minirad/{match['path']}")
        except ValueError as error:
            lost.append(str(error))
            return match[0]
        return f"`{place.path.removeprefix('minirad/')}` `{match['name']}`"

    lines = text.split("\n")
    for at, line in enumerate(lines):
        if line.startswith("|"):
            cells = line.split("|")
            cells[1] = HELD.sub(renew, cells[1])
            lines[at] = "|".join(cells)
            names = re.findall(r"`([A-Za-z_]\w*(?:\.\w+)*)(?:\([^`]*\))?`", cells[1])
            lost += [
                f"`{name}` is defined nowhere" for name in names if name not in known and name[-3:] != ".py"
            ]
    return "\n".join(lines), lost


# ------------------------------------------------------------------ what is drawn


def diagram() -> str:
    """The rooms and who imports whom, as Mermaid: drawn from the imports that there are.

    Where a room imports another both directly and through a third, only the longer way is drawn.
    """
    edges: dict[str, set[str]] = {room: set() for room in ROOMS}
    for module in modules():
        if is_old_path(module):
            continue
        for each in imports(module):
            if not each.by_name:
                edges[room_of(module)].add(room_of(each.imported))
    for room, others in edges.items():
        others.discard(room)

    def reach(room: str, seen: frozenset[str]) -> set[str]:
        found = set()
        for other in edges[room] - seen:
            found |= {other} | reach(other, seen | {other})
        return found

    far = {room: reach(room, frozenset({room})) for room in ROOMS}
    lines = ["```mermaid", "graph TD"]
    for room in reversed(ROOMS):
        lines.append(f"    {room}")
    for room in reversed(ROOMS):
        through = {end for other in edges[room] for end in far[other] if room not in far[other]}
        lines += [f"    {room} --> {other}" for other in ROOMS if other in edges[room] - through]
    return "\n".join([*lines, "```"])


def rooms_table() -> str:
    """The rooms, their files, and what they may import."""
    files: dict[str, list[str]] = {room: [] for room in ROOMS}
    for module, file in modules().items():
        if file.name != "__init__.py" and not is_old_path(module) and not is_a_lesson(module):
            files[room_of(module)].append(file.relative_to(ROOT).as_posix())
    lines = ["| room | what it is | files | may import |", "|---|---|---|---|"]
    for name, room in ROOMS.items():
        torch = "" if room.torch else " (no torch)"
        may = ", ".join(room.may) or "nothing"
        lines.append(f"| **{name}** | {room.what}{torch} | {_by_folder(files[name])} | {may} |")
    return "\n".join(lines)


def _by_folder(files: list[str]) -> str:
    """`minirad/cache/`: radix_cache.py, eviction.py; ..."""
    folders: dict[str, list[str]] = {}
    for file in files:
        folder, _, name = file.rpartition("/")
        folders.setdefault(folder, []).append(name)
    return "; ".join(f"`{folder}/` {', '.join(names)}" for folder, names in folders.items())


def path_list() -> str:
    """The reading path: each file with what its docstring begins with, and its lines of code."""
    lines, total = [], 0
    for at, module in enumerate(reading_path(), start=1):
        file = modules()[module]
        count = code_lines(file.read_text(encoding="utf-8"))
        total += count
        path = file.relative_to(ROOT).as_posix()
        about = (ast.get_docstring(tree_of(module)) or "").split("\n\n")[0].replace("\n", " ")
        about = re.split(r"(?<=[a-z)])[.:] ", about)[0].rstrip(".:")
        lines.append(f"{at}. [{path.removeprefix('minirad/')}]({path}) ({count}) {about}")
    return "\n".join([*lines, "", f"In all {total:,} lines of code in {len(lines)} files."])


def by_name() -> str:
    """What is loaded by name, and why."""
    found = sorted(looked_up() & set(LOOKED_UP))
    return "\n".join(f"- [{_path(name)}]({_path(name)}) {LOOKED_UP[name]}" for name in found)


def _path(module: str) -> str:
    return modules()[module].relative_to(ROOT).as_posix()


DRAWN = {"diagram": diagram, "rooms": rooms_table, "by_name": by_name, "path": path_list}
PART = re.compile(r"<!-- drawn: (\w+) -->\n.*?<!-- end -->", re.DOTALL)


def drawn(text: str) -> tuple[str, list[str]]:
    """A document with its generated parts drawn again and its anchors renewed; and what was not found."""
    text = PART.sub(lambda m: f"<!-- drawn: {m[1]} -->\n{DRAWN[m[1]]()}\n<!-- end -->", text)
    return with_anchors(text)


def main(arguments: list[str]) -> int:
    """Draws the documents again; returns the exit code."""
    wrong = False
    for name in (*DOCUMENTS, ROSETTA):
        file = ROOT / name
        before = file.read_text(encoding="utf-8")
        after, lost = with_rosetta(before) if name == ROSETTA else drawn(before)
        for each in lost:
            print(f"{name}: {each}", file=sys.stderr)
        wrong |= bool(lost)
        if after != before and "--check" in arguments:
            print(
                *difflib.unified_diff(before.splitlines(), after.splitlines(), name, "drawn", n=0), sep="\n"
            )
            wrong = True
        elif after != before:
            file.write_text(after, encoding="utf-8", newline="\n")
            print(f"{name}: drawn again")
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
