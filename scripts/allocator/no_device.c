/* A CUDA runtime without a device, for libtorch's caching allocator to run against.
 *
 * Preloaded, it answers the calls that libtorch makes: one device of 80 GiB, whose memory is a range
 * of addresses that nothing ever reads or writes. Addresses only grow, and no request fails. Kernels,
 * cuBLAS and copies do nothing, so a training step runs with libtorch's own allocations, and its
 * numbers mean nothing. Layout of cudaDeviceProp as in CUDA 13.
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef int status;
enum { PAGE = 2 << 20 };
static const size_t total_bytes = (size_t)80 << 30;
static uintptr_t top = 0x700000000000;

static uintptr_t take(size_t size, size_t alignment) {
  uintptr_t found = (top + alignment - 1) / alignment * alignment;
  top = found + size;
  return found;
}

status cudaMalloc(void **pointer, size_t size) { *pointer = (void *)take(size, PAGE); return 0; }
status cudaFree(void *pointer) { return 0; }
status cudaMemGetInfo(size_t *free, size_t *total) { *free = *total = total_bytes; return 0; }
status cudaGetDeviceCount(int *count) { *count = 1; return 0; }
status cudaGetDevice(int *device) { *device = 0; return 0; }
status cudaSetDevice(int device) { return 0; }
status cudaGetLastError(void) { return 0; }
status cudaPeekAtLastError(void) { return 0; }
status cudaDriverGetVersion(int *version) { *version = 13020; return 0; }
status cudaRuntimeGetVersion(int *version) { *version = 13020; return 0; }
status cudaDeviceSynchronize(void) { return 0; }
status cudaStreamSynchronize(void *stream) { return 0; }
status cudaStreamIsCapturing(void *stream, int *capturing) { *capturing = 0; return 0; }
status cudaDeviceCanAccessPeer(int *can, int one, int other) { *can = 0; return 0; }
status cudaDeviceGetAttribute(int *value, int attribute, int device) { *value = 1; return 0; }
status cudaThreadExchangeStreamCaptureMode(int *mode) { return 0; }
status cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { *least = *greatest = 0; return 0; }
status cudaStreamCreateWithPriority(void **stream, unsigned flags, int priority) { return 0; }
status cudaStreamQuery(void *stream) { return 0; }
status cudaEventCreateWithFlags(void **event, unsigned flags) { return 0; }
status cudaEventRecord(void *event, void *stream) { return 0; }
status cudaEventQuery(void *event) { return 0; }
status cudaEventSynchronize(void *event) { return 0; }
status cudaEventDestroy(void *event) { return 0; }
status cudaStreamGetCaptureInfo(void *stream, int *capturing) { *capturing = 0; return 0; }
status cudaDeviceGetDefaultMemPool(void **pool, int device) { return 0; }
status cudaDeviceGetPCIBusId(char *id, int length, int device) { *id = 0; return 0; }

static status properties(char *found, int device) {
  memset(found, 0, 1000);
  strcpy(found, "none");
  *(size_t *)(found + 288) = total_bytes;                       /* totalGlobalMem */
  *(size_t *)(found + 296) = 48 << 10;                          /* sharedMemPerBlock */
  *(int *)(found + 304) = 65536;                                /* regsPerBlock */
  *(int *)(found + 308) = 32;                                   /* warpSize */
  *(int *)(found + 320) = 1024;                                 /* maxThreadsPerBlock */
  memcpy(found + 324, (int[]){1024, 1024, 64}, 12);             /* maxThreadsDim */
  memcpy(found + 336, (int[]){0x7fffffff, 65535, 65535}, 12);   /* maxGridSize */
  *(int *)(found + 360) = 9;                                    /* major */
  *(int *)(found + 384) = 132;                                  /* multiProcessorCount */
  *(int *)(found + 604) = 2048;                                 /* maxThreadsPerMultiProcessor */
  *(size_t *)(found + 624) = 228 << 10;                         /* sharedMemPerMultiprocessor */
  *(size_t *)(found + 672) = 227 << 10;                         /* sharedMemPerBlockOptin */
  *(int *)(found + 688) = 32;                                   /* maxBlocksPerMultiProcessor */
  return 0;
}
status cudaGetDeviceProperties(char *found, int device) { return properties(found, device); }
status cudaGetDeviceProperties_v2(char *found, int device) { return properties(found, device); }

