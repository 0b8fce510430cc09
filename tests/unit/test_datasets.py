"""The data sets of models/inputs and the distortion of images."""

import os

import numpy as np
import pytest
import tensorflow as tf
from helpers.cases import case
from inputs import (
    Distortion,
    distorted_inputs,
    evaluation_inputs,
    image_files,
    linear_data,
    load_cifar10,
    load_diabetes,
    load_digits,
    synthetic_images,
    write_images,
)
from inputs.cifar10 import RECORD, TEST_FILES, TRAIN_FILES

from hvdkit.data import GlobalBatches

# ---- digits, synthetic images, tables ------------------------------------------------------------------------------


@pytest.mark.full
def test_digits_are_split_by_class_and_by_seed():
    data = load_digits()
    assert data.x_train.shape == (1437, 32, 32, 3) and data.x_test.shape == (360, 32, 32, 3)
    assert data.x_train.dtype == np.uint8 and data.y_train.dtype == np.int32 and data.classes == 10
    shares = np.bincount(data.y_test) / np.bincount(np.concatenate([data.y_train, data.y_test]))
    assert np.all(np.abs(shares - 0.2) < 0.01)
    np.testing.assert_array_equal(data.x_test, load_digits().x_test)
    assert not np.array_equal(data.y_test, load_digits(seed=1).y_test)


@pytest.mark.full
def test_digits_lie_within_the_central_crop_and_keep_their_pixels():
    from sklearn.datasets import load_digits as load

    data = load_digits()
    images = np.concatenate([data.x_train, data.x_test]).astype(np.float64)
    assert images.max() == 255
    border = np.ones((32, 32), bool)
    border[4:28, 4:28] = False
    assert not images[:, border].any()
    assert np.ptp(images, axis=-1).max() == 0, "the channels differ"
    # Averaged over 3x3 blocks, the images are close to the originals, in some order.
    blocks = images[:, 4:28, 4:28, 0].reshape(-1, 8, 3, 8, 3).mean(axis=(2, 4)) * 16 / 255
    assert abs(blocks.mean() - load().images.mean()) < 0.1
    distances = ((blocks[:50, None] - load().images[None]) ** 2).mean(axis=(2, 3)).min(axis=1)
    assert distances.max() < 4


@pytest.mark.full
def test_synthetic_images_come_from_the_seed_and_can_be_learnt():
    data = synthetic_images(train=1500, test=300, classes=7, seed=3)
    assert data.x_train.shape == (1500, 32, 32, 3) and data.x_train.dtype == np.uint8
    again = synthetic_images(train=1500, test=300, classes=7, seed=3)
    np.testing.assert_array_equal(data.x_test, again.x_test)
    assert not np.array_equal(data.x_test, synthetic_images(train=1500, test=300, classes=7, seed=4).x_test)
    assert np.bincount(data.y_train).tolist() == [215, 215, 214, 214, 214, 214, 214]
    means = np.stack([data.x_train[data.y_train == c].mean(axis=0) for c in range(7)])
    distance = ((data.x_test[:, None].astype(np.float32) - means) ** 2).sum(axis=(2, 3, 4))
    assert np.mean(distance.argmin(axis=1) == data.y_test) > 0.95


def test_linear_data_lies_on_its_line():
    data = linear_data(weight=3.0, bias=-1.0, noise=0.2)
    slope, intercept = np.polyfit(data.x_train[:, 0], data.y_train[:, 0], 1)
    assert abs(slope - 3) < 0.05 and abs(intercept + 1) < 0.05
    residue = data.y_test - (3 * data.x_test - 1)
    assert abs(residue.std() - 0.2) < 0.03
    assert data.x_train.shape == data.y_train.shape == (800, 1) and data.x_train.dtype == np.float32


def test_diabetes_is_standardised_by_its_training_part():
    data = load_diabetes()
    assert data.x_train.shape == (353, 10) and data.y_test.shape == (89, 1) and data.classes is None
    for part in (data.x_train, data.y_train):
        np.testing.assert_allclose(part.mean(axis=0), 0, atol=1e-6)
        np.testing.assert_allclose(part.std(axis=0), 1, atol=1e-5)
    solution, *_ = np.linalg.lstsq(data.x_train, data.y_train, rcond=None)
    assert 0.4 < 1 - np.mean((data.x_train @ solution - data.y_train) ** 2) < 0.65


