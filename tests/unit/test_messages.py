"""The catalogue of error messages, which is generated from the sources: on a page, and for those who look one up."""

from __future__ import annotations

import re
import shlex
from functools import partial

import pytest

import hvdkit as hk
from hvdkit.checkpoint.manifest import Manifest
from hvdkit.commands import cli
from hvdkit.commands.docs import PAGES, find
from hvdkit.commands.docs.catalogue import entries
from hvdkit.commands.docs.headings import anchor, headings
from hvdkit.commands.run.config import RunConfig
from hvdkit.commands.run.job import prepare
from hvdkit.data.division import divide
from hvdkit.errors import integer


def shown(capsys, *words):
    """Return what ``hvdkit docs messages WORDS`` prints."""
    assert cli.main(["docs", "messages", *words]) == 0
    return capsys.readouterr().out


def message_of(call):
    with pytest.raises(ValueError, match=": got ") as raised:
        call()
    return str(raised.value)


def test_the_page_has_the_messages_that_users_see(capsys):
    page = shown(capsys)
    message = message_of(lambda: divide("dataset", ("columns",)))
    expected, _, remedy = message.partition(", expected ")[2].partition("; ")
    section = page.partition("## `parts`\n")[2].partition("\n## ")[0]
    assert remedy in section and expected.partition("'")[0] in section.replace("\\", ""), section
    assert page.count("\n## ") > 100 and page.startswith("# Error messages\n")


def test_a_message_that_is_pasted_finds_its_entry(capsys):
    for call in (lambda: divide("dataset", ("columns",)), lambda: integer("size", 0, minimum=1)):
        message = message_of(call)
        found = shown(capsys, f"ValueError: {message}")
        remedy = message.rpartition("; ")[2]
        assert remedy in found and found.count("\n- ") == 1, found
        assert shown(capsys, *message.split()) == found  # without quotes
    for program, remedy in (
        ("trian", "check its name, or activate its environment"),
        ("t.py", "check its path, as … has"),
    ):
        message = message_of(partial(prepare, RunConfig(np=2), [program], {}))
        found = shown(capsys, f"hvdkit run: {message}")
        assert f"expected a command that can be run here; *{remedy}" in found and found.count("\n- ") == 1, found


def test_errors_about_files_are_found_too(capsys, tmp_path):
    (tmp_path / "a.csv").write_bytes("\ufeffu,1\n".encode("utf-16"))
    with pytest.raises(hk.DataError) as raised:
        hk.data.criteo(tmp_path / "a.csv")
    found = shown(capsys, str(raised.value))
    assert found.startswith("## `DataError`\n\n- … is UTF-16; ") and found.count("\n- ") == 1, found
    with pytest.raises(hk.CheckpointError) as raised:
        Manifest.parse(tmp_path)
    found = shown(capsys, f"hvdkit.errors.CheckpointError: {raised.value}")
    assert found.startswith("## `CheckpointError`\n\n- ") and found.count("\n- ") == 1, found
    assert "pass a folder such as step-000001200" in found
    assert cli.main(["docs", "messages#corruptcheckpointerror"]) == 0
    assert "checksum differs" in capsys.readouterr().out


def test_what_differs_between_ranks_is_found(capsys):
    for pasted, remedy in (
        ("x, y: got other data on rank 1, expected the whole data set", "default_rng(1)"),
        ("x: got a different first batch on rank 1, expected equal global batches", "set_random_seed"),
        (
            "optimizer: got rate=1 on rank 1, expected rate=2, as on rank 0; compile the model with the same "
            "optimizer and settings on every rank",
            "on every rank",
        ),
    ):
        found = shown(capsys, pasted)
        assert remedy in found and found.count("\n- ") <= 2, found


def test_warnings_are_found(capsys):
    for pasted in (
        "training: no gradients have been combined: each of 2 ranks",
        "normalizes by each rank's rows, not by the",
    ):
        found = shown(capsys, pasted)
        assert found.startswith("## `warnings`\n\n- ") and found.count("\n- ") <= 2, found


