/* Errors: the last one of a thread, their texts, and entry points that are not implemented. */
#include "runtime.h"
#include <stdio.h>
#include <string.h>

static _Thread_local cudaError_t last_error;
static char unimplemented_text[200] = "operation not supported";

int unimplemented(const char *entry_point) {
  snprintf(unimplemented_text, sizeof unimplemented_text,
           "the software GPU does not implement %s", entry_point);
  fprintf(stderr, "software GPU: %s is not implemented\n", entry_point);
  if (!strncmp(entry_point, "cuda", 4)) last_error = cudaErrorNotSupported; /* the runtime's own */
  return cudaErrorNotSupported;
}

cudaError_t fail(cudaError_t error) {
  last_error = error;
  return error;
}

EXPORT cudaError_t cudaPeekAtLastError(void) { return last_error; }
EXPORT cudaError_t cudaGetLastError(void) {
  cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}

static const char *name_of(int error) {
  switch (error) {
    case cudaSuccess: return "cudaSuccess";
    case cudaErrorInvalidValue: return "cudaErrorInvalidValue";
    case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
    case cudaErrorInvalidDevice: return "cudaErrorInvalidDevice";
    case cudaErrorInvalidResourceHandle: return "cudaErrorInvalidResourceHandle";
    case cudaErrorSymbolNotFound: return "cudaErrorSymbolNotFound";
    case cudaErrorNotSupported: return "cudaErrorNotSupported";
    case cudaErrorStreamCaptureUnsupported: return "cudaErrorStreamCaptureUnsupported";
    case cudaErrorStreamCaptureInvalidated: return "cudaErrorStreamCaptureInvalidated";
    case cudaErrorHostMemoryAlreadyRegistered: return "cudaErrorHostMemoryAlreadyRegistered";
    case cudaErrorHostMemoryNotRegistered: return "cudaErrorHostMemoryNotRegistered";
    default: return "cudaErrorUnknown";
  }
}

static const char *text_of(int error) {
  switch (error) {
    case cudaSuccess: return "no error";
    case cudaErrorInvalidValue: return "invalid argument";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorInvalidDevice: return "invalid device ordinal";
    case cudaErrorInvalidResourceHandle: return "invalid resource handle";
    case cudaErrorSymbolNotFound: return "named symbol not found";
    case cudaErrorNotSupported: return unimplemented_text;
    case cudaErrorStreamCaptureUnsupported: return "operation not permitted when stream is capturing";
    case cudaErrorStreamCaptureInvalidated:
      return "operation failed due to a previous error during capture";
    default: return "unknown error";
  }
}

EXPORT const char *cudaGetErrorName(cudaError_t error) { return name_of(error); }
EXPORT const char *cudaGetErrorString(cudaError_t error) { return text_of(error); }
EXPORT CUresult cuGetErrorName(CUresult error, const char **name) {
  *name = name_of(error);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuGetErrorString(CUresult error, const char **text) {
  *text = text_of(error);
  return CUDA_SUCCESS;
}

/* The driver's log has no entries. */
EXPORT CUresult cuLogsRegisterCallback(
    CUlogsCallback function, void *data, CUlogsCallbackHandle *handle) {
  if (handle) *handle = NULL;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuLogsUnregisterCallback(CUlogsCallbackHandle handle) { return CUDA_SUCCESS; }
