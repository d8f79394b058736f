/* YaRN's section 3.2, with the bounds of its ramp rounded outwards to whole pairs, as its authors do. */
#include "engine/rope_frequencies.h"

#include <math.h>

/* The pair, counted as a real number, that turns `turns` times within the original context: its frequency
 * base^(-2i / rope_size) is 2 pi turns / original_context. */
static double pair_of_turns(double turns, int32_t rope_size, const fv_rope_scaling *scaling)
{
    const double two_pi = 6.283185307179586;
    return rope_size * log(scaling->original_context / (turns * two_pi)) / (2.0 * log((double)scaling->base));
}

void fv_rope_frequencies(double *frequencies, int32_t rope_size, const fv_rope_scaling *scaling)
{
    const double step = -2.0 / (double)rope_size * log((double)scaling->base);
    double first = 0.0, last = 0.0; /* the ramp, in pairs */
    if (scaling->is_yarn) {
        first = fmax(floor(pair_of_turns(scaling->beta_fast, rope_size, scaling)), 0.0);
        last = fmin(ceil(pair_of_turns(scaling->beta_slow, rope_size, scaling)), rope_size - 1);
        if (last <= first) last = first + 0.001; /* a step */
    }
    for (int32_t i = 0; i < rope_size / 2; i++) {
        const double plain = exp(step * i), stretched = plain / (double)scaling->factor;
        const double ramp = scaling->is_yarn ? fmin(fmax((i - first) / (last - first), 0.0), 1.0) : 1.0;
        frequencies[i] = plain * (1.0 - ramp) + stretched * ramp;
    }
}
