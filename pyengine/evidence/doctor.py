"""What this machine and this installation offer, what is wrong, and what to do about it."""

from __future__ import annotations

import dataclasses
import getpass
import grp
import importlib.metadata
import os
import platform
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pyengine.errors import EngineError
from pyengine.evidence.audit import audit_installed
from pyengine.evidence.linkage import exit_status
from pyengine.generation import self_test
from pyengine.generation.engine import compute_logits
from pyengine.native import Device, Library, choose_device, library_path, load_library
from pyengine.native.library import BACKENDS

PACKAGES = ("numpy", "safetensors", "tokenizers", "gguf", "jinja2", "huggingface-hub", "hip-python")
# Of /proc/cpuinfo's flags, those that a path of the CPU build is chosen by, and their kin.
CPU_FEATURES = (
    *("sse4_2", "avx", "f16c", "fma", "avx2", "avx512f", "avx512bw", "avx512dq", "avx512vl"),
    *("avx512_vnni", "avx_vnni", "avx512_bf16", "amx_int8", "amx_bf16"),
    *("asimd", "asimdhp", "asimddp", "i8mm", "bf16", "sve"),
)
_AMD_VENDOR = "0x1002"
_LINKAGE = ("clean", "violation", "could not look everywhere")


@dataclass(frozen=True)
class Advice:
    """Something that is wrong or missing.

    Attributes:
        problem: what, with the path or value seen.
        remedy: what to do about it.
        serious: it keeps something from working that looks meant to work.
    """

    problem: str
    remedy: str
    serious: bool = True


@dataclass(frozen=True)
class DeviceFacts:
    """One device as a build of the library sees it; `reason` says why it is not usable.

    self_tests: what is known of a GPU, a verdict for each type of weights.
    """

    index: int
    name: str
    arch: str
    usable: bool
    reason: str
    free_bytes: int
    total_bytes: int
    self_tests: tuple[self_test.Verdict, ...] = ()


@dataclass(frozen=True)
class LibraryFacts:
    """One build of libokernel. `path` is "" if it is not installed; `error` says why not loaded."""

    backend: str
    path: str = ""
    build: str = ""
    targets: tuple[str, ...] = ()
    error: str = ""
    runtime_version: int = 0
    runtime_path: str = ""
    devices: tuple[DeviceFacts, ...] = ()
    device_error: str = ""


@dataclass(frozen=True)
class NodeFacts:
    """A device node. `problem` is "" if it is there and may be opened for reading and writing."""

    path: str
    exists: bool
    accessible: bool
    group: str = ""
    mode: str = ""
    problem: str = ""
    remedy: str = ""


@dataclass(frozen=True)
class HipProperties:
    """One device as hip-python describes it: what a kernel's author asks about."""

    name: str
    arch: str
    pci: str
    compute_units: int
    wave_size: int
    memory_bytes: int
    l2_bytes: int
    bus_bits: int
    clock_mhz: int
    memory_clock_mhz: int


@dataclass(frozen=True)
class Doctor:
    """Everything `pyengine doctor` prints.

    Attributes:
        versions: of pyengine, Python and the packages it uses; "" for one not installed.
        cpu: model name, architecture; `cpu_features` those that matter here.
        cpu_path: the instruction-set path in use. threads: that a queue would use.
        memory_free_bytes, memory_total_bytes: what this process may use.
        amd_gpus: PCI addresses of AMD display devices.
        hip_devices: what hip-python says of each; none where it is not installed.
        auto_device: what device="auto" takes, with its notice.
        linkage: what the audit of the installed libraries says.
    """

    system: str
    versions: dict[str, str]
    cpu: str
    cpu_features: tuple[str, ...]
    cpu_path: str
    threads: int
    memory_free_bytes: int
    memory_total_bytes: int
    libraries: tuple[LibraryFacts, ...]
    nodes: tuple[NodeFacts, ...]
    amd_gpus: tuple[str, ...]
    hip_devices: tuple[HipProperties, ...]
    auto_device: str
    auto_notice: str
    linkage: str
    advice: tuple[Advice, ...] = field(default=())

    @property
    def healthy(self) -> bool:
        """Whether nothing serious is wrong."""
        return not any(advice.serious for advice in self.advice)

    def to_json(self) -> dict[str, Any]:
        """The facts as plain data."""
        return dataclasses.asdict(self) | {"healthy": self.healthy}

    def to_text(self) -> str:
        """The facts as lines for a terminal."""
        return "\n".join(_lines(self))


