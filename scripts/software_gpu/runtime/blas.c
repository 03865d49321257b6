/* cuBLAS and cuBLASLt: handles, settings, and matrix products that compute nothing.
 *
 * torch allocates the workspaces itself, one for each handle and stream, so handles must differ.
 * The wheel of cuBLAS has its headers, but is 400 MB: the few declarations that are needed are here.
 */
#include "runtime.h"
#include <string.h>

typedef struct { cudaStream_t stream; uintptr_t pointer_mode, math_mode; } Handle;

static Handle handles[1 << 12];
static int handle_count;

EXPORT int cublasCreate_v2(Handle **handle) {
  if (handle_count == 1 << 12) return unimplemented("more than 4096 cuBLAS handles");
  *handle = &handles[handle_count++];
  return 0;
}
EXPORT int cublasDestroy_v2(Handle *handle) { return 0; }
EXPORT int cublasSetStream_v2(Handle *handle, cudaStream_t stream) { handle->stream = stream; return 0; }
EXPORT int cublasSetWorkspace_v2(Handle *handle, void *workspace, size_t bytes) { return 0; }
EXPORT int cublasSetSmCountTarget(Handle *handle, int count) { return 0; }
EXPORT int cublasSetMathMode(Handle *handle, int mode) { handle->math_mode = mode; return 0; }
EXPORT int cublasGetMathMode(Handle *handle, int *mode) { *mode = handle->math_mode; return 0; }
EXPORT int cublasSetPointerMode_v2(Handle *handle, int mode) { handle->pointer_mode = mode; return 0; }
EXPORT int cublasGetPointerMode_v2(Handle *handle, int *mode) { *mode = handle->pointer_mode; return 0; }
EXPORT const char *cublasGetStatusName(int status) { return status ? "error" : "success"; }
EXPORT const char *cublasGetStatusString(int status) { return status ? "error" : "success"; }

/* A product with any further arguments: a kernel on the handle's stream. */
#define PRODUCT(name) EXPORT int name(Handle *handle) { record_kernel(handle->stream, #name); return 0; }
PRODUCT(cublasSgemm_v2)
PRODUCT(cublasDgemm_v2)
PRODUCT(cublasCgemm_v2)
PRODUCT(cublasZgemm_v2)
PRODUCT(cublasSgemmEx)
PRODUCT(cublasGemmEx)
PRODUCT(cublasSgemmStridedBatched)
PRODUCT(cublasDgemmStridedBatched)
PRODUCT(cublasCgemmStridedBatched)
PRODUCT(cublasZgemmStridedBatched)
PRODUCT(cublasGemmStridedBatchedEx)
PRODUCT(cublasSgemv_v2)
PRODUCT(cublasDgemv_v2)
PRODUCT(cublasCgemv_v2)
PRODUCT(cublasZgemv_v2)
PRODUCT(cublasSdot_v2)
PRODUCT(cublasDdot_v2)
PRODUCT(cublasDotEx)

EXPORT int cublasLtMatmul(
    void *handle, void *product, const void *alpha, const void *a, void *a_layout, const void *b,
    void *b_layout, const void *beta, const void *c, void *c_layout, void *d, void *d_layout,
    const void *algorithm, void *workspace, size_t workspace_bytes, cudaStream_t stream) {
  record_kernel(stream, "cublasLtMatmul");
  return 0;
}

/* cuBLASLt describes a product by objects, which nothing reads here. */
#define DESCRIPTION(name) EXPORT int name(void) { return 0; }
DESCRIPTION(cublasLtMatmulDescDestroy)
DESCRIPTION(cublasLtMatmulDescSetAttribute)
DESCRIPTION(cublasLtMatmulPreferenceDestroy)
DESCRIPTION(cublasLtMatmulPreferenceSetAttribute)
DESCRIPTION(cublasLtMatrixLayoutDestroy)
DESCRIPTION(cublasLtMatrixLayoutSetAttribute)
static char description;
EXPORT int cublasLtMatmulDescCreate(void **created, int compute, int scale) { *created = &description; return 0; }
EXPORT int cublasLtMatmulPreferenceCreate(void **created) { *created = &description; return 0; }
EXPORT int cublasLtMatrixLayoutCreate(void **created, int type, uint64_t rows, uint64_t columns, int64_t stride) {
  *created = &description;
  return 0;
}

/* cublasLtMatmulHeuristicResult_t: an algorithm (64 bytes), its workspace (zero), status, waves. */
enum { RESULT_BYTES = 96 };
EXPORT int cublasLtMatmulAlgoGetHeuristic(
    void *handle, void *product, void *a, void *b, void *c, void *d, void *preference, int requested,
    char *results, int *returned) {
  memset(results, 0, RESULT_BYTES);
  *returned = 1;
  return 0;
}
EXPORT size_t cublasLtGetVersion(void) { return 130100; }
