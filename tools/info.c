/* fovea info: what this program, this CPU and these devices are. The first thing to ask for in a
 * report of a fault or of a speed. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "args.h"
#include "commands.h"
#include "core/context.h"
#include "core/cpu.h"
#include "core/error.h"
#include "fovea/fovea.h"
#include "info/tiling.h"
#include "json.h"
#include "ops/kernel_table.h"

#define MAX_CACHES 8
#define MAX_PLUGINS 4

typedef struct cache_info {
    char name[16];      /* "L1d", "L2" */
    char size[16];      /* as the kernel says it: "512K" */
    char shared_by[64]; /* CPUs */
} cache_info;

typedef struct info {
    char model[128];
    char features[256];
    int32_t num_cpus;
    int32_t num_threads;
    const char *isa_available, *isa_limit, *isa_used;
    char isa_compiled[64];
    cache_info caches[MAX_CACHES];
    int32_t num_caches;
    int64_t page_bytes;
    char huge_pages[64];
    char devices[MAX_PLUGINS][320]; /* "cpu: ...", or the reason why a plugin's device is not there */
    int32_t num_devices;
} info;

/* Reads the first line of a small file; "" where there is none. */
static void read_line(char *line, size_t line_bytes, const char *path)
{
    line[0] = '\0';
    FILE *file = fopen(path, "r");
    if (!file) return;
    if (!fgets(line, (int)line_bytes, file)) line[0] = '\0';
    line[strcspn(line, "\n")] = '\0';
    fclose(file);
}

static void read_caches(info *i)
{
    for (int32_t index = 0; index < MAX_CACHES; index++) {
        char path[128], level[8], type[16];
        cache_info *cache = &i->caches[i->num_caches];
#define READ(to, file)                                                                       \
    snprintf(path, sizeof(path), "/sys/devices/system/cpu/cpu0/cache/index%d/" file, index); \
    read_line(to, sizeof(to), path)
        READ(level, "level");
        READ(type, "type");
        READ(cache->size, "size");
        READ(cache->shared_by, "shared_cpu_list");
#undef READ
        if (!level[0] || strcmp(type, "Instruction") == 0) continue;
        snprintf(cache->name, sizeof(cache->name), "L%.4s%s", level, strcmp(type, "Data") == 0 ? "d" : "");
        i->num_caches++;
    }
}

/* "always [madvise] never" -> "madvise" */
static void read_huge_pages(info *i)
{
    char line[64];
    read_line(line, sizeof(line), "/sys/kernel/mm/transparent_hugepage/enabled");
    const char *open = strchr(line, '[');
    const int32_t len = open ? (int32_t)strcspn(open + 1, "]") : 0;
    snprintf(i->huge_pages, sizeof(i->huge_pages), "%.*s", len ? len : 7, len ? open + 1 : "unknown");
}

static void read_isa(info *i, fv_context *context)
{
    const fv_device *cpu = context->devices[0];
    const char *limit = getenv("FOVEA_ISA");
    i->isa_available = fv_isa_name(fv_cpu_isa());
    i->isa_limit = limit && *limit ? limit : NULL;
    i->isa_used = cpu->tables[cpu->num_tables - 1]->name;
    const struct fv_kernel_table *const *tables;
    const int32_t num_tables = fv_cpu_tables(&tables, FV_ISA_AMX);
    size_t used = 0;
    for (int32_t t = 0; t < num_tables && used < sizeof(i->isa_compiled); t++) {
        used += (size_t)snprintf(i->isa_compiled + used, sizeof(i->isa_compiled) - used, "%s%s", t ? " " : "",
                                 tables[t]->name);
    }
}

static void read_devices(info *i, fv_context *context)
{
    static const char *const names[] = {"cpu", "cuda"};
    for (int32_t d = 0; d < FV_ARRAY_LEN(names); d++) {
        fv_device *device = NULL;
        const fv_status status = fv_device_find(&device, context, names[d]);
        snprintf(i->devices[d], sizeof(i->devices[d]), "%s: %s", names[d],
                 status == FV_OK ? fv_device_describe(device) : fv_last_error());
        i->num_devices++;
    }
}

static void read_info(info *i, fv_context *context)
{
    *i = (info){.num_cpus = fv_cpu_count(),
                .num_threads = fv_context_num_workers(context),
                .page_bytes = sysconf(_SC_PAGESIZE)};
    fv_cpu_model(i->model, sizeof(i->model));
    fv_cpu_features(i->features, sizeof(i->features));
    read_isa(i, context);
    read_caches(i);
    read_huge_pages(i);
    read_devices(i, context);
}

static void print_text(const info *i)
{
    printf("fovea         %s\n", fv_version());
    printf("CPU           %s\n", i->model);
    printf("features      %s\n", i->features);
    printf("CPUs          %d, %d threads\n", i->num_cpus, i->num_threads);
    printf("ISA           in use %s; this CPU has %s; tables here: %s; FOVEA_ISA %s\n", i->isa_used, i->isa_available,
           i->isa_compiled, i->isa_limit ? i->isa_limit : "not set");
    for (int32_t c = 0; c < i->num_caches; c++) {
        const cache_info *cache = &i->caches[c];
        printf("cache %-7s %s, of CPUs %s\n", cache->name, cache->size, cache->shared_by);
    }
    printf("pages         %lld bytes, transparent huge pages: %s\n", (long long)i->page_bytes, i->huge_pages);
    for (int32_t d = 0; d < i->num_devices; d++)
        printf("%s%s\n", d ? "              " : "devices       ", i->devices[d]);
}

