"""An engine and fork: nothing is loaded at import, children work, and their end costs nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# A child must end on its own within this, or its alarm ends it.
PRELUDE = """
import os, signal, warnings
warnings.simplefilter("ignore", DeprecationWarning)  # of 3.12: a forking process has threads
import pyengine

def in_child(work):
    pid = os.fork()
    if pid == 0:
        signal.alarm(60)
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))

def text(engine):
    return engine.generate("In the beginning", max_new_tokens=12).text

def fresh():
    with pyengine.Engine("demo", device="cpu", threads=2) as engine:
        return text(engine)
"""


def _run(code: str) -> list[str]:
    """What a fresh interpreter prints, line by line."""
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + code],
        capture_output=True, text=True, timeout=200, cwd=ROOT, env=os.environ,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_child_of_a_process_that_has_only_imported_the_package_can_generate() -> None:
    assert _run("""
def work():
    assert len(fresh()) > 0
in_child(work)
in_child(work)
""") == ["0", "0"]


def test_importing_the_package_loads_no_kernel_library() -> None:
    assert _run("""
print("libokernel" in open("/proc/self/maps").read())
""") == ["False"]


def test_children_use_their_parents_engine_and_leave_it_unharmed() -> None:
    assert _run("""
with pyengine.Engine("demo", device="cpu", threads=2) as engine:
    before = text(engine)

    def uses_it():
        assert text(engine) == before

    def frees_it():
        engine.close()
        assert fresh() == before

    in_child(uses_it)
    in_child(frees_it)
    in_child(uses_it)
    print(text(engine) == before)
""") == ["0", "0", "0", "True"]


def test_a_child_that_ends_in_the_ordinary_way_frees_nothing_of_its_parents() -> None:
    assert _run("""
import gc, sys
engine = pyengine.Engine("demo", device="cpu", threads=2)
before = text(engine)
pid = os.fork()
if pid == 0:
    engine.close()  # as a with statement would on the way out
    del engine
    gc.collect()
    sys.exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
print(text(engine) == before)
engine.close()
""") == ["0", "True"]
