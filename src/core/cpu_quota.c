/* A container with the time of 4 CPUs may run on all 64 of its host: 64 threads would use up their share of each period
 * early and then all stand still until the next one.
 *
 *   version 2   /proc/self/cgroup       0::/a/b
 *               /sys/fs/cgroup/a/b      cpu.max "400000 100000": us of all CPUs in each period of so many us; or "max ..."
 *   version 1   /proc/self/cgroup       4:cpu,cpuacct:/a/b
 *               /sys/fs/cgroup/cpu/a/b  cpu.cfs_quota_us "400000" or -1, cpu.cfs_period_us "100000"
 *
 * The groups around a group limit it too. In a container the path may be the host's while the folder has the container's
 * own groups: those that are not there are passed by. */
#include "core/cpu_quota.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/compiler.h"

#define PATH_BYTES 4096

/* The first line of a file without its end; 0: there is none. */
static int32_t read_line(char *line, size_t line_bytes, const char *path)
{
    FILE *file = fopen(path, "r");
    if (!file) return 0;
    const int32_t is_read = fgets(line, (int)line_bytes, file) != NULL;
    fclose(file);
    if (is_read) line[strcspn(line, "\n")] = '\0';
    return is_read;
}

static int32_t num_cpus_of(long long quota_us, long long period_us)
{
    if (quota_us <= 0 || period_us <= 0) return 0;
    return (int32_t)fv_min_i64(fv_max_i64(1, fv_ceil_div(quota_us, period_us)), INT32_MAX);
}

/* Of two limits, 0 is none. */
static int32_t lesser_limit(int32_t a, int32_t b) { return a == 0 || (b > 0 && b < a) ? b : a; }

/* Of one group, whose folder this is. */
static int32_t limit_of_group(const char *folder, int32_t version)
{
    char path[PATH_BYTES + 32], line[64];
    if (version == 2) {
        snprintf(path, sizeof(path), "%s/cpu.max", folder);
        if (!read_line(line, sizeof(line), path)) return 0;
        char *end = line;
        const long long quota_us = strtoll(line, &end, 10); /* 0 of "max" */
        return num_cpus_of(quota_us, strtoll(end, NULL, 10));
    }
    snprintf(path, sizeof(path), "%s/cpu.cfs_quota_us", folder);
    if (!read_line(line, sizeof(line), path)) return 0;
    const long long quota_us = strtoll(line, NULL, 10);
    snprintf(path, sizeof(path), "%s/cpu.cfs_period_us", folder);
    return read_line(line, sizeof(line), path) ? num_cpus_of(quota_us, strtoll(line, NULL, 10)) : 0;
}

/* The least of a group and of those around it, up to the folder `top`. */
static int32_t limit_of_groups(const char *top, const char *group, int32_t version)
{
    char folder[PATH_BYTES];
    const int length = snprintf(folder, sizeof(folder), "%s%s", top, group);
    if (length < 0 || (size_t)length >= sizeof(folder)) return 0;
    int32_t least = 0;
    for (;;) {
        least = lesser_limit(least, limit_of_group(folder, version));
        char *slash = strrchr(folder + strlen(top), '/');
        if (!slash) return least;
        *slash = '\0';
    }
}

/* 1: "cpu" is one of the names, which commas part. */
static int32_t names_cpu(const char *names)
{
    for (const char *at = names; at; at = strchr(at, ',') ? strchr(at, ',') + 1 : NULL)
        if (strcmp(at, "cpu") == 0 || strncmp(at, "cpu,", 4) == 0) return 1;
    return 0;
}

int32_t fv_cpu_quota(const char *root)
{
    char path[PATH_BYTES], line[PATH_BYTES];
    snprintf(path, sizeof(path), "%s/proc/self/cgroup", root);
    FILE *file = fopen(path, "r");
    if (!file) return 0;
    int32_t least = 0;
    while (fgets(line, sizeof(line), file)) { /* "number:names:group" */
        line[strcspn(line, "\n")] = '\0';
        char *names = strchr(line, ':'), *group = names ? strchr(names + 1, ':') : NULL;
        if (!group) continue;
        *names++ = *group++ = '\0';
        const int32_t version = *names ? 1 : 2;
        if (version == 1 && !names_cpu(names)) continue;
        snprintf(path, sizeof(path), "%s/sys/fs/cgroup%s", root, version == 1 ? "/cpu" : "");
        least = lesser_limit(least, limit_of_groups(path, group, version));
    }
    fclose(file);
    return least;
}
