/* The thread-local error text, and the names of the status codes. */
#include "core/error.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static _Thread_local char last_error[FV_ERROR_BYTES];

fv_status fv_fail(fv_status status, const char *format, ...)
{
    /* An argument may be the last error itself, so print aside first. */
    char text[4 * sizeof(last_error)]; /* more than two of the longest paths */
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    const size_t length = strlen(text);
    if (length < sizeof(last_error)) {
        memcpy(last_error, text, length + 1);
    } else {
        enum { kept = FV_ERROR_BYTES / 2 - 8 };
        snprintf(last_error, sizeof(last_error), "%.*s [...] %s", kept, text, text + length - kept);
    }
    return status;
}

fv_status fv_check_struct_size(const char *name, uint32_t given, size_t known)
{
    if (given == known) return FV_OK;
    return fv_fail(FV_ERR_INVALID, "%s.struct_size is %u; this library knows %zu", name, given, known);
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
