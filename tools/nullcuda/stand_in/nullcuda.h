// SPDX-License-Identifier: Apache-2.0
// What the parts of the null device share: counters, streams and their captures, launches.
#pragma once
#include <stddef.h>

#define EXPORT __attribute__((visibility("default")))

// Results of the CUDA runtime that the null device returns.
enum {
    OK = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    INVALID_CONFIGURATION = 9,
    INVALID_DEVICE = 101,
    NOT_READY = 600,
    NOT_SUPPORTED = 801,
    CAPTURE_UNSUPPORTED = 900,
    CAPTURE_INVALIDATED = 901,
    CAPTURE_MERGE = 902,
    CAPTURE_UNMATCHED = 903,
    CAPTURE_UNJOINED = 904,
    CAPTURE_ISOLATION = 905,
    CAPTURE_IMPLICIT = 906,
    CAPTURED_EVENT = 907,
    CAPTURE_WRONG_THREAD = 908,
};

// Each counter is an entry of `nullcuda_counters`, named by `nullcuda_counter_names`.
#define COUNTERS(X)                                                                              \
    X(torch_launches)       /* kernels, products of cuBLAS among them, put on a stream */         \
    X(triton_launches)                                                                           \
    X(products)             /* calls of cuBLAS */                                                \
    X(graph_launches)                                                                            \
    X(graph_nodes)          /* kernels, copies and fills of the graphs that were launched */      \
    X(captured)             /* launches and copies recorded in a graph instead */                 \
    X(outside_capture)      /* put on another stream by a thread that records */                  \
    X(waits)                /* of the host: for a stream, an event, the device or a copy */       \
    X(refused)              /* calls that CUDA refuses while a stream is captured */              \
    X(copies_to_host)                                                                            \
    X(copies_from_host)                                                                          \
    X(copies_on_device)                                                                          \
    X(fills)                                                                                     \
    X(event_records)                                                                             \
    X(event_queries)                                                                             \
    X(stream_waits)         /* a stream waits for an event: the host does not */                  \
    X(device_allocations)                                                                        \
    X(host_allocations)                                                                          \
    X(unsupported)          /* calls that the null device does not know */

enum counter {
#define X(name) COUNT_##name,
    COUNTERS(X)
#undef X
    NUM_COUNTERS
};

void count(enum counter counter);

// Counts, and tells the hook what it was.
extern void (*nullcuda_hook)(const char *counter, const char *name);
extern long nullcuda_counters[NUM_COUNTERS];
void report(enum counter counter, const char *name);

// Notes an error as the thread's last one and returns it.
int fail(int error);

// Puts work on a stream. `name` says what, for the hook and the table of kernels.
int submit(enum counter counter, const char *name, void *stream);

// A kernel's launch: its sizes are those that a Hopper device takes.
int launch(enum counter counter, const char *name, const unsigned grid[3],
           const unsigned block[3], void *stream);

// The host waits for a stream, or with NULL for a device or an event.
int host_wait(const char *call, void *stream);

// Whether this thread may not make a call while it, or another, records; counts it as refused then.
int unsafe(const char *call);
int refuse(const char *call, int error);
int is_captured(void *stream);

// A kernel has run: what was copied to devices before may be overwritten.
void forget_copies(void);

// 0 for memory of the host that is not pinned, 1 for pinned memory, 2 for the device's.
enum { PAGEABLE = 0, PINNED = 1, ON_DEVICE = 2 };
int kind_of(const void *pointer);
