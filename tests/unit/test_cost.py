"""The predicted cost of a step, the file with the measurements, and its settings."""

from __future__ import annotations

import dataclasses
import itertools
import json

import pytest
from helpers.cases import case

from hvdkit.cluster import settings
from hvdkit.cluster.tuned import read_settings
from hvdkit.commands.cli import main
from hvdkit.commands.measure.config import Tune
from hvdkit.commands.measure.cost import (
    Link,
    allreduce_seconds,
    alltoall_seconds,
    fit_link,
    predict_scaling,
    step_cost,
)
from hvdkit.commands.measure.measurements import Gradient, Measurements, TimedAllreduce
from hvdkit.commands.measure.tune import tune
from hvdkit.optimizer.buckets import buckets

LINK = Link(latency=50e-6, byte=8e-9, copy=0.3e-9, wakeup=1e-4)
MEASURED = Measurements(
    model="made up",
    batch=8,
    ranks=4,
    local_ranks=1,
    compute_alone=0.1,
    compute_together=0.1,
    spread=0.0,
    gradients=(Gradient(10_000_000, 1.0), Gradient(10_000_000, 0.7), Gradient(10_000_000, 0.4)),
    copy=0.1e-9,
    exchanges=tuple(TimedAllreduce(4, n, allreduce_seconds(n, 4, LINK)) for n in (4, 4096, 2**22, 2**24)),
)


def test_large_messages_cost_what_the_ring_bound_says_and_small_ones_their_latency():
    for ranks in (2, 3, 4, 16, 64):
        nbytes = 100_000_000
        bound = 2 * (ranks - 1) / ranks * nbytes * LINK.byte
        assert bound < allreduce_seconds(nbytes, ranks, LINK) < 1.2 * bound
        assert allreduce_seconds(4, ranks, LINK) < 100 * LINK.latency
    assert allreduce_seconds(100, 1, LINK) == alltoall_seconds(100, 1, LINK) == 0
    assert 0.75 * 8e-3 < alltoall_seconds(1_000_000, 4, LINK) < 0.8 * 8e-3 + 6e-4


def test_the_link_is_found_in_timed_exchanges():
    for ranks in (2, 3, 4, 8):
        exchanges = [TimedAllreduce(ranks, n, allreduce_seconds(n, ranks, LINK)) for n in (4, 4096, 2**22, 2**24)]
        found = fit_link(exchanges, copy=LINK.copy / 3, cycle=2 * LINK.wakeup)
        assert found.byte == pytest.approx(LINK.byte, rel=0.02)
        assert found.latency == pytest.approx(LINK.latency, rel=0.5)
        predicted = allreduce_seconds(2**25, ranks, found)
        assert predicted == pytest.approx(allreduce_seconds(2**25, ranks, LINK), rel=0.02)
    with pytest.raises(ValueError, match="1 small and 0 large"):
        fit_link([TimedAllreduce(2, 4, 1e-4)], copy=1e-10, cycle=2e-4)


def test_buckets_hide_what_passes_while_the_rank_computes():
    fast, slow = dataclasses.replace(LINK, byte=1e-10), LINK
    together = step_cost(MEASURED, 4, fast, bucket_bytes=2**30)
    apart = step_cost(MEASURED, 4, fast, bucket_bytes=8_000_000)
    assert together.hidden == pytest.approx(0) and apart.hidden > 0.6 * apart.exchange
    assert apart.total < together.total
    # A slow link is busy from the first bucket on, so the rest of the step is exchange time.
    late = step_cost(MEASURED, 4, slow, bucket_bytes=8_000_000)
    assert late.total == pytest.approx(0.04 + late.exchange)
    for each in (together, apart, late):
        assert each.total == pytest.approx(each.compute + each.exchange - each.hidden + each.wait)
    rows = dataclasses.replace(MEASURED, row_bytes=3_000_000, row_exchanges=3)
    assert step_cost(rows, 4, fast, bucket_bytes=8_000_000).total > apart.total


def test_every_gradient_travels_once():
    nbytes = [3, 9, 1, 20, 5, 5, 40]
    for limit in (1, 8, 30, 10**9):
        cut = buckets(nbytes, limit)
        assert list(itertools.chain(*cut)) == list(reversed(range(7))), limit
        assert all(sum(nbytes[i] for i in bucket) >= limit for bucket in cut) or len(cut) == 1, limit
        assert buckets([], limit) == [], limit


