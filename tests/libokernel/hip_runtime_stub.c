/* hip_runtime_stub.c: a HIP runtime of any version without a card, for test_runtime.py.
 *
 * Built as libamdhip64.so.<n> with STUB_VERSION=<n>. STUB_DEVICES (environment) lists the architectures it sees, e.g.
 * "gfx1103,gfx1030"; empty: none. STUB_LOG names a file that gets one line a call of interest. Memory is ordinary memory;
 * kernels are looked up and launched, and do nothing. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifndef STUB_VERSION
#define STUB_VERSION 6
#endif

static void note(const char *call, const char *what) {
    const char *path = getenv("STUB_LOG");
    FILE *file = path ? fopen(path, "a") : NULL;
    if (!file) return;
    fprintf(file, "%s %s\n", call, what);
    fclose(file);
}

/* The architecture of a device into `arch`; 0 if there is no such device. */
static int device_arch(int device, char arch[64]) {
    const char *list = getenv("STUB_DEVICES");
    for (list = list ? list : ""; *list; list += strcspn(list, ","), list += *list == ',')
        if (device-- == 0) {
            snprintf(arch, 64, "%.*s", (int)strcspn(list, ","), list);
            return 1;
        }
    return 0;
}

static int current;

int hipGetDeviceCount(int *count) {
    char arch[64];
    for (*count = 0; device_arch(*count, arch);) ++*count;
    return *count ? 0 : 100; /* hipErrorNoDevice */
}
int hipSetDevice(int device) {
    char arch[64];
    current = device;
    return device_arch(device, arch) ? 0 : 101;
}
int hipDeviceGetName(char *name, int size, int device) {
    snprintf(name, (size_t)size, "stub %d", device);
    return 0;
}

/* ROCm 6's layout has the name at byte 1160; the old one, which the old name keeps, at 396. */
static int properties(char *to, size_t at, int device) {
    char arch[64];
    if (!device_arch(device, arch)) return 101;
    snprintf(to + at, 64, "%s:sramecc+:xnack-", arch);
    return 0;
}
#if STUB_VERSION >= 6
int hipGetDevicePropertiesR0600(void *to, int device) { return properties(to, 1160, device); }
#endif
int hipGetDeviceProperties(void *to, int device) { return properties(to, 396, device); }

int hipMemGetInfo(size_t *free_bytes, size_t *total) {
    *free_bytes = (size_t)3 << 30;
    *total = (size_t)4 << 30;
    return 0;
}
#ifndef STUB_INCOMPLETE
int hipRuntimeGetVersion(int *version) {
    *version = STUB_VERSION * 10000000 + 200000;
    return 0;
}
#endif
const char *hipGetErrorString(int error) {
    return error == 100 ? "no ROCm-capable device is detected" : error == 2 ? "out of memory" : "stub error";
}
int hipMalloc(void **out, size_t bytes) { return bytes <= (size_t)3 << 30 && (*out = malloc(bytes)) ? 0 : 2; }
int hipFree(void *p) {
    free(p);
    return 0;
}
int hipHostMalloc(void **out, size_t bytes, unsigned flags) { return flags == 0 ? hipMalloc(out, bytes) : 1; }
int hipHostFree(void *p) { return hipFree(p); }
int hipMemcpyAsync(void *to, const void *from, size_t bytes, int kind, void *stream) {
    memcpy(to, from, bytes);
    return kind == 4 && stream ? 0 : 1;
}
int hipMemsetAsync(void *to, int value, size_t bytes, void *stream) {
    memset(to, value, bytes);
    return stream ? 0 : 1;
}
int hipStreamCreateWithFlags(void **out, unsigned flags) { return (*out = malloc(1)) && flags == 1 ? 0 : 1; }
int hipStreamDestroy(void *stream) { return hipFree(stream); }
int hipStreamSynchronize(void *stream) { return stream ? 0 : 1; }
int hipEventCreate(void **out) { return (*out = malloc(1)) ? 0 : 2; }
int hipEventDestroy(void *event) { return hipFree(event); }
int hipEventRecord(void *event, void *stream) { return event && stream ? 0 : 1; }
int hipEventSynchronize(void *event) { return event ? 0 : 1; }
int hipEventElapsedTime(float *ms, void *begin, void *end) {
    *ms = 1;
    return begin && end ? 0 : 1;
}

int hipModuleLoadData(void **out, const void *image) {
    const unsigned char *elf = image;
    char flags[16];
    snprintf(flags, sizeof flags, "%#x", elf[48]); /* low byte of e_flags: EF_AMDGPU_MACH */
    note("load", flags);
    *out = &current;
    return memcmp(elf, "\177ELF", 4) == 0 ? 0 : 209; /* hipErrorNoBinaryForGpu */
}
int hipModuleGetFunction(void **out, void *module, const char *name) {
    note("function", name);
    return (*out = strdup(name)) && module ? 0 : 500;
}
int hipModuleLaunchKernel(void *function, unsigned x, unsigned y, unsigned z, unsigned block_x, unsigned block_y,
                          unsigned block_z, unsigned lds, void *stream, void **arguments, void **extra) {
    char line[200];
    snprintf(line, sizeof line, "%s %u,%u,%u x %u,%u,%u", (const char *)function, x, y, z, block_x, block_y, block_z);
    note("launch", line);
    return lds == 0 && stream && arguments && !extra ? 0 : 1;
}

int hipStreamBeginCapture(void *stream, int mode) { return stream && mode == 2 ? 0 : 1; }
int hipStreamEndCapture(void *stream, void **graph) { return stream && (*graph = malloc(1)) ? 0 : 1; }
int hipGraphInstantiate(void **out, void *graph, void *node, char *log, size_t size) {
    (void)node, (void)log, (void)size;
    return graph && (*out = malloc(1)) ? 0 : 1;
}
int hipGraphDestroy(void *graph) { return hipFree(graph); }
int hipGraphExecDestroy(void *graph) { return hipFree(graph); }
int hipGraphLaunch(void *graph, void *stream) { return graph && stream ? 0 : 1; }
