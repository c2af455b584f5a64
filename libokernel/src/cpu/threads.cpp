// threads.cpp: the CPU build's own thread pool, made at the first use and made anew in a child of fork.
//
// A job is `tasks` calls of one function, handed out in chunks. The caller works too; whoever is free takes the next
// chunk by raising `claims`, which carries the job's number in its upper half, so that a thread that wakes late cannot
// take part in a job it has not read. Workers spin for some microseconds after a job, since the next one tends to
// follow at once, then sleep in the kernel.
#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <initializer_list>

#include "host.h"
#include "internal.h"

namespace {

constexpr int kMaxThreads = 256;
constexpr int kSpins = 2000;         // some 20 to 80 microseconds
constexpr int kChunksPerThread = 8;  // enough to even out threads that run at different speeds

struct Job {
    void (*task)(void *, int64_t);
    void *context;
    int64_t tasks, chunk;
    uint32_t chunks;
};

struct Pool {
    pthread_t threads[kMaxThreads];
    int workers;  // threads that run, besides the caller
    int size;     // threads that were asked for, with the caller; 0: not made yet

    std::atomic<void (*)(void *, int64_t)> task;
    std::atomic<void *> context;
    std::atomic<int64_t> tasks, chunk;
    std::atomic<uint32_t> chunks;

