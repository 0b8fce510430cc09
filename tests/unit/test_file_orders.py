"""The global order of files is the same at any number of ranks, for any options, also after a change of the number."""

import numpy as np
import pytest
from helpers.data_files import FORMATS
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdkit.data import GlobalBatches
from hvdkit.data.files.scanning import digest
from hvdkit.data.files.source import _pieces

ROWS = (37, 1, 60, 22)  # of the files
EXAMPLES = sum(ROWS)
BATCH_SIZES = st.integers(4, 50)
OPTIONS = st.one_of(
    st.fixed_dictionaries({"shuffle_seed": st.one_of(st.none(), st.integers(0, 9))}),
    st.fixed_dictionaries(
        {
            "shuffle": st.just("blocks"),
            "shuffle_seed": st.one_of(st.none(), st.integers(0, 9)),
            "shuffle_buffer": st.integers(1, 80),
            "interleave": st.integers(1, 4),
        }
    ),
)


@pytest.fixture(scope="module", params=FORMATS)
def files(request, tmp_path_factory):
    """Return a source of four files with several blocks, and the function that returns a batch's examples."""
    write, read, check = FORMATS[request.param]
    folder = tmp_path_factory.mktemp("files")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hvdkit.data.files.records.BLOCK_BYTES", 600)
        starts = np.cumsum([0, *ROWS])
        for number, rows in enumerate(ROWS):
            write(folder / f"part_{number}", range(starts[number], starts[number] + rows))
        return read(folder), check


def ranks_of(source, batch_size, size, options, epochs):
    return [GlobalBatches(source, batch_size, rank=r, size=size, epochs=epochs, **options) for r in range(size)]


def examples_of(ranks, check):
    """Return the examples of the global batches, and which are real."""
    batches = [
        np.concatenate([np.stack([check(batch), each.mask], axis=1) for each, batch in zip(ranks, parts, strict=True)])
        for parts in zip(*ranks, strict=True)
    ]
    return np.stack(batches)


@given(batch_size=BATCH_SIZES, options=OPTIONS, remainder=st.sampled_from(["pad", "drop"]), data=st.data())
@settings(max_examples=6)  # for each of six formats
def test_the_order_does_not_depend_on_the_number_of_ranks(files, batch_size, options, remainder, data):
    (source, check), epochs, options = files, 2, {**options, "remainder": remainder}
    whole = examples_of(ranks_of(source, batch_size, 1, options, epochs), check)
    for epoch in np.split(whole, epochs):
        seen = epoch[epoch[..., 1] == 1][:, 0].tolist()
        assert len(set(seen)) == len(seen) == (EXAMPLES if remainder == "pad" else EXAMPLES // batch_size * batch_size)
        if options.get("shuffle") is None and options["shuffle_seed"] is None:
            assert seen == list(range(len(seen)))
    first, second = data.draw(st.permutations([2, 3, 4]))[:2]
    stop = data.draw(st.integers(0, len(whole) - 1))
    before = ranks_of(source, batch_size, first, options, epochs)
    steps = [[next(each) for each in before] for _ in range(stop)]
    for step, parts in zip(whole, steps, strict=False):
        np.testing.assert_array_equal(np.concatenate([check(part) for part in parts]), step[:, 0])
    after = ranks_of(source, batch_size, second, options, epochs)
    for each in after:
        each.restore(before[0].state)
    np.testing.assert_array_equal(examples_of(after, check), whole[stop:])


def indices_of(starts, data):
    """Return the indices of a batch: a run, or in any order and several times."""
    rows = st.integers(0, starts[-1] - 1)
    if data.draw(st.booleans()):
        first, last = sorted(data.draw(st.tuples(rows, rows)))
        return np.arange(first, last + 1)
    return np.array(data.draw(st.lists(rows, min_size=1, max_size=20)), np.int64)


@given(blocks=st.lists(st.integers(0, 5), min_size=1, max_size=8).filter(any), data=st.data())
def test_the_pieces_of_a_batch_are_its_rows_in_each_block(blocks, data):
    starts = np.cumsum([0, *blocks])
    indices = indices_of(starts, data)
    found, numbers = np.full(len(indices), -1), []
    for number, rows, places in _pieces(indices, starts):
        rows = np.arange(starts[-1])[rows] if isinstance(rows, slice) else rows
        assert (rows < blocks[number]).all()
        assert (found[places] == -1).all()
        found[places] = starts[number] + rows
        numbers.append(number)
    assert found.tolist() == indices.tolist()
    assert numbers == sorted(set(numbers))


def test_the_digest_of_many_blocks_does_not_depend_on_how_many_are_digested_at_once(files, monkeypatch):
    source, _ = files
    names = [(name, file.size) for name, (file, _) in source._files.items()]
    expected = digest((names, source._block_starts.tolist()))
    for number in (1, 3, 4096):
        monkeypatch.setattr("hvdkit.data.files.source._DIGESTED_AT_ONCE", number)
        assert source.digest() == expected
