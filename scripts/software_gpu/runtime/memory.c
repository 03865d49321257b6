/* Memory of the device, which is host memory, and pinned memory of the host.
 *
 * Device addresses only grow, and freed memory is unmapped: a use after `cudaFree` ends the process
 * with a fault. The memory is zero until written, and takes pages of the host only when written.
 * REMAT_SOFTWARE_GPU_OTHER_BYTES are in use by another process.
 */
#define _GNU_SOURCE
#include "runtime.h"
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { ALIGNMENT = 2 << 20, HOST_PAGE = 4096, MAX_RANGES = 1 << 16 };

typedef struct { uintptr_t start; size_t bytes; enum cudaMemoryType type; } Range;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static const uintptr_t first_address = 0x700000000000;
static uintptr_t next_address = 0x700000000000;
static size_t device_bytes, pinned_bytes;
static Range ranges[MAX_RANGES]; /* allocations and registered host memory, unordered */
static int range_count;

static size_t round_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

uintptr_t reserve_addresses(size_t bytes, size_t alignment) {
  pthread_mutex_lock(&lock);
  uintptr_t start = round_up(next_address, alignment);
  next_address = start + round_up(bytes, HOST_PAGE);
  pthread_mutex_unlock(&lock);
  return start;
}

static size_t other_bytes(void) {
  const char *bytes = getenv("REMAT_SOFTWARE_GPU_OTHER_BYTES");
  return bytes ? strtoull(bytes, 0, 10) : 0;
}

int take_device_bytes(size_t bytes) {
  pthread_mutex_lock(&lock);
  int is_full = device_bytes + bytes + other_bytes() > device_model()->memory_bytes;
  if (!is_full) device_bytes += bytes;
  pthread_mutex_unlock(&lock);
  return is_full;
}

void return_device_bytes(size_t bytes) {
  pthread_mutex_lock(&lock);
  device_bytes -= bytes;
  pthread_mutex_unlock(&lock);
}

static int add_range(uintptr_t start, size_t bytes, enum cudaMemoryType type) {
  pthread_mutex_lock(&lock);
  int is_full = range_count == MAX_RANGES;
  if (!is_full) ranges[range_count++] = (Range){start, bytes, type};
  if (!is_full && type == cudaMemoryTypeHost) pinned_bytes += bytes;
  pthread_mutex_unlock(&lock);
  return is_full;
}

/* Remove the range that starts here and return it; its size is 0 if there is none. */
static Range remove_range(uintptr_t start, enum cudaMemoryType type) {
  Range removed = {0, 0, type};
  pthread_mutex_lock(&lock);
  for (int i = 0; i < range_count; i++)
    if (ranges[i].start == start && ranges[i].type == type) {
      removed = ranges[i];
      ranges[i] = ranges[--range_count];
      if (type == cudaMemoryTypeHost) pinned_bytes -= removed.bytes;
      break;
    }
  pthread_mutex_unlock(&lock);
  return removed;
}

static enum cudaMemoryType type_of(uintptr_t address) {
  if (first_address <= address && address < next_address) return cudaMemoryTypeDevice;
  enum cudaMemoryType type = cudaMemoryTypeUnregistered;
  pthread_mutex_lock(&lock);
  for (int i = 0; i < range_count; i++)
    if (ranges[i].start <= address && address - ranges[i].start < ranges[i].bytes) type = ranges[i].type;
  pthread_mutex_unlock(&lock);
  return type;
}

EXPORT cudaError_t cudaMalloc(void **pointer, size_t bytes) {
  size_t mapped_bytes = round_up(bytes ? bytes : 1, ALIGNMENT);
  *pointer = NULL;
  if (take_device_bytes(mapped_bytes)) return fail(cudaErrorMemoryAllocation);
  uintptr_t start = reserve_addresses(mapped_bytes, ALIGNMENT);
  int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE;
  if (mmap((void *)start, mapped_bytes, PROT_READ | PROT_WRITE, flags, -1, 0) == MAP_FAILED ||
      add_range(start, mapped_bytes, cudaMemoryTypeDevice)) {
    return_device_bytes(mapped_bytes);
    return fail(cudaErrorMemoryAllocation);
  }
  *pointer = (void *)start;
  return cudaSuccess;
}

EXPORT cudaError_t cudaFree(void *pointer) {
  do_late_copies_of_all_streams(); /* it synchronizes */
  if (!pointer) return cudaSuccess;
  Range range = remove_range((uintptr_t)pointer, cudaMemoryTypeDevice);
  if (!range.bytes) return fail(cudaErrorInvalidValue);
  munmap(pointer, range.bytes);
  return_device_bytes(range.bytes);
  return cudaSuccess;
}

EXPORT cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes) {
  *total_bytes = device_model()->memory_bytes;
  *free_bytes = *total_bytes - device_bytes - other_bytes();
  return cudaSuccess;
}

EXPORT cudaError_t cudaHostAlloc(void **pointer, size_t bytes, unsigned flags) {
  size_t mapped_bytes = round_up(bytes ? bytes : 1, HOST_PAGE);
  *pointer = aligned_alloc(HOST_PAGE, mapped_bytes);
  if (!*pointer || add_range((uintptr_t)*pointer, mapped_bytes, cudaMemoryTypeHost))
    return fail(cudaErrorMemoryAllocation);
  return cudaSuccess;
}

