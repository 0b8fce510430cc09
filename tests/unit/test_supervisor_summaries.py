"""Event files of runs that are killed and continued, read with TensorBoard's own reader."""

from __future__ import annotations

import itertools
import os
import resource
import signal
import struct
import subprocess
import sys
import tempfile

import numpy as np
import pytest
import tensorflow as tf
from helpers.cases import case
from helpers.faults import limited
from helpers.speed import WAIT
from tensorboard.backend.event_processing.event_accumulator import STORE_EVERYTHING_SIZE_GUIDANCE, EventAccumulator

from hvdkit.errors import CheckpointError
from hvdkit.supervisor import summaries as module
from hvdkit.supervisor.summaries import Summaries, remove_after

# A run that saves every ten steps and is then killed; the value written at step s identifies the run.
RUN = """
import os, signal, sys
from hvdkit.supervisor.summaries import Summaries
folder, resume_at, last, run = sys.argv[1], *map(int, sys.argv[2:])
summaries = Summaries(folder, resume_at=resume_at)
for step in range(resume_at + 1, last + 1):
    summaries.scalars(step, loss=step + run / 10, **{"rate/now": run, "x" * 1000: 1.0})
    if step % 10 == 0:
        summaries.flush()
        print(step, flush=True)  # now the checkpoint would be committed
os.kill(os.getpid(), signal.SIGKILL)
"""


def run_until_killed(folder, resume_at, last, run):
    """Return the step of the last checkpoint of a run that is killed with SIGKILL."""
    command = [sys.executable, "-c", RUN, *map(str, (folder, resume_at, last, run))]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=WAIT)
    assert done.returncode == -signal.SIGKILL
    return int(done.stdout.split()[-1])


def read(folder):
    accumulator = EventAccumulator(str(folder), size_guidance=STORE_EVERYTHING_SIZE_GUIDANCE)
    return accumulator.Reload()


def scalars(folder, tag="loss"):
    return [(event.step, event.value) for event in read(folder).Scalars(tag)]


def files(folder):
    return sorted(folder.glob("*tfevents*"))


def event_steps(path):
    """Return the steps of a file's summaries, read by TensorFlow, which raises an error for a truncated record."""
    records = (tf.compat.v1.Event.FromString(record.numpy()) for record in tf.data.TFRecordDataset(str(path)))
    return [event.step for event in records if event.HasField("summary")]


def write(folder, steps, **options):
    with Summaries(folder, **options) as summaries:
        for step in steps:
            summaries.scalars(step, loss=float(step))


@pytest.mark.nightly
def test_two_kills_and_continuations_leave_each_step_once(tmp_path):
    saved = run_until_killed(tmp_path, 0, 37, 1)
    assert saved == 30
    assert [step for step, _ in scalars(tmp_path)][:30] == list(range(1, 31))  # flushed records survive the kill
    saved = run_until_killed(tmp_path, saved, 58, 2)
    assert saved == 50
    with Summaries(tmp_path, resume_at=saved) as summaries:
        for step in range(51, 61):
            summaries.scalars(step, loss=step + 0.3, **{"rate/now": 3})
    seen = scalars(tmp_path)
    assert [step for step, _ in seen] == list(range(1, 61))
    runs = [1] * 30 + [2] * 20 + [3] * 10
    np.testing.assert_allclose([value for _, value in seen], np.arange(1, 61) + np.array(runs) / 10, rtol=1e-6)
    assert [value for _, value in scalars(tmp_path, "rate/now")] == runs
    assert list(itertools.chain(*map(event_steps, files(tmp_path)))) == list(range(1, 61))


def test_the_default_accumulator_keeps_all_scalars(tmp_path):
    write(tmp_path, range(1, 501))
    assert [event.step for event in EventAccumulator(str(tmp_path)).Reload().Scalars("loss")] == list(range(1, 501))


def test_a_reader_that_watches_forgets_the_steps_too(tmp_path):
    write(tmp_path, range(1, 14), resume_at=0)
    watching = read(tmp_path)
    write(tmp_path, range(11, 13), resume_at=10)
    assert [event.step for event in watching.Reload().Scalars("loss")] == list(range(1, 13))


