#!/usr/bin/env python3
"""Writes pyengine/native/bindings.py from libokernel/include/okernel.h; `--check` compares.

The header keeps to a small grammar (see its first comment); anything outside it stops this script
and is named.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HEADER = ROOT / "libokernel/include/okernel.h"
BINDINGS = ROOT / "pyengine/native/bindings.py"

SCALARS = {
    "int32_t": "c_int32", "int64_t": "c_int64", "uint8_t": "c_uint8", "uint32_t": "c_uint32",
    "uint64_t": "c_uint64", "float": "c_float",
}  # fmt: skip

TEMPLATE = '''\
"""GENERATED from libokernel/include/okernel.h by scripts/gen_bindings.py: do not edit.

The only module that knows ctypes: enums, prototypes, loading, and status -> exception. Pointers
are plain integers (addresses) on the Python side; out-parameters take the address of a cell.
"""

# ruff: noqa: E501
# fmt: off

from __future__ import annotations

import ctypes
from ctypes import (
    CFUNCTYPE,
    c_char_p,
    c_float,
    c_int32,
    c_int64,
    c_uint8,
    c_uint64,
    c_void_p,
)
from enum import IntEnum
from typing import Any

from pyengine import errors


{enums}


_EXCEPTIONS: dict[int, type[errors.KernelError]] = {{
    Status.ERR_INVALID_ARGUMENT: errors.InvalidArgument,
    Status.ERR_OUT_OF_MEMORY: errors.OutOfMemory,
    Status.ERR_DEVICE: errors.DeviceError,
    Status.ERR_UNAVAILABLE: errors.Unavailable,
    Status.ERR_UNSUPPORTED: errors.Unsupported,
}}


def int32_cell() -> c_int32:
    """An int32 that C can write; read `.value`."""
    return c_int32()


def int64_cell() -> c_int64:
    """An int64 that C can write; read `.value`."""
    return c_int64()


def uint64_cell() -> c_uint64:
    """A uint64 that C can write; read `.value`."""
    return c_uint64()


def float_cell() -> c_float:
    """A float that C can write; read `.value`."""
    return c_float()


def pointer_cell() -> c_void_p:
    """A pointer that C can write; read `.value` (None when null)."""
    return c_void_p()


def address(cell: Any) -> int:
    """Address of a cell, to pass where the header takes a pointer."""
    return ctypes.addressof(cell)


def text_cell(size: int) -> Any:
    """A char buffer of `size` bytes that C can write; read `.value` (bytes)."""
    return ctypes.create_string_buffer(size)


class _DLTensor(ctypes.Structure):
    """DLTensor of dlpack.h, version 0.8."""

    _fields_ = [
        ("data", c_void_p),
        ("device_type", c_int32),
        ("device_id", c_int32),
        ("ndim", c_int32),
        ("type_code", c_uint8),
        ("type_bits", c_uint8),
        ("type_lanes", ctypes.c_uint16),
        ("shape", c_void_p),
        ("strides", c_void_p),  # null: row-major without gaps
        ("byte_offset", c_uint64),
    ]


class _DLManagedTensor(ctypes.Structure):
    """DLManagedTensor of dlpack.h, version 0.8."""

    _fields_ = [("tensor", _DLTensor), ("manager_context", c_void_p), ("deleter", c_void_p)]


_FLOAT_CODE = 2  # kDLFloat
_CAPSULE_NAME = b"dltensor"
# Address of a managed tensor that somebody holds -> what it needs to stay alive.
_lent: dict[int, tuple[Any, ...]] = {{}}


def _take_back(managed: int) -> None:
    """The deleter, called by whoever took the tensor out of its capsule."""
    _lent.pop(managed, None)


def _drop_capsule(capsule: int) -> None:
    """The capsule's end; its name is another one if its tensor was taken out."""
    if _capsule_is_valid(capsule, _CAPSULE_NAME):
        _lent.pop(_capsule_pointer(capsule, _CAPSULE_NAME), None)


