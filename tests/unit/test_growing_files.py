"""Files that are added while a run goes on."""

import json

import numpy as np
import pytest
import tensorflow as tf
from helpers.cases import case

import hvdkit as hk

ORDERS = [{}, {"shuffle_seed": 3}, {"shuffle_seed": 3, "shuffle": "blocks", "interleave": 2, "shuffle_buffer": 8}]


def add(folder, name, *ids):
    (folder / name).parent.mkdir(exist_ok=True, parents=True)
    np.save(folder / name, np.arange(*ids))


def opened(folder, rank=0, size=1, **options):
    return hk.data.GlobalBatches(hk.data.npy(folder), 4, rank=rank, size=size, **options)


def ids_of(batches):
    """Return the examples of an epoch, without filler."""
    return [i for batch in batches.one_epoch() for i, real in zip(batch.tolist(), batches.mask, strict=True) if real]


def test_appended_files_are_read_from_the_next_epoch_on(tmp_path):
    for number, order in enumerate(ORDERS):
        folder = tmp_path / str(number)
        add(folder, "b.npy", 10)
        batches = opened(folder, growth="append", **order)
        with case(order=order):
            assert sorted(ids_of(batches)) == [*range(10)] and batches.add_new_files() == []
            add(folder, "a.npy", 10, 15)
            add(folder, "hour=1/c.npy", 15, 17)
            assert sorted(ids_of(batches)) == [*range(10)]
            assert batches.add_new_files() == ["a.npy", "hour=1/c.npy"]
            assert sorted(ids_of(batches)) == [*range(17)]
            assert (batches.epoch, batches.step, batches.steps_per_epoch) == (2, 3 + 3 + 5, 5)
            assert batches.state == batches.state_at(11)


def test_replaced_files_are_read_once(tmp_path):
    for number, order in enumerate(ORDERS):
        folder = tmp_path / str(number)
        add(folder, "0.npy", 6)
        batches = opened(folder, growth="replace", **order)
        with case(order=order):
            assert sorted(ids_of(batches)) == [*range(6)]
            assert ids_of(batches) == [] and list(batches) == []  # until there are new files
            (folder / "0.npy").unlink()
            for hour, (start, stop) in enumerate([(6, 13), (13, 14), (14, 30)], 1):
                add(folder, f"{hour}.npy", start, stop)
                assert batches.add_new_files() == [f"{hour}.npy"]
                assert sorted(ids_of(batches)) == [*range(start, stop)]
                assert batches.add_new_files() == []
            assert (batches.epoch, batches.step) == (3, 2 + 2 + 1 + 4)


@pytest.mark.parametrize(("growth", "order"), [*zip(["append", "replace", "append"], ORDERS, strict=True)])
def test_a_state_names_its_files_and_continues_at_any_number_of_ranks(tmp_path, growth, order):
    def add_hour(folder, hour):
        add(folder, f"{9 - hour}.npy", 10 * hour, 10 * hour + 9 - hour)  # each sorts before the earlier ones

    def batches_of(ranks):
        """Return the rest of the epoch, as read by all ranks together."""
        each = zip(*(rank.one_epoch() for rank in ranks), strict=True)
        return [np.concatenate(batch).tolist() for batch in each]

    add_hour(tmp_path, 0)
    whole, batches = (opened(tmp_path, growth=growth, **order) for _ in range(2))
    expected = [batches_of([whole])]
    for hour in (1, 2):
        add_hour(tmp_path, hour)
        whole.add_new_files()
        expected.append(batches_of([whole]))
        if hour == 1:  # the other run is interrupted here
            assert batches_of([batches]) == expected[0] and batches.add_new_files() == ["8.npy"]
            first = [next(batches).tolist()]
            state = json.loads(json.dumps(batches.state))

    ranks = [opened(tmp_path, rank, 3, growth=growth, **order) for rank in range(3)]  # finds the last hour, too
    for rank in ranks:
        rank.restore(state)
    assert first + batches_of(ranks) == expected[1]
    assert [rank.add_new_files() for rank in ranks] == [["7.npy"]] * 3
    assert ranks[0].state == whole.state_at(whole.step - len(expected[2]))
    assert batches_of(ranks) == expected[2]


def test_too_few_new_rows_wait(tmp_path):
    add(tmp_path, "0.npy", 8)
    batches = opened(tmp_path, growth="replace", remainder="drop")
    ids_of(batches)
    add(tmp_path, "1.npy", 8, 10)
    assert batches.add_new_files() == []
    add(tmp_path, "2.npy", 10, 12)
    assert batches.add_new_files() == ["1.npy", "2.npy"] and ids_of(batches) == [8, 9, 10, 11]


def test_a_file_that_waits_may_grow(tmp_path):
    (tmp_path / "0.csv").write_text("0\n" * 8)
    source = hk.data.delimited(tmp_path, {"id": "int64"})
    batches = hk.data.GlobalBatches(source, 4, growth="replace", remainder="drop", rank=0, size=1)
    assert len([*batches.one_epoch()]) == 2
    (tmp_path / "1.csv").write_text("1\n" * 2)
    assert batches.add_new_files() == []
    (tmp_path / "1.csv").write_text("1\n" * 12)
    assert batches.add_new_files() == ["1.csv"]
    assert [batch["id"].tolist() for batch in batches.one_epoch()] == [[1] * 4] * 3


