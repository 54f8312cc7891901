"""Text of tokens as they come: equal to the tokenizer's own decode of all of them, whatever the tokenizer."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from laconic.infer.detokenizer import decoder_stages
from laconic.infer.tokenizer import ByteTokenizer, HuggingFaceTokenizer, TextTokenizer

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = [
    "▁",
    "▁▁",
    "▁one",
    "two",
    "é",
    "▁😀",
    "日",
    "\ufffd",
    "▁.",
    ".",
    "▁'",
    "'",
    "n't",
    "▁n't",
    "s",
    "▁'ve",
    "a▁",
    "<0xZZ>",
]
ODD = [
    *"<|.,!?'",
    "##",
    "##one",
    "one",
    "n't",
    "'s",
    "'m",
    "'ve",
    "'re",
    "do not",
    " ",
    "  ",
    "n",
    "▁x",
    "a</w>",
    "</w>",
]


def vocabulary(symbols: Sequence[str]) -> dict[str, int]:
    return {symbol: number for number, symbol in enumerate(dict.fromkeys(symbols))}


def bpe(symbols: Sequence[str], **options: Any) -> models.Model:
    return models.BPE(vocabulary(symbols), [], **options)


def words(symbols: Sequence[str]) -> models.Model:
    return models.WordLevel(vocabulary(symbols), "<unk>")


def unigram(byte_fallback: bool) -> models.Model:
    symbols = ["<unk>", *(BYTES if byte_fallback else []), *WORDS]
    return models.Unigram([(symbol, -1.0) for symbol in dict.fromkeys(symbols)], 0, byte_fallback)


ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
HARD = ["Ġ", "ĠĠ", "Ġone", "Ã", "©", "ðŁ", "ĺ", "Ģ", "ï¿½", "plain é", "<s>"]


def bytes_and_words() -> models.Model:
    return bpe([*BYTES, *WORDS], byte_fallback=True)


def sequence(*stages: Any) -> Any:
    return decoders.Sequence(list(stages))


SPACE, FUSE, FALLBACK = decoders.Replace("▁", " "), decoders.Fuse(), decoders.ByteFallback()
KINDS: dict[str, tuple[Callable[[], models.Model], Any]] = {
    "byte-level BPE": (lambda: bpe([*ALPHABET, *HARD]), decoders.ByteLevel()),
    "Llama 2": (bytes_and_words, sequence(SPACE, FALLBACK, FUSE, decoders.Strip(" ", 1, 0))),
    "Gemma": (bytes_and_words, sequence(SPACE, FALLBACK, FUSE)),
    "byte fallback and Metaspace": (bytes_and_words, sequence(FALLBACK, decoders.Metaspace())),
    "Unigram": (lambda: unigram(False), decoders.Metaspace()),
    "Unigram with byte fallback": (lambda: unigram(True), sequence(FALLBACK, decoders.Metaspace("▁", "first"))),
    "Metaspace that prepends nothing": (lambda: unigram(False), decoders.Metaspace("▁", "never")),
    "WordPiece": (lambda: words(ODD), decoders.WordPiece()),
    "WordPiece without clean-up": (lambda: words(ODD), decoders.WordPiece("##", cleanup=False)),
    "BPE with an end mark": (lambda: bpe(ODD), decoders.BPEDecoder("</w>")),
    "WordLevel without a decoder": (lambda: words(ODD), None),
    "CTC": (lambda: words(["<pad>", *ODD]), decoders.CTC()),
    "CTC without clean-up": (lambda: words(["<pad>", *ODD]), decoders.CTC("<pad>", "|", False)),
    "strips each token": (lambda: words([f" {word} " for word in ODD]), sequence(decoders.Strip(" ", 2, 1), FUSE)),
    "strips both ends": (lambda: words(["x", *WORDS]), sequence(FUSE, SPACE, decoders.Strip(" ", 2, 3))),
    "replaces across tokens": (lambda: words(["a", "b", "ab", "aab"]), sequence(FUSE, decoders.Replace("aab", "-"))),
    "replaces a pattern in each": (lambda: words(WORDS), sequence(decoders.Replace(Regex("▁+"), " "), FUSE)),
    "replaces a pattern in all": (lambda: words(WORDS), sequence(FUSE, decoders.Replace(Regex("▁+"), " "))),
}


def tokenizer(kind: str, clean_up: bool) -> PreTrainedTokenizerFast:
    model, decoder = KINDS[kind]
    rust = Tokenizer(model())
    if decoder is not None:
        rust.decoder = decoder
    rust.add_special_tokens(["<s>", AddedToken("</s>", rstrip=True)])
    rust.add_tokens(["<think>", AddedToken(" é", lstrip=True)])
    return PreTrainedTokenizerFast(
        tokenizer_object=rust,
        eos_token="</s>",
        clean_up_tokenization_spaces=clean_up,
        clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output=clean_up,
    )


def pieces(tokenizer: TextTokenizer, tokens: Sequence[int]) -> list[str]:
    stream = tokenizer.detokenizer()
    return [*(stream.push(token) for token in tokens), stream.flush()]


@pytest.mark.parametrize("clean_up", [False, True], ids=["as it is", "cleaned up"])
@pytest.mark.parametrize("kind", KINDS)
def test_pieces_are_the_whole_decode(kind: str, clean_up: bool) -> None:
    original = tokenizer(kind, clean_up)
    ours, generator, size = HuggingFaceTokenizer(original), random.Random(kind), len(original)
    special = [original.convert_tokens_to_ids(name) for name in ("<s>", "</s>", "<think>", " é")]
    for number in range(250):
        few = [generator.randrange(size) for _ in range(generator.choice([2, 4, size]))]
        tokens = generator.choices([*few, size + 7, *special], k=generator.randrange(1, 14))
        if kind == "strips both ends":  # of a text that is all spaces the original strips the start twice, and panics
            tokens = [original.convert_tokens_to_ids("x"), *tokens]
        whole = original.decode(tokens, skip_special_tokens=True)
        assert "".join(pieces(ours, tokens)) == whole == ours.decode(tokens), (number, tokens)


@settings(max_examples=300)
@given(st.lists(st.integers(0, 258), max_size=12))
def test_bytes_are_the_whole_decode(tokens: list[int]) -> None:
    assert "".join(pieces(ByteTokenizer(), tokens)) == ByteTokenizer().decode(tokens)


@settings(max_examples=500)
@given(st.lists(st.text(" n't.svre'mx", max_size=3), max_size=8))
def test_clean_up_gives_out_only_what_stays(parts: list[str]) -> None:
    original = tokenizer("Unigram", True)
    (*_, clean) = decoder_stages(None, original.clean_up_tokenization)
    found = "".join([*(out for part in parts for out in clean.push(part)), *clean.flush()])
    assert found == original.clean_up_tokenization("".join(parts))


def test_ids_with_the_same_name_all_have_its_text() -> None:
    rust = Tokenizer(models.Unigram([("<unk>", 0.0), ("▁one", -1.0), ("▁one", -2.0), ("two", -3.0)], 0, False))
    rust.decoder = decoders.Metaspace()
    original = PreTrainedTokenizerFast(tokenizer_object=rust)
    tokens = [1, 2, 3, 2]
    whole = original.decode(tokens)
    assert "".join(pieces(HuggingFaceTokenizer(original), tokens)) == whole == "one onetwo one"


def test_text_comes_as_soon_as_it_is_certain() -> None:
    original = tokenizer("Llama 2", False)
    ids = original.convert_tokens_to_ids
    tokens = [ids(name) for name in ["▁one", "▁", "two", "<0xC3>", "<0xA9>", "<0xC3>", "two", ".", "<0xC3>"]]
    found = pieces(HuggingFaceTokenizer(original), tokens)
    assert found == ["one", " ", "two", "", "", "", "\ufffd\ufffd\ufffdtwo", ".", "", "\ufffd"]
    level = tokenizer("byte-level BPE", False)
    tokens = [level.convert_tokens_to_ids(name) for name in ["Ġone", "ðŁ", "ĺ", "Ģ", "Ã", "©", "Ġone"]]
    assert pieces(HuggingFaceTokenizer(level), tokens) == [" one", "", "", "😀", "", "é", " one", ""]


def test_a_decoder_that_is_not_known_gives_its_text_at_the_end_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    class Reversed(PreTrainedTokenizerFast):
        def _decode(self, *args: Any, **kwargs: Any) -> str:
            return super()._decode(*args, **kwargs)[::-1]

    original = tokenizer("Llama 2", False)
    ours = HuggingFaceTokenizer(Reversed(tokenizer_object=original.backend_tokenizer))
    tokens = [original.convert_tokens_to_ids(name) for name in ["▁one", "two", "<0xC3>", "<0xA9>"]]
    assert pieces(ours, tokens) == [*[""] * 4, "éowteno"]
    assert re.search("at its end.*Reversed", caplog.text)
    caplog.clear()
    HuggingFaceTokenizer(tokenizer("replaces a pattern in all", False))
    assert re.search("at its end.*Replace", caplog.text)


@pytest.mark.parametrize(
    ("kind", "name", "expected"),
    [
        ("byte-level BPE", "Ġone", b" one"),
        ("byte-level BPE", "Ã", b"\xc3"),
        ("byte-level BPE", "plain é", "plain é".encode()),
        ("Llama 2", "<0xC3>", b"\xc3"),
        ("Llama 2", "▁one", b" one"),
        ("Llama 2", "</s>", b"</s>"),
        ("Unigram", "▁one", b" one"),
        ("WordPiece", "one", b" one"),
        ("WordPiece", "##one", b"one"),
        ("BPE with an end mark", "a</w>", b"a"),
        ("CTC", "|", b" "),
    ],
)
def test_bytes_of_a_token_amid_a_text(kind: str, name: str, expected: bytes) -> None:
    original = tokenizer(kind, False)
    ours = HuggingFaceTokenizer(original)
    assert ours.token_bytes(original.convert_tokens_to_ids(name)) == expected
    assert ours.token_bytes(10**6) == b"token_id:1000000"
