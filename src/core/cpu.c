/* CPU detection: the compiler's CPUID builtins on x86 (which also ask XGETBV whether the operating
 * system saves the wide registers), /proc/cpuinfo for the name. */
#include "core/cpu.h"

#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/compiler.h"
#include "core/cpu_quota.h"
#include "core/error.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

static const char *const isa_names[] = {"portable", "avx2", "avx512", "avx512_bf16", "amx"};

const char *fv_isa_name(fv_isa isa) { return isa_names[isa]; }

fv_status fv_isa_parse(fv_isa *isa, const char *name)
{
    for (int32_t i = 0; i < FV_ARRAY_LEN(isa_names); i++) {
        if (strcmp(name, isa_names[i]) == 0) {
            *isa = (fv_isa)i;
            return FV_OK;
        }
    }
    return fv_fail(FV_ERR_INVALID, "no ISA level '%s'; accepted: portable, avx2, avx512, avx512_bf16, amx", name);
}

#if defined(__x86_64__) && defined(FV_HAVE_AVX512)
static int32_t cpu_has_avx512(void)
{
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vl");
}
#elif defined(__x86_64__)
static int32_t cpu_has_avx512(void) { return 0; }
#endif

#if defined(__x86_64__) && defined(FV_HAVE_AVX512_BF16)
static int32_t cpu_has_avx512_bf16(void)
{
    uint32_t a = 0, b = 0, c = 0, d = 0;
    if (!__get_cpuid_count(7, 1, &a, &b, &c, &d) || !(a & 1u << 5)) return 0;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (c & 1u << 1); /* VBMI: all but Cooper Lake have both */
}
#elif defined(__x86_64__)
static int32_t cpu_has_avx512_bf16(void) { return 0; }
#endif

#if defined(__x86_64__) && defined(FV_HAVE_AMX)
#define REQUEST_STATE 0x1023 /* ARCH_REQ_XCOMP_PERM of arch_prctl */
#define TILE_DATA 18         /* the component of the extended state that holds the tiles */
#define TILE_STATES (3u << 17)

/* 1: the operating system saves the tiles. Linux wants to be asked before a process uses them, 8 KB a thread. */
static int32_t amx_is_permitted(void)
{
    uint32_t a = 0, b = 0, c = 0, d = 0;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE)) return 0;
    __asm__ volatile("xgetbv" : "=a"(a), "=d"(d) : "c"(0));
    if ((a & TILE_STATES) != TILE_STATES) return 0;
    return syscall(SYS_arch_prctl, REQUEST_STATE, TILE_DATA) == 0;
}

static int32_t cpu_has_amx(void)
{
    uint32_t a = 0, b = 0, c = 0, d = 0;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return 0;
    const uint32_t bf16_tiles = 1u << 24 | 1u << 22;
    return (d & bf16_tiles) == bf16_tiles && amx_is_permitted();
}
#elif defined(__x86_64__)
static int32_t cpu_has_amx(void) { return 0; }
#endif

fv_isa fv_cpu_isa(void)
{
#if defined(__x86_64__)
    __builtin_cpu_init();
    const int avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
    uint32_t a = 0, b = 0, c = 0, d = 0;
    const int f16c = __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
    if (!avx2 || !f16c) return FV_ISA_PORTABLE;
    if (!cpu_has_avx512()) return FV_ISA_AVX2;
    if (!cpu_has_avx512_bf16()) return FV_ISA_AVX512;
    return cpu_has_amx() ? FV_ISA_AMX : FV_ISA_AVX512_BF16;
#else
    return FV_ISA_PORTABLE;
#endif
}

int32_t fv_cpu_ahead_tracks(void)
{
#if defined(__x86_64__)
    __builtin_cpu_init();
    return __builtin_cpu_is("intel") ? FV_MAX_AHEAD_TRACKS : 1;
#else
    return 1;
#endif
}

#if defined(__x86_64__)
/* Of AMD's CPUs: 0x19 is Zen 3 and 4, of which the latter has AVX-512, 0x1a Zen 5; 0: not AMD's. */
static uint32_t amd_family(void)
{
    __builtin_cpu_init();
    uint32_t a = 0, b = 0, c = 0, d = 0;
    if (!__builtin_cpu_is("amd") || !__get_cpuid(1, &a, &b, &c, &d)) return 0;
    return (a >> 8 & 0xf) + (a >> 20 & 0xff);
}
#endif

int32_t fv_cpu_ahead_is_near(void)
{
#if defined(__x86_64__)
    const uint32_t family = amd_family();
    return family >= 0x1a || (family == 0x19 && !__builtin_cpu_supports("avx512f"));
#else
    return 0;
#endif
}

int32_t fv_cpu_multiplies_pairs(void)
{
#if defined(__x86_64__)
    __builtin_cpu_init();
    return fv_cpu_isa() >= FV_ISA_AVX512_BF16 && __builtin_cpu_is("amd");
#else
    return 0;
#endif
}

int32_t fv_cpu_subnormals_are_fast(void)
{
#if defined(__x86_64__)
    return amd_family() >= 0x19;
#else
    return 0;
#endif
}

