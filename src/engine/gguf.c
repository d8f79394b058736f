/* Opens a GGUF file, and answers questions about it from what gguf_parse.c found. */
#include <errno.h>
#include <fcntl.h>
#include <float.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "engine/gguf_private.h"

fv_printable fv_text_printable(fv_text text)
{
    fv_printable result;
    const size_t length = text.length < sizeof(result.text) - 1 ? text.length : sizeof(result.text) - 1;
    for (size_t i = 0; i < length; i++) {
        const unsigned char c = (unsigned char)text.data[i];
        result.text[i] = c >= 0x20 && c < 0x7f ? (char)c : '?';
    }
    result.text[length] = '\0';
    return result;
}

fv_status fv_gguf_malformed(const fv_gguf *gguf, const char *format, ...)
{
    char text[512];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    return fv_fail(FV_ERR_IO, "%s: %s", gguf->path, text);
}

static int compare_texts(fv_text a, fv_text b)
{
    const size_t shorter = a.length < b.length ? a.length : b.length;
    const int order = memcmp(a.data, b.data, shorter);
    if (order != 0) return order;
    return a.length < b.length ? -1 : a.length > b.length;
}

int fv_gguf_compare_keys(const void *a, const void *b)
{
    return compare_texts(((const fv_gguf_metadata_entry *)a)->key, ((const fv_gguf_metadata_entry *)b)->key);
}

int fv_gguf_compare_tensors(const void *a, const void *b)
{
    return compare_texts(((const fv_gguf_tensor *)a)->name, ((const fv_gguf_tensor *)b)->name);
}

static const fv_gguf_metadata_entry *find_key(const fv_gguf *gguf, const char *key)
{
    if (gguf->num_keys == 0) return NULL;
    const fv_gguf_metadata_entry wanted = {.key = {key, strlen(key)}};
    return bsearch(&wanted, gguf->keys, (size_t)gguf->num_keys, sizeof(*gguf->keys), fv_gguf_compare_keys);
}

/* --- opening ------------------------------------------------------------------------------------- */

/* Takes `data` over when it is mapped, also on failure. */
static fv_status open_bytes(fv_gguf **gguf, const char *path, const void *data, size_t bytes, bool mapped)
{
    fv_status status = FV_ERR_NO_MEMORY;
    fv_gguf *opened = calloc(1, sizeof(*opened));
    if (!opened) {
        if (mapped) munmap((void *)(uintptr_t)data, bytes);
        return fv_fail(status, "%s: no memory to open it", path);
    }
    *opened = (fv_gguf){.data = data, .bytes = bytes, .mapped = mapped};
    opened->path = strdup(path);
    if (!opened->path) {
        fv_fail(status, "%s: no memory to open it", path);
        goto fail;
    }
    status = fv_gguf_parse(opened);
    if (status != FV_OK) goto fail;
    *gguf = opened;
    return FV_OK;
fail:
    fv_gguf_close(opened);
    return status;
}

fv_status fv_gguf_open(fv_gguf **gguf, const char *path)
{
    *gguf = NULL;
    fv_status status = FV_OK;
    struct stat info;
    void *data = MAP_FAILED;
    const int file = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* a FIFO is refused, not waited for */
    if (file < 0) return fv_fail(FV_ERR_IO, "%s: cannot open the model file: %s", path, strerror(errno));
    if (fstat(file, &info) != 0) {
        status = fv_fail(FV_ERR_IO, "%s: cannot read the size of the file: %s", path, strerror(errno));
    } else if (!S_ISREG(info.st_mode)) {
        status = fv_fail(FV_ERR_IO, "%s: not a regular file; a GGUF model file is expected", path);
    } else if (info.st_size == 0) {
        status = fv_fail(FV_ERR_IO, "%s: the file is empty; a GGUF model file is expected", path);
    } else {
        data = mmap(NULL, (size_t)info.st_size, PROT_READ, MAP_PRIVATE, file, 0);
        if (data == MAP_FAILED) {
            status = fv_fail(FV_ERR_IO, "%s: cannot map the file: %s", path, strerror(errno));
        }
    }
    close(file); /* the mapping keeps the file */
    if (status != FV_OK) return status;
    return open_bytes(gguf, path, data, (size_t)info.st_size, true);
}

fv_status fv_gguf_open_memory(fv_gguf **gguf, const void *data, size_t bytes)
{
    *gguf = NULL;
    if (!data || (uintptr_t)data % FV_GGUF_MIN_ALIGNMENT != 0) {
        return fv_fail(FV_ERR_INVALID, "memory at %p is misaligned; accepted: multiples of %d", data,
                       FV_GGUF_MIN_ALIGNMENT);
    }
    return open_bytes(gguf, "memory", data, bytes, false);
}