/* The driver, for expandable segments. */
static status reserve(uintptr_t *pointer, size_t size) {
  *pointer = take(size, (size_t)1 << 30);
  return 0;
}
static status create(uint64_t *handle) { static uint64_t last; *handle = ++last; return 0; }
static status version(int *found) { *found = 13020; return 0; }
static status attribute(int *value) { *value = 0; return 0; }
static status nothing(void) { return 0; }

static status entry(const char *name, void **function, int *result) {
  *function = !strcmp(name, "cuMemAddressReserve") ? (void *)reserve
      : !strcmp(name, "cuMemCreate")               ? (void *)create
      : !strcmp(name, "cuDriverGetVersion")        ? (void *)version
      : !strcmp(name, "cuDeviceGetAttribute")      ? (void *)attribute
                                                   : (void *)nothing;
  if (result) *result = 0;
  return 0;
}
status cudaGetDriverEntryPoint(const char *name, void **function, uint64_t flags, int *result) {
  return entry(name, function, result);
}
status cudaGetDriverEntryPointByVersion(
    const char *name, void **function, unsigned version, uint64_t flags, int *result) {
  return entry(name, function, result);
}

/* libtorch asks the driver itself for the device's context. */
status cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
  *flags = 0;
  *active = 1;
  return 0;
}

status cuCtxGetCurrent(void **context) { *context = &top; return 0; }
status cuCtxSetCurrent(void *context) { return 0; }
status cuDevicePrimaryCtxRetain(void **context, int device) { *context = &top; return 0; }

/* NVML, which expandable segments ask whether the device is part of a fabric. It is not. */
status nvmlInit_v2(void) { return 0; }
status nvmlDeviceGetHandleByPciBusId_v2(const char *id, void **device) { *device = id; return 0; }
status nvmlDeviceGetCount_v2(unsigned *count) { *count = 1; return 0; }
status nvmlDeviceGetComputeRunningProcesses(void) { return 3; }
status nvmlDeviceGetComputeRunningProcesses_v3(void) { return 3; }
status nvmlDeviceGetNvLinkRemoteDeviceType(void) { return 3; }
status nvmlDeviceGetNvLinkRemotePciInfo_v2(void) { return 3; }
status nvmlSystemGetCudaDriverVersion_v2(int *found) { *found = 13020; return 0; }
status nvmlDeviceGetGpuFabricInfoV(void *device, char *info) { memset(info + 4, 0, 28); return 0; }

/* What computes does nothing; each cuBLAS handle is another, for torch holds a workspace for each. */
#define NOTHING(name) status name() { return 0; }
NOTHING(cudaLaunchKernel)
NOTHING(cudaLaunchKernelExC)
NOTHING(cudaMemcpy)
NOTHING(cudaMemcpyAsync)
NOTHING(cudaMemset)
NOTHING(cudaMemsetAsync)
NOTHING(cudaEventRecordWithFlags)
NOTHING(cudaStreamWaitEvent)
NOTHING(cublasDestroy_v2)
NOTHING(cublasGemmEx)
NOTHING(cublasGemmStridedBatchedEx)
NOTHING(cublasGetMathMode)
NOTHING(cublasSetMathMode)
NOTHING(cublasSetPointerMode_v2)
NOTHING(cublasSetStream_v2)
NOTHING(cublasSetWorkspace_v2)
NOTHING(cublasSgemm_v2)
NOTHING(cublasSgemmStridedBatched)
NOTHING(cublasLtMatmul)
NOTHING(cublasLtMatmulDescCreate)
NOTHING(cublasLtMatmulDescDestroy)
NOTHING(cublasLtMatmulDescSetAttribute)
NOTHING(cublasLtMatmulPreferenceCreate)
NOTHING(cublasLtMatmulPreferenceDestroy)
NOTHING(cublasLtMatmulPreferenceSetAttribute)
NOTHING(cublasLtMatrixLayoutCreate)
NOTHING(cublasLtMatrixLayoutDestroy)
NOTHING(cublasLtMatrixLayoutSetAttribute)
status cublasCreate_v2(uintptr_t *handle) { static uintptr_t last; *handle = last += 64; return 0; }
status cublasLtMatmulAlgoGetHeuristic(
    void *handle, void *product, void *a, void *b, void *c, void *d, void *preference, int wanted,
    char *result, int *found) {
  memset(result, 0, 96);
  *found = 1;
  return 0;
}
status cudaEventElapsedTime(float *milliseconds, void *a, void *b) { *milliseconds = 1; return 0; }
status cudaEventElapsedTime_v2(float *milliseconds, void *a, void *b) { *milliseconds = 1; return 0; }
