/* Prefetching memory that will be wanted soon, a few lines at a time between arithmetic. The portions have to be small
 * and even: Zen drops prefetches when its miss buffers are full, and a burst of eight lines loses most of them.
 *
 * A stream is asked for in the order in which it lies, or in tracks: cut into even parts, a portion of each in turn. Zen
 * wants the order, Zen 3 and 5 into the cache that is nearest. Intel's cores get no more from lines of one page of 4 KB than three quarters of what memory gives, however
 * far ahead they are asked for, and all of it from those of eight (docs/notes/cpu-avx512.md, "Tracks"). */
#ifndef FV_KERNELS_CPU_PREFETCH_STREAM_H
#define FV_KERNELS_CPU_PREFETCH_STREAM_H

#include "core/cpu.h"
#include "kernels/cpu/simd.h"

/* How often a line may be asked for. A core drops prefetches when its miss buffers are full, so a kernel with time to
 * spare asks again when it has moved on by a portion. */
#ifndef FV_PREFETCH_ASKS
#define FV_PREFETCH_ASKS 1
#endif
#define FV_PREFETCH_MAX_ASKS 4
/* Into the nearest cache: as was best on Zen 5 and on Zen 3. */
#if defined(__AVX512BW__)
#define FV_PREFETCH_NEAR_ASKS 4
#else
#define FV_PREFETCH_NEAR_ASKS 2
#endif

/* How a stream is asked for; known when the loops that ask are compiled. */
typedef enum fv_prefetch_order {
    FV_PREFETCH_IN_ORDER,  /* into the second-level cache */
    FV_PREFETCH_IN_TRACKS, /* the same, of all tracks in turn */
    FV_PREFETCH_NEAR,      /* in order, into the first-level cache, FV_PREFETCH_NEAR_ASKS times */
    FV_PREFETCH_NUM_ORDERS
} fv_prefetch_order;

/* A portion of a stream, then those before it. */
typedef struct fv_prefetch_portion {
    const char *at[FV_PREFETCH_MAX_ASKS];
} fv_prefetch_portion;

/* Rows of the keys [first, end) of up to two planes (K, V) and some heads, in the order plane, head, key. */
typedef struct fv_prefetch_rows {
    const char *const *rows[2]; /* row of each key, less `offset` and the head's */
    int32_t num_planes, num_heads;
    int64_t offset, head_stride;
    int64_t row_bytes;
    int32_t first, end;
} fv_prefetch_rows;

/* One of them, and how many are left from it on. */
typedef struct fv_prefetch_place {
    int32_t plane, head, key;
    int32_t left;
} fv_prefetch_place;

/* Rows as runs of bytes: those that follow one another in memory make one run. */
typedef struct fv_prefetch_stream {
    const char *at[FV_MAX_AHEAD_TRACKS]; /* of each track: in the run at hand; of those that are none: anywhere */
    const char *run_end[FV_MAX_AHEAD_TRACKS];
    fv_prefetch_place places[FV_MAX_AHEAD_TRACKS]; /* where its next run starts */
    fv_prefetch_rows of;
    int64_t unit;             /* bytes that are asked for in a track at a time */
    fv_prefetch_order order;  /* but for tracks: one track */
    int32_t num_tracks;       /* that have not ended */
    int32_t turn;             /* the track that is asked for next */
    int32_t num_rounds;       /* of all tracks, until a run ends */
    fv_prefetch_portion last; /* of a stream in order */
} fv_prefetch_stream;

FV_ALWAYS_INLINE fv_prefetch_portion fv_prefetch_portion_after(fv_prefetch_portion last, const char *at,
                                                               const int32_t asks)
{
    FV_UNROLL
    for (int32_t i = asks - 1; i > 0; i--) last.at[i] = last.at[i - 1];
    last.at[0] = at;
    return last;
}

/* Aims at one line, which should be in the cache: a stream that has ended. */
static inline void fv_prefetch_aim_at_nothing(fv_prefetch_stream *stream, const void *line)
{
    stream->at[0] = stream->run_end[0] = line;
    stream->places[0].left = 0;
    stream->order = FV_PREFETCH_IN_ORDER;
    stream->num_tracks = stream->turn = 0;
    for (int32_t i = 0; i < FV_PREFETCH_MAX_ASKS; i++) stream->last.at[i] = line;
}

typedef struct fv_prefetch_run {
    const char *at, *end;
} fv_prefetch_run;

