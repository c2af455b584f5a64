// queue.cpp: a GPU's queues, programs and events. A recorded program is a list of launches; replaying it runs the
// list, or a graph captured from it.
#include <pthread.h>
#include <time.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>

#include "memory.h"
#include "runtime.h"

struct ok_event {
    void *handle = nullptr;
    int32_t device = 0;
    int32_t owner = 0;
    bool recorded = false;
};

namespace {

const ok::Runtime *gpu() { return ok::runtime("ok_queue"); }

ok_status check_owner(const char *function, int32_t owner) {
    if (owner == getpid()) return OK_SUCCESS;
    return ok::fail(OK_ERR_UNAVAILABLE, "%s: the queue was made before fork, in process %d; use spawn", function,
                    owner);
}

ok_status enter(const char *function, const ok_queue *queue) {
    if (ok_status status = check_owner(function, queue->owner)) return status;
    return ok::check_runtime(gpu()->set_device(queue->device), function, "set_device");
}

// The first failure of the launches that a thread runs, as submit and replay report it.
thread_local int run_error;
thread_local const char *run_call;

void note(int error, const char *call) {
    if (!error || run_error) return;
    run_error = error;
    run_call = call;
}

ok_status take_run_error(const char *function) {
    int error = run_error;
    run_error = 0;
    return ok::check_runtime(error, function, run_call);
}

struct KernelLaunch {
    const void *kernel;
    const ok_queue *queue;
    uint32_t grid[3];
    uint32_t threads;
    int64_t count;
    uint64_t words[ok::kMaxArguments];  // the first `count` are stored
};

void run_kernel(const void *args) {
    const KernelLaunch &launch = *static_cast<const KernelLaunch *>(args);
    void *arguments[ok::kMaxArguments];
    for (int64_t i = 0; i < launch.count; i++) arguments[i] = const_cast<uint64_t *>(&launch.words[i]);
    note(gpu()->launch(launch.kernel, launch.queue->device, launch.grid, launch.threads, launch.queue->stream,
                       arguments),
         "kernel launch");
}

struct CopyLaunch {
    const ok_queue *queue;
    void *dst;
    const void *src;
    uint64_t bytes;
};

void run_copy(const void *args) {
    const CopyLaunch &launch = *static_cast<const CopyLaunch *>(args);
    note(gpu()->copy(launch.dst, launch.src, launch.bytes, launch.queue->stream), "copy");
}

struct FillLaunch {
    const ok_queue *queue;
    void *dst;
    uint64_t bytes;
    int32_t value;
};

void run_fill(const void *args) {
    const FillLaunch &launch = *static_cast<const FillLaunch *>(args);
    note(gpu()->fill(launch.dst, launch.value, launch.bytes, launch.queue->stream), "fill");
}

ok_status submit(ok_queue *queue, void (*run)(const void *), const void *args, size_t bytes, const char *function) {
    if (queue->recording) return ok::append_launch(queue, run, args, bytes);
    if (ok_status status = enter(function, queue)) return status;
    run(args);
    return take_run_error(function);
}

}  // namespace

ok_status ok::launch(ok_queue *queue, const void *kernel, Grid grid, int32_t threads, const uint64_t *arguments,
                     int32_t count) {
    const char *function = "launch";
    if (grid.x > INT32_MAX || grid.y > 65535 || grid.z > 65535)
        return fail(OK_ERR_UNSUPPORTED, "%s: a grid of %lld x %lld x %lld blocks is beyond the hardware's", function,
                    static_cast<long long>(grid.x), static_cast<long long>(grid.y), static_cast<long long>(grid.z));
    KernelLaunch args = {kernel,
                         queue,
                         {static_cast<uint32_t>(grid.x), static_cast<uint32_t>(grid.y), static_cast<uint32_t>(grid.z)},
                         static_cast<uint32_t>(threads),
                         count,
                         {}};
    memcpy(args.words, arguments, sizeof(uint64_t) * static_cast<size_t>(count));
    if (queue->recording) {
        if (ok_status status = enter(function, queue)) return status;
        if (ok_status status = check_runtime(gpu()->prepare(kernel, queue->device), function, "prepare")) return status;
    }
    size_t bytes = offsetof(KernelLaunch, words) + sizeof(uint64_t) * static_cast<size_t>(count);
    return submit(queue, run_kernel, &args, bytes, function);
}

