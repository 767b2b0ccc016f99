import os
import pickle

import numpy as np
import pytest

from examples.pretrain.errors import UsageError
from examples.vision.batches import (
    Augmentation,
    Images,
    Statistics,
    evaluation_examples,
    statistics,
    train_examples,
)
from examples.vision.cifar import TEST_FILES, TRAIN_FILES, read_cifar10

COUNT = 20  # Images of a file.


def contents(index):
    """Labels and pixels of file number `index`, as the files have them: planes."""
    rng = np.random.default_rng(index)
    labels = rng.integers(0, 10, COUNT).astype(np.uint8)
    return labels, rng.integers(0, 256, (COUNT, 3, 32, 32)).astype(np.uint8)


def write_binary(folder):
    for index, name in enumerate((*TRAIN_FILES, *TEST_FILES)):
        labels, planes = contents(index)
        records = np.concatenate([labels[:, None], planes.reshape(COUNT, -1)], axis=1)
        (folder / f"{name}.bin").write_bytes(records.tobytes())
    return folder


def python_2_pickle(labels, pixels):
    """A batch as Python 2 and its NumPy pickled it, opcode by opcode."""
    dtype = b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R"
    dtype += b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    count, size = len(labels).to_bytes(), (3072).to_bytes(2, "little")
    length = pixels.size.to_bytes(4, "little")
    array = b"cnumpy.core.multiarray\n_reconstruct\n"
    array += b"cnumpy\nndarray\nK\x00\x85U\x01b\x87R"
    array += b"(K\x01K" + count + b"M" + size + b"\x86" + dtype
    array += b"\x89T" + length + pixels.tobytes() + b"tb"
    listed = b"](" + b"".join(b"K" + int(label).to_bytes() for label in labels) + b"e"
    return b"\x80\x02}(U\x04data" + array + b"U\x06labels" + listed + b"u."


def write_pickled(folder):
    for index, name in enumerate((*TRAIN_FILES, *TEST_FILES)):
        labels, planes = contents(index)
        (folder / name).write_bytes(python_2_pickle(labels, planes))
    return folder


@pytest.fixture(params=[write_binary, write_pickled], ids=["binary", "python"])
def folder(request, tmp_path):
    return request.param(tmp_path)


def test_both_versions_are_read_in_the_order_of_their_files(folder):
    train, test = read_cifar10(folder, COUNT)
    assert (len(train), len(test)) == (5 * COUNT, COUNT)
    assert train.pixels.shape == (5 * COUNT, 32, 32, 3)
    assert (train.pixels.dtype, train.labels.dtype) == (np.uint8, np.int32)
    for index in range(5):
        labels, planes = contents(index)
        part = slice(index * COUNT, (index + 1) * COUNT)
        np.testing.assert_array_equal(train.labels[part], labels)
        for channel in range(3):
            np.testing.assert_array_equal(
                train.pixels[part, :, :, channel], planes[:, channel]
            )
    np.testing.assert_array_equal(test.labels, contents(5)[0])


def test_missing_files_are_named(folder):
    [third] = [path for path in folder.iterdir() if "batch_3" in path.name]
    third.unlink()
    with pytest.raises(UsageError, match=rf"lacks {third.name} of .*unpack"):
        read_cifar10(folder, COUNT)
    with pytest.raises(UsageError, match=r"nowhere is no folder: name"):
        read_cifar10(folder / "nowhere")


def test_a_file_of_another_size_is_refused(folder):
    with pytest.raises(UsageError, match=r"data_batch_1.* holds 20 .*expected 10000"):
        read_cifar10(folder)


@pytest.mark.parametrize("kept", [0, 3073 * 4 + 5])
def test_a_binary_file_that_is_cut_off_is_refused(tmp_path, kept):
    write_binary(tmp_path)
    os.truncate(tmp_path / "test_batch.bin", kept)
    with pytest.raises(UsageError, match=rf"test_batch.bin has {kept} bytes.*cut off"):
        read_cifar10(tmp_path, COUNT)


def test_labels_of_another_data_set_are_refused(tmp_path):
    write_binary(tmp_path)
    file = tmp_path / "data_batch_2.bin"
    file.write_bytes(b"\x0a" + file.read_bytes()[1:])
    with pytest.raises(UsageError, match=r"data_batch_2.bin holds label 10.*10 classes"):
        read_cifar10(tmp_path, COUNT)


class Sneaky:
    def __reduce__(self):
        return os.system, ("touch /tmp/never",)


