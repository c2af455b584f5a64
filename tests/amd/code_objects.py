"""AMD code objects: found inside a library, and read: sections, symbols, kernel metadata.

Reads ELF and the metadata's msgpack directly, so that neither ROCm nor a package is needed. The layout of the metadata and
of the kernel descriptor: LLVM, "User Guide for AMDGPU Backend", code object v4.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

EM_AMDGPU = 224
_ELF_MAGIC = b"\x7fELF\x02\x01"
_NOBITS = 8
_NOTE, _SYMTAB = 7, 2
_NT_AMDGPU_METADATA = 32


class NotACodeObject(ValueError):
    """The bytes are not an AMD code object that this module understands."""


@dataclass(frozen=True)
class Section:
    """One ELF section: kind, address in memory, place in the file."""

    name: str
    kind: int
    flags: int
    address: int
    offset: int
    size: int
    link: int


@dataclass(frozen=True)
class KernelDescriptor:
    """What the hardware is told when a kernel starts (64 bytes in the image)."""

    lds_bytes: int
    scratch_bytes: int
    kernarg_bytes: int
    entry: int  # address in the image
    resource2: int
    properties: int

    @property
    def user_sgprs(self) -> int:
        """SGPRs that are set before a wave starts, without the workgroup ids."""
        return self.resource2 >> 1 & 31


@dataclass
class CodeObject:
    """One code object.

    target: e.g. "gfx1030", as the metadata says; machine: the instruction set that the ELF header says ("gfx1100"), which
    differs only for code that was assembled for another architecture than it was compiled for.
    """

    data: bytes
    target: str
    machine: str
    kernels: dict[str, dict[str, Any]]
    sections: list[Section]
    symbols: dict[str, int]
    image: bytearray = field(repr=False)

    def descriptor(self, kernel: str) -> KernelDescriptor:
        """The kernel's descriptor. KeyError for a kernel that the object does not have."""
        at = self.symbols[self.kernels[kernel][".symbol"]]
        lds, scratch, kernarg, _, entry = struct.unpack_from("<IIIIq", self.image, at)
        resource2, properties = struct.unpack_from("<IH", self.image, at + 52)
        return KernelDescriptor(lds, scratch, kernarg, at + entry, resource2, properties)


# Machine numbers of the ELF header's flags (low byte) for the targets we build.
_MACHINES = {
    0x36: "gfx1030", 0x3F: "gfx90a", 0x41: "gfx1100", 0x44: "gfx1103", 0x46: "gfx1101",
    0x47: "gfx1102", 0x48: "gfx1200", 0x4A: "gfx1151", 0x4C: "gfx942", 0x4E: "gfx1201",
}  # fmt: skip


def parse_code_object(data: bytes) -> CodeObject:
    """Reads one code object. NotACodeObject for anything else."""
    if data[: len(_ELF_MAGIC)] != _ELF_MAGIC:
        raise NotACodeObject("no 64-bit little-endian ELF header")
    if struct.unpack_from("<H", data, 18)[0] != EM_AMDGPU:
        raise NotACodeObject("an ELF file for another machine")
    flags = struct.unpack_from("<I", data, 48)[0]
    sections = _sections(data)
    memory = [s for s in sections if s.address]
    image = bytearray(max((s.address + s.size for s in memory), default=0) + 64)
    for s in memory:
        if s.kind != _NOBITS:
            image[s.address : s.address + s.size] = data[s.offset : s.offset + s.size]
    metadata = _metadata(data, sections)
    return CodeObject(
        data=data,
        target=metadata["amdhsa.target"].split("--")[-1].split(":")[0],
        machine=_MACHINES.get(flags & 0xFF, f"machine {flags & 0xFF:#x}"),
        kernels={kernel[".name"]: kernel for kernel in metadata["amdhsa.kernels"]},
        sections=sections,
        symbols=_symbols(data, sections),
        image=image,
    )


def load_code_object(path: Path) -> CodeObject:
    """Reads a file that holds one raw code object."""
    return parse_code_object(path.read_bytes())


