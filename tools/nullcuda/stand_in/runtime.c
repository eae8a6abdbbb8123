// SPDX-License-Identifier: Apache-2.0
// The CUDA runtime of a device that computes nothing.
//
// Memory is address space of the host that nobody touches, and kernels return at once. A kernel may
// write anywhere, so what was copied to a device is there until the next one; what kernels would
// have written reads as zero. Streams and events keep only what captures need: which streams record,
// and how far each has seen the others. What CUDA refuses while a stream is captured is refused.
#define _GNU_SOURCE
#include "nullcuda.h"
#include <dlfcn.h>
#include <driver_types.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#define EXPORT __attribute__((visibility("default")))
#define CARRIED (16ul << 20)     // bytes of a copy; larger ones arrive as zeros
#define MAX_FRESH 64
#define SPAN (2ul << 40)         // addresses of a device; they are never used again
#define GRANULE (2ul << 20)      // what a device allocates in
#define MAX_DEVICES 8
#define MAX_STREAMS 64           // of one capture

// ---- counters, hook, table of kernels ----------------------------------------------------------

EXPORT long nullcuda_counters[NUM_COUNTERS];
EXPORT const char *nullcuda_counter_names[NUM_COUNTERS + 1] = {
#define X(name) #name,
    COUNTERS(X)
#undef X
    NULL,
};
// Called at each launch, copy, fill and wait of the host, with the counter's name and what it was.
EXPORT void (*nullcuda_hook)(const char *counter, const char *name);

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

void count(enum counter counter) {
    __atomic_fetch_add(&nullcuda_counters[counter], 1, __ATOMIC_RELAXED);
}

static void report(enum counter counter, const char *name) {
    count(counter);
    if (nullcuda_hook) nullcuda_hook(nullcuda_counter_names[counter], name);
}

static __thread int last_error;

int fail(int error) { return last_error = error; }

// Kernels of libraries register their host function with a name; a launch knows only the function.
static struct registered { const void *function; const char *name; } *registered;
static size_t num_registered, room_registered;

static int by_function(const void *a, const void *b) {
    uintptr_t x = (uintptr_t)((const struct registered *)a)->function;
    uintptr_t y = (uintptr_t)((const struct registered *)b)->function;
    return x < y ? -1 : x > y;
}

static const char *kernel_name(const void *function) {
    if (!nullcuda_hook) return "";
    static size_t num_sorted;
    pthread_mutex_lock(&mutex);
    if (num_sorted != num_registered) {
        qsort(registered, num_registered, sizeof *registered, by_function);
        num_sorted = num_registered;
    }
    struct registered key = {function, NULL};
    struct registered *hit =
        bsearch(&key, registered, num_registered, sizeof key, by_function);
    pthread_mutex_unlock(&mutex);
    return hit ? hit->name : "a kernel without a name";
}

static void *handle_of_binaries;
EXPORT void **__cudaRegisterFatBinary(void *binary) { return &handle_of_binaries; }
EXPORT void __cudaRegisterFatBinaryEnd(void **handle) {}
EXPORT void __cudaUnregisterFatBinary(void **handle) {}
EXPORT void __cudaRegisterVar(void) {}
EXPORT char __cudaInitModule(void **handle) { return 1; }

EXPORT void __cudaRegisterFunction(void **handle, const char *function, char *device_function,
                                   const char *name) {
    pthread_mutex_lock(&mutex);
    if (num_registered == room_registered) {
        room_registered = room_registered ? 2 * room_registered : 1 << 16;
        registered = realloc(registered, room_registered * sizeof *registered);
    }
    registered[num_registered++] = (struct registered){function, name};
    pthread_mutex_unlock(&mutex);
}

// ---- devices and their memory --------------------------------------------------------------------

static __thread int device;
static size_t allocated[MAX_DEVICES];
static uint32_t granules[MAX_DEVICES][SPAN / GRANULE];  // of the allocation that begins there
static char *space;              // of all devices, one after another
static size_t reached[MAX_DEVICES];
static struct { char *first; size_t bytes; } pinned[1 << 14];
static int num_pinned;

static int num_devices(void) {
    const char *text = getenv("NULLCUDA_DEVICES");
    int devices = text ? atoi(text) : 1;
    return devices < MAX_DEVICES ? devices : MAX_DEVICES;
}