void fv_gguf_close(fv_gguf *gguf)
{
    if (!gguf) return;
    if (gguf->mapped) munmap((void *)(uintptr_t)gguf->data, gguf->bytes);
    free(gguf->keys);
    free(gguf->tensors);
    free(gguf->path);
    free(gguf);
}

const char *fv_gguf_path(const fv_gguf *gguf) { return gguf->path; }

/* --- metadata ------------------------------------------------------------------------------------ */

bool fv_gguf_has(const fv_gguf *gguf, const char *key) { return find_key(gguf, key) != NULL; }

/* The entry for `key`, or NULL with the error text set. */
static const fv_gguf_metadata_entry *require_key(const fv_gguf *gguf, const char *key)
{
    const fv_gguf_metadata_entry *entry = find_key(gguf, key);
    if (!entry) fv_gguf_malformed(gguf, "metadata key '%s' is missing", key);
    return entry;
}

static fv_status wrong_type(const fv_gguf *gguf, const fv_gguf_metadata_entry *entry, const char *key,
                            const char *accepted)
{
    return fv_gguf_malformed(gguf, "metadata key '%s' has type %s; accepted: %s", key,
                             fv_gguf_value_type_name(entry->type), accepted);
}

/* An integer of any width as sign and magnitude; false for other types. */
static bool read_integer(uint64_t *magnitude, bool *negative, const fv_gguf_metadata_entry *entry)
{
    static const bool is_signed[] = {
        [FV_GGUF_VALUE_I8] = true, [FV_GGUF_VALUE_I16] = true, [FV_GGUF_VALUE_I32] = true, [FV_GGUF_VALUE_I64] = true};
    switch (entry->type) {
    case FV_GGUF_VALUE_U8:
    case FV_GGUF_VALUE_I8:
    case FV_GGUF_VALUE_U16:
    case FV_GGUF_VALUE_I16:
    case FV_GGUF_VALUE_U32:
    case FV_GGUF_VALUE_I32:
    case FV_GGUF_VALUE_U64:
    case FV_GGUF_VALUE_I64: break;
    default: return false;
    }
    uint64_t bits = 0;
    for (size_t i = 0; i < entry->bytes; i++) bits |= (uint64_t)entry->value[i] << (8 * i);
    *negative = is_signed[entry->type] && entry->value[entry->bytes - 1] >= 0x80;
    *magnitude = bits;
    return true;
}

fv_status fv_gguf_find_u32(uint32_t *value, const fv_gguf *gguf, const char *key)
{
    const fv_gguf_metadata_entry *entry = require_key(gguf, key);
    if (!entry) return FV_ERR_IO;
    uint64_t magnitude;
    bool negative;
    if (!read_integer(&magnitude, &negative, entry)) return wrong_type(gguf, entry, key, "an integer");
    if (negative) return fv_gguf_malformed(gguf, "metadata key '%s' is negative; accepted: 0 to %u", key, UINT32_MAX);
    if (magnitude > UINT32_MAX) {
        return fv_gguf_malformed(gguf, "metadata key '%s' is %llu; accepted: 0 to %u", key,
                                 (unsigned long long)magnitude, UINT32_MAX);
    }
    *value = (uint32_t)magnitude;
    return FV_OK;
}

fv_status fv_gguf_find_f32(float *value, const fv_gguf *gguf, const char *key)
{
    const fv_gguf_metadata_entry *entry = require_key(gguf, key);
    if (!entry) return FV_ERR_IO;
    double wide;
    float narrow;
    if (entry->type == FV_GGUF_VALUE_F32) {
        memcpy(&narrow, entry->value, sizeof(narrow));
        wide = narrow;
    } else if (entry->type == FV_GGUF_VALUE_F64) {
        memcpy(&wide, entry->value, sizeof(wide));
    } else {
        return wrong_type(gguf, entry, key, "f32 or f64");
    }
    if (!(wide >= -FLT_MAX && wide <= FLT_MAX)) {
        return fv_gguf_malformed(gguf, "metadata key '%s' is %g; accepted: a finite float", key, wide);
    }
    *value = (float)wide;
    return FV_OK;
}

fv_status fv_gguf_find_bool(bool *value, const fv_gguf *gguf, const char *key)
{
    const fv_gguf_metadata_entry *entry = require_key(gguf, key);
    if (!entry) return FV_ERR_IO;
    if (entry->type != FV_GGUF_VALUE_BOOL) return wrong_type(gguf, entry, key, "bool");
    *value = entry->value[0] != 0;
    return FV_OK;
}

