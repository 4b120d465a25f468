"""A tokenizer without transformers says what transformers' own says, and gives way to it for the rest."""

from __future__ import annotations

import json
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st

from minirad import resolve_model
from minirad.model.load import load_tokenizer
from minirad.model.plain_tokenizer import PlainTokenizer, plain_tokenizer

CLASSROOM = resolve_model(None)
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]


def fresh() -> Any:
    """One that has not loaded transformers' own."""
    made = load_tokenizer(CLASSROOM)
    assert type(made) is PlainTokenizer
    return made


def is_plain(tokenizer: Any) -> bool:
    return "_whole" not in vars(tokenizer)


@pytest.fixture(scope="module")
def own() -> Any:
    return transformers.AutoTokenizer.from_pretrained(str(CLASSROOM), local_files_only=True)


SAMPLES = [*SPECIAL, " ", "\n", "  é", "日本", "\ufffd", "1234"]
texts = st.lists(st.sampled_from(SAMPLES) | st.text(max_size=8), max_size=6).map("".join)


@given(text=texts, special=st.booleans())
def test_texts_become_the_same_ids(own: Any, text: str, special: bool) -> None:
    plain = fresh()
    assert plain.encode(text) == own.encode(text)
    assert plain.encode(text, add_special_tokens=special) == own.encode(text, add_special_tokens=special)
    assert is_plain(plain)


@given(ids=st.lists(st.integers(0, 1030), max_size=12), skip=st.booleans())
def test_ids_become_the_same_text(own: Any, ids: list[int], skip: bool) -> None:
    plain = fresh()
    for options in ({}, {"clean_up_tokenization_spaces": False}):
        said = plain.decode(ids, skip_special_tokens=skip, **options)
        assert said == own.decode(ids, skip_special_tokens=skip, **options)
    assert [plain.convert_ids_to_tokens(each) for each in ids] == [own.convert_ids_to_tokens(i) for i in ids]
    assert plain.decode([ids, ids[:1]]) == own.decode([ids, ids[:1]])
    assert is_plain(plain)


def test_what_it_knows_of_itself_is_what_transformers_knows(own: Any) -> None:
    plain = fresh()
    for name in ("bos_token", "bos_token_id", "eos_token", "eos_token_id", "chat_template", "name_or_path"):
        assert getattr(plain, name) == getattr(own, name), name
    shown = [{n: repr(token) for n, token in each.added_tokens_decoder.items()} for each in (plain, own)]
    assert shown[0] == shown[1] and len(plain) == len(own)
    decoders = [each.backend_tokenizer.decoder.__getstate__() for each in (plain, own)]
    assert decoders[0] == decoders[1]
    assert getattr(plain, "__fspath__", None) is None and is_plain(plain)


def test_anything_else_is_asked_of_transformers_own(own: Any) -> None:
    asked: list[Any] = [
        lambda each: each("Hello").input_ids,
        lambda each: each.encode("Hello", "you"),
        lambda each: each.encode("Hello", truncation=True, max_length=1),
        lambda each: each.encode("Hello", None, False),
        lambda each: each.decode([2, 5], True),
        lambda each: each.decode([5], clean_up_tokenization_spaces=True),
        lambda each: each.decode(5),
        lambda each: each.decode((5, 6), skip_special_tokens=True),
        lambda each: each.convert_ids_to_tokens([1, 2, 300], skip_special_tokens=True),
        lambda each: each.get_vocab(),
        lambda each: each.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False),
        lambda each: isinstance(each, transformers.PreTrainedTokenizerBase),
        lambda each: repr(each),
    ]
    for ask in asked:
        tokenizer = fresh()
        assert ask(tokenizer) == ask(own)
        assert not is_plain(tokenizer)


def test_what_is_changed_is_changed_for_all_that_is_asked() -> None:
    tokenizer = fresh()
    tokenizer.chat_template = "{{ messages[0].content }}!"
    assert tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False) == "Hi!"
    assert tokenizer.chat_template.endswith("!") and not is_plain(tokenizer)
    tokenizer = fresh()
    before, known = len(tokenizer), tokenizer.encode("<new>")
    tokenizer.add_tokens(["<new>"])
    assert len(tokenizer) == before + 1 and tokenizer.encode("<new>") == [before] != known


def test_it_travels_as_transformers_own() -> None:
    there = pickle.loads(pickle.dumps(fresh()))
    assert type(there) is transformers.PreTrainedTokenizerFast and there.encode("Hello") == fresh().encode(
        "Hello"
    )


def changed(folder: Path, **settings: Any) -> Path:
    """The classroom's tokenizer with other settings; None takes one out."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(CLASSROOM / name, folder / name)
    file = folder / "tokenizer_config.json"
    said = {**json.loads(file.read_text(encoding="utf-8")), **settings}
    file.write_text(json.dumps({n: v for n, v in said.items() if v is not None}), encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    "settings",
    [
        {"add_bos_token": True, "bos_token": "<|endoftext|>"}, {"bos_token": "<new>"},
        {"add_eos_token": True}, {"additional_special_tokens": ["Hello"]},
        {"clean_up_tokenization_spaces": True}, {"clean_up_tokenization_spaces": None},
        {"add_prefix_space": True}, {"split_special_tokens": True},
        {"tokenizer_class": "GPT2Tokenizer"}, {"tokenizer_class": None}, {"auto_map": {}},
        {"eos_token": {"content": "<|im_end|>", "lstrip": True}},
    ],
)  # fmt: skip
def test_settings_that_change_what_is_said_are_left_to_transformers(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    assert plain_tokenizer(changed(tmp_path), lambda: None) is not None
    assert plain_tokenizer(changed(tmp_path, **settings), lambda: None) is None


@pytest.mark.parametrize("part", ["truncation", "padding", "post_processor"])
def test_so_are_a_file_that_cuts_fills_or_adds_and_a_file_more(tmp_path: Path, part: str) -> None:
    file = changed(tmp_path) / "tokenizer.json"
    said = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps({**said, part: {"type": "?"}}), encoding="utf-8")
    assert plain_tokenizer(tmp_path, lambda: None) is None
    file.write_text(json.dumps(said), encoding="utf-8")
    assert plain_tokenizer(tmp_path, lambda: None) is not None
    (tmp_path / "chat_template.jinja").write_text("x", encoding="utf-8")
    assert plain_tokenizer(tmp_path, lambda: None) is None
    file.write_text("{", encoding="utf-8")
    assert plain_tokenizer(tmp_path, lambda: None) is None


@pytest.mark.slow
def test_an_engine_that_reads_and_writes_text_imports_no_transformers() -> None:
    code = (
        "import sys; from minirad import Engine, EngineConfig\n"
        "asked = 'Question 1: What is the capital of Peru?\\nAnswer 1:'\n"
        "(out,) = Engine(EngineConfig(kv_tokens=256)).generate(asked)\n"
        "assert 'Lima' in out.text, out.text\n"
        "assert 'transformers' not in sys.modules and 'huggingface_hub' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
