// SPDX-License-Identifier: Apache-2.0
// cuBLAS and cuBLASLt of a device that computes nothing: each product is one launch.
#include "nullcuda.h"
#include <stdlib.h>
#include <string.h>

struct handle { void *stream; int math_mode, pointer_mode; };

int product(const char *name, void *stream) {
    count(COUNT_products);
    return submit(COUNT_torch_launches, name, stream);
}
int product_of(const char *name, struct handle *handle) { return product(name, handle->stream); }

EXPORT int cublasCreate_v2(struct handle **handle) {
    return *handle = calloc(1, sizeof **handle), OK;
}
EXPORT int cublasDestroy_v2(struct handle *handle) { return free(handle), OK; }
EXPORT int cublasSetStream_v2(struct handle *handle, void *stream) {
    return handle->stream = stream, OK;
}
EXPORT int cublasSetWorkspace_v2(struct handle *handle, void *pointer, size_t bytes) { return OK; }
EXPORT int cublasSetMathMode(struct handle *handle, int mode) {
    return handle->math_mode = mode, OK;
}
EXPORT int cublasGetMathMode(struct handle *handle, int *mode) {
    return *mode = handle->math_mode, OK;
}
EXPORT int cublasSetPointerMode_v2(struct handle *handle, int mode) {
    return handle->pointer_mode = mode, OK;
}
EXPORT int cublasGetPointerMode_v2(struct handle *handle, int *mode) {
    return *mode = handle->pointer_mode, OK;
}

// Descriptors of cuBLASLt are never read.
static int descriptor(void **made) { return *made = calloc(1, 16), OK; }
EXPORT int cublasLtMatmulDescCreate(void **made, int compute, int scale) { return descriptor(made); }
EXPORT int cublasLtMatrixLayoutCreate(void **made, int type, unsigned long rows,
                                      unsigned long columns, long stride) {
    return descriptor(made);
}
EXPORT int cublasLtMatmulPreferenceCreate(void **made) { return descriptor(made); }
EXPORT int cublasLtMatmulDescDestroy(void *made) { return free(made), OK; }
EXPORT int cublasLtMatrixLayoutDestroy(void *made) { return free(made), OK; }
EXPORT int cublasLtMatmulPreferenceDestroy(void *made) { return free(made), OK; }
EXPORT int cublasLtMatmulDescSetAttribute(void) { return OK; }
EXPORT int cublasLtMatrixLayoutSetAttribute(void) { return OK; }
EXPORT int cublasLtMatmulPreferenceSetAttribute(void) { return OK; }
EXPORT size_t cublasLtGetVersion(void) { return 130100; }

// One algorithm without a workspace; a result is 96 bytes, of which only zeros matter.
EXPORT int cublasLtMatmulAlgoGetHeuristic(void *handle, void *operation, void *a, void *b, void *c,
                                          void *d, void *preference, int asked, char *results,
                                          int *found) {
    memset(results, 0, 96);
    return *found = 1, OK;
}
EXPORT int cublasLtMatmul(void *handle, void *operation, const void *alpha, const void *a,
                          void *a_layout, const void *b, void *b_layout, const void *beta,
                          const void *c, void *c_layout, void *d, void *d_layout,
                          const void *algorithm, void *workspace, size_t workspace_bytes,
                          void *stream) {
    return product("cublasLtMatmul", stream);
}
