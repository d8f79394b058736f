/* Memory that is prefetched between the keys of a strip's scores (strip_product.h), a few lines for each step of keys:
 * bursts would find the core's miss buffers full. */
#ifndef FV_KERNELS_CPU_STRIP_AHEAD_H
#define FV_KERNELS_CPU_STRIP_AHEAD_H

#include "kernels/cpu/prefetch_stream.h"

typedef struct fv_strip_ahead {
    fv_prefetch_stream *stream;
    int32_t num_lines; /* of a step; 0: nothing is asked for */
} fv_strip_ahead;

/* Aims a stream at some rows, num_lines lines that are asked for in as many steps. */
static inline fv_strip_ahead fv_strip_aim(fv_prefetch_stream *stream, const fv_prefetch_rows *rows, int64_t num_lines,
                                          int64_t num_steps)
{
    fv_prefetch_aim(stream, rows, 1, FV_CACHE_LINE);
    return (fv_strip_ahead){stream, (int32_t)fv_ceil_div(num_lines, num_steps)};
}

/* Of a stream in tracks; out of line, for it would cost the loops around the registers of their sums. */
static __attribute__((noinline)) void fv_strip_ahead_ask_in_tracks(fv_prefetch_stream *stream, int32_t num_lines)
{
    for (int32_t i = 0; i < num_lines && stream->num_tracks > 0; i++)
        __builtin_prefetch(fv_prefetch_take_turn(stream, &stream->turn), 0, 2);
}

/* Asks for the lines of some steps; is_near, whether the stream's order is FV_PREFETCH_NEAR: those of fv_strip_aim never are. */
FV_ALWAYS_INLINE void fv_strip_ahead_ask_as(fv_strip_ahead *ahead, int32_t num_steps, const int32_t is_near)
{
    const int32_t num_lines = num_steps * ahead->num_lines;
    if (num_lines > 0 && ahead->stream->order == FV_PREFETCH_IN_TRACKS) {
        fv_strip_ahead_ask_in_tracks(ahead->stream, num_lines);
        return;
    }
    for (int32_t i = 0; i < num_lines && ahead->stream->num_tracks > 0; i++) {
        const char *line = fv_prefetch_take_next(ahead->stream);
        if (is_near)
            __builtin_prefetch(line, 0, 3);
        else
            __builtin_prefetch(line, 0, 2);
    }
}

/* The same, whatever the order. */
FV_ALWAYS_INLINE void fv_strip_ahead_ask(fv_strip_ahead *ahead, int32_t num_steps)
{
    if (ahead->num_lines > 0) fv_strip_ahead_ask_as(ahead, num_steps, ahead->stream->order == FV_PREFETCH_NEAR);
}

#endif
