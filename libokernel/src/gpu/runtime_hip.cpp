// runtime_hip.cpp: finds a HIP runtime of any version, takes its entry points by name, and loads this build's code
// objects.
//
// Nothing of HIP is linked: one library serves ROCm 5 to 10 and later, and imports where there is none. The code
// objects lie in this library, one a target; only the one that fits the chosen device is given to the runtime.
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <link.h>
#include <pthread.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "code_objects.h"
#include "runtime.h"

namespace {

constexpr int kOldest = 5, kNewest = 30;  // libamdhip64.so.<n>: ROCm's major version

// ---- entry points -------------------------------------------------------------------------------------------------

// HIP's own signatures, with int for hipError_t and void * for handles.
#define HIP_ENTRY_POINTS(X)                                                                                     \
    X(hipGetDeviceCount, (int *))                                                                               \
    X(hipSetDevice, (int))                                                                                      \
    X(hipDeviceGetName, (char *, int, int))                                                                     \
    X(hipMemGetInfo, (size_t *, size_t *))                                                                      \
    X(hipRuntimeGetVersion, (int *))                                                                            \
    X(hipMalloc, (void **, size_t))                                                                             \
    X(hipFree, (void *))                                                                                        \
    X(hipHostMalloc, (void **, size_t, unsigned))                                                               \
    X(hipHostFree, (void *))                                                                                    \
    X(hipMemcpyAsync, (void *, const void *, size_t, int, void *))                                              \
    X(hipMemsetAsync, (void *, int, size_t, void *))                                                            \
    X(hipStreamCreateWithFlags, (void **, unsigned))                                                            \
    X(hipStreamDestroy, (void *))                                                                               \
    X(hipStreamSynchronize, (void *))                                                                           \
    X(hipEventCreate, (void **))                                                                                \
    X(hipEventDestroy, (void *))                                                                                \
    X(hipEventRecord, (void *, void *))                                                                         \
    X(hipEventSynchronize, (void *))                                                                            \
    X(hipEventElapsedTime, (float *, void *, void *))                                                           \
    X(hipModuleLoadData, (void **, const void *))                                                               \
    X(hipModuleGetFunction, (void **, void *, const char *))                                                    \
    X(hipModuleLaunchKernel,                                                                                    \
      (void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **)) \
    X(hipStreamBeginCapture, (void *, int))                                                                     \
    X(hipStreamEndCapture, (void *, void **))                                                                   \
    X(hipGraphInstantiate, (void **, void *, void *, char *, size_t))                                           \
    X(hipGraphDestroy, (void *))                                                                                \
    X(hipGraphExecDestroy, (void *))                                                                            \
    X(hipGraphLaunch, (void *, void *))

struct EntryPoints {
#define X(name, parameters) int(*name) parameters;
    HIP_ENTRY_POINTS(X)
#undef X
    const char *(*hipGetErrorString)(int);
    // Two layouts of one structure: the old name keeps ROCm 5's for ever, the new one came with ROCm 6.
    int (*hipGetDevicePropertiesR0600)(void *, int);
    int (*hipGetDeviceProperties)(void *, int);
};

EntryPoints hip;
char library_path[1024];
void *modules[ok::kMaxDevices];
char reason[2048];  // why there is no runtime

template <class F>
bool take(void *library, F &entry, const char *name) {
    entry = reinterpret_cast<F>(dlsym(library, name));
    return entry;
}

// The first entry point that `library` lacks, or null.
const char *take_entry_points(void *library) {
#define X(name, parameters) \
    if (!take(library, hip.name, #name)) return #name;
    HIP_ENTRY_POINTS(X)
#undef X
    if (!take(library, hip.hipGetErrorString, "hipGetErrorString")) return "hipGetErrorString";
    take(library, hip.hipGetDevicePropertiesR0600, "hipGetDevicePropertiesR0600");
    take(library, hip.hipGetDeviceProperties, "hipGetDeviceProperties");
    if (!hip.hipGetDevicePropertiesR0600 && !hip.hipGetDeviceProperties) return "hipGetDeviceProperties";
    return nullptr;
}

// ---- finding the library ------------------------------------------------------------------------------------------

constexpr int kMaxFolders = 32;
struct Search {
    char folders[kMaxFolders][512] = {};
    int count = 0;
    char loaded[1024] = "";  // a runtime that is in the process already
    bool loader = true;      // ask the dynamic loader by name too
};

void add_folder(Search &search, const char *root, int length, const char *below) {
    if (search.count == kMaxFolders || length == 0) return;
    char *folder = search.folders[search.count];
    snprintf(folder, sizeof *search.folders, "%.*s%s", length, root, below);
    for (int i = 0; i < search.count; i++)
        if (!strcmp(search.folders[i], folder)) return;
    search.count++;
}

void add_list(Search &search, const char *list) {  // "/a:/b"
    while (list && *list) {
        int length = static_cast<int>(strcspn(list, ":"));
        add_folder(search, list, length, "");
        list += length + (list[length] == ':');
    }
}

// Libraries in the process show a runtime that was loaded before us, and where Python's packages lie.
int look_at_loaded(dl_phdr_info *info, size_t, void *context) {
    Search &search = *static_cast<Search *>(context);
    const char *path = info->dlpi_name ? info->dlpi_name : "";
    const char *base = strrchr(path, '/');
    if (base && !strncmp(base + 1, "libamdhip64.so", 14)) snprintf(search.loaded, sizeof search.loaded, "%s", path);
    const char *packages[] = {"/site-packages/", "/dist-packages/"};
    for (const char *name : packages)
        if (const char *at = strstr(path, name)) {
            int length = static_cast<int>(at + strlen(name) - path);
            add_folder(search, path, length, "_rocm_sdk_core/lib");
            add_folder(search, path, length, "torch/lib");
        }
    return 0;
}

void collect_folders(Search &search) {
    dl_iterate_phdr(look_at_loaded, &search);
    const char *only = getenv("OKERNEL_HIP_SEARCH");
    if (only && *only) {  // tests: nothing but these folders
        search.count = 0;
        search.loader = false;
        search.loaded[0] = 0;
        add_list(search, only);
        return;
    }
    const char *roots[] = {getenv("ROCM_PATH"), getenv("HIP_PATH"), "/opt/rocm"};
    for (const char *root : roots)
        if (root && *root) {
            add_folder(search, root, static_cast<int>(strlen(root)), "/lib");
            add_folder(search, root, static_cast<int>(strlen(root)), "/lib64");
        }
    if (DIR *opt = opendir("/opt")) {
        while (const dirent *entry = readdir(opt))
            if (!strncmp(entry->d_name, "rocm-", 5)) {
                char root[300];
                int length = snprintf(root, sizeof root, "/opt/%s", entry->d_name);
                add_folder(search, root, length, "/lib");
            }
        closedir(opt);
    }
    add_list(search, getenv("LD_LIBRARY_PATH"));
}

void *open_library(const char *name, char *failure, size_t size) {
    void *library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (!library && strchr(name, '/')) snprintf(failure, size, "; %s", dlerror());
    return library;
}

// A runtime already in the process, else the one with the highest number.
void *find_library() {
    static Search search;
    char failure[1024] = "", name[600];
    collect_folders(search);
    if (*search.loaded)
        if (void *library = dlopen(search.loaded, RTLD_NOW | RTLD_NOLOAD)) return library;
    for (int number = kNewest; number >= kOldest; number--) {
        for (int i = 0; i < search.count; i++) {
            snprintf(name, sizeof name, "%s/libamdhip64.so.%d", search.folders[i], number);
            if (access(name, F_OK) != 0) continue;
            if (void *library = open_library(name, failure, sizeof failure)) return library;
        }
        snprintf(name, sizeof name, "libamdhip64.so.%d", number);
        if (search.loader)
            if (void *library = open_library(name, failure, sizeof failure)) return library;
    }
    for (int i = 0; i < search.count; i++) {  // a wheel may carry it without a number
        snprintf(name, sizeof name, "%s/libamdhip64.so", search.folders[i]);
        if (access(name, F_OK) != 0) continue;
        if (void *library = open_library(name, failure, sizeof failure)) return library;
    }
    size_t used = snprintf(reason, sizeof reason,
                           "no HIP runtime: libamdhip64.so.%d to .%d (ROCm %d and later) not found by the loader or in",
                           kOldest, kNewest, kOldest);
    for (int i = 0; i < search.count && used < sizeof reason; i++)
        used += snprintf(reason + used, sizeof reason - used, "%s %s", i ? "," : "", search.folders[i]);
    if (used < sizeof reason)
        snprintf(reason + used, sizeof reason - used, "%s; install ROCm or set ROCM_PATH", failure);
    return nullptr;
}

// ---- devices ------------------------------------------------------------------------------------------------------

bool in_group(gid_t group) {
    gid_t groups[256];
    int count = getgroups(256, groups);
    for (int i = 0; i < count; i++)
        if (groups[i] == group) return true;
    return getegid() == group;
}

// What keeps a process from the kernel driver; "" if nothing does.
void device_node_problem(char *text, size_t size) {
    const char *node = getenv("OKERNEL_KFD");
    if (!node || !*node) node = "/dev/kfd";
    text[0] = 0;
    int file = open(node, O_RDWR | O_CLOEXEC);
    if (file >= 0) {
        close(file);
        return;
    }
    int error = errno;
    struct stat status;
    if (error == ENOENT || error == ENOTDIR) {
        snprintf(text, size,
                 "device node %s is absent: the amdgpu kernel driver is not loaded, or a container was started "
                 "without --device=/dev/kfd --device=/dev/dri",
                 node);
    } else if (error != EACCES && error != EPERM) {
        snprintf(text, size, "device node %s cannot be opened: %s", node, strerror(error));
    } else if (stat(node, &status) == 0 && !in_group(status.st_gid)) {
        const group *owner = getgrgid(status.st_gid);
        snprintf(text, size,
                 "no permission on device node %s: this user is not in its group %s; run: "
                 "sudo usermod -aG %s $USER, and log in again",
                 node, owner ? owner->gr_name : "render", owner ? owner->gr_name : "render");
    } else {
        snprintf(text, size,
                 "no permission on device node %s, although this user is in its group: check its mode, or the "
                 "container's device permissions",
                 node);
    }
}

int get_device_count(int *count) {
    *count = 0;
    return hip.hipGetDeviceCount(count);
}

int get_arch(char *arch, int size, int device) {
    // Larger than the structure of any version so far (1472 bytes in ROCm 6).
    static char properties[16384];
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    pthread_mutex_lock(&lock);
    memset(properties, 0, sizeof properties);
    const bool current = hip.hipGetDevicePropertiesR0600;
    const int error =
        current ? hip.hipGetDevicePropertiesR0600(properties, device) : hip.hipGetDeviceProperties(properties, device);
    const char *name = properties + (current ? 1160 : 396);  // gcnArchName, "gfx90a:sramecc+:xnack-"
    snprintf(arch, size, "%.*s", static_cast<int>(strcspn(name, ":")), name);
    pthread_mutex_unlock(&lock);
    return error;
}

const ok::CodeObject *find_code(const char *arch) {
    for (const ok::CodeObject *code = ok::code_objects; code->target; code++)
        if (!strcmp(code->target, arch)) return code;
    return nullptr;
}

ok_status usable(const char *function, int device, const char *arch) {
    if (find_code(arch)) return OK_SUCCESS;
    return ok::fail(OK_ERR_UNAVAILABLE, "%s: device %d: this library was built for %s; found %s", function, device,
                    ok_targets(), *arch ? arch : "a device that does not say what it is");
}

ok_status load(const char *function, int device) {
    char arch[64];
    if (ok_status status = ok::check_runtime(get_arch(arch, sizeof arch, device), function, "hipGetDeviceProperties"))
        return status;
    if (ok_status status = usable(function, device, arch)) return status;
    return ok::check_runtime(hip.hipModuleLoadData(&modules[device], find_code(arch)->begin), function,
                             "hipModuleLoadData");
}

int prepare(const void *kernel, int device) {
    ok::KernelSlot *slot = static_cast<ok::KernelSlot *>(const_cast<void *>(kernel));
    void **function = &slot->function[device];
    if (__atomic_load_n(function, __ATOMIC_ACQUIRE)) return 0;
    void *found = nullptr;
    if (int error = hip.hipModuleGetFunction(&found, modules[device], slot->name)) return error;
    __atomic_store_n(function, found, __ATOMIC_RELEASE);
    return 0;
}

int launch(const void *kernel, int device, const uint32_t grid[3], uint32_t threads, void *stream, void **arguments) {
    if (int error = prepare(kernel, device)) return error;
    void *function = static_cast<const ok::KernelSlot *>(kernel)->function[device];
    return hip.hipModuleLaunchKernel(function, grid[0], grid[1], grid[2], threads, 1, 1, 0, stream, arguments, nullptr);
}

int create_stream(void **out) { return hip.hipStreamCreateWithFlags(out, 1); }  // hipStreamNonBlocking

int copy(void *dst, const void *src, size_t bytes, void *stream) {
    return hip.hipMemcpyAsync(dst, src, bytes, 4, stream);  // hipMemcpyDefault
}

int allocate_host(void **out, size_t bytes) { return hip.hipHostMalloc(out, bytes, 0); }

int begin_capture(void *stream) { return hip.hipStreamBeginCapture(stream, 2); }  // hipStreamCaptureModeRelaxed

int end_capture(void *stream, void **out) {
    void *graph = nullptr;
    if (int error = hip.hipStreamEndCapture(stream, &graph)) return error;
    int error = hip.hipGraphInstantiate(out, graph, nullptr, nullptr, 0);
    hip.hipGraphDestroy(graph);
    return error;
}

ok::Runtime table;
const ok::Runtime *found;

void find_runtime() {
    void *library = find_library();
    if (!library) return;
    const char *missing = take_entry_points(library);
    link_map *map = nullptr;
    if (dlinfo(library, RTLD_DI_LINKMAP, &map) == 0 && map)
        snprintf(library_path, sizeof library_path, "%s", map->l_name);
    if (missing) {
        snprintf(reason, sizeof reason, "HIP runtime %.900s has no %s", library_path, missing);
        return;
    }
    table.backend = "hip";
    table.path = library_path;
    hip.hipRuntimeGetVersion(&table.version);
    table.get_device_count = get_device_count;
    table.set_device = hip.hipSetDevice;
    table.get_name = hip.hipDeviceGetName;
    table.get_arch = get_arch;
    table.get_memory = hip.hipMemGetInfo;
    table.error_text = hip.hipGetErrorString;
    table.allocate = hip.hipMalloc;
    table.release = hip.hipFree;
    table.allocate_host = allocate_host;
    table.release_host = hip.hipHostFree;
    table.copy = copy;
    table.fill = hip.hipMemsetAsync;
    table.create_stream = create_stream;
    table.destroy_stream = hip.hipStreamDestroy;
    table.sync_stream = hip.hipStreamSynchronize;
    table.create_event = hip.hipEventCreate;
    table.destroy_event = hip.hipEventDestroy;
    table.record_event = hip.hipEventRecord;
    table.sync_event = hip.hipEventSynchronize;
    table.elapsed = hip.hipEventElapsedTime;
    table.usable = usable;
    table.load = load;
    table.prepare = prepare;
    table.launch = launch;
    table.begin_capture = begin_capture;
    table.end_capture = end_capture;
    table.launch_graph = hip.hipGraphLaunch;
    table.destroy_graph = hip.hipGraphExecDestroy;
    found = &table;
}

}  // namespace

const ok::Runtime *ok::runtime(const char *function) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, find_runtime);
    if (!found) fail(OK_ERR_UNAVAILABLE, "%s: %s", function, reason);
    return found;
}

ok_status ok::no_device(const char *function, int error) {
    char problem[700];
    device_node_problem(problem, sizeof problem);
    if (*problem) return fail(OK_ERR_UNAVAILABLE, "%s: %s", function, problem);
    const char *visible = getenv("HIP_VISIBLE_DEVICES");
    return fail(OK_ERR_UNAVAILABLE, "%s: %s sees no device%s%s%s%s%s", function, library_path, error ? ": " : "",
                error ? hip.hipGetErrorString(error) : "", visible ? " (HIP_VISIBLE_DEVICES=" : "",
                visible ? visible : "", visible ? ")" : "");
}
