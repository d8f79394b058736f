/* What the files of the GGUF reader share: gguf_parse.c fills it, gguf.c answers from it. */
#ifndef FV_ENGINE_GGUF_PRIVATE_H
#define FV_ENGINE_GGUF_PRIVATE_H

#include "engine/gguf.h"

#define FV_GGUF_MIN_ALIGNMENT 8
#define FV_GGUF_NUM_VALUE_TYPES 13

typedef struct fv_gguf_metadata_entry {
    fv_text key;
    fv_gguf_value_type type;
    const uint8_t *value; /* strings and arrays: their length or element type comes first, as in the file */
    size_t bytes;         /* of the whole value */
} fv_gguf_metadata_entry;

struct fv_gguf {
    char *path;
    const uint8_t *data;
    size_t bytes;
    bool mapped;
    size_t data_start;
    fv_gguf_metadata_entry *keys;
    int64_t num_keys;
    fv_gguf_tensor *tensors;
    int64_t num_tensors;
};

/* Reads the header at gguf->data and fills the rest, sorted by name. Also on failure fv_gguf_close
 * frees what was filled. */
fv_status fv_gguf_parse(fv_gguf *gguf);

/* FV_ERR_IO with the path in front. */
fv_status fv_gguf_malformed(const fv_gguf *gguf, const char *format, ...) FV_PRINTF(2, 3);

/* For qsort and bsearch: the order of keys and of tensors. */
int fv_gguf_compare_keys(const void *a, const void *b);
int fv_gguf_compare_tensors(const void *a, const void *b);

/* "u8", "string" and so on. */
const char *fv_gguf_value_type_name(uint32_t type);

/* Elements in a block of a tensor type; 0 when the type is unknown. */
int32_t fv_gguf_type_block(int32_t type);

#endif
