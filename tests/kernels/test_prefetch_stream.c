/* What a stream asks for: each line of its rows once, in order or from all of its tracks in turn. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "kernels/cpu/prefetch_stream.h"

enum { KEYS = 20, HEADS = 3, AREA = 1 << 16, MOST_UNITS = 4096 };

static _Alignas(FV_CACHE_LINE) char area[2][AREA];

typedef struct layout {
    int32_t first, end, num_planes, num_heads;
    int64_t row_bytes, key_stride, head_stride;
    int32_t is_shuffled; /* no two rows follow each other */
} layout;

/* The rows of a layout, whose pointers lie in `pointers`. */
static fv_prefetch_rows rows_of(const layout *l, const char *pointers[2][KEYS])
{
    for (int32_t plane = 0; plane < 2; plane++)
        for (int32_t key = 0; key < KEYS; key++)
            pointers[plane][key] = area[plane] + (l->is_shuffled ? key * 7 % KEYS : key) * l->key_stride;
    return (fv_prefetch_rows){
        .rows = {pointers[0], pointers[1]},
        .num_planes = l->num_planes,
        .num_heads = l->num_heads,
        .head_stride = l->head_stride,
        .row_bytes = l->row_bytes,
        .first = l->first,
        .end = l->end,
    };
}

/* The next unit of a stream. */
static const char *take(fv_prefetch_stream *stream)
{
    return stream->order == FV_PREFETCH_IN_TRACKS ? fv_prefetch_take_turn(stream, &stream->turn)
                                                  : fv_prefetch_take_next(stream);
}

static int32_t times_asked(const char *const *units, int32_t num, const char *unit)
{
    int32_t times = 0;
    for (int32_t i = 0; i < num; i++) times += units[i] == unit;
    return times;
}

/* Takes all of a stream; returns how many units that were. */
static int32_t take_all(const char *units[MOST_UNITS], const fv_prefetch_rows *rows, int32_t num_tracks, int64_t unit)
{
    fv_prefetch_stream stream;
    int32_t num = 0;
    fv_prefetch_aim(&stream, rows, num_tracks, unit);
    while (stream.num_tracks > 0 && num < MOST_UNITS) units[num++] = take(&stream);
    return num;
}

static void judge(const layout *l, int32_t num_tracks, int64_t unit)
{
    const char *pointers[2][KEYS];
    static const char *units[MOST_UNITS];
    const fv_prefetch_rows rows = rows_of(l, pointers);
    const int32_t num = take_all(units, &rows, num_tracks, unit);
    const int64_t bytes = (int64_t)l->num_planes * l->num_heads * (l->end - l->first) * l->row_bytes;

    for (int32_t plane = 0; plane < l->num_planes; plane++) {
        for (int32_t head = 0; head < l->num_heads; head++) {
            for (int32_t key = l->first; key < l->end; key++) {
                for (int64_t at = 0; at < l->row_bytes; at += unit) {
                    const char *row = pointers[plane][key] + head * l->head_stride;
                    assert_int_equal(times_asked(units, num, row + at), 1);
                }
            }
        }
    }
    assert_int_equal(num * unit, bytes);
}

static void each_line_is_asked_for_once(void **state)
{
    (void)state;
    const layout layouts[] = {
        {0, 16, 2, 1, 2048, 2048, 0, 0},  /* a token's heads side by side */
        {0, 16, 2, 1, 2048, 2048, 0, 1},  /* pages of one token */
        {3, 20, 2, 1, 1152, 1152, 0, 0},  /* part of a tile */
        {0, 16, 2, 3, 256, 256, 8192, 0}, /* heads apart */
        {5, 14, 1, 3, 512, 2048, 512, 0}, /* keys and values side by side, some heads */
        {2, 3, 1, 1, 1152, 1152, 0, 0},   /* one key */
        {0, 7, 1, 1, 128, 128, 0, 1},
    };
    for (int32_t i = 0; i < FV_ARRAY_LEN(layouts); i++) {
        for (int32_t num_tracks = 1; num_tracks <= FV_MAX_AHEAD_TRACKS; num_tracks++) {
            judge(&layouts[i], num_tracks, FV_CACHE_LINE);
            judge(&layouts[i], num_tracks, 2 * FV_CACHE_LINE);
        }
    }
}

