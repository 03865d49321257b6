/* A CUDA runtime without a device, for libtorch's caching allocator to run against.
 *
 * Preloaded, it answers the calls that the allocator makes: one device of 80 GiB, whose memory is
 * a range of addresses that nothing ever reads or writes. Addresses only grow, and no request
 * fails. Layout of cudaDeviceProp as in CUDA 12 and 13.
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef int status;
enum { MEMORY = 0, PAGE = 2 << 20 };
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
  *(size_t *)(found + 288) = total_bytes; /* totalGlobalMem */
  *(int *)(found + 308) = 32;             /* warpSize */
  *(int *)(found + 360) = 9;              /* major */
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

/* libtorch asks the driver itself whether the device's primary context is there. */
status cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
  *flags = 0;
  *active = 1;
  return 0;
}

/* NVML, which expandable segments ask whether the device is part of a fabric. It is not. */
status nvmlInit_v2(void) { return 0; }
status nvmlDeviceGetHandleByPciBusId_v2(const char *id, void **device) { *device = id; return 0; }
status nvmlDeviceGetCount_v2(unsigned *count) { *count = 1; return 0; }
status nvmlDeviceGetGpuFabricInfoV(void *device, char *info) { memset(info + 4, 0, 28); return 0; }
status nvmlDeviceGetComputeRunningProcesses(void *device, unsigned *count, void *found) { return 3; }
status nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *count, void *found) { return 3; }
status nvmlDeviceGetNvLinkRemoteDeviceType(void *device, unsigned link, int *type) { return 3; }
status nvmlDeviceGetNvLinkRemotePciInfo_v2(void *device, unsigned link, void *info) { return 3; }
status nvmlSystemGetCudaDriverVersion_v2(int *found) { *found = 13020; return 0; }
