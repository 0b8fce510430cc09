"""The supported versions are the same in the package's metadata, the Makefile, the documents and the table of tests."""

from __future__ import annotations

import configparser
import re
from pathlib import Path

import compatibility
import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from hvdkit.machine import supported

ROOT = Path(__file__).resolve().parents[2]
PYTHONS = [f"3.{minor}" for minor in range(supported.OLDEST_PYTHON[1], supported.NEWEST_PYTHON[1] + 1)]
DOCUMENTS = {
    "README.md": (supported.PYTHON, supported.TENSORFLOW),
    "CONTRIBUTING.md": (supported.PYTHON,),
    "Makefile": (supported.PYTHON, f"< (3, {supported.NEWEST_PYTHON[1] + 1})"),
    "docs/compatibility.md": (supported.PYTHON, supported.TENSORFLOW),
    "docs/doctor.md": (supported.PYTHON.removeprefix("Python "), supported.TENSORFLOW.removeprefix("TensorFlow ")),
}


@pytest.fixture
def metadata() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return parser


def test_texts_name_the_first_and_the_last_version():
    for text, oldest, newest in (
        (supported.PYTHON, supported.OLDEST_PYTHON, supported.NEWEST_PYTHON),
        (supported.TENSORFLOW, supported.OLDEST_TENSORFLOW, supported.NEWEST_TENSORFLOW),
    ):
        assert re.findall(r"(\d+)\.(\d+)", text) == [tuple(map(str, oldest)), tuple(map(str, newest))]
    major, minor = supported.NEWEST_TENSORFLOW
    releases = SpecifierSet(supported.TENSORFLOW_RELEASES)
    assert f"{major}.{minor}.9" in releases and f"{major}.{minor + 1}.0" not in releases


def test_extras_require_a_supported_tensorflow(metadata):
    extras = metadata["options.extras_require"]
    lines = [line.partition("#")[0] for name in ("cpu", "gpu") for line in extras[name].splitlines() if line]
    required = [Requirement(line) for line in lines if line.startswith("tensorflow")]
    assert len(required) == 3
    assert {requirement.specifier for requirement in required} == {SpecifierSet(supported.TENSORFLOW_RELEASES)}


def test_the_package_lists_every_supported_python(metadata):
    listed = re.findall(r"Python :: (3\.\d+)", metadata["metadata"]["classifiers"])
    assert listed == PYTHONS
    assert metadata["options"]["python_requires"] == f">={PYTHONS[0]}"


def test_documents_name_the_supported_versions():
    for name, versions in DOCUMENTS.items():
        text = " ".join((ROOT / name).read_text(encoding="utf-8").split())
        assert [version for version in versions if version not in text] == [], name


def test_every_supported_version_has_a_row_in_the_table():
    rows = compatibility.ROWS
    (major, oldest), (_, newest) = supported.OLDEST_TENSORFLOW, supported.NEWEST_TENSORFLOW
    assert {Version(row.tensorflow).release[:2] for row in rows} == {(major, n) for n in range(oldest, newest + 1)}
    assert {row.python for row in rows} == set(PYTHONS)
    document = (ROOT / "docs" / "compatibility.md").read_text(encoding="utf-8")
    assert [row for row in rows if row.cells not in document] == []
