/* The products of stored_tiles.h with tiles in plain C, and weights expanded as AVX2 does it. */
#include "stored_tiles_emulated.h"

#if defined(__AVX2__)

#define FV_TILES_EMULATED 1
#include "engine/stored/stored_tiles_expand.h"
#include "engine/stored/stored_tiles_product.h"

static const fv_stored_tiles emulated = {"emulated", fv_stored_tiles_load_x, fv_stored_expand_tiles,
                                         fv_stored_tiles_multiply};

const fv_stored_tiles *fv_stored_tiles_emulated(void) { return fv_cpu_isa() >= FV_ISA_AVX2 ? &emulated : NULL; }

#else

const fv_stored_tiles *fv_stored_tiles_emulated(void) { return NULL; }

#endif
