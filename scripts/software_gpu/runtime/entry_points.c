/* Entry points of the driver by name, as libtorch asks for them. */
#define _GNU_SOURCE
#include "runtime.h"
#include <dlfcn.h>
#include <stdio.h>

static void *find(const char *name) {
  static void *library;
  if (!library) {
    Dl_info info;
    dladdr((void *)find, &info);
    library = dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
  }
  void *function = dlsym(library, name);
  for (int version = 3; !function && version >= 2; version--) {
    char versioned[200];
    snprintf(versioned, sizeof versioned, "%s_v%d", name, version);
    function = dlsym(library, versioned);
  }
  return function;
}

EXPORT cudaError_t cudaGetDriverEntryPointByVersion(
    const char *name, void **function, unsigned version, unsigned long long flags,
    enum cudaDriverEntryPointQueryResult *result) {
  *function = find(name);
  if (result) *result = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  if (!*function) fprintf(stderr, "software GPU: the driver has no entry point %s\n", name);
  return cudaSuccess;
}
EXPORT cudaError_t cudaGetDriverEntryPoint(
    const char *name, void **function, unsigned long long flags,
    enum cudaDriverEntryPointQueryResult *result) {
  return cudaGetDriverEntryPointByVersion(name, function, 0, flags, result);
}
EXPORT CUresult cuGetProcAddress(
    const char *name, void **function, int version, cuuint64_t flags,
    CUdriverProcAddressQueryResult *result) {
  *function = find(name);
  if (result) *result = *function ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  return *function ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}
