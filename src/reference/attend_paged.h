/* attend_paged, attend_dense and mla_decode are one loop over rows: the reader knows where a key is. */
#ifndef FV_REFERENCE_ATTEND_PAGED_H
#define FV_REFERENCE_ATTEND_PAGED_H

#include "reference/kv_reader.h"

/* Every item of the list, or every cell of the static grid. */
fv_status fv_reference_attend(const fv_attend_params *params, const fv_kv_reader *reader);

#endif