/* The run at a place from which rows are left; the place goes on behind it. */
static inline fv_prefetch_run fv_prefetch_run_at(const fv_prefetch_rows *of, fv_prefetch_place *place)
{
    const int64_t offset = of->offset + place->head * of->head_stride;
    const char *const *rows = of->rows[place->plane];
    fv_prefetch_run run = {.at = rows[place->key] + offset};
    do {
        run.end = rows[place->key] + offset + of->row_bytes;
        place->key++;
        place->left--;
    } while (place->left > 0 && place->key < of->end && rows[place->key] + offset == run.end);
    if (place->key < of->end) return run;
    place->key = of->first;
    if (++place->head < of->num_heads) return run;
    place->head = 0;
    place->plane++;
    return run;
}

/* Takes up a track's next run; after the last one stays where it is. */
static inline void fv_prefetch_next_run(fv_prefetch_stream *stream, int32_t track)
{
    fv_prefetch_run run = {stream->at[track], stream->at[track]};
    if (stream->places[track].left > 0) run = fv_prefetch_run_at(&stream->of, &stream->places[track]);
    stream->at[track] = run.at;
    stream->run_end[track] = run.end;
}

/* Where runs have ended: takes up the next ones, and goes on without tracks that have none. */
static __attribute__((noinline)) void fv_prefetch_go_on(fv_prefetch_stream *stream)
{
    int64_t least = INT32_MAX;
    for (int32_t track = 0; track < stream->num_tracks;) {
        if (stream->at[track] >= stream->run_end[track]) fv_prefetch_next_run(stream, track);
        const int64_t units = fv_ceil_div(stream->run_end[track] - stream->at[track], stream->unit);
        if (units > 0) {
            least = fv_min_i64(least, units);
            track++;
            continue;
        }
        const int32_t last = --stream->num_tracks;
        stream->at[track] = stream->at[last];
        stream->run_end[track] = stream->run_end[last];
        stream->places[track] = stream->places[last];
    }
    stream->num_rounds = (int32_t)least;
}

/* Aims at some rows in up to so many tracks, `unit` bytes at a time, whole lines. `last` is left as it is. */
static inline void fv_prefetch_aim(fv_prefetch_stream *stream, const fv_prefetch_rows *of, int32_t num_tracks,
                                   int64_t unit)
{
    const int32_t num_keys = of->end - of->first, num_rows = of->num_planes * of->num_heads * num_keys;
    const int32_t share = (int32_t)fv_ceil_div(num_rows, num_tracks);
    fv_prefetch_place place = {.key = of->first};
    stream->of = *of;
    stream->unit = unit;
    stream->order = num_tracks > 1 ? FV_PREFETCH_IN_TRACKS : FV_PREFETCH_IN_ORDER;
    stream->num_tracks = stream->turn = 0;
    for (int32_t track = 0; track < FV_MAX_AHEAD_TRACKS; track++)
        stream->at[track] = stream->run_end[track] = of->rows[0][of->first];
    for (int32_t left = num_rows; left > 0; left -= share) {
        const int32_t track = stream->num_tracks++;
        stream->places[track] = place;
        stream->places[track].left = fv_min_i32(share, left);
        for (place.key += share; place.key >= of->end; place.key -= num_keys) {
            place.head = place.head + 1 < of->num_heads ? place.head + 1 : 0;
            place.plane += place.head == 0;
        }
    }
    fv_prefetch_go_on(stream);
}

/* Aims at `bytes` bytes that follow each other, a multiple of FV_MAX_AHEAD_TRACKS units, in all tracks. */
static inline void fv_prefetch_aim_at_bytes(fv_prefetch_stream *stream, const char *from, int64_t bytes, int64_t unit)
{
    stream->unit = unit;
    stream->order = FV_PREFETCH_IN_TRACKS;
    stream->num_tracks = FV_MAX_AHEAD_TRACKS;
    stream->turn = 0;
    for (int32_t track = 0; track < FV_MAX_AHEAD_TRACKS; track++) {
        stream->at[track] = from + track * (bytes / FV_MAX_AHEAD_TRACKS);
        stream->run_end[track] = stream->at[track] + bytes / FV_MAX_AHEAD_TRACKS;
        stream->places[track].left = 0;
    }
    fv_prefetch_go_on(stream);
}

/* Asks for a line of each 2 KB of the runs of a stream in order, and for their last, before all lines are asked for in turn.
 * What this gains was measured, on Zen 4 (docs/notes/cpu-avx512.md): of 1, 2 and 4 KB it is 2. */
static inline void fv_prefetch_sparsely(const fv_prefetch_stream *stream)
{
    fv_prefetch_run run = {stream->at[0], stream->run_end[0]};
    fv_prefetch_place place = stream->places[0];
    while (run.at < run.end) {
        for (const char *at = run.at; at < run.end; at += 2048) __builtin_prefetch(at, 0, 2);
        __builtin_prefetch(run.end - 1, 0, 2);
        if (place.left == 0) return;
        run = fv_prefetch_run_at(&stream->of, &place);
    }
}

