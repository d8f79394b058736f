/* Reads a GGUF header in one pass: metadata, tensor table, then the checks that need all of it
 * (alignment, end of file, overlap). Keys and tensors are kept sorted by name, which finds
 * duplicates on the way and makes every later look-up a binary search. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/gguf_private.h"

enum {
    MAGIC = 0x46554747, /* "GGUF", little-endian */
    MIN_VERSION = 2,
    MAX_VERSION = 3,
    DEFAULT_ALIGNMENT = 32,
    MAX_ALIGNMENT = 1 << 20,
    MAX_NAME_LENGTH = 65535,
    MAX_ARRAY_DEPTH = 4,
    MIN_KEY_BYTES = 8 + 1 + 4 + 1,            /* length, a name of one byte, type, a value of one byte */
    MIN_TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8, /* length, name, rank, one dimension, type, offset */
};

/* Elements of a tensor: far above any model, low enough that byte counts never overflow. */
static const uint64_t max_elements = (uint64_t)1 << 50;

/* The smallest value of each fv_gguf_value_type: a string's length, an array's element type and count. */
static const uint8_t value_bytes[FV_GGUF_NUM_VALUE_TYPES] = {1, 1, 2, 2, 4, 4, 4, 1, 8, 12, 8, 8, 8};

/* What is left of the header. */
typedef struct reader {
    const fv_gguf *gguf;
    const uint8_t *position;
    size_t left;
} reader;

/* --- reading the header -------------------------------------------------------------------------- */

/* The next `num` bytes, or NULL with the error text set. */
static const uint8_t *take_bytes(reader *from, size_t num, const char *what)
{
    if (num > from->left) {
        fv_gguf_malformed(from->gguf, "truncated in %s: needs %zu bytes at offset %zu, the file has %zu left", what,
                          num, (size_t)(from->position - from->gguf->data), from->left);
        return NULL;
    }
    const uint8_t *bytes = from->position;
    from->position += num;
    from->left -= num;
    return bytes;
}

static fv_status read_u32(uint32_t *value, reader *from, const char *what)
{
    const uint8_t *bytes = take_bytes(from, sizeof(*value), what);
    if (!bytes) return FV_ERR_IO;
    memcpy(value, bytes, sizeof(*value));
    return FV_OK;
}

static fv_status read_u64(uint64_t *value, reader *from, const char *what)
{
    const uint8_t *bytes = take_bytes(from, sizeof(*value), what);
    if (!bytes) return FV_ERR_IO;
    memcpy(value, bytes, sizeof(*value));
    return FV_OK;
}

static fv_status read_text(fv_text *text, reader *from, const char *what)
{
    uint64_t length;
    const fv_status status = read_u64(&length, from, what);
    if (status != FV_OK) return status;
    if (length > from->left) {
        return fv_gguf_malformed(from->gguf, "truncated in %s: a string of %llu bytes, the file has %zu left", what,
                                 (unsigned long long)length, from->left);
    }
    const uint8_t *bytes = take_bytes(from, (size_t)length, what);
    *text = (fv_text){(const char *)bytes, (size_t)length};
    return FV_OK;
}

static fv_status read_name(fv_text *name, reader *from, const char *what)
{
    const fv_status status = read_text(name, from, what);
    if (status != FV_OK) return status;
    if (name->length == 0 || name->length > MAX_NAME_LENGTH) {
        return fv_gguf_malformed(from->gguf, "%s has %zu bytes; accepted: 1 to %d", what, name->length,
                                 MAX_NAME_LENGTH);
    }
    return FV_OK;
}

static fv_status skip_value(reader *from, uint32_t type, int32_t depth, const char *what);

/* An array of strings or of arrays has to be walked to know where it ends. */
static fv_status skip_array(reader *from, int32_t depth, const char *what)
{
    uint32_t type;
    uint64_t count;
    fv_status status = read_u32(&type, from, what);
    if (status == FV_OK) status = read_u64(&count, from, what);
    if (status != FV_OK) return status;
    if (type >= FV_GGUF_NUM_VALUE_TYPES) {
        return fv_gguf_malformed(from->gguf, "%s: array of unknown value type %u", what, type);
    }
    if (depth >= MAX_ARRAY_DEPTH) {
        return fv_gguf_malformed(from->gguf, "%s: arrays nested more than %d deep", what, MAX_ARRAY_DEPTH);
    }
    const size_t element_bytes = (size_t)value_bytes[type];
    if (count > from->left / element_bytes) {
        return fv_gguf_malformed(from->gguf, "%s: array of %llu elements of type %s, the file has only %zu bytes left",
                                 what, (unsigned long long)count, fv_gguf_value_type_name(type), from->left);
    }
    if (type != FV_GGUF_VALUE_STRING && type != FV_GGUF_VALUE_ARRAY) {
        return take_bytes(from, (size_t)count * element_bytes, what) ? FV_OK : FV_ERR_IO;
    }
    for (uint64_t i = 0; i < count; i++) {
        status = skip_value(from, type, depth + 1, what);
        if (status != FV_OK) return status;
    }
    return FV_OK;
}

