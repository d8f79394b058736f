/* A chunk of gathered context: the calls that bring it in, attend it and merge what comes out. */
#ifndef FV_BACKENDS_CONTEXT_CHUNK_H
#define FV_BACKENDS_CONTEXT_CHUNK_H

#include "backends/schedule.h"

/* The split rule of dense passes: states are merged by LSE, so none leaves segments. */
fv_split_rule fv_context_whole_rule(const fv_plan *plan);

/* Gathers the keys of the pieces, and expands them where they are latents. *chunk holds the index arrays. */
fv_status fv_context_chunk_gather(fv_call *chunk, fv_schedule *schedule, const fv_context_piece *pieces,
                                  int32_t num_pieces);

/* The runs of some pieces of the chunk, in their order, against the pieces' keys. */
fv_status fv_context_chunk_attend(fv_schedule *schedule, const fv_call *chunk, const fv_context_round *round,
                                  const fv_context_piece *pieces, int32_t num_pieces, fv_result_target target);

/* The context state of the pieces into the running one, or, where a piece is its run's last, both into the
 * output: one merge for each run of pieces whose tokens follow each other and that end the same way. */
fv_status fv_context_chunk_merge(fv_schedule *schedule, const fv_context_round *round, const fv_context_piece *pieces,
                                 int32_t num_pieces);

#endif