static size_t device_bytes(void) {
    const char *text = getenv("NULLCUDA_BYTES");
    return text ? strtoull(text, NULL, 10) : 80ull << 30;
}

// What was copied to devices since the last kernel.
static struct { const char *first; size_t bytes; } fresh[MAX_FRESH];
static int num_fresh;

static void *reserve(size_t bytes) {
    void *first = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return first == MAP_FAILED ? NULL : first;
}

static int device_of(const void *pointer) {
    size_t offset = (const char *)pointer - space;
    return space && offset < MAX_DEVICES * SPAN ? (int)(offset / SPAN) : -1;
}

int kind_of(const void *pointer) {
    if (device_of(pointer) >= 0) return ON_DEVICE;
    for (int i = 0; i < num_pinned; i++)
        if ((size_t)((const char *)pointer - pinned[i].first) < pinned[i].bytes) return PINNED;
    return PAGEABLE;
}

EXPORT int cudaGetDeviceCount(int *devices) { return *devices = num_devices(), OK; }
EXPORT int cudaGetDevice(int *current) { return *current = device, OK; }
EXPORT int cudaSetDevice(int index) {
    if (index < 0 || index >= num_devices()) return fail(INVALID_DEVICE);
    return device = index, OK;
}
EXPORT int cudaDriverGetVersion(int *version) { return *version = 13000, OK; }
EXPORT int cudaRuntimeGetVersion(int *version) { return *version = 13000, OK; }

// The limits of an H100 SXM.
EXPORT int cudaGetDeviceProperties(struct cudaDeviceProp *p, int index) {
    if (index < 0 || index >= num_devices()) return fail(INVALID_DEVICE);
    memset(p, 0, sizeof *p);
    strcpy(p->name, "NVIDIA H100 80GB HBM3");
    p->totalGlobalMem = device_bytes();
    p->major = 9;
    p->multiProcessorCount = 132;
    p->warpSize = 32;
    p->maxThreadsPerBlock = p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
    p->maxThreadsDim[2] = 64;
    p->maxGridSize[0] = 2147483647;
    p->maxGridSize[1] = p->maxGridSize[2] = 65535;
    p->maxThreadsPerMultiProcessor = 2048;
    p->maxBlocksPerMultiProcessor = 32;
    p->sharedMemPerBlock = 48 << 10;
    p->sharedMemPerBlockOptin = 227 << 10;
    p->sharedMemPerMultiprocessor = 228 << 10;
    p->regsPerBlock = p->regsPerMultiprocessor = p->totalConstMem = 64 << 10;
    p->l2CacheSize = 50 << 20;
    p->persistingL2CacheMaxSize = 32 << 20;
    p->memoryBusWidth = 5120;
    p->textureAlignment = 512;
    p->asyncEngineCount = 3;
    p->concurrentKernels = p->unifiedAddressing = p->streamPrioritiesSupported = 1;
    p->managedMemory = p->cooperativeLaunch = p->canMapHostMemory = 1;
    p->pciBusID = index + 1;
    return OK;
}

EXPORT int cudaDeviceGetAttribute(int *value, int attribute, int index) {
    struct cudaDeviceProp p;
    if (cudaGetDeviceProperties(&p, index)) return INVALID_DEVICE;
    switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock: *value = p.maxThreadsPerBlock; break;
    case cudaDevAttrMaxGridDimX: *value = p.maxGridSize[0]; break;
    case cudaDevAttrMaxGridDimY: case cudaDevAttrMaxGridDimZ: *value = p.maxGridSize[1]; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = p.sharedMemPerBlock; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = p.sharedMemPerBlockOptin; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = p.sharedMemPerMultiprocessor; break;
    case cudaDevAttrWarpSize: *value = p.warpSize; break;
    case cudaDevAttrMaxRegistersPerBlock: *value = p.regsPerBlock; break;
    case cudaDevAttrMaxRegistersPerMultiprocessor: *value = p.regsPerMultiprocessor; break;
    case cudaDevAttrClockRate: *value = 1980000; break;
    case cudaDevAttrMemoryClockRate: *value = 2619000; break;
    case cudaDevAttrGlobalMemoryBusWidth: *value = p.memoryBusWidth; break;
    case cudaDevAttrMultiProcessorCount: *value = p.multiProcessorCount; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = p.maxThreadsPerMultiProcessor; break;
    case cudaDevAttrL2CacheSize: *value = p.l2CacheSize; break;
    case cudaDevAttrComputeCapabilityMajor: *value = p.major; break;
    case cudaDevAttrComputeCapabilityMinor: *value = p.minor; break;
    case cudaDevAttrIntegrated: case cudaDevAttrPageableMemoryAccess: *value = 0; break;
    default: *value = 1;
    }
    return OK;
}

