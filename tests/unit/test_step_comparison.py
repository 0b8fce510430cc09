"""The verdicts of ``hk.check_step`` and ``hvdkit check``, their causes, and the usage of the command."""

from __future__ import annotations

import math

import numpy as np
import pytest

from hvdkit.commands.check import CheckSteps, check
from hvdkit.commands.cli import main
from hvdkit.keras.checking.step_comparison import compare_recordings
from hvdkit.keras.checking.step_records import RecordedArray, Recording, StepRecord

ONES = np.linspace(0.5, 1.5, 1000)


def arrays(**values):
    return {name: RecordedArray.of(np.asarray(value, np.float64)) for name, value in values.items()}


def recording(ranks, *, loss=0.5, metric=0.9, gradient=ONES, variable=ONES, state=ONES, steps=2, **options):
    step = StepRecord({"loss": loss, "accuracy": metric}, arrays(w=gradient), arrays(w=variable), arrays(mean=state))
    return Recording(ranks, [step] * steps, **options)


def verdicts(result):
    return {(each.kind, each.name): each.verdict for each in result.values}


def test_equal_rounding_and_different():
    same = compare_recordings(recording(1), recording(2))
    assert set(verdicts(same).values()) == {"equal"} and same.is_equal and not same.causes
    close = {"loss": 0.5 + 2e-6, "gradient": ONES * (1 + 2e-5), "variable": ONES * (1 - 2e-5)}
    rounded = compare_recordings(recording(1), recording(2, **close))
    assert (
        rounded.is_equal
        and [verdicts(rounded)[key] for key in (("loss", "loss"), ("variable", "w"))] == ["rounding"] * 2
    )
    for change, kind, cause in (
        ({"loss": 1.0}, "loss", "the loss is 2 times"),
        ({"metric": 0.8}, "metric", "metric accuracy"),
        ({"gradient": ONES / 2, "loss": 0.25}, "gradient", "every gradient is 0.5 times"),
        ({"gradient": ONES**2}, "gradient", "gradients differ (w), but the loss does not"),
        ({"gradient": ONES**2, "loss": 0.6}, "loss", "not the mean of its rows' losses"),
        ({"variable": ONES**2}, "variable", "without the optimizer"),
        ({"state": ONES**2}, "state", "hk.synchronize"),
        ({"loss": math.nan}, "loss", ""),
        ({"first_rows": "b", "loss": 1.0}, "loss", "read different rows"),
        ({"local_normalizations": ["bn"], "loss": 1.0}, "loss", "BatchNormalization (bn)"),
    ):
        result = compare_recordings(recording(1, first_rows="a"), recording(2, **({"first_rows": "a"} | change)))
        assert not result.is_equal and any(cause in each for each in result.causes), (change, result.causes)
        assert any(each.kind == kind and each.verdict == "different" for each in result.values), change
        assert "different in step 1" in str(result) and str(result).splitlines()[-1].startswith("different: ")


def test_gradients_that_are_zero_but_for_rounding_have_no_digits():
    """A bias before a normalization: its gradient is noise, of which Adam makes whole updates."""
    noise = np.random.default_rng(0)
    one = StepRecord({}, arrays(w=ONES, b=noise.normal(size=8) * 1e-9), arrays(w=ONES, b=noise.normal(size=8)))
    two = StepRecord({}, arrays(w=ONES, b=noise.normal(size=8) * 1e-9), arrays(w=ONES, b=noise.normal(size=8)))
    result = compare_recordings(Recording(1, [one]), Recording(2, [two]))
    assert result.is_equal and verdicts(result)[("variable", "b")] == "rounding"
    assert "rounding of zero" in str(result)
    for steps, is_equal in ((1, False), (2, True)):  # a moving mean after it follows from the second step on
        first = Recording(1, [one] * (steps - 1) + [StepRecord(states=arrays(mean=ONES))])
        second = Recording(2, [two] * (steps - 1) + [StepRecord(states=arrays(mean=ONES * 1.01))])
        assert compare_recordings(first, second).is_equal == is_equal
    two.gradients["b"] = RecordedArray.of(np.full(8, 1e-3))
    assert not compare_recordings(Recording(1, [one]), Recording(2, [two])).is_equal


def test_random_numbers_do_not_count_and_are_said():
    result = compare_recordings(recording(1, draws=["noise/normal"]), recording(2, loss=1.0, silenced=["dropout"]))
    assert result.is_equal and verdicts(result)[("loss", "loss")] == "random"
    text = str(result)
    assert "note: switched off, as each rank draws its own random numbers: dropout" in text
    assert "noise/normal" in text and text.splitlines()[-1].startswith("not comparable: 1 value")


def test_a_part_of_a_large_array_differs_and_many_values_are_summarized():
    large = np.ones(1_000_003)
    other = large.copy()
    other[1] = 3000.0  # between the samples
    one = recording(1, variable=large)
    assert not compare_recordings(one, recording(2, variable=other)).is_equal
    many = {f"w{number}": ONES for number in range(100)}
    wrong = many | {"w7": ONES * 2}
    first = Recording(1, [StepRecord({"loss": 1.0}, arrays(**many))])
    second = Recording(2, [StepRecord({"loss": 1.0}, arrays(**wrong))])
    text = str(compare_recordings(first, second))
    assert len(text.splitlines()) < 20 and "gradient: 99 more equal" in text and "w7 " in text
    missing = Recording(2, [StepRecord({"loss": 1.0}, arrays(w0=ONES))])
    assert not compare_recordings(first, missing).is_equal


def test_a_recording_is_read_as_it_was_written(tmp_path):
    written = recording(2, first_rows="a", draws=["b"], initial={"dense/kernel": np.ones((2, 3), "float32")})
    written.save(tmp_path / "one.npz")
    read = Recording.load(tmp_path / "one.npz")
    assert str(compare_recordings(written, read)) == str(compare_recordings(read, written))
    assert read.draws == ["b"] and read.initial["dense/kernel"].dtype == np.float32 and read.ranks == 2
    np.testing.assert_array_equal(read.steps[1].gradients["w"].values, written.steps[1].gradients["w"].values)


def test_wrong_usage_of_the_command_says_what_to_write(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    for words, message in (
        (["-np", "2"], "program: got none, expected a Python script; write: hvdkit check -np 2 train.py"),
        (["-np", "2", "absent.py"], "absent.py (no such file in"),
        (["-np", "2", "--", "python", "-m", "train"], "expected a Python script"),
        (["-np", "1", "train.py"], "-np: got 1, expected at least 2"),
        (["--steps", "0", "train.py"], "--steps: got 0, expected at least 1"),
    ):
        assert main(["check", *words]) == 2
        assert message in " ".join(capsys.readouterr().err.split()), words
    with pytest.raises(ValueError, match="no such file"):
        check(CheckSteps(), ["python", "absent.py"])