_deleter: Any = CFUNCTYPE(None, c_void_p)(_take_back)
_destructor: Any = ctypes.PYFUNCTYPE(None, c_void_p)(_drop_capsule)
_new_capsule: Any = ctypes.PYFUNCTYPE(ctypes.py_object, c_void_p, c_char_p, c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)
_capsule_is_valid: Any = ctypes.PYFUNCTYPE(c_int32, c_void_p, c_char_p)(
    ("PyCapsule_IsValid", ctypes.pythonapi)
)
_capsule_pointer: Any = ctypes.PYFUNCTYPE(c_void_p, c_void_p, c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


def dlpack_capsule(
    pointer: int, shape: tuple[int, ...], device: tuple[int, int], owner: object
) -> Any:
    """A "dltensor" capsule of contiguous float32 memory, which keeps `owner` alive.

    device: (type, number) as dlpack.h has them.
    """
    sizes = (c_int64 * len(shape))(*shape)
    tensor = _DLTensor(
        pointer, *device, len(shape), _FLOAT_CODE, 32, 1, ctypes.addressof(sizes), None, 0
    )
    managed = _DLManagedTensor(tensor, None, ctypes.cast(_deleter, c_void_p))
    place = ctypes.addressof(managed)
    _lent[place] = (managed, sizes, owner)
    return _new_capsule(place, _CAPSULE_NAME, ctypes.cast(_destructor, c_void_p))


class Functions:
    """Every function of the header, bound to one loaded build; a failed status raises.

    Raises:
        errors.LibraryError: the file cannot be loaded, lacks a function, or has another ABI.
    """

    def __init__(self, path: str) -> None:
        try:
            library = ctypes.CDLL(path)
        except OSError as error:
            raise errors.LibraryError(f"cannot load {{path}}: {{error}}") from error
        try:
            abi = CFUNCTYPE(c_int32)(("ok_abi_version", library))()
            if abi != Constant.ABI_VERSION:
                raise errors.LibraryError(
                    f"{{path}} has ABI version {{abi}}; this package needs "
                    f"{{int(Constant.ABI_VERSION)}}: install a library of the same release"
                )
            for name, prototype, names, fallible in _prototypes():
                function: Any = prototype((name, library), tuple((1, n) for n in names))
                if fallible:
                    function.errcheck = self._check
                    function.ok_name = name
                setattr(self, name, function)
        except AttributeError as error:
            raise errors.LibraryError(
                f"{{path}} is not a libokernel of this release: {{error}}"
            ) from error

    def _check(self, status: int, function: Any, _arguments: Any) -> int:
        if status != Status.SUCCESS:
            message = (self.ok_last_error() or b"").decode(errors="replace")
            name = function.ok_name
            kind = _EXCEPTIONS.get(status, errors.KernelError)
            message = message or f"{{name}} failed with status {{status}}"
            raise kind(message, status=status, function=name)
        return status

{declarations}


def _prototypes() -> list[tuple[str, Any, tuple[str, ...], bool]]:
    """(name, prototype, argument names, whether it returns a status) of every function."""
    return [
{prototypes}
    ]
'''


def strip_comments(text: str) -> str:
    """The header without comments and preprocessor lines."""
    text = re.sub(r"/\*.*?\*/", " ", text, flags=re.S)
    return "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))


def parse_enums(text: str) -> dict[str, list[tuple[str, int]]]:
    """Enum name -> [(member, value)]; every value must be written out."""
    found = {}
    for name, body in re.findall(r"typedef enum (\w+) \{(.*?)\} \w+;", text, flags=re.S):
        members = []
        for entry in filter(None, (part.strip() for part in body.split(","))):
            match = re.fullmatch(r"(\w+) = (\d+)", entry)
            if not match:
                sys.exit(f"gen_bindings: enum {name}: {entry!r} has no explicit value")
            members.append((match[1], int(match[2])))
        found[name] = members
    return found


def parse_functions(text: str) -> list[tuple[str, str, list[tuple[str, str]]]]:
    """[(return type, name, [(argument type, argument name)])] in the header's order."""
    found = []
    for result, name, body in re.findall(r"OK_API ([\w ]+?[ *]+)(\w+)\((.*?)\);", text, flags=re.S):
        arguments = []
        if body.strip() != "void":
            for argument in body.split(","):
                match = re.fullmatch(r"(.+?[ *])(\w+)", " ".join(argument.split()))
                if not match:
                    sys.exit(f"gen_bindings: {name}: cannot read argument {argument.strip()!r}")
                arguments.append((match[1].strip(), match[2]))
        found.append((result.strip(), name, arguments))
    return found


def ctype(c_type: str, enums: dict[str, list[tuple[str, int]]], where: str) -> str:
    """The ctypes name of a C type within the grammar."""
    bare = c_type.removeprefix("const ").strip()
    if bare.endswith("*"):
        return "c_void_p"
    if bare in enums:
        return "c_int32"
    if bare not in SCALARS:
        sys.exit(f"gen_bindings: {where}: type {c_type!r} is outside the header's grammar")
    return SCALARS[bare]


def member_name(enum: str, member: str) -> str:
    """OK_ERR_DEVICE -> ERR_DEVICE; OK_MEMORY_HOST -> HOST; OK_REPLAY_LOOP -> LOOP."""
    short = member.removeprefix("OK_")
    return short.removeprefix(enum.removeprefix("ok_").upper() + "_")


def render() -> str:
    """The whole text of bindings.py."""
    text = strip_comments(HEADER.read_text())
    enums = parse_enums(text)
    functions = parse_functions(text)
    enum_names = {"ok_dtype": "DType", "ok_norm": "NormKind", "ok_status": "Status"}
    enum_code = []
    for name, members in enums.items():
        title = enum_names.get(name, name.removeprefix("ok_").title())
        lines = [f"class {title}(IntEnum):", f'    """`{name}` of the header."""', ""]
        lines += [f"    {member_name(name, member)} = {value}" for member, value in members]
        enum_code.append("\n".join(lines))
    prototypes, declarations = [], []
    for result, name, arguments in functions:
        fallible = result == "ok_status"
        if result == "const char *":
            returned = "c_char_p"
        else:
            returned = "None" if result == "void" else ctype(result, enums, name)
        types = ", ".join([returned, *(ctype(t, enums, name) for t, _ in arguments)])
        names = "".join(f'"{n}", ' for _, n in arguments)
        prototypes.append(
            f'        ("{name}", CFUNCTYPE({types}), ({names.rstrip()}), {fallible}),'
        )
        declarations.append(f"    {name}: Any")
    return TEMPLATE.format(
        enums="\n\n\n".join(enum_code),
        prototypes="\n".join(prototypes),
        declarations="\n".join(declarations),
    )


def main() -> int:
    """Writes or checks; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="fail if bindings.py is not what would be written"
    )
    arguments = parser.parse_args()
    text = render()
    if arguments.check:
        if not BINDINGS.exists() or BINDINGS.read_text() != text:
            print(
                f"{BINDINGS.relative_to(ROOT)} is not up to date: run scripts/gen_bindings.py",
                file=sys.stderr,
            )
            return 1
        return 0
    BINDINGS.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
