#include "bench/origin.h"

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "fovea/fovea.h"

/* Words joined with spaces. */
static void join_command(char *text, size_t text_bytes, int argc, char **argv)
{
    size_t used = (size_t)snprintf(text, text_bytes, "fovea");
    for (int32_t i = 0; i < argc && used < text_bytes; i++) {
        used += (size_t)snprintf(text + used, text_bytes - used, " %s", argv[i]);
    }
}

void fv_json_origin(fv_json *json, int argc, char **argv)
{
    char command[1024], date[32];
    const time_t now = time(NULL);
    struct tm utc;
    gmtime_r(&now, &utc);
    strftime(date, sizeof(date), "%Y-%m-%dT%H:%M:%SZ", &utc);
    join_command(command, sizeof(command), argc, argv);
    fv_json_string(json, "command", command);
    fv_json_string(json, "date", date);
    fv_json_string(json, "version", fv_version());
    fv_json_string(json, "commit", getenv("FOVEA_COMMIT"));
}
