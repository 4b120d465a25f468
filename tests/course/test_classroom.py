"""The classroom Llama: its lessons, its files, its scores, and its training."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch

from minirad.model.classroom import WEIGHTS, corpus, score, train


@pytest.fixture(scope="module")
def pupil() -> score.Pupil:
    """The committed model."""
    return score.Pupil(WEIGHTS)


def test_committed_directory() -> None:
    """The files are those of a small Hugging Face Llama."""
    names = {path.name for path in WEIGHTS.iterdir()}
    assert names == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert sum(path.stat().st_size for path in WEIGHTS.iterdir()) < 3_500_000
    config = json.loads((WEIGHTS / "config.json").read_text(encoding="utf-8"))
    assert config == train.model_config(train.PRESETS["gpu"].shape)
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["head_dim"] == 64 and config["tie_word_embeddings"] is True
    assert config["num_attention_heads"] == 4 and config["num_key_value_heads"] == 2
    assert config["bos_token_id"] is None and config["eos_token_id"] == 2


def test_parameters_and_type(pupil: score.Pupil) -> None:
    """The file holds float16; the model is as small as its card says."""
    from safetensors import safe_open

    with safe_open(WEIGHTS / "model.safetensors", framework="pt") as file:
        types = {file.get_tensor(key).dtype for key in file.keys()}  # noqa: SIM118
    assert types == {torch.float16}
    assert pupil.parameters == 1_516_960
    assert pupil.model.config.eos_token_id == 2 and pupil.model.config.pad_token_id == 0


@pytest.mark.parametrize(
    "text",
    [
        "Hello",
        "12 + 345 = 357.",
        "  spaces \n\n and\ttabs ",
        "Grüße, 你好, 😀👩‍🚀!",
        "<|im_start|>user\nHi<|im_end|>\n<|endoftext|>",
    ],
)
def test_tokenizer_round_trip(pupil: score.Pupil, text: str) -> None:
    """Any text comes back; nothing is put before or behind it."""
    ids = pupil.tokenizer(text).input_ids
    assert pupil.tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text
    assert max(ids) < 1024


def test_tokenizer_units(pupil: score.Pupil) -> None:
    """Special texts are one token each, and so is every digit and every name."""
    tokenizer = pupil.tokenizer
    assert [tokenizer(text).input_ids for text in train.SPECIAL_TOKENS] == [[0], [1], [2]]
    assert len(tokenizer("2026").input_ids) == 4
    for word in (*corpus.NAMES, *corpus.THINGS, *corpus.ANIMALS, *corpus.COLORS):
        assert len(tokenizer(f" {word}").input_ids) == 1, word


def test_tokens_of_a_prefix_are_a_prefix_of_the_tokens(pupil: score.Pupil) -> None:
    """Sharing a text up to a turn or a question shares all of its tokens."""
    examples = corpus.few_shot_examples(4, random.Random(1))
    header = corpus.few_shot_header(examples)
    question = corpus.few_shot_question(5, "Name an animal.")
    chat = corpus.chat_text(corpus.chat_messages(random.Random(2), 4, corpus.AGENT_PROMPT))
    ask = corpus.chat_text([corpus.message("user", "Hello")], add_generation_prompt=True)
    for first, second in ((header, question), (chat, ask)):
        parts = [pupil.tokenizer(text).input_ids for text in (first, second)]
        assert pupil.tokenizer(first + second).input_ids == parts[0] + parts[1]


@pytest.mark.parametrize("add_generation_prompt", [False, True])
def test_chat_template_is_what_the_lessons_say(pupil: score.Pupil, add_generation_prompt: bool) -> None:
    """The template renders the lessons' own text, token for token, and adds no system prompt."""
    for system in (corpus.SYSTEM_PROMPT, corpus.AGENT_PROMPT, None):
        messages = corpus.chat_messages(random.Random(3), 3, system)
        options = {"add_generation_prompt": add_generation_prompt}
        text = corpus.chat_text(messages, **options)
        rendered = pupil.tokenizer.apply_chat_template(messages, tokenize=False, **options)
        assert rendered == text
        ids = pupil.tokenizer.apply_chat_template(messages, return_dict=True, **options)
        assert ids["input_ids"] == pupil.tokenizer(text).input_ids


def test_corpus_is_seeded() -> None:
    """A seed gives the same documents again, another seed others."""
    assert list(corpus.documents(5, 60)) == list(corpus.documents(5, 60))
    assert list(corpus.documents(5, 60)) != list(corpus.documents(6, 60))


