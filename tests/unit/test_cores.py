"""CPU quotas of cgroups: files of both versions as kernels and containers show them."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tfscale.native import cores

V2 = "31 23 0:28 {top} {at} rw,relatime - cgroup2 cgroup rw\n"
V1 = "33 31 0:29 {top} {at} rw,relatime shared:3 - cgroup cgroup rw,cpu,cpuacct\n"
OTHER = "34 31 0:31 / /sys/fs/cgroup/cpuset rw,relatime - cgroup cgroup rw,cpuset\n"


def machine(folder, groups, mounts, files):
    """Write a process's files and the cgroup tree that its mounts show; return both folders."""
    process, root = folder / "self", folder / "root"
    process.mkdir()
    (process / "cgroup").write_text(groups)
    (process / "mountinfo").write_text(mounts)
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return process, root


def v1(group, quota, period=100_000):
    return {
        f"cg/cpu/{group}cpu.cfs_quota_us": f"{quota}\n",
        f"cg/cpu/{group}cpu.cfs_period_us": f"{period}\n",
    }


CASES = {
    "none": ("0::/\n", V2.format(top="/", at="/cg"), {}, math.inf),
    "v2, no limit": (
        "0::/\n",
        V2.format(top="/", at="/cg"),
        {"cg/cpu.max": "max 100000\n"},
        math.inf,
    ),
    "v2, a container's own group is the top": (
        "0::/\n",
        V2.format(top="/", at="/cg"),
        {"cg/cpu.max": "250000 100000\n"},
        2.5,
    ),
    "v2, a limit of a group around it": (
        "0::/user/job/step\n",
        V2.format(top="/", at="/cg"),
        {
            "cg/user/cpu.max": "800000 100000\n",
            "cg/user/job/cpu.max": "150000 50000\n",
            "cg/user/job/step/cpu.max": "max 100000\n",
        },
        3.0,
    ),
    "v2, the mount shows a part of the tree": (
        "0::/docker/abc/inner\n",
        V2.format(top="/docker/abc", at="/cg"),
        {"cg/cpu.max": "400000 100000\n", "cg/inner/cpu.max": "100000 100000\n"},
        1.0,
    ),
    "v2, a group outside of the namespace": (
        "0::/../other\n",
        V2.format(top="/", at="/cg"),
        {"cg/cpu.max": "200000 100000\n", "other/cpu.max": "100000 100000\n"},
        2.0,
    ),
    "v1": (
        "4:cpu,cpuacct:/a/b\n3:cpuset:/\n",
        V1.format(top="/", at="/cg/cpu"),
        v1("a/b/", 50_000),
        0.5,
    ),
    "v1, no limit": (
        "4:cpu,cpuacct:/a\n",
        V1.format(top="/", at="/cg/cpu"),
        v1("a/", -1),
        math.inf,
    ),
    "v1, a group around it": (
        "4:cpu,cpuacct:/a/b\n",
        V1.format(top="/", at="/cg/cpu"),
        {**v1("a/", 300_000), **v1("a/b/", -1)},
        3.0,
    ),
    "v1 in a container without a namespace of cgroups": (
        "4:cpu,cpuacct:/docker/abc\n",
        V1.format(top="/docker/abc", at="/cg/cpu"),
        v1("", 200_000),
        2.0,
    ),
    "both versions, quotas in v1": (
        "4:cpu,cpuacct:/a\n0::/a\n",
        OTHER + V1.format(top="/", at="/cg/cpu") + V2.format(top="/", at="/cg/unified"),
        {**v1("a/", 400_000), "cg/unified/a/cgroup.procs": ""},
        4.0,
    ),
    "a mount with a blank in its name": (
        "0::/\n",
        V2.format(top="/", at="/my\\040cg"),
        {"my cg/cpu.max": "200000 100000\n"},
        2.0,
    ),
    "damaged": ("0::/\n", V2.format(top="/", at="/cg"), {"cg/cpu.max": "much\n"}, math.inf),
    "lines of another kind": ("0:\n", "\n", {}, math.inf),
}


@pytest.mark.parametrize("name", CASES)
def test_the_least_quota_of_the_groups_around_a_process(name, tmp_path):
    *files, expected = CASES[name]
    process, root = machine(tmp_path, *files)
    assert cores.find_quota(process, root) == expected


def test_without_proc_there_is_no_quota(tmp_path):
    assert cores.find_quota(tmp_path / "none", tmp_path) == math.inf


def test_cores_of_a_process_and_of_ranks_under_a_quota(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    for quota, n_cores, shares in (
        (math.inf, 64, (64, 32)),
        (8.0, 8, (8, 4)),
        (2.5, 3, (3, 1)),
        (0.5, 1, (1, 1)),
        (100.0, 64, (64, 32)),
    ):
        monkeypatch.setattr(cores, "find_quota", lambda quota=quota: quota)
        assert cores.count_cores() == n_cores
        # A rank that shares the cores with another one, and one that is alone.
        assert tuple(cores.share_of_cores(64 // n, n) for n in (1, 2)) == shares


@pytest.mark.skipif(not os.access("/sys/fs/cgroup/cpu/cgroup.procs", os.W_OK), reason="needs root")
def test_the_kernel_shows_a_quota_in_these_files():
    """A group of cgroup v1, with a group inside that has no limit of its own."""
    outer = Path(f"/sys/fs/cgroup/cpu/tfscale-test-{os.getpid()}")
    inner = outer / "inner"
    code = "import os; open('{0}/cgroup.procs', 'w').write(str(os.getpid())); "
    code += "from tfscale.native.cores import find_quota; print(find_quota())"
    try:
        outer.mkdir()
        inner.mkdir()
        (outer / "cpu.cfs_quota_us").write_text("150000")
        words = [sys.executable, "-c", code.format(inner)]
        done = subprocess.run(words, capture_output=True, text=True, check=True)
        assert done.stdout == "1.5\n"
    finally:
        for group in (inner, outer):
            if group.is_dir():
                group.rmdir()
