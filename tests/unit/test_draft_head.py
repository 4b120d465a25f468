"""The draft head: paged against dense, what its keys depend on, what is refused, its training and score."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from minirad.attention import BatchEntry, build_metadata
from minirad.attention.gather import GatherAttention
from minirad.model.classroom import DRAFT_HEAD, WEIGHTS, score, train, train_head
from minirad.model.llama import LlamaModel, rms_norm
from minirad.model.load import load_model
from minirad.speculative.head import ARCHITECTURE, SIZES, DraftHead

LENGTH, PAGE = 23, 4
SLOTS = 32 * PAGE
CONFIG, TENSORS = "config.json", "model.safetensors"


@pytest.fixture(scope="module")
def target() -> LlamaModel:
    return load_model(WEIGHTS, torch.float32, "cpu")


@pytest.fixture(scope="module")
def head(target: LlamaModel) -> DraftHead:
    """The shipped head."""
    return DraftHead.load(DRAFT_HEAD, target)


@pytest.fixture(scope="module")
def pupil() -> score.Pupil:
    return score.Pupil(WEIGHTS)


@pytest.fixture(scope="module")
def inputs(target: LlamaModel) -> tuple[Tensor, Tensor]:
    """Tokens `[LENGTH + 1]`, and hidden states of all but the last, at the scale of the target's."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(target.config.vocab_size, (LENGTH + 1,), generator=generator)
    return tokens, torch.randn(LENGTH, target.config.hidden, generator=generator) * 10


