/* The thread-local error text, and the names of the status codes. */
#include "core/error.h"

#include <stdarg.h>
#include <stdio.h>

static _Thread_local char last_error[2048];

fv_status fv_fail(fv_status status, const char *format, ...)
{
    /* An argument may be the last error itself, so print aside first. */
    char text[sizeof(last_error)];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    snprintf(last_error, sizeof(last_error), "%s", text);
    return status;
}

const char *fv_last_error(void) { return last_error; }

const char *fv_status_name(fv_status status)
{
    switch (status) {
    case FV_OK: return "FV_OK";
    case FV_ERR_INVALID: return "FV_ERR_INVALID";
    case FV_ERR_UNSUPPORTED: return "FV_ERR_UNSUPPORTED";
    case FV_ERR_NO_MEMORY: return "FV_ERR_NO_MEMORY";
    case FV_ERR_NO_SPACE: return "FV_ERR_NO_SPACE";
    case FV_ERR_IO: return "FV_ERR_IO";
    case FV_ERR_DEVICE: return "FV_ERR_DEVICE";
    case FV_ERR_INTERNAL: return "FV_ERR_INTERNAL";
    case FV_NEEDS_PLAN: return "FV_NEEDS_PLAN";
    }
    return "unknown status";
}

const char *fv_version(void) { return FV_VERSION; }