static fv_status skip_value(reader *from, uint32_t type, int32_t depth, const char *what)
{
    fv_text text;
    if (type == FV_GGUF_VALUE_STRING) return read_text(&text, from, what);
    if (type == FV_GGUF_VALUE_ARRAY) return skip_array(from, depth, what);
    if (type >= FV_GGUF_NUM_VALUE_TYPES) {
        return fv_gguf_malformed(from->gguf, "%s: unknown value type %u", what, type);
    }
    return take_bytes(from, (size_t)value_bytes[type], what) ? FV_OK : FV_ERR_IO;
}

static fv_status read_metadata_entry(fv_gguf_metadata_entry *entry, reader *from)
{
    uint32_t type;
    fv_status status = read_name(&entry->key, from, "a metadata key");
    if (status == FV_OK) status = read_u32(&type, from, "a metadata key");
    if (status != FV_OK) return status;

    char what[96];
    snprintf(what, sizeof(what), "metadata key '%s'", fv_text_printable(entry->key).text);
    const uint8_t *const value = from->position;
    status = skip_value(from, type, 0, what);
    if (status != FV_OK) return status;
    entry->type = (fv_gguf_value_type)type;
    entry->value = value;
    entry->bytes = (size_t)(from->position - value);
    return FV_OK;
}

static fv_status read_shape(fv_gguf_tensor *tensor, reader *from, const char *what)
{
    uint32_t num_dims;
    fv_status status = read_u32(&num_dims, from, what);
    if (status != FV_OK) return status;
    if (num_dims < 1 || num_dims > FV_GGUF_MAX_DIMS) {
        return fv_gguf_malformed(from->gguf, "%s has %u dimensions; accepted: 1 to %d", what, num_dims,
                                 FV_GGUF_MAX_DIMS);
    }
    uint64_t num_elements = 1;
    for (uint32_t d = 0; d < FV_GGUF_MAX_DIMS; d++) {
        uint64_t size = 1;
        if (d < num_dims) status = read_u64(&size, from, what);
        if (status != FV_OK) return status;
        if (size == 0 || size > max_elements / num_elements) {
            return fv_gguf_malformed(from->gguf, "%s has an absurd size %llu in dimension %u", what,
                                     (unsigned long long)size, d);
        }
        num_elements *= size;
        tensor->shape[d] = (int64_t)size;
    }
    tensor->num_dims = (int32_t)num_dims;
    tensor->num_elements = (int64_t)num_elements;
    return FV_OK;
}

static fv_status read_tensor_entry(fv_gguf_tensor *tensor, reader *from)
{
    fv_status status = read_name(&tensor->name, from, "a tensor name");
    if (status != FV_OK) return status;
    char what[96];
    snprintf(what, sizeof(what), "tensor '%s'", fv_text_printable(tensor->name).text);

    uint32_t type;
    status = read_shape(tensor, from, what);
    if (status == FV_OK) status = read_u32(&type, from, what);
    if (status == FV_OK) status = read_u64(&tensor->offset, from, what);
    if (status != FV_OK) return status;
    if (type > INT32_MAX) return fv_gguf_malformed(from->gguf, "%s has unknown type %u", what, type);

    tensor->type = (int32_t)type;
    const int32_t block = fv_gguf_type_block(tensor->type);
    if (block == 0) return FV_OK; /* listed with 0 bytes, refused when it is used */
    if (tensor->shape[0] % block != 0) {
        return fv_gguf_malformed(from->gguf, "%s: rows of %lld elements do not fit type %s, whose blocks have %d", what,
                                 (long long)tensor->shape[0], fv_gguf_type_name(tensor->type), block);
    }
    tensor->bytes = fv_gguf_type_bytes(tensor->type, tensor->num_elements);
    return FV_OK;
}

