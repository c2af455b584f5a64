"""The CPU's thread pool: default size, fork, exit, and that idle threads cost nothing."""

from __future__ import annotations

import os
import shutil
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from pyengine.errors import InvalidArgument
from pyengine.native import Activation, Arena, DType, Queue, ops

THREADS = "from pyengine.native import load_library; print(load_library().c.ok_threads())"
CORES = len(os.sched_getaffinity(0))


def _cgroup(folder, files):
    """A folder laid out like /sys/fs/cgroup."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(folder)


@pytest.mark.parametrize(
    "quota, expected",
    [("50000 100000", 1), ("150000 100000", 1), ("200000 100000", 2), ("max 100000", CORES)],
)
def test_threads_by_default_stay_within_a_v2_quota(run_python, tmp_path, quota, expected):
    root = _cgroup(tmp_path, {"cpu.max": quota + "\n"})
    assert int(run_python(THREADS, OKERNEL_CGROUP_ROOT=root)) == min(expected, CORES)


@pytest.mark.parametrize(
    "quota, expected", [("50000", 1), ("150000", 1), ("200000", 2), ("-1", CORES)]
)
def test_threads_by_default_stay_within_a_v1_quota(run_python, tmp_path, quota, expected):
    files = {"cpu/cpu.cfs_quota_us": quota + "\n", "cpu/cpu.cfs_period_us": "100000\n"}
    root = _cgroup(tmp_path, files)
    assert int(run_python(THREADS, OKERNEL_CGROUP_ROOT=root)) == min(expected, CORES)


def test_a_quota_of_a_parent_group_counts_too(run_python, tmp_path):
    with open("/proc/self/cgroup") as file:
        own = [line.rstrip("\n").split(":", 2)[2] for line in file]
    files = {"cpu.max": "100000 100000\n"}
    for group in own:
        files[f"{group.lstrip('/')}/cpu.max".lstrip("/")] = "100000 100000\n"
    assert run_python(THREADS, OKERNEL_CGROUP_ROOT=_cgroup(tmp_path, files)) == "1"


def test_threads_by_default_follow_the_affinity_mask(run_python, tmp_path):
    taskset = shutil.which("taskset")
    if not taskset:
        pytest.skip("needs taskset")
    core = str(min(os.sched_getaffinity(0)))
    root = str(tmp_path)  # no quota
    assert run_python(THREADS, [taskset, "-c", core], OKERNEL_CGROUP_ROOT=root) == "1"
    assert int(run_python(THREADS, OKERNEL_CGROUP_ROOT=root)) == min(CORES, 256)


@pytest.mark.parametrize(
    "files",
    [
        {"memory.max": "300000000", "memory.current": "100000000",
         "memory.stat": "anon 1\ninactive_file 40000000\n"},
        {"memory/memory.limit_in_bytes": "300000000", "memory/memory.usage_in_bytes": "100000000",
         "memory/memory.stat": "cache 1\ntotal_inactive_file 40000000\n"},
    ],
    ids=["v2", "v1"],
)  # fmt: skip
def test_memory_honours_the_groups_limit_and_counts_cache_as_free(run_python, tmp_path, files):
    code = "from pyengine.native import load_library; print(*load_library().device_memory())"
    root = _cgroup(tmp_path, files)
    assert run_python(code, OKERNEL_CGROUP_ROOT=root) == "240000000 300000000"
    root = _cgroup(tmp_path, {name: "max" for name in files if "stat" not in name})
    free, total = map(int, run_python(code, OKERNEL_CGROUP_ROOT=root).split())
    assert 300000000 < free <= total


@pytest.mark.parametrize("n", [0, -1, 257])
def test_a_number_of_threads_out_of_range_is_refused(cpu, n):
    with pytest.raises(InvalidArgument, match=f"n={n} must be between 1 and 256"):
        cpu.c.ok_set_threads(n)


@pytest.fixture
def work(cpu):
    """work(): one operation that uses the pool; returns whether its result is right."""
    threads = cpu.c.ok_threads()
    x = np.random.default_rng(0).normal(size=200_000).astype(np.float32)
    with Arena(cpu, 4 << 20) as arena, Queue(cpu) as queue:
        source, y = (arena.alloc(x.shape, DType.F32) for _ in range(2))
        source.upload(queue, x)

        def run() -> bool:
            y.numpy()[:] = np.nan
            ops.activate(queue, y, source, Activation.RELU)
            return bool((y.numpy() == np.maximum(x, 0)).all())

        cpu.c.ok_set_threads(4)
        yield run
    cpu.c.ok_set_threads(threads)


def _pool_tasks() -> list[str]:
    """Folders of the pool's threads, which call themselves okernel."""
    folders = [f"/proc/self/task/{task}" for task in os.listdir("/proc/self/task")]
    return [folder for folder in folders if Path(folder, "comm").read_text() == "okernel\n"]


