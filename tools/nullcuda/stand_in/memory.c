// SPDX-License-Identifier: Apache-2.0
// Devices, their memory, pinned memory, copies.
//
// Memory is address space of the host that nobody touches. A kernel may write anywhere, so what was
// copied to a device is there until the next one; what kernels would have written reads as zero.
#define _GNU_SOURCE
#include "nullcuda.h"
#include <driver_types.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define CARRIED (16ul << 20)     // bytes of a copy; larger ones arrive as zeros
#define MAX_FRESH 64
#define SPAN (2ul << 40)         // addresses of a device; they are never used again
#define GRANULE (2ul << 20)      // what a device allocates in
#define MAX_DEVICES 8

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

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

void forget_copies(void) { num_fresh = 0; }

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
    if (is_captured(stream) && (target == PAGEABLE || source == PAGEABLE))
        return refuse(call, CAPTURE_UNSUPPORTED);
    enum counter counter = target != ON_DEVICE   ? COUNT_copies_to_host
                           : source != ON_DEVICE ? COUNT_copies_from_host
                                                 : COUNT_copies_on_device;
    if (!is_captured(stream)) carry(to, from, bytes);
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
    if (width * height <= CARRIED && !is_captured(stream))
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