/* Magic, version, and the two counts, checked against what the file can hold. */
static fv_status read_preamble(fv_gguf *gguf, reader *from)
{
    uint32_t magic, version;
    uint64_t num_tensors, num_keys;
    fv_status status = read_u32(&magic, from, "the file header");
    if (status != FV_OK) return status;
    if (magic != MAGIC) {
        return fv_gguf_malformed(gguf,
                                 "not a GGUF file: it starts with %02x %02x %02x %02x, expected 47 47 55 46 (\"GGUF\")",
                                 magic & 0xff, magic >> 8 & 0xff, magic >> 16 & 0xff, magic >> 24);
    }
    status = read_u32(&version, from, "the file header");
    if (status != FV_OK) return status;
    if (version < MIN_VERSION || version > MAX_VERSION) {
        return fv_fail(FV_ERR_UNSUPPORTED, "%s: GGUF version %u%s; accepted: %d and %d, little-endian", gguf->path,
                       version, version != 0 && (version & 0xffff) == 0 ? " (a big-endian file)" : "", MIN_VERSION,
                       MAX_VERSION);
    }
    status = read_u64(&num_tensors, from, "the file header");
    if (status == FV_OK) status = read_u64(&num_keys, from, "the file header");
    if (status != FV_OK) return status;
    if (num_tensors > from->left / MIN_TENSOR_BYTES) {
        return fv_gguf_malformed(gguf, "claims %llu tensors, more than its %zu bytes can list",
                                 (unsigned long long)num_tensors, gguf->bytes);
    }
    if (num_keys > from->left / MIN_KEY_BYTES) {
        return fv_gguf_malformed(gguf, "claims %llu metadata keys, more than its %zu bytes can list",
                                 (unsigned long long)num_keys, gguf->bytes);
    }
    gguf->num_tensors = (int64_t)num_tensors;
    gguf->num_keys = (int64_t)num_keys;
    return FV_OK;
}

static int compare_tensor_offsets(const void *a, const void *b)
{
    const fv_gguf_tensor *first = *(const fv_gguf_tensor *const *)a;
    const fv_gguf_tensor *second = *(const fv_gguf_tensor *const *)b;
    if (first->offset != second->offset) return first->offset < second->offset ? -1 : 1;
    return first->bytes < second->bytes ? -1 : first->bytes > second->bytes;
}

/* --- the checks that need the whole header ------------------------------------------------------- */

static fv_status read_metadata(fv_gguf *gguf, reader *from)
{
    if (gguf->num_keys == 0) return FV_OK;
    gguf->keys = calloc((size_t)gguf->num_keys, sizeof(*gguf->keys));
    if (!gguf->keys) return fv_fail(FV_ERR_NO_MEMORY, "%s: no memory for its metadata", gguf->path);
    for (int64_t i = 0; i < gguf->num_keys; i++) {
        const fv_status status = read_metadata_entry(&gguf->keys[i], from);
        if (status != FV_OK) return status;
    }
    qsort(gguf->keys, (size_t)gguf->num_keys, sizeof(*gguf->keys), fv_gguf_compare_keys);
    for (int64_t i = 1; i < gguf->num_keys; i++) {
        if (fv_gguf_compare_keys(&gguf->keys[i - 1], &gguf->keys[i]) != 0) continue;
        return fv_gguf_malformed(gguf, "metadata key '%s' appears twice", fv_text_printable(gguf->keys[i].key).text);
    }
    return FV_OK;
}

static fv_status read_tensor_table(fv_gguf *gguf, reader *from)
{
    if (gguf->num_tensors == 0) return FV_OK;
    gguf->tensors = calloc((size_t)gguf->num_tensors, sizeof(*gguf->tensors));
    if (!gguf->tensors) return fv_fail(FV_ERR_NO_MEMORY, "%s: no memory for its tensor table", gguf->path);
    for (int64_t i = 0; i < gguf->num_tensors; i++) {
        const fv_status status = read_tensor_entry(&gguf->tensors[i], from);
        if (status != FV_OK) return status;
    }
    qsort(gguf->tensors, (size_t)gguf->num_tensors, sizeof(*gguf->tensors), fv_gguf_compare_tensors);
    for (int64_t i = 1; i < gguf->num_tensors; i++) {
        if (fv_gguf_compare_tensors(&gguf->tensors[i - 1], &gguf->tensors[i]) != 0) continue;
        return fv_gguf_malformed(gguf, "tensor '%s' appears twice", fv_text_printable(gguf->tensors[i].name).text);
    }
    return FV_OK;
}

