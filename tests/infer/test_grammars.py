"""Answers that follow a grammar: its mask, by any tokenizer, and requests of a model that has no idea of it."""

from __future__ import annotations

import copy
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from laconic.errors import ConfigError
from laconic.infer.grammars import GrammarMask, grammar_tokenizer, make_grammar
from laconic.infer.sampling import Sampling
from laconic.infer.tokenizer import ByteTokenizer, HuggingFaceTokenizer, TextTokenizer
from laconic.infer.transformers_seam import load_attention_model
from tests.infer.alone import Asked
from tests.infer.models import generated, make
from tests.infer.test_detokenizer import tokenizer

pytest.importorskip("llguidance")
EOS = 256
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "ok": {"type": "boolean"}, "n": {"type": "integer"}},
    "required": ["name", "ok", "n"],
    "additionalProperties": False,
}


def follow(mask: GrammarMask, ends: set[int], size: int, limit: int = 400, seed: int = 0) -> list[int]:
    """Draw what the mask allows, up to the end of an answer, by logits of a model that knows nothing."""
    generator, tokens = torch.Generator().manual_seed(seed), [9, 9]
    for _ in range(limit):
        scores = mask(torch.tensor([tokens]), torch.rand((1, size), generator=generator))
        tokens.append(int(scores.argmax()))
        if tokens[-1] in ends:
            return tokens[2:-1]
    raise AssertionError(f"no end: {tokens}")


@pytest.mark.parametrize("kind", ["bytes", "Llama 2", "byte-level BPE"])
def test_answers_are_of_the_schema(kind: str) -> None:
    ours: TextTokenizer = ByteTokenizer() if kind == "bytes" else HuggingFaceTokenizer(tokenizer(kind, False))
    size = len(ours.vocabulary()[0])
    ends = {EOS} if kind == "bytes" else {0}
    known = grammar_tokenizer(ours, sorted(ends))
    for seed in range(5):
        mask = GrammarMask(known, make_grammar("json_schema", SCHEMA), 2)
        found = json.loads(ours.decode(follow(mask, ends, size + 7, seed=seed)))  # logits are padded behind
        assert set(found) == {"name", "ok", "n"}
        assert isinstance(found["name"], str)
        assert isinstance(found["ok"], bool)
        assert type(found["n"]) is int


@pytest.mark.parametrize(
    "choices", [["yes", "no"], ["a b", "a/b", "[x]", "é\n€", '"q"', "a|b", "^$", "\\d"], ["", "x"]]
)
def test_choices_are_taken_as_they_are(choices: list[str]) -> None:
    known = grammar_tokenizer(ByteTokenizer(), [EOS])
    grammar = make_grammar("choice", choices)
    found = {
        ByteTokenizer().decode(follow(GrammarMask(known, grammar, 2), {EOS}, 257, seed=seed)) for seed in range(60)
    }
    assert found == set(choices)


def test_spaces_at_the_begin_of_an_answer_are_those_of_its_grammar() -> None:
    """As the server decodes it: behind a text, as Llama 2's tokenizer takes a space from the begin of one."""
    original, choices = tokenizer("Llama 2", False), [" one", "one", "  two"]
    ours, begun = HuggingFaceTokenizer(original), original.convert_tokens_to_ids(["two"])
    known, size = grammar_tokenizer(ours, [0]), len(ours.vocabulary()[0])
    found = {
        ours.decode([*begun, *follow(GrammarMask(known, make_grammar("choice", choices), 2), {0}, size, seed=seed)])
        for seed in range(40)
    }
    assert found == {"two" + choice for choice in choices}


def test_regular_expressions_and_lark() -> None:
    known, decode = grammar_tokenizer(ByteTokenizer(), [EOS]), ByteTokenizer().decode
    expression = r"[a-c]{2,4}-\d+(/é)?"
    for seed in range(5):
        text = decode(follow(GrammarMask(known, make_grammar("regex", expression), 2), {EOS}, 257, seed=seed))
        assert re.fullmatch(expression, text)
    lark = 'start: "x" item+\nitem: "(" item* ")"'
    text = decode(follow(GrammarMask(known, make_grammar("lark", lark), 2), {EOS}, 257))
    assert text[0] == "x"
    assert text.count("(") == text.count(")") > 0


