"""The ``hvdkit`` command: help, dispatch, exit codes."""

from __future__ import annotations

import dataclasses
import os
import pkgutil
import re
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import get_args, get_type_hints

import psutil
import pytest
from helpers.cases import case
from helpers.help_examples import help_examples
from helpers.speed import WAIT

from hvdkit import __version__
from hvdkit.commands import cli
from hvdkit.errors import HvdkitError

HVDKIT = [sys.executable, "-m", "hvdkit"]


@dataclass(frozen=True, kw_only=True)
class Echo:
    """A command for this test."""

    outcome: str = "none"
    """What the runner returns or raises."""


def echo(config: Echo) -> object:
    """Return or raise what the config specifies."""
    if config.outcome == "hvdkit-error":
        raise HvdkitError("ranks: got 3,\n  expected 4; start 4 ranks")
    if config.outcome == "value-error":
        raise ValueError("splits: got 1, expected 2; pass 2")
    if config.outcome == "import-error":
        raise ImportError("hvdkit needs Horovod; run `hvdkit build-horovod`")
    if config.outcome == "interrupt":
        raise KeyboardInterrupt
    if config.outcome == "exit-message":
        sys.exit("no compiler")
    return {"none": None, "three": 3, "result": "a/wheel.whl"}[config.outcome]


@pytest.fixture
def with_echo(monkeypatch):
    command = cli.Command("echo", "hvdkit echo", config=f"{__name__}:Echo", runner=f"{__name__}:echo")
    monkeypatch.setitem(cli.COMMANDS, "echo", command)
    monkeypatch.setitem(sys.modules, __name__, sys.modules[echo.__module__])


def test_help_names_every_command_and_an_example(capsys):
    assert cli.main(["--help"]) == 0
    shown = capsys.readouterr().out
    for name, command in cli.COMMANDS.items():
        assert f"\n  {name} " in shown
        assert command.summary in " ".join(shown.split())
        assert command.example in shown


def test_the_list_of_commands_fits_the_terminal(capsys, monkeypatch):
    for columns in (30, 80, 200):
        monkeypatch.setenv("COLUMNS", str(columns))
        assert cli.main(["help"]) == 0
        listed = capsys.readouterr().out.partition("commands:\n")[2].partition("\n\n")[0].splitlines()
        assert max(map(len, listed)) <= max(40, columns), columns
        assert all(line.startswith("  ") for line in listed), columns