static fv_status read_alignment(uint32_t *alignment, const fv_gguf *gguf)
{
    *alignment = DEFAULT_ALIGNMENT;
    if (!fv_gguf_has(gguf, "general.alignment")) return FV_OK;
    const fv_status status = fv_gguf_find_u32(alignment, gguf, "general.alignment");
    if (status != FV_OK) return status;
    const bool power_of_two = *alignment != 0 && (*alignment & (*alignment - 1)) == 0;
    if (!power_of_two || *alignment < FV_GGUF_MIN_ALIGNMENT || *alignment > MAX_ALIGNMENT) {
        return fv_gguf_malformed(gguf, "general.alignment is %u; accepted: a power of two from %d to %d", *alignment,
                                 FV_GGUF_MIN_ALIGNMENT, MAX_ALIGNMENT);
    }
    return FV_OK;
}

/* Every tensor inside the file, at an aligned offset. Fills the data pointers. */
static fv_status place_tensors(fv_gguf *gguf, uint32_t alignment)
{
    const size_t data_bytes = gguf->bytes - gguf->data_start;
    for (int64_t i = 0; i < gguf->num_tensors; i++) {
        fv_gguf_tensor *tensor = &gguf->tensors[i];
        if (tensor->offset % alignment != 0) {
            return fv_gguf_malformed(gguf, "tensor '%s' is misaligned: offset %llu is no multiple of %u",
                                     fv_text_printable(tensor->name).text, (unsigned long long)tensor->offset,
                                     alignment);
        }
        if (tensor->offset > data_bytes || tensor->bytes > data_bytes - tensor->offset) {
            return fv_gguf_malformed(
                gguf,
                "tensor '%s' lies past the end of the file: offset %llu and %zu bytes, but the tensor "
                "data has %zu; the file is truncated or damaged",
                fv_text_printable(tensor->name).text, (unsigned long long)tensor->offset, tensor->bytes, data_bytes);
        }
        tensor->data = gguf->data + gguf->data_start + (size_t)tensor->offset;
    }
    return FV_OK;
}

static fv_status refuse_overlap(const fv_gguf *gguf)
{
    if (gguf->num_tensors < 2) return FV_OK;
    const fv_gguf_tensor **order = malloc((size_t)gguf->num_tensors * sizeof(*order));
    if (!order) return fv_fail(FV_ERR_NO_MEMORY, "%s: no memory to check its tensor table", gguf->path);
    for (int64_t i = 0; i < gguf->num_tensors; i++) order[i] = &gguf->tensors[i];
    qsort(order, (size_t)gguf->num_tensors, sizeof(*order), compare_tensor_offsets);

    fv_status status = FV_OK;
    for (int64_t i = 1; i < gguf->num_tensors && status == FV_OK; i++) {
        if (order[i]->offset - order[i - 1]->offset >= order[i - 1]->bytes) continue;
        status = fv_gguf_malformed(gguf, "tensors '%s' and '%s' overlap at offset %llu",
                                   fv_text_printable(order[i - 1]->name).text, fv_text_printable(order[i]->name).text,
                                   (unsigned long long)order[i]->offset);
    }
    free(order);
    return status;
}

fv_status fv_gguf_parse(fv_gguf *gguf)
{
    reader from = {gguf, gguf->data, gguf->bytes};
    uint32_t alignment;
    fv_status status = read_preamble(gguf, &from);
    if (status == FV_OK) status = read_metadata(gguf, &from);
    if (status == FV_OK) status = read_tensor_table(gguf, &from);
    if (status == FV_OK) status = read_alignment(&alignment, gguf);
    if (status != FV_OK) return status;

    const size_t header_bytes = gguf->bytes - from.left;
    const size_t padding = (alignment - header_bytes % alignment) % alignment;
    if (padding > from.left && gguf->num_tensors > 0) {
        return fv_gguf_malformed(gguf, "truncated after the header of %zu bytes: no tensor data", header_bytes);
    }
    gguf->data_start = padding > from.left ? gguf->bytes : header_bytes + padding;
    status = place_tensors(gguf, alignment);
    return status == FV_OK ? refuse_overlap(gguf) : status;
}
