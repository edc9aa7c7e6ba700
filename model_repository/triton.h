// SPDX-License-Identifier: Apache-2.0
// What the batching libraries of tokenizer/ and classifier/ take of tritonserver.h and tritonbackend.h, so that a
// compiler is all that it takes to build them. The server that loads a library has the functions.

#ifndef TRITON_H
#define TRITON_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

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

#endif
