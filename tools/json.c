#include "json.h"

#include <math.h>
#include <string.h>

#include "engine/utf8.h"

void fv_json_init(fv_json *json, FILE *file) { *json = (fv_json){.file = file}; }

/* What is no UTF-8, and bytes of 0, become U+FFFD. */
static void print_text(FILE *file, const char *text, size_t num_bytes)
{
    fputc('"', file);
    for (size_t i = 0; i < num_bytes;) {
        const unsigned char c = (unsigned char)text[i];
        const int32_t sequence = c == 0 ? 0 : fv_utf8_sequence(text + i, num_bytes - i);
        if (sequence <= 0) {
            fputs("\xef\xbf\xbd", file);
        } else if (c == '"' || c == '\\') {
            fprintf(file, "\\%c", c);
        } else if (c < 0x20) {
            fprintf(file, "\\u%04x", c);
        } else {
            fwrite(text + i, 1, (size_t)sequence, file);
        }
        i += sequence > 0 ? (size_t)sequence : 1;
    }
    fputc('"', file);
}

static void print_string(FILE *file, const char *text) { print_text(file, text, strlen(text)); }

static void break_line(fv_json *json)
{
    if (json->row_depth) return;
    fprintf(json->file, "\n%*s", 2 * json->depth, "");
}

static void begin_member(fv_json *json, const char *key)
{
    if (json->has_member) fputs(json->row_depth ? ", " : ",", json->file);
    if (json->depth > 0) break_line(json);
    if (key) {
        print_string(json->file, key);
        fputs(": ", json->file);
    }
    json->has_member = 1;
}

static void begin_nested(fv_json *json, const char *key, char bracket)
{
    begin_member(json, key);
    fputc(bracket, json->file);
    json->depth++;
    json->has_member = 0;
}

static void end_nested(fv_json *json, char bracket)
{
    json->depth--;
    if (json->has_member) break_line(json);
    fputc(bracket, json->file);
    if (json->row_depth > json->depth) json->row_depth = 0;
    json->has_member = 1;
    if (json->depth == 0) fputc('\n', json->file);
}

void fv_json_begin_object(fv_json *json, const char *key) { begin_nested(json, key, '{'); }

void fv_json_begin_row(fv_json *json)
{
    begin_nested(json, NULL, '{');
    json->row_depth = json->depth;
}

void fv_json_end_object(fv_json *json) { end_nested(json, '}'); }
void fv_json_begin_array(fv_json *json, const char *key) { begin_nested(json, key, '['); }
void fv_json_end_array(fv_json *json) { end_nested(json, ']'); }

void fv_json_string(fv_json *json, const char *key, const char *value)
{
    begin_member(json, key);
    if (value) {
        print_string(json->file, value);
    } else {
        fputs("null", json->file);
    }
}

void fv_json_text(fv_json *json, const char *key, const char *text, size_t num_bytes)
{
    begin_member(json, key);
    print_text(json->file, text, num_bytes);
}

void fv_json_int(fv_json *json, const char *key, int64_t value)
{
    begin_member(json, key);
    fprintf(json->file, "%lld", (long long)value);
}

void fv_json_double(fv_json *json, const char *key, double value)
{
    begin_member(json, key);
    if (isfinite(value)) {
        fprintf(json->file, "%.6g", value);
    } else {
        fputs("null", json->file);
    }
}

void fv_json_number(fv_json *json, const char *key, const char *decimal)
{
    begin_member(json, key);
    fputs(decimal, json->file);
}

void fv_json_bool(fv_json *json, const char *key, int32_t value)
{
    begin_member(json, key);
    fputs(value ? "true" : "false", json->file);
}