ok_status ok::launch_copy(ok_queue *queue, void *dst, const void *src, uint64_t bytes) {
    CopyLaunch args = {queue, dst, src, bytes};
    return submit(queue, run_copy, &args, sizeof args, "ok_copy");
}

ok_status ok::launch_fill(ok_queue *queue, void *dst, uint8_t value, uint64_t bytes) {
    FillLaunch args = {queue, dst, bytes, value};
    return submit(queue, run_fill, &args, sizeof args, "ok_fill");
}

// ---- queues -------------------------------------------------------------------------------------------------------

ok_status ok_queue_set_quantized_activations(ok_queue *queue, int32_t on) {
    OK_REQUIRE_POINTER(queue);
    OK_REQUIRE(on == 0 || on == 1, "on=%d must be 0 or 1", on);
    if (on == 0) return OK_SUCCESS;
    return ok::fail(OK_ERR_UNSUPPORTED, "%s: on=1: GPU builds keep 22 bits of activations, or more", __func__);
}

ok_status ok_queue_create(ok_queue **host_out, int32_t device, void *native_stream) {
    OK_REQUIRE_POINTER(host_out);
    *host_out = nullptr;
    if (ok_status status = ok::enter_device(__func__, device)) return status;
    ok_queue *queue = ok::create<ok_queue>();
    if (!queue) return ok::fail_host_memory(__func__, sizeof *queue);
    queue->device = device;
    queue->owner = getpid();
    queue->stream = native_stream;
    if (!native_stream) {
        if (ok_status status = ok::check_runtime(gpu()->create_stream(&queue->stream), __func__, "create_stream")) {
            ok::release(queue);
            return status;
        }
        queue->owns_stream = true;
    }
    *host_out = queue;
    return OK_SUCCESS;
}

void ok_queue_destroy(ok_queue *queue) {
    if (!queue) return;
    if (queue->owns_stream && queue->owner == getpid()) {
        gpu()->set_device(queue->device);
        gpu()->sync_stream(queue->stream);
        gpu()->destroy_stream(queue->stream);
    }
    ok_program_destroy(queue->recording);
    ok::release(queue);
}

ok_status ok_queue_sync(ok_queue *queue) {
    OK_REQUIRE_POINTER(queue);
    OK_REQUIRE(!queue->recording, "the queue is recording");
    if (ok_status status = enter(__func__, queue)) return status;
    return ok::check_runtime(gpu()->sync_stream(queue->stream), __func__, "sync_stream");
}

// ---- programs -----------------------------------------------------------------------------------------------------

ok_status ok_program_replay(ok_program *program) {
    OK_REQUIRE_POINTER(program);
    const ok_queue *queue = program->queue;
    if (ok_status status = enter(__func__, queue)) return status;
    if (program->graph)
        note(gpu()->launch_graph(program->graph, queue->stream), "launch_graph");
    else
        ok::run_launches(program);
    if (ok_status status = take_run_error(__func__)) return status;
    return ok::check_runtime(gpu()->sync_stream(queue->stream), __func__, "sync_stream");
}

double ok::seconds_now() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

ok_status ok::capture_program(const char *function, ok_program *program) {
    const ok_queue *queue = program->queue;
    if (ok_status status = enter(function, queue)) return status;
    if (ok_status status = ok::check_runtime(gpu()->begin_capture(queue->stream), function, "begin_capture"))
        return status;
    ok::run_launches(program);
    ok_status status = take_run_error(function);
    void *graph = nullptr;
    ok_status ended = ok::check_runtime(gpu()->end_capture(queue->stream, &graph), function, "end_capture");
    if (status != OK_SUCCESS || ended != OK_SUCCESS) {
        if (graph) gpu()->destroy_graph(graph);
        return status != OK_SUCCESS ? status : ended;
    }
    program->graph = graph;
    return OK_SUCCESS;
}

bool ok::prefers_fused() {
    const char *wish = getenv("OKERNEL_FUSED");
    if (wish && (!strcmp(wish, "0") || !strcmp(wish, "1"))) return *wish == '1';
    return !gpu()->launches_overlap;
}

