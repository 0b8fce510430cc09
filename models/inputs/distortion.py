"""The CIFAR-10 tutorial's image distortion, for whole batches, with the same result on any number of ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass

import tensorflow as tf

CROP = 24
"""Height and width, in pixels, of the network's input."""


@dataclass(frozen=True, kw_only=True)
class Distortion:
    """Limits of the distortion. The defaults are those of TensorFlow's CIFAR-10 tutorial."""

    flip: bool = True
    """Mirror half of the images, left to right."""
    brightness: float = 63.0
    """Maximum change of brightness, added to every pixel (of 255)."""
    contrast: tuple[float, float] = (0.2, 1.8)
    """Range of the factor for each channel's distance from its mean."""


def distorted_inputs(images, seed, *, first_row: int, global_batch_size: int, distortion: Distortion):
    """Crop, flip, brighten, change the contrast of, and standardize this rank's training images.

    Every rank draws the random numbers of all B images (five each) and slices out its rows, so an image is distorted
    in the same way on any rank. Only the pixels of the local images are processed.

    Brightness is kept to match the tutorial: it shifts all pixels equally, which standardization undoes.

    Args:
        images: uint8 or float32 ``[L, height, width, channels]``, values 0 to 255.
        seed: Two integers (``[2]``), e.g. ``[seed, global step]``; the distortion depends on nothing else.
        first_row: Index of the first local image in the global batch: ``batches.local_rows[0]``.
        global_batch_size: B.
        distortion: Limits of the distortion.

    Returns:
        float32 ``[L, 24, 24, channels]``, each image with mean 0 and variance 1.

    Source: ``distorted_inputs`` of the TensorFlow tutorial "Convolutional Neural Networks" (``cifar10_input.py``).

    Example:
        >>> images = tf.zeros([2, 32, 32, 3], tf.uint8)
        >>> distorted_inputs(images, [0, 7], first_row=2, global_batch_size=4, distortion=Distortion()).shape
        TensorShape([2, 24, 24, 3])
    """
    rows = tf.shape(images)[0]
    draws = tf.random.stateless_uniform([global_batch_size, 5], seed)[first_row : first_row + rows]
    top, left, mirror, shift, stretch = tf.unstack(draws, axis=1)
    cropped = _crop(images, top, left, mirror < 0.5 if distortion.flip else tf.zeros_like(mirror, tf.bool))
    pixels = tf.cast(cropped, tf.float32) + _per_image((2.0 * shift - 1.0) * distortion.brightness)
    low, high = distortion.contrast
    channel_mean = tf.reduce_mean(pixels, axis=[1, 2], keepdims=True)
    pixels = (pixels - channel_mean) * _per_image(low + stretch * (high - low)) + channel_mean
    return _standardize(pixels)


def evaluation_inputs(images):
    """Return the standardized centers of the images: float32 ``[L, 24, 24, channels]``.

    Example:
        >>> evaluation_inputs(tf.zeros([2, 32, 32, 3], tf.uint8)).shape
        TensorShape([2, 24, 24, 3])
    """
    top, left = (images.shape[1] - CROP) // 2, (images.shape[2] - CROP) // 2
    return _standardize(tf.cast(images[:, top : top + CROP, left : left + CROP], tf.float32))


def _crop(images, top, left, mirrored):
    """Gather a window per image; a mirrored image's columns are gathered from right to left.

    Args:
        images: ``[L, height, width, channels]``.
        top, left: Position of the window, ``[L]``, from 0 to 1 (exclusive) of the range.
        mirrored: bool ``[L]``.
    """
    _, height, width, channels = images.shape
    window = tf.range(CROP)
    rows = tf.cast(top * (height - CROP + 1), tf.int32)[:, None] + window
    columns = tf.cast(left * (width - CROP + 1), tf.int32)[:, None]
    columns += tf.where(mirrored[:, None], window[::-1], window)
    image = tf.range(tf.shape(images)[0])[:, None]
    pixels = ((image * height + rows) * width)[:, :, None] + columns[:, None, :]  # [L, 24, 24]
    return tf.gather(tf.reshape(images, [-1, channels]), pixels)


def _standardize(pixels):
    """Return ``(x - mean) / max(std, 1/sqrt(pixels))`` of each image: the lower bound keeps a uniform image finite."""
    centered = pixels - tf.reduce_mean(pixels, axis=[1, 2, 3], keepdims=True)
    deviation = tf.sqrt(tf.reduce_mean(tf.square(centered), axis=[1, 2, 3], keepdims=True))
    return centered / tf.maximum(deviation, 1.0 / math.sqrt(math.prod(pixels.shape[1:])))


def _per_image(values):
    return values[:, None, None, None]
