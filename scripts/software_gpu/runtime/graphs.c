/* CUDA graphs: what streams capture, as a list of nodes in the order of submission.
 *
 * A launch of a graph does its copies and fills, and counts its kernels, which compute nothing.
 */
#include "runtime.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef enum { KERNEL, COPY, FILL, EMPTY } NodeKind;
typedef struct { NodeKind kind; const char *name; void *to; const void *from; size_t bytes; int value; } Node;
typedef struct Object { cudaHostFn_t destroy; void *data; unsigned references; } Object;
typedef struct Retained { Object *object; struct Retained *next; } Retained;

struct Graph {
  unsigned long long id;
  Node *nodes;
  size_t count, capacity;
  cudaStream_t origin;
  int is_invalid, references;
  Retained *retained;
  Graph *next_capture;
};

static Graph *captures; /* the active ones */

Graph *captured_graph(cudaStream_t stream) { return stream_state(stream)->graph; }
int is_any_stream_capturing(void) { return captures != NULL; }
unsigned long long capture_id(cudaStream_t stream) {
  return captured_graph(stream) ? captured_graph(stream)->id : 0;
}
Graph *active_capture(unsigned long long id) {
  Graph *graph = captures;
  while (graph && graph->id != id) graph = graph->next_capture;
  return graph;
}

cudaError_t refuse_while_capturing(cudaStream_t stream) {
  Graph *graph = captured_graph(stream);
  if (!graph) return cudaSuccess;
  graph->is_invalid = 1;
  return fail(cudaErrorStreamCaptureUnsupported);
}

static void add_node(Graph *graph, Node node) {
  if (graph->count == graph->capacity) {
    graph->capacity = graph->capacity ? 2 * graph->capacity : 64;
    graph->nodes = realloc(graph->nodes, graph->capacity * sizeof *graph->nodes);
  }
  graph->nodes[graph->count++] = node;
}

void record_kernel(cudaStream_t stream, const char *name) {
  Graph *graph = captured_graph(stream);
  if (graph) add_node(graph, (Node){.kind = KERNEL, .name = name});
}
int record_copy(cudaStream_t stream, void *to, const void *from, size_t bytes) {
  Graph *graph = captured_graph(stream);
  if (graph) add_node(graph, (Node){.kind = COPY, .to = to, .from = from, .bytes = bytes});
  return graph != NULL;
}
int record_set(cudaStream_t stream, void *to, int value, size_t bytes) {
  Graph *graph = captured_graph(stream);
  if (graph) add_node(graph, (Node){.kind = FILL, .to = to, .value = value, .bytes = bytes});
  return graph != NULL;
}

static void release_object(Object *object, unsigned count) {
  object->references -= count;
  if (object->references) return;
  object->destroy(object->data);
  free(object);
}

static void release_graph(Graph *graph) {
  if (--graph->references) return;
  while (graph->retained) {
    Retained *next = graph->retained->next;
    release_object(graph->retained->object, 1);
    free(graph->retained);
    graph->retained = next;
  }
  free(graph->nodes);
  free(graph);
}

EXPORT cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode) {
  static unsigned long long last_id;
  if ((uintptr_t)stream <= 2 || captured_graph(stream)) return fail(cudaErrorStreamCaptureUnsupported);
  Graph *graph = calloc(1, sizeof *graph);
  graph->id = ++last_id;
  graph->origin = stream;
  graph->references = 1;
  stream_state(stream)->graph = graph;
  graph->next_capture = captures;
  captures = graph;
  return cudaSuccess;
}

EXPORT cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *captured) {
  Graph *graph = captured_graph(stream);
  *captured = NULL;
  if (!graph || graph->origin != stream) return fail(cudaErrorInvalidValue);
  end_capture_of_streams(graph);
  Graph **link = &captures;
  while (*link != graph) link = &(*link)->next_capture;
  *link = graph->next_capture;
  if (graph->is_invalid) {
    release_graph(graph);
    return fail(cudaErrorStreamCaptureInvalidated);
  }
  *captured = (cudaGraph_t)graph;
  return cudaSuccess;
}

