"""Every error this package raises on purpose.

Each class also inherits the builtin that fits, so that callers may catch either:

    EngineError
    ├── ConfigError            ValueError           config.json is malformed or impossible
    ├── UnsupportedModelError  NotImplementedError  a family, field or value refused by name
    ├── WeightError            ValueError           a tensor or file missing, cut or misshapen
    ├── RequestError           ValueError           a prompt or option that cannot be served
    ├── DownloadError          OSError              a model could not be fetched whole
    ├── CannotCompare          RuntimeError         parity: no oracle, or an insane one
    ├── SelfTestError          RuntimeError         a GPU computes something else than the CPU
    ├── LibraryError           OSError              libokernel not found, or of another release
    └── KernelError            RuntimeError         a call into libokernel failed: .status .function
        ├── InvalidArgument    ValueError
        ├── OutOfMemory        MemoryError
        ├── DeviceError        RuntimeError
        ├── Unavailable        RuntimeError         no runtime, device, permission or code for it
        ├── Unsupported        NotImplementedError
        └── NonFiniteError     ArithmeticError      NaN or infinity in the logits, and where first
"""


class EngineError(Exception):
    """Base of all errors of this package; its text is one sentence fit to be shown to a user."""


class ConfigError(EngineError, ValueError):
    """config.json (or a sibling) is malformed or contradicts itself; names file and key."""


class UnsupportedModelError(EngineError, NotImplementedError):
    """A model family, config field or value that this engine does not compute; refused by name."""


class WeightError(EngineError, ValueError):
    """A weight file or tensor is missing, damaged, unexpected or of the wrong shape; names it."""


class RequestError(EngineError, ValueError):
    """A prompt, option or sampling parameter that cannot be served; says what would do."""


class DownloadError(EngineError, OSError):
    """A model could not be fetched or failed its checksum; nothing half-written is left behind."""


class CannotCompare(EngineError, RuntimeError):
    """There is nothing sound to compare with: no oracle, an insane one, or other weights."""


class SelfTestError(EngineError, RuntimeError):
    """A GPU gave other numbers than the CPU in the start-up self-test; says which and how far."""


class LibraryError(EngineError, OSError):
    """libokernel could not be found or loaded, or was built for another version of this package."""


class KernelError(EngineError, RuntimeError):
    """A call into libokernel failed.

    Attributes:
        status: the ok_status that was returned.
        function: name of the C function.
    """

    def __init__(self, message: str, *, status: int = 0, function: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.function = function


class InvalidArgument(KernelError, ValueError):
    """An argument outside the function's contract; nothing was done."""


class OutOfMemory(KernelError, MemoryError):
    """A reservation did not fit; the message gives needed, free and total bytes."""


class DeviceError(KernelError):
    """The GPU runtime or driver reported a failure; the message carries its text."""


class Unavailable(KernelError):
    """No runtime, device, permission, or code object for this card; the message says which."""


class Unsupported(KernelError, NotImplementedError):
    """This build of libokernel cannot do that; the message says what can."""


class NonFiniteError(KernelError, ArithmeticError):
    """Logits hold NaN or infinity; the message names the first layer that does and what to try."""
