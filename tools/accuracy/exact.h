/* Attention over latents in double: what the tables compare with. */
#ifndef FV_TOOLS_ACCURACY_EXACT_H
#define FV_TOOLS_ACCURACY_EXACT_H

#include "accuracy/sample.h"

enum { ACCURACY_GROUP = 8 }; /* heads of a call */

/* How often a row's running maximum moves from a block of keys to the next, over all blocks but the first. */
typedef struct accuracy_moves {
    int64_t num_blocks;  /* rows times blocks */
    int64_t num_max;     /* the maximum changed */
    int64_t num_integer; /* its n = round(-m / ln 2) changed */
} accuracy_moves;

/* Bytes of scratch for a call. */
size_t accuracy_exact_scratch(int32_t context);

/* out [8][512] = the rows of heads [first_head, first_head + 8) of a sample, those past the last are repeated;
 * adds to `moves` what blocks of block_keys keys make of the heads that there are. */
void accuracy_exact(double *out, accuracy_moves *moves, const accuracy_samples *samples, int32_t sample,
                    int32_t first_head, double scale, int32_t block_keys, void *scratch);

#endif