static enum cudaStreamCaptureStatus status_of(Graph *graph) {
  return !graph               ? cudaStreamCaptureStatusNone
         : graph->is_invalid ? cudaStreamCaptureStatusInvalidated
                              : cudaStreamCaptureStatusActive;
}
EXPORT cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
  *status = status_of(captured_graph(stream));
  return cudaSuccess;
}
EXPORT cudaError_t cudaStreamGetCaptureInfo(
    cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id,
    cudaGraph_t *graph_out, const cudaGraphNode_t **dependencies, const cudaGraphEdgeData **edges,
    size_t *count) {
  Graph *graph = captured_graph(stream);
  *status = status_of(graph);
  if (id) *id = graph ? graph->id : 0;
  if (graph_out) *graph_out = (cudaGraph_t)graph;
  if (dependencies) *dependencies = NULL;
  if (edges) *edges = NULL;
  if (count) *count = 0;
  return cudaSuccess;
}
EXPORT cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) {
  static _Thread_local enum cudaStreamCaptureMode current;
  enum cudaStreamCaptureMode previous = current;
  current = *mode;
  *mode = previous;
  return cudaSuccess;
}
EXPORT cudaError_t cudaGraphAddNode(
    cudaGraphNode_t *node, cudaGraph_t graph, const cudaGraphNode_t *dependencies,
    const cudaGraphEdgeData *edges, size_t count, struct cudaGraphNodeParams *parameters) {
  if (parameters->type != cudaGraphNodeTypeEmpty)
    return (cudaError_t)unimplemented("cudaGraphAddNode of a node that is not empty");
  add_node((Graph *)graph, (Node){.kind = EMPTY});
  *node = (cudaGraphNode_t)(uintptr_t)((Graph *)graph)->count;
  return cudaSuccess;
}
EXPORT cudaError_t cudaStreamUpdateCaptureDependencies(
    cudaStream_t stream, cudaGraphNode_t *dependencies, const cudaGraphEdgeData *edges, size_t count,
    unsigned flags) {
  return captured_graph(stream) ? cudaSuccess : fail(cudaErrorInvalidValue);
}

EXPORT cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count) {
  size_t total = ((Graph *)graph)->count;
  if (nodes)
    for (size_t i = 0; i < *count && i < total; i++) nodes[i] = (cudaGraphNode_t)(uintptr_t)(i + 1);
  *count = total;
  return cudaSuccess;
}
EXPORT cudaError_t cudaGraphInstantiateWithFlags(
    cudaGraphExec_t *executable, cudaGraph_t graph, unsigned long long flags) {
  ((Graph *)graph)->references++;
  *executable = (cudaGraphExec_t)graph;
  return cudaSuccess;
}
EXPORT cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
  Graph *graph = (Graph *)executable;
  for (size_t i = 0; i < graph->count; i++) {
    Node *node = &graph->nodes[i];
    if (node->kind == KERNEL) count_launch(stream, node->name);
    if (node->kind == COPY) copy_bytes(node->to, node->from, node->bytes);
    if (node->kind == FILL) set_bytes(node->to, node->value, node->bytes);
  }
  return cudaSuccess;
}
EXPORT cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  release_graph((Graph *)graph);
  return cudaSuccess;
}
EXPORT cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  release_graph((Graph *)executable);
  return cudaSuccess;
}

EXPORT cudaError_t cudaUserObjectCreate(
    cudaUserObject_t *object, void *data, cudaHostFn_t destroy, unsigned references, unsigned flags) {
  Object *created = malloc(sizeof *created);
  *created = (Object){destroy, data, references};
  *object = (cudaUserObject_t)created;
  return cudaSuccess;
}
EXPORT cudaError_t cudaUserObjectRelease(cudaUserObject_t object, unsigned count) {
  release_object((Object *)object, count);
  return cudaSuccess;
}
EXPORT cudaError_t cudaGraphRetainUserObject(
    cudaGraph_t graph, cudaUserObject_t object, unsigned count, unsigned flags) {
  if (!(flags & cudaGraphUserObjectMove)) ((Object *)object)->references += count;
  for (unsigned i = 0; i < count; i++) {
    Retained *link = malloc(sizeof *link);
    *link = (Retained){(Object *)object, ((Graph *)graph)->retained};
    ((Graph *)graph)->retained = link;
  }
  return cudaSuccess;
}

/* A graph's nodes as text, one a line, for tests; returns the length that it needs. */
EXPORT size_t software_gpu_describe_graph(cudaGraph_t handle, char *text, size_t size) {
  static const char *kinds[] = {"kernel", "copy", "fill", "empty"};
  Graph *graph = (Graph *)handle;
  size_t length = 0;
  for (size_t i = 0; i < graph->count; i++) {
    Node *node = &graph->nodes[i];
    size_t left = length < size ? size - length : 0;
    length += node->kind == KERNEL
                  ? snprintf(text + length, left, "kernel %s\n", node->name)
                  : snprintf(text + length, left, "%s %zu\n", kinds[node->kind], node->bytes);
  }
  return length;
}