/* Lines that follow each other are those of different tracks, each of which goes up. */
static void tracks_take_turns(void **state)
{
    (void)state;
    const layout l = {0, 16, 2, 1, 2048, 2048, 0, 0};
    const char *pointers[2][KEYS];
    static const char *units[MOST_UNITS];
    const fv_prefetch_rows rows = rows_of(&l, pointers);
    const int32_t num = take_all(units, &rows, FV_MAX_AHEAD_TRACKS, FV_CACHE_LINE);
    const int64_t share = 16 * 2048 / (FV_MAX_AHEAD_TRACKS / 2);
    for (int32_t i = 0; i < num; i++) {
        const int32_t track = i % FV_MAX_AHEAD_TRACKS, plane = track / (FV_MAX_AHEAD_TRACKS / 2);
        const int64_t in_plane = track % (FV_MAX_AHEAD_TRACKS / 2) * share;
        assert_ptr_equal(units[i], area[plane] + in_plane + i / FV_MAX_AHEAD_TRACKS * FV_CACHE_LINE);
    }
}

static void bytes_are_all_tracks(void **state)
{
    (void)state;
    static const char *units[MOST_UNITS];
    const int64_t unit = 4 * FV_CACHE_LINE, bytes = 3 * unit * FV_MAX_AHEAD_TRACKS;
    fv_prefetch_stream stream;
    int32_t num = 0;
    fv_prefetch_aim_at_bytes(&stream, area[0], bytes, unit);
    while (stream.num_tracks > 0 && num < MOST_UNITS) units[num++] = take(&stream);
    assert_int_equal(num * unit, bytes);
    for (int64_t at = 0; at < bytes; at += unit) assert_int_equal(times_asked(units, num, area[0] + at), 1);
}

/* Of 16 keys of 512 bytes, in two planes. */
static fv_prefetch_cursor begin_one_track(fv_prefetch_stream *stream, const char *pointers[2][KEYS],
                                          fv_prefetch_order order)
{
    const layout l = {0, 16, 2, 1, 512, 512, 0, 0};
    const fv_prefetch_rows rows = rows_of(&l, pointers);
    fv_prefetch_aim_at_nothing(stream, area[0]);
    fv_prefetch_aim(stream, &rows, 1, FV_CACHE_LINE);
    return fv_prefetch_begin(stream, order);
}

/* Portions of a stream in order, and nothing behind its end. */
static void order_goes_on_to_the_end(void **state)
{
    (void)state;
    const char *pointers[2][KEYS];
    fv_prefetch_stream stream;
    fv_prefetch_cursor cursor = begin_one_track(&stream, pointers, FV_PREFETCH_IN_ORDER);
    for (int32_t plane = 0; plane < 2; plane++)
        for (int64_t at = 0; at < 16 * 512; at += 1024)
            assert_ptr_equal(fv_prefetch_step(&cursor, 1024).at[0], area[plane] + at);
    for (int32_t i = 0; i < 3; i++) assert_ptr_equal(fv_prefetch_step(&cursor, 1024).at[0], area[1] + 16 * 512);
}

/* A near stream asks for each portion again when it has moved on by one, or by one, two and three. */
static void near_portions_are_asked_for_again(void **state)
{
    (void)state;
    const char *pointers[2][KEYS];
    fv_prefetch_stream stream;
    fv_prefetch_cursor cursor = begin_one_track(&stream, pointers, FV_PREFETCH_NEAR);
    const char *before[FV_PREFETCH_NEAR_ASKS];
    for (int32_t ask = 0; ask < FV_PREFETCH_NEAR_ASKS; ask++) before[ask] = area[0];
    for (int32_t i = 0; i < 16; i++) {
        const fv_prefetch_portion portion = fv_prefetch_step(&cursor, 1024);
        assert_ptr_equal(portion.at[0], area[i / 8] + i % 8 * 1024);
        for (int32_t ask = 1; ask < FV_PREFETCH_NEAR_ASKS; ask++) assert_ptr_equal(portion.at[ask], before[ask - 1]);
        for (int32_t ask = FV_PREFETCH_NEAR_ASKS - 1; ask > 0; ask--) before[ask] = before[ask - 1];
        before[0] = portion.at[0];
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(each_line_is_asked_for_once),
        cmocka_unit_test(tracks_take_turns),
        cmocka_unit_test(bytes_are_all_tracks),
        cmocka_unit_test(order_goes_on_to_the_end),
        cmocka_unit_test(near_portions_are_asked_for_again),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
