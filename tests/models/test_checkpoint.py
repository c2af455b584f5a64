"""models/checkpoint.py: good files are read bit for bit, bad ones refused in one clear sentence."""

from __future__ import annotations

import json
import logging
import os
import stat
from pathlib import Path

import numpy as np
import pytest

from pyengine.errors import ConfigError, WeightError
from pyengine.models.checkpoint import SafetensorsCheckpoint, is_ignorable, open_checkpoint
from tests.models.safetensors_files import write_raw, write_tensors
from tests.tiny import write_tiny

F32_PAIR = {"a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}}
LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model directory without weights."""
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A tiny Llama in several shards."""
    path = write_tiny("llama", tmp_path, shard_bytes=60_000)
    assert len(list(path.glob("model-*.safetensors"))) >= 3
    return path


def refusal(path: Path) -> str:
    """The one-line message with which a directory is refused."""
    with pytest.raises(WeightError) as caught:
        open_checkpoint(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---- good files ---------------------------------------------------------------------------------


def test_tensors_come_back_bit_for_bit(folder: Path) -> None:
    rng = np.random.default_rng(0)
    tensors = {
        "f32": rng.standard_normal((5, 3)).astype(np.float32),
        "f16": rng.standard_normal((4, 2)).astype(np.float16),
        "bf16": rng.integers(0, 1 << 16, (6, 2), dtype=np.uint16),
    }
    write_tensors(folder / "model.safetensors", tensors)
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.names() == list(tensors)
        assert [checkpoint.dtype(name) for name in tensors] == ["F32", "F16", "BF16"]
        for name, array in tensors.items():
            assert checkpoint.shape(name) == array.shape
            assert checkpoint.read(name).tobytes() == array.tobytes()
            assert checkpoint.read(name, slice(1, 3)).tobytes() == array[1:3].tobytes()


def test_empty_and_scalar_tensors_are_read(folder: Path) -> None:
    empty, scalar = np.zeros((0, 4), np.float32), np.float32(3).reshape(())
    write_tensors(folder / "model.safetensors", {"z": empty, "s": scalar})
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.read("z").shape == (0, 4)
        assert checkpoint.read("s") == 3


def test_shards_are_read_by_the_index(sharded: Path) -> None:
    with open_checkpoint(sharded) as checkpoint:
        index = json.loads((sharded / "model.safetensors.index.json").read_text())
        assert sorted(checkpoint.names()) == sorted(index["weight_map"])


def test_a_stray_single_file_beside_an_index_is_ignored_with_one_warning(
    sharded: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_tensors(sharded / "model.safetensors", {"a": np.ones(3, np.float32)})
    with caplog.at_level(logging.WARNING, "pyengine"), open_checkpoint(sharded) as checkpoint:
        assert "a" not in checkpoint.names()
    assert len(caplog.records) == 1
    assert "model.safetensors is not named by" in caplog.text


def test_a_read_only_cache_of_links_is_read_and_left_alone(tmp_path: Path) -> None:
    source = write_tiny("llama", tmp_path / "source")
    snapshot, blobs = tmp_path / "snapshots" / "x", tmp_path / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(sorted(source.iterdir())):
        file.rename(blobs / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    before = sorted(os.listdir(snapshot))
    snapshot.chmod(stat.S_IRUSR | stat.S_IXUSR)
    with open_checkpoint(snapshot) as checkpoint:
        assert "lm_head.weight" in checkpoint.names()
    snapshot.chmod(stat.S_IRWXU)
    assert sorted(os.listdir(snapshot)) == before


def test_closing_gives_the_descriptors_back(sharded: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with open_checkpoint(sharded):
        assert len(os.listdir("/proc/self/fd")) > before
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_refused_checkpoint_leaves_no_descriptor_open(sharded: Path) -> None:
    last = sorted(sharded.glob("model-*"))[-1]
    last.write_bytes(last.read_bytes()[:-1])
    before = len(os.listdir("/proc/self/fd"))
    refusal(sharded)
    assert len(os.listdir("/proc/self/fd")) == before


# ---- damaged files ------------------------------------------------------------------------------


def test_a_shorter_or_longer_file_than_its_header_says_is_refused(sharded: Path) -> None:
    shard = sorted(sharded.glob("model-*"))[1]
    good = shard.read_bytes()
    for damaged in (good[:-100], good + bytes(4), good[:20], good[:4]):
        shard.write_bytes(damaged)
        assert shard.name in refusal(sharded)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (LFS_POINTER, "git LFS pointer, not the weights: incomplete download"),
        (b"", "is empty: incomplete download"),
        (b"<!DOCTYPE html><html>Not found</html>", "is an HTML page"),
        (b"\n <html></html>", "is an HTML page"),
        (b"GGUF\x03\x00\x00\x00", "is a GGUF file"),
        (b"\x00" * 7, "has 7 bytes"),
        (b"\xff" * 64, "its header alone should have"),
        (b"PK\x03\x04" + bytes(60), "incomplete download, or not a safetensors file"),
    ],
)
def test_what_is_often_found_in_place_of_weights_is_named(
    folder: Path, content: bytes, words: str
) -> None:
    (folder / "model.safetensors").write_bytes(content)
    assert words in refusal(folder)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [1000, 1000], "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": [2, 2], "data_offsets": [16, 0]},
        {"dtype": "F32", "shape": [2, 2], "data_offsets": [-16, 0]},
        {"dtype": "F32", "shape": [2, 2], "data_offsets": [1 << 63, (1 << 63) + 16]},
        {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16, 32]},
        {"dtype": "F32", "shape": [2, 2], "data_offsets": [8, 24]},
        {"dtype": "F32", "shape": [-2, -2], "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": [1 << 32, 1 << 32], "data_offsets": [0, 0]},
        {"dtype": "F32", "shape": 4, "data_offsets": [0, 16]},
        {"dtype": "F33", "shape": [2, 2], "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": [2, 2]},
        [0, 16],
        None,
    ],
)
def test_a_header_that_contradicts_its_bytes_is_refused(folder: Path, entry: object) -> None:
    write_raw(folder / "model.safetensors", {"a": entry}, bytes(16))
    assert "model.safetensors" in refusal(folder)


