"""Run the examples in the documents, and check that a comment names the file that runs each other command.

    python tools/check_docs.py [README.md docs/data.md ...]

A fenced block may be:

    ```python file=NAME    a script, written to an empty folder
    ```sh run              commands, run one by one in that folder; each must succeed
    ```sh                  commands that another file runs, named in the line before: <!-- run by: PATH -->
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"(?P<before>[^\n]*)\n```(?P<info>[^\n]*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
RUN_BY = re.compile(r"<!-- run by: (?P<path>[^ ,>]+)")
SECONDS = 1200  # only a command that hangs takes this long, on any machine


def check(document: Path, folder: Path) -> list[str]:
    """Run the blocks of one document; return a message for each that fails."""
    problems = []
    name = document.relative_to(ROOT)
    for block in BLOCK.finditer(document.read_text(encoding="utf-8")):
        language, _, rest = block["info"].strip().partition(" ")
        if rest.startswith("file="):
            (folder / rest.removeprefix("file=")).write_text(block["body"], encoding="utf-8")
        elif language == "sh" and rest == "run":
            problems += [f"{name}: {message}" for message in run(commands_of(block["body"]), folder)]
        elif language == "sh":
            named = RUN_BY.search(block["before"])
            if named is None or not (ROOT / named["path"]).exists():
                problems.append(f"{name}: no `run by` comment for {block['body'].splitlines()[0]!r}")
    return problems


def commands_of(body: str) -> list[str]:
    """Return the commands of a block; a line that ends with a backslash continues in the next one."""
    return re.sub(r"\\\n *", "", body).splitlines()


def run(commands: list[str], folder: Path) -> list[str]:
    """Run shell commands in ``folder``; return a message for each that fails."""
    env = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
    }
    problems = []
    for command in commands:
        print(f"$ {command}", flush=True)
        done = subprocess.run(
            command, shell=True, cwd=folder, env=env, capture_output=True, text=True, timeout=SECONDS, check=False
        )
        if done.returncode:
            problems.append(f"{command!r} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}")
    return problems


def main() -> int:
    """Check the documents named on the command line, or all."""
    named = [Path(argument).resolve() for argument in sys.argv[1:]]
    documents = named or [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]

    def checked(document: Path) -> list[str]:
        with tempfile.TemporaryDirectory() as folder:
            return check(document, Path(folder))

    with ThreadPoolExecutor(2) as pool:  # most of the time is spent starting programs
        problems = [problem for found in pool.map(checked, documents) for problem in found]
    for problem in problems:
        print(problem, file=sys.stderr)
    print(f"{len(documents)} documents checked, {len(problems)} problems")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
