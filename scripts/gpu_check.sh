#!/usr/bin/env bash
# Builds the CUDA library on a machine with an NVIDIA GPU and checks it there: the operations' tests, those of the engine
# that run on a GPU, compute-sanitizer's memcheck and racecheck over a part of the operations', parity of every checkpoint,
# and the benchmarks.
# Usage: scripts/gpu_check.sh LOGS [step...]; steps: build tests engine memcheck racecheck parity bench (all by default).
# LOGS gets one log a step (of a sanitizer also one an operation) and summary.txt; the exit status is 1 if a step failed. Needs nvcc, cmake, and a Python with numpy,
# pytest, safetensors, tokenizers, gguf and typer ($PYTHON, python3 by default; extra packages through PYTHONPATH).
set -uo pipefail
cd "$(dirname "$0")/.."
logs=${1:?usage: scripts/gpu_check.sh LOGS [step...]}
shift
steps=("$@")
[ ${#steps[@]} -gt 0 ] || steps=(build tests engine memcheck racecheck parity bench)
mkdir -p "$logs"
logs=$(cd "$logs" && pwd)
python=${PYTHON:-python3}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
export PYTHONDONTWRITEBYTECODE=1
failed=0

# What runs under a sanitizer: awkward sizes of every operation, few enough. Racecheck is the slower one.
operations=(norm rope embedding elementwise activation kv_cache sampling matrix quantize matmul matmul_fused attention)
reduced='cuda and not among and not draws and not allocate and not int16_products and not reference and not refused'
declare -A racecheck_only=(
    [matmul]='1-1 or 17 or 70 or 130 or nothing_past or residual or active'
    [attention]='window or ragged or gqa or long or chunk'
)

pytest_cuda() { "$python" -m pytest -q -p no:cacheprovider --durations=10 -k cuda "$@"; }

build() {
    cmake -S libokernel -B build/gpu_check -DOKERNEL_BACKENDS='cpu;cuda' -DCMAKE_BUILD_TYPE=Release &&
        cmake --build build/gpu_check --parallel "$(nproc)" &&
        cmake --install build/gpu_check --prefix . && ls -l pyengine/native/*.so
}
tests() { pytest_cuda tests/libokernel; }
engine() {
    pytest_cuda tests/generation/test_{self_test,long_prompts,engine,odd_sizes,numbers_that_break}.py \
        tests/models/test_{golden,decoder}.py -s
}
# Each operation's tests in a process of its own, side by side: a sanitizer keeps one core busy and the GPU idle.
sanitizer() {
    local tool=$1 operation only state failed=0
    declare -A jobs
    shift
    for operation in "${operations[@]}"; do
        only=$reduced
        [ "$tool" = memcheck ] || only+=${racecheck_only[$operation]:+ and (${racecheck_only[$operation]})}
        compute-sanitizer --tool "$tool" --target-processes all --error-exitcode 9 "$@" \
            "$python" -m pytest "tests/libokernel/test_$operation.py" -q -x -p no:cacheprovider -k "$only" \
            > "$logs/$tool-$operation.log" 2>&1 &
        jobs[$operation]=$!
    done
    for operation in "${operations[@]}"; do
        if wait "${jobs[$operation]}"; then state=ok; else state="FAILED ($?)"; failed=1; fi
        echo "$operation: $state; $(grep -hE ' SUMMARY: |passed|failed' "$logs/$tool-$operation.log" | tail -n 2 | paste -sd ' ')"
    done
    return $failed
}
memcheck() { sanitizer memcheck --leak-check no; }
racecheck() { sanitizer racecheck; }
parity() {
    "$python" -m pyengine parity --suite tests/checkpoints --reference tests/golden --device cuda \
        --dtype f32 --dtype f16 --dtype bf16 --report "$logs/parity"
}
bench() {
    "$python" scripts/bench_gpu.py --dtype f16 --checkpoint build/synthetic --json "$logs/bench_f16.json" &&
        "$python" scripts/bench_gpu.py --dtype bf16 --model none --json "$logs/bench_bf16.json" &&
        "$python" scripts/bench_gpu.py --dtype f32 --model none --json "$logs/bench_f32.json" &&
        "$python" scripts/bench_gpu.py --dtype q8_0 --checkpoint build/synthetic --json "$logs/bench_q8_0.json"
}

: > "$logs/summary.txt"
for step in "${steps[@]}"; do
    begin=$SECONDS
    if timeout "${STEP_SECONDS:-540}" bash -c "$(declare -f); $(declare -p python logs operations reduced racecheck_only); $step" > "$logs/$step.log" 2>&1
    then state=ok; else state="FAILED ($?)"; failed=1; fi
    printf '%-10s %-12s %4d s\n' "$step" "$state" $((SECONDS - begin)) | tee -a "$logs/summary.txt"
    tail -n "$([ "$step" = bench ] && echo 80 || echo 12)" "$logs/$step.log"
done
cat "$logs/summary.txt"
exit $failed
