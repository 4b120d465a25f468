"""A prediction in a real JupyterLab and headless Chromium: chosen, typed and committed, also by keyboard."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browsers import browser
from test_browser_stepper import ASK_KERNEL, MISSING, Notebook, lab, write_notebook

__all__ = ["browser", "lab"]  # fixtures

pytestmark = [
    pytest.mark.slow,
    pytest.mark.browser,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}"),
]

CHOICE = """
from viz.predict import predict
slots = predict("09", "A fork of three samples: " + 9 * "and a long question: " + "how many?",
                choices=["none, for pages are shared", "3, once", "3 slots for each of two samples"])
slots
"""
NUMBER = """
tokens = predict("10", "How many tokens have to be <i>computed</i>?", number="tokens")
tokens
"""


@pytest.fixture(scope="module")
def notebook(browser: Any, lab: tuple[str, Path]) -> Iterator[Notebook]:
    write_notebook(lab[1] / "predict.ipynb", [CHOICE, NUMBER])
    opened = Notebook(browser, lab, "predict.ipynb")
    opened.page.wait_for_selector(".mr-predict")
    yield opened
    opened.close()


def picture(notebook: Notebook, name: str) -> None:
    """Where MINIRAD_PICTURES names a folder, a screenshot is put there, to be looked at."""
    folder = os.environ.get("MINIRAD_PICTURES")
    if folder:
        notebook.page.screenshot(path=str(Path(folder) / f"predict_{name}.png"))


def test_a_choice_is_committed_by_clicking(notebook: Notebook) -> None:
    page = notebook.page
    picture(notebook, "asked")
    notebook.press("Commit", 0)
    page.get_by_text("choose one first").wait_for()
    page.get_by_label("none, for pages are shared").focus()
    page.keyboard.press("ArrowDown")
    assert page.get_by_label("3, once").is_checked()
    page.get_by_label("3 slots for each of two samples").click()
    page.get_by_label("3, once").click()
    notebook.press("Commit", 0)
    page.get_by_text("Committed: 3, once. Now run the cells below.").wait_for()
    assert page.locator("input[type=radio]").first.is_disabled()
    code = "slots.answer(slots.choices[2], because='Two need it.', wrong={'3, once': 'For one?'})"
    assert page.evaluate(ASK_KERNEL, code).startswith(
        "You predicted 3, once. The answer: 3 slots for each of two"
    )
    picture(notebook, "committed")


def test_a_number_is_committed_with_the_keyboard(notebook: Notebook) -> None:
    page = notebook.page
    page.locator(".mr-predict input[type=text]").focus()
    page.keyboard.type("about 40")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Commit"
    page.keyboard.press("Enter")
    page.get_by_text("'about 40' is no number of tokens: write it as 1400 or 0.5").wait_for()
    page.locator(".mr-predict input[type=text]").fill("41")
    page.keyboard.press("Enter")
    page.get_by_text("Committed: 41. Now run the cells below.").wait_for()
    assert page.evaluate(ASK_KERNEL, "tokens.answer(40, within=1)") == (
        "You predicted 41 tokens, and that is right. The answer: 40 tokens."
    )
    assert page.evaluate(ASK_KERNEL, "import lessons; print(lessons.progress())").endswith(
        "1 of 2 predicted right"
    )
    picture(notebook, "number")
