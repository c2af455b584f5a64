#!/usr/bin/env bash
# Makes the prebuilt archive of the HIP library: libokernel_hip.so, the list of its targets and the header.
# Usage: scripts/build_hip.sh [OUT] [target...]   OUT: folder, dist by default; targets: all that the compiler knows
# Debian's packages are enough: clang-19 lld-19 llvm-19 hipcc rocm-device-libs cmake g++. Writes
#   OUT/libokernel_hip-<version>-<machine>.tar.gz, and beside it its SHA-256 and the targets.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-dist}
[ $# -gt 0 ] && shift
targets=$(IFS=';'; echo "${*:-all}")
work=build/hip
version=$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
name=libokernel_hip-$version-$(uname -m)

for tool in cmake clang-19 ld.lld-19; do
    command -v "$tool" > /dev/null || { echo "build_hip: needs $tool" >&2; exit 2; }
done
cmake -S libokernel -B "$work" -DOKERNEL_BACKENDS=hip -DOKERNEL_GFX="$targets" -DCMAKE_BUILD_TYPE=Release
cmake --build "$work" --parallel "$(nproc)"

rm -rf "${work:?}/$name"
mkdir -p "$work/$name" "$out"
cp "$work/libokernel_hip.so" libokernel/include/okernel.h LICENSE "$work/$name"
strip --strip-unneeded "$work/$name/libokernel_hip.so"
python3 -c 'import ctypes, sys
library = ctypes.CDLL(sys.argv[1])
library.ok_targets.restype = ctypes.c_char_p
print(*library.ok_targets().decode().split(), sep="\n")' "$work/$name/libokernel_hip.so" > "$work/$name/targets.txt"
# The same input gives the same archive.
tar --sort=name --mtime=@0 --owner=0 --group=0 --numeric-owner -C "$work" -cf - "$name" | gzip -n > "$out/$name.tar.gz"
cp "$work/$name/targets.txt" "$out/$name.targets.txt"
(cd "$out" && sha256sum "$name.tar.gz" > "$name.tar.gz.sha256")
echo "targets: $(tr '\n' ' ' < "$work/$name/targets.txt")"
cat "$out/$name.tar.gz.sha256"