@dataclass(frozen=True)
class Places:
    """Where to look: the machine's own places, or a test's.

    Attributes:
        kfd, dri: AMD's compute node, and the folder of render nodes.
        pci: the kernel's list of PCI devices. cpuinfo: of processors.
        may_open: whether a node may be opened for reading and writing.
    """

    kfd: Path = field(default_factory=lambda: Path(os.environ.get("OKERNEL_KFD") or "/dev/kfd"))
    dri: Path = Path("/dev/dri")
    pci: Path = Path("/sys/bus/pci/devices")
    cpuinfo: Path = Path("/proc/cpuinfo")
    may_open: Callable[[Path], bool] = lambda path: os.access(path, os.R_OK | os.W_OK)


def examine(places: Places | None = None, *, run_self_test: bool = False) -> Doctor:
    """Looks at everything; raises nothing: what fails is a fact.

    run_self_test: tests every usable GPU anew; else what earlier tests found is told.
    """
    places = places or Places()
    libraries = tuple(_library_facts(backend, run_self_test) for backend in BACKENDS)
    amd_gpus = tuple(_amd_gpus(places.pci))
    nodes = tuple(_node_facts(places))
    cpu_library = _try_load("cpu")
    free, total = cpu_library.device_memory() if cpu_library else (0, 0)
    auto_device, auto_notice = _auto_device()
    linkage = exit_status(audit_installed())
    facts = Doctor(
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        versions=_versions(),
        cpu=_cpu_field(places.cpuinfo, "model name") or platform.processor() or "unknown",
        cpu_features=_cpu_features(places.cpuinfo),
        cpu_path=cpu_library.c.ok_path().decode() if cpu_library else "",
        threads=cpu_library.c.ok_threads() if cpu_library else 0,
        memory_free_bytes=free,
        memory_total_bytes=total,
        libraries=libraries,
        nodes=nodes,
        amd_gpus=amd_gpus,
        hip_devices=tuple(_hip_devices()),
        auto_device=auto_device,
        auto_notice=auto_notice,
        linkage=_LINKAGE[linkage],
    )
    return dataclasses.replace(facts, advice=tuple(dict.fromkeys(_advice(facts))))


# ---- gathering ----------------------------------------------------------------------------------


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in ("okernel-pyengine", *PACKAGES):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = ""
    return versions


def _try_load(backend: str) -> Library | None:
    try:
        return load_library(backend) if library_path(backend) else None
    except (EngineError, OSError):
        return None


def _library_facts(backend: str, run_self_test: bool) -> LibraryFacts:
    try:
        path = library_path(backend)
        if path is None:
            return LibraryFacts(backend)
        library = load_library(backend)
    except (EngineError, OSError) as error:
        return LibraryFacts(backend, path=os.environ.get("OKERNEL_LIB", ""), error=str(error))
    facts = LibraryFacts(backend, str(path), library.build_info, tuple(library.targets))
    try:
        version, runtime_path = library.runtime()
        facts = dataclasses.replace(facts, runtime_version=version, runtime_path=runtime_path)
        devices = tuple(
            _device_facts(library, i, run_self_test) for i in range(library.device_count())
        )
    except EngineError as error:
        return dataclasses.replace(facts, device_error=str(error))
    return dataclasses.replace(facts, devices=devices)


def _device_facts(library: Library, index: int, run_self_test: bool) -> DeviceFacts:
    name, arch = library.device_name(index)
    reason, free, total = "", 0, 0
    try:
        library.check_device(index)
        free, total = library.device_memory(index)
    except EngineError as error:
        reason = str(error)
    verdicts: tuple[self_test.Verdict, ...] = ()
    if library.backend != "cpu" and not reason:
        device = Device(library, index, name, arch)
        verdicts = tuple(
            _run_self_test(device, precision)
            if run_self_test
            else self_test.recall(device, precision)
            for precision in self_test.PRECISIONS
        )
    return DeviceFacts(index, name, arch, not reason, reason, free, total, verdicts)


def _run_self_test(device: Device, precision: str) -> self_test.Verdict:
    try:
        return self_test.run(device, precision, compute_logits)
    except EngineError as error:
        return self_test.Verdict(precision, message=str(error))


def _auto_device() -> tuple[str, str]:
    try:
        device = choose_device("auto")
    except (EngineError, OSError) as error:
        return "", str(error)
    return device.label, device.notice


