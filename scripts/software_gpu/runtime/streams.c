/* Streams and events. Work is done when it is submitted, so every event has happened once recorded.
 *
 * An event's time is the host's clock, so elapsed times are those of the host, not of a GPU.
 */
#define _GNU_SOURCE
#include "runtime.h"
#include <stdlib.h>
#include <time.h>

enum { GREATEST_PRIORITY = -5 };

typedef struct { double time_ms; unsigned long long capture; unsigned flags; } Event;
typedef struct Link { StreamState state; struct Link *next; } Link;

static StreamState default_stream;
static Link *streams; /* all streams that live */

/* The handles 0, 1 and 2 are the default, the legacy and the per-thread stream. */
StreamState *stream_state(cudaStream_t stream) {
  return (uintptr_t)stream <= 2 ? &default_stream : (StreamState *)stream;
}

void end_capture_of_streams(Graph *graph) {
  if (default_stream.graph == graph) default_stream.graph = NULL;
  for (Link *link = streams; link; link = link->next)
    if (link->state.graph == graph) link->state.graph = NULL;
}

EXPORT cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
  Link *link = calloc(1, sizeof *link);
  link->state.flags = flags;
  link->state.priority = priority;
  link->next = streams;
  streams = link;
  *stream = (cudaStream_t)&link->state;
  return cudaSuccess;
}
EXPORT cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}
EXPORT cudaError_t cudaStreamCreate(cudaStream_t *stream) {
  return cudaStreamCreateWithPriority(stream, 0, 0);
}
EXPORT cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  for (Link **link = &streams; *link; link = &(*link)->next)
    if (&(*link)->state == (StreamState *)stream) {
      Link *removed = *link;
      *link = removed->next;
      free(removed);
      return cudaSuccess;
    }
  return fail(cudaErrorInvalidResourceHandle);
}
EXPORT cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) {
  *priority = stream_state(stream)->priority;
  return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
  *least = 0;
  *greatest = GREATEST_PRIORITY;
  return cudaSuccess;
}
EXPORT cudaError_t cudaStreamQuery(cudaStream_t stream) { return refuse_while_capturing(stream); }
EXPORT cudaError_t cudaStreamSynchronize(cudaStream_t stream) { return refuse_while_capturing(stream); }
EXPORT cudaError_t cudaDeviceSynchronize(void) {
  return is_any_stream_capturing() ? fail(cudaErrorStreamCaptureUnsupported) : cudaSuccess;
}
EXPORT cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *data) {
  if (captured_graph(stream)) return (cudaError_t)unimplemented("cudaLaunchHostFunc in a capture");
  function(data);
  return cudaSuccess;
}
EXPORT cudaError_t cudaStreamAddCallback(
    cudaStream_t stream, cudaStreamCallback_t callback, void *data, unsigned flags) {
  if (captured_graph(stream)) return (cudaError_t)unimplemented("cudaStreamAddCallback in a capture");
  callback(stream, cudaSuccess, data);
  return cudaSuccess;
}
EXPORT CUresult cuStreamWriteValue32(
    CUstream stream, CUdeviceptr address, cuuint32_t value, unsigned flags) {
  *(cuuint32_t *)address = value;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuMemsetD32Async(CUdeviceptr start, unsigned value, size_t count, CUstream stream) {
  for (size_t i = 0; i < count; i++) ((unsigned *)start)[i] = value;
  return CUDA_SUCCESS;
}

EXPORT cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
  Event *created = calloc(1, sizeof *created);
  created->flags = flags;
  *event = (cudaEvent_t)created;
  return cudaSuccess;
}
EXPORT cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }
EXPORT cudaError_t cudaEventDestroy(cudaEvent_t event) {
  free(event);
  return cudaSuccess;
}
EXPORT cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  ((Event *)event)->time_ms = now.tv_sec * 1e3 + now.tv_nsec / 1e6;
  ((Event *)event)->capture = capture_id(stream);
  return cudaSuccess;
}
EXPORT cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return cudaEventRecordWithFlags(event, stream, 0);
}
EXPORT cudaError_t cudaEventQuery(cudaEvent_t event) {
  return active_capture(((Event *)event)->capture) ? fail(cudaErrorStreamCaptureUnsupported)
                                                  : cudaSuccess;
}
EXPORT cudaError_t cudaEventSynchronize(cudaEvent_t event) { return cudaEventQuery(event); }
EXPORT cudaError_t cudaEventElapsedTime(float *elapsed_ms, cudaEvent_t start, cudaEvent_t end) {
  *elapsed_ms = ((Event *)end)->time_ms - ((Event *)start)->time_ms;
  return cudaSuccess;
}
EXPORT cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
  Graph *graph = active_capture(((Event *)event)->capture);
  if (graph) stream_state(stream)->graph = graph; /* the stream joins the capture */
  return cudaSuccess;
}
