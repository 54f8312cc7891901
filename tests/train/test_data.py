"""From text to batches: tokenizers, sources, token files, split, windows, sampler."""

import codecs
import errno
import hashlib
import json
import multiprocessing
import os
import sysconfig
from collections.abc import Iterator
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from laconic.errors import DataError
from laconic.train.config.schema import DataConfig
from laconic.train.data import corpus, sources
from laconic.train.data.corpus import TokenCorpus, TokenDataset, TokenStream, check_vocab, prepare
from laconic.train.data.sampler import global_indices, sample_id
from laconic.train.data.sources import find_files, read_documents, standard_library_files
from laconic.train.data.token_file import TokenFile, TokenFileWriter
from laconic.train.data.tokenizer import BytesTokenizer, JsonTokenizer, bytes_per_token, load_tokenizer
from tests.distributed.processes import run_ranks
from tests.patience import patient

texts = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), max_size=200)


def config_for(folder: Path, **fields: object) -> DataConfig:
    return DataConfig(**{"paths": (str(folder / "corpus"),), "cache_dir": str(folder / "cache"), **fields})  # type: ignore[arg-type]


def corpus_of(folder: Path, documents: dict[str, str], **fields: object) -> TokenCorpus:
    (folder / "corpus").mkdir(exist_ok=True)
    for name, text in documents.items():
        (folder / "corpus" / name).write_text(text, encoding="utf-8")
    return prepare(config_for(folder, **fields))


def all_tokens(stream: TokenStream) -> list[int]:
    return stream.read(0, len(stream)).tolist()


