"""The rules for which messages use a ring, and how the doctor finds the algorithm of each message size."""

from __future__ import annotations

import dataclasses
import itertools
import os

import numpy as np

from hvdkit.cluster import rings, settings
from hvdkit.commands.doctor import algorithm
from hvdkit.machine.launcher import launched_rank

TWO_HOSTS = {
    "OMPI_COMM_WORLD_RANK": "0",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}


ALLGATHERV, ALLREDUCE = 1, 2


def of_file(size: int, nbytes: int) -> dict[int, int]:
    """Read the file like Open MPI: the last communicator size, then the last message size, that is not larger."""
    words = [word for line in rings.RULES.read_text().splitlines() for word in line.split("#")[0].split()]
    numbers = iter(map(int, words))
    found = {}
    for _ in range(next(numbers)):
        collective = next(numbers)
        found[collective] = rings.NO_RULE
        for _ in range(next(numbers)):
            ranks = next(numbers)
            for _ in range(next(numbers)):
                limit, chosen = next(numbers), next(numbers)
                assert (next(numbers), next(numbers)) == (0, 0), "no topology, no segments"
                if ranks <= size and limit <= nbytes:
                    found[collective] = chosen
    assert next(numbers, None) is None
    return found


def test_the_file_says_what_the_rule_says():
    for size in (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024):
        for nbytes in (4, 4096, 100_000, 2**19, 2**20, 25_000_000, 100_000_000, 2**28):
            gather = 3 if size > 2 and nbytes >= size * 2**17 else rings.NO_RULE  # 3: ring
            rules = {ALLREDUCE: rings.allreduce_rule(size, nbytes), ALLGATHERV: gather}
            assert of_file(size, nbytes) == rules, (size, nbytes)


def test_rules_are_for_several_hosts_whose_owner_has_not_chosen(monkeypatch, tmp_path):
    monkeypatch.setattr(rings, "_FILE", tmp_path / "mca-params.conf")
    two = launched_rank(TWO_HOSTS)

    def chosen_for(promise, **environ: str) -> str | None:
        monkeypatch.setattr(os, "environ", environ)
        settings.set_environment(promise)
        return environ.get("OMPI_MCA_coll_tuned_dynamic_rules_filename")

    assert chosen_for(two) == str(rings.RULES)
    assert chosen_for(dataclasses.replace(two, local_size=4)) is None
    assert chosen_for(dataclasses.replace(two, controller="gloo")) is None
    for name in ("OMPI_MCA_coll", "OMPI_MCA_coll_tuned_use_dynamic_rules", "OMPI_MCA_coll_hcoll_enable"):
        assert chosen_for(two, **{name: "0"}) is None
    (tmp_path / "mca-params.conf").write_text("# coll is mine\nbtl = tcp,self\n")
    assert chosen_for(two)
    (tmp_path / "mca-params.conf").write_text("btl = tcp,self\n coll_tuned_priority = 10\n")
    assert chosen_for(two) is None


def test_srun_says_how_many_hosts_there_are():
    for nodes, several in (("1", False), ("2", True)):
        step = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": nodes}
        assert launched_rank(step).on_several_hosts is several, nodes


def test_the_order_of_additions_tells_the_algorithm():
    x = [np.random.default_rng(rank).normal(size=40_000).astype(np.float32) for rank in range(4)]

    def ring(parts: int) -> np.ndarray:
        """Sum in a ring's order: each part begins at another rank; a segmented ring goes round several times."""
        pieces = []
        for number, part in enumerate(itertools.pairwise(np.linspace(0, 40_000, parts + 1).astype(int))):
            order = [x[(number + 1 + step) % 4][slice(*part)] for step in range(4)]
            pieces.append(((order[0] + order[1]) + order[2]) + order[3])
        return np.concatenate(pieces)

    assert algorithm.detect_algorithm(x, ring(4)) == algorithm.detect_algorithm(x, ring(16)) == "ring"
    assert algorithm.detect_algorithm(x, ring(1)) == algorithm.detect_algorithm(x, x[3] + (x[2] + (x[1] + x[0])))
    assert algorithm.detect_algorithm(x, ring(1)) == "one rank after the other"
    assert algorithm.detect_algorithm(x, (x[2] + x[0]) + (x[3] + x[1])) == "recursive doubling"
    assert algorithm.detect_algorithm(x, np.sum(x, axis=0, dtype=np.float64).astype(np.float32)) == "another"
    assert algorithm.detect_algorithm(x, 2 * ring(4)) == "wrong"