@pytest.mark.parametrize("text", [b"{", b"[]", b"\xff\xfe", b'{"a": 1e999}', b"null"])
def test_a_header_that_is_not_an_object_is_refused(folder: Path, text: bytes) -> None:
    write_raw(folder / "model.safetensors", text)
    assert "model.safetensors" in refusal(folder)


def test_a_header_length_may_look_like_any_text(folder: Path) -> None:
    """The length's first byte is arbitrary: "<" is no HTML, "G" no GGUF."""
    for length in (ord("<"), ord("<") + 256, int.from_bytes(b" <", "little"), ord("G")):
        header = json.dumps(F32_PAIR).encode().ljust(length if length > 80 else length + 256)
        write_raw(folder / "model.safetensors", header, bytes(16))
        with open_checkpoint(folder) as checkpoint:
            assert checkpoint.names() == ["a"]


def test_a_tensor_listed_twice_is_refused(folder: Path) -> None:
    one = json.dumps(F32_PAIR["a"])
    write_raw(folder / "model.safetensors", f'{{"a": {one}, "a": {one}}}'.encode(), bytes(16))
    assert "model.safetensors" in refusal(folder)


def test_overlapping_tensors_are_refused(folder: Path) -> None:
    write_raw(folder / "model.safetensors", {"a": F32_PAIR["a"], "b": F32_PAIR["a"]}, bytes(16))
    assert "model.safetensors" in refusal(folder)


def test_a_file_cut_while_loading_is_an_error(folder: Path) -> None:
    file = write_tensors(folder / "model.safetensors", {"a": np.ones((1000, 8), np.float32)})
    with open_checkpoint(folder) as checkpoint:
        os.truncate(file, 20_000)
        with pytest.raises(WeightError, match=r"model.safetensors ended at byte 20000: it was cut"):
            checkpoint.read("a")


# ---- directories that do not fit together -------------------------------------------------------


def test_a_missing_shard_is_named(sharded: Path) -> None:
    shard = sorted(sharded.glob("model-*"))[1]
    shard.unlink()
    message = refusal(sharded)
    assert f"{shard.name} is missing" in message
    assert "incomplete download" in message


