// SPDX-License-Identifier: Apache-2.0
// What the batching libraries of tokenizer/ and classifier/ share; to be included before anything else.

#ifndef BATCHING_H
#define BATCHING_H

#define _POSIX_C_SOURCE 199309L  // clock_gettime

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <time.h>

// --- what they take of tritonserver.h and tritonbackend.h, so that a compiler is all that it takes to build them; the
// server that loads a library has the functions ---

typedef struct TRITONSERVER_Error TRITONSERVER_Error;
typedef struct TRITONSERVER_Message TRITONSERVER_Message;
typedef struct TRITONBACKEND_Input TRITONBACKEND_Input;
typedef struct TRITONBACKEND_Model TRITONBACKEND_Model;
typedef struct TRITONBACKEND_Request TRITONBACKEND_Request;
typedef struct TRITONBACKEND_Batcher TRITONBACKEND_Batcher;

typedef enum { TRITONSERVER_ERROR_INTERNAL = 1, TRITONSERVER_ERROR_INVALID_ARG = 3 } TRITONSERVER_Error_Code;
typedef enum { TRITONSERVER_MEMORY_CPU, TRITONSERVER_MEMORY_CPU_PINNED, TRITONSERVER_MEMORY_GPU } TRITONSERVER_MemoryType;

TRITONSERVER_Error *TRITONSERVER_ErrorNew(TRITONSERVER_Error_Code code, const char *message);
void TRITONSERVER_ErrorDelete(TRITONSERVER_Error *error);
TRITONSERVER_Error *TRITONSERVER_MessageSerializeToJson(TRITONSERVER_Message *message, const char **base, size_t *size);
TRITONSERVER_Error *TRITONSERVER_MessageDelete(TRITONSERVER_Message *message);
TRITONSERVER_Error *TRITONBACKEND_ModelConfig(TRITONBACKEND_Model *model, uint32_t version,
                                              TRITONSERVER_Message **config);
TRITONSERVER_Error *TRITONBACKEND_RequestInput(TRITONBACKEND_Request *request, const char *name,
                                               TRITONBACKEND_Input **input);
TRITONSERVER_Error *TRITONBACKEND_InputProperties(TRITONBACKEND_Input *input, const char **name, void *datatype,
                                                  const int64_t **shape, uint32_t *dims_count, uint64_t *byte_size,
                                                  uint32_t *buffer_count);
TRITONSERVER_Error *TRITONBACKEND_InputBuffer(TRITONBACKEND_Input *input, uint32_t index, const void **buffer,
                                              uint64_t *byte_size, TRITONSERVER_MemoryType *memory_type,
                                              int64_t *memory_type_id);

// What a library has to have.
#define EXPORTED __attribute__((visibility("default")))

EXPORTED TRITONSERVER_Error *TRITONBACKEND_ModelBatcherInitialize(TRITONBACKEND_Batcher **batcher,
                                                                  TRITONBACKEND_Model *model);
EXPORTED TRITONSERVER_Error *TRITONBACKEND_ModelBatcherFinalize(TRITONBACKEND_Batcher *batcher);
EXPORTED TRITONSERVER_Error *TRITONBACKEND_ModelBatchInitialize(const TRITONBACKEND_Batcher *of_model, void **userp);
EXPORTED TRITONSERVER_Error *TRITONBACKEND_ModelBatchIncludeRequest(TRITONBACKEND_Request *request, void *userp,
                                                                    bool *should_include);
EXPORTED TRITONSERVER_Error *TRITONBACKEND_ModelBatchFinalize(void *userp);

// --- how long a batch turns away what comes ---

// Longer than that, and it is let in, so that nothing that Triton does, or comes to do, can hold up the queue.
#define PATIENCE_MS 1000
#define LET_IN (-1)

// Asked when something is to be turned away. refusing_since_ms: LET_IN after a request was let in, and for a new model.
static inline bool out_of_patience(int64_t *refusing_since_ms) {
    struct timespec now = {0};
    clock_gettime(CLOCK_MONOTONIC, &now);
    const int64_t now_ms = (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
    if (*refusing_since_ms == LET_IN) *refusing_since_ms = now_ms;
    return now_ms - *refusing_since_ms >= PATIENCE_MS;
}

#endif
