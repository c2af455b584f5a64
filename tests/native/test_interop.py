"""Memory is handed out as it lies, stays while it is held, and streams are taken in every form."""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest

from pyengine.errors import RequestError
from pyengine.native import Arena, Buffer, DeviceArray, DType, load_library, stream_handle


@pytest.fixture
def buffer() -> Iterator[Buffer]:
    with Arena(load_library("cpu"), 1 << 16) as arena:
        made = arena.alloc((3, 5), DType.F32)
        made.numpy()[:] = np.arange(15).reshape(3, 5)
        yield made


def on_gpu(buffer: Buffer, backend: str, device: int) -> DeviceArray:
    """The array as it would be described if its memory were a GPU's."""
    array = DeviceArray(buffer, device)
    array.device = (backend, device)
    return array


def test_numpy_takes_the_memory_itself(buffer: Buffer) -> None:
    array = DeviceArray(buffer, 0)
    for taken in (np.from_dlpack(array), np.asarray(array)):
        assert taken.dtype == np.float32 and taken.shape == (3, 5)
        assert (taken == buffer.numpy()).all()
        buffer.numpy()[1, 2] += 100
        assert taken[1, 2] == buffer.numpy()[1, 2]


def test_torch_takes_the_memory_itself(buffer: Buffer) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    taken = torch.from_dlpack(DeviceArray(buffer, 0))
    assert taken.dtype == torch.float32 and tuple(taken.shape) == (3, 5)
    taken[2, 4] = -1
    assert buffer.numpy()[2, 4] == -1


@pytest.mark.parametrize("used", [True, False], ids=["taken", "never taken"])
def test_the_owner_lives_as_long_as_the_capsule_or_what_was_made_of_it(
    buffer: Buffer, used: bool
) -> None:
    arena = Arena(load_library("cpu"), 1 << 16)
    watched = weakref.ref(arena)
    array = DeviceArray(arena.alloc((4,), DType.F32), 0)
    held: object = np.from_dlpack(array) if used else array.__dlpack__()
    handle, arena._handle = arena._handle, 0  # no warning about what is closed below
    del arena, array
    gc.collect()
    assert watched() is not None
    del held
    gc.collect()
    assert watched() is None
    load_library("cpu").c.ok_arena_destroy(handle)


def test_what_it_cannot_do_is_refused(buffer: Buffer) -> None:
    array = DeviceArray(buffer, 0)
    with pytest.raises(BufferError, match="copy it afterwards"):
        array.__dlpack__(copy=True)
    with pytest.raises(BufferError, match=r"lies on \(1, 0\), not on \(2, 0\)"):
        array.__dlpack__(dl_device=(2, 0))
    with pytest.raises(RequestError, match="contiguous float32"):
        DeviceArray(buffer.columns(1, 3), 0)


def test_each_place_has_its_own_array_interface(buffer: Buffer) -> None:
    array = DeviceArray(buffer, 0)
    assert array.__dlpack_device__() == (1, 0)
    assert not hasattr(array, "__cuda_array_interface__")
    for backend, kind in (("cuda", 2), ("hip", 10)):
        array = on_gpu(buffer, backend, 3)
        assert array.__dlpack_device__() == (kind, 3)
        assert not hasattr(array, "__array_interface__")
        interface = array.__cuda_array_interface__
        assert interface["data"] == (buffer.ptr, False)
        assert (interface["shape"], interface["typestr"]) == ((3, 5), "<f4")


class Convertible:
    """A stream as hip-python has it: it converts to its address."""

    def __int__(self) -> int:
        return 1234


@pytest.mark.parametrize(
    "stream",
    [
        1234,
        np.int64(1234),
        Convertible(),
        SimpleNamespace(cuda_stream=1234),
        SimpleNamespace(__cuda_stream__=lambda: (0, 1234)),
    ],
    ids=["integer", "numpy", "hip-python", "torch", "protocol"],
)
def test_a_stream_is_taken_in_every_form(stream: object) -> None:
    assert stream_handle(stream) == 1234


def test_no_stream_is_zero_and_anything_else_is_refused() -> None:
    assert stream_handle(None) == 0
    for wrong in ("a stream", object(), ctypes.c_void_p(1)):
        with pytest.raises(RequestError, match="stream="):
            stream_handle(wrong)


def test_a_stream_of_hip_python_is_taken() -> None:
    hip = pytest.importorskip("hip", reason="hip-python is not installed")
    assert stream_handle(hip.hip.ihipStream_t(1234)) == 1234
