"""The course: one folder per lesson, graded by `pytest lessons/NN_name` or `python -m lessons`.

`lessons.progress()` shows in a notebook what has been solved so far.
"""

from __future__ import annotations

from lessons.grading.progress import progress

__all__ = ["progress"]