def test_the_last_line_of_a_job_is_found(capsys):
    """It says what the watchdog found; the rank, its host and the step are between the parts of the message."""
    for line, said in (
        (
            "rank 2 on node3 was killed by SIGKILL (out of memory?) at step 95; the job ended after 12.3 s",
            "was killed by",
        ),
        (
            "rank 1 on b hangs at step 2: no progress for 6 s (in load, a.py:4); the stacks of all ranks are above",
            "hangs",
        ),
        ("rank 0 on vm ended with exit code 3, as every rank did: SystemExit: 3", "ended with exit code"),
        (
            "rank 3 on node1 left the job: ended before the others: rank 0 still needed it; every rank must",
            "left the job",
        ),
        ("rank 3 on b failed: has not answered for 10 s: its host is down, or the network is cut", "has not answered"),
    ):
        found = shown(capsys, f"hvdkit run: {line}")
        assert found.startswith("## `rank`\n\n- ") and said in found, found
        assert found.count("\n- ") <= 4, found


def test_words_find_the_entries_that_contain_all_of_them(capsys):
    found = shown(capsys, "BATCH_SIZE", "larger")
    entries = re.findall("^- .*", found, re.MULTILINE)
    assert entries and len(entries) < 20
    text = shown(capsys, "batch_size")
    assert "## `batch_size`" in text and "pass a larger batch_size, which is global" in text.replace("\\", "")


def test_options_are_found(capsys):
    assert "## `--min-np`" in shown(capsys, "--min-np: got 5, expected at most the 2 ranks of these hosts")
    assert "## `--min-np`" in shown(capsys, "--min-np")


def test_the_commands_of_the_page():
    block = (PAGES / "messages.md").read_text().partition("```sh\n")[2].partition("```")[0]
    commands = [shlex.split(line, comments=True) for line in block.splitlines()]
    assert len(commands) == 3
    for command in commands:
        assert cli.main(command[1:]) == 0


def test_every_argument_has_a_link(capsys):
    titles = [title for title, level, _ in headings(find("messages")) if level == 2]
    assert "`parts`" in titles
    assert cli.main(["docs", "messages#parts"]) == 0
    assert capsys.readouterr().out.startswith("## `parts`\n\n- expected ")
    anchors = [anchor(title) for title in titles]
    assert all(anchors) and len({*anchors}) == len(anchors)


def test_words_that_no_message_contains_are_an_error(capsys):
    assert cli.main(["docs", "messages", "batchsize"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "did you mean batch_size?" in error
    assert cli.main(["docs", "messages", "zebra", "rows"]) == 2
    assert "`hvdkit docs messages` shows them" in capsys.readouterr().err


def test_words_are_for_messages_only(capsys):
    assert cli.main(["docs", "pitfalls", "weights"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "hvdkit docs messages weights" in error


def test_the_parts_of_a_message_belong_together(tmp_path):
    """Functions of one file have variables of the same names; a variable may have one of several values."""
    (tmp_path / "checks.py").write_text(
        "LIMIT = 'at most 4'\n"
        "def check_depth(depth, remedy='lower it'):\n"
        "    raise ValueError(describe('depth', depth, LIMIT, remedy))\n"
        "def check_width(width):\n"
        "    remedy = 'raise it'\n"
        "    if width > 4:\n"
        "        remedy = f'pass {width - 4} less'\n"
        "    raise ValueError(describe('width', width, '0 to 4' if width else LIMIT, remedy))\n"
        "def check_name(name):\n"
        "    expected, remedy = rules(name)\n"
        "    raise ValueError(describe(name, 0, 'a ' + expected, remedy))\n"
        "def read(path, error):\n"
        "    problem = 'is shorter than it was'\n"
        "    if error:\n"
        "        raise DataError(f'{path}: {error}')\n"
        "    raise DataError(f'{path} {problem}; copy it')\n"
    )
    assert [(entry.title, entry.what, entry.remedy) for entry in entries(tmp_path)] == [
        ("DataError", "… is shorter than it was", "copy it"),
        ("depth", "expected at most 4", "…"),
        ("several arguments", "expected a …", "…"),
        ("width", "expected 0 to 4", "pass … less"),
        ("width", "expected 0 to 4", "raise it"),
        ("width", "expected at most 4", "pass … less"),
        ("width", "expected at most 4", "raise it"),
    ]