    std::atomic<uint64_t> claims;     // job number << 32 | chunks taken
    std::atomic<uint32_t> published;  // job number: what sleeping workers wait on
    std::atomic<uint32_t> finished;   // chunks done of the current job: what a waiting caller sleeps on
    std::atomic<uint32_t> sleepers;
    std::atomic<bool> caller_waits, stop;
};

Pool pool;
std::atomic<bool> busy{false};        // a caller owns the pool
std::atomic<int32_t> wanted_size{0};  // 0: not decided yet
std::atomic<bool> fork_handler{false};

void futex_wait(std::atomic<uint32_t> *word, uint32_t seen) {
    syscall(SYS_futex, reinterpret_cast<uint32_t *>(word), FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
}

void futex_wake(std::atomic<uint32_t> *word, int count) {
    syscall(SYS_futex, reinterpret_cast<uint32_t *>(word), FUTEX_WAKE_PRIVATE, count, nullptr, nullptr, 0);
}

void spin_once() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Runs chunks of job `number` until none is left.
void work(uint32_t number, const Job &job) {
    uint64_t claim = pool.claims.load(std::memory_order_acquire);
    for (;;) {
        uint32_t index = static_cast<uint32_t>(claim);
        if (static_cast<uint32_t>(claim >> 32) != number || index >= job.chunks) return;
        if (!pool.claims.compare_exchange_weak(claim, claim + 1, std::memory_order_acq_rel)) continue;
        int64_t begin = index * job.chunk, end = begin + job.chunk;
        if (end > job.tasks) end = job.tasks;
        for (int64_t i = begin; i < end; i++) job.task(job.context, i);
        if (pool.finished.fetch_add(1) + 1 == job.chunks && pool.caller_waits.load()) futex_wake(&pool.finished, 1);
        claim++;
    }
}

void *worker(void *) {
    uint32_t seen = 0;
    for (;;) {
        uint32_t number = pool.published.load(std::memory_order_acquire);
        for (int spin = 0; number == seen && spin < kSpins; spin++) {
            spin_once();
            number = pool.published.load(std::memory_order_acquire);
        }
        if (number == seen) {
            pool.sleepers.fetch_add(1);
            futex_wait(&pool.published, seen);
            pool.sleepers.fetch_sub(1);
            continue;
        }
        seen = number;
        if (pool.stop.load(std::memory_order_acquire)) return nullptr;
        // May be torn by the next job's publication; then `claims` no longer carries `number` and work() takes nothing.
        Job job = {pool.task.load(), pool.context.load(), pool.tasks.load(), pool.chunk.load(), pool.chunks.load()};
        work(number, job);
    }
}

// Makes the workers see a new value of `published`, waking at most `count` of those that sleep.
void publish(uint32_t number, int count) {
    pool.published.store(number);
    if (pool.sleepers.load() > 0) futex_wake(&pool.published, count);
}

void stop_workers() {
    pool.stop.store(true);
    publish(pool.published.load() + 1, kMaxThreads);
    for (int i = 0; i < pool.workers; i++) pthread_join(pool.threads[i], nullptr);
    pool.workers = 0;
    pool.stop.store(false);
}

// In a child of fork none of the workers exists, and the pool may have been in use.
void forget_workers() {
    pool.workers = pool.size = 0;
    pool.sleepers.store(0);
    pool.stop.store(false);
    busy.store(false);
}

void start_workers(int size) {
    if (!fork_handler.exchange(true)) pthread_atfork(nullptr, nullptr, forget_workers);
    pool.size = size;
    pool.published.store(0);  // a worker starts by having seen job 0
    pool.claims.store(0);
    // Signals are for the program's own threads, except those that a fault of the worker raises.
    sigset_t blocked, before;
    sigfillset(&blocked);
    for (int fault : {SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGABRT}) sigdelset(&blocked, fault);
    pthread_sigmask(SIG_SETMASK, &blocked, &before);
    while (pool.workers < size - 1 && !pthread_create(&pool.threads[pool.workers], nullptr, worker, nullptr))
        pthread_setname_np(pool.threads[pool.workers++], "okernel");
    // With fewer threads than asked for, work is slower but the same.
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

// Whether the caller has become the pool's owner and there are workers to share with.
bool acquire_pool() {
    if (busy.exchange(true, std::memory_order_acquire)) return false;
    int size = ok_threads();
    if (pool.size != size) {
        stop_workers();
        start_workers(size);
    }
    if (pool.workers) return true;
    busy.store(false, std::memory_order_release);
    return false;
}

}  // namespace

void ok::run_parallel(int64_t tasks, void (*task)(void *, int64_t), void *context) {
    if (tasks <= 1 || ok_threads() == 1 || !acquire_pool()) {
        for (int64_t i = 0; i < tasks; i++) task(context, i);
        return;
    }
    int64_t most_chunks = int64_t{kChunksPerThread} * pool.size;
    Job job = {task, context, tasks, ceil_div(tasks, most_chunks), 0};
    job.chunks = static_cast<uint32_t>(ceil_div(tasks, job.chunk));
    uint32_t number = pool.published.load() + 1;

    // Nobody holds a chunk of the last job, so `finished` is ours; `claims` shuts out late workers
    // before the job changes.
    pool.claims.store(uint64_t{number} << 32 | UINT32_MAX);
    pool.finished.store(0);
    pool.caller_waits.store(false);
    pool.task.store(job.task);
    pool.context.store(job.context);
    pool.tasks.store(job.tasks);
    pool.chunk.store(job.chunk);
    pool.chunks.store(job.chunks);
    pool.claims.store(uint64_t{number} << 32);
    publish(number, static_cast<int>(job.chunks) - 1);

    work(number, job);
    for (int spin = 0; pool.finished.load() != job.chunks; spin++) {
        if (spin < kSpins) {
            spin_once();
            continue;
        }
        pool.caller_waits.store(true);
        uint32_t finished = pool.finished.load();
        if (finished != job.chunks) futex_wait(&pool.finished, finished);
    }
    busy.store(false, std::memory_order_release);
}

ok_status ok_set_threads(int32_t n) {
    OK_REQUIRE(n >= 1 && n <= kMaxThreads, "n=%d must be between 1 and %d", n, kMaxThreads);
    wanted_size.store(n);
    return OK_SUCCESS;
}

int32_t ok_threads() {
    int32_t size = wanted_size.load(std::memory_order_relaxed);
    if (size) return size;
    int32_t cores = ok::host_cores();
    wanted_size.compare_exchange_strong(size, cores < kMaxThreads ? cores : kMaxThreads);
    return wanted_size.load();
}
