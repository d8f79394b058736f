/* The subcommands of the fovea program. Each takes its own name as argv[0], prints its result on
 * stdout, which main() flushes, and at most one line of error on stderr, and returns the program's exit code: 0 success,
 * 1 a failed run or a failed check, 2 wrong usage. */
#ifndef FV_TOOLS_COMMANDS_H
#define FV_TOOLS_COMMANDS_H

int fv_cmd_generate(int argc, char **argv); /* only where libfovea-engine is built: FV_HAVE_ENGINE */
int fv_cmd_check(int argc, char **argv);
int fv_cmd_backends(int argc, char **argv);
int fv_cmd_bench(int argc, char **argv);
int fv_cmd_accuracy(int argc, char **argv);
int fv_cmd_pipeline(int argc, char **argv);
int fv_cmd_info(int argc, char **argv);

#endif
