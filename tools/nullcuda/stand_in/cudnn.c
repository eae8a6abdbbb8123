// SPDX-License-Identifier: Apache-2.0
// cuDNN's graphs of operations, by which torch computes attention: any graph has one plan without a
// workspace, and carrying it out is one launch. The rest of cuDNN is NVIDIA's own, and finds no GPU.
#include "nullcuda.h"
#include <cudnn.h>
#include <stdlib.h>
#include <string.h>

struct handle { void *stream; };

EXPORT cudnnStatus_t cudnnCreate(cudnnHandle_t *made) {
    return *made = calloc(1, sizeof(struct handle)), CUDNN_STATUS_SUCCESS;
}
EXPORT cudnnStatus_t cudnnDestroy(cudnnHandle_t handle) {
    return free(handle), CUDNN_STATUS_SUCCESS;
}
EXPORT cudnnStatus_t cudnnSetStream(cudnnHandle_t handle, cudaStream_t stream) {
    return ((struct handle *)handle)->stream = stream, CUDNN_STATUS_SUCCESS;
}
EXPORT cudnnStatus_t cudnnGetStream(cudnnHandle_t handle, cudaStream_t *stream) {
    return *stream = ((struct handle *)handle)->stream, CUDNN_STATUS_SUCCESS;
}
EXPORT size_t cudnnGetVersion(void) { return CUDNN_VERSION; }

EXPORT cudnnStatus_t cudnnBackendCreateDescriptor(cudnnBackendDescriptorType_t type,
                                                  cudnnBackendDescriptor_t *made) {
    return *made = calloc(1, 16), CUDNN_STATUS_SUCCESS;
}
EXPORT cudnnStatus_t cudnnBackendDestroyDescriptor(cudnnBackendDescriptor_t descriptor) {
    return free(descriptor), CUDNN_STATUS_SUCCESS;
}
EXPORT cudnnStatus_t cudnnBackendFinalize(cudnnBackendDescriptor_t descriptor) {
    return CUDNN_STATUS_SUCCESS;
}
EXPORT cudnnStatus_t cudnnBackendSetAttribute(cudnnBackendDescriptor_t descriptor,
                                              cudnnBackendAttributeName_t name,
                                              cudnnBackendAttributeType_t type, int64_t count,
                                              const void *values) {
    return CUDNN_STATUS_SUCCESS;
}

// One engine is found; it has no notes and no knobs, and all of its numbers are zero.
EXPORT cudnnStatus_t cudnnBackendGetAttribute(const cudnnBackendDescriptor_t descriptor,
                                              cudnnBackendAttributeName_t name,
                                              cudnnBackendAttributeType_t type, int64_t asked,
                                              int64_t *count, void *values) {
    int64_t many = 1;
    if (type == CUDNN_TYPE_NUMERICAL_NOTE || type == CUDNN_TYPE_BEHAVIOR_NOTE ||
        name == CUDNN_ATTR_ENGINE_KNOB_INFO || name == CUDNN_ATTR_ENGINECFG_KNOB_CHOICES)
        many = 0;
    if (count) *count = many;
    if (values && asked && many && type != CUDNN_TYPE_BACKEND_DESCRIPTOR)
        memset(values, 0, type == CUDNN_TYPE_CHAR                                      ? 1
                          : type == CUDNN_TYPE_INT64 || type == CUDNN_TYPE_VOID_PTR ? 8
                                                                                       : 4);
    return CUDNN_STATUS_SUCCESS;
}
EXPORT cudnnStatus_t cudnnBackendExecute(cudnnHandle_t handle, cudnnBackendDescriptor_t plan,
                                         cudnnBackendDescriptor_t variables) {
    int error = submit(COUNT_torch_launches, "cudnnBackendExecute", ((struct handle *)handle)->stream);
    return error ? CUDNN_STATUS_EXECUTION_FAILED : CUDNN_STATUS_SUCCESS;
}