static void print_json(const info *i)
{
    fv_json json;
    fv_json_init(&json, stdout);
    fv_json_begin_object(&json, NULL);
    fv_json_string(&json, "version", fv_version());
    fv_json_string(&json, "cpu", i->model);
    fv_json_string(&json, "features", i->features);
    fv_json_int(&json, "cpus", i->num_cpus);
    fv_json_int(&json, "threads", i->num_threads);
    fv_json_string(&json, "isa_in_use", i->isa_used);
    fv_json_string(&json, "isa_available", i->isa_available);
    fv_json_string(&json, "kernels_compiled", i->isa_compiled);
    fv_json_string(&json, "FOVEA_ISA", i->isa_limit);
    fv_json_begin_array(&json, "caches");
    for (int32_t c = 0; c < i->num_caches; c++) {
        fv_json_begin_row(&json);
        fv_json_string(&json, "name", i->caches[c].name);
        fv_json_string(&json, "size", i->caches[c].size);
        fv_json_string(&json, "shared_by_cpus", i->caches[c].shared_by);
        fv_json_end_object(&json);
    }
    fv_json_end_array(&json);
    fv_json_int(&json, "page_bytes", i->page_bytes);
    fv_json_string(&json, "transparent_huge_pages", i->huge_pages);
    fv_json_begin_array(&json, "devices");
    for (int32_t d = 0; d < i->num_devices; d++) fv_json_string(&json, NULL, i->devices[d]);
    fv_json_end_array(&json);
    fv_json_end_object(&json);
}

typedef struct options {
    fv_tiling_options tiling;
    int32_t has_tiling, has_tiling_option, json, help;
} options;

static void print_help(void)
{
    printf(
        "usage: fovea info [--json]\n"
        "       fovea info --tiling [--machine NAME] [--rows N] [--measure] [--json]\n\n"
        "Version, CPU, instruction sets, caches, pages, devices.\n\n"
        "  --tiling         instead, the tile sizes of MLA decode (576/512) that the sizes of a machine's registers\n"
        "                   and memories lead to, with the arithmetic, and how its neighbours compare\n"
        "  --machine NAME   cpu (this one), portable, avx2, avx512, amx (with the caches of this one), ascend910 "
        "(cpu)\n"
        "  --rows N         query tokens x heads, 1 to 65536 (128)\n"
        "  --measure        time the neighbours instead of pricing them; some seconds\n"
        "  --json           print JSON\n"
        "  --help           this text\n");
}

static fv_status read_options(options *opts, int argc, char **argv)
{
    enum { JSON = 1000, TILING, MACHINE, ROWS, MEASURE };
    static const struct option long_options[] = {
        {"json", no_argument, NULL, JSON},
        {"tiling", no_argument, NULL, TILING},
        {"machine", required_argument, NULL, MACHINE},
        {"rows", required_argument, NULL, ROWS},
        {"measure", no_argument, NULL, MEASURE},
        {"help", no_argument, NULL, 'h'},
        {NULL, 0, NULL, 0},
    };
    *opts = (options){.tiling = {.machine = "cpu", .rows = 128}};
    opterr = 0;
    int value;
    while ((value = getopt_long(argc, argv, ":h", long_options, NULL)) != -1) {
        fv_status status = FV_OK;
        int32_t machine = 0;
        opts->has_tiling_option |= value == MACHINE || value == ROWS || value == MEASURE;
        switch (value) {
        case JSON: opts->json = opts->tiling.json = 1; break;
        case TILING: opts->has_tiling = 1; break;
        case MACHINE:
            status = fv_args_choice(&machine, "--machine", optarg, fv_tiling_machines, FV_TILING_NUM_MACHINES);
            opts->tiling.machine = fv_tiling_machines[machine];
            break;
        case ROWS: status = fv_args_i32(&opts->tiling.rows, "--rows", optarg, 1, 65536); break;
        case MEASURE: opts->tiling.measure = 1; break;
        case 'h': opts->help = 1; break;
        default: status = fv_args_refuse(value, argc, argv); break;
        }
        if (status != FV_OK) return status;
    }
    if (optind < argc) return fv_args_refuse_operand(argv[optind], "info");
    if (opts->has_tiling_option && !opts->has_tiling) {
        return fv_fail(FV_ERR_INVALID, "--machine, --rows and --measure without --tiling; accepted: with it");
    }
    return FV_OK;
}

int fv_cmd_info(int argc, char **argv)
{
    options opts;
    if (read_options(&opts, argc, argv) != FV_OK) return fv_args_fail("info");
    if (opts.help) {
        print_help();
        return 0;
    }
    if (opts.has_tiling) return fv_tiling_report(&opts.tiling) == FV_OK ? 0 : fv_run_fail("info");
    fv_context *context = NULL;
    if (fv_context_create(&context, NULL) != FV_OK) return fv_run_fail("info");
    info i;
    read_info(&i, context);
    (opts.json ? print_json : print_text)(&i);
    fv_context_destroy(context);
    return 0;
}
