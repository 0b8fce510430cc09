"""``hk.ray.run`` without Ray: arguments, the command line of its engine, and the error if Ray is missing."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from helpers.jobs import without
from helpers.speed import WAIT

import hvdkit as hk
from hvdkit.commands.run.ray_job import RayLaunch, RayReservation, check_resources


def test_the_engine_gets_what_the_job_sent():
    reservation = RayReservation(address="a:1", namespace="n", group="g", resources={"CPU": 1.0}, node="10.0.0.1")
    launch = RayLaunch(reservation=reservation, np=2, command=["python", "x y"], names=["PATH"], folder="/f")
    assert RayLaunch.parse(str(launch)) == launch and json.loads(str(launch))["np"] == 2


@pytest.mark.parametrize(
    ("resources", "error", "words"),
    [
        ({"CPU": 0}, ValueError, r"resources\['CPU'\]: got 0, expected a positive number; write e\.g\. resources="),
        ({"CPU": "4"}, TypeError, "resources: got .*expected a dict of numbers"),
        ({"GPU": True}, TypeError, "resources: got "),
        ({}, ValueError, "resources: got {}, expected at least one"),
        (4, TypeError, "resources: got 4, expected a dict of numbers by name, of each rank"),
    ],
)
def test_resources_that_are_wrong(resources, error, words):
    with pytest.raises(error, match=words):
        check_resources(resources)


def test_arguments_that_are_wrong():
    with pytest.raises(TypeError, match=r"function: got 3, expected a function; .*hk\.ray\.run\(train\)"):
        hk.ray.run(3)
    with pytest.raises(ValueError, match="num_workers: got 0"):
        hk.ray.run(print, num_workers=0)
    with pytest.raises(ValueError, match="restarts: got -1"):
        hk.ray.run(print, restarts=-1)


def test_without_ray_the_error_says_how_to_install_it():
    code = f"{without('ray')}\nimport hvdkit as hk\nhk.ray.run(print)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=WAIT, check=False)
    assert "ClusterError: hk.ray.run: got no Ray (No module named 'ray'), expected Ray" in done.stderr, done.stderr
    assert done.stderr.rstrip().endswith("pip install ray")


def test_importing_hvdkit_does_not_import_ray():
    code = "import sys, hvdkit as hk; hk.ray.run; assert 'ray' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], timeout=WAIT, check=True)
