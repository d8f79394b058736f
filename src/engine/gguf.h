/* GGUF model files: named metadata and named tensors in one file, read through a read-only mapping.
 *
 *   | magic version | num tensors, num keys | keys and values | tensor table | pad | tensor data |
 *
 * The file is not trusted. Everything is checked once, when it is opened: lengths against the bytes
 * that are left, counts against the smallest entry, tensors against the end of the file and against
 * each other. After that no reader can leave the file. A failure says which file and what is wrong.
 * Format: GGUF versions 2 and 3, little-endian. */
#ifndef FV_ENGINE_GGUF_H
#define FV_ENGINE_GGUF_H

#include <stdbool.h>

#include "core/error.h"

/* Bytes inside the file: not terminated by a zero, may hold any byte. */
typedef struct fv_text {
    const char *data;
    size_t length;
} fv_text;

/* A text of the file made fit for an error message: short, without control characters. */
typedef struct fv_printable {
    char text[72];
} fv_printable;

/* As in fv_fail(FV_ERR_IO, "'%s'", fv_text_printable(name).text). */
fv_printable fv_text_printable(fv_text text);

/* Storage types of tensors that can be used. The values are those of the file. In the formulas q is an
 * integer of 4, 5, 6 or 8 bits; dequantize.c says where its bits are. */
typedef enum fv_gguf_type {
    FV_GGUF_F32 = 0,
    FV_GGUF_F16 = 1,
    FV_GGUF_Q4_0 = 2,  /* 32 values, 18 bytes: fp16 scale; scale * (q - 8) */
    FV_GGUF_Q4_1 = 3,  /* 32 values, 20 bytes: fp16 scale, fp16 minimum; scale * q + minimum */
    FV_GGUF_Q5_0 = 6,  /* 32 values, 22 bytes: fp16 scale; scale * (q - 16) */
    FV_GGUF_Q5_1 = 7,  /* 32 values, 24 bytes: fp16 scale, fp16 minimum; scale * q + minimum */
    FV_GGUF_Q8_0 = 8,  /* 32 values, 34 bytes: fp16 scale; scale * q */
    FV_GGUF_Q4_K = 12, /* 8 x 32 values, 144 bytes: scale * s[8] * q - minimum * m[8], s and m of 6 bits */
    FV_GGUF_Q5_K = 13, /* 8 x 32 values, 176 bytes: the same */
    FV_GGUF_Q6_K = 14, /* 16 x 16 values, 210 bytes: scale * s[16] * (q - 32), s of 8 bits */
    FV_GGUF_BF16 = 30,
} fv_gguf_type;

/* Their names, for error messages. */
#define FV_GGUF_USABLE_TYPES "F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K"

/* Types of metadata values. The values are those of the file. */
typedef enum fv_gguf_value_type {
    FV_GGUF_VALUE_U8 = 0,
    FV_GGUF_VALUE_I8 = 1,
    FV_GGUF_VALUE_U16 = 2,
    FV_GGUF_VALUE_I16 = 3,
    FV_GGUF_VALUE_U32 = 4,
    FV_GGUF_VALUE_I32 = 5,
    FV_GGUF_VALUE_F32 = 6,
    FV_GGUF_VALUE_BOOL = 7,
    FV_GGUF_VALUE_STRING = 8,
    FV_GGUF_VALUE_ARRAY = 9,
    FV_GGUF_VALUE_U64 = 10,
    FV_GGUF_VALUE_I64 = 11,
    FV_GGUF_VALUE_F64 = 12,
} fv_gguf_value_type;

#define FV_GGUF_MAX_DIMS 4

/* A tensor in the file. shape[0] is the length of a row, the contiguous dimension; the weight of a
 * linear layer is shape {in features, out features}. Unused entries of shape are 1. */
typedef struct fv_gguf_tensor {
    fv_text name;
    int32_t type; /* fv_gguf_type, or another value of the file format in a tensor that is only listed */
    int32_t num_dims;
    int64_t shape[FV_GGUF_MAX_DIMS];
    int64_t num_elements;
    uint64_t offset;  /* from the start of the tensor data */
    const void *data; /* aligned to the alignment that the file states, at least 8 */
    size_t bytes;     /* 0 when the type is not known to this reader */
} fv_gguf_tensor;

