// SPDX-License-Identifier: Apache-2.0
// The CUDA driver as Triton and torch call it: kernels are loaded and launched, and nothing runs.
#include "nullcuda.h"
#include <cuda.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#undef cuModuleUnload
EXPORT int cudaDeviceGetAttribute(int *value, int attribute, int device);

struct function { char name[160]; };

EXPORT CUresult cuInit(unsigned flags) { return CUDA_SUCCESS; }
EXPORT CUresult cuDriverGetVersion(int *version) { return *version = 13000, CUDA_SUCCESS; }
EXPORT CUresult cuDeviceGet(CUdevice *device, int index) { return *device = index, CUDA_SUCCESS; }
EXPORT CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    return (CUresult)cudaDeviceGetAttribute(value, (int)attribute, device);
}
EXPORT CUresult cuCtxGetCurrent(CUcontext *context) {
    return *context = (CUcontext)16, CUDA_SUCCESS;
}
EXPORT CUresult cuCtxSetCurrent(CUcontext context) { return CUDA_SUCCESS; }
EXPORT CUresult cuCtxGetLimit(size_t *value, CUlimit limit) {
    return *value = 1 << 20, CUDA_SUCCESS;
}
EXPORT CUresult cuCtxSetLimit(CUlimit limit, size_t value) { return CUDA_SUCCESS; }
EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    return cuCtxGetCurrent(context);
}
EXPORT CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
    if (flags) *flags = 0;
    if (active) *active = 1;
    return CUDA_SUCCESS;
}
EXPORT CUresult cuModuleLoadData(CUmodule *module, const void *image) {
    return *module = (CUmodule)16, CUDA_SUCCESS;
}
EXPORT CUresult cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned many,
                                   CUjit_option *options, void **values) {
    return cuModuleLoadData(module, image);
}
EXPORT CUresult cuModuleLoad(CUmodule *module, const char *path) {
    return cuModuleLoadData(module, path);
}
EXPORT CUresult cuLinkCreate(unsigned many, CUjit_option *options, void **values,
                             CUlinkState *state) {
    return *state = calloc(1, 16), CUDA_SUCCESS;
}
EXPORT CUresult cuLinkAddData(CUlinkState state, CUjitInputType type, void *data, size_t bytes,
                              const char *name, unsigned many, CUjit_option *options,
                              void **values) {
    return CUDA_SUCCESS;
}
EXPORT CUresult cuLinkComplete(CUlinkState state, void **binary, size_t *bytes) {
    return *binary = state, *bytes = 16, CUDA_SUCCESS;
}
EXPORT CUresult cuModuleUnload(CUmodule module) { return CUDA_SUCCESS; }
EXPORT CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
    struct function *made = calloc(1, sizeof *made);
    strncpy(made->name, name, sizeof made->name - 1);
    return *function = (CUfunction)made, CUDA_SUCCESS;
}
EXPORT CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
    *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
    return CUDA_SUCCESS;
}
EXPORT CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
    return CUDA_SUCCESS;
}
EXPORT CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) {
    return CUDA_SUCCESS;
}
EXPORT CUresult cuOccupancyMaxActiveClusters(int *clusters, CUfunction function,
                                             const CUlaunchConfig *config) {
    return *clusters = 66, CUDA_SUCCESS;
}
EXPORT CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank,
                                       void *address, const cuuint64_t *dims,
                                       const cuuint64_t *strides, const cuuint32_t *box,
                                       const cuuint32_t *steps, CUtensorMapInterleave interleave,
                                       CUtensorMapSwizzle swizzle,
                                       CUtensorMapL2promotion promotion,
                                       CUtensorMapFloatOOBfill fill) {
    return memset(map, 0, sizeof *map), CUDA_SUCCESS;
}
EXPORT CUresult cuPointerGetAttribute(void *data, CUpointer_attribute attribute,
                                      CUdeviceptr pointer) {
    if (kind_of((void *)(uintptr_t)pointer) == PAGEABLE) return CUDA_ERROR_INVALID_VALUE;
    if (attribute == CU_POINTER_ATTRIBUTE_DEVICE_POINTER) *(CUdeviceptr *)data = pointer;
    return CUDA_SUCCESS;
}
EXPORT CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function,
                                 void **parameters, void **more) {
    const char *name = ((struct function *)function)->name;
    unsigned grid[] = {config->gridDimX, config->gridDimY, config->gridDimZ};
    unsigned block[] = {config->blockDimX, config->blockDimY, config->blockDimZ};
    return (CUresult)launch(COUNT_triton_launches, name, grid, block, config->hStream);
}
EXPORT CUresult cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y,
                               unsigned grid_z, unsigned block_x, unsigned block_y,
                               unsigned block_z, unsigned shared, CUstream stream,
                               void **parameters, void **more) {
    const char *name = ((struct function *)function)->name;
    return (CUresult)launch(COUNT_torch_launches, name, (unsigned[]){grid_x, grid_y, grid_z},
                            (unsigned[]){block_x, block_y, block_z}, stream);
}
EXPORT CUresult cuLaunchCooperativeKernel(CUfunction function, unsigned grid_x, unsigned grid_y,
                                          unsigned grid_z, unsigned block_x, unsigned block_y,
                                          unsigned block_z, unsigned shared, CUstream stream,
                                          void **parameters) {
    return cuLaunchKernel(function, grid_x, grid_y, grid_z, block_x, block_y, block_z, shared,
                          stream, parameters, NULL);
}
EXPORT CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, CUfunction function,
                                                            int threads, size_t shared) {
    return *blocks = 2, CUDA_SUCCESS;
}
EXPORT CUresult cuGetErrorString(CUresult error, const char **text) {
    *text = error == CUDA_SUCCESS ? "no error" : "invalid argument";
    return CUDA_SUCCESS;
}