@pytest.mark.parametrize(
    ("written", "why"),
    [
        (b"no pickle", "unpack"),
        (pickle.dumps({b"data": [1]}), "labels"),
        (pickle.dumps({b"data": Sneaky()}), r"it names (posix|nt)\.system"),
    ],
)
def test_a_pickle_that_is_broken_or_would_run_code_is_refused(tmp_path, written, why):
    write_pickled(tmp_path)
    (tmp_path / "data_batch_4").write_bytes(written)
    with pytest.raises(UsageError, match=rf"data_batch_4 is no file .*{why}"):
        read_cifar10(tmp_path, COUNT)


def images(count=44):
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (count, 32, 32, 3)).astype(np.uint8)
    return Images(pixels, np.arange(count, dtype=np.int32))


PLAIN = Statistics(np.zeros(3, np.float32), np.ones(3, np.float32))


def test_statistics_are_those_of_all_pixels():
    data = images()
    found = statistics(data)
    np.testing.assert_allclose(found.mean, data.pixels.mean((0, 1, 2)), rtol=1e-6)
    np.testing.assert_allclose(found.std, data.pixels.std((0, 1, 2)), rtol=1e-6)
    normal = found.normalize(data.pixels)
    np.testing.assert_allclose(normal.mean((0, 1, 2)), 0, atol=1e-4)
    np.testing.assert_allclose(normal.std((0, 1, 2)), 1, rtol=1e-4)


class Drawn:
    """Stands for a generator: the places that it draws."""

    def __init__(self, *values):
        self.values = values

    def integers(self, high):
        assert all(0 <= v < h for v, h in zip(self.values, high, strict=True))
        return self.values


@pytest.mark.parametrize("flip", [0, 1])
@pytest.mark.parametrize(("top", "left"), [(0, 8), (4, 4), (7, 2)])
@pytest.mark.parametrize(("cut_top", "cut_left"), [(0, 24), (24, 0), (10, 11)])
def test_augmentation_pads_crops_flips_and_cuts(top, left, cut_top, cut_left, flip):
    data = images(1)
    padded = np.pad(data.pixels[0], ((4, 4), (4, 4), (0, 0)), mode="reflect")
    expected = padded[top : top + 32, left : left + 32].astype(np.float32)
    expected = np.flip(expected, 1) if flip else expected
    expected = (expected - 100) / 50
    expected[cut_top : cut_top + 8, cut_left : cut_left + 8] = 0
    scale = Statistics(np.full(3, 100, np.float32), np.full(3, 50, np.float32))
    changed = Augmentation(scale)(
        {"pixels": data.pixels[0], "labels": data.labels[0]},
        Drawn(top, left, cut_top, cut_left, flip),
    )
    np.testing.assert_array_equal(changed["pixels"], expected)
    assert changed["labels"] == 0


def stream(seed=3, batch_size=4):
    return train_examples(images(), Augmentation(PLAIN), batch_size, seed)


def pixels_of(examples, indices):
    return np.stack([examples[index]["pixels"] for index in indices])


def test_an_example_depends_on_seed_and_place_alone():
    one, two = stream(), stream()
    forwards = pixels_of(one, range(120))
    backwards = pixels_of(two, reversed(range(120)))[::-1]
    np.testing.assert_array_equal(forwards, backwards)
    assert forwards.shape == (120, 32, 32, 3)
    assert (forwards.dtype, one[0]["labels"].dtype) == (np.float32, np.int32)
    assert not np.array_equal(forwards, pixels_of(stream(seed=4), range(120)))


def test_an_epoch_shows_every_image_once_and_the_next_shows_it_otherwise():
    examples = stream()
    labels = [int(examples[index]["labels"]) for index in range(88)]
    pixels = pixels_of(examples, range(88))
    first, second = labels[:44], labels[44:]
    assert set(first) == set(second) == set(range(44))
    assert first != second
    same = [np.array_equal(pixels[i], pixels[44 + second.index(first[i])])
            for i in range(44)]  # fmt: skip
    assert sum(same) <= 1


def test_an_evaluation_has_the_images_as_they_are():
    data = images(40)
    examples = evaluation_examples(data, PLAIN)
    assert len(examples) == 40
    np.testing.assert_array_equal(pixels_of(examples, range(40)), data.pixels)
    assert [int(example["labels"]) for example in examples] == list(range(40))
    assert [int(e["labels"]) for e in evaluation_examples(data, PLAIN, 5)] == [*range(5)]


def test_examples_that_cannot_be_made_are_refused():
    with pytest.raises(UsageError, match="batch of 45 is more than the 44 images"):
        stream(batch_size=45)
    with pytest.raises(UsageError, match="cutout 33 must be from 0 to 32"):
        Augmentation(PLAIN, cutout=33)