EXPORT int cudaDeviceGetPCIBusId(char *text, int room, int index) {
    return snprintf(text, room, "0000:%02x:00.0", index + 1), OK;
}
EXPORT int cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    return *least = 0, *greatest = -5, OK;
}
EXPORT int cudaDeviceCanAccessPeer(int *can, int a, int b) { return *can = a != b, OK; }
EXPORT int cudaDeviceEnablePeerAccess(int peer, unsigned flags) { return OK; }
EXPORT int cudaMemGetInfo(size_t *free_bytes, size_t *total) {
    *total = device_bytes();
    return *free_bytes = *total - allocated[device], OK;
}

// ---- streams, captures, events, graphs -------------------------------------------------------------

struct stream {
    int priority, blocking;      // blocking: ordered with the legacy stream
    struct capture *capture;     // that records it now
    int position;                // among the streams of the capture
    long clock[MAX_STREAMS];     // how much work of each stream of the capture is before its end
};
struct capture {
    int mode;
    pthread_t thread;
    struct stream *origin, *streams[MAX_STREAMS];
    int num_streams, invalid;
    long nodes;
    struct capture *next;
};
struct event {
    struct timespec time;
    int recorded;
    struct capture *capture;     // in which it was recorded; captures are never freed
    long clock[MAX_STREAMS];
};
struct graph { long nodes; };

static struct stream legacy = {.blocking = 1};
static struct capture *captures; // that go on
static __thread int interaction = cudaStreamCaptureModeGlobal;

static struct stream *stream_of(void *handle) {
    return (uintptr_t)handle <= 2 ? &legacy : handle;  // 1 and 2 name default streams
}

static int refuse(const char *call, int error) {
    report(COUNT_refused, call);
    fprintf(stderr, "nullcuda: CUDA refuses %s while a stream is captured (error %d)\n", call, error);
    for (struct capture *c = captures; c; c = c->next)
        if (pthread_equal(c->thread, pthread_self())) c->invalid = 1;
    return fail(error);
}

// Whether a call that might wait for recorded work is refused; see cudaThreadExchangeStreamCaptureMode.
static int unsafe(const char *call) {
    if (!captures || interaction == cudaStreamCaptureModeRelaxed) return OK;
    for (struct capture *c = captures; c; c = c->next) {
        int own = pthread_equal(c->thread, pthread_self());
        int forbids = own ? c->mode != cudaStreamCaptureModeRelaxed
                          : c->mode == cudaStreamCaptureModeGlobal &&
                                interaction == cudaStreamCaptureModeGlobal;
        if (forbids) return refuse(call, CAPTURE_UNSUPPORTED);
    }
    return OK;
}

int host_wait(const char *call, void *handle) {
    report(COUNT_waits, call);
    if (handle && stream_of(handle)->capture) return refuse(call, CAPTURE_UNSUPPORTED);
    return unsafe(call);
}

int submit(enum counter counter, const char *name, void *handle) {
    if (!captures) return report(counter, name), OK;
    struct stream *stream = stream_of(handle);
    if (stream->capture) {
        if (nullcuda_hook) nullcuda_hook("captured", name);
        count(COUNT_captured);
        stream->capture->nodes++;
        stream->clock[stream->position]++;
        return OK;
    }
    for (struct capture *c = captures; c; c = c->next) {
        if (stream == &legacy && c->origin->blocking) return refuse(name, CAPTURE_IMPLICIT);
        if (pthread_equal(c->thread, pthread_self())) report(COUNT_outside_capture, name);
    }
    return report(counter, name), OK;
}

