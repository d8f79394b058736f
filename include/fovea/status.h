/* Status codes and the text that goes with them.
 *
 * Every function that can fail returns fv_status; FV_OK is 0. The code says what kind of
 * failure it is, the text says what was given and what is accepted. The library never prints
 * and never exits. */
#ifndef FOVEA_STATUS_H
#define FOVEA_STATUS_H

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define FV_API __attribute__((visibility("default")))
#else
#define FV_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef enum fv_status {
    FV_OK = 0,
    FV_ERR_INVALID = 1,     /* an argument is wrong; the text names it, its value and what is accepted */
    FV_ERR_UNSUPPORTED = 2, /* a right question that nothing here can serve; the text gives the reasons */
    FV_ERR_NO_MEMORY = 3,   /* the allocator or the device answered no */
    FV_ERR_NO_SPACE = 4,    /* a buffer that the caller gave is too small; the text says how much is needed */
    FV_ERR_IO = 5,          /* a file could not be read or is not what it says it is */
    FV_ERR_DEVICE = 6,      /* the device or its driver reported an error */
    FV_ERR_INTERNAL = 7,    /* a fault of this library */
    FV_NEEDS_PLAN = 100,    /* not an error: the batch is outside the bounds of the plan; create another */
} fv_status;

/* The name of a code, e.g. "FV_ERR_INVALID". Never NULL; static text. */
FV_API const char *fv_status_name(fv_status status);

/* The text of the last failure in the calling thread; "" when there was none. Valid until the
 * next fovea call of this thread that fails. */
FV_API const char *fv_last_error(void);

/* "0.1.0". Static text. */
FV_API const char *fv_version(void);

#ifdef __cplusplus
}
#endif
#endif
