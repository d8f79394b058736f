/* The limit on CPU time that control groups set, as containers do. */
#ifndef FV_CORE_CPU_QUOTA_H
#define FV_CORE_CPU_QUOTA_H

#include <stdint.h>

/* CPUs whose time the control groups of this process leave it, rounded up; 0: they set no limit. `root` stands before
 * all paths: "" is this machine. */
int32_t fv_cpu_quota(const char *root);

#endif
