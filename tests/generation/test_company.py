"""Requests that share an engine: threads, faults of a neighbour, forks."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest

from pyengine import Engine
from pyengine.errors import EngineError, RequestError
from tests.tiny import write_tiny


@pytest.fixture
def engine(tmp_path: Path) -> Any:
    write_tiny("llama", tmp_path)
    with Engine(tmp_path, device="cpu", max_batch=4) as engine:
        yield engine


def test_a_stream_keeps_its_last_tokens_whoever_steps(engine: Engine) -> None:
    """Another thread's step ends the sequence between two looks of its reader."""
    alone = engine.generate([65, 66], max_new_tokens=4, ignore_eos=True)
    stream = engine.stream([65, 66], max_new_tokens=4, ignore_eos=True)
    first = next(stream)
    thread = threading.Thread(target=lambda: engine.generate([70], max_new_tokens=9))
    thread.start()
    thread.join()
    chunks = [first, *stream]
    assert chunks[-1].completion == alone
    assert "".join(chunk.text for chunk in chunks) == alone.text


def test_a_step_that_fails_is_an_error_to_all_in_it(engine: Engine) -> None:
    stream = engine.stream([65], max_new_tokens=50, ignore_eos=True)
    next(stream)
    replay = engine._runner.run

    def broken(rows: int, *, logits: bool) -> None:
        raise KeyboardInterrupt

    engine._runner.run = broken  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        engine.generate([66], max_new_tokens=2)
    engine._runner.run = replay  # type: ignore[method-assign]
    with pytest.raises(EngineError, match="failed: KeyboardInterrupt"):
        list(stream)
    assert engine.generate([66], max_new_tokens=2, ignore_eos=True).completion_tokens == 2


def test_end_of_text_ids_outside_the_vocabulary_mean_nothing(tmp_path: Path) -> None:
    write_tiny("llama", tmp_path, eos_token_id=[257, 2**31, 10**6])
    with Engine(tmp_path, device="cpu") as engine:
        assert engine.eos_token_ids == {257}
        assert engine.generate([65], min_new_tokens=1, max_new_tokens=2).completion_tokens == 2


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_child_of_a_busy_process_gets_an_error_not_a_hang(engine: Engine) -> None:
    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        with engine._exclusive():
            held.set()
            release.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(60)
    child = os.fork()
    if child == 0:
        try:
            engine.generate([65], max_new_tokens=1)
        except RequestError as error:
            os._exit(0 if "forked" in str(error) else 2)
        except BaseException:
            os._exit(3)
        os._exit(1)
    release.set()
    thread.join()
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert engine.generate([65], max_new_tokens=1, ignore_eos=True).completion_tokens == 1
