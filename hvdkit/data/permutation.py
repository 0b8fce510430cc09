"""A shuffle in constant memory: a keyed pseudo-random permutation of which every position can be computed on its own.

The permutation of ``[0, n)`` is a Feistel network on pairs (left, right) with right in ``[0, 2**k)`` and left in ``[0,
m)``, where ``m`` is the smallest number with ``m * 2**k >= n``. Its rounds add a pseudo-random function of one half to
the other half. Results of n or more, of which there are fewer than ``2**k``, are permuted again until they are
smaller, which is called cycle walking.

Source: Black and Rogaway, "Ciphers with Arbitrary Finite Domains" (2002), sections 3 and 4. The function of the rounds
multiplies and shifts like the last steps of MurmurHash3; it is not meant for secrets.
"""

from __future__ import annotations

import numpy as np

_ROUNDS = 6
_MULTIPLIERS = np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53)
_HALF = np.uint64(32)
_CHUNK = 2**13  # positions at a time, so that intermediate arrays stay in the processor's cache


class Permutation:
    """A pseudo-random permutation of ``[0, examples)`` that depends only on its key.

    Meant for large n: the distribution over keys is not uniform for fewer than a few hundred examples.

    Args:
        examples: n, from 1 to 2**62.
        key: Integers >= 0, for example a seed and an epoch.

    Example:
        >>> shuffled = Permutation(10**10, (1, 0))
        >>> shuffled(np.arange(3)).tolist()
        [2106182212, 4205700185, 5012022141]
    """

    def __init__(self, examples: int, key: tuple[int, ...]):
        right_bits = (examples - 1).bit_length() // 2
        self._examples = np.uint64(examples)
        self._right_bits = np.uint64(right_bits)
        self._right_mask = np.uint64(2**right_bits - 1)
        self._lefts = np.uint64(-(-examples // 2**right_bits))  # m
        self._keys = np.random.SeedSequence(key).generate_state(_ROUNDS, np.uint64)

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        """Return the example at each position: int64 of the shape of ``positions``, which are integers in [0, n)."""
        flat = np.asarray(positions, np.int64).ravel().view(np.uint64)
        examples = np.empty(flat.shape, np.uint64)
        for start in range(0, len(flat), _CHUNK):
            examples[start : start + _CHUNK] = self._walk(flat[start : start + _CHUNK])
        return examples.view(np.int64).reshape(np.shape(positions))

    def _walk(self, values: np.ndarray) -> np.ndarray:
        values = self._encrypt(values)
        while len(outside := np.flatnonzero(values >= self._examples)):
            values[outside] = self._encrypt(values[outside])
        return values

    def _encrypt(self, values: np.ndarray) -> np.ndarray:
        left = values >> self._right_bits
        right = values & self._right_mask
        for i in range(0, _ROUNDS, 2):
            # left = (left + f(right)) mod m. Below 0, the difference wraps around and is the larger of the two.
            function = _mixed(right, self._keys[i]) >> _HALF
            function *= self._lefts
            function >>= _HALF
            function += left
            left = np.minimum(function, function - self._lefts)
            right = right ^ (_mixed(left, self._keys[i + 1]) >> _HALF & self._right_mask)
        return (left << self._right_bits) | right


def _mixed(values: np.ndarray, key: np.uint64) -> np.ndarray:
    """Return 64 bits, of which the upper half depends on every bit of the values and the key."""
    mixed = values ^ key
    mixed *= _MULTIPLIERS[0]
    mixed ^= mixed >> _HALF
    mixed *= _MULTIPLIERS[1]
    return mixed