def _amd_gpus(pci: Path) -> Iterator[str]:
    """Addresses of AMD's display controllers (PCI class 03)."""
    for device in sorted(pci.glob("*")):
        try:
            vendor = (device / "vendor").read_text().strip()
            kind = (device / "class").read_text().strip()
        except OSError:
            continue
        if vendor == _AMD_VENDOR and kind.startswith("0x03"):
            yield device.name


def _hip_devices() -> Iterator[HipProperties]:
    """Of every device that hip-python sees; nothing if it, or the runtime it opens, is absent."""
    try:
        from hip import hip

        status, count = hip.hipGetDeviceCount()
    except Exception:  # whatever its loader meets
        return
    if status != hip.hipError_t.hipSuccess:
        return
    for index in range(count):
        found = hip.hipDeviceProp_t()
        if hip.hipGetDeviceProperties(found, index)[0] != hip.hipError_t.hipSuccess:
            continue
        yield HipProperties(
            name=_text(found.name),
            arch=_text(found.gcnArchName),
            pci=f"{found.pciDomainID:04x}:{found.pciBusID:02x}:{found.pciDeviceID:02x}.0",
            compute_units=int(found.multiProcessorCount),
            wave_size=int(found.warpSize),
            memory_bytes=int(found.totalGlobalMem),
            l2_bytes=int(found.l2CacheSize),
            bus_bits=int(found.memoryBusWidth),
            clock_mhz=int(found.clockRate) // 1000,
            memory_clock_mhz=int(found.memoryClockRate) // 1000,
        )


def _text(value: bytes | str) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _node_facts(places: Places) -> Iterator[NodeFacts]:
    """The compute node, and every render node."""
    yield _node(places.kfd, places)
    for node in sorted(places.dri.glob("renderD*")):
        yield _node(node, places)


def _node(path: Path, places: Places) -> NodeFacts:
    try:
        status = path.stat()
    except OSError:
        return NodeFacts(
            str(path),
            exists=False,
            accessible=False,
            problem=f"{path} does not exist: the amdgpu kernel driver is not loaded",
            remedy="sudo modprobe amdgpu; in a container: --device=/dev/kfd --device=/dev/dri",
        )
    group, mode = _group_name(status.st_gid), stat.filemode(status.st_mode)
    if places.may_open(path):
        return NodeFacts(str(path), True, True, group, mode)
    user = getpass.getuser()
    if status.st_gid in {os.getegid(), *os.getgroups()}:
        problem = f"{path} may not be opened ({mode}), though {user} is in its group {group}"
        remedy = f"sudo chmod g+rw {path}; in a container: check its device permissions"
    else:
        problem = f"{path} may not be opened: {user} is not in the group {group} that owns it"
        remedy = f"sudo usermod -aG {group} {user}, then log in again"
    return NodeFacts(str(path), True, False, group, mode, problem, remedy)


def _group_name(group_id: int) -> str:
    try:
        return grp.getgrgid(group_id).gr_name
    except KeyError:
        return str(group_id)


def _cpu_field(cpuinfo: Path, name: str) -> str:
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return ""
    found = (line.partition(":")[2].strip() for line in lines if line.startswith(name))
    return next(found, "")


def _cpu_features(cpuinfo: Path) -> tuple[str, ...]:
    present = (_cpu_field(cpuinfo, "flags") or _cpu_field(cpuinfo, "Features")).split()
    return tuple(name for name in CPU_FEATURES if name in present)


# ---- advice -------------------------------------------------------------------------------------


def _advice(facts: Doctor) -> Iterator[Advice]:
    for library in facts.libraries:
        yield from _library_advice(library)
    hip = next(library for library in facts.libraries if library.backend == "hip")
    if facts.amd_gpus and not hip.path:
        yield Advice(
            f"an AMD GPU is present ({', '.join(facts.amd_gpus)}), but no libokernel_hip.so",
            "build it: scripts/build_hip.sh",
        )
    if hip.path or facts.amd_gpus:
        for node in facts.nodes:
            if node.problem:
                yield Advice(node.problem, node.remedy)
    if facts.linkage == "violation":
        yield Advice("a library links or names what it must not", "see pyengine audit")
    elif facts.linkage != "clean":
        yield Advice("the linkage audit could not look at everything", "see pyengine audit", False)
    if not facts.versions["hip-python"] and hip.devices:
        yield Advice(
            "hip-python is not installed: no streams and device pointers of HIP",
            "pip install 'okernel-pyengine[hip]'",
            serious=False,
        )


