/* Kernels: their names and attributes. A launch is counted and recorded, and computes nothing.
 *
 * libtorch registers its kernels when it is loaded; Triton loads its own as modules.
 */
#define _GNU_SOURCE
#include "runtime.h"
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

enum { REGISTERS = 32, BUCKETS = 1 << 18 };

typedef struct Kernel { const void *host_function; const char *name; struct Kernel *next; } Kernel;
static Kernel *kernels[BUCKETS];
static unsigned long long launches;

static Kernel **bucket_of(const void *function) {
  return &kernels[((uintptr_t)function >> 4) * 11400714819323198485ull >> 46];
}

const char *kernel_name(const void *function) {
  for (Kernel *kernel = *bucket_of(function); kernel; kernel = kernel->next)
    if (kernel->host_function == function) return kernel->name;
  return NULL;
}

void count_launch(cudaStream_t stream, const char *name) {
  __atomic_fetch_add(&launches, 1, __ATOMIC_RELAXED);
  record_kernel(stream, name);
}

EXPORT unsigned long long software_gpu_launches(void) { return launches; }

static cudaError_t launch(const void *function, cudaStream_t stream, dim3 grid, dim3 block) {
  const char *name = kernel_name(function);
  if (!name) return (cudaError_t)unimplemented("a launch of a kernel that was not registered");
  if (!grid.x || !grid.y || !grid.z || block.x * block.y * block.z > 1024)
    return fail(cudaErrorInvalidConfiguration);
  count_launch(stream, name);
  return cudaSuccess;
}

EXPORT cudaError_t cudaLaunchKernel(
    const void *function, dim3 grid, dim3 block, void **arguments, size_t shared, cudaStream_t stream) {
  return launch(function, stream, grid, block);
}
EXPORT cudaError_t cudaLaunchKernelExC(
    const cudaLaunchConfig_t *config, const void *function, void **arguments) {
  return launch(function, config->stream, config->gridDim, config->blockDim);
}

EXPORT cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *function) {
  int version = device_model()->major * 10 + device_model()->minor;
  memset(attributes, 0, sizeof *attributes);
  attributes->maxThreadsPerBlock = 1024;
  attributes->numRegs = REGISTERS;
  attributes->ptxVersion = attributes->binaryVersion = version;
  attributes->maxDynamicSharedSizeBytes = 48 << 10;
  return cudaSuccess;
}
EXPORT cudaError_t cudaFuncSetAttribute(const void *function, enum cudaFuncAttribute which, int value) {
  return cudaSuccess;
}

/* The blocks that fit by threads and shared memory; registers are those of a small kernel. */
EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    int *blocks, const void *function, int block_size, size_t shared_bytes, unsigned flags) {
  int by_threads = 2048 / (block_size ? block_size : 1);
  int by_shared = device_model()->shared_per_multiprocessor / (shared_bytes + (1 << 10));
  *blocks = by_threads < by_shared ? by_threads : by_shared;
  if (*blocks > 32) *blocks = 32;
  return cudaSuccess;
}
EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(
    int *blocks, const void *function, int block_size, size_t shared_bytes) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
      blocks, function, block_size, shared_bytes, 0);
}

/* Registration, which code that nvcc compiled calls when it is loaded. */
static void *fat_binary[1];
static char symbols[1 << 16]; /* memory for device variables, which kernels would read */

EXPORT void **__cudaRegisterFatBinary(void *binary) { return fat_binary; }
EXPORT void __cudaRegisterFatBinaryEnd(void **binary) {}
EXPORT void __cudaUnregisterFatBinary(void **binary) {}
EXPORT char __cudaInitModule(void **binary) { return 1; }
EXPORT void __cudaRegisterFunction(
    void **binary, const char *host_function, char *device_function, const char *device_name,
    int thread_limit, void *thread, void *block, void *block_size, void *grid_size, int *warp_size) {
  Kernel *kernel = malloc(sizeof *kernel), **bucket = bucket_of(host_function);
  *kernel = (Kernel){host_function, device_name, *bucket};
  *bucket = kernel;
}
EXPORT void __cudaRegisterVar(
    void **binary, char *host_variable, char *device_address, const char *device_name, int external,
    size_t bytes, int constant, int global) {}
EXPORT cudaError_t cudaGetSymbolAddress(void **address, const void *symbol) {
  *address = symbols;
  return cudaSuccess;
}
EXPORT cudaError_t cudaMemcpyToSymbol(
    const void *symbol, const void *from, size_t bytes, size_t offset, enum cudaMemcpyKind kind) {
  return cudaSuccess; /* only kernels read symbols */
}
EXPORT cudaError_t __cudaGetKernel(void **kernel, const void *host_function) {
  *kernel = (void *)host_function;
  return cudaSuccess;
}
EXPORT cudaError_t __cudaLaunchKernel(
    void *kernel, dim3 grid, dim3 block, void **arguments, size_t shared, cudaStream_t stream) {
  return launch(kernel, stream, grid, block);
}

typedef struct { dim3 grid, block; size_t shared; void *stream; } Configuration;
static _Thread_local Configuration pushed[8];
static _Thread_local int pushed_count;

EXPORT unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream) {
  if (pushed_count == 8) return cudaErrorInvalidConfiguration;
  pushed[pushed_count++] = (Configuration){grid, block, shared, stream};
  return 0;
}
EXPORT cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
  if (!pushed_count) return fail(cudaErrorInvalidConfiguration);
  Configuration *configuration = &pushed[--pushed_count];
  *grid = configuration->grid;
  *block = configuration->block;
  *shared = configuration->shared;
  *(void **)stream = configuration->stream;
  return cudaSuccess;
}

/* The driver's kernels, which Triton and NVRTC load: a function is its name. */
EXPORT CUresult cuModuleLoadData(CUmodule *module, const void *image) {
  *module = (CUmodule)fat_binary;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuModuleLoad(CUmodule *module, const char *path) { return cuModuleLoadData(module, path); }
EXPORT CUresult cuModuleUnload(CUmodule module) { return CUDA_SUCCESS; }
EXPORT CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
  char *copy = strdup(name);
  __cudaRegisterFunction(NULL, copy, NULL, copy, 0, NULL, NULL, NULL, NULL, NULL);
  *function = (CUfunction)copy;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuFuncGetAttribute(int *value, CUfunction_attribute which, CUfunction function) {
  *value = which == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024
           : which == CU_FUNC_ATTRIBUTE_NUM_REGS            ? REGISTERS
                                                            : 0;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute which, int value) {
  return CUDA_SUCCESS;
}
EXPORT CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) { return CUDA_SUCCESS; }
EXPORT CUresult cuOccupancyMaxActiveClusters(int *count, CUfunction function, const CUlaunchConfig *config) {
  *count = 16;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(
    int *blocks, CUfunction function, int block_size, size_t shared_bytes) {
  return (CUresult)cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks, function, block_size, shared_bytes);
}
EXPORT CUresult cuLaunchKernel(
    CUfunction function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
    unsigned shared, CUstream stream, void **arguments, void **extra) {
  return (CUresult)launch(function, stream, (dim3){gx, gy, gz}, (dim3){bx, by, bz});
}
EXPORT CUresult cuLaunchKernelEx(
    const CUlaunchConfig *config, CUfunction function, void **arguments, void **extra) {
  return cuLaunchKernel(function, config->gridDimX, config->gridDimY, config->gridDimZ, config->blockDimX,
                        config->blockDimY, config->blockDimZ, 0, config->hStream, arguments, extra);
}
