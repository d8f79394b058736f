#ifndef TESTS_STORED_PANEL_EMULATED_H
#define TESTS_STORED_PANEL_EMULATED_H

#include "engine/stored/stored.h"

/* Kernels for many rows alone, as many lanes as AVX-512 has; NULL where the compiler has no AVX2. */
const fv_stored_table *fv_stored_panel_emulated(void);

#endif