# ---- CIFAR-10 ------------------------------------------------------------------------------------------------------


@pytest.fixture
def cifar(tmp_path):
    """Return a folder of small files in CIFAR-10's format, and their contents."""
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    rng = np.random.default_rng(0)
    written = {}
    for i, name in enumerate(TRAIN_FILES + TEST_FILES):
        labels = rng.integers(0, 10, 4 + i).astype(np.uint8)
        images = rng.integers(0, 256, (4 + i, 32, 32, 3), dtype=np.uint8)
        planes = images.transpose(0, 3, 1, 2).reshape(4 + i, -1)  # red, green, blue
        (folder / name).write_bytes(np.concatenate([labels[:, None], planes], axis=1).tobytes())
        written[name] = images, labels
    return tmp_path, folder, written


def test_cifar10_reads_what_was_written(cifar):
    above, folder, written = cifar
    for data in (load_cifar10(above), load_cifar10(str(folder))):
        assert RECORD.itemsize == 3073 and len(data.x_train) == 30 and data.x_train.shape == (30, 32, 32, 3)
        everything = np.arange(30)
        np.testing.assert_array_equal(
            data.x_train[everything], np.concatenate([written[name][0] for name in TRAIN_FILES])
        )
        np.testing.assert_array_equal(data.y_train, np.concatenate([written[name][1] for name in TRAIN_FILES]))
        np.testing.assert_array_equal(data.x_test[np.arange(9)], written[TEST_FILES[0]][0])
        assert data.y_test.dtype == np.int32


def test_cifar10_as_tfrecord_files(cifar, tmp_path):
    data = load_cifar10(cifar[0])
    write_images(data, tmp_path / "records", 4)
    files = image_files(tmp_path / "records")
    assert files.examples == data.examples == (30, 9) and files.shape == data.shape
    for source, (images, labels) in ((files.train, data.train), (files.test, data.test)):
        batch = next(GlobalBatches(source, len(labels), rank=0, size=1))
        np.testing.assert_array_equal(batch[0], images[np.arange(len(labels))])
        np.testing.assert_array_equal(batch[1], labels)
        assert batch[1].dtype == np.int32
    write_images(load_digits(), tmp_path / "wrong", 1)
    example = tf.train.Example()
    example.features.feature["image"].bytes_list.value.append(b"abc")
    example.features.feature["label"].int64_list.value.append(3)
    with tf.io.TFRecordWriter(str(tmp_path / "wrong" / "train-000.tfrecord")) as file:
        file.write(example.SerializeToString())
    with pytest.raises(ValueError, match="--data-dir: got an image of 3 bytes with the label 3, expected 3072 bytes"):
        image_files(tmp_path / "wrong")


def test_cifar10_goes_through_global_batches(cifar):
    data = load_cifar10(cifar[0])
    parts = [GlobalBatches((data.x_train, data.y_train), 8, shuffle_seed=0, rank=r, size=3) for r in range(3)]
    images, labels = (np.concatenate(leaves) for leaves in zip(*[next(part) for part in parts], strict=True))
    assert images.shape == (8, 32, 32, 3) and images.flags.c_contiguous
    everything = data.x_train[np.arange(30)]
    for image, label in zip(images, labels, strict=True):
        (row,) = np.flatnonzero((everything == image).all(axis=(1, 2, 3)))
        assert data.y_train[row] == label


def test_cifar10_cut_short(cifar):
    _, folder, _ = cifar
    path = folder / "data_batch_3.bin"
    for size in (3073 * 2 + 100, 3072, 0):
        os.truncate(path, size)
        words = rf"data_batch_3\.bin: got {size} bytes, expected a multiple of 3073"
        with case(size=size), pytest.raises(ValueError, match=words):
            load_cifar10(folder)


def test_cifar10_missing_files_and_wrong_labels(cifar, tmp_path):
    _, folder, _ = cifar
    path = folder / "data_batch_2.bin"
    content = bytearray(path.read_bytes())
    content[3 * 3073] = 10
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"data_batch_2\.bin, record 3: got the label 10, expected 0 to 9"):
        load_cifar10(folder)
    path.unlink()
    (folder / "test_batch.bin").unlink()
    with pytest.raises(FileNotFoundError, match=r"without data_batch_2\.bin, test_batch\.bin.*download"):
        load_cifar10(folder)
    with pytest.raises(FileNotFoundError, match="download"):
        load_cifar10(tmp_path / "nowhere")


