/* Stripes: a transposition of 16-bit and 32-bit units, the same for every type. */
#include "engine/stored/stored.h"

#include <string.h>

#include "core/compiler.h"
#include "engine/gguf.h"

static const fv_stored_layout layouts[] = {
    {FV_GGUF_F16, 1, 2, 0, 1, 2, 0},       {FV_GGUF_BF16, 1, 2, 0, 1, 2, 0},
    {FV_GGUF_Q4_0, 32, 18, 0, 1, 2, 4},    {FV_GGUF_Q4_1, 32, 20, 0, 2, 4, 4},
    {FV_GGUF_Q5_0, 32, 22, 0, 1, 2, 5},    {FV_GGUF_Q5_1, 32, 24, 0, 2, 4, 5},
    {FV_GGUF_Q8_0, 32, 34, 0, 1, 2, 8},    {FV_GGUF_Q4_K, 256, 144, 0, 2, 4, 35},
    {FV_GGUF_Q5_K, 256, 176, 0, 2, 4, 43}, {FV_GGUF_Q6_K, 256, 210, 208, 1, 0, 52},
};

const fv_stored_layout *fv_stored_find_layout(int32_t type)
{
    for (int32_t i = 0; i < FV_ARRAY_LEN(layouts); i++) {
        if (layouts[i].type == type) return &layouts[i];
    }
    return NULL;
}

size_t fv_stored_stripe_bytes(const fv_stored_layout *layout, int64_t in_features)
{
    return (size_t)(in_features / layout->values) * (size_t)(layout->block_bytes * FV_STORED_ROWS);
}

void fv_stored_pack_stripe(uint8_t *stripe, const uint8_t *rows, int64_t num_rows, int64_t in_features,
                           const fv_stored_layout *layout)
{
    const int64_t num_blocks = in_features / layout->values;
    if (num_rows < FV_STORED_ROWS) memset(stripe, 0, fv_stored_stripe_bytes(layout, in_features));
    for (int64_t block = 0; block < num_blocks; block++) {
        for (int64_t row = 0; row < num_rows; row++) {
            const uint8_t *from = rows + (row * num_blocks + block) * layout->block_bytes;
            uint8_t *to = stripe + block * layout->block_bytes * FV_STORED_ROWS;
            for (int32_t i = 0; i < layout->num_scales; i++, to += 2 * FV_STORED_ROWS) {
                memcpy(to + 2 * row, from + layout->scales_at + 2 * i, 2);
            }
            for (int32_t i = 0; i < layout->num_words; i++, to += 4 * FV_STORED_ROWS) {
                memcpy(to + 4 * row, from + layout->words_at + 4 * i, 4);
            }
        }
    }
}

void fv_stored_unpack_blocks(uint8_t *blocks, const uint8_t *stripe, int32_t row, int64_t first_block,
                             int64_t num_blocks, const fv_stored_layout *layout)
{
    for (int64_t block = first_block; block < first_block + num_blocks; block++, blocks += layout->block_bytes) {
        const uint8_t *from = stripe + block * layout->block_bytes * FV_STORED_ROWS;
        for (int32_t i = 0; i < layout->num_scales; i++, from += 2 * FV_STORED_ROWS) {
            memcpy(blocks + layout->scales_at + 2 * i, from + 2 * row, 2);
        }
        for (int32_t i = 0; i < layout->num_words; i++, from += 4 * FV_STORED_ROWS) {
            memcpy(blocks + layout->words_at + 4 * i, from + 4 * row, 4);
        }
    }
}