EXPORT int cudaStreamCreateWithPriority(void **handle, unsigned flags, int priority) {
    struct stream *stream = calloc(1, sizeof *stream);
    stream->priority = priority;
    stream->blocking = !(flags & cudaStreamNonBlocking);
    return *handle = stream, OK;
}
EXPORT int cudaStreamCreate(void **handle) { return cudaStreamCreateWithPriority(handle, 0, 0); }
EXPORT int cudaStreamDestroy(void *handle) { return OK; }
EXPORT int cudaStreamGetPriority(void *handle, int *priority) {
    return *priority = stream_of(handle)->priority, OK;
}
EXPORT int cudaStreamSynchronize(void *handle) {
    return host_wait("cudaStreamSynchronize", handle);
}
EXPORT int cudaDeviceSynchronize(void) { return host_wait("cudaDeviceSynchronize", NULL); }
EXPORT int cudaStreamQuery(void *handle) {
    if (stream_of(handle)->capture) return refuse("cudaStreamQuery", CAPTURE_UNSUPPORTED);
    return unsafe("cudaStreamQuery");
}
EXPORT int cudaLaunchHostFunc(void *handle, void (*function)(void *), void *data) {
    if (!stream_of(handle)->capture) function(data);
    return submit(COUNT_torch_launches, "cudaLaunchHostFunc", handle);
}

static void join(struct capture *capture, struct stream *stream) {
    stream->capture = capture;
    stream->position = capture->num_streams;
    memset(stream->clock, 0, sizeof stream->clock);
    if (capture->num_streams == MAX_STREAMS) abort();
    capture->streams[capture->num_streams++] = stream;
}

static void merge(long *clock, const long *other) {
    for (int i = 0; i < MAX_STREAMS; i++)
        if (other[i] > clock[i]) clock[i] = other[i];
}

EXPORT int cudaStreamBeginCapture(void *handle, int mode) {
    struct stream *stream = stream_of(handle);
    if (stream == &legacy || stream->capture) return fail(CAPTURE_UNSUPPORTED);
    struct capture *capture = calloc(1, sizeof *capture);
    capture->mode = mode;
    capture->thread = pthread_self();
    capture->origin = stream;
    join(capture, stream);
    pthread_mutex_lock(&mutex);
    capture->next = captures;
    captures = capture;
    pthread_mutex_unlock(&mutex);
    return OK;
}

EXPORT int cudaStreamEndCapture(void *handle, void **graph) {
    struct stream *stream = stream_of(handle);
    struct capture *capture = stream->capture;
    *graph = NULL;
    if (!capture || capture->origin != stream) return fail(CAPTURE_UNMATCHED);
    int error = OK;
    if (capture->mode != cudaStreamCaptureModeRelaxed &&
        !pthread_equal(capture->thread, pthread_self()))
        error = CAPTURE_WRONG_THREAD;
    for (int i = 0; i < capture->num_streams; i++) {
        struct stream *other = capture->streams[i];
        if (!error && stream->clock[i] < other->clock[i]) error = CAPTURE_UNJOINED;
        other->capture = NULL;
    }
    pthread_mutex_lock(&mutex);
    for (struct capture **c = &captures; *c; c = &(*c)->next)
        if (*c == capture) {
            *c = capture->next;
            break;
        }
    pthread_mutex_unlock(&mutex);
    if (capture->invalid) return fail(CAPTURE_INVALIDATED);
    if (error) return refuse("cudaStreamEndCapture", error);
    struct graph *made = calloc(1, sizeof *made);
    made->nodes = capture->nodes;
    return *graph = made, OK;
}

EXPORT int cudaStreamIsCapturing(void *handle, int *status) {
    struct capture *capture = stream_of(handle)->capture;
    return *status = !capture ? cudaStreamCaptureStatusNone
                     : capture->invalid ? cudaStreamCaptureStatusInvalidated
                                        : cudaStreamCaptureStatusActive, OK;
}
EXPORT int cudaStreamGetCaptureInfo(void *handle, int *status, unsigned long long *id, void **graph,
                                    const void ***dependencies, const void **edges, size_t *many) {
    if (id) *id = (unsigned long long)(uintptr_t)stream_of(handle)->capture;
    if (graph) *graph = stream_of(handle)->capture;
    if (dependencies) *dependencies = NULL;
    if (edges) *edges = NULL;
    if (many) *many = 0;
    return cudaStreamIsCapturing(handle, status);
}
EXPORT int cudaThreadExchangeStreamCaptureMode(int *mode) {
    int before = interaction;
    interaction = *mode;
    return *mode = before, OK;
}