def test_a_run_killed_before_its_first_checkpoint_starts_anew(tmp_path):
    write(tmp_path, range(1, 14), resume_at=0)
    write(tmp_path, range(1, 4), resume_at=0)
    assert scalars(tmp_path) == [(1, 1.0), (2, 2.0), (3, 3.0)]


def test_without_a_step_to_resume_at_nothing_is_removed(tmp_path):
    write(tmp_path, [1, 2])
    write(tmp_path, [3])
    assert [step for step, _ in scalars(tmp_path)] == [1, 2, 3]


def test_a_torn_last_record_is_dropped(tmp_path):
    for cut in (1, 9, 15, 30):
        folder = tmp_path / str(cut)
        write(folder, range(1, 8))
        (path,) = files(folder)
        os.truncate(path, path.stat().st_size - cut)
        write(folder, range(7, 10), resume_at=6)
        assert [step for step, _ in scalars(folder)] == list(range(1, 10)), cut
        assert list(itertools.chain(*map(event_steps, files(folder)))) == list(range(1, 10)), cut


def test_an_empty_file_is_no_trouble(tmp_path):
    (tmp_path / "events.out.tfevents.0000000001.host.1").touch()
    write(tmp_path, [1, 2], resume_at=0)
    assert scalars(tmp_path) == [(1, 1.0), (2, 2.0)]


def test_only_files_with_later_events_are_rewritten(tmp_path):
    write(tmp_path, range(1, 6))
    write(tmp_path, range(6, 9))
    before = [path.stat() for path in files(tmp_path)]
    remove_after(tmp_path, 6)
    after = [path.stat() for path in files(tmp_path)]
    assert [old.st_ino == new.st_ino for old, new in zip(before, after, strict=True)] == [True, False]
    assert [step for step, _ in scalars(tmp_path)] == list(range(1, 7))


def test_events_of_step_0_and_other_files_stay(tmp_path):
    write(tmp_path / "validation", range(1, 6))
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / ".rewritten").write_text("left by a kill while a file was rewritten")
    graph = tf.function(lambda x: x + 1).get_concrete_function(tf.TensorSpec([])).graph.as_graph_def()
    with tf.io.TFRecordWriter(str(tmp_path / "events.out.tfevents.0000000001.host.1")) as writer:
        writer.write(tf.compat.v1.Event(file_version="brain.Event:2").SerializeToString())
        writer.write(tf.compat.v1.Event(graph_def=graph.SerializeToString()).SerializeToString())
    write(tmp_path, range(1, 6))
    remove_after(tmp_path, 0)
    seen = read(tmp_path)
    assert type(graph).FromString(seen.Graph().SerializeToString()) == graph
    assert seen.file_version == 2.0 and seen.Tags()["scalars"] == []
    assert [step for step, _ in scalars(tmp_path / "validation")] == [1, 2, 3, 4, 5]
    assert (tmp_path / "notes.txt").read_text() == "mine" and not (tmp_path / ".rewritten").exists()


def test_files_sort_in_the_order_of_their_runs(tmp_path):
    """Also within one second, and after a host whose clock is ahead."""
    ahead = tmp_path / "events.out.tfevents.3000000000.host.1"
    ahead.touch()
    expected = [ahead]
    for _ in range(3):
        write(tmp_path, [1])
        (new,) = set(files(tmp_path)) - set(expected)
        expected.append(new)
    assert files(tmp_path) == expected


