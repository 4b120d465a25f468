"""The reading path is short, and ARCHITECTURE.md says what is so: each drawn part, each file and line."""

from __future__ import annotations

import architecture
import pytest
from architecture import ANCHOR, DOCUMENTS, DRAWN, PART, ROOT, code_lines, functions, modules, reading_path

SCREEN = 50  # lines of a function, or of a step with what it calls


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def lines_of(module: str) -> int:
    return code_lines(modules()[module].read_text(encoding="utf-8"))


# ------------------------------------------------------------------ the reading path


def test_lines_of_code_are_counted_without_blanks_comments_and_docstrings() -> None:
    text = '"""A\n\nmodule."""\n# no\n\ndef f(x):\n    """D."""\n    y = """two\nlines"""\n    return y\n'
    assert code_lines(text) == 4  # def, two of the text, return


def test_the_path_is_the_engine_and_what_it_needs() -> None:
    assert {"minirad.engine", "minirad.runner", "minirad.cache.radix_cache"} <= set(reading_path())
    assert not any(module.split(".")[-1] in ("events", "config", "errors") for module in reading_path())


def test_the_path_can_be_read_in_an_evening() -> None:
    assert sum(map(lines_of, reading_path())) <= 2330


def test_the_engine_is_short() -> None:
    assert len(text_of("minirad/engine.py").splitlines()) <= 420


def test_the_engine_hides_nothing_in_a_base_class() -> None:
    tree = architecture.tree_of("minirad.engine")
    classes = [node for node in architecture.ast.walk(tree) if isinstance(node, architecture.ast.ClassDef)]
    assert [each.name for each in classes] == ["Engine"] and classes[0].bases == []


def test_no_function_of_the_path_is_longer_than_a_screen() -> None:
    long = [(m, each) for m in reading_path() for each in functions(m) if each.lines > SCREEN]
    assert long == []


def test_each_part_of_a_step_is_on_one_screen() -> None:
    """Every method of the engine that `step` calls, also through others."""
    length = {each.name: each.lines for each in functions("minirad.engine")}
    called = architecture.own_calls("minirad.engine", "Engine.step")
    assert "Engine.commit" in called
    assert {name: length[name] for name in called if length[name] > SCREEN} == {}


def test_a_step_with_what_it_calls_directly_is_on_one_screen() -> None:
    """Together, without docstrings and comments."""
    length = {each.name: each.code for each in functions("minirad.engine")}
    called = architecture.own_calls("minirad.engine", "Engine.step", deep=False)
    assert sum(length[name] for name in called) <= SCREEN


# ------------------------------------------------------------------ the documents


@pytest.mark.parametrize("name", DOCUMENTS)
def test_what_is_drawn_is_drawn_from_the_code(name: str) -> None:
    text = text_of(name)
    drawn, lost = architecture.drawn(text)
    assert lost == []
    assert drawn == text, "run: python tests/architecture.py"


def test_all_is_drawn_somewhere() -> None:
    assert PART.findall(text_of("ARCHITECTURE.md")) == list(DRAWN)


def test_each_line_holds_what_the_document_says() -> None:
    """Beside the script's own search: the last word of a name, or the code, stands in that very line."""
    anchors = list(ANCHOR.finditer(text_of("ARCHITECTURE.md")))
    assert len(anchors) > 30
    for anchor in anchors:
        line = text_of(anchor["path"]).splitlines()[int(anchor["at"]) - 1]
        what = anchor["what"]
        name = what.split(".")[-1]
        code = line.strip().removeprefix("async ")
        defined = code.startswith((f"def {name}(", f"class {name}(", f"class {name}:"))
        assert defined or (not what.replace(".", "").isidentifier() and what in line), anchor[0]
        assert anchor["line"] == anchor["at"]


def test_a_line_that_moved_is_found_again_and_a_name_that_is_gone_is_said() -> None:
    text = "see [engine.py:1](minirad/gone.py#L1) `Engine.step` and [x.py:1](minirad/x.py#L1) `Engine.stepp`"
    after, lost = architecture.with_anchors(text)
    assert "(minirad/engine.py#L" in after and "gone" not in after
    assert lost == ["`Engine.stepp` is defined nowhere; there are: Engine.step, Engine, Engine.stream"] or (
        len(lost) == 1 and "Engine.step" in lost[0]
    )


def test_the_list_to_read_is_the_path_that_is_counted() -> None:
    part = text_of("ARCHITECTURE.md").split("<!-- drawn: path -->")[1].split("<!-- end -->")[0]
    listed = [line.split("(", 2)[1].split(")")[0] for line in part.splitlines() if ". [" in line]
    assert listed == [modules()[module].relative_to(ROOT).as_posix() for module in reading_path()]
    assert listed[0] == "minirad/engine.py"
