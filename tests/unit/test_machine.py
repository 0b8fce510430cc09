"""Facts about the host: each is read in only one module, here from simulated file systems."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import psutil
from helpers.cases import case

from hvdkit.commands.doctor import host_checks
from hvdkit.machine.cores import affinity, available_cores, core_quota
from hvdkit.machine.environment import _HVDKIT_VARIABLES, _REMOVED, ineffective_settings
from hvdkit.machine.memory import available_memory, total_memory

ROOT = Path(__file__).parents[2]
MEBIBYTE = 2**20


def filesystem(folder: Path, lines: str, files: dict[str, str]) -> Path:
    """Create a file system in which this process is in the control groups of ``lines``."""
    (folder / "proc/self").mkdir(parents=True)
    (folder / "proc/self/cgroup").write_text(lines + "\n")
    for name, content in files.items():
        path = folder / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content + "\n")
    return folder


QUOTAS = (
    ("0::/pod/box", {"pod/box/cpu.max": "max 100000", "pod/cpu.max": "150000 100000"}, 1.5),
    ("0::/pod/box", {"pod/box/cpu.max": "150000 100000", "pod/cpu.max": "120000 100000"}, 1.2),
    ("0::/as/the/host/sees/it", {"cpu.max": "50000 100000"}, 0.5),
    ("0::/", {"cpu.max": "max 100000"}, None),
    ("0::/", {}, None),
    ("2:cpu:/a/b", {"cpu/a/cpu.cfs_quota_us": "100000", "cpu/a/cpu.cfs_period_us": "100000"}, 1.0),
    ("2:cpu,cpuacct:/", {"cpu,cpuacct/cpu.cfs_quota_us": "-1"}, None),
    ("2:cpuacct,cpu:/", {"cpu/cpu.cfs_quota_us": "30000", "cpu/cpu.cfs_period_us": "20000"}, 1.5),
    ("3:cpuset:/", {"cpuset/cpu.max": "50000 100000"}, None),
    ("2:cpu:/\n0::/a", {"cpu/cpu.cfs_quota_us": "-1", "a/cpu.max": "100000 100000"}, 1.0),
)


def test_init_and_doctor_see_the_same_cores(tmp_path, here):
    for number, (lines, files, quota) in enumerate(QUOTAS):
        made = filesystem(tmp_path / str(number), lines, files)
        allowed = len(affinity())
        expected = allowed if quota is None else min(allowed, max(1, int(quota)))
        with case(lines=lines, files=files):
            assert core_quota(made) == quota
            assert available_cores(made) == expected  # what hk.init() divides among a host's ranks
            found = host_checks.cores(here, made)
            assert found.details["available"] == expected and found.details["cgroup_quota"] == quota
            assert found.what.startswith((f"{expected} core", f"{expected} hardware threads"))


def test_without_control_groups_all_cores_and_memory_are_ours(tmp_path):
    assert available_cores(tmp_path) == len(affinity())
    assert total_memory(tmp_path) == psutil.virtual_memory().total


MEMORY_GROUPS = {  # of versions 2 and 1
    "0::/pod/box": {
        "pod/memory.max": str(64 * MEBIBYTE),
        "pod/memory.current": str(50 * MEBIBYTE),
        "pod/memory.stat": f"anon 1\ninactive_file {10 * MEBIBYTE}",
        "pod/box/memory.max": "max",
        "pod/box/memory.current": str(50 * MEBIBYTE),
    },
    "4:memory:/box": {
        "memory/memory.limit_in_bytes": str(2**63 - 4096),
        "memory/memory.usage_in_bytes": str(2**40),
        "memory/memory.stat": "",
        "memory/box/memory.limit_in_bytes": str(64 * MEBIBYTE),
        "memory/box/memory.usage_in_bytes": str(50 * MEBIBYTE),
        "memory/box/memory.stat": f"inactive_file 0\ntotal_inactive_file {10 * MEBIBYTE}",
    },
}


def test_memory_is_that_of_the_container(tmp_path):
    for number, (lines, files) in enumerate(MEMORY_GROUPS.items()):
        made = filesystem(tmp_path / str(number), lines, files)
        assert (total_memory(made), available_memory(made)) == (64 * MEBIBYTE, 24 * MEBIBYTE), lines


# Names and files that would read a fact without hvdkit.machine.
READERS = {"sched_getaffinity", "cpu_count", "virtual_memory", "net_if_addrs", "net_if_stats"}
FILES = ("/sys/fs/cgroup", "sys/fs/cgroup", "/proc/self/maps", "/proc/sys/kernel/random/boot_id", "nvidia-smi")
ELSEWHERE = {
    "commands/run/host_probe.py",  # runs on hosts that may lack hvdkit
}


def test_each_fact_is_read_in_machine_only():
    package = ROOT / "hvdkit"
    for path in sorted(package.rglob("*.py")):
        name = path.relative_to(package).as_posix()
        if name.startswith("machine/") or name in ELSEWHERE:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                assert node.attr not in READERS, f"{name}:{node.lineno} reads {node.attr}: ask hvdkit.machine"
            elif isinstance(node, ast.Constant):
                assert node.value not in FILES, f"{name}:{node.lineno} reads {node.value}: ask hvdkit.machine"


def test_every_variable_that_hvdkit_reads_is_known():
    read = set()
    for path in (ROOT / "hvdkit").rglob("*.py"):
        if path.name != "environment.py":
            read |= set(re.findall(r"HVDKIT_[A-Z_]*[A-Z]\b", path.read_text()))
    assert read == set(_HVDKIT_VARIABLES)
    assert ineffective_settings(dict.fromkeys([*read, "HVDKIT_TEST_RECORDS", "HVDKITS", "PATH"], "1")) is None
    for name in _REMOVED:
        assert f"{name} was removed" in str(ineffective_settings({name: ""}))
