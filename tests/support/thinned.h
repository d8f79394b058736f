/* Builds with sanitizers run several times slower. What a test does in many ways that meet the same code is thinned out
 * there: loops over ways go in steps of `thinned`. */
#ifndef FV_TESTS_THINNED_H
#define FV_TESTS_THINNED_H

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { thinned = 5 };
#else
enum { thinned = 1 };
#endif

#endif
