/* Lines of memory that a kernel asks for beside its products: the memory in even parts, its tracks, a line of each in turn.
 * Of lines asked for in their order beside arithmetic Intel's cores get two thirds of what memory gives
 * (docs/notes/cpu-weights.md, "Tracks"). Tracks of one piece of memory go by one address; those of kernels/cpu/prefetch_stream.h
 * have runs of their own, which costs 2 to 4% here. */
#ifndef FV_ENGINE_STORED_STORED_AHEAD_H
#define FV_ENGINE_STORED_STORED_AHEAD_H

#include "core/compiler.h"
#include "engine/stored/stored.h"

typedef struct fv_stored_stream {
    const uint8_t *line; /* the next one of the first track */
    int64_t track_bytes;
    int64_t bytes_left;        /* of each track */
    int32_t num_tracks, track; /* whose turn it is */
    int32_t due;               /* bytes that were multiplied since the last line */
} fv_stored_stream;

static inline fv_stored_stream fv_stored_stream_of(const fv_stored_ahead *ahead)
{
    const int32_t num_tracks = fv_max_i32(1, ahead->num_tracks);
    const int64_t track_bytes = fv_round_up(fv_ceil_div(ahead->bytes, num_tracks), FV_CACHE_LINE);
    return (fv_stored_stream){
        .line = ahead->at,
        .track_bytes = track_bytes,
        .bytes_left = track_bytes,
        .num_tracks = num_tracks,
    };
}

/* The next line of a stream with bytes_left; the last ones may lie behind the memory. */
FV_ALWAYS_INLINE const uint8_t *fv_stored_stream_take(fv_stored_stream *stream)
{
    const uint8_t *line = stream->line + stream->track * stream->track_bytes;
    if (++stream->track < stream->num_tracks) return line;
    stream->track = 0;
    stream->line += FV_CACHE_LINE;
    stream->bytes_left -= FV_CACHE_LINE;
    return line;
}

/* Asks for as much as is being multiplied, if it is left. */
FV_ALWAYS_INLINE void fv_stored_stream_ask(fv_stored_stream *stream, int32_t bytes)
{
    for (stream->due += bytes; stream->due >= FV_CACHE_LINE && stream->bytes_left > 0; stream->due -= FV_CACHE_LINE)
        __builtin_prefetch(fv_stored_stream_take(stream), 0, 2);
}

#endif
