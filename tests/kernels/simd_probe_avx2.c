/* The vector operations at level avx2; its compiler flags come from CMakeLists.txt. */
#if defined(__x86_64__)
#define FV_ISA avx2
#define FV_PROBE_ISA FV_ISA_AVX2
#include "kernels/simd_probe_body.h"
#else
typedef int simd_probe_is_empty;
#endif
