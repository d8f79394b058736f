/* Comparison of narrow numbers with what they stand for, and of a cache with what should be in it. */
#ifndef FV_TOOLS_CHECK_WRITTEN_H
#define FV_TOOLS_CHECK_WRITTEN_H

#include "check/scene.h"

/* 1 when the element at `stored` is as near to `real` as the one at `reference`. Where fp32 arithmetic
 * stands before the rounding, a number near a tie may go either way. */
int32_t check_as_near(const void *stored, const void *reference, double real, fv_dtype dtype);

/* Compares the scene's cache with `reference`, made from cache_before and the scene's new k and v at
 * `slots`. 0: an element is wrong, or one is changed that no slot names. Elements that went the other
 * way at a tie are copied to `reference`, and *differs is set. */
int32_t check_written_compare(int32_t *differs, const check_scene *scene, char *reference, const int64_t *slots);

#endif
