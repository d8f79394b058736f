/* Device plugins: libfovea-<name>.so, loaded at run time, one exported symbol.
 *
 * A plugin links against libc alone. It is found in the folders of $FOVEA_PLUGIN_PATH, then beside
 * libfovea itself. Until 1.0 it is accepted only with libfovea's own build id, because the tables and
 * parameters of kernels are private. */
#ifndef FV_CORE_PLUGIN_H
#define FV_CORE_PLUGIN_H

#include "core/device.h"

#define FV_PLUGIN_ABI 1
#define FV_PLUGIN_SYMBOL "fv_plugin_entry"

/* What the library gives to a plugin. Valid as long as the context. */
typedef struct fv_plugin_host {
    fv_context *context;
    fv_allocator allocator;
    fv_executor executor;
    fv_status (*fail)(fv_status status, const char *format, ...); /* fv_fail */
} fv_plugin_host;

typedef struct fv_plugin {
    uint32_t abi;         /* FV_PLUGIN_ABI of the plugin; nothing after it is read when it differs */
    const char *build_id; /* FV_BUILD_ID of the plugin */
    /* Opens device `index`; the device is the caller's. Fails with the reason (no driver, no GPU, ...). */
    fv_status (*device_open)(fv_device **device, const fv_plugin_host *host, int32_t index);
} fv_plugin;

/* The exported symbol: `const fv_plugin *fv_plugin_entry(void)`. */
typedef const fv_plugin *(*fv_plugin_entry_fn)(void);

/* Opens "name:index" through its plugin. FV_ERR_UNSUPPORTED with the reason. */
fv_status fv_plugin_open_device(fv_device **device, fv_context *context, const char *name);

#endif
