// probe.hip: copy, fill, the read that measures bandwidth, and the self-test of graphs.
//
// ok_read moves `bytes` once: 16 bytes a lane and load, kLoads of them in flight; words are added modulo 2^32, so that
// the result does not depend on the order. The graph test replays 256 dependent kernels whose input is rewritten in
// between.
#include "gpu.h"
#include "memory.h"
#include "runtime.h"

namespace ok {

constexpr int kLoads = 8;
constexpr int64_t kReadBlocks = 4096;

KERNEL probe_read_kernel(uint32_t *sum, const uint8_t *src, int64_t chunks) {
    begin_kernel();
    const Words4 *from = reinterpret_cast<const Words4 *>(src);
    const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
    uint32_t total = 0;
    int64_t i = global_thread();
    for (; i + (kLoads - 1) * step < chunks; i += kLoads * step) {
        Words4 words[kLoads];
#pragma unroll
        for (int n = 0; n < kLoads; ++n) words[n] = from[i + n * step];
#pragma unroll
        for (int n = 0; n < kLoads; ++n) total += words[n].x + words[n].y + words[n].z + words[n].w;
    }
    for (; i < chunks; i += step) total += from[i].x + from[i].y + from[i].z + from[i].w;
    total = reduce_block<Add>(total);
    if (threadIdx.x == 0) atomicAdd(sum, total);
}

// y[i] = 3 x[i] + 1, modulo 2^32; a chain of these shows a stale or reordered node.
KERNEL probe_step_kernel(uint32_t *y, const uint32_t *x) {
    begin_kernel();
    y[threadIdx.x] = 3u * x[threadIdx.x] + 1u;
}

}  // namespace ok

// ---- launchers ----------------------------------------------------------------------------------------------------

ok_status ok_copy(ok_queue *queue, void *dst, const void *src, uint64_t bytes) {
    OK_REQUIRE_POINTER(queue);
    if (bytes == 0) return OK_SUCCESS;
    OK_REQUIRE_POINTER(dst);
    OK_REQUIRE_POINTER(src);
    OK_REQUIRE(bytes <= INT64_MAX, "bytes=%llu is too large", static_cast<unsigned long long>(bytes));
    const bool pageable = !ok::in_arena(dst, bytes) || !ok::in_arena(src, bytes);
    OK_REQUIRE(!pageable || !queue->recording, "%s=%p lies in no arena: a recording takes arena memory only",
               ok::in_arena(dst, bytes) ? "src" : "dst", ok::in_arena(dst, bytes) ? src : dst);
    if (ok_status status = ok::launch_copy(queue, dst, src, bytes)) return status;
    return pageable ? ok_queue_sync(queue) : OK_SUCCESS;
}

ok_status ok_fill(ok_queue *queue, void *dst, uint8_t value, uint64_t bytes) {
    OK_REQUIRE_POINTER(queue);
    if (bytes == 0) return OK_SUCCESS;
    OK_REQUIRE_POINTER(dst);
    OK_REQUIRE(bytes <= INT64_MAX, "bytes=%llu is too large", static_cast<unsigned long long>(bytes));
    return ok::launch_fill(queue, dst, value, bytes);
}

ok_status ok_read(ok_queue *queue, uint32_t *sum, const void *src, uint64_t bytes) {
    OK_REQUIRE_POINTER(queue);
    OK_REQUIRE_POINTER(sum);
    OK_REQUIRE_POINTER(src);
    OK_REQUIRE(bytes > 0 && bytes <= INT64_MAX && bytes % 64 == 0, "bytes=%llu must be a positive multiple of 64",
               static_cast<unsigned long long>(bytes));
    OK_REQUIRE(reinterpret_cast<uintptr_t>(src) % 16 == 0, "src=%p must be aligned to 16 bytes", src);
    const int64_t chunks = static_cast<int64_t>(bytes / 16);
    int64_t blocks = ok::ceil_div(chunks, ok::kBlock * ok::kLoads);
    if (blocks > ok::kReadBlocks) blocks = ok::kReadBlocks;
    if (ok_status status = ok::launch_fill(queue, sum, 0, sizeof *sum)) return status;
    return LAUNCH(queue, probe_read_kernel, {blocks}, ok::kBlock, sum, static_cast<const uint8_t *>(src), chunks);
}

namespace {

constexpr int kSteps = 256, kReplays = 100, kThreads = 256;
constexpr uint64_t kBytes = kThreads * sizeof(uint32_t);

// One replay of the chain on input `seed` gives what the host computes?
bool chain_is_right(ok_program *program, uint32_t *input, const uint32_t *output, uint32_t seed) {
    for (uint32_t i = 0; i < kThreads; i++) input[i] = seed * 2654435761u + i;
    if (ok_program_replay(program) != OK_SUCCESS) return false;
    for (uint32_t i = 0; i < kThreads; i++) {
        uint32_t expected = seed * 2654435761u + i;
        for (int step = 0; step < kSteps; step++) expected = 3u * expected + 1u;
        if (output[i] != expected) return false;
    }
    return true;
}

ok_status record_chain(ok_queue *queue, uint32_t *device, uint32_t *host, ok_program **out) {
    if (ok_status status = ok_record_begin(queue)) return status;
    ok_copy(queue, device, host, kBytes);
    for (int step = 0; step < kSteps; step++) {
        uint32_t *from = device + step % 2 * kThreads, *to = device + (step + 1) % 2 * kThreads;
        if (ok_status status = LAUNCH(queue, probe_step_kernel, {1}, kThreads, to, from)) return status;
    }
    ok_copy(queue, host + kThreads, device, kBytes);
    return ok_record_end(queue, out);
}

// Replays of a long chain, captured, with inputs rewritten in between: are they right, and no slower than the loop?
bool graphs_work(int32_t device) {
    ok_arena *memory = nullptr, *pinned = nullptr;
    ok_queue *queue = nullptr;
    ok_program *program = nullptr;
    void *on_device = nullptr, *on_host = nullptr;
    bool right = ok_arena_create(&memory, device, OK_MEMORY_DEVICE, 2 * kBytes) == OK_SUCCESS &&
                 ok_arena_create(&pinned, device, OK_MEMORY_HOST, 2 * kBytes) == OK_SUCCESS &&
                 ok_arena_alloc(memory, 2 * kBytes, &on_device) == OK_SUCCESS &&
                 ok_arena_alloc(pinned, 2 * kBytes, &on_host) == OK_SUCCESS &&
                 ok_queue_create(&queue, device, nullptr) == OK_SUCCESS &&
                 record_chain(queue, static_cast<uint32_t *>(on_device), static_cast<uint32_t *>(on_host), &program) ==
                     OK_SUCCESS;
    uint32_t *input = static_cast<uint32_t *>(on_host), *output = input + kThreads;
    double seconds[2] = {};
    for (int graph = 0; graph < 2 && right; graph++) {
        right = !graph || ok::capture_program("ok_program_set_replay", program) == OK_SUCCESS;
        right = right && chain_is_right(program, input, output, 0);
        double begin = ok::seconds_now();
        for (uint32_t seed = 1; seed <= kReplays && right; seed++) right = chain_is_right(program, input, output, seed);
        seconds[graph] = ok::seconds_now() - begin;
    }
    ok_program_destroy(program);
    ok_queue_destroy(queue);
    ok_arena_destroy(pinned);
    ok_arena_destroy(memory);
    return right && seconds[1] < seconds[0];
}

}  // namespace

bool ok::graph_self_test(int32_t device) { return graphs_work(device); }
