"""Plausible wrong solutions: they must lose points in the exercise that they break."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from lessons.grading.spec import Lesson, load_file


@dataclass(frozen=True)
class Mutant:
    """A wrong solution of exercise `breaks`.

    Either `old` becomes `new` in the text of solution.py (it must be there exactly once, after `after`
    if that is given), or `replaces` puts other functions (name -> function) into the solution.
    """

    breaks: str
    about: str
    old: str = ""
    new: str = ""
    after: str = ""
    replaces: dict[str, Callable[..., Any]] | None = None

    def build(self, lesson: Lesson) -> ModuleType:
        """The solution with this fault."""
        path = lesson.folder / "solution.py"
        source = path.read_text(encoding="utf-8")
        if self.old:
            source = self._mutated(source, lesson.name)
        module = load_file(path, source)
        for name, function in (self.replaces or {}).items():
            setattr(module, name, function)
        return module

    def _mutated(self, source: str, where: str) -> str:
        start = source.find(self.after)
        if start < 0:
            raise ValueError(f"{where}, mutant {self.about!r}: solution.py has no {self.after!r}")
        head, tail = source[:start], source[start:]
        count = tail.count(self.old)
        if count == 0 or (count > 1 and not self.after):
            raise ValueError(f"{where}, mutant {self.about!r}: {self.old!r} is {count} times in solution.py")
        return head + tail.replace(self.old, self.new, 1)


def load_mutants(lesson: Lesson) -> list[Mutant]:
    """The lesson's `MUTANTS`, or none where there is no mutants.py."""
    path = lesson.folder / "mutants.py"
    return list(load_file(path).MUTANTS) if path.exists() else []
