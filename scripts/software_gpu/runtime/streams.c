/* Streams and events. Work is done when it is submitted, so every event has happened once recorded.
 *
 * With REMAT_SOFTWARE_GPU_LATE_COPIES=1, copies on streams other than the default one are done as
 * late as the events allow: when another stream or the host waits for them. What is read or freed
 * without waiting then has wrong contents.
 *
 * An event's time is the host's clock, so elapsed times are those of the host, not of a GPU.
 */
#define _GNU_SOURCE
#include "runtime.h"
#include <pthread.h>
#include <stdlib.h>
#include <time.h>

enum { GREATEST_PRIORITY = -5 };

typedef struct {
  double time_ms;
  unsigned long long capture, submitted; /* the copies of its stream that come before it */
  unsigned flags;
  StreamState *stream;
} Event;
struct LateCopy { void *to; const void *from; size_t bytes; unsigned long long number; LateCopy *next; };
typedef struct Link { StreamState state; struct Link *next; } Link;

static StreamState default_stream;
static Link *streams; /* all streams that live */

/* The handles 0, 1 and 2 are the default, the legacy and the per-thread stream. */
StreamState *stream_state(cudaStream_t stream) {
  return (uintptr_t)stream <= 2 ? &default_stream : (StreamState *)stream;
}

static int copies_are_late(void) {
  static int late = -1;
  if (late < 0) late = getenv("REMAT_SOFTWARE_GPU_LATE_COPIES") != NULL;
  return late;
}
static pthread_mutex_t copies_lock = PTHREAD_MUTEX_INITIALIZER;

int defer_copy(cudaStream_t stream, void *to, const void *from, size_t bytes) {
  StreamState *state = stream_state(stream);
  if (state == &default_stream || !copies_are_late()) return 0;
  LateCopy *copy = malloc(sizeof *copy);
  pthread_mutex_lock(&copies_lock);
  *copy = (LateCopy){to, from, bytes, ++state->submitted, NULL};
  if (state->last) state->last->next = copy;
  else state->first = copy;
  state->last = copy;
  pthread_mutex_unlock(&copies_lock);
  return 1;
}
static void do_copies_until(StreamState *state, unsigned long long number) {
  pthread_mutex_lock(&copies_lock);
  while (state->first && state->first->number <= number) {
    LateCopy *copy = state->first;
    copy_bytes(copy->to, copy->from, copy->bytes);
    state->first = copy->next;
    if (!copy->next) state->last = NULL;
    free(copy);
  }
  pthread_mutex_unlock(&copies_lock);
}
void do_late_copies(cudaStream_t stream) { do_copies_until(stream_state(stream), -1ULL); }
void do_late_copies_of_all_streams(void) {
  for (Link *link = streams; link; link = link->next) do_copies_until(&link->state, -1ULL);
}
static void do_copies_before(Event *event) {
  if (!event->stream) return;
  for (Link *link = streams; link; link = link->next) /* the stream may not live any more */
    if (&link->state == event->stream) do_copies_until(&link->state, event->submitted);
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
      do_late_copies(stream);
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
EXPORT cudaError_t cudaStreamQuery(cudaStream_t stream) {
  do_late_copies(stream);
  return refuse_while_capturing(stream);
}
EXPORT cudaError_t cudaStreamSynchronize(cudaStream_t stream) { return cudaStreamQuery(stream); }
EXPORT cudaError_t cudaDeviceSynchronize(void) {
  do_late_copies_of_all_streams();
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
  ((Event *)event)->stream = stream_state(stream);
  ((Event *)event)->submitted = stream_state(stream)->submitted;
  return cudaSuccess;
}
EXPORT cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return cudaEventRecordWithFlags(event, stream, 0);
}
EXPORT cudaError_t cudaEventQuery(cudaEvent_t event) {
  do_copies_before((Event *)event);
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
  if (stream_state(stream) != ((Event *)event)->stream) do_copies_before((Event *)event);
  return cudaSuccess;
}
