"""An eviction policy from a file: known by its name, run by the engine's tree, and named where it breaks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from minirad import own_policy
from minirad.__main__ import main
from minirad.cache.eviction import POLICIES
from minirad.cache.radix_cache import RadixKey
from minirad.simulate import Replay

Write = Callable[..., str]


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """The table of policies is the process': what joined it goes again."""
    known, joined = dict(POLICIES), dict(own_policy._joined)
    yield
    for table, was in ((POLICIES, known), (own_policy._joined, joined)):
        table.clear()
        table.update(was)  # type: ignore[arg-type]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def file(text: str, name: str = "mine.py") -> str:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return str(path)

    return file


def key(body: str) -> str:
    return f"def victim_key(node):\n    return {body}\n"


def test_a_file_is_known_by_its_name_and_orders_the_leaves(write: Write) -> None:
    name = own_policy.join(write(key("-node.last_access")))
    assert name == "mine.py" and own_policy.is_file(name) and not own_policy.is_file("lru")
    prompts = [[1, 1], [2, 2], [3, 3], [2, 2]]
    left = {}
    for policy in (name, "mru", "lru"):
        replay = Replay(6, eviction_policy=policy)
        for prompt in prompts:
            replay.serve(RadixKey(prompt))
        replay.serve(RadixKey([4, 4]))
        left[policy] = [node.key.tokens.tolist() for node in replay.cache.walk()][1:]
    assert left[name] == left["mru"] == [[1, 1], [3, 3], [4, 4]] != left["lru"]
    assert "victim_key of mine.py: -1 (" in POLICIES[name].reason(_leaf())


def _leaf() -> object:
    replay = Replay()
    replay.serve(RadixKey([7]))
    leaf = list(replay.cache.walk())[1]
    leaf.last_access = 1
    return leaf


def test_a_file_that_was_changed_joins_anew_and_another_of_its_name_by_its_path(write: Write) -> None:
    path = write(key("node.hits"))
    assert own_policy.join_files(f"lru, {path}") == "lru,mine.py"
    write(key("node.created"))
    assert own_policy.join(path) == "mine.py" and POLICIES["mine.py"].key(_leaf()) == 2  # type: ignore[arg-type]
    other = write(key("node.id"), "other/mine.py")
    assert own_policy.join(other) == other != path


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def victim_key(node):\n    raise NotImplementedError('todo')\n", "victim_key is not written yet"),
        ("x = 1\n", "has no function victim_key"),
        ("def victim_key(node)\n", "cannot be loaded: SyntaxError"),
        ("import no_such_module\n", "cannot be loaded: ModuleNotFoundError"),
        (key("1 / 0"), r"victim_key raised ZeroDivisionError: division by zero \(line 2\) for n1 \(1 tokens"),
        (key("None"), "victim_key returned None for n1 .*: it cannot be compared with None"),
        (key("float('nan')"), "victim_key returned nan"),
        ("def victim_key():\n    return 1\n", "victim_key raised TypeError"),
    ],
)
def test_what_cannot_run_is_said_at_once(write: Write, text: str, words: str) -> None:
    path = write(text)
    with pytest.raises(ValueError, match=f"mine.py:? {words}"):
        own_policy.join(path)
    assert "mine.py" not in POLICIES


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(ValueError, match=r"there is no file 'no/such\.py'"):
        own_policy.join("no/such.py")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (
            "1 / (node.hits - 1)",
            "raised ZeroDivisionError: division by zero (line 2) for n1 (1 tokens, 1 hits",
        ),
        (
            "'a' if node.hits else 1",
            "returned 'a' for n1 (1 tokens, 1 hits, last used at tick 3): it cannot be",
        ),
    ],
)
def test_what_breaks_later_names_the_leaf(write: Write, body: str, words: str) -> None:
    replay = Replay(2, eviction_policy=own_policy.join(write(key(body))))
    replay.serve(RadixKey([1]))
    with pytest.raises(own_policy.PolicyBroke) as broke:
        replay.serve(RadixKey([1]))
    assert f"mine.py: victim_key {words}" in str(broke.value)


def test_simulate_takes_it_beside_the_engines_own(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["simulate", "mooncake", "--limit", "300", "--capacity", "500", "--eviction-policy"]
    assert main([*asked, f"lru,{write(key('node.last_access'))}"]) == 0
    lru, mine = (line.split()[2:6] for line in capsys.readouterr().out.splitlines()[3:5])
    assert (lru[0], mine[0]) == ("lru", "mine.py") and lru[1:] == mine[1:]
    assert main([*asked, write(key("1 / (node.created - 20)"))]) == 2
    told = capsys.readouterr().err
    assert "victim_key raised ZeroDivisionError" in told and told.count("\n") == 1
    assert main([*asked, "none.py"]) == 2
    assert "there is no file 'none.py'" in capsys.readouterr().err
