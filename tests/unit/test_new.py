"""``hvdkit new``: the files of each kind of project, and folders in which it cannot write one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from helpers.jobs import call

import hvdkit
from hvdkit.commands import cli
from hvdkit.commands.docs import find
from hvdkit.commands.new import New, new, project
from hvdkit.commands.run.hosts import Host, read_hostfile

PACKAGE = Path(hvdkit.__file__).parent
FORMS, CLUSTERS = ("fit", "loop"), ("local", "ssh", "slurm", "kubernetes", "kubeflow")
OF_ALL = {"train.py", "README.md", "Makefile", "requirements.txt", ".gitignore"}
OF_CLUSTER = {
    "local": set(),
    "ssh": {"hosts", "launch/hosts.sh"},
    "slurm": {"launch/slurm.sbatch"},
    "kubernetes": {"launch/kubernetes.yaml"},
    "kubeflow": {"launch/kubeflow-trainjob.yaml"},
}


def files_of(folder):
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


# The last test shows that a project is its form and the files of its cluster.
@pytest.mark.parametrize(("form", "cluster"), [*zip((*FORMS * 2, "fit"), CLUSTERS, strict=True)])
def test_a_project_has_the_files_that_it_needs(tmp_path, form, cluster):
    folder = tmp_path / "my project v1.2"
    said = new(New(path=folder, form=form, cluster=cluster))
    assert files_of(folder) == OF_ALL | OF_CLUSTER[cluster]
    assert said.startswith(f"{folder}: train.py, ") and "\nnext steps:\n" in said
    assert (folder / "README.md").read_text().startswith("# my project v1.2\n")
    texts = {name: (folder / name).read_text() for name in files_of(folder)}
    assert not [name for name, text in texts.items() if "my_project" in text or "models/train.py" in text]
    assert ("hk.fit(" in texts["train.py"]) == (form == "fit") and ("hk.Supervisor(" in texts["train.py"]) == (
        form == "loop"
    )
    scripts = {name for name in texts if os.access(folder / name, os.X_OK)}
    assert scripts == {name for name in OF_CLUSTER[cluster] if name.endswith((".sh", ".sbatch"))}
    for script in scripts:
        assert call(["bash", "-n", folder / script]).returncode == 0
        assert f"launch/{script.partition('/')[2]} train.py" in call([folder / script]).stderr
    # Each make target that the README and the help name exists, and each page.
    targets = {"setup", "doctor", "train", "test", "export", "clean"} | ({"submit"} if cluster != "local" else set())
    helped = call(["make", "--no-print-directory"], cwd=folder).stdout  # make may run these tests
    assert {line.split()[0] for line in helped.splitlines()} == targets | {"help"}
    dry = call(["make", "--dry-run", *targets], cwd=folder)
    assert dry.returncode == 0, dry.stderr
    for page in {word.strip("`.") for word in texts["README.md"].split("`hvdkit docs ")[1:]}:
        assert find(page.partition("`")[0])


def test_lint_finds_nothing_in_the_program(tmp_path):
    """Ruff's own settings and those of this project."""
    for form in FORMS:
        new(New(path=tmp_path / form, form=form))
    for command in (["check"], ["check", "--select=E,F,W,I,B,UP,SIM,C4,PIE,RUF,PTH,D1"], ["format", "--check"]):
        options = ["--isolated", "--no-cache", *(f"{form}/train.py" for form in FORMS)]
        done = call([sys.executable, "-m", "ruff", *command, *options], cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_files_of_clusters_are_valid(tmp_path):
    new(New(path=tmp_path / "ssh", cluster="ssh"))
    assert read_hostfile(tmp_path / "ssh" / "hosts") == (Host("localhost", 2),)
    new(New(path=tmp_path / "pods", cluster="kubernetes"))
    job = yaml.safe_load((tmp_path / "pods" / "launch" / "kubernetes.yaml").read_text())
    # test_launch_commands.py compares this manifest with what `hvdkit run --k8s` prints.
    launcher = job["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"][0]
    assert job["kind"] == "MPIJob" and launcher["command"][-2:] == ["python", "train.py"]
    new(New(path=tmp_path / "jobs", cluster="kubeflow"))
    file = tmp_path / "jobs" / "launch" / "kubeflow-trainjob.yaml"  # test_kubeflow.py checks it
    assert [one["kind"] for one in yaml.safe_load_all(file.read_text())] == ["ClusterTrainingRuntime", "TrainJob"]


def test_the_next_steps_quote_the_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["new", "my project"]) == 0
    steps = capsys.readouterr().out.partition("next steps:\n")[2].splitlines()
    assert steps[0] == "  cd 'my project'"
    assert call(["bash", "-c", f"{steps[0]} && make --dry-run train"]).returncode == 0


def test_this_folder(tmp_path, monkeypatch, capsys):
    """Files that are hidden, such as .git, may be there; the next steps have no `cd`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".git").mkdir()
    assert cli.main(["new", "."]) == 0
    assert "  cd " not in capsys.readouterr().out
    assert (tmp_path / "README.md").read_text().startswith(f"# {tmp_path.name}\n")


def test_no_file_is_overwritten(tmp_path, capsys):
    for name in ("notes.txt", ".gitignore", "train.py"):
        folder = tmp_path / name / "mine"
        folder.mkdir(parents=True)
        (folder / name).write_text("mine")
        assert cli.main(["new", str(folder)]) == 2, name
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and f"got {folder}, which has {name}, expected a new or empty" in error
        assert files_of(folder) == {name} and (folder / name).read_text() == "mine"


def test_folders_that_cannot_be_used(tmp_path, capsys):
    (tmp_path / "file").touch()
    for path, reason in (("file", "a file"), ("file/mine", "Not a directory"), ("a" * 300, "File name too long")):
        assert cli.main(["new", str(tmp_path / path)]) == 2
        assert reason in capsys.readouterr().err


@pytest.mark.skipif(os.geteuid() != 0, reason="runs a command as another user, which needs root")
def test_a_parent_without_permission(tmp_path):
    """As a user who may not write there; root may write everywhere."""
    tmp_path.chmod(0o755)
    code = (
        "import os, sys; from pathlib import Path; from hvdkit.commands import cli, new; "
        f"os.setgroups([]); os.setgid(65534); os.setuid(65534); sys.exit(cli.main(['new', {str(tmp_path / 'mine')!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2 and "(Permission denied), expected a folder that can be written" in done.stderr


def test_both_forms_share_the_rest_of_the_project():
    """The clusters differ in their launch files only: the same train.py runs everywhere."""
    projects = {
        (form, cluster): project(New(path=Path(), form=form, cluster=cluster)) for form in FORMS for cluster in CLUSTERS
    }
    for form in FORMS:
        assert len({projects[form, cluster]["train.py"] for cluster in CLUSTERS}) == 1
    for cluster in CLUSTERS:
        differing = {
            name
            for name in projects["fit", cluster]
            if projects["fit", cluster][name] != projects["loop", cluster][name]
        }
        assert differing == {"train.py"}