def test_lessons_do_not_depend_on_workers() -> None:
    """One process and two write the same tokens."""
    tokenizer = train.train_tokenizer(corpus.documents(0, 100), 400)
    course = train.Course(50, (train.Phase(1, 1, 8),))
    one, two = (train.write_lessons(tokenizer, course, 0, workers, chunk=20) for workers in (1, 2))
    assert torch.equal(one.tokens, two.tokens) and torch.equal(one.weights, two.weights)


def test_loss_weights() -> None:
    """Replies and plain text weigh 1, everything else less."""
    assistant, word = 7, 9
    chat = [0, 1, 5, word, 2, word, 1, assistant, word, 2, word]
    plain = [0, word, word]
    weights = train.loss_weights(torch.tensor(chat + plain), assistant, 0.2)
    expected = torch.tensor([0.2] * 6 + [1.0] * 8)
    assert torch.equal(weights, expected)


def test_held_out_sums_are_never_taught() -> None:
    """No lesson asks for a sum that the examination keeps for itself."""
    rng = random.Random(0)
    for _ in range(500):
        first, _, second = corpus.sum_turn(rng).user.rstrip("?").split()[2:]
        assert not corpus.is_held_out(int(first), int(second))
        first, _, second = corpus.sum_turn(rng, held_out=True).user.rstrip("?").split()[2:]
        assert corpus.is_held_out(int(first), int(second))


def test_prompts_have_the_sizes_that_demonstrations_count_on(pupil: score.Pupil) -> None:
    """Token counts of the building blocks."""

    def size(*messages: dict[str, str]) -> int:
        return len(pupil.tokenizer(corpus.chat_text(messages)).input_ids)

    assert size(corpus.message("system", corpus.SYSTEM_PROMPT)) == 11
    assert 250 <= size(corpus.message("system", corpus.AGENT_PROMPT)) <= 320
    assert 45 <= len(pupil.tokenizer(corpus.ABILITIES_REPLY).input_ids) <= 60
    rng = random.Random(4)
    for _ in range(50):
        turn = corpus.problem_turn(rng)
        both = (corpus.message("user", turn.user), corpus.message("assistant", turn.reply))
        assert 150 <= size(*both) <= 185


@pytest.mark.parametrize(
    "exam", [exam for exam in score.EXAMS if exam.gate is not None], ids=lambda exam: exam.name
)
def test_score_gates(pupil: score.Pupil, exam: score.Exam) -> None:
    """The committed model passes every gate on a few questions."""
    result = score.sit(pupil, exam, 20)
    assert result.passed, result


def test_sampling_differs(pupil: score.Pupil) -> None:
    """At temperature 1 stories and animals differ."""
    for result in score.diversity(pupil):
        assert result.passed, result


def test_few_shot_answer_ends_with_its_line(pupil: score.Pupil) -> None:
    """After an answer the model ends the line, so that a stop string works, and asks on."""
    header = corpus.few_shot_header([("What is the capital of Italy?", "Rome")])
    prompt = header + corpus.few_shot_question(2, "What is the capital of France?")
    batch = pupil.tokenizer(prompt, return_tensors="pt")
    tokens = pupil.model.generate(**batch, max_new_tokens=14, do_sample=False)
    text = pupil.tokenizer.decode(tokens[0, batch.input_ids.shape[1] :])
    assert text.startswith(" Paris.\n\nQuestion 3:")


def test_three_steps_of_training_export_a_model(tmp_path: Path) -> None:
    """Training runs, and transformers compute from its files what the student computes."""
    phases = (train.Phase(2, 2, 32), train.Phase(1, 1, 64))
    shape = train.Shape(vocab_size=400, hidden_size=32, intermediate_size=64, num_hidden_layers=2)
    loss = train.train(train.Course(40, phases, warmup=1, shape=shape), tmp_path, "cpu", seed=1)
    assert 0 < loss < 10
    made = score.Pupil(tmp_path)
    from safetensors.torch import load_file

    student = train.Student(shape)
    tensors = load_file(tmp_path / "model.safetensors")
    student.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    ids = made.tokens("<|im_start|>user\nHello<|im_end|>\n", 64)
    with torch.no_grad():
        difference = (made.model(ids).logits - student(ids)).abs().max()
    assert difference < 1e-4


def test_presets_shrink() -> None:
    """`--steps` keeps every phase."""
    small = train.PRESETS["cpu"].with_steps(6)
    assert len(small.phases) == 3 and all(phase.steps >= 1 for phase in small.phases)
    rates = [small.rate(step) for step in range(small.steps)]
    assert max(rates) <= small.peak_rate and rates[-1] < rates[1]