/* An array in the metadata. `position` and `bytes` are what is left to read; each
 * fv_gguf_array_next_* call takes one element. */
typedef struct fv_gguf_array {
    fv_gguf_value_type element_type;
    int64_t count;
    const uint8_t *position;
    size_t bytes;
} fv_gguf_array;

typedef struct fv_gguf fv_gguf;

/* Maps the file at `path` and checks it. FV_ERR_IO: cannot be read, or is malformed;
 * FV_ERR_UNSUPPORTED: another version or byte order. *gguf is NULL on failure. The mapping is
 * private and read-only; a file that another process cuts short while it is open raises SIGBUS, as
 * with every mapping. */
fv_status fv_gguf_open(fv_gguf **gguf, const char *path);

/* The same for a file in memory, which is kept until fv_gguf_close. `data` is aligned to 8. */
fv_status fv_gguf_open_memory(fv_gguf **gguf, const void *data, size_t bytes);

/* Takes NULL. Texts, arrays and tensors of the file end with it. */
void fv_gguf_close(fv_gguf *gguf);

/* The path given to fv_gguf_open, or "memory". */
const char *fv_gguf_path(const fv_gguf *gguf);

bool fv_gguf_has(const fv_gguf *gguf, const char *key);

/* Typed metadata. FV_ERR_IO when the key is missing, has another type, or its value does not fit:
 * the text names the key. u32 takes every integer type, f32 takes F32 and F64. */
fv_status fv_gguf_find_u32(uint32_t *value, const fv_gguf *gguf, const char *key);
fv_status fv_gguf_find_f32(float *value, const fv_gguf *gguf, const char *key);
fv_status fv_gguf_find_bool(bool *value, const fv_gguf *gguf, const char *key);
fv_status fv_gguf_find_string(fv_text *value, const fv_gguf *gguf, const char *key);
fv_status fv_gguf_find_array(fv_gguf_array *array, const fv_gguf *gguf, const char *key,
                             fv_gguf_value_type element_type);

/* Takes the next element; false at the end. The array must be one of strings, of I32, or of F32. */
bool fv_gguf_array_next_string(fv_text *value, fv_gguf_array *array);
bool fv_gguf_array_next_i32(int32_t *value, fv_gguf_array *array);
bool fv_gguf_array_next_f32(float *value, fv_gguf_array *array);

/* Metadata and tensors by position, in the order of their names: for listings. */
int64_t fv_gguf_num_keys(const fv_gguf *gguf);
fv_text fv_gguf_key(const fv_gguf *gguf, int64_t index);
int64_t fv_gguf_num_tensors(const fv_gguf *gguf);
const fv_gguf_tensor *fv_gguf_tensor_at(const fv_gguf *gguf, int64_t index);

/* The tensor of that name, of a type that can be used. FV_ERR_IO when it is missing,
 * FV_ERR_UNSUPPORTED with the name of its type when that cannot be used. */
fv_status fv_gguf_find_tensor(const fv_gguf_tensor **tensor, const fv_gguf *gguf, const char *name);

/* Tells the system that the pages of `tensor` are not needed soon, so that a converted model and its
 * file do not both count as used memory. They come back by themselves if read again. */
void fv_gguf_release_tensor(const fv_gguf *gguf, const fv_gguf_tensor *tensor);

/* "Q4_1" and so on, also of types that are only listed; "unknown". Static text. */
const char *fv_gguf_type_name(int32_t type);

/* True for the values of fv_gguf_type. */
bool fv_gguf_type_is_usable(int32_t type);

/* Bytes of `num` elements of a type of known size; 0 when the type is unknown or `num` is no
 * multiple of its block. The caller has made sure that `num` is below 2^56. */
size_t fv_gguf_type_bytes(int32_t type, int64_t num);

#endif
