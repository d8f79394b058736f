/* Is a cache what writing the new K/V makes of it? */
#include "check/written.h"

#include <math.h>
#include <string.h>

#include "core/float.h"
#include "kvcache/kv_address.h"
#include "reference/kv_reader.h"

int32_t check_as_near(const void *stored, const void *reference, double real, fv_dtype dtype)
{
    const double distance = fabs(fv_float_load(stored, dtype) - real);
    const double nearest = fabs(fv_float_load(reference, dtype) - real);
    return distance <= nearest + 0x1p-22 * fabs(real);
}

/* One row of k or v in the cache. */
static int32_t row_good(int32_t *differs, const check_scene *scene, char *reference, const char *row,
                        const fv_kv_plane *plane, const fv_tensor *tensor, float scale, int64_t slot, int32_t head)
{
    const fv_kv_view *view = &scene->view;
    const size_t bytes = fv_dtype_bytes(view->dtype);
    for (int32_t d = 0; d < tensor->shape[2]; d++) {
        const char *stored = (const char *)plane->data +
                             fv_kv_offset(plane, slot / view->block_size, head, slot % view->block_size, d);
        char *expected = reference + (stored - scene->cache);
        if (memcmp(stored, expected, bytes) == 0) continue;
        const double real = (double)fv_float_load(row + d * tensor->stride_bytes[2], tensor->dtype) / scale;
        if (!check_as_near(stored, expected, real, view->dtype)) return 0;
        memcpy(expected, stored, bytes);
        *differs = 1;
    }
    return 1;
}

static int32_t plane_good(int32_t *differs, const check_scene *scene, char *reference, const int64_t *slots,
                          const fv_kv_plane *plane, const fv_tensor *tensor, const float *scales)
{
    const int64_t num_slots = scene->view.num_blocks * scene->view.block_size;
    for (int32_t token = 0; token < scene->num_tokens; token++) {
        if (slots[token] < 0 || slots[token] >= num_slots) continue;
        for (int32_t head = 0; head < tensor->shape[1]; head++) {
            const char *row = (const char *)tensor->data + token * tensor->stride_bytes[0] +
                              head * tensor->stride_bytes[1];
            const float scale = fv_head_scale(scales, scene->num_kv_scales, head);
            if (!row_good(differs, scene, reference, row, plane, tensor, scale, slots[token], head)) return 0;
        }
    }
    return 1;
}

int32_t check_written_compare(int32_t *differs, const check_scene *scene, char *reference, const int64_t *slots)
{
    *differs = 0;
    if (memcmp(scene->cache, reference, scene->cache_bytes) == 0) return 1;
    if (!scene->k.data) return 0;
    if (scene->view.layout == FV_KV_LAYOUT_LATENT_FP8_DS) return 0; /* bit for bit */
    const int32_t has_v = !fv_kv_layout_is_latent(scene->view.layout);
    if (!plane_good(differs, scene, reference, slots, &scene->view.k, &scene->k, scene->k_scale) ||
        (has_v && !plane_good(differs, scene, reference, slots, &scene->view.v, &scene->v, scene->v_scale))) {
        return 0;
    }
    return memcmp(scene->cache, reference, scene->cache_bytes) == 0;
}