def test_no_command_shows_the_help_and_fails(capsys):
    assert cli.main([]) == 2
    assert "usage: hvdkit COMMAND" in capsys.readouterr().out


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    done = subprocess.run([*HVDKIT, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == capsys.readouterr().out == f"hvdkit {__version__}\n"


def test_help_imports_nothing_heavy():
    code = "import sys; from hvdkit.commands.cli import main; main(['--help']); print(*sys.modules, file=sys.stderr)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(result.stderr.split())
    assert "hvdkit.commands.cli" in loaded
    assert not loaded & {"tensorflow", "keras", "horovod", "mpi4py.MPI", "tyro", "rich"}


def test_an_unknown_command_is_one_line_and_exit_code_2(capsys):
    expected = "hvdkit: no command 'docter'; did you mean 'doctor'? `hvdkit help` lists all\n"
    for typed in (["docter"], ["help", "docter"], ["docter", "--help"]):
        assert (cli.main(typed), capsys.readouterr().err) == (2, expected), typed
    for typed, script in (("mnist.py", "mnist.py"), ("work", "train.py")):  # these resemble none
        assert cli.main([typed]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and all(name in error for name in cli.COMMANDS)
        assert error.endswith(f"write hvdkit run -np 2 -- python {script}\n")
    assert cli.main(["--hlep"]) == 2 and "did you mean '--help'?" in capsys.readouterr().err


def test_a_script_that_does_not_exist_is_one_line(capsys, monkeypatch, tmp_path):
    """The ranks, which would all report it, are not started."""
    monkeypatch.chdir(tmp_path)
    assert cli.main(["run", "-np", "2", "--", sys.executable, "trian.py", "--epochs", "3"]) == 2
    expected = f"hvdkit run: program: got trian.py (no such file in {tmp_path}), expected a script; check its path\n"
    assert capsys.readouterr().err == expected


def test_help_of_a_command_in_two_ways(capsys):
    shown = []
    for typed in (["plan", "--help"], ["help", "plan"]):
        assert cli.main(typed) == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1] and shown[0].startswith("usage: hvdkit plan ")
    assert cli.main(["help", "checkpoint", "export"]) == 0
    assert capsys.readouterr().out.startswith("usage: hvdkit checkpoint export ")
    for typed in (["help"], ["-h"], ["--help"]):
        assert cli.main(typed) == 0
        assert "usage: hvdkit COMMAND" in capsys.readouterr().out


def test_a_word_of_an_option_that_is_wrong_gets_a_proposal(capsys):
    assert cli.main(["run", "--max-restart", "3", "--", "python"]) == 2
    error = capsys.readouterr().err
    assert "--max-restart" in error and "Perhaps you meant" in error and "--max-restarts INT" in error


def subcommand_of(annotated):
    """Return the config and the name of ``Annotated[Config, subcommand("name")]``."""
    config, settings = get_args(annotated)
    return config, [settings.name]


def test_each_command_has_a_documented_config_and_a_runner(capsys):
    for name, command in cli.COMMANDS.items():
        config = pkgutil.resolve_name(command.config)
        # A config, or a union of the configs of subcommands: Annotated[Inspect, subcommand("inspect")] | ...
        parts = [(config, [])] if isinstance(config, type) else [subcommand_of(one) for one in get_args(config)]
        for part, words in parts:
            with case(name=name, words=words):
                assert callable(pkgutil.resolve_name(command.runner))
                assert cli.main([name, *words, "--help"]) == 0
                check_help(part, f"hvdkit {' '.join([name, *words])}", capsys.readouterr().out)


def check_help(config, command, shown):
    """Check a command's config, and its help."""
    assert config.__dataclass_params__.frozen
    assert all(field.kw_only for field in dataclasses.fields(config))
    assert f"\nFor example:\n    {command}" in shown
    assert re.search(r"\nSee `hvdkit docs [a-z]", shown)
    assert (
        "None}" not in shown
        and "default: None" not in " ".join(shown.split())
        and not re.search(" $", shown, re.MULTILINE)
    )
    hints = get_type_hints(config, include_extras=True)
    for field in dataclasses.fields(config):
        positional = "Positional" in str(hints[field.name])
        assert (field.name.upper() if positional else f"--{field.name.replace('_', '-')}") in shown


OUTCOMES = {
    "none": (0, "", ""),
    "three": (3, "", ""),
    "result": (0, "a/wheel.whl\n", ""),
    "hvdkit-error": (2, "", "hvdkit echo: ranks: got 3, expected 4; start 4 ranks\n"),
    "value-error": (2, "", "hvdkit echo: splits: got 1, expected 2; pass 2\n"),
    "import-error": (2, "", "hvdkit echo: hvdkit needs Horovod; run `hvdkit build-horovod`\n"),
    "interrupt": (130, "", ""),
    "exit-message": (1, "", "no compiler\n"),
}


def test_what_a_runner_does_becomes_output_and_exit_code(with_echo, capsys):
    for outcome, expected in OUTCOMES.items():
        code = cli.main(["echo", "--outcome", outcome])
        assert (code, *capsys.readouterr()) == expected, outcome


def test_debug_shows_the_traceback(with_echo, monkeypatch):
    monkeypatch.setenv("HVDKIT_DEBUG", "1")
    with pytest.raises(HvdkitError):
        cli.main(["echo", "--outcome", "hvdkit-error"])


PARSED = []


def parsed(config, *program):
    """Keep the config and the program that a command would run with."""
    PARSED.append((config, *program))


def test_the_examples_of_the_help_are_parsed(monkeypatch, tmp_path):
    """tests/jobs/test_help_examples.py runs some of them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, __name__, sys.modules[parsed.__module__])
    for name, command in [*cli.COMMANDS.items()]:
        monkeypatch.setitem(cli.COMMANDS, name, command._replace(runner=f"{__name__}:parsed"))
    examples = [example for example in help_examples() if "hvdkit " in example]
    assert len(examples) > 35
    for example in examples:
        words = shlex.split(re.search(r"hvdkit ([^>)]*)", example)[1])
        assert cli.main(words) == 0, example
    assert len(PARSED) == len(examples)


def test_wrong_arguments_are_named(capsys):
    assert cli.main(["doctor", "-np", "0"]) == 2
    assert "np: got 0, expected at least 1" in " ".join(capsys.readouterr().err.replace("│", "").split())


def test_ctrl_c_is_quiet_and_leaves_no_process():
    process = psutil.Popen(
        [*HVDKIT, "doctor", "--no-run"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + WAIT
    while not (probes := process.children(recursive=True)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert probes, "doctor started no probe"
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=WAIT)
    assert process.returncode == 130
    assert error == ""
    _, alive = psutil.wait_procs(probes, timeout=WAIT)
    assert not alive


def test_a_reader_that_stops_reading_gets_no_traceback():
    read_end, write_end = os.pipe()
    os.close(read_end)
    with os.fdopen(write_end, "wb") as closed:
        command = [*HVDKIT, "docs", "failures"]
        result = subprocess.run(command, stdout=closed, stderr=subprocess.PIPE, text=True, timeout=WAIT)
    assert (result.returncode, result.stderr) == (1, "")


@pytest.mark.full
def test_closed_and_full_standard_files_are_no_defect_of_hvdkit():
    """``hvdkit ... >&-``, as cron and some supervisors start commands, and output to a full disk."""
    commands = {"--version": 0, "plan --help": 0, "wrong": 2, "plan --wrong": 2, "run --dry-run -np 2 -- true": 0}
    cases = {(1,): ["plan --help", "wrong"], (2,): ["--version", "plan --wrong"]}
    cases |= {(0, 1, 2): ["run --dry-run -np 2 -- true", "wrong"], (): [*commands]}
    with open("/dev/full", "w") as full:  # noqa: PTH123
        for closed, listed in cases.items():
            for words, expected in ((words, commands[words]) for words in listed):
                streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} if closed else {"stdout": full}
                done = subprocess.run(
                    [*HVDKIT, *words.split()],
                    **{"stdin": subprocess.DEVNULL, "stderr": subprocess.PIPE, **streams},
                    text=True,
                    timeout=WAIT,
                    preexec_fn=lambda closed=closed: [os.close(descriptor) for descriptor in closed],
                )
                said = (closed, words, done.returncode, done.stdout, done.stderr)
                assert done.returncode == (expected if closed else 2), said
                assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr, said
                if closed and 1 not in closed:
                    assert bool(done.stdout) == (expected == 0), said  # errors are not written to standard output
                elif not closed and expected == 0:
                    assert "cannot write the output (No space left on device)" in done.stderr, said


@pytest.mark.full
def test_children_of_a_command_without_standard_files_do_not_write_into_its_pipes():
    """Without descriptors 0 to 2, the next pipes would get these numbers."""
    code = (
        "import os, sys; from hvdkit.machine.terminal import open_standard_files; open_standard_files()\n"
        "os.execv(sys.executable, [sys.executable, '-c', 'import sys; print(sys.stdin.read()); sys.exit(3)'])"
    )
    for closed in ((0,), (1,), (0, 1, 2)):
        done = subprocess.run(
            [sys.executable, "-c", code],
            preexec_fn=lambda closed=closed: [os.close(descriptor) for descriptor in closed],
            stdin=subprocess.DEVNULL,
            timeout=WAIT,
        )
        assert done.returncode == 3, closed
