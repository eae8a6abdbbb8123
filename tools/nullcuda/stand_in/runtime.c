// SPDX-License-Identifier: Apache-2.0
// Counters, errors and the calls of the CUDA runtime that are about neither memory nor streams nor
// kernels.
#define _GNU_SOURCE
#include "nullcuda.h"
#include <dlfcn.h>
#include <stdio.h>

EXPORT long nullcuda_counters[NUM_COUNTERS];
EXPORT const char *nullcuda_counter_names[NUM_COUNTERS + 1] = {
#define X(name) #name,
    COUNTERS(X)
#undef X
    NULL,
};
// Called at each launch, copy, fill and wait of the host, with the counter's name and what it was.
EXPORT void (*nullcuda_hook)(const char *counter, const char *name);

void count(enum counter counter) {
    __atomic_fetch_add(&nullcuda_counters[counter], 1, __ATOMIC_RELAXED);
}

void report(enum counter counter, const char *name) {
    count(counter);
    if (nullcuda_hook) nullcuda_hook(nullcuda_counter_names[counter], name);
}

static __thread int last_error;

int fail(int error) { return last_error = error; }

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
