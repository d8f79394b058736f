#ifndef TESTS_STORED_TILES_EMULATED_H
#define TESTS_STORED_TILES_EMULATED_H

#include "engine/stored/stored_tiles.h"

/* NULL where the CPU or the compiler has no AVX2. */
const fv_stored_tiles *fv_stored_tiles_emulated(void);

#endif
