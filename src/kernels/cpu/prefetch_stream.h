/* Prefetching memory that will be wanted soon, in the order in which it lies, a few lines at a time
 * between arithmetic. The portions have to be small and even: Zen drops prefetches when its miss
 * buffers are full, and a burst of eight lines loses most of them. */
#ifndef FV_KERNELS_CPU_PREFETCH_STREAM_H
#define FV_KERNELS_CPU_PREFETCH_STREAM_H

#include "kernels/cpu/simd.h"

/* How often a line may be asked for. A core drops prefetches when its miss buffers are full, so a kernel with time to
 * spare asks again when it has moved on by a portion. */
#ifndef FV_PREFETCH_ASKS
#define FV_PREFETCH_ASKS 1
#endif

/* A portion of a stream, then those before it. */
typedef struct fv_prefetch_portion {
    const char *at[FV_PREFETCH_ASKS];
} fv_prefetch_portion;

/* Rows of the keys [first, end) of up to two planes (K, V) and some heads, as runs of bytes: rows that
 * follow one another in memory make one run. Order: plane, head, key. */
typedef struct fv_prefetch_stream {
    const char *at, *run_end;   /* of the run at hand */
    const char *const *rows[2]; /* row of each key, less `offset` and the head's */
    int32_t num_planes, num_heads;
    int64_t offset, head_stride;
    int64_t row_bytes;
    int32_t first, end;
    int32_t plane, head, key; /* where the next run starts */
    fv_prefetch_portion last;
} fv_prefetch_stream;

FV_ALWAYS_INLINE fv_prefetch_portion fv_prefetch_portion_after(fv_prefetch_portion last, const char *at)
{
    FV_UNROLL
    for (int32_t i = FV_PREFETCH_ASKS - 1; i > 0; i--) last.at[i] = last.at[i - 1];
    last.at[0] = at;
    return last;
}

/* A stream that stays at one line, which should be in the cache. */
static inline fv_prefetch_stream fv_prefetch_nothing(const void *line)
{
    fv_prefetch_stream stream = {.at = line, .run_end = line};
    for (int32_t i = 0; i < FV_PREFETCH_ASKS; i++) stream.last.at[i] = line;
    return stream;
}

/* Takes up the next run; after the last one stays where it is. */
static inline void fv_prefetch_next_run(fv_prefetch_stream *stream)
{
    if (stream->plane >= stream->num_planes) {
        stream->run_end = stream->at;
        return;
    }
    const int64_t offset = stream->offset + stream->head * stream->head_stride;
    const char *const *rows = stream->rows[stream->plane];
    stream->at = rows[stream->key] + offset;
    do {
        stream->run_end = rows[stream->key] + offset + stream->row_bytes;
        stream->key++;
    } while (stream->key < stream->end && rows[stream->key] + offset == stream->run_end);
    if (stream->key < stream->end) return;
    stream->key = stream->first;
    if (++stream->head < stream->num_heads) return;
    stream->head = 0;
    stream->plane++;
}

/* Asks for a line of each 2 KB of the stream's runs, and for their last, before all lines are asked for in turn. What
 * this gains was measured, on Zen 4 (docs/notes/cpu-avx512.md): of 1, 2 and 4 KB it is 2. */
static inline void fv_prefetch_sparsely(fv_prefetch_stream stream)
{
    while (stream.at < stream.run_end) {
        for (const char *at = stream.at; at < stream.run_end; at += 2048) __builtin_prefetch(at, 0, 2);
        __builtin_prefetch(stream.run_end - 1, 0, 2);
        stream.at = stream.run_end;
        fv_prefetch_next_run(&stream);
    }
}

/* The next `bytes` bytes. They may pass the end of the run: a prefetch does no harm. */
FV_ALWAYS_INLINE const char *fv_prefetch_take(fv_prefetch_stream *stream, int64_t bytes)
{
    if (FV_UNLIKELY(stream->at >= stream->run_end)) fv_prefetch_next_run(stream);
    const char *at = stream->at;
    if (at < stream->run_end) stream->at += bytes;
    return at;
}

/* The same as a portion. */
FV_ALWAYS_INLINE fv_prefetch_portion fv_prefetch_take_portion(fv_prefetch_stream *stream, int64_t bytes)
{
    stream->last = fv_prefetch_portion_after(stream->last, fv_prefetch_take(stream, bytes));
    return stream->last;
}

/* A stream's run at hand in registers, for loops whose stores might, for all the compiler knows, go to the stream. */
typedef struct fv_prefetch_cursor {
    fv_prefetch_stream *stream;
    const char *at, *run_end;
    fv_prefetch_portion last;
} fv_prefetch_cursor;

FV_ALWAYS_INLINE fv_prefetch_cursor fv_prefetch_begin(fv_prefetch_stream *stream)
{
    return (fv_prefetch_cursor){stream, stream->at, stream->run_end, stream->last};
}

FV_ALWAYS_INLINE void fv_prefetch_end(const fv_prefetch_cursor *cursor)
{
    cursor->stream->at = cursor->at;
    cursor->stream->last = cursor->last;
}

FV_ALWAYS_INLINE fv_prefetch_portion fv_prefetch_step(fv_prefetch_cursor *cursor, int64_t bytes)
{
    if (FV_UNLIKELY(cursor->at >= cursor->run_end)) {
        fv_prefetch_stream *stream = cursor->stream;
        fv_prefetch_end(cursor);
        fv_prefetch_next_run(stream);
        *cursor = fv_prefetch_begin(stream);
    }
    cursor->last = fv_prefetch_portion_after(cursor->last, cursor->at);
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