@pytest.mark.parametrize(
    ("kind", "value", "message"),
    [
        ("json_schema", "{", "cannot be read"),
        ("json_schema", "[]", "a schema is an object"),
        ("json_schema", {"type": "nonsense"}, "refused: .*nonsense"),
        ("json_schema", {"$ref": "http://a.example/b"}, "refused"),
        ("json_schema", {"enum": []}, "refused"),
        ("regex", "(a", "refused: .*regex"),
        ("regex", "(?=a)", "refused"),
        ("lark", "start: nothing", "refused"),
    ],
)
def test_what_is_no_grammar_is_refused(kind: Any, value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_grammar(kind, value)


def test_a_step_that_is_tried_again_goes_back() -> None:
    """A batch that failed is run again, from a copy of its requests, which may be a token or more behind."""
    known = grammar_tokenizer(ByteTokenizer(), [EOS])
    mask = GrammarMask(known, make_grammar("regex", "ab(c|d)e"), 0)
    scores = torch.zeros((1, 257))

    def allowed(mask: GrammarMask, text: str) -> str:
        found = mask(torch.tensor([list(text.encode())], dtype=torch.long), scores)[0].isfinite().nonzero().flatten()
        return ByteTokenizer().decode([token for token in found.tolist() if token != EOS])

    steps = {"": "a", "a": "b", "ab": "cd", "abc": "e", "abd": "e", "abde": ""}
    for text in ("", "a", "ab", "abc", "ab", "abd", "a", "abde"):
        assert allowed(mask, text) == steps[text]
    copied = copy.deepcopy(mask)
    assert allowed(mask, "a") == "b"
    assert allowed(copied, "abc") == "e"
    assert allowed(mask, "ab") == "cd"


def test_an_answer_ends_by_its_grammar_alone() -> None:
    for options in ({"ignore_eos": True}, {"rules": {"min_new_tokens": 2}}):
        with pytest.raises(ConfigError, match="ends where it allows no more"):
            Sampling(grammar="x", **options)
    with pytest.raises(ConfigError, match="no end-of-sequence token"):
        grammar_tokenizer(ByteTokenizer(), [])


def test_tokens_without_known_bytes_are_refused_and_holes_are_nothing() -> None:
    ours = HuggingFaceTokenizer(tokenizer("Llama 2", False))
    size = len(ours.vocabulary()[0])
    ours._names[size + 2] = "▁more"
    tokens, special = ours.vocabulary()
    assert tokens[size:] == [b"", b"", b" more"]
    assert all(tokens[token] for token in special)
    ours._decoder = None
    with pytest.raises(ConfigError, match="are not known"):
        ours.vocabulary()


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ConfigError, match=r"pip install 'laconic\[grammar\]'"):
        make_grammar("regex", "a")


def test_requests_of_a_batch_follow_their_grammars_and_fail_alone(tmp_path: Path) -> None:
    path = make("llama", tmp_path, num_hidden_layers=1, vocab_size=257, eos_token_id=EOS)
    model: Any = load_attention_model(path, torch.float32, None)
    known = grammar_tokenizer(ByteTokenizer(), [EOS])
    model.generation_config.min_new_tokens = 5  # is not for answers by a grammar
    asked = Asked(model, batch_tokens=32, grammar_tokenizer=lambda: known)
    grammars = {
        "choice": make_grammar("choice", ["yes", "no"]),
        "regex": make_grammar("regex", "[a-c]{3}"),
        "none": None,
        "bad": '{"grammars": [{"lark_grammar": "start: nothing"}]}',
    }
    drawn = {"temperature": 1.0, "top_k": 3, "rules": {"min_p": 0.2}}  # cuts come after the mask, or nothing is left
    for name, grammar in grammars.items():
        asked.add(name, [5, 9, 2], max_new_tokens=8, grammar=grammar)
        asked.add(f"{name}, drawn", [5, 9, 2], max_new_tokens=8, grammar=grammar, **drawn)
    ends = asked.ends(2 * len(grammars))
    asked.requests.stop()
    texts = {name: ByteTokenizer().decode(end.tokens) for name, end in ends.items() if end.error is None}
    for suffix in ("", ", drawn"):
        assert texts[f"choice{suffix}"] in ("yes", "no")
        assert re.fullmatch("[a-c]{3}", texts[f"regex{suffix}"])
    errors = {name: (end.error, end.is_own) for name, end in ends.items() if end.error is not None}
    assert set(errors) == {"bad", "bad, drawn"}
    assert all("the grammar is refused" in str(error) and is_own for error, is_own in errors.values())
    assert ends["none"].tokens == generated(path, [[5, 9, 2]], 8)[0]  # which does not end before
