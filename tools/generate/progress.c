#include "generate/progress.h"

#include <stdio.h>

void generate_progress_load(void *user, int32_t done, int32_t total)
{
    generate_progress *progress = user;
    if (!progress->is_wanted) return;
    progress->is_shown = true;
    fprintf(stderr, "\r%s %d%%", progress->loads, 100 * done / total);
    if (done == total) generate_progress_erase(progress);
    fflush(stderr);
}

void generate_progress_erase(generate_progress *progress)
{
    if (progress->is_shown) fprintf(stderr, "\r\033[K");
    progress->is_shown = false;
}
