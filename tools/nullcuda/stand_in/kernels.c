// SPDX-License-Identifier: Apache-2.0
// Kernels by name, and their launches, which do nothing.
#include "nullcuda.h"
#include <driver_types.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

// Kernels of libraries register their host function with a name; a launch knows only the function.
static struct registered { const void *function; const char *name; } *registered;
static size_t num_registered, room_registered;

static int by_function(const void *a, const void *b) {
    uintptr_t x = (uintptr_t)((const struct registered *)a)->function;
    uintptr_t y = (uintptr_t)((const struct registered *)b)->function;
    return x < y ? -1 : x > y;
}

static const char *kernel_name(const void *function) {
    if (!nullcuda_hook) return "a kernel of torch";  // who counts by name has set a hook
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

int launch(enum counter counter, const char *name, const unsigned grid[3], const unsigned block[3],
           void *stream) {
    unsigned long threads = (unsigned long)block[0] * block[1] * block[2];
    if (!grid[0] || !grid[1] || !grid[2] || grid[0] > 2147483647u || grid[1] > 65535 ||
        grid[2] > 65535 || !threads || threads > 1024) {
        fprintf(stderr, "nullcuda: %s: a grid of %u x %u x %u blocks of %u x %u x %u threads\n", name,
                grid[0], grid[1], grid[2], block[0], block[1], block[2]);
        return INVALID_CONFIGURATION;  // of the driver too, which has no last error
    }
    forget_copies();
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
    int error = launch(COUNT_torch_launches, kernel_name(function), grid, block, stream);
    return error ? fail(error) : OK;
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
