/* State that the files of the software GPU share.
 *
 * The library replaces the CUDA runtime, the CUDA driver and cuBLAS for libtorch and Triton. Device
 * memory is host memory, copies are real, kernels compute nothing. An entry point that is not
 * implemented fails with its name (`unimplemented`, and the stubs that build.py generates).
 */
#ifndef SOFTWARE_GPU_RUNTIME_H
#define SOFTWARE_GPU_RUNTIME_H

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <stddef.h>
#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))

/* devices.c */
typedef struct {
  const char *key, *name;
  int major, minor, multiprocessors, shared_per_multiprocessor, shared_per_block_optin;
  int l2_bytes, clock_khz, memory_clock_khz, bus_bits;
  size_t memory_bytes;
} DeviceModel;
const DeviceModel *device_model(void);

/* memory.c */
uintptr_t reserve_addresses(size_t bytes, size_t alignment);
int take_device_bytes(size_t bytes); /* 0 if the device has that much left */
void return_device_bytes(size_t bytes);
void copy_bytes(void *to, const void *from, size_t bytes);
void set_bytes(void *to, int value, size_t bytes);

/* graphs.c: what a capturing stream records instead of, or beside, running it */
typedef struct Graph Graph;
Graph *captured_graph(cudaStream_t stream);
cudaError_t refuse_while_capturing(cudaStream_t stream);
void record_kernel(cudaStream_t stream, const char *name);
int record_copy(cudaStream_t stream, void *to, const void *from, size_t bytes); /* 1 if recorded */
int record_set(cudaStream_t stream, void *to, int value, size_t bytes);
unsigned long long capture_id(cudaStream_t stream); /* 0 if it is not capturing */
Graph *active_capture(unsigned long long id);          /* NULL once it has ended */
int is_any_stream_capturing(void);

/* streams.c */
typedef struct StreamState StreamState;
typedef struct LateCopy LateCopy;
StreamState *stream_state(cudaStream_t stream);
struct StreamState {
  Graph *graph; /* being captured, or NULL */
  int priority;
  unsigned flags;
  LateCopy *first, *last;        /* copies that are not done yet */
  unsigned long long submitted; /* copies so far */
};
void end_capture_of_streams(Graph *graph);
int defer_copy(cudaStream_t stream, void *to, const void *from, size_t bytes); /* 1 if deferred */
void do_late_copies_of_all_streams(void);
void do_late_copies(cudaStream_t stream);

/* kernels.c */
const char *kernel_name(const void *host_function);
void count_launch(cudaStream_t stream, const char *name);

/* errors.c */
int unimplemented(const char *entry_point); /* returns cudaErrorNotSupported, after printing */
cudaError_t fail(cudaError_t error);         /* sets the last error, and returns it */

#endif
