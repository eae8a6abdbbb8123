// SPDX-License-Identifier: Apache-2.0
// Streams, events and graphs. They keep only what captures need: which streams record, and how far
// each has seen the others. What CUDA refuses while a stream is captured is refused.
#include "nullcuda.h"
#include <driver_types.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define MAX_STREAMS 64           // of one capture

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

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

int is_captured(void *handle) { return stream_of(handle)->capture != NULL; }

int refuse(const char *call, int error) {
    report(COUNT_refused, call);
    fprintf(stderr, "nullcuda: CUDA refuses %s while a stream is captured (error %d)\n", call, error);
    for (struct capture *c = captures; c; c = c->next)
        if (pthread_equal(c->thread, pthread_self())) c->invalid = 1;
    return fail(error);
}

// Whether a call that might wait for recorded work is refused; see cudaThreadExchangeStreamCaptureMode.
int unsafe(const char *call) {
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
    forget_copies();
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