def test_misuse_is_an_error_that_changes_nothing(tmp_path):
    add(tmp_path, "0.npy", 8)
    batches = opened(tmp_path, growth="append")
    next(batches)
    with pytest.raises(ValueError, match="add_new_files: got step 1 of epoch 0, expected the end of an epoch"):
        batches.add_new_files()
    state = batches.state
    add(tmp_path, "1.npy", 8, 12)
    with pytest.raises(ValueError, match=r"state\['file_names'\]: got 9\.npy, expected files that are listed now"):
        batches.restore({**state, "file_names": ["0.npy", "9.npy"]})
    with pytest.raises(ValueError, match=r"state: got no .*file_names"):
        batches.restore(opened(tmp_path / "0.npy").state)
    assert batches.state == state and next(batches).tolist() == [4, 5, 6, 7]
    add(tmp_path, "0.npy", 9)
    with pytest.raises(hk.DataError, match=r"0\.npy changed or disappeared"):
        batches.add_new_files()
    with pytest.raises(TypeError, match="growth: got append, expected files"):
        hk.data.GlobalBatches(np.arange(8), 4, growth="append", rank=0, size=1)
    with pytest.raises(ValueError, match="growth: got yes"):
        opened(tmp_path, growth="yes")
    with pytest.raises(TypeError, match="growth: got None, expected 'append' or 'replace'"):
        opened(tmp_path).add_new_files()


def test_names_of_files_are_relative_to_the_paths(tmp_path):
    for name in ("day=1/a.npy", "day=2/a.npy"):
        add(tmp_path, name, 3)
    names = ["day=1/a.npy", "day=2/a.npy"]
    for paths in (tmp_path, tmp_path / "day=*/*.npy", [tmp_path / name for name in names]):
        assert hk.data.npy(paths).names == names
    assert hk.data.npy(tmp_path / "day=1" / "*.npy").names == ["a.npy"]
    assert hk.data.npy([tmp_path / "day=1", tmp_path / "day=2/a.npy"]).names == names


def test_files_that_were_not_read_yet_are_not_replaced(tmp_path):
    add(tmp_path, "0.npy", 8)
    batches = opened(tmp_path, growth="replace")
    add(tmp_path, "1.npy", 8, 12)
    assert batches.add_new_files() == ["1.npy"] and ids_of(batches) == [*range(12)]
    add(tmp_path, "2.npy", 12, 20)
    batches.add_new_files()
    state = batches.state  # saved before the epoch is read
    add(tmp_path, "3.npy", 20, 24)
    continued = opened(tmp_path, growth="replace")
    continued.restore(state)
    assert continued.add_new_files() == ["3.npy"] and ids_of(continued) == [*range(12, 24)]
    assert continued.add_new_files() == []


def test_a_keras_data_set_must_be_made_again_for_new_files(tmp_path):
    np.save(tmp_path / "0.npy", np.arange(8))
    batches = opened(tmp_path, growth="append")
    dataset = batches.as_keras()
    assert len([*dataset]) == 2
    ids_of(batches)
    add(tmp_path, "1.npy", 8, 16)
    batches.add_new_files()
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"got other files than when.*call as_keras"):
        next(iter(dataset))
    assert len([*batches.as_keras()]) == 4


def test_files_that_keras_has_read_are_replaced(tmp_path):
    add(tmp_path, "0.npy", 8)
    batches = opened(tmp_path, growth="replace")
    assert len([*batches.as_keras()]) == 2  # does not advance the iterator
    (tmp_path / "0.npy").unlink()
    add(tmp_path, "1.npy", 8, 12)
    assert batches.add_new_files() == ["1.npy"]
    assert [batch.numpy().tolist() for batch in batches.as_keras()] == [[8, 9, 10, 11]]


def test_a_keras_data_set_serves_again_when_its_files_are_restored(tmp_path):
    add(tmp_path, "0.npy", 8)
    batches = opened(tmp_path, growth="append")
    state, dataset = batches.state, batches.as_keras()
    ids_of(batches)
    add(tmp_path, "1.npy", 8, 16)
    batches.add_new_files()
    batches.restore(state)
    assert len([*dataset]) == 2


def test_a_state_of_wrong_types_is_an_error(tmp_path):
    add(tmp_path, "0.npy", 8)
    batches = opened(tmp_path, growth="append")
    state = batches.state
    for key, value, error in (
        ("file_names", None, TypeError),
        ("file_names", "0.npy", TypeError),
        ("earlier_files", [1], TypeError),
        ("first_epoch", None, TypeError),
        ("first_step", -1, ValueError),
        ("first_epoch", 3, ValueError),  # later than the epoch itself
    ):
        with pytest.raises(error, match=rf"state\['({key}|epoch)'\]: got"):
            batches.restore({**state, key: value})
    assert batches.state == state