def test_the_pool_follows_the_number_of_threads(cpu, work):
    assert work()
    for n in (2, 8, 1, 3):
        cpu.c.ok_set_threads(n)
        for _ in range(20):
            assert work()
        if n > 1:  # the caller works too; for one thread the pool is left asleep
            assert len(_pool_tasks()) == n - 1


def _exit_code(pid: int, seconds: float = 20) -> int | None:
    """A child's exit code, or None if it hangs (it is killed then)."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        os.sched_yield()
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    return None


# Python 3.12 and later warn of what these two tests are about.
FORK = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


@FORK
def test_a_forked_child_can_use_the_pool_that_its_parent_used(work):
    assert work()
    for _ in range(5):
        pid = os.fork()
        if pid == 0:
            os._exit(0 if work() and len(_pool_tasks()) == 3 and work() else 1)
        assert _exit_code(pid) == 0
        assert work()


@FORK
def test_a_child_forked_while_the_pool_is_busy_can_use_it(cpu, work):
    stop = threading.Event()

    def keep_busy() -> None:
        with Arena(cpu, 4 << 20) as arena, Queue(cpu) as queue:
            x = arena.alloc((1_000_000,), DType.F32)
            x.numpy()[:] = 1
            while not stop.is_set():
                ops.activate(queue, x, x, Activation.GELU_ERF)

    thread = threading.Thread(target=keep_busy)
    thread.start()
    try:
        for _ in range(10):
            pid = os.fork()
            if pid == 0:
                os._exit(0 if work() else 1)
            assert _exit_code(pid) == 0
    finally:
        stop.set()
        thread.join()


def test_queues_of_several_threads_share_the_pool(work, cpu):
    wrong = []

    def loop() -> None:
        x = np.random.default_rng(threading.get_ident() % 1000).normal(size=100_000)
        x = x.astype(np.float32)
        with Arena(cpu, 1 << 20) as arena, Queue(cpu) as queue:
            source, y = (arena.alloc(x.shape, DType.F32) for _ in range(2))
            source.upload(queue, x)
            for _ in range(200):
                y.numpy()[:] = np.nan
                ops.activate(queue, y, source, Activation.RELU)
                if not (y.numpy() == np.maximum(x, 0)).all():
                    wrong.append(threading.get_ident())

    threads = [threading.Thread(target=loop) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_idle_threads_use_no_processor_time(work):
    assert work()
    settled = time.monotonic() + 0.05  # spinning ends long before
    while time.monotonic() < settled:
        os.sched_yield()
    before = _pool_ticks()
    end = time.monotonic() + 0.3
    while time.monotonic() < end:
        os.sched_yield()
    assert _pool_ticks() - before <= 1  # of 10 ms, where three spinning threads would use up to 30


def _pool_ticks() -> int:
    """Processor time of the pool's threads, in clock ticks: utime and stime of proc(5)."""
    total = 0
    for folder in _pool_tasks():
        fields = Path(folder, "stat").read_text().rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total


def test_a_process_ends_while_the_pool_sleeps(run_python):
    code = """
import numpy as np
from pyengine.native import *
lib = load_library(); lib.c.ok_set_threads(4)
arena, queue = Arena(lib, 1 << 20), Queue(lib)
x = arena.alloc((100000,), DType.F32)
ops.activate(queue, x, x, Activation.RELU)
print("done", flush=True)
arena.close(); queue.close()
"""
    assert run_python(code) == "done"
