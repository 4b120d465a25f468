"""Lesson 10's hidden cases: random games against the engine's HiRadixCache, and random measurements."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from random import Random
from types import ModuleType
from typing import Any

from lessons.grading import sibling
from lessons.grading.tiers import Twins, random_moves

exercises = sibling(__file__, "exercises")

WRITES = {
    "write_through": ("write_through", "write_through", "write_through_selective"),
    "make_host_room": ("write_through", "write_back"),
    "evict": ("write_back", "write_back", "write_through"),
    "load_back": ("write_back", "write_through"),
}


def game(impl: ModuleType, name: str, rng: Random) -> None:
    """One game with the function `name` laid in."""
    twins = Twins(
        impl, name,
        device=rng.choice((12, 16, 24)), host=rng.choice((6, 10, 20, 40)),
        host_write=rng.choice(WRITES[name]), load_back_threshold=rng.choice((1, 1, 2, 4)),
        fails=rng.choice(((), (), (2, 5, 6, 11), (3, 4, 8, 9, 10))),
    )  # fmt: skip
    twins.play(*random_moves(rng))


def games(name: str) -> tuple[Callable[..., None], Callable[..., None]]:
    """Two cases: games that are the same for everybody, and games of one's own."""

    def everybodys(impl: ModuleType) -> None:
        for number in range(3):
            game(impl, name, Random(f"everybody's {number}"))

    def ones_own(impl: ModuleType, rng: Random) -> None:
        for _ in range(2):
            game(impl, name, rng)

    everybodys.__doc__ = f"Random requests, {name} in the engine's tree."
    ones_own.__doc__ = everybodys.__doc__
    return everybodys, ones_own


# ---------------------------------------------------------------------- break_even


def measured_by_everybody(impl: ModuleType) -> None:
    """Random measurements."""
    measured(impl, Random("everybody's"), 60)


def measured_by_one(impl: ModuleType, rng: Random) -> None:
    """Random measurements."""
    measured(impl, rng, 30)


def measured(impl: ModuleType, rng: Random, count: int) -> None:
    while count:
        loads = _times(rng, rng.choice((2.0, 20.0, -5.0)), rng.choice((0.1, 0.5, 1.5)))
        prefills = _times(rng, rng.choice((0.0, 50.0)), rng.choice((0.4, 1.0, 1.2)))
        wanted = _break_even(loads, prefills)
        if wanted is not ...:
            exercises.asked(impl, loads, prefills, wanted)
            count -= 1


def _times(rng: Random, start: float, slope: float) -> list[tuple[int, float]]:
    sizes = [rng.randint(1, 400) for _ in range(rng.randint(3, 6))]
    sizes.append(sizes[0] + rng.randint(50, 100))
    noise = rng.choice((0.0, 0.5, 3.0))
    return [(size, round(start + slope * size + rng.uniform(-noise, noise), 3)) for size in sizes]


def _break_even(loads: Any, prefills: Any) -> Any:
    """By exact fractions; ... where a last digit could decide."""
    (start, fetched), (_, computed) = _fit(loads), _fit(prefills)
    gain = computed - fetched
    if abs(gain) < Fraction(1, 100):
        return ...
    if gain < 0:
        return None
    exact = start / gain
    return max(int(exact // 1) + 1, 1) if Fraction(1, 20) < exact % 1 < Fraction(19, 20) else ...


def _fit(times: Any) -> tuple[Fraction, Fraction]:
    xs, ys = ([Fraction(str(each[at])) for each in times] for at in (0, 1))
    mean_x, mean_y = (sum(values, Fraction(0)) / len(values) for values in (xs, ys))
    together = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True))
    slope = together / sum((x - mean_x) ** 2 for x in xs)
    return mean_y - slope * mean_x, slope


HIDDEN = {name: list(games(name)) for name in WRITES}
HIDDEN["break_even"] = [measured_by_everybody, measured_by_one]