def test_scaling_from_a_file(tmp_path, capsys):
    file = tmp_path / "measured.json"
    MEASURED.save(file)
    assert Measurements.load(file) == MEASURED
    made = predict_scaling(MEASURED, [8, 64], bandwidth=25e9)
    assert 0.8 < made.efficiency(64) < made.efficiency(8) < made.efficiency(1) == 1
    assert predict_scaling(MEASURED, [8]).efficiency(8) < 0.5
    assert main(["plan", "--measured", str(file), "--ranks", "8..100", "--bandwidth", "25Gbit"]) == 0
    shown = capsys.readouterr().out
    assert [line.split()[0] for line in shown.splitlines()[-6:]] == ["1", "8", "16", "32", "64", "100"]
    assert "30.0 MB of gradients" in shown and "link: 25.00 Gbit/s" in shown


def test_what_cannot_be_planned(tmp_path, capsys):
    MEASURED.save(tmp_path / "FILE")
    (tmp_path / "OTHER").write_text("{}")
    (tmp_path / "PART").write_text('{"format": 1}')
    for arguments, words in (
        ([], "--tables, --measured: got neither"),
        (["--tables", "a:3x2", "--measured", "FILE"], "--tables, --measured: got both"),
        (["--tables", "a:3x2", "--ranks", "2..4"], "--ranks: got 2..4"),
        (["--measured", "FILE", "--ranks", "0"], "--ranks: got 0"),
        (["--measured", "FILE", "--ranks", "x"], "--ranks: got x"),
        (["--measured", "FILE", "--bandwidth", "fast"], "--bandwidth: got fast"),
        (["--measured", "nowhere.json"], "No such file"),
        (["--measured", "OTHER"], "is not such a file"),
        (["--measured", "PART"], "lacks a part"),
    ):
        assert main(["plan", *(str(tmp_path / a) if a.isupper() else a for a in arguments)]) == 2, arguments
        assert words in capsys.readouterr().err, arguments


def test_the_file_of_tune_is_checked_before_and_not_created(tmp_path, capsys):
    for path, reason in ((tmp_path / "a" / "x.json", "No such file or directory"), (tmp_path, "Is a directory")):
        assert main(["tune", "--save", str(path)]) == 2
        printed = capsys.readouterr()
        shown = " ".join((printed.out + printed.err).replace("│", " ").split())
        assert f"({reason}), expected a file that can be written; pass another" in shown, path
    assert Tune(save=tmp_path / "new.json") and not list(tmp_path.iterdir())


def test_the_end_of_tune_can_be_pasted(tmp_path, monkeypatch):
    file = tmp_path / "[green]" / "tuned.json"  # brackets are commands to some printers
    file.parent.mkdir()
    best = dataclasses.replace(MEASURED, settings={"HOROVOD_CYCLE_TIME": "1"})
    monkeypatch.setattr("hvdkit.commands.measure.tune.search", lambda config: (best, ["a line"]))
    text = tune(Tune(save=file))
    assert text == f"a line\n\nbest: HOROVOD_CYCLE_TIME=1\nsaved; to train with it: HVDKIT_TUNED={file}"
    assert Measurements.load(file) == best


def test_tuned_settings_yield_to_the_environment(tmp_path, monkeypatch):
    file = tmp_path / "tuned.json"
    dataclasses.replace(MEASURED, settings={"HVDKIT_BUCKET_BYTES": "77", "HOROVOD_CYCLE_TIME": "3"}).save(file)
    environ = {"HVDKIT_TUNED": str(file), "HOROVOD_CYCLE_TIME": "1"}
    monkeypatch.setattr("os.environ", environ)
    settings.set_environment(
        settings.LaunchedRank(launcher="", rank=0, size=1, local_rank=0, local_size=1, controller="")
    )
    assert (environ["HVDKIT_BUCKET_BYTES"], environ["HOROVOD_CYCLE_TIME"]) == ("77", "1")
    assert settings.bucket_bytes() == 77


def test_a_file_sets_nothing_else(tmp_path):
    file = tmp_path / "tuned.json"
    for wrong in (None, {"PATH": "/tmp"}, {"HOROVOD_CYCLE_TIME": 1}):
        file.write_text(json.dumps({"format": 1, "settings": wrong}))
        with case(settings=wrong), pytest.raises(ValueError, match=r"tuned file: got .*tuned\.json, which"):
            read_settings(file)
