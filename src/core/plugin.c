/* Finds, checks and opens device plugins. A plugin stays loaded until the process ends: devices and
 * their kernels are code of it, and unloading a GPU run-time is asking for trouble. */
#include "core/plugin.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "core/context.h"
#include "core/error.h"

/* Tries one folder; 1 when the file is there. */
static int32_t plugin_in(char *path, size_t path_bytes, const char *folder, int32_t folder_len, const char *device)
{
    const int written = snprintf(path, path_bytes, "%.*s/libfovea-%s.so", folder_len, folder, device);
    return written > 0 && (size_t)written < path_bytes && access(path, R_OK) == 0;
}

static int32_t find_plugin(char *path, size_t path_bytes, const char *device)
{
    const char *folders = getenv("FOVEA_PLUGIN_PATH");
    while (folders && *folders) {
        const size_t len = strcspn(folders, ":");
        if (len && plugin_in(path, path_bytes, folders, (int32_t)len, device)) return 1;
        folders += len + (folders[len] == ':');
    }
    Dl_info self;
    if (!dladdr((const void *)fv_last_error, &self) || !self.dli_fname) return 0;
    const char *slash = strrchr(self.dli_fname, '/');
    if (!slash) return 0;
    const int32_t folder_len = (int32_t)(slash - self.dli_fname);
    if (plugin_in(path, path_bytes, self.dli_fname, folder_len, device)) return 1;
    char libraries[4096]; /* of an installed program, which holds the library */
    const int written = snprintf(libraries, sizeof(libraries), "%.*s/%s", folder_len, self.dli_fname, FV_LIBRARIES);
    return written > 0 && (size_t)written < sizeof(libraries) &&
           plugin_in(path, path_bytes, libraries, written, device);
}

static fv_status load_plugin(const fv_plugin **plugin, const char *path)
{
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library) return fv_fail(FV_ERR_UNSUPPORTED, "cannot load plugin %s: %s", path, dlerror());
    fv_plugin_entry_fn entry;
    *(void **)&entry = dlsym(library, FV_PLUGIN_SYMBOL);
    *plugin = entry ? entry() : NULL;
    if (!*plugin) {
        dlclose(library);
        return fv_fail(FV_ERR_UNSUPPORTED, "%s is not a fovea plugin: no symbol " FV_PLUGIN_SYMBOL, path);
    }
    fv_status status = FV_OK;
    if ((*plugin)->abi != FV_PLUGIN_ABI) {
        status = fv_fail(FV_ERR_UNSUPPORTED, "plugin %s has ABI %u; this library takes %d", path, (*plugin)->abi,
                         FV_PLUGIN_ABI);
    } else if (strcmp((*plugin)->build_id, FV_BUILD_ID) != 0) {
        status = fv_fail(FV_ERR_UNSUPPORTED, "plugin %s is of build %s; this library takes its own, %s", path,
                         (*plugin)->build_id, FV_BUILD_ID);
    }
    if (status != FV_OK) dlclose(library);
    return status;
}

/* The number of a device: digits without leading zeros, so that a device has one name; -1 for others. */
static int32_t parse_index(const char *digits)
{
    const size_t len = strspn(digits, "0123456789");
    if (len == 0 || len > 4 || digits[len] || (digits[0] == '0' && len > 1)) return -1;
    const int32_t index = (int32_t)strtol(digits, NULL, 10);
    return index < 1024 ? index : -1;
}

fv_status fv_plugin_open_device(fv_device **device, fv_context *context, const char *name)
{
    char kind[32], path[4096];
    const size_t kind_len = strcspn(name, ":");
    const int32_t index = name[kind_len] == ':' ? parse_index(name + kind_len + 1) : -1;
    if (kind_len == 0 || kind_len >= sizeof(kind) || strspn(name, "abcdefghijklmnopqrstuvwxyz") != kind_len ||
        index < 0) {
        return fv_fail(FV_ERR_INVALID, "no device '%s'; accepted: cpu, cuda, cuda:1, ...", name);
    }
    snprintf(kind, sizeof(kind), "%.*s", (int)kind_len, name);
    if (context->no_plugins) {
        return fv_fail(FV_ERR_UNSUPPORTED, "no device '%s': plugins are switched off; available: cpu", name);
    }
    if (!find_plugin(path, sizeof(path), kind)) {
        return fv_fail(FV_ERR_UNSUPPORTED,
                       "no device '%s': libfovea-%s.so is neither beside libfovea, nor in " FV_LIBRARIES
                       " of the program, nor in FOVEA_PLUGIN_PATH; "
                       "available: cpu",
                       name, kind);
    }
    const fv_plugin *plugin;
    const fv_status status = load_plugin(&plugin, path);
    if (status != FV_OK) return status;
    const fv_plugin_host host = {context, context->allocator, context->executor, fv_fail};
    return plugin->device_open(device, &host, index);
}
