#!/usr/bin/env bash
# Runs the CPU library's tests under AddressSanitizer and UndefinedBehaviorSanitizer, then the thread pool under
# ThreadSanitizer. Any report fails. Usage: scripts/check_sanitized.sh [pytest arguments]. Needs g++ with its
# sanitizers, cmake, and a Python that has this package's `test` extra. Writes to build/sanitized.
set -euo pipefail
cd "$(dirname "$0")/.."
work=$PWD/build/sanitized

say() { printf '==> %s\n' "$*"; }

say "AddressSanitizer and UndefinedBehaviorSanitizer: the tests of libokernel and its bindings"
cmake -S libokernel -B "$work/address" -DCMAKE_CXX_COMPILER=g++ -DOKERNEL_SANITIZE=ON > /dev/null
cmake --build "$work/address" --parallel "$(nproc)"
# Python itself is not built for this: the sanitizer's runtime is loaded first, and what Python never frees is no leak
# of ours. Sizes beyond what malloc can give are refused by the library in words, so a null pointer must come back.
(
    export OKERNEL_LIB=$work/address/libokernel_cpu.so
    export LD_PRELOAD=$(g++ -print-file-name=libasan.so):$(g++ -print-file-name=libubsan.so)
    export ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1:abort_on_error=1 UBSAN_OPTIONS=print_stacktrace=1
    # An emulated processor has no room for the sanitizer's shadow memory; nvcc does not run with it loaded.
    python3 -m pytest -q -p no:cacheprovider tests/libokernel tests/native \
        --deselect tests/libokernel/test_library.py::test_an_older_cpu_takes_the_path_it_has \
        --deselect tests/libokernel/test_build.py::test_every_nvidia_kernel_waits_for_the_one_before "$@"
)

say "ThreadSanitizer: the pool's handing out, growing, shrinking and sharing of work"
mkdir -p "$work/thread"
# futex has no model in ThreadSanitizer, but every hand-over is by an atomic, which has.
g++ -std=c++17 -O1 -g -fsanitize=thread -fno-exceptions -fno-rtti -ffp-contract=off -DOK_BUILDING \
    -Ilibokernel/include -Ilibokernel/src tests/libokernel/threads_under_tsan.cpp \
    libokernel/src/cpu/threads.cpp libokernel/src/host.cpp libokernel/src/status.cpp -pthread -o "$work/thread/pool"
TSAN_OPTIONS=halt_on_error=1 "$work/thread/pool"
