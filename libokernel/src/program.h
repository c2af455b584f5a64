// program.h: queues, and programs: the recorded list of launches, arguments packed once.
#pragma once
#include <cstddef>
#include <cstdint>

#include "okernel.h"

struct ok_queue {
    void *scratch = nullptr;
    uint64_t scratch_bytes = 0;
    bool quantized_activations = true;  // CPU build, q8_0 matmul: activations rounded to 16 bits, or f32
    bool deterministic = false;         // GPU builds: one variant of every kernel, whatever the number of rows
    ok_program *recording = nullptr;    // null: immediate
    int32_t device = 0;
    int32_t owner = 0;       // process that made it
    void *stream = nullptr;  // GPU builds: hipStream_t or cudaStream_t
    bool owns_stream = false;
};

struct ok_program {
    ok_queue *queue = nullptr;
    char *launches = nullptr;  // back to back: a Launch header, then its arguments
    size_t bytes = 0, capacity = 0;
    int64_t count = 0;
    void *graph = nullptr;  // GPU builds: the captured graph, if that is how it is replayed
};

namespace ok {

// Appends a launch to the recording: `run` and a copy of its `bytes` of arguments.
ok_status append_launch(ok_queue *queue, void (*run)(const void *), const void *args, size_t bytes);

// The replay loop: runs every launch in order.
void run_launches(const ok_program *program);

// A backend's part of ok_program_destroy: gives back what `graph` holds.
void program_drop_graph(ok_program *program);

}  // namespace ok
