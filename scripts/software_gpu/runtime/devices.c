/* Devices: the properties of an A100, an H100 or a B200. Environment: REMAT_SOFTWARE_GPU_DEVICE.
 *
 * Figures are those that the driver of such a device reports, from NVIDIA's data sheets and tuning
 * guides. REMAT_SOFTWARE_GPU_MEMORY_BYTES replaces the size of the memory.
 */
#include "runtime.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { KIB = 1 << 10, MIB = 1 << 20, VERSION = 13000 };

static DeviceModel models[] = {
    {"a100", "NVIDIA A100-SXM4-80GB", 8, 0, 108, 164 * KIB, 163 * KIB, 40 * MIB, 1410000, 1593000,
     5120, (size_t)81152 * MIB},
    {"h100", "NVIDIA H100 80GB HBM3", 9, 0, 132, 228 * KIB, 227 * KIB, 50 * MIB, 1980000, 2619000,
     5120, (size_t)81079 * MIB},
    {"b200", "NVIDIA B200", 10, 0, 148, 228 * KIB, 227 * KIB, 126 * MIB, 1965000, 3996000, 8192,
     (size_t)182642 * MIB},
};

const DeviceModel *device_model(void) {
  static DeviceModel *model;
  if (model) return model;
  const char *key = getenv("REMAT_SOFTWARE_GPU_DEVICE"), *bytes;
  if (!key) key = "h100";
  for (size_t i = 0; i < sizeof models / sizeof *models; i++)
    if (!strcmp(models[i].key, key)) model = &models[i];
  if (!model) {
    fprintf(stderr, "software GPU: no device %s; there are a100, h100 and b200\n", key);
    exit(2);
  }
  if ((bytes = getenv("REMAT_SOFTWARE_GPU_MEMORY_BYTES"))) model->memory_bytes = strtoull(bytes, 0, 10);
  return model;
}

static int attribute(int *value, int which) {
  const DeviceModel *model = device_model();
  switch (which) {
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X:
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y: *value = 1024; break;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z: *value = 64; break;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X: *value = 0x7fffffff; break;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y:
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z: *value = 65535; break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK: *value = 48 * KIB; break;
    case CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY: *value = 64 * KIB; break;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE: *value = 32; break;
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK:
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR: *value = 65536; break;
    case CU_DEVICE_ATTRIBUTE_CLOCK_RATE: *value = model->clock_khz; break;
    case CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT: *value = 512; break;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = model->multiprocessors; break;
    case CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE: *value = model->memory_clock_khz; break;
    case CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH: *value = model->bus_bits; break;
    case CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE: *value = model->l2_bytes; break;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR: *value = 2048; break;
    case CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT: *value = 3; break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = model->major; break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *value = model->minor; break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR:
      *value = model->shared_per_multiprocessor;
      break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN:
      *value = model->shared_per_block_optin;
      break;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR: *value = 32; break;
    case CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK: *value = KIB; break;
    case CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY:
    case CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS:
    case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
    case CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH:
    case CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS: *value = 1; break;
    case CU_DEVICE_ATTRIBUTE_CLUSTER_LAUNCH:
    case CU_DEVICE_ATTRIBUTE_TENSOR_MAP_ACCESS_SUPPORTED: *value = model->major >= 9; break;
    case CU_DEVICE_ATTRIBUTE_INTEGRATED:
    case CU_DEVICE_ATTRIBUTE_PCI_BUS_ID:
    case CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID:
    case CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID:
    case CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY:
    case CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS:
    case CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS:
    case CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED: *value = 0; break;
    default: {
      char name[60];
      snprintf(name, sizeof name, "device attribute %d", which);
      return unimplemented(name);
    }
  }
  return 0;
}

static int is_device(int device) { return device == 0; }

EXPORT cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr which, int device) {
  return is_device(device) ? (cudaError_t)attribute(value, which) : fail(cudaErrorInvalidDevice);
}
EXPORT CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute which, CUdevice device) {
  return is_device(device) ? (CUresult)attribute(value, which) : CUDA_ERROR_INVALID_DEVICE;
}

