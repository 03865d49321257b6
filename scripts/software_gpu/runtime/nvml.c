/* NVML, as libnvidia-ml.so.1: one device that is part of no fabric, with the processes that use it:
 * this one, and one more if REMAT_SOFTWARE_GPU_OTHER_BYTES is set. Other queries are not supported. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SUCCESS = 0, NOT_SUPPORTED = 3, VERSION = 13000, OTHER_PROCESS = 4321 };
static char device;

int nvmlInit_v2(void) { return SUCCESS; }
int nvmlShutdown(void) { return SUCCESS; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 1; return SUCCESS; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) { *handle = &device; return SUCCESS; }
int nvmlDeviceGetHandleByPciBusId_v2(const char *id, void **handle) { *handle = &device; return SUCCESS; }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = VERSION; return SUCCESS; }
/* nvmlProcessInfo_v1_t. */
typedef struct { unsigned pid; unsigned long long used_bytes; } Process;
int cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes) __attribute__((weak));

int nvmlDeviceGetComputeRunningProcesses(void *handle, unsigned *count, Process *processes) {
  const char *other = getenv("REMAT_SOFTWARE_GPU_OTHER_BYTES");
  size_t other_bytes = other ? strtoull(other, 0, 10) : 0, free_bytes = 0, total_bytes = 0;
  if (cudaMemGetInfo) cudaMemGetInfo(&free_bytes, &total_bytes);
  *count = 0;
  if (other_bytes) processes[(*count)++] = (Process){OTHER_PROCESS, other_bytes};
  processes[(*count)++] = (Process){(unsigned)getpid(), total_bytes - free_bytes - other_bytes};
  return SUCCESS;
}
int nvmlDeviceGetComputeRunningProcesses_v3(void) { return NOT_SUPPORTED; }
int nvmlDeviceGetNvLinkRemoteDeviceType(void) { return NOT_SUPPORTED; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void) { return NOT_SUPPORTED; }
const char *nvmlErrorString(int error) { return error ? "not supported" : "success"; }
/* nvmlGpuFabricInfoV_t: a version, then the cluster's identifier, a status, a clique and a state. */
int nvmlDeviceGetGpuFabricInfoV(void *handle, char *info) { memset(info + 4, 0, 28); return SUCCESS; }