def _library_advice(library: LibraryFacts) -> Iterator[Advice]:
    if library.error:
        named = os.environ.get("OKERNEL_LIB")
        remedy = f"unset OKERNEL_LIB={named}, or mend that file" if named else "pip install . again"
        yield Advice(library.error, remedy)
    elif not library.path and library.backend == "cpu":
        yield Advice("no libokernel_cpu.so is installed", "pip install .")
    elif library.device_error and library.backend != "cpu":
        remedy = "install the GPU's runtime or driver, or use device='cpu'"
        if hidden := os.environ.get("HIP_VISIBLE_DEVICES"):
            remedy = f"HIP_VISIBLE_DEVICES={hidden} may hide devices: unset it"
        yield Advice(f"{library.backend}: {library.device_error}", remedy)
    for device in library.devices:
        if not device.usable:
            yield Advice(
                f"{library.backend}:{device.index} ({device.name}): {device.reason}",
                f"build libokernel_{library.backend} for {device.arch}",
                serious=not any(other.usable for other in library.devices),
            )
        for verdict in device.self_tests:
            if verdict.state == "failed":
                yield Advice(verdict.message, f'use device="cpu", and {self_test.REPORT}')


# ---- text ---------------------------------------------------------------------------------------


def _how_to_build(backend: str) -> str:
    if backend == "cpu":
        return "not installed"
    how = f'pip install . -Ccmake.define.OKERNEL_BACKENDS="cpu;{backend}"'
    return f"not installed (with such a GPU: {how})"


def _lines(facts: Doctor) -> Iterator[str]:
    installed = ", ".join(f"{k} {v}" for k, v in facts.versions.items() if v)
    yield f"system    {facts.system}"
    yield f"versions  {installed}"
    yield f"cpu       {facts.cpu}; {' '.join(facts.cpu_features)}"
    yield f"          path {facts.cpu_path or '-'}, {facts.threads} threads"
    yield f"memory    {_gib(facts.memory_free_bytes)} free of {_gib(facts.memory_total_bytes)}"
    for library in facts.libraries:
        yield f"{library.backend:9} {library.path or _how_to_build(library.backend)}"
        if library.error:
            yield f"          {library.error}"
        if library.build:
            yield f"          {library.build}; targets: {' '.join(library.targets)}"
        if library.runtime_path:
            yield f"          runtime {library.runtime_version} at {library.runtime_path}"
        if library.device_error:
            yield f"          {library.device_error}"
        for device in library.devices:
            memory = f"{_gib(device.free_bytes)} free of {_gib(device.total_bytes)}"
            state = memory if device.usable else f"not usable: {device.reason}"
            yield f"          {device.index}: {device.name} ({device.arch}): {state}"
            if device.self_tests:
                yield f"          self-test: {'; '.join(map(_verdict, device.self_tests))}"
    for number, hip in enumerate(facts.hip_devices):
        yield (
            f"hip:{number:<5} {hip.name} ({hip.arch}) at {hip.pci}: {hip.compute_units} units of "
            f"{hip.wave_size} lanes, {hip.clock_mhz} MHz"
        )
        yield (
            f"          {_gib(hip.memory_bytes)} at {hip.bus_bits} bits and {hip.memory_clock_mhz} "
            f"MHz, {hip.l2_bytes / 2**20:.1f} MiB of L2"
        )
    for node in facts.nodes:
        state = f"{node.mode} {node.group}" if node.exists else "absent"
        yield f"node      {node.path}: {state}{', may be opened' if node.accessible else ''}"
    yield f"auto      {'; '.join(filter(None, (facts.auto_device, facts.auto_notice)))}"
    yield f"linkage   {facts.linkage}"
    for advice in facts.advice:
        yield f"{'PROBLEM' if advice.serious else 'note':9} {advice.problem}"
        yield f"          -> {advice.remedy}"


def _verdict(verdict: self_test.Verdict) -> str:
    if not verdict.when:
        why = f" ({verdict.message})" if verdict.message else ""
        return f"{verdict.precision} {verdict.state}{why}"
    spent = f"{verdict.when}, {verdict.seconds:.1f} s"
    return f"{verdict.precision} {verdict.state} ({spent}, error {verdict.largest_error:.1e})"


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"
