import functools
import gzip
import io
import os
import pathlib
import re

import numpy as np
import pytest

from examples.pretrain.batches import Windows, read_text
from examples.pretrain.data import HEADER_INTS, MAGIC, read_corpus
from examples.pretrain.errors import RunError, UsageError
from tests.examples.pretrain import tiny

TOKENS = np.arange(400, dtype="<u2")


def read(*data, val=(), vocab_size=50_304):
    data, val = (tuple(str(path) for path in paths) for paths in (data, val))
    return read_corpus(data, val, vocab_size)


def text(split):
    (piece,) = split.pieces
    return piece.tobytes().decode()


def write_header_shard(path, tokens=TOKENS, version=1, count=None):
    header = np.zeros(HEADER_INTS, "<i4")
    header[:3] = MAGIC, version, len(tokens) if count is None else count
    path.write_bytes(header.tobytes() + tokens.tobytes())
    return path


def write_raw_shard(path, tokens=TOKENS):
    path.write_bytes(tokens.tobytes())
    return path


def documents(folder: pathlib.Path, count=40):
    for index in range(count):
        (folder / f"{index}.txt").write_text(f"document {index}.")
    return folder


# Text.


def test_files_are_split_whole(tmp_path):
    corpus = read(documents(tmp_path))
    train, val = (text(side).split("\0") for side in (corpus.train, corpus.val))
    assert sorted(train + val) == sorted(f"document {index}." for index in range(40))
    assert not set(train) & set(val)
    assert 1 <= len(val) <= 10
    assert corpus.unit == "byte"


def test_the_split_does_not_depend_on_the_place_or_on_other_files(tmp_path):
    for name, count in (("here", 40), ("there", 60)):
        (tmp_path / name).mkdir()
        documents(tmp_path / name, count)
    here, there = (text(read(tmp_path / n).val).split("\0") for n in ("here", "there"))
    assert set(here) == {d for d in there if int(re.findall(r"\d+", d)[0]) < 40}


def test_names_with_val_are_for_validation(tmp_path):
    for name in ("train.txt", "val.txt", "eval.txt", "interval.txt", "my_Val-2.txt"):
        (tmp_path / name).write_text(name)
    (tmp_path / "validation").mkdir()
    (tmp_path / "validation" / "a.txt").write_text("below")
    val = set(text(read(tmp_path).val).split("\0"))
    assert val == {"val.txt", "my_Val-2.txt", "below"}


def test_val_data_is_kept_out_of_training(tmp_path):
    documents(tmp_path, count=5)
    corpus = read(tmp_path, val=[tmp_path / "3.txt"])
    assert text(corpus.val) == "document 3."
    assert "document 3." not in text(corpus.train)
    assert len(text(corpus.train).split("\0")) == 4


def test_globs_folders_and_files_name_the_same_texts_once(tmp_path):
    documents(tmp_path)
    by_folder = read(tmp_path)
    by_all = read(tmp_path, tmp_path / "*.txt", tmp_path / "3.txt")
    assert by_folder.fingerprint() == by_all.fingerprint()
    (tmp_path / ".git").mkdir()  # What is hidden or empty in a folder is left out.
    (tmp_path / ".git" / "config").write_text("hidden")
    (tmp_path / "__init__.py").touch()
    assert read(tmp_path).fingerprint() == by_folder.fingerprint()


def test_links_name_nothing_twice(tmp_path):
    whole = read(documents(tmp_path))
    linked = tmp_path.with_name(f"{tmp_path.name}_linked")
    linked.symlink_to(tmp_path)
    again = read(linked, tmp_path / ".." / tmp_path.name / "5.txt")
    assert again.train.tokens + again.val.tokens == whole.train.tokens + whole.val.tokens
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UsageError, match=r"gone\.txt is no file that can be read"):
        read(tmp_path / "*.txt")


def test_the_fingerprint_knows_contents_and_split(tmp_path):
    documents(tmp_path)
    before = read(tmp_path).fingerprint()
    other_split = read(tmp_path, val=[tmp_path / "0.txt"]).fingerprint()
    (tmp_path / "7.txt").write_text("Document 7.")
    assert len({before, other_split, read(tmp_path).fingerprint()}) == 3


@pytest.mark.extended
def test_the_standard_library():
    corpus = read()
    assert corpus.train.tokens > 3_000_000
    assert 0.03 < corpus.val.tokens / corpus.train.tokens < 0.3
    train, val = text(corpus.train), text(corpus.val)
    for line in ("class OrderedDict(dict):", "def namedtuple("):
        assert (line in train) != (line in val)
    assert "class Test_TestCase" not in train + val
    assert corpus.fingerprint() == read().fingerprint()


# A single file.