EXPORT cudaError_t cudaFreeHost(void *pointer) {
  do_late_copies_of_all_streams();
  if (!pointer) return cudaSuccess;
  if (!remove_range((uintptr_t)pointer, cudaMemoryTypeHost).bytes) return fail(cudaErrorInvalidValue);
  free(pointer);
  return cudaSuccess;
}

EXPORT cudaError_t cudaHostRegister(void *pointer, size_t bytes, unsigned flags) {
  if (type_of((uintptr_t)pointer) != cudaMemoryTypeUnregistered)
    return fail(cudaErrorHostMemoryAlreadyRegistered);
  return add_range((uintptr_t)pointer, bytes, cudaMemoryTypeHost) ? fail(cudaErrorMemoryAllocation)
                                                                   : cudaSuccess;
}

EXPORT cudaError_t cudaHostUnregister(void *pointer) {
  return remove_range((uintptr_t)pointer, cudaMemoryTypeHost).bytes
             ? cudaSuccess
             : fail(cudaErrorHostMemoryNotRegistered);
}

EXPORT cudaError_t cudaHostGetDevicePointer(void **device_pointer, void *host_pointer, unsigned flags) {
  *device_pointer = host_pointer;
  return cudaSuccess;
}

EXPORT cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *pointer) {
  memset(attributes, 0, sizeof *attributes);
  attributes->type = type_of((uintptr_t)pointer);
  int is_device = attributes->type == cudaMemoryTypeDevice;
  attributes->device = attributes->type == cudaMemoryTypeUnregistered ? -2 : 0;
  attributes->devicePointer = is_device || attributes->type == cudaMemoryTypeHost ? (void *)pointer : NULL;
  attributes->hostPointer = is_device ? NULL : (void *)pointer;
  return cudaSuccess;
}

static CUresult pointer_attribute(void *data, CUpointer_attribute which, CUdeviceptr pointer) {
  enum cudaMemoryType type = type_of(pointer);
  switch (which) {
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
      if (type == cudaMemoryTypeUnregistered) return CUDA_ERROR_INVALID_VALUE;
      *(unsigned *)data = type;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
      if (type == cudaMemoryTypeUnregistered) return CUDA_ERROR_INVALID_VALUE;
      *(CUdeviceptr *)data = pointer;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *(int *)data = 0; return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_IS_MANAGED: *(int *)data = 0; return CUDA_SUCCESS;
    default: {
      char name[60];
      snprintf(name, sizeof name, "pointer attribute %d", which);
      return (CUresult)unimplemented(name);
    }
  }
}

EXPORT CUresult cuPointerGetAttribute(void *data, CUpointer_attribute which, CUdeviceptr pointer) {
  return pointer_attribute(data, which, pointer);
}

EXPORT CUresult cuPointerGetAttributes(
    unsigned count, CUpointer_attribute *which, void **data, CUdeviceptr pointer) {
  for (unsigned i = 0; i < count; i++) {
    CUresult result = pointer_attribute(data[i], which[i], pointer);
    if (result) return result;
  }
  return CUDA_SUCCESS;
}

EXPORT CUresult cuMemGetAddressRange(CUdeviceptr *base, size_t *bytes, CUdeviceptr pointer) {
  CUresult result = CUDA_ERROR_NOT_FOUND;
  pthread_mutex_lock(&lock);
  for (int i = 0; i < range_count; i++)
    if (ranges[i].start <= pointer && pointer - ranges[i].start < ranges[i].bytes) {
      if (base) *base = ranges[i].start;
      if (bytes) *bytes = ranges[i].bytes;
      result = CUDA_SUCCESS;
    }
  pthread_mutex_unlock(&lock);
  return result;
}

/* Copies are done at once; a capturing stream records them, to be done when its graph runs. */
void copy_bytes(void *to, const void *from, size_t bytes) { memmove(to, from, bytes); }
void set_bytes(void *to, int value, size_t bytes) { memset(to, value, bytes); }

EXPORT cudaError_t cudaMemcpyAsync(
    void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream) {
  if (!record_copy(stream, to, from, bytes) && !defer_copy(stream, to, from, bytes))
    copy_bytes(to, from, bytes);
  return cudaSuccess;
}
EXPORT cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind) {
  cudaError_t error = refuse_while_capturing(NULL);
  if (!error) copy_bytes(to, from, bytes);
  return error;
}
EXPORT cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t stream) {
  if (!record_set(stream, to, value, bytes)) set_bytes(to, value, bytes);
  return cudaSuccess;
}
EXPORT cudaError_t cudaMemset(void *to, int value, size_t bytes) {
  return cudaMemsetAsync(to, value, bytes, NULL);
}

/* Figures for tests, read by ctypes. */
EXPORT size_t software_gpu_device_bytes(void) { return device_bytes; }
EXPORT size_t software_gpu_pinned_bytes(void) { return pinned_bytes; }
