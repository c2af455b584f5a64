// queue.cpp: the CPU's queues, programs and events. Work runs on the thread that queues it, at once.
#include <time.h>

#include "internal.h"
#include "memory.h"

struct ok_event {
    int64_t nanoseconds = -1;  // CLOCK_MONOTONIC; -1: not recorded yet
};

ok_status ok_queue_create(ok_queue **host_out, int32_t device, void *native_stream) {
    OK_REQUIRE_POINTER(host_out);
    *host_out = nullptr;
    OK_REQUIRE(device == 0, "device=%d must be 0: the CPU is one device", device);
    OK_REQUIRE(!native_stream, "native_stream=%p must be null: the CPU has no streams", native_stream);
    if (ok_status status = ok_device_usable(device)) return status;
    ok_queue *queue = ok::create<ok_queue>();
    if (!queue) return ok::fail_host_memory(__func__, sizeof *queue);
    *host_out = queue;
    return OK_SUCCESS;
}

void ok_queue_destroy(ok_queue *queue) {
    if (!queue) return;
    ok_program_destroy(queue->recording);
    ok::release(queue);
}

ok_status ok_queue_set_quantized_activations(ok_queue *queue, int32_t on) {
    OK_REQUIRE_POINTER(queue);
    OK_REQUIRE(on == 0 || on == 1, "on=%d must be 0 or 1", on);
    queue->quantized_activations = on;
    return OK_SUCCESS;
}

ok_status ok_queue_sync(ok_queue *queue) {
    OK_REQUIRE_POINTER(queue);
    OK_REQUIRE(!queue->recording, "the queue is recording");
    return OK_SUCCESS;
}

ok_status ok_program_replay(ok_program *program) {
    OK_REQUIRE_POINTER(program);
    ok::run_launches(program);
    return OK_SUCCESS;
}

ok_status ok_program_set_replay(ok_program *program, ok_replay replay) {
    OK_REQUIRE_POINTER(program);
    OK_REQUIRE(replay == OK_REPLAY_LOOP || replay == OK_REPLAY_GRAPH, "replay=%d must be 0 (loop) or 1 (graph)",
               static_cast<int>(replay));
    if (replay == OK_REPLAY_LOOP) return OK_SUCCESS;
    return ok::fail(OK_ERR_UNSUPPORTED, "%s: replay=1 (graph): the CPU build replays programs in a loop", __func__);
}

void ok::program_drop_graph(ok_program *) {}

ok_status ok_event_create(ok_event **host_out, int32_t device) {
    OK_REQUIRE_POINTER(host_out);
    *host_out = nullptr;
    OK_REQUIRE(device == 0, "device=%d must be 0: the CPU is one device", device);
    ok_event *event = ok::create<ok_event>();
    if (!event) return ok::fail_host_memory(__func__, sizeof *event);
    *host_out = event;
    return OK_SUCCESS;
}

void ok_event_destroy(ok_event *event) { ok::release(event); }

ok_status ok_event_record(ok_event *event, ok_queue *queue) {
    OK_REQUIRE_POINTER(event);
    OK_REQUIRE_POINTER(queue);
    struct Args {
        ok_event *event;
    };
    void (*run)(const Args &) = [](const Args &args) {
        timespec now;
        clock_gettime(CLOCK_MONOTONIC, &now);
        args.event->nanoseconds = int64_t{1000000000} * now.tv_sec + now.tv_nsec;
    };
    return ok::submit(queue, run, Args{event});
}

ok_status ok_event_elapsed(const ok_event *begin, const ok_event *end, float *host_milliseconds) {
    OK_REQUIRE_POINTER(begin);
    OK_REQUIRE_POINTER(end);
    OK_REQUIRE_POINTER(host_milliseconds);
    OK_REQUIRE(begin->nanoseconds >= 0 && end->nanoseconds >= 0, "both events must have been recorded");
    *host_milliseconds = static_cast<float>(end->nanoseconds - begin->nanoseconds) * 1e-6f;
    return OK_SUCCESS;
}
