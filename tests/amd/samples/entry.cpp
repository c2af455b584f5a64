// entry.cpp: the sample kernels as a library of the stand-in: what the tests call from Python.
static int bug_under_test = 0;
#define BUG bug_under_test
#include "samples.hip"

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT void *sample_alloc(size_t bytes, size_t alignment) { return standin::guarded_alloc(bytes, alignment); }
EXPORT void sample_free(void *p) { standin::guarded_free(p); }
EXPORT const char *sample_message() { return standin::message; }

EXPORT void sample_set_bug(int bug) { bug_under_test = bug; }

EXPORT int sample_launch(const char *name, const unsigned *grid, const unsigned *block, size_t lds_bytes,
                         void **params) {
    static const struct {
        const char *name;
        hipFunction_t function;
    } kernels[] = {
#define KERNEL(kernel) {#kernel, standin::invoke<kernel>}
        KERNEL(scale_add),     KERNEL(rms_norm), KERNEL(matvec_dot2), KERNEL(matvec_q8),
        KERNEL(matmul_matrix), KERNEL(attend),   KERNEL(philox),      KERNEL(histogram),
#undef KERNEL
    };
    for (const auto &kernel : kernels)
        if (strcmp(kernel.name, name) == 0)
            return standin::launch(kernel.function, dim3(grid[0], grid[1], grid[2]), dim3(block[0], block[1], block[2]),
                                   lds_bytes, params);
    return hipErrorInvalidValue;
}