EXPORT int cudaGraphInstantiateWithFlags(void **executable, struct graph *graph,
                                         unsigned long long flags) {
    struct graph *copy = malloc(sizeof *copy);
    *copy = *graph;
    return *executable = copy, OK;
}
EXPORT int cudaGraphGetNodes(struct graph *graph, void **nodes, size_t *many) {
    return *many = graph->nodes, OK;
}
EXPORT int cudaGraphLaunch(struct graph *executable, void *stream) {
    __atomic_fetch_add(&nullcuda_counters[COUNT_graph_nodes], executable->nodes, __ATOMIC_RELAXED);
    num_fresh = 0;
    return submit(COUNT_graph_launches, "cudaGraphLaunch", stream);
}
EXPORT int cudaGraphDestroy(struct graph *graph) { return free(graph), OK; }
EXPORT int cudaGraphExecDestroy(struct graph *graph) { return free(graph), OK; }

EXPORT int cudaEventCreateWithFlags(void **event, unsigned flags) {
    return *event = calloc(1, sizeof(struct event)), OK;
}
EXPORT int cudaEventCreate(void **event) { return cudaEventCreateWithFlags(event, 0); }
EXPORT int cudaEventDestroy(struct event *event) { return free(event), OK; }
EXPORT int cudaEventRecordWithFlags(struct event *event, void *handle, unsigned flags) {
    struct stream *stream = stream_of(handle);
    count(COUNT_event_records);
    clock_gettime(CLOCK_MONOTONIC, &event->time);
    event->recorded = 1;
    event->capture = stream->capture;
    if (stream->capture) memcpy(event->clock, stream->clock, sizeof event->clock);
    return OK;
}
EXPORT int cudaEventRecord(struct event *event, void *handle) {
    return cudaEventRecordWithFlags(event, handle, 0);
}
EXPORT int cudaEventSynchronize(struct event *event) {
    report(COUNT_waits, "cudaEventSynchronize");
    if (event->capture) return refuse("cudaEventSynchronize", CAPTURED_EVENT);
    return unsafe("cudaEventSynchronize");
}
EXPORT int cudaEventQuery(struct event *event) {
    count(COUNT_event_queries);
    if (event->capture) return refuse("cudaEventQuery", CAPTURED_EVENT);
    return unsafe("cudaEventQuery");
}
EXPORT int cudaEventElapsedTime(float *milliseconds, struct event *start, struct event *end) {
    *milliseconds = (end->time.tv_sec - start->time.tv_sec) * 1e3 +
                    (end->time.tv_nsec - start->time.tv_nsec) / 1e6;
    if (*milliseconds <= 0) *milliseconds = 1e-3f;
    return OK;
}
EXPORT int cudaStreamWaitEvent(void *handle, struct event *event, unsigned flags) {
    struct stream *stream = stream_of(handle);
    count(COUNT_stream_waits);
    if (!event->recorded || flags & cudaEventWaitExternal) return OK;
    struct capture *capture = event->capture;
    if (!capture)
        return stream->capture ? refuse("cudaStreamWaitEvent", CAPTURE_ISOLATION) : OK;
    if (capture->origin->capture != capture) return refuse("cudaStreamWaitEvent", CAPTURED_EVENT);
    if (stream->capture && stream->capture != capture)
        return refuse("cudaStreamWaitEvent", CAPTURE_MERGE);
    if (stream == &legacy) return refuse("cudaStreamWaitEvent", CAPTURE_IMPLICIT);
    if (!stream->capture) join(capture, stream);
    merge(stream->clock, event->clock);
    return OK;
}

// ---- memory ----------------------------------------------------------------------------------------

