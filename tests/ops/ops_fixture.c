#include "ops/ops_fixture.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "core/float.h"

enum { BLOCK_SIZE = 8, KV_HEADS = 2, HEAD_SIZE = 32 };

void must(fv_status status)
{
    if (status != FV_OK) fail_msg("%s: %s", fv_status_name(status), fv_last_error());
}

void refused(fv_status status, fv_status expected, const char *says)
{
    if (status != expected) {
        fail_msg("status %s, expected %s (%s)", fv_status_name(status), fv_status_name(expected), fv_last_error());
    }
    if (!strstr(fv_last_error(), says)) fail_msg("'%s' lacks '%s'", fv_last_error(), says);
}

uint32_t next_random(uint32_t *state)
{
    *state = *state * 1664525u + 1013904223u;
    return *state >> 8;
}

float next_normal(uint32_t *state)
{
    float sum = 0;
    for (int32_t i = 0; i < 12; i++) sum += (float)next_random(state) / 0x1p24f;
    return sum - 6.0f;
}

void fill_random(void *to, fv_dtype dtype, int64_t count, float factor, uint32_t *state)
{
    for (int64_t i = 0; i < count; i++)
        fv_float_store((char *)to + i * (int64_t)fv_dtype_bytes(dtype), factor * next_normal(state), dtype);
}

fv_launch serial_launch(void)
{
    static const fv_executor serial = {.num_workers = 1};
    return (fv_launch){NULL, &serial, NULL};
}

int32_t cpu_tables(const fv_kernel_table *const **tables) { return fv_cpu_tables(tables, FV_ISA_AVX512_BF16); }

static void make_strided(fv_kv_view *view, char *memory, fv_dtype dtype, int64_t num_blocks)
{
    const int64_t element = (int64_t)fv_dtype_bytes(dtype);
    *view = (fv_kv_view){
        .struct_size = sizeof(*view),
        .layout = FV_KV_LAYOUT_STRIDED,
        .dtype = dtype,
        .block_size = BLOCK_SIZE,
        .num_blocks = num_blocks,
        .num_kv_heads = KV_HEADS,
        .head_size = HEAD_SIZE,
        .v_head_size = HEAD_SIZE - 8,
    };
    /* K: chunks of 5 elements and a rest of 2; V: chunks of 3 slots and a rest of 2, all with gaps. */
    view->k = (fv_kv_plane){
        .data = memory,
        .block_stride = 1000 * element,
        .head_stride = 480 * element,
        .slot_stride = 6 * element,
        .element_stride = element,
        .element_chunk = 5,
        .element_chunk_stride = 60 * element,
    };
    view->v = (fv_kv_plane){
        .data = memory + 1000 * element * num_blocks,
        .block_stride = 500 * element,
        .head_stride = 250 * element,
        .slot_stride = 26 * element,
        .element_stride = element,
        .slot_chunk = 3,
        .slot_chunk_stride = 80 * element,
    };
}

int32_t cache_has_scales(int32_t kind) { return kind >= 9; }

void make_cache(fv_kv_view *view, void *memory, int32_t kind, fv_dtype dtype, int64_t num_blocks)
{
    if (dtype == FV_DTYPE_NONE) dtype = cache_has_scales(kind) || kind == 8 ? FV_DTYPE_F8_E4M3 : FV_DTYPE_BF16;
    char *bytes = memory;
    switch (kind) {
    case 0: make_strided(view, memory, dtype, num_blocks); break;
    case 9: /* scales after the cache, one dense plane each */
        must(fv_kv_view_init(view, memory, FV_KV_LAYOUT_SHUFFLED, dtype, num_blocks, 16, KV_HEADS, HEAD_SIZE));
        view->k_scales = (fv_scale_plane){bytes + CACHE_BYTES / 2, 2 * 16 * 4, 4, 16 * 4};
        view->v_scales = (fv_scale_plane){bytes + 3 * CACHE_BYTES / 4, 2 * 16 * 4, 2 * 4, 4};
        break;
    case 10:
    case 11:
        must(fv_kv_view_init_inline_scales(view, memory, kind == 10 ? FV_KV_LAYOUT_PACKED_NHD : FV_KV_LAYOUT_PACKED_HND,
                                           dtype, num_blocks, BLOCK_SIZE, KV_HEADS, HEAD_SIZE));
        break;
    default: {
        const fv_kv_layout layout = (fv_kv_layout)kind;
        const int32_t latent = layout == FV_KV_LAYOUT_LATENT || layout == FV_KV_LAYOUT_LATENT_FP8_DS;
        const int32_t block_size = layout == FV_KV_LAYOUT_SHUFFLED ? 16 : BLOCK_SIZE;
        must(fv_kv_view_init(view, memory, layout, dtype, num_blocks, block_size, latent ? 1 : KV_HEADS,
                             layout == FV_KV_LAYOUT_LATENT_FP8_DS ? 576
                             : latent                             ? 96
                                                                  : HEAD_SIZE));
        break;
    }
    }
}