/* The next unit of a stream that has not ended, num_tracks > 0: of the track whose turn it is. */
FV_ALWAYS_INLINE const char *fv_prefetch_take_turn(fv_prefetch_stream *stream, int32_t *turn)
{
    const char *at = stream->at[*turn];
    if (++*turn < stream->num_tracks) return at;
    *turn = 0;
    FV_UNROLL
    for (int32_t track = 0; track < FV_MAX_AHEAD_TRACKS; track++) stream->at[track] += stream->unit;
    if (FV_UNLIKELY(--stream->num_rounds == 0)) fv_prefetch_go_on(stream);
    return at;
}

/* The same of a stream in order, with less ado. It may pass the end of the run: a prefetch does no harm. */
FV_ALWAYS_INLINE const char *fv_prefetch_take_next(fv_prefetch_stream *stream)
{
    const char *at = stream->at[0];
    stream->at[0] = at + stream->unit;
    if (FV_UNLIKELY(--stream->num_rounds == 0)) fv_prefetch_go_on(stream);
    return at;
}

/* The run at hand of a stream in order, or whose turn it is, in registers, for loops whose stores might, for all the compiler
 * knows, go to the stream. */
typedef struct fv_prefetch_cursor {
    fv_prefetch_stream *stream;
    const char *at, *run_end;
    int32_t turn;
    fv_prefetch_order order; /* known when it is compiled */
    fv_prefetch_portion last;
} fv_prefetch_cursor;

FV_ALWAYS_INLINE fv_prefetch_cursor fv_prefetch_begin(fv_prefetch_stream *stream, const fv_prefetch_order order)
{
    return (fv_prefetch_cursor){stream, stream->at[0], stream->run_end[0], stream->turn, order, stream->last};
}

FV_ALWAYS_INLINE void fv_prefetch_end(const fv_prefetch_cursor *cursor)
{
    fv_prefetch_stream *stream = cursor->stream;
    if (cursor->order == FV_PREFETCH_IN_TRACKS) {
        stream->turn = cursor->turn;
    } else {
        stream->at[0] = cursor->at;
        stream->last = cursor->last;
    }
}

FV_ALWAYS_INLINE int32_t fv_prefetch_asks(const fv_prefetch_order order)
{
    return order == FV_PREFETCH_NEAR ? FV_PREFETCH_NEAR_ASKS : FV_PREFETCH_ASKS;
}

FV_ALWAYS_INLINE fv_prefetch_portion fv_prefetch_step(fv_prefetch_cursor *cursor, int64_t bytes)
{
    if (FV_UNLIKELY(cursor->at >= cursor->run_end)) {
        fv_prefetch_stream *stream = cursor->stream;
        fv_prefetch_end(cursor);
        fv_prefetch_next_run(stream, 0);
        *cursor = fv_prefetch_begin(stream, cursor->order);
    }
    cursor->last = fv_prefetch_portion_after(cursor->last, cursor->at, fv_prefetch_asks(cursor->order));
    if (cursor->at < cursor->run_end) cursor->at += bytes;
    return cursor->last;
}

/* Into the second-level cache. */
FV_ALWAYS_INLINE void fv_prefetch_bytes(const char *at, const int64_t bytes)
{
    __builtin_prefetch(at, 0, 2);
    FV_UNROLL
    for (int64_t i = FV_CACHE_LINE; i < bytes; i += FV_CACHE_LINE) __builtin_prefetch(at + i, 0, 2);
}

/* The same, to be written: without a copy in another core's caches. */
FV_ALWAYS_INLINE void fv_prefetch_to_write(const char *at, const int64_t bytes)
{
    FV_UNROLL
    for (int64_t i = 0; i < bytes; i += FV_CACHE_LINE) __builtin_prefetch(at + i, 1, 2);
}

/* Into the first-level cache. */
FV_ALWAYS_INLINE void fv_prefetch_near(const char *at, const int64_t bytes)
{
    FV_UNROLL
    for (int64_t i = 0; i < bytes; i += FV_CACHE_LINE) __builtin_prefetch(at + i, 0, 3);
}

/* The next line of the stream, whatever the length of its runs. */
FV_ALWAYS_INLINE void fv_prefetch_line(fv_prefetch_cursor *cursor)
{
    __builtin_prefetch(fv_prefetch_step(cursor, FV_CACHE_LINE).at[0], 0, 2);
}

/* Some bytes of a portion, and the same of those before it, `asks` in all. */
FV_ALWAYS_INLINE void fv_prefetch_part(fv_prefetch_portion portion, int64_t offset, const int64_t bytes,
                                       const int32_t asks)
{
    FV_UNROLL
    for (int32_t i = 0; i < asks; i++) fv_prefetch_bytes(portion.at[i] + offset, bytes);
}

#endif
