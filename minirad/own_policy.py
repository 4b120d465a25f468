"""An eviction policy from a Python file: its function `victim_key(node)`, beside the engine's own policies.

    python -m viz.live --eviction-policy mine.py
    python -m minirad simulate mooncake --eviction-policy lru,mine.py

`join` puts it into the table of policies under the file's name, so that whatever takes a policy's name takes
it. The leaf with the smallest key goes first. What a key may look at, and why it may change only when its
leaf is used: minirad/cache/other_policies.py.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from minirad import own_code
from minirad.cache.eviction import POLICIES, EvictionPolicy
from minirad.cache.node import Node, RadixKey
from minirad.errors import InvariantError, said

FUNCTION = "victim_key"
_joined: dict[str, Path] = {}  # by the name under which it is known


class PolicyBroke(InvariantError):
    """The function raised, or returned what cannot be compared; the message names file, line and leaf."""


def is_file(name: object) -> bool:
    """A policy's name that is a file's."""
    return isinstance(name, str) and name.endswith(".py")


def join(path: str) -> str:
    """Puts a file's policy among those known by name. ValueError if it cannot run.

    Returns its name: the file's, or the whole path where a file of that name is there from another folder.
    """
    function, file = _function(path), Path(path).resolve()
    name = Path(path).name if _joined.get(Path(path).name, file) == file else path
    POLICIES[name] = policy_from(path, function, name)
    _joined[name] = file
    return name


def join_files(names: str) -> str:
    """Names with commas between them: those that are files join, and the names by which all are known."""
    return ",".join(join(name) if is_file(name) else name for name in map(str.strip, names.split(",")))


def policy_from(path: str, function: Callable[[Node], Any], name: str) -> EvictionPolicy:
    """A policy by a key function. ValueError where it is not written yet, or fails on a first leaf."""
    watched = _Watched(path, function)
    leaf = Node(1, Node(0, None, None, b"", b"", RadixKey(())), None, b"0000", b"00000000", RadixKey([0]))
    leaf.created = leaf.last_access = 1
    try:
        watched(leaf)
    except NotImplementedError:
        raise ValueError(f"{path}: {FUNCTION} is not written yet") from None
    except PolicyBroke as error:
        raise ValueError(str(error)) from None
    return EvictionPolicy(name, watched, watched.reason)


class _Watched:
    """A key function whose failures are sentences."""

    def __init__(self, path: str, function: Callable[[Node], Any]) -> None:
        self._path, self._function = path, function
        self._first: tuple[Any, str] | None = None  # a key, and whose: all others must compare with it

    def __call__(self, node: Node) -> Any:
        try:
            key = self._function(node)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            if isinstance(error, NotImplementedError) and self._first is None:
                raise
            what = f"{_told(error)}{_line(error, self._path)}"
            raise PolicyBroke(f"{self._path}: {FUNCTION} raised {what} for {_leaf(node)}") from error
        first, whose = self._first = self._first or (key, _leaf(node))
        try:
            sound = bool(key <= first or key > first) and bool(key == key)
        except Exception:
            sound = False
        if not sound:
            other = f", the key of {whose}" if whose != _leaf(node) else ""
            broke = f"returned {said(key)} for {_leaf(node)}: it cannot be compared with {said(first)}{other}"
            raise PolicyBroke(f"{self._path}: {FUNCTION} {broke}")
        return key

    def reason(self, node: Node) -> str:
        return (
            f"unlocked leaf with the smallest {FUNCTION} of {Path(self._path).name}: {said(self(node))} "
            f"({node.hits} hits, last used at tick {node.last_access})"
        )


def _leaf(node: Node) -> str:
    return f"n{node.id} ({len(node)} tokens, {node.hits} hits, last used at tick {node.last_access})"


def _told(error: BaseException) -> str:
    """An error's type and text; who wrote the file may have written the error, too."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return type(error).__name__


def _line(error: BaseException, path: str) -> str:
    """Where in the file it happened."""
    at = own_code.last_line(error, str(Path(path)))
    return f" (line {at[1]})" if at else ""


def _function(name: str) -> Callable[[Node], Any]:
    path = Path(name)
    if not path.is_file():
        raise ValueError(f"there is no file {name!r} to take an eviction policy from")
    module = ModuleType("own_policy")
    own_code.watch(path)
    try:
        exec(compile(own_code.source(path), str(path), "exec", dont_inherit=True), module.__dict__)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise ValueError(f"{name} cannot be loaded: {_told(error)}") from error
    function = getattr(module, FUNCTION, None)
    if not callable(function):
        raise ValueError(f"{name} has no function {FUNCTION}(node)")
    found: Callable[[Node], Any] = function
    return found
