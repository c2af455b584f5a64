"""Device memory and streams for other libraries: DLPack, array interfaces, hip-python."""

from __future__ import annotations

from typing import Any

from pyengine.errors import RequestError
from pyengine.native.bindings import DType, dlpack_capsule
from pyengine.native.memory import Buffer

_DLPACK_DEVICES = {"cpu": 1, "cuda": 2, "hip": 10}  # kDLCPU, kDLCUDA, kDLROCM of dlpack.h


class DeviceArray:
    """A float32 array where it lies, for other libraries to take without a copy.

    It speaks DLPack (numpy.from_dlpack, torch.from_dlpack, cupy.from_dlpack), and the array
    interface of its place: `__array_interface__` in the CPU's memory, `__cuda_array_interface__`
    (which hip-python, PyTorch and CuPy read on AMD too) in a GPU's. The work that wrote it is done.

    Attributes:
        pointer: address on the device.
        shape: elements per axis, row-major.
        device: ("cpu", 0), ("hip", 1), ...
    """

    def __init__(self, buffer: Buffer, device: int) -> None:
        if buffer.dtype != DType.F32 or not buffer.contiguous:
            raise RequestError("only contiguous float32 memory can be handed out")
        self._arena = buffer.arena
        self.pointer = buffer.ptr
        self.shape = buffer.shape
        self.device = (buffer.arena.library.backend, device)

    def __dlpack_device__(self) -> tuple[int, int]:
        """(device type, device number) as dlpack.h has them."""
        backend, number = self.device
        return _DLPACK_DEVICES[backend], number

    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """A "dltensor" capsule. `stream` needs nothing done: all work is done.

        Raises:
            BufferError: a copy, or another device, is asked for.
        """
        if copy:
            raise BufferError("this array is handed out as it lies; copy it afterwards")
        if dl_device is not None and tuple(dl_device) != self.__dlpack_device__():
            raise BufferError(f"this array lies on {self.__dlpack_device__()}, not on {dl_device}")
        return dlpack_capsule(self.pointer, self.shape, self.__dlpack_device__(), self._arena)

    def __getattr__(self, name: str) -> dict[str, Any]:
        on_cpu = self.device[0] == "cpu"
        if name == ("__array_interface__" if on_cpu else "__cuda_array_interface__"):
            return {
                "data": (self.pointer, False),
                "shape": self.shape,
                "typestr": "<f4",
                "strides": None,
                "version": 3,
            }
        raise AttributeError(f"a DeviceArray on {self.device[0]} has no {name}")


def stream_handle(stream: Any) -> int:
    """The address of a HIP or CUDA stream.

    Args:
        stream: None (0: the engine makes its own), an integer, what converts to one (hip-python's
            ihipStream_t), a PyTorch stream (`cuda_stream`), or what has `__cuda_stream__`.

    Raises:
        RequestError: none of these.
    """
    if stream is None:
        return 0
    if hasattr(stream, "__cuda_stream__"):
        return int(stream.__cuda_stream__()[1])
    try:
        return int(getattr(stream, "cuda_stream", stream))
    except (TypeError, ValueError):
        raise RequestError(
            f"stream={stream!r}: expected an address, or a stream of hip-python or PyTorch"
        ) from None