def test_a_single_file_is_split_by_position(tmp_path):
    path = tmp_path / "poem.txt"
    path.write_text("".join(map(str, range(100))))
    corpus = read(path)
    assert text(corpus.train) + text(corpus.val) == path.read_text()
    assert (corpus.train.tokens, corpus.val.tokens) == (171, 19)
    assert "split by position" in corpus.note and "--val-data" in corpus.note
    for split, part in ((corpus.train, "first nine tenths"), (corpus.val, "last tenth")):
        assert split.name == f"the {part} of {path}"
    for same in (tmp_path, tmp_path / "*.txt"):
        assert read(same).fingerprint() == corpus.fingerprint()


@pytest.mark.parametrize("write", [write_raw_shard, write_header_shard])
def test_a_single_shard_is_split_by_position(tmp_path, write):
    corpus = read(write(tmp_path / "tokens.bin"))
    np.testing.assert_array_equal(corpus.train.pieces[0], TOKENS[:360])
    np.testing.assert_array_equal(corpus.val.pieces[0], TOKENS[360:])
    assert corpus.unit == "token" and len(corpus.fingerprint()) == 64


def test_a_single_file_that_is_too_short_is_refused(tmp_path):
    path = tmp_path / "short.txt"
    path.write_text("ab")
    corpus = read(path)
    assert (text(corpus.train), text(corpus.val)) == ("a", "b")
    path.write_text("a")
    with pytest.raises(UsageError, match=r"short\.txt is a single byte.*--val-data"):
        read(path)
    path.write_text("")
    with pytest.raises(UsageError, match=r"short\.txt is empty"):
        read(path)
    with pytest.raises(UsageError, match="no such file, and none within"):
        read(tmp_path)


def test_two_files_are_not_split_by_position(tmp_path):
    documents(tmp_path, count=2)
    corpus = read(tmp_path / "0.txt", val=[tmp_path / "1.txt"])
    assert (text(corpus.train), text(corpus.val)) == ("document 0.", "document 1.")
    assert corpus.note == read(tmp_path).note == ""
    assert read(tmp_path).train.tokens and read(tmp_path).val.tokens


def test_the_side_that_is_shorter_than_a_batch_is_named(tmp_path):
    path = tmp_path / "poem.txt"
    config = tiny.config(data=(str(path),))  # A batch is 65 tokens or more.
    for length, side in ((50, "first nine tenths"), (600, "last tenth")):
        path.write_text("a" * length)
        with pytest.raises(UsageError, match=rf"{side} of .*poem\.txt: .*lower"):
            read_text(config)
    path.write_text("a" * 700)
    assert "by position" in read_text(config).description


# Shards.


@pytest.mark.parametrize("write", [write_raw_shard, write_header_shard])
def test_shards(tmp_path, write):
    write(tmp_path / "fineweb_train_000001.bin", TOKENS[:300])
    write(tmp_path / "fineweb_train_000002.bin", TOKENS[300:])
    write(tmp_path / "fineweb_val_000000.bin", TOKENS[:50])
    corpus = read(tmp_path)
    assert [len(piece) for piece in corpus.train.pieces] == [300, 100]
    np.testing.assert_array_equal(np.concatenate(corpus.train.pieces), TOKENS)
    np.testing.assert_array_equal(corpus.val.pieces[0], TOKENS[:50])
    assert isinstance(corpus.train.pieces[0], np.memmap)
    assert corpus.unit == "token"


def test_both_kinds_of_shards_in_one_run(tmp_path):
    write_header_shard(tmp_path / "train.bin")
    write_raw_shard(tmp_path / "val.bin", TOKENS[:50])
    corpus = read(tmp_path, vocab_size=400)
    assert (corpus.train.tokens, corpus.val.tokens) == (400, 50)


@pytest.fixture
def windows(tmp_path):
    """Those of a shard in the folder of the test."""
    for name in ("train.bin", "val.bin"):
        write_raw_shard(tmp_path / name)
    os.utime(tmp_path / "train.bin", (0, 0))  # Written long ago.
    return Windows(read(tmp_path).train, seq_len=16)


def test_a_shard_that_changes_while_it_is_used_is_refused(windows, tmp_path):
    np.testing.assert_array_equal(windows[2], TOKENS[32:49])
    path = tmp_path / "train.bin"
    for change in (
        lambda: write_raw_shard(path, TOKENS[::-1]),
        lambda: os.truncate(path, 2),  # Reading the map would end the process.
    ):
        change()
        with pytest.raises(RunError, match=r"train\.bin has changed .*Put it back"):
            windows[2]
    os.utime(write_raw_shard(path), (0, 0))
    np.testing.assert_array_equal(windows[2], TOKENS[32:49])


def test_a_shard_that_is_removed_stays_mapped(windows, tmp_path):
    (tmp_path / "train.bin").unlink()
    np.testing.assert_array_equal(windows[2], TOKENS[32:49])