def embedded_code_objects(library: bytes) -> Iterator[CodeObject]:
    """Every code object that lies as a whole inside the bytes of a library, in file order."""
    at = library.find(_ELF_MAGIC)
    while at >= 0:
        following = at + 1
        if len(library) >= at + 64 and struct.unpack_from("<H", library, at + 18)[0] == EM_AMDGPU:
            size = _elf_size(library, at)
            yield parse_code_object(library[at : at + size])
            following = at + size
        at = library.find(_ELF_MAGIC, following)


def _elf_size(data: bytes, at: int) -> int:
    table, count = (
        struct.unpack_from("<Q", data, at + 40)[0],
        struct.unpack_from("<H", data, at + 60)[0],
    )
    return int(table + 64 * count)  # the linker writes the section table last


def _sections(data: bytes) -> list[Section]:
    table, (count, names) = (
        struct.unpack_from("<Q", data, 40)[0],
        struct.unpack_from("<HH", data, 60),
    )
    raw = [struct.unpack_from("<IIQQQQI", data, table + 64 * i) for i in range(count)]
    strings = raw[names][4]
    return [Section(_text(data, strings + n), *rest) for n, *rest in raw]


def _text(data: bytes, at: int) -> str:
    return data[at : data.index(b"\0", at)].decode()


def _symbols(data: bytes, sections: list[Section]) -> dict[str, int]:
    symbols = {}
    for section in (s for s in sections if s.kind == _SYMTAB):
        strings = sections[section.link].offset
        for at in range(section.offset, section.offset + section.size, 24):
            name, _, _, _, value, _ = struct.unpack_from("<IBBHQQ", data, at)
            symbols[_text(data, strings + name)] = value
    return symbols


def _metadata(data: bytes, sections: list[Section]) -> dict[str, Any]:
    for section in (s for s in sections if s.kind == _NOTE):
        name_size, size, kind = struct.unpack_from("<III", data, section.offset)
        at = section.offset + 12 + (name_size + 3) // 4 * 4
        if kind == _NT_AMDGPU_METADATA:
            metadata: dict[str, Any] = read_msgpack(data[at : at + size])
            return metadata
    raise NotACodeObject("no AMDGPU metadata note")


def read_msgpack(data: bytes) -> Any:
    """Decodes the subset of msgpack that the metadata uses. ValueError for other types."""
    return _msgpack(data, 0)[0]


_FIXED = {
    0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q", 0xD0: ">b", 0xD1: ">h", 0xD2: ">i", 0xD3: ">q",
}  # fmt: skip
_CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}
_STRING_SIZES = {0xD9: 1, 0xDA: 2, 0xDB: 4}
_ARRAY_SIZES = {0xDC: 2, 0xDD: 4}
_MAP_SIZES = {0xDE: 2, 0xDF: 4}


def _msgpack(data: bytes, at: int) -> tuple[Any, int]:
    tag, at = data[at], at + 1

    def length(size: int) -> int:
        return int.from_bytes(data[at : at + size], "big")

    if tag < 0x80:
        return tag, at
    if tag >= 0xE0:
        return tag - 256, at
    if tag < 0x90:
        return _map(data, at, tag & 15)
    if tag < 0xA0:
        return _array(data, at, tag & 15)
    if tag < 0xC0:
        return data[at : at + (tag & 31)].decode(), at + (tag & 31)
    if tag in _CONSTANTS:
        return _CONSTANTS[tag], at
    if form := _FIXED.get(tag):
        return struct.unpack_from(form, data, at)[0], at + struct.calcsize(form)
    if size := _STRING_SIZES.get(tag):
        start = at + size
        return data[start : start + length(size)].decode(), start + length(size)
    if size := _ARRAY_SIZES.get(tag):
        return _array(data, at + size, length(size))
    if size := _MAP_SIZES.get(tag):
        return _map(data, at + size, length(size))
    raise ValueError(f"msgpack type {tag:#x} is not used by AMDGPU metadata")


def _array(data: bytes, at: int, count: int) -> tuple[list[Any], int]:
    values = []
    for _ in range(count):
        value, at = _msgpack(data, at)
        values.append(value)
    return values, at


def _map(data: bytes, at: int, count: int) -> tuple[dict[Any, Any], int]:
    flat, at = _array(data, at, 2 * count)
    return dict(zip(flat[::2], flat[1::2], strict=True)), at