EXPORT int cudaMalloc(void **pointer, size_t bytes) {
    if (unsafe("cudaMalloc")) return CAPTURE_UNSUPPORTED;
    count(COUNT_device_allocations);
    size_t rounded = (bytes + GRANULE - 1) / GRANULE * GRANULE;
    pthread_mutex_lock(&mutex);
    if (!space) space = reserve(MAX_DEVICES * SPAN);
    int fits = space && allocated[device] + rounded <= device_bytes() &&
               reached[device] + rounded <= SPAN;
    if (fits) {
        *pointer = space + device * SPAN + reached[device];
        granules[device][reached[device] / GRANULE] = rounded / GRANULE;
        allocated[device] += rounded;
        reached[device] += rounded;
    }
    pthread_mutex_unlock(&mutex);
    return fits ? OK : fail(OUT_OF_MEMORY);
}
EXPORT int cudaFree(void *pointer) {
    if (!pointer) return OK;
    if (unsafe("cudaFree")) return CAPTURE_UNSUPPORTED;
    int owner = device_of(pointer);
    if (owner < 0) return fail(INVALID_VALUE);
    size_t granule = ((char *)pointer - space) % SPAN / GRANULE;
    size_t bytes = granules[owner][granule] * GRANULE;
    if (!bytes) return fail(INVALID_VALUE);
    pthread_mutex_lock(&mutex);
    granules[owner][granule] = 0;
    allocated[owner] -= bytes;
    pthread_mutex_unlock(&mutex);
    return madvise(pointer, bytes, MADV_DONTNEED), OK;
}
EXPORT int cudaMallocAsync(void **pointer, size_t bytes, void *stream) {
    return cudaMalloc(pointer, bytes);
}
EXPORT int cudaFreeAsync(void *pointer, void *stream) { return cudaFree(pointer); }

EXPORT int cudaHostRegister(void *pointer, size_t bytes, unsigned flags) {
    pthread_mutex_lock(&mutex);
    int i = 0;
    while (i < num_pinned && pinned[i].bytes) i++;
    int fits = i < (int)(sizeof pinned / sizeof *pinned);
    if (fits) {
        pinned[i].first = pointer;
        pinned[i].bytes = bytes;
        if (i == num_pinned) num_pinned++;
    }
    pthread_mutex_unlock(&mutex);
    return fits ? OK : fail(OUT_OF_MEMORY);
}
static size_t unregister(void *pointer) {
    size_t bytes = 0;
    pthread_mutex_lock(&mutex);
    for (int i = 0; i < num_pinned; i++)
        if (pinned[i].first == pointer && pinned[i].bytes) {
            bytes = pinned[i].bytes;
            pinned[i].first = NULL;
            pinned[i].bytes = 0;
            break;
        }
    pthread_mutex_unlock(&mutex);
    return bytes;
}
EXPORT int cudaHostUnregister(void *pointer) {
    return unregister(pointer) ? OK : fail(INVALID_VALUE);
}
EXPORT int cudaHostAlloc(void **pointer, size_t bytes, unsigned flags) {
    if (unsafe("cudaHostAlloc")) return CAPTURE_UNSUPPORTED;
    count(COUNT_host_allocations);
    *pointer = reserve(bytes ? bytes : 1);
    return *pointer ? cudaHostRegister(*pointer, bytes, 0) : fail(OUT_OF_MEMORY);
}
EXPORT int cudaFreeHost(void *pointer) {
    if (unsafe("cudaFreeHost")) return CAPTURE_UNSUPPORTED;
    size_t bytes = pointer ? unregister(pointer) : 0;
    return bytes ? munmap(pointer, bytes), OK : OK;
}

EXPORT int cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *pointer) {
    int kind = kind_of(pointer);
    memset(attributes, 0, sizeof *attributes);
    attributes->type = kind == ON_DEVICE ? cudaMemoryTypeDevice
                       : kind == PINNED  ? cudaMemoryTypeHost
                                         : cudaMemoryTypeUnregistered;
    attributes->device = kind == ON_DEVICE ? device_of(pointer) : -1;
    attributes->devicePointer = kind == PAGEABLE ? NULL : (void *)pointer;
    attributes->hostPointer = kind == ON_DEVICE ? NULL : (void *)pointer;
    return OK;
}

static void carry(void *to, const void *from, size_t bytes) {
    if (bytes > CARRIED) return;
    int known = kind_of(from) != ON_DEVICE;
    pthread_mutex_lock(&mutex);
    for (int i = 0; i < num_fresh; i++) {
        size_t offset = (const char *)from - fresh[i].first;
        known |= offset < fresh[i].bytes && offset + bytes <= fresh[i].bytes;
    }
    if (known)
        memmove(to, from, bytes);
    else if (kind_of(to) != ON_DEVICE)
        memset(to, 0, bytes);
    if (known && kind_of(to) == ON_DEVICE) {
        int slot = num_fresh < MAX_FRESH ? num_fresh++ : MAX_FRESH - 1;
        fresh[slot].first = to;
        fresh[slot].bytes = bytes;
    }
    pthread_mutex_unlock(&mutex);
}

