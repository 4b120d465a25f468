"""`pytest lessons/13_isolation_and_drafts` grades exercise.py."""

from __future__ import annotations

from lessons.grading import exercise_tests

test_exercise = exercise_tests(__file__)
