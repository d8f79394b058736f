/* attend_paged and mla_decode are one loop over rows: they differ in how a key is read. */
#ifndef FV_REFERENCE_ATTEND_PAGED_H
#define FV_REFERENCE_ATTEND_PAGED_H

#include "reference/kv_reader.h"

/* Every item of the list, or every cell of the static grid. */
fv_status fv_reference_attend(const fv_attend_params *params, const fv_kv_reader *reader);

#endif
