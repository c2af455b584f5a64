// threads_under_tsan.cpp: drives the CPU build's thread pool from several callers; built with ThreadSanitizer by
// scripts/check_sanitized.sh. Plain (not atomic) writes of a job must be visible to its caller when the job returns.
#include <pthread.h>

#include <cstdio>
#include <initializer_list>

#include "cpu/internal.h"

namespace {

constexpr int64_t kTasks = 1000;
constexpr int kJobs = 300;
constexpr int kCallers = 3;

// Runs jobs over an array of its own; returns the number of wrong results.
int64_t run_jobs() {
    static thread_local int64_t values[kTasks];
    int64_t wrong = 0;
    for (int64_t job = 0; job < kJobs; job++) {
        int64_t tasks = 1 + job * 37 % kTasks;
        ok::parallel_for(tasks, [v = values, job](int64_t i) { v[i] = i * job; });
        for (int64_t i = 0; i < tasks; i++) wrong += values[i] != i * job;
    }
    return wrong;
}

void *caller(void *wrong) {
    *static_cast<int64_t *>(wrong) = run_jobs();
    return nullptr;
}

}  // namespace

int main() {
    int64_t wrong[kCallers + 1] = {};
    for (int32_t threads : {2, 4, 1, 3}) {
        if (ok_set_threads(threads) != OK_SUCCESS) return 1;
        pthread_t callers[kCallers];
        for (int i = 0; i < kCallers; i++) pthread_create(&callers[i], nullptr, caller, &wrong[i]);
        wrong[kCallers] = run_jobs();
        for (pthread_t thread : callers) pthread_join(thread, nullptr);
        for (int64_t count : wrong)
            if (count) return printf("%lld wrong results\n", static_cast<long long>(count)), 1;
    }
    printf("%d jobs on up to 4 threads from %d callers: every result right\n", 4 * kJobs * (kCallers + 1),
           kCallers + 1);
    return 0;
}