# What is refused. Every message names the file and says what to do.


def of_uint32(path):
    header = np.zeros(256, "<i4")
    header[:3] = 20240801, 7, 200
    path.write_bytes(header.tobytes() + np.arange(200, dtype="<u4").tobytes())


def cut_off_header(path):
    path.write_bytes(write_header_shard(path).read_bytes()[:100])


def of_type(path, dtype, step=1):
    """With a step of 300, some do not fit into 16 bits."""
    path.write_bytes((step * TOKENS.astype(dtype)).astype(dtype).tobytes())


def npy(tokens, save=np.save):
    file = io.BytesIO()
    save(file, tokens)
    return file.getvalue()


npz = functools.partial(npy, save=np.savez)


def large_token(path):
    write_raw_shard(path, np.array([3, 50_304, 5], "<u2"))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda path: path.write_bytes(TOKENS.tobytes() + b"x"), "801 bytes of .*again"),
        (lambda path: write_header_shard(path, version=2), "2, 400.* has .* 1, 400.*con"),
        (lambda path: write_header_shard(path, count=401), "401.* has .*400.*again"),
        (of_uint32, r"20240801, 7, 200\].* uint16 .*convert it"),
        (cut_off_header, r"has \[20240520, 1, 0\].*write it again"),
        (lambda path: write_header_shard(path, TOKENS[:0]), "0 bytes of .*again"),
        (large_token, "token 50304.*ends at 50303.*--model.vocab-size 50305"),
        (lambda path: path.touch(), "empty.*write it again"),
        (lambda path: of_type(path, "<i4"), "at most 0 in every other place.* as uint16"),
        (lambda path: of_type(path, ">i4"), "at most 0 in every other place.* as uint16"),
        (lambda path: of_type(path, "<i8"), "at most 0 in every other place.* as uint16"),
        (lambda path: of_type(path, "<i4", 300), "at most 1 in every other .* as uint16"),
        (lambda path: path.write_bytes(npy(TOKENS)), r"a \.npy file.*of uint16"),
        (lambda path: path.write_bytes(gzip.compress(TOKENS)), "a gzip .* of uint16"),
        (lambda path: path.write_bytes(npz(TOKENS)), r"a zip or \.npz .* of uint16"),
    ],
)
def test_a_corrupt_shard_is_refused(tmp_path, spoil, message):
    write_raw_shard(tmp_path / "good_val.bin")
    spoil(tmp_path / "bad.bin")
    with pytest.raises(UsageError, match=rf"bad\.bin.*{message}"):
        read(tmp_path)


def test_the_vocabulary_bounds_the_tokens(tmp_path):
    large_token(tmp_path / "train.bin")
    write_raw_shard(tmp_path / "val.bin", TOKENS[:5])
    assert read(tmp_path, vocab_size=50_305).train.tokens == 3


def test_missing_paths_are_refused(tmp_path):
    with pytest.raises(UsageError, match=r"nothing\.txt: no such file"):
        read(tmp_path / "nothing.txt")
    with pytest.raises(UsageError, match=r"\*\.csv: no such file"):
        read(documents(tmp_path) / "*.csv")
    with pytest.raises(UsageError, match=r"lost: no such file"):
        read(tmp_path, val=[tmp_path / "lost"])
    (tmp_path / "hollow").mkdir()
    with pytest.raises(UsageError, match=r"hollow: no such file, and none within"):
        read(tmp_path / "hollow")


def test_what_makes_no_text_is_refused_by_name(tmp_path):
    documents(tmp_path)
    void = tmp_path / "void.txt"
    void.touch()
    with pytest.raises(UsageError, match=r"void\.txt is empty.*leave it out"):
        read(tmp_path / "*.txt")
    void.write_text("é")
    with pytest.raises(UsageError, match=r"void\.txt holds token 195.*127"):
        read(tmp_path, vocab_size=128)
    assert read(tmp_path, vocab_size=196).unit == "byte"
    void.write_bytes(b"\x89PNG\0")
    with pytest.raises(UsageError, match=r"void\.txt holds a zero byte.*leave it out"):
        read(tmp_path)
    void.unlink()
    write_raw_shard(tmp_path / "tokens.bin")
    for data, val in (
        ([tmp_path], []),
        ([tmp_path / "*.txt"], [tmp_path / "tokens.bin"]),
    ):
        with pytest.raises(UsageError, match=r"\.txt is text and .*tokens\.bin.*narrow"):
            read(*data, val=val)


def test_nothing_to_train_on_is_refused(tmp_path):
    write_raw_shard(tmp_path / "val.bin")
    with pytest.raises(UsageError, match=r"val\.bin leaves nothing to train on.*add"):
        read(tmp_path / "val.bin")
