"""MPI that mpi4py started before TensorFlow is loaded crashes at exit: an error, in exactly these cases."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from helpers.cases import case

from hvdkit.cluster import tensorflow_loading
from hvdkit.errors import ClusterError
from hvdkit.machine import mpi

OPEN_MPI = ("Open MPI", (4, 1, 8))
ONE_OF_TWO = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}


def problem(monkeypatch, modules, *, started=True, ended=False, vendor=OPEN_MPI, exports=True, **environment):
    """Return the error for modules that were imported in this order, or None."""
    module = SimpleNamespace(Is_initialized=lambda: started, Is_finalized=lambda: ended, get_vendor=lambda: vendor)
    loaded = {name: module if name == "mpi4py.MPI" else None for name in modules}
    monkeypatch.setattr(tensorflow_loading, "sys", SimpleNamespace(modules=loaded))
    monkeypatch.setattr(tensorflow_loading, "os", SimpleNamespace(environ=environment))
    monkeypatch.setattr(tensorflow_loading, "tensorflow_exports_hwloc", lambda: exports)
    try:
        tensorflow_loading._check_import_order()
    except ClusterError as error:
        return str(error)
    return None


def test_mpi_that_would_crash_is_an_error(monkeypatch):
    for name, value in ONE_OF_TWO.items():
        monkeypatch.setenv(name, value)
    for modules in (["mpi4py.MPI"], ["mpi4py.MPI", "tensorflow"], ["mpi4py", "mpi4py.MPI", "numpy", "tensorflow"]):
        with case(modules=modules):
            said = problem(monkeypatch, modules)
            assert said is not None and "before TensorFlow, so that Open MPI 4.1.8 would crash at exit" in said
            assert "; import hvdkit before mpi4py; see" in said
    for name in ONE_OF_TWO:  # without a launcher, `import hvdkit` does not load TensorFlow
        monkeypatch.delenv(name)
    said = problem(monkeypatch, ["mpi4py.MPI"])
    assert said is not None and "; import tensorflow before mpi4py; see" in said


@pytest.mark.parametrize(
    ("modules", "options"),
    [
        ([], {}),
        (["tensorflow"], {}),
        (["tensorflow", "mpi4py.MPI"], {}),
        (["mpi4py", "tensorflow", "mpi4py.MPI"], {}),
        (["mpi4py.MPI"], {"started": False}),
        (["mpi4py.MPI"], {"ended": True}),
        (["mpi4py.MPI"], {"vendor": ("Open MPI", (5, 0, 6))}),
        (["mpi4py.MPI"], {"vendor": ("MPICH", (4, 3, 0))}),
        (["mpi4py.MPI"], {"exports": False}),
        (["mpi4py.MPI"], {"LD_BIND_NOW": "1"}),
    ],
)
def test_other_orders_are_none(modules, options, monkeypatch):
    assert problem(monkeypatch, modules, **options) is None


def test_a_tensorflow_without_that_library_exports_nothing(monkeypatch, tmp_path):
    for spec in (None, SimpleNamespace(origin=None), SimpleNamespace(origin=str(tmp_path / "__init__.py"))):
        with case(spec=spec):
            find = SimpleNamespace(util=SimpleNamespace(find_spec=lambda name, spec=spec: spec))
            monkeypatch.setattr(mpi, "importlib", find)
            assert mpi.tensorflow_exports_hwloc() is False