static int copy(const char *call, void *to, const void *from, size_t bytes, void *stream) {
    int target = kind_of(to), source = kind_of(from);
    if (stream_of(stream)->capture && (target == PAGEABLE || source == PAGEABLE))
        return refuse(call, CAPTURE_UNSUPPORTED);
    enum counter counter = target != ON_DEVICE   ? COUNT_copies_to_host
                           : source != ON_DEVICE ? COUNT_copies_from_host
                                                 : COUNT_copies_on_device;
    if (!stream_of(stream)->capture) carry(to, from, bytes);
    return submit(counter, call, stream);
}
EXPORT int cudaMemcpy(void *to, const void *from, size_t bytes, int direction) {
    int error = host_wait("cudaMemcpy", NULL);
    return error ? error : copy("cudaMemcpy", to, from, bytes, NULL);
}
EXPORT int cudaMemcpyAsync(void *to, const void *from, size_t bytes, int direction, void *stream) {
    return copy("cudaMemcpyAsync", to, from, bytes, stream);
}
EXPORT int cudaMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device,
                               size_t bytes, void *stream) {
    return copy("cudaMemcpyPeerAsync", to, from, bytes, stream);
}
EXPORT int cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch,
                             size_t width, size_t height, int direction, void *stream) {
    if (width * height <= CARRIED && !stream_of(stream)->capture)
        for (size_t row = 0; row < height; row++)
            carry((char *)to + row * to_pitch, (const char *)from + row * from_pitch, width);
    return copy("cudaMemcpy2DAsync", to, from, 0, stream);
}
EXPORT int cudaMemsetAsync(void *pointer, int value, size_t bytes, void *stream) {
    return submit(COUNT_fills, "cudaMemsetAsync", stream);
}
EXPORT int cudaMemset(void *pointer, int value, size_t bytes) {
    if (unsafe("cudaMemset")) return CAPTURE_UNSUPPORTED;
    return cudaMemsetAsync(pointer, value, bytes, NULL);
}

// ---- launches ----------------------------------------------------------------------------------------

int launch(enum counter counter, const char *name, const unsigned grid[3], const unsigned block[3],
           void *stream) {
    unsigned long threads = (unsigned long)block[0] * block[1] * block[2];
    if (!grid[0] || !grid[1] || !grid[2] || grid[0] > 2147483647u || grid[1] > 65535 ||
        grid[2] > 65535 || !threads || threads > 1024) {
        fprintf(stderr, "nullcuda: %s: a grid of %u x %u x %u blocks of %u x %u x %u threads\n", name,
                grid[0], grid[1], grid[2], block[0], block[1], block[2]);
        return fail(INVALID_CONFIGURATION);
    }
    num_fresh = 0;
    return submit(counter, name, stream);
}

// Of Triton's launches, where they are not compiled.
EXPORT int nullcuda_launch(const char *name, unsigned x, unsigned y, unsigned z, unsigned threads,
                           void *stream) {
    return launch(COUNT_triton_launches, name, (unsigned[]){x, y, z}, (unsigned[]){threads, 1, 1},
                  stream);
}

static int launch_function(const void *function, const unsigned *grid, const unsigned *block,
                           void *stream) {
    return launch(COUNT_torch_launches, kernel_name(function), grid, block, stream);
}

typedef struct { unsigned x, y, z; } sizes;

static __thread struct { sizes grid, block; size_t shared; void *stream; } pushed[8];
static __thread int num_pushed;

