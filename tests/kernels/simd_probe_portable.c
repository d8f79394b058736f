/* The vector operations at the compiler's baseline. */
#define FV_ISA portable
#define FV_PROBE_ISA FV_ISA_PORTABLE
#include "kernels/simd_probe_body.h"
