"""Lines that several ranks write alike are shown once, and do not wait behind a progress bar."""

from __future__ import annotations

from hvdkit.commands.run.alike_lines import AlikeLines


def begun(size):
    lines = AlikeLines()
    lines.begin(size)
    return lines


def test_a_line_waits_for_other_ranks_and_keeps_the_order_of_its_rank():
    lines = begun(3)
    lines.add(0, 1, b"first", now=0.0)
    lines.add(0, 1, b"second", now=0.0)
    lines.add(1, 1, b"second", now=0.1)
    assert lines.take(now=0.4) == []
    assert lines.take(now=0.6) == [(1, b"[rank 0] first"), (1, b"[ranks 0-1] second")]


def test_lines_before_a_progress_bar_wait_no_longer():
    lines = begun(2)
    lines.add(1, 1, b"of rank 1", now=0.0)
    lines.add(0, 1, b"Epoch 2/5", now=0.0)
    lines.hurry(0)
    assert lines.take(now=0.1)[-1] == (1, b"[rank 0] Epoch 2/5")
