/* Reading the paged cache and dense rows in double. */
#include "reference/kv_reader.h"

#include "core/float.h"
#include "kvcache/kv_address.h"
#include "reference/attend_row.h"

fv_kv_reader fv_kv_reader_of(const fv_attend_params *params)
{
    return (fv_kv_reader){
        .view = &params->cache,
        .block_table = params->block_table,
        .block_table_stride = params->block_table_stride,
        .k_scale = params->k_scale,
        .v_scale = params->v_scale,
        .num_scales = params->num_kv_scales,
        .head_size = params->head_size,
        .v_head_size = params->v_head_size,
        .context_parallel = params->context_parallel,
        .rotation = params->rotation,
        .dense = params->dense,
        .query_start = params->query_start,
        .seq_lens = params->seq_lens,
    };
}

static void plane_row(double *row, const fv_kv_view *view, const fv_kv_plane *plane, int32_t size, double scale,
                      int64_t block, int32_t head, int64_t slot)
{
    const char *base = (const char *)plane->data + fv_kv_row_offset(plane, block, head, slot);
    for (int32_t d = 0; d < size; d++)
        row[d] = scale * fv_float_load(base + fv_kv_element_offset(plane, d), view->dtype);
}

static void ds_entry(double *row, const fv_kv_plane *plane, int32_t size, int64_t block, int64_t slot)
{
    const char *entry = (const char *)plane->data + fv_kv_row_offset(plane, block, 0, slot);
    for (int32_t d = 0; d < size && d < FV_DS_LATENT; d++) {
        const double scale = fv_float_load(entry + FV_DS_SCALES_AT + d / FV_DS_TILE * 4, FV_DTYPE_F32);
        row[d] = scale * fv_float_load(entry + d, FV_DTYPE_F8_E4M3);
    }
    fv_row_load(row + FV_DS_LATENT, entry + FV_DS_ROPE_AT, size - FV_DS_LATENT, FV_DTYPE_BF16);
}

/* Half rotation: element i pairs with i + half. */
static void rotate(double *x, int32_t half, const float *cos, const float *sin)
{
    for (int32_t i = 0; i < half; i++) {
        const double low = x[i], high = x[i + half];
        x[i] = low * cos[i] - high * sin[i];
        x[i + half] = high * cos[i] + low * sin[i];
    }
}

static void read_entry(double *row, const fv_kv_reader *reader, const fv_kv_plane *plane, const fv_scale_plane *scales,
                       const float *head_scales, int32_t size, int32_t table_row, int32_t key, int32_t head)
{
    const fv_kv_view *view = reader->view;
    const int64_t block = reader->block_table[table_row * reader->block_table_stride + key / view->block_size];
    const int64_t slot = key % view->block_size;
    if (view->layout == FV_KV_LAYOUT_LATENT_FP8_DS) {
        ds_entry(row, plane, size, block, slot);
        return;
    }
    const double scale = (double)fv_head_scale(head_scales, reader->num_scales, head) *
                         fv_scale_at(scales, block, slot, head);
    plane_row(row, view, plane, size, scale, block, head, slot);
}

/* The dense row of a key; -1: it lies in the cache. */
static int64_t dense_row_of(const fv_kv_reader *reader, int32_t seq, int32_t key)
{
    if (!reader->dense.k) return -1;
    const int32_t start = reader->query_start[seq];
    const int32_t query_len = reader->query_start[seq + 1] - start;
    if (query_len < reader->dense_min_query_len) return -1;
    if (reader->dense.key_row) return (int64_t)reader->dense.key_row[seq] + key;
    const int64_t new_token = (int64_t)key - (reader->seq_lens[seq] - query_len);
    return new_token < 0 ? -1 : start + new_token;
}

void fv_kv_reader_key(double *k, const fv_kv_reader *reader, int32_t seq, int32_t table_row, int32_t key, int32_t head)
{
    const fv_dense_keys *dense = &reader->dense;
    const int64_t dense_row = dense_row_of(reader, seq, key);
    if (dense_row >= 0) {
        const int32_t own_size = reader->head_size - (dense->k_shared ? dense->shared_size : 0);
        fv_row_load(k, (const char *)dense->k + dense_row * dense->k_token_stride + head * dense->k_head_stride,
                    own_size, dense->dtype);
        if (!dense->k_shared) return;
        fv_row_load(k + own_size, (const char *)dense->k_shared + dense_row * dense->k_shared_token_stride,
                    dense->shared_size, dense->dtype);
        return;
    }
    const fv_kv_view *view = reader->view;
    read_entry(k, reader, &view->k, &view->k_scales, reader->k_scale, reader->head_size, table_row, key, head);
    const fv_key_rotation *rotation = &reader->rotation;
    if (!rotation->cos) return;
    const int32_t half = rotation->rope_dim / 2;
    const int64_t at = fv_key_position(&reader->context_parallel, key) * half;
    rotate(k + reader->head_size - rotation->rope_dim, half, rotation->cos + at, rotation->sin + at);
}

void fv_kv_reader_value(double *v, const fv_kv_reader *reader, int32_t seq, int32_t table_row, int32_t key,
                        int32_t head)
{
    const fv_dense_keys *dense = &reader->dense;
    const int64_t dense_row = dense_row_of(reader, seq, key);
    if (dense_row >= 0) {
        fv_row_load(v, (const char *)dense->v + dense_row * dense->v_token_stride + head * dense->v_head_stride,
                    reader->v_head_size, dense->dtype);
        return;
    }
    const fv_kv_view *view = reader->view;
    if (fv_kv_layout_is_latent(view->layout))
        read_entry(v, reader, &view->k, &view->k_scales, reader->k_scale, reader->v_head_size, table_row, key, head);
    else
        read_entry(v, reader, &view->v, &view->v_scales, reader->v_scale, reader->v_head_size, table_row, key, head);
}
