"""The floor that knows C: bindings, libraries and devices, memory, and one function a kernel."""

from pyengine.native import ops
from pyengine.native.bindings import Activation, DType, Memory, NormKind, Replay
from pyengine.native.interop import DeviceArray, stream_handle
from pyengine.native.library import Device, Library, choose_device, library_path, load_library
from pyengine.native.memory import Arena, Buffer, Program, Queue, Stopwatch

__all__ = [
    "Activation",
    "Arena",
    "Buffer",
    "DType",
    "Device",
    "DeviceArray",
    "Library",
    "Memory",
    "NormKind",
    "Program",
    "Queue",
    "Replay",
    "Stopwatch",
    "choose_device",
    "library_path",
    "load_library",
    "ops",
    "stream_handle",
]
