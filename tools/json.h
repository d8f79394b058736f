/* Writes JSON to a file, as the subcommands' --json want it. A printer only: members in the order of
 * the calls, strings escaped and what is no UTF-8 in them replaced by U+FFFD, numbers that JSON has
 * no form for (NaN, infinity) as null. An object that is begun with fv_json_begin_row, and all in it,
 * is one line: files stay easy to compare. */
#ifndef FV_TOOLS_JSON_H
#define FV_TOOLS_JSON_H

#include <stdint.h>
#include <stdio.h>

typedef struct fv_json {
    FILE *file;
    int32_t depth;
    int32_t row_depth;  /* depth of the open row; 0: none */
    int32_t has_member; /* 1: the open object or array needs a comma before the next member */
} fv_json;

void fv_json_init(fv_json *json, FILE *file);

/* `key` is NULL in an array and at the top. */
void fv_json_begin_object(fv_json *json, const char *key);
void fv_json_begin_row(fv_json *json);
void fv_json_end_object(fv_json *json); /* also of a row; at the top writes the last line's end */
void fv_json_begin_array(fv_json *json, const char *key);
void fv_json_end_array(fv_json *json);

void fv_json_string(fv_json *json, const char *key, const char *value); /* NULL value: null */
void fv_json_text(fv_json *json, const char *key, const char *text, size_t num_bytes);
void fv_json_int(fv_json *json, const char *key, int64_t value);
void fv_json_double(fv_json *json, const char *key, double value);        /* six digits of it */
void fv_json_number(fv_json *json, const char *key, const char *decimal); /* as it stands */
void fv_json_bool(fv_json *json, const char *key, int32_t value);

#endif