@pytest.fixture
def json_tokenizer(tmp_path: Path) -> Path:
    """A small byte-level BPE tokenizer.json."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>", "<stop>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the cat sat on the mat, the end"] * 10, trainer)
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    return path


# Tokenizers


@given(text=texts)
def test_bytes_tokenizer_round_trips(text: str) -> None:
    ids = BytesTokenizer().encode(text)
    assert ids.dtype == np.uint16
    assert BytesTokenizer().decode(np.append(ids, 256)) == text


def test_json_tokenizer_gives_the_librarys_ids(json_tokenizer: Path) -> None:
    from tokenizers import Tokenizer

    ours, theirs = load_tokenizer(str(json_tokenizer)), Tokenizer.from_file(str(json_tokenizer))
    assert isinstance(ours, JsonTokenizer)
    text = "the cat sat on the mat\nand on a hat"
    assert ours.encode(text).tolist() == theirs.encode(text).ids
    assert ours.encode(text).dtype == np.uint16
    assert (ours.vocab_size, ours.end_of_document) == (theirs.get_vocab_size(), 0)
    assert load_tokenizer(str(json_tokenizer.parent)).fingerprint == ours.fingerprint


def test_bytes_of_a_token_are_those_of_its_text(json_tokenizer: Path) -> None:
    from tokenizers import Tokenizer, decoders

    text = "the quick brown fox, the lazy dog\n" * 20 + "\N{GREEK SMALL LETTER ALPHA}"
    # Without a decoder the library puts a space between any two tokens.
    assert bytes_per_token(load_tokenizer(str(json_tokenizer)), [70, 71]) is None
    made = Tokenizer.from_file(str(json_tokenizer))
    made.decoder = decoders.ByteLevel()
    made.save(str(json_tokenizer))
    for tokenizer in (load_tokenizer("bytes"), load_tokenizer(str(json_tokenizer))):
        ids = [*tokenizer.encode(text), tokenizer.end_of_document]
        assert bytes_per_token(tokenizer, ids) == pytest.approx(len(text.encode()) / len(ids), rel=1e-12)


def test_end_of_document_comes_from_config_then_neighbour_then_known_names(json_tokenizer: Path) -> None:
    assert load_tokenizer(str(json_tokenizer), "<stop>").end_of_document == 1
    neighbour = json_tokenizer.parent / "tokenizer_config.json"
    for declared in ("<stop>", {"content": "<stop>"}):
        neighbour.write_text(json.dumps({"eos_token": declared}))
        assert load_tokenizer(str(json_tokenizer)).end_of_document == 1
    neighbour.write_text("[not what it should be")
    assert load_tokenizer(str(json_tokenizer)).end_of_document == 0
    with pytest.raises(DataError, match=r"data.end_of_document is '<nope>', which the tokenizer .* does not know"):
        load_tokenizer(str(json_tokenizer), "<nope>")
    with pytest.raises(DataError, match="the bytes tokenizer has its own"):
        load_tokenizer("bytes", "<stop>")


def test_tokenizer_without_an_end_is_refused(json_tokenizer: Path) -> None:
    json_tokenizer.write_text(json_tokenizer.read_text().replace("<|endoftext|>", "<other>"))
    with pytest.raises(DataError, match=r"has no token known to end a document; name one .* in data.end_of_document"):
        load_tokenizer(str(json_tokenizer))


def test_what_is_no_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data.tokenizer is 'absent', but it must be \"bytes\" or the path"):
        load_tokenizer("absent")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=r"which is not a tokenizer.json"):
        load_tokenizer(str(tmp_path))


# Sources


def test_files_are_sorted_once_each_and_filtered(tmp_path: Path) -> None:
    for name in ("b.txt", "a.py", "sub/c.md", "sub/d.png", ".hidden/e.txt", ".f.txt", "odd.xyz"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    found = find_files([str(tmp_path), str(tmp_path / "*.txt"), str(tmp_path / "odd.xyz")])
    assert [file.relative_to(tmp_path).as_posix() for file in found] == ["a.py", "b.txt", "odd.xyz", "sub/c.md"]
    deep = find_files([str(tmp_path / "**" / "*.md")])
    assert [file.name for file in deep] == ["c.md"]


def test_folders_behind_links_are_read_once(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "a.txt").write_text("a")
    (tmp_path / "elsewhere" / "back").symlink_to(tmp_path / "corpus")
    (tmp_path / "corpus").mkdir()
    for name in ("one", "two"):
        (tmp_path / "corpus" / name).symlink_to(tmp_path / "elsewhere")
    found = find_files([str(tmp_path / "corpus")])
    assert [file.relative_to(tmp_path).as_posix() for file in found] == ["corpus/one/a.txt"]


def test_a_folder_that_cannot_be_listed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "locked").mkdir()
    scandir = os.scandir

    def refusing(folder: str) -> Any:
        if str(folder).endswith("locked"):
            raise PermissionError(errno.EACCES, "Permission denied", folder)
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", refusing)
    with pytest.raises(DataError, match=r"cannot read .*locked: Permission denied"):
        find_files([str(tmp_path)])


def test_standard_library_is_real_text_without_its_tests() -> None:
    files = standard_library_files()
    assert len(files) > 300
    inside = [file.relative_to(sysconfig.get_path("stdlib")).parts for file in files]
    assert not any("test" in parts or "site-packages" in parts for parts in inside)
    assert 4e6 < sum(file.stat().st_size for file in files) < 4e7


def test_missing_and_empty_paths_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data.paths names .*absent, which does not exist"):
        find_files([str(tmp_path / "absent")])
    with pytest.raises(DataError, match=r"has the pattern '.*\*.txt', which matches no file"):
        find_files([str(tmp_path / "*.txt")])
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    with pytest.raises(DataError, match=r"holds no text file .* use a glob such as"):
        find_files([str(tmp_path)])


@given(text=texts, piece_nbytes=st.integers(1, 64))
def test_text_is_read_whole_in_any_pieces(
    text: str, piece_nbytes: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("text") / "a.txt"
    path.write_bytes(text.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "_PIECE_NBYTES", piece_nbytes)
        pieces = list(read_documents(path, "text"))
    assert "".join(piece for piece, _ in pieces) == text
    assert [ends for _, ends in pieces] == [False] * (len(pieces) - 1) + [True]


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_a_byte_order_mark_is_no_text(name: str, tmp_path: Path) -> None:
    text = '{"text": "abc"}\n'
    (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + text.encode())
    read = "".join(piece for piece, _ in read_documents(tmp_path / name, "text"))
    assert read == ("abc" if name == "a.jsonl" else text)
    (tmp_path / name).write_bytes(b"\xef\xbb\xbfa\xff")
    with pytest.raises(DataError, match="at offset 4"):
        list(read_documents(tmp_path / name, "text"))


@pytest.mark.parametrize("piece_nbytes", [1, 3, 4, 1 << 20])
@pytest.mark.parametrize(
    ("content", "offset", "what"),
    [
        (b"ab\0cd", 2, "a NUL byte"),
        (b"caf\xc3\xa9 \xff", 6, "not valid UTF-8"),
        (b"abcd\xe2\x82", 4, "not valid UTF-8"),
    ],
)
def test_what_is_not_text_is_named_with_its_offset(
    content: bytes, offset: int, what: str, piece_nbytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "_PIECE_NBYTES", piece_nbytes)
    (tmp_path / "bad.txt").write_bytes(content)
    with pytest.raises(DataError, match=rf"bad.txt is not text: .*{what} at offset {offset}"):
        list(read_documents(tmp_path / "bad.txt", "text"))


def test_jsonl_gives_a_document_per_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one\\ntwo", "id": 1}\n\n{"text": ""}\n{"text": "three"}')
    assert list(read_documents(path, "text")) == [("one\ntwo", True), ("", True), ("three", True)]
    path.write_text(r'{"text": "\ud83d\ude00 \\ud83d"}')
    assert list(read_documents(path, "text")) == [("\N{GRINNING FACE} \\ud83d", True)]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"txt": "a"}', r"a.jsonl:2 has no string under 'text' \(its keys are \['txt'\]\); set data.text_key"),
        (b'{"text": 3}', r"a.jsonl:2 has no string under 'text'"),
        (b"[1]", r"a.jsonl:2 has no string under 'text' \(it is no object\)"),
        (b'{"text": ', r"a.jsonl:2 is not valid JSON"),
        (b'{"text": "one", "text": "two"}', r"a.jsonl:2 is not valid JSON: 'text' comes twice"),
        (b"\xff", r"a.jsonl is not text: .* at offset 14"),
        (b"[" * 200_000, r"a.jsonl:2 is nested too deeply"),
        (b'{"text": "\\uD83D"}', r"a.jsonl:2 has half of a surrogate pair"),
    ],
)
def test_bad_jsonl_line_is_named(line: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "k"}\n' + line)
    with pytest.raises(DataError, match=message):
        list(read_documents(tmp_path / "a.jsonl", "text"))


def test_keys_that_nobody_reads_may_hold_anything(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "k", "title": "\\uD83D"}\n')
    assert list(read_documents(tmp_path / "a.jsonl", "text")) == [("k", True)]


# Token files


@pytest.fixture
def stem(tmp_path: Path) -> Path:
    """A sound token file of two documents, ab and cde."""
    with TokenFileWriter(tmp_path / "tokens", BytesTokenizer(), b"s" * 32) as writer:
        for text, ends in (("a", False), ("b", True), ("", True), ("cde", True)):
            writer.add(BytesTokenizer().encode(text), ends_document=ends)
    return tmp_path / "tokens"


def test_token_file_reads_back(stem: Path) -> None:
    file = TokenFile.open(stem)
    assert file.tokens.tolist() == [97, 98, 256, 99, 100, 101, 256]
    assert file.offsets.tolist() == [0, 3, 7]
    assert (file.max_token, file.vocab_size, file.end_of_document, file.source) == (256, 257, 256, b"s" * 32)
    assert sorted(path.name for path in stem.parent.iterdir()) == ["tokens.bin", "tokens.idx"]


def test_token_file_has_the_documented_bytes(stem: Path) -> None:
    index = (stem.parent / "tokens.idx").read_bytes()
    assert index[:16] == b"LACTOKEN" + bytes([1, 0, 0, 0, 2, 0, 0, 0])
    assert np.frombuffer(index, "<u8", 5, 16).tolist() == [2, 7, 256, 257, 256]
    assert np.frombuffer(index, "<u8", 3, 152).tolist() == [0, 3, 7]
    assert len(index) == 152 + 8 * 3 + 32
    assert (stem.parent / "tokens.bin").read_bytes() == np.array([97, 98, 256, 99, 100, 101, 256], "<u2").tobytes()


@pytest.mark.parametrize("suffix", ["bin", "idx"])
def test_every_flipped_bit_and_every_cut_is_refused(stem: Path, suffix: str) -> None:
    path = stem.with_name(f"tokens.{suffix}")
    whole = path.read_bytes()
    damaged = [whole[:length] for length in range(len(whole))]
    for position in range(8 * len(whole)):
        flipped = bytearray(whole)
        flipped[position // 8] ^= 1 << position % 8
        damaged.append(bytes(flipped))
    for content in damaged:
        path.write_bytes(content)
        with pytest.raises(DataError, match=rf"tokens\.{suffix} (is|has version).*to tokenize again"):
            TokenFile.open(stem)
    path.write_bytes(whole)
    TokenFile.open(stem)


def test_missing_half_is_refused(stem: Path) -> None:
    stem.with_name("tokens.bin").unlink()
    with pytest.raises(DataError, match=r"cannot read the token file .*tokens.bin: No such file"):
        TokenFile.open(stem)


def test_failure_while_writing_leaves_nothing(tmp_path: Path) -> None:
    def fail() -> None:
        with TokenFileWriter(tmp_path / "tokens", BytesTokenizer(), b"s" * 32) as writer:
            writer.add(BytesTokenizer().encode("abc"), ends_document=True)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert not list(tmp_path.iterdir())


# Prepared corpora


def test_documents_follow_each_other_with_an_end(tmp_path: Path) -> None:
    corpus = corpus_of(tmp_path, {"b.txt": "two", "a.txt": "one", "c.txt": ""}, validation_fraction=0.0)
    assert all_tokens(corpus.train) == [*b"one", 256, *b"two", 256]
    assert (corpus.num_tokens, corpus.max_token, len(corpus.validation)) == (8, 256, 0)


def test_wide_vocabulary_is_kept_in_four_bytes(tmp_path: Path, json_tokenizer: Path) -> None:
    layout = json.loads(json_tokenizer.read_text())
    layout["added_tokens"].append({**layout["added_tokens"][0], "id": 70_000, "content": "<far>"})
    layout["model"]["vocab"]["<far>"] = 70_000
    json_tokenizer.write_text(json.dumps(layout))
    corpus = corpus_of(tmp_path, {"a.txt": "the<far>cat"}, tokenizer=str(json_tokenizer), validation_fraction=0.0)
    assert (corpus.vocab_size, corpus.max_token) == (70_001, 70_000)
    assert 70_000 in all_tokens(corpus.train)


def test_files_without_a_byte_order_mark_keep_their_cache(tmp_path: Path) -> None:
    """Of earlier releases, which took a mark for text."""
    tokenizer, file, keys = load_tokenizer("bytes"), tmp_path / "a.txt", []
    for content in (b"abcabc", codecs.BOM_UTF8 + b"abc"):
        file.write_bytes(content)
        os.utime(file, ns=(7, 7))
        sha = hashlib.sha256(json.dumps([1, tokenizer.fingerprint.hex(), "text"]).encode())
        sha.update(json.dumps([str(file), 6, 7]).encode())
        keys.append(corpus._source_fingerprint([file], tokenizer, "text") == sha.digest())
    assert keys == [True, False]


def test_cache_is_used_until_something_changes(tmp_path: Path, json_tokenizer: Path) -> None:
    def token_files() -> set[str]:
        return {path.name for path in (tmp_path / "cache").glob("*.idx")}

    first = corpus_of(tmp_path, {"a.txt": "some text"})
    names = token_files()
    assert corpus_of(tmp_path, {}).fingerprint == first.fingerprint
    assert corpus_of(tmp_path, {}, validation_fraction=0.5).fingerprint != first.fingerprint
    assert token_files() == names
    assert corpus_of(tmp_path, {"a.txt": "other words"}).fingerprint != first.fingerprint
    assert len(token_files()) == 2
    corpus_of(tmp_path, {}, tokenizer=str(json_tokenizer))
    assert len(token_files()) == 3


def test_files_that_change_while_they_are_tokenized_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def growing(path: Path, text_key: str) -> Iterator[tuple[str, bool]]:
        yield from read_documents(path, text_key)
        path.write_text(path.read_text() + " and more")

    monkeypatch.setattr(corpus, "read_documents", growing)
    with pytest.raises(DataError, match=r"data\.paths changed while they were tokenized"):
        corpus_of(tmp_path, {"a.txt": "some text"})
    assert not list((tmp_path / "cache").glob("*.idx"))


def test_a_key_of_jsonl_lines_is_refused_without_such_files(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.text_key is 'body', but data\.paths names no \.jsonl file"):
        corpus_of(tmp_path, {"a.txt": "some text"}, text_key="body")
    corpus_of(tmp_path, {"b.jsonl": '{"body": "more"}'}, text_key="body")


def _prepare_at_once(rank: int, folder: Path, together: Barrier) -> None:
    together.wait(patient(60))  # all have imported everything: now they race
    (folder / f"{rank}.txt").write_text(prepare(config_for(folder)).fingerprint)


def test_processes_share_one_tokenization(tmp_path: Path) -> None:
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "a.txt").write_text("line\n" * 400_000)
    run_ranks(_prepare_at_once, (tmp_path, multiprocessing.get_context("forkserver").Barrier(3)), 3)
    fingerprints = {(tmp_path / f"{rank}.txt").read_text() for rank in range(3)}
    assert fingerprints == {prepare(config_for(tmp_path)).fingerprint}
    assert sorted(path.suffix for path in (tmp_path / "cache").iterdir()) == [".bin", ".idx", ".lock"]


def test_leftovers_of_a_killed_process_are_cleared(tmp_path: Path) -> None:
    corpus_of(tmp_path, {"a.txt": "text"})
    stem = next((tmp_path / "cache").glob("*.idx")).with_suffix("")
    stem.with_suffix(".idx").unlink()  # killed between the two renames
    leftover = stem.with_name(f".{stem.name}.bin.tmp")  # or before them
    leftover.write_bytes(b"half")
    assert corpus_of(tmp_path, {}).num_tokens == 5
    assert not leftover.exists()


def test_damaged_cache_is_refused_with_a_remedy(tmp_path: Path) -> None:
    corpus_of(tmp_path, {"a.txt": "text"})
    path = next((tmp_path / "cache").glob("*.bin"))
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(DataError, match=r"\.bin is damaged: it has 8 bytes instead of 10; delete .* to tokenize again"):
        prepare(config_for(tmp_path))
    path.write_bytes(b"x" * 10)
    prepare(config_for(tmp_path), verify=False)
    with pytest.raises(DataError, match=r"\.bin is damaged: its checksum does not match"):
        prepare(config_for(tmp_path))


def test_token_file_of_other_data_is_refused(tmp_path: Path) -> None:
    corpus_of(tmp_path, {"a.txt": "text"})
    folder = tmp_path / "cache"
    before = set(folder.iterdir())
    old = next(folder.glob("*.idx")).stem
    corpus_of(tmp_path, {"a.txt": "other"})
    new = next(path.stem for path in set(folder.iterdir()) - before if path.suffix == ".idx")
    for suffix in (".bin", ".idx"):
        (folder / (old + suffix)).replace(folder / (new + suffix))
    with pytest.raises(DataError, match="belongs to other data than its name says"):
        prepare(config_for(tmp_path))


def test_empty_corpus_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"the data is empty: no text in 1 file\(s\), the first of them .*a.txt"):
        corpus_of(tmp_path, {"a.txt": ""})
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_full_disk_is_reported_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_open = open

    def open_full(path: object, mode: str = "r", *args: object, **kwargs: object) -> object:
        return real_open("/dev/full" if str(path).endswith(".tmp") else path, mode, *args, **kwargs)  # type: ignore[call-overload]

    monkeypatch.setattr("builtins.open", open_full)
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "a.txt").write_bytes(b"text")
    with pytest.raises(DataError, match=r"cannot write the token file under .*: No space left .* set data.cache_dir"):
        prepare(config_for(tmp_path))
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]


def test_unwritable_cache_is_reported(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file, not a directory")
    with pytest.raises(DataError, match=r"cannot write the token file under .*cache: (File exists|Not a directory)"):
        corpus_of(tmp_path, {"a.txt": "text"})


def test_cache_goes_where_xdg_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    corpus_of(tmp_path, {"a.txt": "text"}, cache_dir=None)
    assert list((tmp_path / "xdg" / "laconic").glob("*.bin"))


def test_vocabulary_that_is_too_small_is_refused(tmp_path: Path) -> None:
    corpus = corpus_of(tmp_path, {"a.txt": "text"})
    check_vocab(corpus, 257)
    with pytest.raises(DataError, match=r"holds token id 256, but the model's vocabulary ends at 255; .*at least 257"):
        check_vocab(corpus, 256)


# Split


def test_split_keeps_every_token_once(tmp_path: Path) -> None:
    documents = {f"{number:03}.txt": f"document {number} " * (number % 5 + 1) for number in range(200)}
    corpus = corpus_of(tmp_path, documents, validation_fraction=0.1)
    held_out = bytes(token for token in all_tokens(corpus.validation) if token < 256).decode()
    trained = bytes(token for token in all_tokens(corpus.train) if token < 256).decode()
    assert len(corpus.train) + len(corpus.validation) == corpus.num_tokens
    assert 0.03 < len(corpus.validation) / corpus.num_tokens < 0.25
    for number in range(200):
        assert (f"document {number} " in trained) != (f"document {number} " in held_out)


def test_larger_fraction_only_adds_to_validation(tmp_path: Path) -> None:
    documents = {f"{number:03}.txt": f"<{number}>" for number in range(300)}
    small, large = (corpus_of(tmp_path, documents, validation_fraction=fraction) for fraction in (0.05, 0.3))

    def names(stream: TokenStream) -> set[str]:
        return set("".join(chr(token) for token in all_tokens(stream) if token < 256).strip("<>").split("><"))

    assert names(small.validation) < names(large.validation)


@pytest.mark.parametrize("documents", [1, 2, 3])
@pytest.mark.parametrize("fraction", [0.001, 0.999])
def test_both_sides_get_something(tmp_path: Path, documents: int, fraction: float) -> None:
    corpus = corpus_of(tmp_path, {f"{n}.txt": "some text" for n in range(documents)}, validation_fraction=fraction)
    assert len(corpus.train) > 0
    assert len(corpus.validation) > 0


def test_one_large_file_is_split_by_sections(tmp_path: Path) -> None:
    text = "".join(f"{number:07}\n" for number in range(200_000))
    corpus = corpus_of(tmp_path, {"a.txt": text}, validation_fraction=0.1)
    lines = text.encode().splitlines()
    assert len(corpus.train) + len(corpus.validation) == 8 * len(lines) + 1
    assert len(corpus.validation) % 65536 in (0, (8 * len(lines) + 1) % 65536)


# Streams and windows


@given(drawn=st.data())
def test_stream_reads_like_the_joined_ranges(drawn: st.DataObject) -> None:
    tokens = np.arange(60, dtype=np.uint16)
    cuts = sorted(drawn.draw(st.sets(st.integers(0, 60), max_size=10)))
    starts, stops = cuts[: len(cuts) // 2 * 2 : 2], cuts[1 : len(cuts) // 2 * 2 : 2]
    joined = [token for start, stop in zip(starts, stops, strict=True) for token in range(start, stop)]
    stream = TokenStream(tokens, starts, stops)
    assert len(stream) == len(joined)
    begin = drawn.draw(st.integers(0, len(joined)))
    count = drawn.draw(st.integers(0, len(joined) - begin))
    assert stream.read(begin, count).tolist() == joined[begin : begin + count]
    with pytest.raises(IndexError):
        stream.read(begin, len(joined) - begin + 1)


def test_windows_overlap_by_the_target_of_the_last_token() -> None:
    dataset = TokenDataset(TokenStream(np.arange(10, dtype=np.uint16), [0], [10]), 3)
    assert len(dataset) == 3
    assert [dataset[sample].tolist() for sample in range(3)] == [[0, 1, 2, 3], [3, 4, 5, 6], [6, 7, 8, 9]]
    assert dataset[0].dtype == torch.int64
    with pytest.raises(IndexError):
        dataset[3]


def test_sequence_longer_than_the_data_is_refused() -> None:
    stream = TokenStream(np.arange(10, dtype=np.uint16), [0], [10])
    assert len(TokenDataset(stream, 9)) == 1
    with pytest.raises(DataError, match=r"sequence_length is 10, which needs 11 tokens, but this part .* has 10"):
        TokenDataset(stream, 10)
    with pytest.raises(DataError, match=r"has 0; .*validation_fraction"):
        TokenDataset(TokenStream(np.arange(10, dtype=np.uint16), [], []), 1)


# Sampler


@given(seed=st.integers(0, 2**64), epoch=st.integers(0, 2**40), num_samples=st.integers(1, 600))
def test_each_epoch_is_a_permutation(seed: int, epoch: int, num_samples: int) -> None:
    start = epoch * num_samples
    drawn = [sample_id(seed, start + position, num_samples) for position in range(num_samples)]
    assert sorted(drawn) == list(range(num_samples))


def test_large_domains_are_reached_directly() -> None:
    drawn = {sample_id(1, index, 10**12) for index in range(2000)}
    assert len(drawn) == 2000
    assert 0.45 < sum(drawn) / len(drawn) / 1e12 < 0.55


def test_seeds_and_epochs_give_different_orders() -> None:
    orders = {tuple(sample_id(seed, e * 50 + i, 50) for i in range(50)) for seed in range(20) for e in range(20)}
    assert len(orders) == 400
    assert tuple(range(50)) not in orders


def test_permutations_of_a_small_set_are_all_as_likely() -> None:
    # 24 orders of 4 samples, 6000 draws: chi-square with 23 degrees of freedom is above 60 once in 30 000 times.
    counts: dict[tuple[int, ...], int] = {}
    for seed in range(6000):
        order = tuple(sample_id(seed, index, 4) for index in range(4))
        counts[order] = counts.get(order, 0) + 1
    assert len(counts) == 24
    assert sum((count - 250) ** 2 / 250 for count in counts.values()) < 60


def test_sample_order_is_frozen() -> None:
    # A run resumed by a later version must see the same samples: these numbers may never change.
    assert [sample_id(0, index, 10) for index in range(10)] == [2, 3, 9, 0, 1, 5, 4, 8, 6, 7]


@pytest.mark.parametrize(("world", "accumulation"), [(1, 1), (2, 1), (1, 4), (2, 2), (4, 2), (3, 2)])
def test_step_has_the_same_samples_on_any_number_of_processes(world: int, accumulation: int) -> None:
    dataset = TokenDataset(TokenStream(np.arange(1000, dtype=np.uint16), [0], [1000]), 4)
    whole = dataset.drawn(5, global_indices(7, 24, 1, 0, 0, 1))
    parts = [
        dataset.drawn(5, global_indices(7, 24, accumulation, micro, rank, world))
        for micro in range(accumulation)
        for rank in range(world)
    ]
    assert torch.equal(torch.cat(parts), whole)
    assert parts[0].shape == (24 // (world * accumulation), 5)
    assert parts[0].dtype == torch.int64


def test_long_tokenization_says_that_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(corpus, "_REPORT_SECONDS", -1.0)
    corpus_of(tmp_path, {"a.txt": "text"})
    assert "still tokenizing: 0.0 million tokens so far" in caplog.messages