EXPORT cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device) {
  if (!is_device(device)) return fail(cudaErrorInvalidDevice);
  const DeviceModel *model = device_model();
  memset(properties, 0, sizeof *properties);
  strcpy(properties->name, model->name);
  memcpy(properties->uuid.bytes, "software GPU    ", 16);
  properties->totalGlobalMem = model->memory_bytes;
  properties->sharedMemPerBlock = 48 * KIB;
  properties->regsPerBlock = properties->regsPerMultiprocessor = 65536;
  properties->warpSize = 32;
  properties->maxThreadsPerBlock = 1024;
  memcpy(properties->maxThreadsDim, (int[]){1024, 1024, 64}, sizeof properties->maxThreadsDim);
  memcpy(properties->maxGridSize, (int[]){0x7fffffff, 65535, 65535}, sizeof properties->maxGridSize);
  properties->totalConstMem = 64 * KIB;
  properties->major = model->major;
  properties->minor = model->minor;
  properties->textureAlignment = 512;
  properties->multiProcessorCount = model->multiprocessors;
  properties->canMapHostMemory = properties->concurrentKernels = properties->unifiedAddressing = 1;
  properties->asyncEngineCount = 3;
  properties->memoryBusWidth = model->bus_bits;
  properties->l2CacheSize = model->l2_bytes;
  properties->maxThreadsPerMultiProcessor = 2048;
  properties->streamPrioritiesSupported = properties->cooperativeLaunch = 1;
  properties->sharedMemPerMultiprocessor = model->shared_per_multiprocessor;
  properties->sharedMemPerBlockOptin = model->shared_per_block_optin;
  properties->maxBlocksPerMultiProcessor = 32;
  properties->reservedSharedMemPerBlock = KIB;
  properties->hostRegisterSupported = 1;
  properties->clusterLaunch = model->major >= 9;
  return cudaSuccess;
}

EXPORT cudaError_t cudaGetDeviceCount(int *count) { *count = 1; return cudaSuccess; }
EXPORT cudaError_t cudaGetDevice(int *device) { *device = 0; return cudaSuccess; }
EXPORT cudaError_t cudaSetDevice(int device) {
  return is_device(device) ? cudaSuccess : fail(cudaErrorInvalidDevice);
}
EXPORT cudaError_t cudaDeviceGetPCIBusId(char *id, int length, int device) {
  snprintf(id, length, "0000:00:00.0");
  return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) {
  *can = 0;
  return cudaSuccess;
}
EXPORT cudaError_t cudaDriverGetVersion(int *version) { *version = VERSION; return cudaSuccess; }
EXPORT cudaError_t cudaRuntimeGetVersion(int *version) { *version = VERSION; return cudaSuccess; }
EXPORT CUresult cuDriverGetVersion(int *version) { *version = VERSION; return CUDA_SUCCESS; }

/* The driver's view: one device, whose primary context is always active. */
EXPORT CUresult cuInit(unsigned flags) { return CUDA_SUCCESS; }
EXPORT CUresult cuDeviceGetCount(int *count) { *count = 1; return CUDA_SUCCESS; }
EXPORT CUresult cuDeviceGet(CUdevice *device, int ordinal) {
  *device = 0;
  return is_device(ordinal) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}
static char context;
EXPORT CUresult cuCtxGetCurrent(CUcontext *current) { *current = (CUcontext)&context; return CUDA_SUCCESS; }
EXPORT CUresult cuCtxSetCurrent(CUcontext current) { return CUDA_SUCCESS; }
EXPORT CUresult cuCtxGetDevice(CUdevice *device) { *device = 0; return CUDA_SUCCESS; }
EXPORT CUresult cuCtxPushCurrent(CUcontext current) { return CUDA_SUCCESS; }
EXPORT CUresult cuCtxPopCurrent(CUcontext *current) { return cuCtxGetCurrent(current); }
EXPORT CUresult cuCtxGetLimit(size_t *value, CUlimit limit) { *value = 8 * MIB; return CUDA_SUCCESS; }
EXPORT CUresult cuCtxSetLimit(CUlimit limit, size_t value) { return CUDA_SUCCESS; }
EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext *retained, CUdevice device) {
  return cuCtxGetCurrent(retained);
}
EXPORT CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
  *flags = 0;
  *active = 1;
  return CUDA_SUCCESS;
}
