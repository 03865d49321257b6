/* Replaces the header of this name, which ships with nvcc and not with the CUDA runtime's wheel.
 * The runtime's headers need these annotations of declarations; in C they mean nothing. */
#define __host__
#define __device__
#define __device_builtin__
#define __cudart_builtin__
#define __device_builtin_texture_type__
#define __device_builtin_surface_type__
#define __annotate__(annotation)
#define __location__(annotation)
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __builtin_align__(bytes) __align__(bytes)
#define CUDARTAPI
#define CUDARTAPI_CDECL
#define CUDA_CB
#define CUDA_MATH_CALL