// OKERNEL_GRAPH=0 forbids graphs, 1 trusts them; else they must pass a self-test, once a device, where the runtime has
// been seen to replay stale buffers.
static ok_status check_graphs(const char *function, int32_t device) {
    static int passed[ok::kMaxDevices];  // 1: yes, -1: no
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    const char *wish = getenv("OKERNEL_GRAPH");
    if (wish && !strcmp(wish, "0"))
        return ok::fail(OK_ERR_UNSUPPORTED, "%s: graphs are off: OKERNEL_GRAPH=0", function);
    if ((wish && !strcmp(wish, "1")) || gpu()->graphs_trusted) return OK_SUCCESS;
    pthread_mutex_lock(&lock);
    if (!passed[device]) passed[device] = ok::graph_self_test(device) ? 1 : -1;
    const bool good = passed[device] == 1;
    pthread_mutex_unlock(&lock);
    if (good) return OK_SUCCESS;
    return ok::fail(OK_ERR_UNSUPPORTED, "%s: captured graphs fail the self-test on device %d, or are no faster",
                    function, device);
}

ok_status ok_program_set_replay(ok_program *program, ok_replay replay) {
    OK_REQUIRE_POINTER(program);
    OK_REQUIRE(replay == OK_REPLAY_LOOP || replay == OK_REPLAY_GRAPH, "replay=%d must be 0 (loop) or 1 (graph)",
               static_cast<int>(replay));
    if (replay == OK_REPLAY_LOOP) {
        ok::program_drop_graph(program);
        program->graph = nullptr;
        return OK_SUCCESS;
    }
    if (program->graph) return OK_SUCCESS;
    if (!gpu()->begin_capture)
        return ok::fail(OK_ERR_UNSUPPORTED, "%s: replay=1 (graph): the %s build has no graphs", __func__,
                        OKERNEL_BACKEND);
    if (ok_status status = check_graphs(__func__, program->queue->device)) return status;
    return ok::capture_program(__func__, program);
}

void ok::program_drop_graph(ok_program *program) {
    if (program->graph && program->queue->owner == getpid()) gpu()->destroy_graph(program->graph);
}

// ---- events -------------------------------------------------------------------------------------------------------

ok_status ok_event_create(ok_event **host_out, int32_t device) {
    OK_REQUIRE_POINTER(host_out);
    *host_out = nullptr;
    if (ok_status status = ok::enter_device(__func__, device)) return status;
    ok_event *event = ok::create<ok_event>();
    if (!event) return ok::fail_host_memory(__func__, sizeof *event);
    event->device = device;
    event->owner = getpid();
    if (ok_status status = ok::check_runtime(gpu()->create_event(&event->handle), __func__, "create_event")) {
        ok::release(event);
        return status;
    }
    *host_out = event;
    return OK_SUCCESS;
}

void ok_event_destroy(ok_event *event) {
    if (!event) return;
    if (event->owner == getpid()) gpu()->destroy_event(event->handle);
    ok::release(event);
}

ok_status ok_event_record(ok_event *event, ok_queue *queue) {
    OK_REQUIRE_POINTER(event);
    OK_REQUIRE_POINTER(queue);
    OK_REQUIRE(event->device == queue->device, "the event is of device %d, the queue of device %d", event->device,
               queue->device);
    struct Record {
        ok_event *event;
        ok_queue *queue;
    };
    void (*run)(const void *) = [](const void *args) {
        const Record &record = *static_cast<const Record *>(args);
        note(gpu()->record_event(record.event->handle, record.queue->stream), "record_event");
        record.event->recorded = true;
    };
    Record record = {event, queue};
    return submit(queue, run, &record, sizeof record, __func__);
}

ok_status ok_event_elapsed(const ok_event *begin, const ok_event *end, float *host_milliseconds) {
    OK_REQUIRE_POINTER(begin);
    OK_REQUIRE_POINTER(end);
    OK_REQUIRE_POINTER(host_milliseconds);
    OK_REQUIRE(begin->recorded && end->recorded, "both events must have been recorded");
    if (ok_status status = check_owner(__func__, end->owner)) return status;
    if (ok_status status = ok::check_runtime(gpu()->sync_event(end->handle), __func__, "sync_event")) return status;
    return ok::check_runtime(gpu()->elapsed(host_milliseconds, begin->handle, end->handle), __func__, "elapsed");
}