# ---- distortion ----------------------------------------------------------------------------------------------------

IMAGES = np.random.default_rng(1).integers(0, 256, (12, 32, 32, 3), dtype=np.uint8)


def distorted(images, seed=(3, 4), first_row=0, size=12, **options):
    return distorted_inputs(
        images, list(seed), first_row=first_row, global_batch_size=size, distortion=Distortion(**options)
    ).numpy()


@pytest.mark.full
def test_distortion_does_not_depend_on_the_number_of_ranks():
    for size in (1, 2, 3, 5):
        with case(size=size):
            whole = distorted(IMAGES)
            bounds = [(r * 12 // size, (r + 1) * 12 // size) for r in range(size)]
            parts = [distorted(IMAGES[first:last], first_row=first) for first, last in bounds]
            np.testing.assert_allclose(np.concatenate(parts), whole, rtol=0, atol=1e-6)
            assert not np.allclose(whole, distorted(IMAGES, seed=(3, 5)))
            assert not np.allclose(whole, distorted(IMAGES, seed=(2, 4)))


def reference(image, draws, distortion):
    """Distort one image with the tutorial's own operations."""
    top, left = int(draws[0] * 9), int(draws[1] * 9)
    image = tf.cast(image[top : top + 24, left : left + 24], tf.float32)
    if distortion.flip and draws[2] < 0.5:
        image = tf.image.flip_left_right(image)
    image = tf.image.adjust_brightness(image, (2 * draws[3] - 1) * distortion.brightness)
    low, high = distortion.contrast
    image = tf.image.adjust_contrast(image, low + draws[4] * (high - low))
    return tf.image.per_image_standardization(image).numpy()


def test_distortion_is_that_of_tensorflow_image_by_image():
    draws = tf.random.stateless_uniform([12, 5], [3, 4]).numpy()
    assert 0 < np.sum(draws[:, 2] < 0.5) < 12
    for options in ({}, {"flip": False, "brightness": 0.0, "contrast": (1.0, 1.0)}):
        expected = [reference(*each, Distortion(**options)) for each in zip(IMAGES, draws, strict=True)]
        with case(options=options):
            np.testing.assert_allclose(distorted(IMAGES, **options), expected, rtol=1e-4, atol=1e-5)


def test_distortion_reaches_every_crop_and_both_sides():
    position = np.zeros((400, 32, 32, 3), np.float32)
    position[..., 0], position[..., 1] = np.arange(32)[:, None], np.arange(32)
    draws = tf.random.stateless_uniform([400, 5], [1, 2])
    from inputs.distortion import _crop

    crops = _crop(tf.constant(position), draws[:, 0], draws[:, 1], draws[:, 2] < 0.5).numpy()
    mirrored = crops[:, 0, 0, 1] > crops[:, 0, -1, 1]
    assert 150 < mirrored.sum() < 250
    tops, lefts = crops[:, 0, 0, 0], crops[:, 0, :, 1].min(axis=1)
    assert set(tops) == set(lefts) == set(range(9))
    assert np.all(crops[:, -1, 0, 0] - tops == 23)


def test_evaluation_takes_the_centre():
    expected = [tf.image.per_image_standardization(image[4:28, 4:28]).numpy() for image in IMAGES]
    np.testing.assert_allclose(evaluation_inputs(IMAGES), expected, rtol=1e-4, atol=1e-5)
    even = evaluation_inputs(np.full((1, 32, 32, 3), 7, np.uint8)).numpy()
    assert np.all(even == 0)


@pytest.mark.full
def test_distortion_in_a_graph_takes_any_number_of_rows():
    @tf.function(input_signature=[tf.TensorSpec([None, 32, 32, 3], tf.uint8), tf.TensorSpec([2], tf.int64)])
    def distort(images, seed):
        return distorted_inputs(images, seed, first_row=0, global_batch_size=12, distortion=Distortion())

    np.testing.assert_allclose(distort(IMAGES, np.array([3, 4])), distorted(IMAGES), atol=1e-6)
    assert distort(IMAGES[:5], np.array([3, 4])).shape == (5, 24, 24, 3)
