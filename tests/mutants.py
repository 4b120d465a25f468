"""Engines broken on purpose, by what they do: a method that does something else, or one that does nothing
while another one runs. A mutant names methods, not lines; one whose method is gone fails loudly."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

Make = Callable[[Callable[..., Any]], Callable[..., Any]]  # a method -> what runs instead
Method = tuple[Any, str]  # a class or module, and the name of a method, property or function there


@dataclass(frozen=True)
class Mutant:
    """`changes` says what runs instead of which method; they are made in their order."""

    about: str
    changes: tuple[tuple[Method, Make], ...]

    def apply(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for (owner, name), make in self.changes:
            found = inspect.getattr_static(owner, name, None)
            where = f"{owner.__name__}.{name}"
            assert found is not None, f"{where} is gone: bring the mutant {self.about!r} up to date"
            original = found.fget if isinstance(found, property) else found
            assert inspect.isfunction(original), f"{where} is no method: bring {self.about!r} up to date"
            broken = functools.wraps(original)(make(original))
            monkeypatch.setattr(owner, name, property(broken) if isinstance(found, property) else broken)


def instead(about: str, method: Method, make: Make) -> Mutant:
    """`make(original)` runs instead of a method."""
    return Mutant(about, ((method, make),))


def while_in(outer: Method, inner: Method, make: Make, about: str = "") -> Mutant:
    """As long as `outer` runs, `make(original)` runs instead of `inner`."""
    running: list[None] = []

    def watch(original: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **named: Any) -> Any:
            running.append(None)
            try:
                return original(*args, **named)
            finally:
                running.pop()

        return watched

    def switch(original: Callable[..., Any]) -> Callable[..., Any]:
        broken = make(original)
        return lambda *args, **named: (broken if running else original)(*args, **named)

    return Mutant(about or f"in {outer[1]}, no {inner[1]}", ((outer, watch), (inner, switch)))


def says(value: Any) -> Make:
    """Does nothing and returns `value`."""
    return lambda original: lambda *args, **named: value


nothing = says(None)


def after(then: Callable[..., None]) -> Make:
    """What was right, and then `then(result, *arguments)`, which spoils it."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def spoiled(*args: Any, **named: Any) -> Any:
            result = original(*args, **named)
            then(result, *args, **named)
            return result

        return spoiled

    return make


def unchanged(*fields: str) -> Make:
    """What was right, but these fields of the first argument are as before."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def forgetful(self: Any, what: Any, *args: Any, **named: Any) -> Any:
            before = {name: getattr(what, name) for name in fields}
            result = original(self, what, *args, **named)
            for name, value in before.items():
                setattr(what, name, value)
            return result

        return forgetful

    return make


@contextmanager
def attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    """An attribute, method or property that is another one for a while."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, value)
        yield
