#!/usr/bin/env bash
# Runs the operations' tests and `pyengine generate demo` on processors that this machine is not, under qemu-user:
#   aarch64  a cross-compiled library under Debian's own arm64 Python: paths portable, neon, neondot
#   nehalem  x86-64 of 2008, without AVX: the portable path
#   haswell  x86-64 of 2013: portable, avx2
# Usage: scripts/check_emulated.sh [machine...]. Needs an x86-64 Debian with qemu-user and g++-aarch64-linux-gnu, and a
# Python that has cmake and this package's `test` extra. Writes to build/emulated; needs no root.
set -euo pipefail
cd "$(dirname "$0")/.."
source_root=$PWD
work=$PWD/build/emulated

for tool in qemu-aarch64 qemu-x86_64 aarch64-linux-gnu-g++ cmake python3 apt-get dpkg-deb; do
    command -v "$tool" > /dev/null || { echo "check_emulated: needs $tool" >&2; exit 2; }
done

# build <folder> [cmake arguments]: compiles the CPU library there.
build() {
    cmake -S libokernel -B "$@" > /dev/null
    cmake --build "$1" --parallel "$(nproc)" > "$1/build.log" || { cat "$1/build.log" >&2; exit 1; }
}

# interpreter <folder> <emulator and its arguments> <python>: <folder>/bin/python3 is that Python, emulated. It takes
# the script's name for its own, so that the tests' child processes are emulated too.
interpreter() {
    mkdir -p "$1/bin"
    printf '#!/bin/sh\nexec %s -0 "$0" %s "$@"\n' "$2" "$3" > "$1/bin/python3"
    chmod +x "$1/bin/python3"
}

# arm64_python: Debian's Python for arm64 in $work/aarch64/root and the wheels of what the tests import in .../site.
arm64_python() {
    local root=$work/aarch64/root apt=$work/aarch64/apt version
    if [ ! -e "$root/complete" ]; then
        mkdir -p "$apt/state/lists/partial" "$apt/cache/archives/partial" "$root"
        : > "$apt/status" # no package is installed: every dependency is fetched
        local options=(-qq -o "Dir::State=$apt/state" -o "Dir::State::status=$apt/status" -o "Dir::Cache=$apt/cache"
            -o APT::Architecture=arm64 -o APT::Architectures=arm64 -o APT::Sandbox::User=)
        apt-get "${options[@]}" update
        apt-get "${options[@]}" install -y --download-only --no-install-recommends \
            python3-minimal libpython3-stdlib libstdc++6 > /dev/null
        for package in "$apt"/cache/archives/*.deb; do dpkg-deb -x "$package" "$root"; done
        touch "$root/complete"
    fi
    version=$(basename "$(readlink -f "$root/usr/bin/python3")")
    if [ ! -e "$work/aarch64/site/complete" ]; then
        python3 - > "$work/aarch64/requirements.txt" << 'PYTHON'
import tomllib
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
print(*project["dependencies"], *project["optional-dependencies"]["test"], sep="\n")
PYTHON
        python3 -m pip install -q --disable-pip-version-check --target "$work/aarch64/site" --only-binary=:all: \
            --platform manylinux_2_28_aarch64 --platform manylinux2014_aarch64 --python-version "${version#python}" \
            -r "$work/aarch64/requirements.txt"
        touch "$work/aarch64/site/complete"
    fi
    interpreter "$work/aarch64" "qemu-aarch64 -L $root" "$root/usr/bin/$version"
}

# check <machine> <folder of the library> <path it should choose> <PYTHONHOME> <site-packages>
check() {
    local python=$work/$1/bin/python3 logs=$work/$1/logs
    export OKERNEL_LIB=$2/libokernel_cpu.so PYTHONHOME=$4 PYTHONPATH=$5:$source_root
    export PYTHONPYCACHEPREFIX=$work/$1/pycache PYTHONWARNINGS=ignore::DeprecationWarning
    echo "==> $1: $("$python" -c 'import platform, sys; print(platform.machine(), "Python", sys.version.split()[0])')"
    test "$("$python" -c 'from pyengine.native import *; print(load_library().c.ok_path().decode())')" = "$3"
    "$python" -m pyengine generate demo "In the beginning" --max-new-tokens 16 | tee "$work/$1/text"
    # The same words as on this machine: greedy text leaves no room for a path that is slightly off.
    diff "$work/here/text" "$work/$1/text"
    # One process a file, as many as there are cores. Left out: what looks into objects of this machine's compiler or
    # needs a GPU's library, and children forked beside other threads, in which qemu-user itself aborts.
    rm -rf "$logs" && mkdir "$logs"
    PATH=$work/$1/bin:$PATH
    find tests/libokernel -name 'test_*.py' ! -name test_build.py ! -name test_runtime.py | sort |
        xargs -P "$(nproc)" -I{} sh -c '"$0" -m pytest -q -p no:cacheprovider -k "not forked" "$2" \
            > "$1/$(basename "$2").log" 2>&1' "$python" "$logs" {} || {
        grep -hE '^(FAILED|ERROR|E  )|Fatal' "$logs"/*.log >&2
        tail -vn 1 "$logs"/*.log >&2
        exit 1
    }
    tail -qn 1 "$logs"/*.log | awk -v machine="$1" '
        match($0, /[0-9]+ passed/) { passed += substr($0, RSTART) }
        match($0, /[0-9]+ skipped/) { skipped += substr($0, RSTART) }
        END { print machine ": " passed + 0 " passed, " skipped + 0 " skipped"; exit !passed }'
}

build "$work/x86-64"
mkdir -p "$work/here"
OKERNEL_LIB=$work/x86-64/libokernel_cpu.so python3 -m pyengine generate demo "In the beginning" \
    --max-new-tokens 16 > "$work/here/text"
home=$(python3 -c 'import sys; print(sys.base_prefix)')
binary=$(python3 -c 'import os, sys; print(os.path.realpath(sys.executable))')
site=$(python3 -c 'import sysconfig; print(sysconfig.get_path("platlib"))')

for machine in "${@:-aarch64 nehalem haswell}"; do
    for name in $machine; do
        case $name in
            aarch64)
                build "$work/aarch64/library" -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
                    -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++
                arm64_python
                # The tests that compile or look into a library need tools of the same architecture.
                for tool in gcc:cc g++:c++ nm:nm readelf:readelf objdump:objdump; do
                    ln -sf "$(command -v "aarch64-linux-gnu-${tool%:*}")" "$work/aarch64/bin/${tool#*:}"
                done
                (check aarch64 "$work/aarch64/library" neondot /usr "$work/aarch64/site")
                ;;
            nehalem)
                interpreter "$work/nehalem" "qemu-x86_64 -cpu Nehalem" "$binary"
                (check nehalem "$work/x86-64" portable "$home" "$site")
                ;;
            haswell) # without what qemu would only warn that it lacks
                interpreter "$work/haswell" \
                    "qemu-x86_64 -cpu Haswell,-pcid,-x2apic,-tsc-deadline,-hle,-invpcid,-rtm" "$binary"
                (check haswell "$work/x86-64" avx2 "$home" "$site")
                ;;
            *) echo "check_emulated: $name is none of aarch64, nehalem, haswell" >&2; exit 2 ;;
        esac
    done
done