fv_status fv_gguf_find_string(fv_text *value, const fv_gguf *gguf, const char *key)
{
    const fv_gguf_metadata_entry *entry = require_key(gguf, key);
    if (!entry) return FV_ERR_IO;
    if (entry->type != FV_GGUF_VALUE_STRING) return wrong_type(gguf, entry, key, "string");
    const size_t prefix = sizeof(uint64_t);
    *value = (fv_text){(const char *)entry->value + prefix, entry->bytes - prefix};
    return FV_OK;
}

fv_status fv_gguf_find_array(fv_gguf_array *array, const fv_gguf *gguf, const char *key,
                             fv_gguf_value_type element_type)
{
    const fv_gguf_metadata_entry *entry = require_key(gguf, key);
    if (!entry) return FV_ERR_IO;
    if (entry->type != FV_GGUF_VALUE_ARRAY) return wrong_type(gguf, entry, key, "array");
    uint32_t type;
    uint64_t count;
    const size_t prefix = sizeof(type) + sizeof(count);
    memcpy(&type, entry->value, sizeof(type));
    memcpy(&count, entry->value + sizeof(type), sizeof(count));
    if (type != (uint32_t)element_type) {
        return fv_gguf_malformed(gguf, "metadata key '%s' is an array of %s; accepted: an array of %s", key,
                                 fv_gguf_value_type_name(type), fv_gguf_value_type_name(element_type));
    }
    *array = (fv_gguf_array){element_type, (int64_t)count, entry->value + prefix, entry->bytes - prefix};
    return FV_OK;
}

bool fv_gguf_array_next_string(fv_text *value, fv_gguf_array *array)
{
    uint64_t length;
    if (array->element_type != FV_GGUF_VALUE_STRING || array->bytes < sizeof(length)) return false;
    memcpy(&length, array->position, sizeof(length)); /* fits: checked when the file was opened */
    *value = (fv_text){(const char *)array->position + sizeof(length), (size_t)length};
    array->position += sizeof(length) + (size_t)length;
    array->bytes -= sizeof(length) + (size_t)length;
    return true;
}

bool fv_gguf_array_next_i32(int32_t *value, fv_gguf_array *array)
{
    if (array->element_type != FV_GGUF_VALUE_I32 || array->bytes < sizeof(*value)) return false;
    memcpy(value, array->position, sizeof(*value));
    array->position += sizeof(*value);
    array->bytes -= sizeof(*value);
    return true;
}

bool fv_gguf_array_next_f32(float *value, fv_gguf_array *array)
{
    if (array->element_type != FV_GGUF_VALUE_F32 || array->bytes < sizeof(*value)) return false;
    memcpy(value, array->position, sizeof(*value));
    array->position += sizeof(*value);
    array->bytes -= sizeof(*value);
    return true;
}

int64_t fv_gguf_num_keys(const fv_gguf *gguf) { return gguf->num_keys; }

fv_text fv_gguf_key(const fv_gguf *gguf, int64_t index) { return gguf->keys[index].key; }

/* --- tensors ------------------------------------------------------------------------------------- */

int64_t fv_gguf_num_tensors(const fv_gguf *gguf) { return gguf->num_tensors; }

const fv_gguf_tensor *fv_gguf_tensor_at(const fv_gguf *gguf, int64_t index) { return &gguf->tensors[index]; }

fv_status fv_gguf_find_tensor(const fv_gguf_tensor **tensor, const fv_gguf *gguf, const char *name)
{
    const fv_gguf_tensor wanted = {.name = {name, strlen(name)}};
    const fv_gguf_tensor *found = NULL;
    if (gguf->num_tensors > 0) {
        found = bsearch(&wanted, gguf->tensors, (size_t)gguf->num_tensors, sizeof(wanted), fv_gguf_compare_tensors);
    }
    if (!found) return fv_gguf_malformed(gguf, "tensor '%s' is missing", name);
    if (!fv_gguf_type_is_usable(found->type)) {
        return fv_fail(FV_ERR_UNSUPPORTED, "%s: tensor '%s' has type %s (%d); accepted: %s", gguf->path, name,
                       fv_gguf_type_name(found->type), found->type, FV_GGUF_USABLE_TYPES);
    }
    *tensor = found;
    return FV_OK;
}

void fv_gguf_release_tensor(const fv_gguf *gguf, const fv_gguf_tensor *tensor)
{
    if (!gguf->mapped) return;
    /* Only whole pages: the first and the last are shared with neighbours. */
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    const uintptr_t begin = ((uintptr_t)tensor->data + page - 1) / page * page;
    const uintptr_t end = ((uintptr_t)tensor->data + tensor->bytes) / page * page;
    if (begin < end) madvise((void *)begin, end - begin, MADV_DONTNEED);
}
