/* Many rows of X with W of 16-bit floats: a panel is 128 values of some rows as fp32, in the first cache. As in stored_kernels.h
 * even and odd values have sums of their own, which are added in the end: bits are the same. */
#ifndef FV_ENGINE_STORED_STORED_PANEL_FLOATS_H
#define FV_ENGINE_STORED_STORED_PANEL_FLOATS_H

#include "engine/stored/stored_place.h"
#include "engine/stored/stored_words.h"

enum {
    FV_STORED_PANEL_FLOATS = 128, /* values of a row */
    FV_STORED_PANEL_PARITY = FV_STORED_PANEL_FLOATS / 2,
    FV_STORED_FLOAT_PANELS = FV_STORED_MANY_PANELS / 2, /* of a walk: as there are two sums for each */
};

typedef struct fv_stored_float_panel {
    float values[2][FV_STORED_PANEL_PARITY][FV_STORED_PANEL_ROWS]; /* even, odd */
} fv_stored_float_panel;

/* The memory of a call. */
typedef struct fv_stored_many_floats {
    fv_stored_float_panel panel;
    float sums[2][FV_STORED_FLOAT_PANELS][FV_STORED_MANY_X][FV_STORED_PANEL_ROWS];
} fv_stored_many_floats;

/* Eight rows' values. */
typedef __m256 (*fv_stored_load_fn)(const uint8_t *stripe);

FV_ALWAYS_INLINE void fv_stored_fill_floats(fv_stored_float_panel *panel, const fv_stored_walk *walk,
                                            const fv_stored_place *place, const fv_stored_place *next,
                                            fv_stored_load_fn load)
{
    for (int32_t lane = 0; lane < FV_STORED_PANEL_ROWS; lane += FV_STORED_LANES) {
        const uint8_t *stripes[FV_STORED_STRIPES];
        fv_stored_asked asked = fv_stored_asked_of(walk, next, lane);
        fv_stored_place_stripes(stripes, walk, place, lane);
        for (int32_t k = 0; k < place->count; k++) {
            if (k % FV_STORED_LINE_FLOATS == 0) fv_stored_ask(&asked, FV_CACHE_LINE);
            __m256i values[FV_STORED_STRIPES];
            FV_STORED_UNROLL
            for (int32_t i = 0; i < FV_STORED_STRIPES; i++)
                values[i] = _mm256_castps_si256(load(stripes[i] + k * FV_STORED_SCALE_BYTES));
            fv_stored_lanes_store(&panel->values[k % 2][k / 2][lane], values);
        }
    }
}

/* Adds `count` values, which are every second one of W and of x, to the sums of four rows of X. */
FV_ALWAYS_INLINE void fv_stored_multiply_floats(float (*sums)[FV_STORED_PANEL_ROWS], const float *const *x,
                                                float (*values)[FV_STORED_PANEL_ROWS], int32_t count)
{
    fv_stored_floats totals[FV_STORED_TILE_X][FV_STORED_GROUPS];
    FV_STORED_UNROLL
    for (int32_t i = 0; i < FV_STORED_TILE_X; i++) {
        FV_STORED_UNROLL
        for (int32_t j = 0; j < FV_STORED_GROUPS; j++)
            totals[i][j] = fv_stored_floats_load(&sums[i][j * FV_STORED_LANES]);
    }
    for (int32_t k = 0; k < count; k++) {
        fv_stored_floats w[FV_STORED_GROUPS];
        FV_STORED_UNROLL
        for (int32_t j = 0; j < FV_STORED_GROUPS; j++) w[j] = fv_stored_floats_load(&values[k][j * FV_STORED_LANES]);
        FV_STORED_UNROLL
        for (int32_t i = 0; i < FV_STORED_TILE_X; i++) {
            const fv_stored_floats value = fv_stored_floats_splat(x[i][2 * k]);
            FV_STORED_UNROLL
            for (int32_t j = 0; j < FV_STORED_GROUPS; j++)
                totals[i][j] = fv_stored_floats_fma(w[j], value, totals[i][j]);
        }
    }
    FV_STORED_UNROLL
    for (int32_t i = 0; i < FV_STORED_TILE_X; i++) {
        FV_STORED_UNROLL
        for (int32_t j = 0; j < FV_STORED_GROUPS; j++)
            fv_stored_floats_store(&sums[i][j * FV_STORED_LANES], totals[i][j]);
    }
}