class Paged:
    """A pool in which one row's pages lie in no order; everything in it was NaN before."""

    def __init__(self, target: LlamaModel, head: DraftHead, page_size: int = PAGE) -> None:
        self.pool = target.new_pool(SLOTS, head.layers)
        self.pool.poison(torch.arange(page_size, SLOTS))
        pages = np.random.default_rng(2).permutation(np.arange(1, SLOTS // page_size))
        self.rows = (pages[:, None] * page_size + np.arange(page_size)).reshape(1, -1)[:, :-PAGE]
        self.head, self.page_size, self.layer = head, page_size, target.config.layers

    def forward(self, tokens: Tensor, hidden: Tensor, start: int, stop: int) -> Tensor:
        """Units [start, stop): those of `hidden` [T, H], with the tokens behind each."""
        metadata = build_metadata(self.rows, [BatchEntry(0, start, stop)], self.page_size, "cpu")
        following = tokens[start + 1 : stop + 1]
        return self.head.forward(following, hidden[start:stop], metadata, self.pool, GatherAttention())

    def keys_and_values(self) -> Tensor:
        """`[LENGTH, 2, kv_heads, head_dim]` of the head's layer."""
        slots = torch.from_numpy(self.rows[0, :LENGTH].copy())
        return torch.stack((self.pool.k[self.layer][slots], self.pool.v[self.layer][slots]), dim=1)


def dense(head: DraftHead, target: LlamaModel, tokens: Tensor, hidden: Tensor) -> Tensor:
    """The features of all units, by the file's tensors and nothing of the engine's."""
    w, c = {name: t.float() for name, t in load_file(DRAFT_HEAD / TENSORS).items()}, head.config
    eps, length = target.config.rms_eps, len(hidden)
    embedded = rms_norm(target.embed[tokens[1:]], w["embed_norm.weight"], eps)
    x = torch.cat((embedded, rms_norm(hidden, w["hidden_norm.weight"], eps)), -1) @ w["fc.weight"].T
    h = rms_norm(x, w["layers.0.input_layernorm.weight"], eps)
    attention = "layers.0.self_attn."
    q, k, v = ((h @ w[f"{attention}{n}_proj.weight"].T).view(length, -1, c.head_dim) for n in "qkv")
    cos, sin = train.rotary_table(length, c.head_dim, target.config.rope_theta)
    q, k = (train.rotate(y.transpose(0, 1)[None], cos, sin)[0] for y in (q, k))
    k, v = (y.repeat_interleave(c.heads // c.kv_heads, dim=0) for y in (k, v.transpose(0, 1)))
    scores = (q @ k.mT * c.head_dim**-0.5).masked_fill(~torch.ones(length, length).bool().tril(), -torch.inf)
    mixed = (scores.softmax(-1) @ v).transpose(0, 1).reshape(length, -1)
    x = x + mixed @ w[attention + "o_proj.weight"].T
    h = rms_norm(x, w["layers.0.post_attention_layernorm.weight"], eps)
    gate, up, down = (w[f"layers.0.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
    return x + (F.silu(h @ gate.T) * (h @ up.T)) @ down.T


def close(got: Tensor, wanted: Tensor) -> bool:
    return bool((got - wanted).abs().max() < 1e-4 * wanted.abs().max())


@pytest.mark.parametrize("page_size", [1, PAGE])
@pytest.mark.parametrize(
    "ends", [[LENGTH], [9, LENGTH], [3, 4, 5, 16, LENGTH], range(1, LENGTH + 1)], ids=str
)
def test_any_chunks_give_what_a_dense_head_gives(
    target: LlamaModel, head: DraftHead, inputs: tuple[Tensor, Tensor], ends: list[int], page_size: int
) -> None:
    paged = Paged(target, head, page_size)
    got = torch.cat([paged.forward(*inputs, start, stop) for start, stop in pairwise([0, *ends])])
    wanted = dense(head, target, *inputs)
    assert close(got, wanted)
    assert torch.equal(head.logits(got[-2:]), target.logits(got[-2:]))
    assert torch.equal(head.logits(wanted).argmax(-1), head.logits(got).argmax(-1))


def test_only_the_layer_behind_the_targets_is_written(
    target: LlamaModel, head: DraftHead, inputs: tuple[Tensor, Tensor]
) -> None:
    """The target's own keys and values stay as they are (here: poison), and so do other slots."""
    paged = Paged(target, head)
    paged.forward(*inputs, 0, LENGTH)
    assert all(bool(t[PAGE:].isnan().all()) for t in (*paged.pool.k[:-1], *paged.pool.v[:-1]))
    assert not paged.keys_and_values().isnan().any()
    others = np.setdiff1d(np.arange(PAGE, SLOTS), paged.rows[0, :LENGTH])
    assert bool(paged.pool.k[-1][torch.from_numpy(others)].isnan().all())


@pytest.mark.parametrize("changed", [0, 5, LENGTH - 3])
def test_keys_and_values_belong_to_pairs(
    target: LlamaModel, head: DraftHead, inputs: tuple[Tensor, Tensor], changed: int
) -> None:
    """K and V at position i change with token i + 1 (with token i the hidden state changes), no further."""
    tokens, hidden = inputs
    written = []
    for token in (tokens[changed + 1], (tokens[changed + 1] + 1) % target.config.vocab_size):
        paged = Paged(target, head)
        paged.forward(
            torch.cat((tokens[: changed + 1], token[None], tokens[changed + 2 :])), hidden, 0, LENGTH
        )
        written.append(paged.keys_and_values())
    differs = (written[0] != written[1]).flatten(1).any(-1)
    assert differs.nonzero().flatten().tolist() == [changed]


def test_drafts_in_a_row_go_on_from_their_own_features(
    target: LlamaModel, head: DraftHead, inputs: tuple[Tensor, Tensor]
) -> None:
    """Four steps in the pool are the four steps that training unrolls, and true units write over drafts."""
    tokens, hidden = inputs
    student = train_head.load_head(DRAFT_HEAD, train.Shape())
    embedded = target.embed[tokens[1:]][None]
    unrolled = student.drafts(embedded, hidden[None], 4)
    paged, known = Paged(target, head), 14
    feature = paged.forward(tokens, hidden, 0, known)[-1:]
    for j in range(4):
        assert close(feature[0], unrolled[j][0, known - 1 + j]), f"draft {j + 1}"
        if j < 3:
            metadata = build_metadata(paged.rows, [BatchEntry(0, known + j, known + j + 1)], PAGE, "cpu")
            following = tokens[known + j + 1, None]
            feature = head.forward(following, feature, metadata, paged.pool, GatherAttention())
    rest = paged.forward(tokens, hidden, known, LENGTH)
    assert close(rest, dense(head, target, tokens, hidden)[known:])


@pytest.mark.parametrize("exam", ["copying", "facts"])
def test_score_counts_what_a_drafting_engine_would_accept(
    target: LlamaModel, head: DraftHead, pupil: score.Pupil, exam: str
) -> None:
    """Drafts made one by one, each from the last one's own best token, until one is not the reply's."""
    item = next(each for each in score.EXAMS if each.name == exam).items(1)[0]
    ((prompt, reply),) = score.greedy(pupil, [item.prompt], 12)
    student, shape = train_head.load_target(WEIGHTS)
    counts = score.accepted(student, train_head.load_head(DRAFT_HEAD, shape), prompt, reply)
    tokens, wanted = torch.tensor(prompt + reply), []
    with torch.no_grad():
        hidden = student.hidden(tokens[None])[0]
    for known in range(len(prompt), len(tokens) - 1):  # the last token that is known
        paged, count, draft = Paged(target, head), 0, tokens[: known + 1]
        feature = paged.forward(draft, hidden, 0, known)[-1:]
        while count < score.DRAFTS and known + count + 1 < len(tokens):
            draft = torch.cat((draft, head.logits(feature).argmax(-1)))
            if draft[-1] != tokens[known + count + 1]:
                break
            count += 1
            metadata = build_metadata(
                paged.rows, [BatchEntry(0, len(draft) - 2, len(draft) - 1)], PAGE, "cpu"
            )
            feature = head.forward(draft[-1:], feature, metadata, paged.pool, GatherAttention())
        wanted.append(count)
    assert counts == wanted and any(counts)


def test_sizes_that_do_not_fit_together_are_refused_at_work(
    target: LlamaModel, head: DraftHead, inputs: tuple[Tensor, Tensor]
) -> None:
    tokens, hidden = inputs
    paged = Paged(target, head)
    with pytest.raises(
        ValueError, match=r"5 next tokens and hidden states \[6, 160\].* wants 6 and \[6, 160\]"
    ):
        paged.forward(tokens[:6], hidden, 0, 6)
    with pytest.raises(ValueError, match=r"\[6, 80\]"):
        paged.forward(tokens, hidden[:, :80], 0, 6)
    paged.pool = target.new_pool(SLOTS)
    with pytest.raises(ValueError, match="4 layers, model and head need 5"):
        paged.forward(tokens, hidden, 0, 6)


# --------------------------------------------------------------------------------------------
# Files


def rewrite(folder: Path, change: Callable[[dict[str, Any], dict[str, Tensor]], object]) -> None:
    """The shipped head, with something changed in its configuration or its tensors."""
    config = json.loads((DRAFT_HEAD / CONFIG).read_text(encoding="utf-8"))
    tensors = load_file(DRAFT_HEAD / TENSORS)
    change(config, tensors)
    (folder / CONFIG).write_text(json.dumps(config), encoding="utf-8")
    save_file(tensors, folder / TENSORS)


WRONG: dict[str, tuple[Callable[[dict[str, Any], dict[str, Tensor]], object], str]] = {
    "hidden": (lambda c, t: c.update(hidden_size=576), "hidden_size 576, but the model has 160"),
    "kv heads": (lambda c, t: c.update(num_key_value_heads=4), "num_key_value_heads 4, but the model has 2"),
    "head_dim": (lambda c, t: c.update(head_dim=32), "head_dim 32, but the model has 64"),
    "heads": (lambda c, t: c.update(num_attention_heads=3), "3 heads are no multiple of 2"),
    "no size": (lambda c, t: c.pop("intermediate_size"), "intermediate_size is None"),
    "no number": (lambda c, t: c.update(intermediate_size="448"), "intermediate_size is '448'"),
    "negative": (lambda c, t: c.update(hidden_size=-160), "hidden_size is -160"),
    "truth": (lambda c, t: c.update(num_attention_heads=True), "num_attention_heads is True"),
    "a model": (lambda c, t: c.update(architectures=["LlamaForCausalLM"]), "is no draft head's"),
    "nothing said": (lambda c, t: c.pop("architectures"), "is no draft head's: architectures is None"),
    "missing": (lambda c, t: t.pop("fc.weight"), r"tensor fc.weight \[160, 320\] is missing"),
    "one too many": (lambda c, t: t.update({"fc.bias": torch.zeros(160)}), "unexpected tensor fc.bias"),
    "shape": (
        lambda c, t: t.update({"fc.weight": torch.zeros(160, 160)}),
        r"fc.weight has shape \[160, 160\], but the configuration says \[160, 320\]",
    ),
    "other size": (
        lambda c, t: c.update(intermediate_size=64),
        r"down_proj.weight .*\[160, 448\].*\[160, 64\]",
    ),
    "not a number": (lambda c, t: t["fc.weight"][0, 0].fill_(torch.nan), "fc.weight .* not finite"),
    "infinite": (
        lambda c, t: t["hidden_norm.weight"][3].fill_(torch.inf),
        "hidden_norm.weight .* not finite",
    ),
    "integers": (lambda c, t: t.update({"fc.weight": t["fc.weight"].char()}), "fc.weight is torch.int8"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_head_that_does_not_fit_is_refused(tmp_path: Path, target: LlamaModel, name: str) -> None:
    change, sentence = WRONG[name]
    rewrite(tmp_path, change)
    with pytest.raises(ValueError, match=sentence):
        DraftHead.load(tmp_path, target)


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        (CONFIG, None, "no config.json"),
        (CONFIG, b"", "is no JSON"),
        (CONFIG, b"\xff\xfe", "is no JSON"),
        (CONFIG, b"[" * 100_000, "is no JSON"),
        (CONFIG, b"[1]", "is no draft head's: architectures is 'list'"),
        (TENSORS, None, "no weights"),
        (TENSORS, b"", "cannot be read"),
        (TENSORS, b"PK\x03\x04 a stranger's file", "cannot be read"),
        (TENSORS, (DRAFT_HEAD / TENSORS).read_bytes()[:-100], "cannot be read"),
    ],
)
def test_foreign_and_truncated_files_are_refused(
    tmp_path: Path, target: LlamaModel, name: str, content: bytes | None, sentence: str
) -> None:
    rewrite(tmp_path, lambda config, tensors: None)
    if content is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=sentence):
        DraftHead.load(tmp_path, target)


def test_what_is_no_directory_is_refused(tmp_path: Path, target: LlamaModel) -> None:
    with pytest.raises(ValueError, match=r"no draft head in .*absent: there is no such directory"):
        DraftHead.load(tmp_path / "absent", target)
    with pytest.raises(ValueError, match="None"):
        DraftHead.load(None, target)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"is no draft head's: architectures is .*LlamaForCausalLM"):
        DraftHead.load(WEIGHTS, target)


def test_another_models_size_is_named(target: LlamaModel) -> None:
    """The shipped head, for a model of another size."""
    other = LlamaModel.__new__(LlamaModel)
    other.config = replace(target.config, hidden=576, heads=9, kv_heads=3)
    with pytest.raises(ValueError, match="hidden_size 160, but the model has 576"):
        DraftHead.load(DRAFT_HEAD, other)


# --------------------------------------------------------------------------------------------
# The shipped head, and how it is made


def test_shipped_files() -> None:
    assert {path.name for path in DRAFT_HEAD.iterdir()} == {CONFIG, TENSORS}
    assert sum(path.stat().st_size for path in DRAFT_HEAD.iterdir()) < 1_500_000
    assert {tensor.dtype for tensor in load_file(DRAFT_HEAD / TENSORS).values()} == {torch.float16}
    config = json.loads((DRAFT_HEAD / CONFIG).read_text(encoding="utf-8"))
    assert config == train_head.head_config(train.Shape())
    assert config["architectures"] == [ARCHITECTURE] and set(SIZES) < set(config)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_head_takes_the_type_of_its_model(dtype: torch.dtype) -> None:
    model = load_model(WEIGHTS, dtype, "cpu")
    head = DraftHead.load(str(DRAFT_HEAD), model)
    tokens, hidden = torch.arange(3, 13), torch.ones(9, 160, dtype=dtype)
    features = Paged(model, head).forward(tokens, hidden, 0, 9)
    assert head.fc.dtype == features.dtype == dtype and head.logits(features).dtype == torch.float32


@pytest.mark.slow
def test_score_gates(pupil: score.Pupil) -> None:
    """The shipped head passes its gates on a few prompts of each exam."""
    scores = score.draft_scores(pupil, WEIGHTS, DRAFT_HEAD, 2)
    assert all(each.passed for each in scores), scores
    assert sum(each.gate is not None for each in scores) >= 2


def test_three_steps_of_training_export_a_head(tmp_path: Path) -> None:
    """Training runs, the same for the same seed, and the engine's head loads its files."""
    phases = (train_head.HeadPhase(2, 2, 32, 1), train_head.HeadPhase(1, 2, 32, 3))
    course = train_head.HeadCourse(40, phases, warmup=1, prompt_weight=0.0)
    losses = [train_head.train_head(WEIGHTS, tmp_path / name, course, seed=1) for name in "ab"]
    assert losses[0] == losses[1] and 0 < losses[0] < 20
    made = [(tmp_path / name / TENSORS).read_bytes() for name in "ab"]
    assert made[0] == made[1]
    head = DraftHead.load(tmp_path / "a", load_model(WEIGHTS, torch.float32, "cpu"))
    assert head.num_parameters == 389_760


def test_what_cannot_be_trained_is_said_before_it_is_tried(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line and code 2, and no lesson was written yet: a course takes minutes."""

    def written(*_: Any) -> Any:
        raise AssertionError("lessons were written")

    for module in (train, train_head):
        monkeypatch.setattr(module, "write_lessons", written)
    monkeypatch.setattr(train, "train_tokenizer", written)
    (tmp_path / "file").write_text("")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / CONFIG).write_bytes((WEIGHTS / CONFIG).read_bytes())
    (tmp_path / "broken" / TENSORS).write_bytes(b"none")
    out, a_file = str(tmp_path / "out"), str(tmp_path / "file")
    for words, sentence in (
        (["--draft-head", a_file], "file"),
        (["--draft-head", f"{a_file}/out"], "file"),
        (["--out", a_file], "file"),
        (["--draft-head", out, "--model", str(tmp_path / "none")], "none"),
        (["--draft-head", out, "--model", str(DRAFT_HEAD)], "does not say vocab_size"),
        (["--draft-head", out, "--model", str(tmp_path / "broken")], "does not fit Student"),
        (["--draft-head", out, "--device", "cuda"], "--device cuda goes with --out"),
        (["--draft-head", out, "--preset", "cpu"], "--preset cpu goes with --out"),
        (["--out", out, "--model", "x"], "--model x goes with --draft-head"),
    ):
        assert train.main(words) == 2
        said = capsys.readouterr().err.strip()
        assert sentence in said and "\n" not in said, said
        assert not (tmp_path / "out").exists()
    for words in (["--out", out, "--steps", "0"], ["--draft-head", out, "--workers", "0"]):
        with pytest.raises(SystemExit, match="2"):
            train.main(words)


def test_a_head_of_something_else_is_not_scored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for head in (tmp_path, WEIGHTS):
        assert score.main(["--count", "1", "--draft-head", str(head)]) == 2
        assert str(head) in capsys.readouterr().err
