#include "engine/recordings.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

uint8_t *read_whole_file(size_t *bytes, const char *path)
{
    FILE *file = fopen(path, "rb");
    if (!file) {
        perror(path);
        return NULL;
    }
    uint8_t *data = NULL;
    if (fseek(file, 0, SEEK_END) == 0) {
        *bytes = (size_t)ftell(file);
        rewind(file);
        data = malloc(*bytes + 1);
    }
    if (data && fread(data, 1, *bytes, file) != *bytes) {
        free(data);
        data = NULL;
    }
    if (data) data[*bytes] = 0;
    fclose(file);
    return data;
}

/* Takes `count` values of 4 bytes; NULL when the file ends before. All values of both files have 4. */
static const void *take(const uint8_t **position, const uint8_t *end, size_t count)
{
    const uint8_t *at = *position;
    if ((size_t)(end - at) / 4 < count) return NULL;
    *position += 4 * count;
    return at;
}

static bool refuse(const char *path, const char *why)
{
    fprintf(stderr, "%s: %s\n", path, why);
    return false;
}

bool recorded_logits_read(recorded_logits *logits, const char *path)
{
    *logits = (recorded_logits){0};
    size_t bytes;
    logits->file = read_whole_file(&bytes, path);
    if (!logits->file) return false;
    const uint8_t *at = logits->file, *end = at + bytes;
    const int32_t *header = take(&at, end, 6);
    if (!header || memcmp(header, "FVLG", 4) != 0 || header[1] != 1) return refuse(path, "not a recording of logits");
    logits->num_prompts = header[2];
    logits->num_probes = header[3];
    logits->vocabulary_size = header[4];
    logits->probe_ids = take(&at, end, (size_t)logits->num_probes);
    logits->position_bytes = sizeof(recorded_position) + 4 * (size_t)logits->num_probes;
    logits->prompts = calloc((size_t)logits->num_prompts, sizeof(*logits->prompts));
    if (!logits->prompts) return refuse(path, "no memory");
    for (int32_t i = 0; i < logits->num_prompts; i++) {
        recorded_prompt *prompt = &logits->prompts[i];
        const int32_t *counts = take(&at, end, 2);
        if (!counts) return refuse(path, "cut short");
        prompt->num_prompt_tokens = counts[0];
        prompt->num_tokens = counts[1];
        prompt->ids = take(&at, end, (size_t)counts[1]);
        prompt->positions = take(&at, end, (size_t)counts[1] * logits->position_bytes / 4);
        if (!prompt->ids || !prompt->positions) return refuse(path, "cut short");
    }
    return at == end ? true : refuse(path, "longer than it says");
}

void recorded_logits_free(recorded_logits *logits)
{
    free(logits->prompts);
    free(logits->file);
    *logits = (recorded_logits){0};
}

const recorded_position *recorded_position_at(const recorded_logits *logits, int32_t prompt, int32_t position)
{
    const uint8_t *at = logits->prompts[prompt].positions + (size_t)position * logits->position_bytes;
    return (const recorded_position *)(const void *)at;
}

bool recorded_essay_read(recorded_essay *essay, const char *path)
{
    *essay = (recorded_essay){0};
    size_t bytes;
    essay->file = read_whole_file(&bytes, path);
    if (!essay->file) return false;
    const uint8_t *at = essay->file, *end = at + bytes;
    const int32_t *header = take(&at, end, 3);
    if (!header || memcmp(header, "FVNL", 4) != 0 || header[1] != 1) return refuse(path, "not a recording of an essay");
    essay->num_tokens = header[2];
    essay->ids = take(&at, end, (size_t)essay->num_tokens);
    essay->nll = take(&at, end, (size_t)essay->num_tokens - 1);
    return essay->ids && essay->nll && at == end ? true : refuse(path, "not as long as it says");
}

void recorded_essay_free(recorded_essay *essay)
{
    free(essay->file);
    *essay = (recorded_essay){0};
}
