// SPDX-License-Identifier: Apache-2.0
// Keeps a request whose strings are cut off out of the batches of others: batchstrategy.so, which `make` builds from
// this file, is loaded by Triton with the model in whose folder it lies, and asked about every request that is to join
// a batch.
//
// A BYTES tensor is, for each string, its length in 4 bytes and then its bytes. Where the last length promises more
// than there is, Triton's core lets the request through (24.10, and its main branch of 2026: ValidateBytesInputs of
// infer_request.cc), and its Python backend, which does look (ValidateStringBuffer), answers "incomplete string data"
// to the whole batch, before the handler sees any of it. So one caller could fail everybody's requests.
//
// Such a request is put in a batch of its own; the backend refuses it there. What Triton's batcher does between the
// calls, see classifier/batchstrategy.c: a batch from which a request was turned away is never merged with another, and
// so a batch turns its first request away once if that one is to stay alone.
//
// The exception: what a batch has turned away for PATIENCE_MS is let in, and may be failed with it. It takes a batch
// whose requests were cancelled while they waited for the queue delay, which this library is not told of.

#include "../batching.h"

#include <stdlib.h>
#include <string.h>

// What a batch holds.
typedef enum { NOTHING, SOUND, CUT } Content;

// Triton forms one batch of a model at a time, in one thread, so all that is known of it is kept with the model.
struct TRITONBACKEND_Batcher {
    void **batch;                        // where Triton keeps userp of the batch that is being formed
    Content content, content_before;     // of that batch, now and when the last walk over the queue began
    const TRITONBACKEND_Request *first;  // which that walk began with; only compared, it may be gone
    bool walk_begins;
    bool marked;                // as one not to be merged, by having turned something away
    int64_t refusing_since_ms;  // whatever comes, or LET_IN
};

// --- a request ---

// A place in the strings of a tensor, which may lie in several buffers.
typedef struct {
    uint64_t strings;      // that were begun
    uint64_t promised;     // bytes of the last of them that are still to come
    uint8_t length[4];     // of the next string, as far as it was read
    uint32_t length_read;  // so many bytes of it
} Walk;

static void walk(Walk *at, const uint8_t *bytes, uint64_t size) {
    while (size > 0) {
        if (at->promised > 0) {
            const uint64_t step = at->promised < size ? at->promised : size;
            at->promised -= step;
            bytes += step;
            size -= step;
            continue;
        }
        at->length[at->length_read++] = *bytes++;
        size--;
        if (at->length_read == sizeof at->length) {
            uint32_t length = 0;
            memcpy(&length, at->length, sizeof length);
            at->strings++;
            at->promised = length;
            at->length_read = 0;
        }
    }
}

// Whether the text of this request is less, or more, than it says. What cannot be looked at is for the backend to say.
static bool is_cut(TRITONBACKEND_Request *request) {
    TRITONBACKEND_Input *input = NULL;
    const int64_t *shape = NULL;
    uint32_t dims = 0, buffers = 0;
    TRITONSERVER_Error *error = TRITONBACKEND_RequestInput(request, "text", &input);
    if (error == NULL) error = TRITONBACKEND_InputProperties(input, NULL, NULL, &shape, &dims, NULL, &buffers);
    Walk at = {0};
    for (uint32_t index = 0; error == NULL && index < buffers; index++) {
        const void *buffer = NULL;
        uint64_t size = 0;
        TRITONSERVER_MemoryType memory_type = TRITONSERVER_MEMORY_CPU;
        int64_t memory_type_id = 0;
        error = TRITONBACKEND_InputBuffer(input, index, &buffer, &size, &memory_type, &memory_type_id);
        if (error == NULL && memory_type == TRITONSERVER_MEMORY_GPU) return false;
        if (error == NULL) walk(&at, buffer, size);
    }
    if (error != NULL) {
        TRITONSERVER_ErrorDelete(error);
        return false;
    }
    // The core has checked that the shape is that of a batch of strings, [rows, 1].
    const uint64_t rows = shape != NULL && dims > 0 && shape[0] > 0 ? (uint64_t)shape[0] : 0;
    return at.promised > 0 || at.length_read > 0 || at.strings != rows;
}

// --- the batches ---

TRITONSERVER_Error *TRITONBACKEND_ModelBatcherInitialize(TRITONBACKEND_Batcher **batcher, TRITONBACKEND_Model *model) {
    (void)model;
    *batcher = calloc(1, sizeof **batcher);
    if (*batcher == NULL) return TRITONSERVER_ErrorNew(TRITONSERVER_ERROR_INTERNAL, "out of memory");
    (*batcher)->refusing_since_ms = LET_IN;
    return NULL;
}

TRITONSERVER_Error *TRITONBACKEND_ModelBatcherFinalize(TRITONBACKEND_Batcher *batcher) {
    free(batcher);
    return NULL;
}

// A walk over the queue begins, for a new batch or for the same, which the address of its userp tells.
TRITONSERVER_Error *TRITONBACKEND_ModelBatchInitialize(const TRITONBACKEND_Batcher *of_model, void **userp) {
    TRITONBACKEND_Batcher *batcher = (TRITONBACKEND_Batcher *)of_model;
    *userp = batcher;
    if (batcher == NULL) return NULL;  // a model that is being unloaded
    if (userp != batcher->batch) {
        batcher->batch = userp;
        batcher->content = NOTHING;
        batcher->first = NULL;
        batcher->marked = false;
    }
    batcher->walk_begins = true;
    return NULL;
}

TRITONSERVER_Error *TRITONBACKEND_ModelBatchIncludeRequest(TRITONBACKEND_Request *request, void *userp,
                                                           bool *should_include) {
    TRITONBACKEND_Batcher *batcher = userp;
    *should_include = true;
    if (batcher == NULL) return NULL;
    if (batcher->walk_begins) {
        batcher->walk_begins = false;
        // A walk that begins with the request that the last one began with replaces that one.
        if (request == batcher->first) batcher->content = batcher->content_before;
        batcher->first = request;
        batcher->content_before = batcher->content;
    }
    const bool alone = is_cut(request) || batcher->content == CUT;
    const bool fits = !alone || (batcher->content == NOTHING && batcher->marked);
    if (!fits && !out_of_patience(&batcher->refusing_since_ms)) {
        batcher->marked = true;
        *should_include = false;
        return NULL;
    }
    batcher->content = alone ? CUT : SOUND;
    batcher->refusing_since_ms = LET_IN;
    return NULL;
}

TRITONSERVER_Error *TRITONBACKEND_ModelBatchFinalize(void *userp) {
    (void)userp;
    return NULL;
}