EXPORT unsigned __cudaPushCallConfiguration(sizes grid, sizes block, size_t shared, void *stream) {
    pushed[num_pushed % 8].grid = grid;
    pushed[num_pushed % 8].block = block;
    pushed[num_pushed % 8].shared = shared;
    pushed[num_pushed % 8].stream = stream;
    return num_pushed++, OK;
}
EXPORT int __cudaPopCallConfiguration(sizes *grid, sizes *block, size_t *shared, void **stream) {
    num_pushed--;
    *grid = pushed[num_pushed % 8].grid;
    *block = pushed[num_pushed % 8].block;
    *shared = pushed[num_pushed % 8].shared;
    return *stream = pushed[num_pushed % 8].stream, OK;
}
EXPORT int __cudaGetKernel(void **kernel, const void *function) {
    return *kernel = (void *)function, OK;
}
EXPORT int cudaLaunchKernel(const void *function, sizes grid, sizes block, void **arguments,
                            size_t shared, void *stream) {
    return launch_function(function, &grid.x, &block.x, stream);
}
EXPORT int __cudaLaunchKernel(const void *function, sizes grid, sizes block, void **arguments,
                              size_t shared, void *stream) {
    return launch_function(function, &grid.x, &block.x, stream);
}
EXPORT int cudaLaunchCooperativeKernel(const void *function, sizes grid, sizes block,
                                       void **arguments, size_t shared, void *stream) {
    return launch_function(function, &grid.x, &block.x, stream);
}
EXPORT int cudaLaunchKernelExC(const struct cudaLaunchConfig_st *config, const void *function,
                               void **arguments) {
    return launch_function(function, &config->gridDim.x, &config->blockDim.x, config->stream);
}
EXPORT int cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *function) {
    memset(attributes, 0, sizeof *attributes);
    attributes->maxThreadsPerBlock = 1024;
    attributes->numRegs = 32;
    attributes->ptxVersion = attributes->binaryVersion = 90;
    attributes->maxDynamicSharedSizeBytes = 227 << 10;
    return OK;
}
EXPORT int cudaFuncSetAttribute(const void *function, int attribute, int value) { return OK; }
EXPORT int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *function,
                                                                  int threads, size_t shared,
                                                                  unsigned flags) {
    return *blocks = 2, OK;
}
EXPORT int cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *function,
                                                         int threads, size_t shared) {
    return *blocks = 2, OK;
}
EXPORT int cudaGetSymbolAddress(void **pointer, const void *symbol) {
    static char zeros[1 << 16];
    return *pointer = zeros, OK;
}
EXPORT int cudaMemcpyToSymbol(const void *symbol, const void *from, size_t bytes, size_t offset,
                              int direction) {
    return unsafe("cudaMemcpyToSymbol");
}

// ---- the rest ------------------------------------------------------------------------------------------

EXPORT int cudaGetLastError(void) {
    int error = last_error;
    last_error = OK;
    return error;
}
EXPORT int cudaPeekAtLastError(void) { return last_error; }

static const struct { int error; const char *name, *text; } errors[] = {
    {OK, "cudaSuccess", "no error"},
    {INVALID_VALUE, "cudaErrorInvalidValue", "invalid argument"},
    {OUT_OF_MEMORY, "cudaErrorMemoryAllocation", "out of memory"},
    {INVALID_CONFIGURATION, "cudaErrorInvalidConfiguration", "invalid configuration argument"},
    {INVALID_DEVICE, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {NOT_SUPPORTED, "cudaErrorNotSupported", "the null device does not know this call"},
    {CAPTURE_UNSUPPORTED, "cudaErrorStreamCaptureUnsupported",
     "operation not permitted when stream is capturing"},
    {CAPTURE_INVALIDATED, "cudaErrorStreamCaptureInvalidated",
     "operation failed due to a previous error during capture"},
    {CAPTURE_UNJOINED, "cudaErrorStreamCaptureUnjoined",
     "capturing stream has unjoined work"},
    {CAPTURE_ISOLATION, "cudaErrorStreamCaptureIsolation",
     "dependency created on uncaptured work in another stream"},
    {CAPTURED_EVENT, "cudaErrorCapturedEvent",
     "operation not permitted on an event last recorded in a capturing stream"},
};
EXPORT const char *cudaGetErrorString(int error) {
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].error == error) return errors[i].text;
    return "an error of the null device";
}
EXPORT const char *cudaGetErrorName(int error) {
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].error == error) return errors[i].name;
    return "cudaErrorUnknown";
}

static int unknown_driver_call(void) { return NOT_SUPPORTED; }

EXPORT int cudaGetDriverEntryPointByVersion(const char *name, void **pointer, unsigned version,
                                            unsigned long long flags, int *status) {
    void *symbol = dlsym(RTLD_DEFAULT, name);
    *pointer = symbol ? symbol : (void *)unknown_driver_call;
    if (status) *status = 0;
    return OK;
}
EXPORT int cudaProfilerStart(void) { return OK; }
EXPORT int cudaProfilerStop(void) { return OK; }

// What the generated part of the library says of calls that nothing here answers.
int not_supported(const char *call) {
    count(COUNT_unsupported);
    fprintf(stderr, "nullcuda: %s is not a call that the null device knows\n", call);
    return fail(NOT_SUPPORTED);
}
