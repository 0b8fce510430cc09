"""``hvdkit completion`` in real shells: a bash function that is called as Tab does, and a zsh on a terminal."""

from __future__ import annotations

import os
import pty
import re
import select
import shlex
import shutil
import subprocess
import time

import pytest
from helpers.speed import WAIT

from hvdkit.commands import cli
from hvdkit.commands.completion import Completion, completion, parser

OPTIONS_OF_RUN = {"-np", "--np", "-H", "--hosts", "--hostfile", "--slurm", "--no-slurm", "--dry-run", "--max-restarts"}


@pytest.fixture(scope="module")
def bash(tmp_path_factory):
    """Return a function that completes the last word of a command line in bash, in a folder with some files."""
    script = tmp_path_factory.mktemp("bash") / "hvdkit.bash"
    script.write_text(completion(Completion(shell="bash")))
    folder = tmp_path_factory.mktemp("files")
    for name in ("train.py", "two words.py", "runs/digits/file"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()

    def complete(*words):
        # The way in which bash calls the registered function: the word before it is $3, no program is started.
        lines = [
            f"source {shlex.quote(str(script))}",
            "PATH=/nowhere",
            "registered=$(complete -p hvdkit); registered=${registered#*-F }; function=${registered%% *}",
            f"COMP_WORDS=({' '.join(map(shlex.quote, words))}); COMP_CWORD={len(words) - 1}",
            f'"$function" hvdkit {shlex.quote(words[-1])} {shlex.quote(words[-2])}',
            'printf "%s\\n" "${COMPREPLY[@]}"',
        ]
        command = [shutil.which("bash"), "--norc", "-c", "\n".join(lines)]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=WAIT)
        assert (done.returncode, done.stderr) == (0, ""), done
        return {line for line in done.stdout.splitlines() if line}

    return complete


def test_bash_completes_commands(bash):
    assert bash("hvdkit", "") == {*cli.COMMANDS, "help"}
    assert bash("hvdkit", "do") == {"doctor", "docs"}
    assert bash("hvdkit", "checkpoint", "") == {"inspect", "verify", "export"}
    assert bash("hvdkit", "data", "in") == {"inspect", "index"}
    assert bash("hvdkit", "help", "pl") == {"plan"}


def test_bash_completes_options_and_their_values(bash):
    assert bash("hvdkit", "run", "-") >= OPTIONS_OF_RUN
    assert bash("hvdkit", "run", "--max") == {"--max-restarts"}
    assert bash("hvdkit", "run", "-np", "4", "--eng") == {"--engine"}
    assert bash("hvdkit", "run", "--engine", "") == {"auto", "mpirun", "horovodrun", "gloo", "srun"}
    assert bash("hvdkit", "new", "mine", "--cluster", "k") == {"kubernetes"}
    assert bash("hvdkit", "tune", "--optimizer", "ada") == {"adagrad", "adam"}
    assert bash("hvdkit", "checkpoint", "export", "--form") == {"--format"}
    assert bash("hvdkit", "docs", "pit") == {"pitfalls"}


def test_bash_completes_file_names(bash):
    assert bash("hvdkit", "checkpoint", "inspect", "ru") == {"runs"}
    assert bash("hvdkit", "checkpoint", "inspect", "runs/") == {"runs/digits"}
    assert bash("hvdkit", "run", "--hostfile", "tr") == {"train.py"}
    assert bash("hvdkit", "run", "-np", "2", "--", "python", "t") == {"train.py", "two words.py"}
    assert bash("hvdkit", "run", "-np", "2", "--slurm", "python", "tr") == {"train.py"}
    assert bash("hvdkit", "bench", "--profile", "p", "-np", "2", "--", "python", "tr") == {"train.py"}


def test_every_command_and_option_is_known():
    """The options come from the configs: each command's parser has those of its help."""
    commands = next(action for action in parser()._actions if action.choices).choices
    assert set(commands) == {*cli.COMMANDS, "help"}
    for name, command in commands.items():
        assert all(action.help for action in command._actions if action.option_strings), name


@pytest.mark.skipif(shutil.which("zsh") is None, reason="no zsh (Debian: zsh)")
@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("hvdkit che\t", "hvdkit checkpoint "),
        ("hvdkit checkpoint ex\t", "hvdkit checkpoint export "),
        ("hvdkit run --max-r\t", "hvdkit run --max-restarts "),
        ("hvdkit checkpoint inspect train\t", "hvdkit checkpoint inspect train.py "),
        ("hvdkit run -np 2 -- python train\t", "hvdkit run -np 2 -- python train.py "),
    ],
)
def test_zsh(tmp_path, typed, completed):
    """Zsh completes only on a terminal: type into one, and let it print the line that Tab has made."""
    (tmp_path / "script").write_text(completion(Completion(shell="zsh")))
    (tmp_path / "train.py").touch()
    # The line is printed between marks when Enter is pressed, instead of being run.
    (tmp_path / ".zshrc").write_text(
        'autoload -Uz compinit; compinit -u -D; eval "$(<script)"\n'
        "show() { print -r -- $'\\n'\"<$BUFFER>\"; exit }; zle -N show; bindkey '^M' show\n"
        "zle-line-init() { print ready }; zle -N zle-line-init\n"
    )
    main, terminal = pty.openpty()
    env = {**os.environ, "ZDOTDIR": str(tmp_path), "TERM": "dumb", "PS1": "% ", "HOME": str(tmp_path)}
    process = subprocess.Popen(
        ["zsh", "-o", "no_global_rcs", "-i"],
        cwd=tmp_path, env=env, stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True,
    )  # fmt: skip
    os.close(terminal)
    try:
        read = read_until(main, "ready")
        os.write(main, f"{typed}\r".encode())
        read += read_until(main, ">\r")
    finally:
        process.kill()
        process.wait()
        os.close(main)
    assert re.findall(r"<(hvdkit[^>]*)>", read)[-1:] == [completed], read


def read_until(terminal, text):
    """Return what a terminal shows until ``text`` appears."""
    shown, until = "", time.monotonic() + WAIT
    while text not in shown:
        assert time.monotonic() < until, shown
        if select.select([terminal], [], [], 1)[0]:
            try:
                shown += os.read(terminal, 4096).decode(errors="replace")
            except OSError:  # the shell has ended
                break
    return shown
