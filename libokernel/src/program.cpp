// program.cpp: recording, and the loop that replays; a backend adds how queues are made and waited for.
#include "program.h"

#include <cstring>

#include "memory.h"
#include "status.h"

namespace {

struct Launch {
    void (*run)(const void *);
    size_t args_bytes;  // rounded up, so that the next header is aligned
};

constexpr size_t kAlignment = 16;
static_assert(sizeof(Launch) % kAlignment == 0);

}  // namespace

ok_status ok::append_launch(ok_queue *queue, void (*run)(const void *), const void *args, size_t bytes) {
    ok_program *program = queue->recording;
    Launch launch = {run, (bytes + kAlignment - 1) / kAlignment * kAlignment};
    size_t needed = program->bytes + sizeof launch + launch.args_bytes;
    if (needed > program->capacity) {
        size_t capacity = program->capacity ? 2 * program->capacity : 4096;
        while (capacity < needed) capacity *= 2;
        char *grown = static_cast<char *>(allocate(capacity));
        if (!grown) return fail_host_memory("ok_record", capacity);
        if (program->bytes) memcpy(grown, program->launches, program->bytes);
        release(program->launches);
        program->launches = grown;
        program->capacity = capacity;
    }
    memcpy(program->launches + program->bytes, &launch, sizeof launch);
    memcpy(program->launches + program->bytes + sizeof launch, args, bytes);
    program->bytes = needed;
    program->count++;
    return OK_SUCCESS;
}

void ok::run_launches(const ok_program *program) {
    for (size_t at = 0; at < program->bytes;) {
        const Launch *launch = reinterpret_cast<const Launch *>(program->launches + at);
        launch->run(launch + 1);
        at += sizeof *launch + launch->args_bytes;
    }
}

ok_status ok_queue_set_scratch(ok_queue *queue, void *scratch, uint64_t bytes) {
    OK_REQUIRE_POINTER(queue);
    OK_REQUIRE(scratch || bytes == 0, "scratch is null but bytes=%llu", static_cast<unsigned long long>(bytes));
    queue->scratch = scratch;
    queue->scratch_bytes = bytes;
    return OK_SUCCESS;
}

ok_status ok_queue_set_deterministic(ok_queue *queue, int32_t on) {
    OK_REQUIRE_POINTER(queue);
    OK_REQUIRE(on == 0 || on == 1, "on=%d must be 0 or 1", on);
    queue->deterministic = on;
    return OK_SUCCESS;
}

ok_status ok_record_begin(ok_queue *queue) {
    OK_REQUIRE_POINTER(queue);
    OK_REQUIRE(!queue->recording, "the queue is recording already");
    ok_program *program = ok::create<ok_program>();
    if (!program) return ok::fail_host_memory(__func__, sizeof *program);
    program->queue = queue;
    queue->recording = program;
    return OK_SUCCESS;
}

ok_status ok_record_end(ok_queue *queue, ok_program **host_out) {
    OK_REQUIRE_POINTER(host_out);
    *host_out = nullptr;
    OK_REQUIRE_POINTER(queue);
    OK_REQUIRE(queue->recording, "the queue is not recording");
    *host_out = queue->recording;
    queue->recording = nullptr;
    return OK_SUCCESS;
}

ok_status ok_record_abort(ok_queue *queue) {
    OK_REQUIRE_POINTER(queue);
    ok_program_destroy(queue->recording);
    queue->recording = nullptr;
    return OK_SUCCESS;
}

void ok_program_destroy(ok_program *program) {
    if (!program) return;
    ok::program_drop_graph(program);
    ok::release(program->launches);
    ok::release(program);
}

ok_status ok_program_launches(const ok_program *program, int64_t *host_launches) {
    OK_REQUIRE_POINTER(program);
    OK_REQUIRE_POINTER(host_launches);
    *host_launches = program->count;
    return OK_SUCCESS;
}
