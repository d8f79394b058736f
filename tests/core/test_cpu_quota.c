/* Limits of control groups, from a tree of files as Linux has them. */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "core/cpu.h"
#include "core/cpu_quota.h"

static char root[64];

/* Writes a file below the root, and the folders on its way. */
static void write_file(const char *name, const char *text)
{
    char path[256];
    snprintf(path, sizeof(path), "%s/%s", root, name);
    for (char *slash = strchr(path + strlen(root) + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
        *slash = '\0';
        assert_true(mkdir(path, 0700) == 0 || errno == EEXIST);
        *slash = '/';
    }
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    fputs(text, file);
    fclose(file);
}

static int make_root(void **state)
{
    (void)state;
    snprintf(root, sizeof(root), "/tmp/fovea-quota-XXXXXX");
    return mkdtemp(root) ? 0 : -1;
}

static int remove_root(void **state)
{
    (void)state;
    char command[96];
    snprintf(command, sizeof(command), "rm -rf '%s'", root);
    return system(command);
}

static void test_no_groups_no_limit(void **state)
{
    (void)state;
    assert_int_equal(fv_cpu_quota(root), 0);
    write_file("proc/self/cgroup", "0::/\n");
    assert_int_equal(fv_cpu_quota(root), 0);
    write_file("sys/fs/cgroup/cpu.max", "max 100000\n");
    assert_int_equal(fv_cpu_quota(root), 0);
}

/* The group of a container is the root that it sees. */
static void test_version_2(void **state)
{
    (void)state;
    write_file("proc/self/cgroup", "0::/\n");
    write_file("sys/fs/cgroup/cpu.max", "400000 100000\n");
    assert_int_equal(fv_cpu_quota(root), 4);
    write_file("sys/fs/cgroup/cpu.max", "150000 100000\n");
    assert_int_equal(fv_cpu_quota(root), 2);
    write_file("sys/fs/cgroup/cpu.max", "1000 100000\n");
    assert_int_equal(fv_cpu_quota(root), 1);
}

static void test_groups_around_a_group_limit_it(void **state)
{
    (void)state;
    write_file("proc/self/cgroup", "0::/system.slice/a.service\n");
    write_file("sys/fs/cgroup/system.slice/cpu.max", "300000 100000\n");
    write_file("sys/fs/cgroup/system.slice/a.service/cpu.max", "800000 100000\n");
    assert_int_equal(fv_cpu_quota(root), 3);
    write_file("sys/fs/cgroup/system.slice/cpu.max", "max 100000\n");
    assert_int_equal(fv_cpu_quota(root), 8);
}

/* The path is the host's, the folder the container's. */
static void test_version_1_in_a_container(void **state)
{
    (void)state;
    write_file("proc/self/cgroup", "5:cpuset:/docker/abc\n4:cpu,cpuacct:/docker/abc\n0::/\n");
    write_file("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1\n");
    write_file("sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n");
    assert_int_equal(fv_cpu_quota(root), 0);
    write_file("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "250000\n");
    assert_int_equal(fv_cpu_quota(root), 3);
    write_file("proc/self/cgroup", "5:cpuset:/docker/abc\n0::/\n"); /* "cpuset" is another */
    assert_int_equal(fv_cpu_quota(root), 0);
}

static void test_this_machine_has_a_cpu(void **state)
{
    (void)state;
    assert_true(fv_cpu_quota("") >= 0);
    assert_true(fv_cpu_count() >= 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_no_groups_no_limit, make_root, remove_root),
        cmocka_unit_test_setup_teardown(test_version_2, make_root, remove_root),
        cmocka_unit_test_setup_teardown(test_groups_around_a_group_limit_it, make_root, remove_root),
        cmocka_unit_test_setup_teardown(test_version_1_in_a_container, make_root, remove_root),
        cmocka_unit_test(test_this_machine_has_a_cpu),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