/* Adds the sums of odd values to those of even ones, and the last value of an odd number, of which the panel is then. */
static inline void fv_stored_end_floats(float (*even)[FV_STORED_PANEL_ROWS], float (*odd)[FV_STORED_PANEL_ROWS],
                                        const fv_stored_float_panel *panel, const fv_stored_x *x, int64_t num_x,
                                        int64_t last)
{
    for (int64_t row = 0; row < num_x; row++) {
        for (int32_t i = 0; i < FV_STORED_PANEL_ROWS; i += FV_STORED_LANES) {
            fv_stored_floats sum = fv_stored_floats_add(fv_stored_floats_load(&even[row][i]),
                                                        fv_stored_floats_load(&odd[row][i]));
            if (last >= 0)
                sum = fv_stored_floats_fma(fv_stored_floats_load(&panel->values[0][0][i]),
                                           fv_stored_floats_splat(x[row].values[last]), sum);
            fv_stored_floats_store(&even[row][i], sum);
        }
    }
}

/* Rows of W for FV_STORED_FLOAT_PANELS panels at most. */
FV_ALWAYS_INLINE void fv_stored_walk_floats(float *y, int64_t y_stride, const fv_stored_x *x, int64_t num_x,
                                            const fv_stored_rows *w, fv_stored_many_floats *many,
                                            fv_stored_load_fn load)
{
    const int64_t num_pairs = w->in_features / 2, last = w->in_features % 2 ? w->in_features - 1 : -1;
    const size_t sums_bytes = (size_t)fv_round_up(num_x, FV_STORED_TILE_X) * sizeof(many->sums[0][0][0]);
    for (int64_t p = 0; p * FV_STORED_PANEL_ROWS < w->num_rows; p++) {
        memset(many->sums[0][p], 0, sums_bytes);
        memset(many->sums[1][p], 0, sums_bytes);
    }
    const fv_stored_walk walk = fv_stored_walk_of(w, 2 * num_pairs, FV_STORED_PANEL_FLOATS);
    fv_stored_place place = fv_stored_place_at(&walk, 0), next;
    for (; place.count > 0; place = next) {
        next = fv_stored_place_after(&walk, place);
        fv_stored_fill_floats(&many->panel, &walk, &place, &next, load);
        for (int64_t row = 0; row < num_x; row += FV_STORED_TILE_X) {
            const fv_stored_x *rows[FV_STORED_TILE_X];
            fv_stored_rows_of_tile(rows, x, row, num_x);
            for (int32_t parity = 0; parity < 2; parity++) {
                const float *values[FV_STORED_TILE_X];
                FV_STORED_UNROLL
                for (int32_t i = 0; i < FV_STORED_TILE_X; i++) values[i] = rows[i]->values + place.first + parity;
                fv_stored_multiply_floats(many->sums[parity][place.row / FV_STORED_PANEL_ROWS] + row, values,
                                          many->panel.values[parity], place.count / 2);
            }
        }
    }
    const fv_stored_place none = fv_stored_place_at(&walk, walk.num_values);
    for (int64_t p = 0; p * FV_STORED_PANEL_ROWS < w->num_rows; p++, y += FV_STORED_PANEL_ROWS) {
        if (last >= 0) {
            const fv_stored_place of_last = {p * FV_STORED_PANEL_ROWS, last, 1, (size_t)last * FV_STORED_SCALE_BYTES,
                                             FV_STORED_SCALE_BYTES};
            fv_stored_fill_floats(&many->panel, &walk, &of_last, &none, load);
        }
        fv_stored_end_floats(many->sums[0][p], many->sums[1][p], &many->panel, x, num_x, last);
        fv_stored_store_panel(y, y_stride, many->sums[0][p], num_x, w->num_rows - p * FV_STORED_PANEL_ROWS);
    }
}

/* fv_stored_multiply_many_fn of a format. */
FV_ALWAYS_INLINE void fv_stored_multiply_float_panels(float *y, int64_t y_stride, const fv_stored_x *x, int64_t num_x,
                                                      const fv_stored_rows *w, void *memory, fv_stored_load_fn load)
{
    const int64_t step = FV_STORED_FLOAT_PANELS * FV_STORED_PANEL_ROWS;
    fv_stored_rows part = *w;
    for (int64_t row = 0; row < w->num_rows; row += step) {
        part.stripes = w->stripes + (size_t)(row / FV_STORED_ROWS) * fv_stored_stripe_bytes(w->layout, w->in_features);
        part.num_rows = fv_min_i64(step, w->num_rows - row);
        fv_stored_walk_floats(y + row, y_stride, x, num_x, &part, memory, load);
    }
}

#endif
