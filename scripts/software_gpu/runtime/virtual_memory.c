/* Virtual memory management: addresses are reserved, then memory is mapped into them.
 *
 * torch's expandable segments use it. A handle is the size of its memory.
 */
#define _GNU_SOURCE
#include "runtime.h"
#include <stdlib.h>
#include <sys/mman.h>

enum { GRANULARITY = 2 << 20 };
typedef struct { size_t bytes; int references; } Handle;

static const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;

static void release(Handle *handle) {
  if (--handle->references) return;
  return_device_bytes(handle->bytes);
  free(handle);
}

EXPORT CUresult cuMemGetAllocationGranularity(
    size_t *bytes, const CUmemAllocationProp *properties, CUmemAllocationGranularity_flags option) {
  *bytes = GRANULARITY;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuMemAddressReserve(
    CUdeviceptr *start, size_t bytes, size_t alignment, CUdeviceptr wanted, unsigned long long option) {
  *start = reserve_addresses(bytes, alignment ? alignment : (size_t)1 << 30);
  void *mapped = mmap((void *)*start, bytes, PROT_NONE, flags, -1, 0);
  return mapped == MAP_FAILED ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}
EXPORT CUresult cuMemAddressFree(CUdeviceptr start, size_t bytes) {
  munmap((void *)start, bytes);
  return CUDA_SUCCESS;
}

EXPORT CUresult cuMemCreate(
    CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *properties,
    unsigned long long option) {
  if (bytes % GRANULARITY) return CUDA_ERROR_INVALID_VALUE;
  if (take_device_bytes(bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
  Handle *created = malloc(sizeof *created);
  *created = (Handle){bytes, 1};
  *handle = (CUmemGenericAllocationHandle)created;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  release((Handle *)handle);
  return CUDA_SUCCESS;
}

/* Mapped memory keeps its handle alive, as in the driver; so unmapping has to find it. */
typedef struct Mapping { CUdeviceptr start; Handle *handle; struct Mapping *next; } Mapping;
static Mapping *mappings;

EXPORT CUresult cuMemMap(
    CUdeviceptr start, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
    unsigned long long option) {
  if (offset || bytes != ((Handle *)handle)->bytes) return CUDA_ERROR_INVALID_VALUE;
  void *mapped = mmap((void *)start, bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
  if (mapped == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  Mapping *mapping = malloc(sizeof *mapping);
  *mapping = (Mapping){start, (Handle *)handle, mappings};
  mappings = mapping;
  mapping->handle->references++;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuMemUnmap(CUdeviceptr start, size_t bytes) {
  for (Mapping **link = &mappings; *link;) {
    Mapping *mapping = *link;
    if (mapping->start < start || mapping->start >= start + bytes) {
      link = &mapping->next;
      continue;
    }
    *link = mapping->next;
    release(mapping->handle);
    free(mapping);
  }
  mmap((void *)start, bytes, PROT_NONE, flags, -1, 0);
  return CUDA_SUCCESS;
}

EXPORT CUresult cuMemSetAccess(
    CUdeviceptr start, size_t bytes, const CUmemAccessDesc *access, size_t count) {
  return CUDA_SUCCESS;
}
