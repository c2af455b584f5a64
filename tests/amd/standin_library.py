"""Runs the sample kernels through the stand-in header, in this process."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.amd import toolchain


class KernelFault(Exception):
    """A launch came back with an error; the text is the stand-in's."""


class SampleLibrary:
    """samples.hip compiled for one wave size and one target's matrix unit."""

    def __init__(self, path: Path) -> None:
        self._library = library = ctypes.CDLL(str(path))
        size, pointer = ctypes.c_size_t, ctypes.c_void_p
        library.sample_alloc.restype, library.sample_alloc.argtypes = pointer, [size, size]
        library.sample_free.restype, library.sample_free.argtypes = None, [pointer]
        library.sample_message.restype = ctypes.c_char_p
        library.sample_launch.argtypes = [ctypes.c_char_p, pointer, pointer, size, pointer]

    @staticmethod
    def build(folder: Path, *, wave: int, target: str) -> SampleLibrary:
        """Compiles and loads it."""
        out = folder / f"samples-{wave}-{target}.so"
        toolchain.compile_standin(
            [toolchain.SAMPLES.parent / "entry.cpp"], out, wave=wave, target=target
        )
        return SampleLibrary(out)

    def set_bug(self, bug: int) -> None:
        """Gives one of the kernels its seeded mistake; 0: none."""
        self._library.sample_set_bug(bug)

    def launch(
        self,
        kernel: str,
        grid: Sequence[int],
        block: Sequence[int],
        arguments: Sequence[Any],
        dynamic_lds: int = 0,
    ) -> None:
        """Runs a kernel; numpy arrays are its memory (copied in and out, ended by a guard page). KernelFault on error."""
        sizes = [(ctypes.c_uint * 3)(*[*shape, 1, 1][:3]) for shape in (grid, block)]
        buffers: list[tuple[np.ndarray, int]] = []
        values: list[Any] = []
        for argument in arguments:
            if isinstance(argument, np.ndarray):
                alignment = min(256, argument.nbytes & -argument.nbytes)
                address = self._library.sample_alloc(argument.nbytes, alignment)
                ctypes.memmove(address, argument.ctypes.data, argument.nbytes)
                buffers.append((argument, address))
                values.append(ctypes.c_void_p(address))
            else:
                values.append(ctypes.create_string_buffer(argument.tobytes()))
        params = (ctypes.c_void_p * len(values))(*(ctypes.addressof(v) for v in values))
        error = self._library.sample_launch(kernel.encode(), *sizes, dynamic_lds, params)
        for array, address in buffers:
            ctypes.memmove(array.ctypes.data, address, array.nbytes)
            self._library.sample_free(address)
        if error:
            raise KernelFault(self._library.sample_message().decode())
