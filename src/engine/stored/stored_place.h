/* Panels of W: some rows x some values of them, made of stripes once for all rows of X of a call. The order in which a call goes
 * through them, and where their stripes are.
 *
 *   W      | panel | panel | panel | panel |      some values of each, then the next ones
 *   sums   [panel][row of X][row of W]            in the second cache, beside those values of all rows of X */
#ifndef FV_ENGINE_STORED_STORED_PLACE_H
#define FV_ENGINE_STORED_STORED_PLACE_H

#include "engine/stored/stored.h"
#include "engine/stored/stored_lanes.h"

enum {
    FV_STORED_STRIPES = FV_STORED_LANES / FV_STORED_ROWS, /* whose rows are the lanes of a vector */
    FV_STORED_PANEL_ROWS = FV_STORED_GROUPS * FV_STORED_LANES,
    FV_STORED_MANY_PANELS = FV_STORED_MANY_ROWS / FV_STORED_PANEL_ROWS,
    FV_STORED_TILE_X = 4, /* rows of X that meet a panel at once */
};

_Static_assert(FV_STORED_MANY_ROWS % FV_STORED_PANEL_ROWS == 0, "panels of a call are whole");
_Static_assert(FV_STORED_MANY_X % FV_STORED_TILE_X == 0, "there are sums for whole tiles");

/* Rows of W from `row` on, of which a panel has values [first, first + count). */
typedef struct fv_stored_place {
    int64_t row, first;
    int32_t count;            /* 0: behind the last panel */
    size_t first_byte, bytes; /* of a stripe */
} fv_stored_place;

/* What a call goes through: `num_values` of the rows of `w`, `step` of them at a time. */
typedef struct fv_stored_walk {
    const fv_stored_rows *w;
    int64_t num_values;
    int32_t step;
    size_t stripe_bytes;
} fv_stored_walk;

static inline fv_stored_walk fv_stored_walk_of(const fv_stored_rows *w, int64_t num_values, int32_t step)
{
    return (fv_stored_walk){w, num_values, step, fv_stored_stripe_bytes(w->layout, w->in_features)};
}

/* The first rows' place from value `first` on. */
static inline fv_stored_place fv_stored_place_at(const fv_stored_walk *walk, int64_t first)
{
    const int64_t count = fv_max_i64(0, fv_min_i64(walk->num_values - first, walk->step));
    return (fv_stored_place){0, first, (int32_t)count, fv_stored_stripe_bytes(walk->w->layout, first),
                             fv_stored_stripe_bytes(walk->w->layout, count)};
}

static inline fv_stored_place fv_stored_place_after(const fv_stored_walk *walk, fv_stored_place place)
{
    place.row += FV_STORED_PANEL_ROWS;
    return place.row < walk->w->num_rows ? place : fv_stored_place_at(walk, place.first + walk->step);
}

/* Where the stripes of lanes [lane, lane + FV_STORED_LANES) of a place begin. Of those that are not there the last one serves
 * again. */
static inline void fv_stored_place_stripes(const uint8_t **stripes, const fv_stored_walk *walk,
                                           const fv_stored_place *place, int32_t lane)
{
    const int64_t last_stripe = (walk->w->num_rows - 1) / FV_STORED_ROWS;
    for (int32_t i = 0; i < FV_STORED_STRIPES; i++) {
        const int64_t stripe = fv_min_i64((place->row + lane) / FV_STORED_ROWS + i, last_stripe);
        stripes[i] = walk->w->stripes + (size_t)stripe * walk->stripe_bytes + place->first_byte;
    }
}

/* Memory of the next place that is asked for bit by bit, between the steps of filling a panel with this one: all at once is a
 * tenth slower. */
typedef struct fv_stored_asked {
    const uint8_t *stripes[FV_STORED_STRIPES];
    size_t at, bytes; /* of each */
} fv_stored_asked;

static inline fv_stored_asked fv_stored_asked_of(const fv_stored_walk *walk, const fv_stored_place *next, int32_t lane)
{
    fv_stored_asked asked = {.bytes = next->bytes};
    fv_stored_place_stripes(asked.stripes, walk, next, lane);
    return asked;
}

/* Asks for `bytes` more of each stripe, as far as they go. */
FV_ALWAYS_INLINE void fv_stored_ask(fv_stored_asked *asked, size_t bytes)
{
    const size_t end = asked->at + bytes < asked->bytes ? asked->at + bytes : asked->bytes;
    for (; asked->at < end; asked->at += FV_CACHE_LINE) {
        for (int32_t i = 0; i < FV_STORED_STRIPES; i++)
            _mm_prefetch((const char *)asked->stripes[i] + asked->at, _MM_HINT_T0);
    }
}

/* A tile's rows of X from `row` on. Behind the last one it serves again, and nobody looks at what comes of it. */
FV_ALWAYS_INLINE void fv_stored_rows_of_tile(const fv_stored_x **rows, const fv_stored_x *x, int64_t row, int64_t num_x)
{
    FV_STORED_UNROLL
    for (int32_t i = 0; i < FV_STORED_TILE_X; i++) rows[i] = x + fv_min_i64(row + i, num_x - 1);
}

/* Sums to their places in Y, which has num_outputs of them from there on. */
FV_ALWAYS_INLINE void fv_stored_store_panel(float *y, int64_t y_stride, float (*sums)[FV_STORED_PANEL_ROWS],
                                            int64_t num_x, int64_t num_outputs)
{
    for (int64_t row = 0; row < num_x; row++, y += y_stride) {
        if (num_outputs < FV_STORED_PANEL_ROWS) {
            memcpy(y, sums[row], (size_t)num_outputs * sizeof(*y));
            continue;
        }
        FV_STORED_UNROLL
        for (int32_t i = 0; i < FV_STORED_PANEL_ROWS; i += FV_STORED_LANES)
            fv_stored_floats_store(y + i, fv_stored_floats_load(&sums[row][i]));
    }
}

/* fv_stored_multiply_many_fn of a type, by one of the walks. */
#define FV_STORED_DEFINE_MANY(name, function, how)                                                    \
    static void multiply_many_##name(float *y, int64_t y_stride, const fv_stored_x *x, int64_t num_x, \
                                     const fv_stored_rows *w, void *memory)                           \
    {                                                                                                 \
        function(y, y_stride, x, num_x, w, memory, how);                                              \
    }

#endif