int32_t fv_cpu_count(void)
{
    cpu_set_t allowed;
    if (sched_getaffinity(0, sizeof(allowed), &allowed) != 0) return 1;
    const int32_t num_allowed = fv_max_i32(1, CPU_COUNT(&allowed)), quota = fv_cpu_quota("");
    return quota > 0 ? fv_min_i32(num_allowed, quota) : num_allowed;
}

void fv_cpu_model(char *model, size_t model_bytes)
{
    snprintf(model, model_bytes, "unknown CPU");
    FILE *file = fopen("/proc/cpuinfo", "r");
    if (!file) return;
    char line[256];
    while (fgets(line, sizeof(line), file)) {
        const char *colon = strchr(line, ':');
        if (strncmp(line, "model name", 10) != 0 || !colon) continue;
        line[strcspn(line, "\n")] = 0;
        snprintf(model, model_bytes, "%s", colon + 2);
        break;
    }
    fclose(file);
}

#define CACHES_PATH "/sys/devices/system/cpu/cpu0/cache/index%d/%s"

/* The first line of a file about a cache; "" where there is none. */
static void read_cache_line(char *line, size_t line_bytes, int32_t index, const char *name)
{
    char path[128];
    line[0] = 0;
    snprintf(path, sizeof(path), CACHES_PATH, index, name);
    FILE *file = fopen(path, "r");
    if (!file) return;
    if (!fgets(line, (int)line_bytes, file)) line[0] = 0;
    line[strcspn(line, "\n")] = 0;
    fclose(file);
}

/* "512K" */
static int64_t bytes_of(const char *size)
{
    char *end = NULL;
    const long long number = strtoll(size, &end, 10);
    return *end == 'K' ? number * 1024 : *end == 'M' ? number * 1024 * 1024 : number;
}

/* "0-7,16-23": 16 CPUs */
static int32_t count_cpus(const char *list)
{
    int32_t num_cpus = 0;
    while (*list) {
        char *end = NULL;
        const long first = strtol(list, &end, 10);
        const long last = *end == '-' ? strtol(end + 1, &end, 10) : first;
        if (end == list || last < first) break;
        num_cpus += (int32_t)(last - first) + 1;
        list = *end == ',' ? end + 1 : end;
    }
    return fv_max_i32(1, num_cpus);
}

fv_cpu_caches fv_cpu_find_caches(void)
{
    fv_cpu_caches caches = {.l3_cpus = 1};
    for (int32_t index = 0; index < 8; index++) {
        char level[8], type[16], size[16], cpus[256];
        read_cache_line(level, sizeof(level), index, "level");
        read_cache_line(type, sizeof(type), index, "type");
        read_cache_line(size, sizeof(size), index, "size");
        if (strcmp(type, "Instruction") == 0) continue;
        if (level[0] == '1') caches.l1_bytes = bytes_of(size);
        if (level[0] == '2') caches.l2_bytes = bytes_of(size);
        if (level[0] != '3') continue;
        read_cache_line(cpus, sizeof(cpus), index, "shared_cpu_list");
        caches.l3_bytes = bytes_of(size);
        caches.l3_cpus = count_cpus(cpus);
    }
    caches.is_known = caches.l1_bytes > 0 && caches.l2_bytes > 0;
    if (!caches.is_known) caches = (fv_cpu_caches){.l1_bytes = 32 << 10, .l2_bytes = 512 << 10, .l3_cpus = 1};
    return caches;
}

void fv_cpu_features(char *features, size_t features_bytes)
{
    features[0] = 0;
#if defined(__x86_64__)
    uint32_t a1 = 0, b1 = 0, c1 = 0, d1 = 0, a7 = 0, b7 = 0, c7 = 0, d7 = 0, a71 = 0, b71 = 0, c71 = 0, d71 = 0;
    __get_cpuid(1, &a1, &b1, &c1, &d1);
    __get_cpuid_count(7, 0, &a7, &b7, &c7, &d7);
    __get_cpuid_count(7, 1, &a71, &b71, &c71, &d71);
    const struct {
        const char *name;
        uint32_t present;
    } all[] = {
        {"sse4.2", c1 & bit_SSE4_2},      {"avx", c1 & bit_AVX},
        {"f16c", c1 & bit_F16C},          {"fma", c1 & bit_FMA},
        {"avx2", b7 & bit_AVX2},          {"avx512f", b7 & bit_AVX512F},
        {"avx512bw", b7 & (1u << 30)},    {"avx512vl", b7 & (1u << 31)},
        {"avx512_vbmi", c7 & (1u << 1)},  {"avx512_vnni", c7 & (1u << 11)},
        {"avx512_bf16", a71 & (1u << 5)}, {"avx512_fp16", d7 & (1u << 23)},
        {"amx_tile", d7 & (1u << 24)},    {"amx_bf16", d7 & (1u << 22)},
        {"amx_int8", d7 & (1u << 25)},
    };
    size_t used = 0;
    for (int32_t i = 0; i < FV_ARRAY_LEN(all); i++) {
        if (!all[i].present || used + strlen(all[i].name) + 2 > features_bytes) continue;
        used += (size_t)snprintf(features + used, features_bytes - used, "%s%s", used ? " " : "", all[i].name);
    }
#else
    snprintf(features, features_bytes, "baseline");
#endif
}
