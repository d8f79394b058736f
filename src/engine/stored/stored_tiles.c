/* Tiles of AMX, where the compiler knows them. */
#include "engine/stored/stored_tiles.h"

#if defined(FV_HAVE_AMX)

#include "engine/stored/stored_tiles_expand.h"
#include "engine/stored/stored_tiles_product.h"

static const fv_stored_tiles amx = {"amx", fv_stored_tiles_load_x, fv_stored_expand_tiles, fv_stored_tiles_multiply};

const fv_stored_tiles *fv_stored_find_tiles(fv_isa limit) { return limit >= FV_ISA_AMX ? &amx : NULL; }

#else

const fv_stored_tiles *fv_stored_find_tiles(fv_isa limit)
{
    (void)limit;
    return NULL;
}

#endif
