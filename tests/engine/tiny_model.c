#include "engine/tiny_model.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "core/compiler.h"
#include "engine/gguf_builder.h"

enum { hidden = 64, heads = 4, head_size = 32, ffn = 96, max_tensors = 128 };

typedef struct tensor_list {
    struct {
        char name[48];
        int32_t columns, rows;
    } tensors[max_tensors];
    int32_t num;
} tensor_list;

static void add_tensor(tensor_list *list, int32_t layer, const char *name, int32_t columns, int32_t rows)
{
    char *text = list->tensors[list->num].name;
    const size_t size = sizeof(list->tensors[0].name);
    if (layer < 0) {
        snprintf(text, size, "%s.weight", name);
    } else {
        snprintf(text, size, "blk.%d.%s.weight", layer, name);
    }
    list->tensors[list->num].columns = columns;
    list->tensors[list->num++].rows = rows;
}

static void list_tensors(tensor_list *list)
{
    static const struct {
        const char *name;
        int32_t columns, rows;
    } of_layer[] = {
        {"attn_norm", hidden, 1},
        {"attn_q", hidden, heads * head_size},
        {"attn_k", hidden, head_size},
        {"attn_v", hidden, head_size},
        {"attn_q_norm", head_size, 1},
        {"attn_k_norm", head_size, 1},
        {"attn_output", heads * head_size, hidden},
        {"post_attention_norm", hidden, 1},
        {"ffn_norm", hidden, 1},
        {"ffn_gate", hidden, ffn},
        {"ffn_up", hidden, ffn},
        {"ffn_down", ffn, hidden},
        {"post_ffw_norm", hidden, 1},
    };
    *list = (tensor_list){0};
    add_tensor(list, -1, "token_embd", hidden, TINY_VOCABULARY);
    add_tensor(list, -1, "output_norm", hidden, 1);
    for (int32_t layer = 0; layer < TINY_LAYERS; layer++) {
        for (int32_t i = 0; i < FV_ARRAY_LEN(of_layer); i++) {
            add_tensor(list, layer, of_layer[i].name, of_layer[i].columns, of_layer[i].rows);
        }
    }
}

static void put_metadata(gguf_builder *out, bool has_chat)
{
    put_string_key(out, "general.architecture", "gemma3");
    put_u32_key(out, "gemma3.block_count", TINY_LAYERS);
    put_u32_key(out, "gemma3.embedding_length", hidden);
    put_u32_key(out, "gemma3.attention.head_count", heads);
    put_u32_key(out, "gemma3.attention.head_count_kv", 1);
    put_u32_key(out, "gemma3.attention.key_length", head_size);
    put_u32_key(out, "gemma3.attention.value_length", head_size);
    put_u32_key(out, "gemma3.feed_forward_length", ffn);
    put_u32_key(out, "gemma3.context_length", TINY_CONTEXT);
    put_u32_key(out, "gemma3.attention.sliding_window", TINY_WINDOW);
    put_u32_key(out, "gemma3.attention.sliding_window_pattern", TINY_FULL_EVERY);
    put_key(out, "gemma3.attention.layer_norm_rms_epsilon", FV_GGUF_VALUE_F32);
    put_f32(out, 1e-6f);
    if (has_chat) put_string_key(out, "tokenizer.chat_template", "<start_of_turn>");
}

/* Norms are near 1; the other weights keep the size of what they multiply. Sharp heads: far keys matter. */
static void put_weights(gguf_builder *out, const tensor_list *list)
{
    uint32_t seed = 11;
    while (out->bytes % 32 != 0) put_u8(out, 0);
    for (int32_t t = 0; t < list->num; t++) {
        const int32_t columns = list->tensors[t].columns, rows = list->tensors[t].rows;
        const bool is_norm = strstr(list->tensors[t].name, "norm") != NULL;
        for (int32_t i = 0; i < columns * rows; i++) {
            seed = seed * 1664525u + 1013904223u;
            const float noise = (float)(int32_t)seed * 0x1p-31f * sqrtf(3.0f); /* variance 1 */
            put_f32(out, is_norm ? 1.5f + 0.3f * noise : noise / sqrtf((float)columns));
        }
    }
}

static void build_file(gguf_builder *out, bool has_chat)
{
    const uint64_t num_metadata = has_chat ? 13 : 12;
    tensor_list list;
    list_tensors(&list);
    *out = (gguf_builder){0};
    put_header(out, 3, (uint64_t)list.num, num_metadata + SMALL_SENTENCEPIECE_KEYS);
    put_metadata(out, has_chat);
    put_small_sentencepiece(out, 256);
    uint64_t offset = 0;
    for (int32_t t = 0; t < list.num; t++) {
        const uint64_t columns = (uint64_t)list.tensors[t].columns, rows = (uint64_t)list.tensors[t].rows;
        put_tensor_2d(out, list.tensors[t].name, columns, rows, FV_GGUF_F32, offset);
        offset += columns * rows * sizeof(float); /* all are multiples of the alignment, 32 */
    }
    put_weights(out, &list);
}

static void write_file(char *path, const gguf_builder *file)
{
    const int descriptor = mkstemp(path);
    if (descriptor < 0) fail_msg("cannot make %s", path);
    const ssize_t written = write(descriptor, file->data, file->bytes);
    close(descriptor);
    if (written != (ssize_t)file->bytes) fail_msg("cannot write %s", path);
}

void tiny_model_write(char *path, bool has_chat)
{
    gguf_builder file;
    build_file(&file, has_chat);
    write_file(path, &file);
    free(file.data);
}

/* The embeddings are the first of the weights, which end the file. */
static void break_embedding(const gguf_builder *file, int32_t token)
{
    tensor_list list;
    list_tensors(&list);
    size_t bytes = 0;
    for (int32_t t = 0; t < list.num; t++)
        bytes += (size_t)list.tensors[t].columns * (size_t)list.tensors[t].rows * sizeof(float);
    const size_t row = (size_t)list.tensors[0].columns * sizeof(float);
    memset(file->data + file->bytes - bytes + (size_t)token * row, 0xff, sizeof(float));
}

fv_engine *tiny_model_load_broken(int32_t token)
{
    char path[] = "/tmp/fovea-tiny-model-XXXXXX";
    gguf_builder file;
    build_file(&file, true);
    break_embedding(&file, token);
    write_file(path, &file);
    free(file.data);
    const fv_engine_options options = {.struct_size = sizeof(options), .compute_dtype = FV_DTYPE_F32};
    fv_engine *engine = NULL;
    const fv_status status = fv_engine_create(&engine, path, &options);
    unlink(path); /* the engine has it mapped */
    if (status != FV_OK) fail_msg("tiny model: %s", fv_last_error());
    return engine;
}

fv_engine *tiny_model_load(int32_t num_threads) { return tiny_model_load_on(NULL, num_threads); }

fv_engine *tiny_model_load_on(const char *device, int32_t num_threads)
{
    char path[] = "/tmp/fovea-tiny-model-XXXXXX";
    tiny_model_write(path, true);
    const fv_engine_options options = {
        .struct_size = sizeof(options),
        .num_threads = num_threads,
        .compute_dtype = device ? FV_DTYPE_NONE : FV_DTYPE_F32,
        .device = device,
    };
    fv_engine *engine = NULL;
    const fv_status status = fv_engine_create(&engine, path, &options);
    unlink(path); /* the engine has it mapped */
    if (status != FV_OK) fail_msg("tiny model: %s", fv_last_error());
    return engine;
}