def test_a_missing_shard_is_not_made_up_for_by_a_single_file(sharded: Path) -> None:
    write_tiny("llama", sharded / "whole")
    (sharded / "whole" / "model.safetensors").rename(sharded / "model.safetensors")
    sorted(sharded.glob("model-*"))[0].unlink()
    assert "is missing" in refusal(sharded)


def test_a_tensor_the_index_places_elsewhere_is_refused(sharded: Path) -> None:
    file = sharded / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    names = index["weight_map"]
    first, other = next(iter(names)), list(names.values())[-1]
    file.write_text(json.dumps({"weight_map": {**names, first: other}}))
    assert first in refusal(sharded)


def test_a_tensor_the_index_does_not_list_is_refused(sharded: Path) -> None:
    file = sharded / "model.safetensors.index.json"
    names = json.loads(file.read_text())["weight_map"]
    gone = next(n for n, shard in names.items() if list(names.values()).count(shard) > 1)
    del names[gone]
    file.write_text(json.dumps({"weight_map": names}))
    assert f"holds {gone}" in refusal(sharded)


@pytest.mark.parametrize(
    ("weight_map", "words"),
    [
        ({"a": "../x.safetensors"}, "is not a file name"),
        ({"a": "/etc/passwd"}, "is not a file name"),
        ({"a": 3}, "is not a file name"),
        ({}, "weight_map is missing or empty"),
        ([], "weight_map is missing or empty"),
        (None, "weight_map is missing or empty"),
    ],
)
def test_an_index_that_makes_no_sense_is_refused(
    folder: Path, weight_map: object, words: str
) -> None:
    file = folder / "model.safetensors.index.json"
    file.write_text(json.dumps({"weight_map": weight_map}))
    assert words in refusal(folder)
    file.write_text("no json")
    assert "index.json is not JSON" in refusal(folder)


def test_a_directory_without_weights_says_what_it_lacks(folder: Path) -> None:
    assert "has neither model.safetensors nor model.safetensors.index.json" in refusal(folder)
    (folder / "pytorch_model.bin").write_bytes(b"x")
    assert "pytorch_model.bin beside it cannot be used alone" in refusal(folder)


def test_a_dangling_link_is_named_with_its_target(folder: Path) -> None:
    (folder / "model.safetensors").symlink_to("../../blobs/abc")
    message = refusal(folder)
    assert "model.safetensors is a link to ../../blobs/abc, which does not exist" in message


def test_what_is_no_file_is_refused_without_waiting_for_it(folder: Path) -> None:
    (folder / "model.safetensors").mkdir()
    assert "model.safetensors is not a file" in refusal(folder)
    (folder / "model.safetensors").rmdir()
    os.mkfifo(folder / "model.safetensors")
    assert "model.safetensors is not a file" in refusal(folder)


def test_a_directory_without_config_is_not_a_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is this a model directory"):
        open_checkpoint(tmp_path)


# ---- what may be left out -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "shape", "ignorable"),
    [
        ("h.0.attn.bias", (1, 1, 8, 8), True),
        ("h.0.attn.masked_bias", (), True),
        ("transformer.h.0.attn.bias", (1, 1, 8, 8), True),
        ("model.layers.0.self_attn.rotary_emb.inv_freq", (8,), True),
        ("h.0.attn.c_attn.bias", (24,), False),
        ("h.0.attn.bias.extra", (24,), False),
        ("empty", (0, 4), True),
        ("scalar", (), True),
        ("new", (1,), False),
    ],
)
def test_only_whole_suffixes_are_ignorable(
    name: str, shape: tuple[int, ...], ignorable: bool
) -> None:
    assert is_ignorable(name, shape) is ignorable


def test_a_strided_read_is_a_programming_error(folder: Path) -> None:
    write_tensors(folder / "model.safetensors", {"a": np.ones((4, 2), np.float32)})
    with SafetensorsCheckpoint(folder) as checkpoint, pytest.raises(ValueError, match="contiguous"):
        checkpoint.read("a", slice(0, 4, 2))


def test_a_type_without_numbers_here_cannot_be_read(folder: Path) -> None:
    write_tensors(folder / "model.safetensors", {"a": np.ones(2, np.int64)})
    with open_checkpoint(folder) as checkpoint, pytest.raises(WeightError, match="stored as I64"):
        checkpoint.read("a")