@pytest.mark.nightly
def test_memory_stays_bounded(tmp_path):
    """Writing and rewriting 100 MB needs memory for some records, not for the file."""
    code = """
import resource, sys
import numpy as np
from hvdkit.supervisor.summaries import Summaries
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
pixels = np.random.default_rng(0).integers(0, 256, (1, 600, 600, 3), np.uint8)
with Summaries(sys.argv[1]) as summaries:
    summaries.image(0, "noise", pixels)
    before = peak()
    for step in range(100):
        summaries.image(step, "noise", pixels)
Summaries(sys.argv[1], resume_at=90).close()
print(peak() - before)
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True, check=True)
    assert sum(path.stat().st_size for path in files(tmp_path)) > 90e6
    assert float(done.stdout) < 60


def test_values_of_every_kind_of_number(tmp_path):
    values = {"a": 1, "b": np.float16(0.5), "c": tf.constant([2.0]), "d": tf.Variable(3), "e": True, "f": float("nan")}
    values["g"] = tf.constant(0.25, tf.bfloat16)
    with Summaries(tmp_path) as summaries:
        summaries.scalars(5, step=7.0, **values)
    seen = read(tmp_path)
    got = [seen.Scalars(tag)[0].value for tag in ("step", *values)]
    np.testing.assert_array_equal(got, [7.0, 1.0, 0.5, 2.0, 3.0, 1.0, np.nan, 0.25])
    assert seen.Scalars("a")[0].step == 5


def test_what_is_no_number_is_refused(tmp_path):
    for value in ("1.0", [1.0, 2.0], None, 1j, []):
        with case(value=value), Summaries(tmp_path) as summaries, pytest.raises(TypeError, match="loss: got"):
            summaries.scalars(1, loss=value)


def test_a_histogram(tmp_path):
    for dtype in ("float16", "bfloat16", "float32", "float64", "int64", "uint8", "bool"):
        values = tf.cast(tf.reshape(tf.range(120), [30, 4]), dtype)
        with Summaries(tmp_path / dtype) as summaries:
            summaries.histogram(3, "weights", tf.Variable(values))
        (event,) = read(tmp_path / dtype).Tensors("weights")
        buckets = tf.make_ndarray(event.tensor_proto)
        host = values.numpy().astype(np.float64)
        counts, _ = np.histogram(host, 30)
        assert event.step == 3 and buckets.shape == (30, 3), dtype
        np.testing.assert_array_equal(buckets[:, 2], counts, dtype)
        np.testing.assert_allclose([buckets[0, 0], buckets[-1, 1]], [host.min(), host.max()], err_msg=dtype)


def test_a_histogram_leaves_out_what_is_not_finite(tmp_path):
    with Summaries(tmp_path) as summaries:
        summaries.histogram(1, "gradients", [1.0, np.nan, 2.0, np.inf])
        summaries.histogram(2, "gradients", [])
    counts = [tf.make_ndarray(event.tensor_proto)[:, 2].sum() for event in read(tmp_path).Tensors("gradients")]
    assert counts == [2, 0]


def test_images(tmp_path):
    for channels in (1, 2, 3, 4):
        with case(channels=channels):
            check_images(tmp_path / str(channels), channels)


def check_images(folder, channels):
    pixels = np.random.default_rng(0).integers(0, 256, (3, 8, 5, channels), np.uint8)
    with Summaries(folder) as summaries:
        summaries.image(1, "many", pixels)
        summaries.image(2, "one", pixels[0])
        summaries.image(2, "floats", tf.constant(pixels / 255.0, tf.float32))
        summaries.image(2, "beyond", np.full((2, 2, 1), 7.0))
    seen = read(folder)

    def decoded(tag):
        width, height, *images = tf.make_ndarray(seen.Tensors(tag)[0].tensor_proto)
        return int(width), int(height), np.stack([tf.io.decode_png(one).numpy() for one in images])

    for tag, expected in (("many", pixels), ("one", pixels[:1]), ("floats", pixels)):
        width, height, images = decoded(tag)
        assert (width, height) == (5, 8)
        np.testing.assert_array_equal(images, expected)
    assert (decoded("beyond")[2] == 255).all()
    assert seen.SummaryMetadata("many").plugin_data.plugin_name == "images"


def test_what_is_no_image_is_refused(tmp_path):
    with Summaries(tmp_path) as summaries:
        for images in (np.zeros((8, 8)), np.zeros((8, 8, 5)), np.zeros((8, 8, 3), np.int32)):
            with case(shape=images.shape), pytest.raises(ValueError, match=r"images \(x\): got shape"):
                summaries.image(1, "x", images)


def test_a_disk_that_takes_no_more(tmp_path):
    """Simulate a full disk with a limit on the size of files. The next run reads everything flushed."""
    summaries, errors = Summaries(tmp_path), []
    with limited(resource.RLIMIT_FSIZE, 20_000):
        try:
            for step in range(1, 1000):
                summaries.scalars(step, loss=float(step), **{"x" * 100: 1.0})
                if step % 10 == 0:
                    summaries.flush()
                    saved = step
        except CheckpointError as error:
            errors.append(str(error))
        with pytest.raises(CheckpointError) as caught:
            summaries.flush()
        errors.append(str(caught.value))
        summaries.close()
    (path,) = files(tmp_path)
    first, second = errors
    assert first.startswith(f"{path}: cannot be written (File too large)") and second.startswith(f"{path}: closed")
    write(tmp_path, [saved + 1], resume_at=saved)
    assert [step for step, _ in scalars(tmp_path)] == list(range(1, saved + 2))


def test_a_full_disk_is_named_with_the_remedy(tmp_path, monkeypatch):
    """/dev/full reports what a full disk reports."""
    (tmp_path / "full").symlink_to("/dev/full")
    monkeypatch.setattr(module, "_new_path", lambda folder: folder / "full")
    with pytest.raises(CheckpointError, match=r"full: cannot be written \(No space left on device\); free space there"):
        Summaries(tmp_path)


def test_event_files_with_wrong_contents(tmp_path):
    """A FIFO would wait for a writer, and the length that a record claims would be allocated."""
    write(tmp_path, range(1, 6))
    (path,) = files(tmp_path)
    good = path.read_bytes()
    length = struct.pack("<Q", 2**60)
    path.write_bytes(good + length + struct.pack("<I", masked_crc(length)) + b"x" * 20)
    remove_after(tmp_path, 4)
    assert [step for step, _ in scalars(tmp_path)] == [1, 2, 3, 4]

    with tf.io.TFRecordWriter(str(path)) as writer:
        writer.write(b"\xff" * 9)
    with pytest.raises(CheckpointError, match=rf"{path.name}: has a record that is not an event .*move it away"):
        remove_after(tmp_path, 4)
    path.unlink()
    for make in (os.mkfifo, lambda p: p.symlink_to("/dev/zero"), lambda p: p.symlink_to("nowhere")):
        make(path)
        with pytest.raises(CheckpointError, match=path.name):
            remove_after(tmp_path, 4)
        path.unlink()


def masked_crc(data: bytes) -> int:
    """Return the checksum that a TFRecord file has of ``data``: TensorFlow writes it after the length."""
    with tempfile.NamedTemporaryFile() as file:
        with tf.io.TFRecordWriter(file.name) as writer:
            writer.write(data)
        return struct.unpack("<I", file.read()[-4:])[0]


def test_a_folder_that_is_a_file(tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(CheckpointError, match=str(tmp_path / "run")):
        Summaries(tmp_path / "run")


def test_close_twice_and_write_after(tmp_path):
    summaries = Summaries(tmp_path)
    summaries.close()
    summaries.close()
    with pytest.raises(CheckpointError, match="closed"):
        summaries.scalars(1, loss=1.0)


def test_the_files_are_those_of_tensorboard(tmp_path):
    """TensorBoard's writer and this one may share a folder, and both files are cleaned."""
    writer = tf.summary.create_file_writer(str(tmp_path))
    with writer.as_default():
        for step in range(1, 6):
            tf.summary.scalar("theirs", float(step), step=step)
    writer.close()
    write(tmp_path, range(1, 6))
    remove_after(tmp_path, 3)
    assert [event.step for event in read(tmp_path).Tensors("theirs")] == [1, 2, 3]
    assert [step for step, _ in scalars(tmp_path)] == [1, 2, 3]
