// SPDX-License-Identifier: Apache-2.0
// The compiler of the few kernels that torch compiles when they are called: it compiles nothing.
#include "nullcuda.h"
#include <nvrtc.h>
#include <stdlib.h>
#include <string.h>

struct _nvrtcProgram { char name[160]; };

EXPORT nvrtcResult nvrtcVersion(int *major, int *minor) {
    return *major = 13, *minor = 0, NVRTC_SUCCESS;
}
EXPORT const char *nvrtcGetErrorString(nvrtcResult result) { return "the null device"; }
EXPORT nvrtcResult nvrtcCreateProgram(nvrtcProgram *made, const char *source, const char *name,
                                      int many, const char *const *headers,
                                      const char *const *names) {
    return *made = calloc(1, sizeof **made), NVRTC_SUCCESS;
}
EXPORT nvrtcResult nvrtcDestroyProgram(nvrtcProgram *program) {
    return free(*program), NVRTC_SUCCESS;
}
EXPORT nvrtcResult nvrtcAddNameExpression(nvrtcProgram program, const char *const name) {
    return strncpy(program->name, name, sizeof program->name - 1), NVRTC_SUCCESS;
}
EXPORT nvrtcResult nvrtcGetLoweredName(nvrtcProgram program, const char *const expression,
                                       const char **name) {
    return *name = program->name, NVRTC_SUCCESS;
}
EXPORT nvrtcResult nvrtcCompileProgram(nvrtcProgram program, int many, const char *const *options) {
    return NVRTC_SUCCESS;
}
EXPORT nvrtcResult nvrtcGetCUBINSize(nvrtcProgram program, size_t *bytes) {
    return *bytes = 1, NVRTC_SUCCESS;
}
EXPORT nvrtcResult nvrtcGetCUBIN(nvrtcProgram program, char *binary) {
    return *binary = 0, NVRTC_SUCCESS;
}
EXPORT nvrtcResult nvrtcGetPTXSize(nvrtcProgram program, size_t *bytes) {
    return *bytes = 1, NVRTC_SUCCESS;
}
EXPORT nvrtcResult nvrtcGetPTX(nvrtcProgram program, char *text) {
    return *text = 0, NVRTC_SUCCESS;
}
EXPORT nvrtcResult nvrtcGetProgramLogSize(nvrtcProgram program, size_t *bytes) {
    return *bytes = 1, NVRTC_SUCCESS;
}
EXPORT nvrtcResult nvrtcGetProgramLog(nvrtcProgram program, char *text) {
    return *text = 0, NVRTC_SUCCESS;
}
