/* NVML, as libnvidia-ml.so.1: one device that is part of no fabric. Other queries are not supported. */
#include <stdint.h>
#include <string.h>

enum { SUCCESS = 0, NOT_SUPPORTED = 3, VERSION = 13000 };
static char device;

int nvmlInit_v2(void) { return SUCCESS; }
int nvmlShutdown(void) { return SUCCESS; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 1; return SUCCESS; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) { *handle = &device; return SUCCESS; }
int nvmlDeviceGetHandleByPciBusId_v2(const char *id, void **handle) { *handle = &device; return SUCCESS; }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = VERSION; return SUCCESS; }
int nvmlDeviceGetComputeRunningProcesses(void) { return NOT_SUPPORTED; }
int nvmlDeviceGetComputeRunningProcesses_v3(void) { return NOT_SUPPORTED; }
int nvmlDeviceGetNvLinkRemoteDeviceType(void) { return NOT_SUPPORTED; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void) { return NOT_SUPPORTED; }
const char *nvmlErrorString(int error) { return error ? "not supported" : "success"; }
/* nvmlGpuFabricInfoV_t: a version, then the cluster's identifier, a status, a clique and a state. */
int nvmlDeviceGetGpuFabricInfoV(void *handle, char *info) { memset(info + 4, 0, 28); return SUCCESS; }
