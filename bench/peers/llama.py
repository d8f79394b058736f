#!/usr/bin/env python3
"""Times llama.cpp beside `fovea generate` on the CPU: the same GGUF file, the same text, in turns.

    python3 bench/peers/llama.py [--fovea build/fovea] [--model FILE] [--isa avx2] [--rounds 3] [--json FILE]

Wanted: xllamacpp, llama.cpp as a Python module; its wheel on PyPI is built for AVX2, so compare with --isa avx2. Each run
is a process of its own, reads a prompt of about 256 or 6144 tokens and writes 64 or 32 more, greedily. llama.cpp runs with
flash attention and without, with a cache of fp16 and of q8_0; fovea with fp16, int8 and fp8_e4m3. Medians of the rounds,
tokens a second, as each program reports them.
"""

import argparse
import collections
import datetime
import json
import os
import statistics
import subprocess
import sys

WORDS = "the cat sat on a warm stone near the old river and looked at small birds in tall green grass while rain fell".split()
CASES = ((256, 64), (6144, 32))  # tokens of the prompt, tokens to write
LLAMA = (("on", "f16"), ("off", "f16"), ("on", "q8_0"))  # flash attention, cache; q8_0 wants it
FOVEA = ("float16", "int8", "fp8_e4m3")


def prompt_of(tokens):
    """A word is a token for SmolLM2. Every word in turn with strides that do not repeat soon."""
    return " ".join(WORDS[(i * i + 3 * i) // 2 % len(WORDS)] for i in range(tokens))


def run_llama(model, flash, cache, threads, tokens, more):
    """In a child process: one run of llama.cpp, its numbers as JSON."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = model
    params.n_ctx, params.n_parallel = 8192, 1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    kinds = xllamacpp.llama_flash_attn_type
    params.flash_attn_type = (
        kinds.LLAMA_FLASH_ATTN_TYPE_ENABLED if flash == "on" else kinds.LLAMA_FLASH_ATTN_TYPE_DISABLED
    )
    types = {"f16": xllamacpp.ggml_type.GGML_TYPE_F16, "q8_0": xllamacpp.ggml_type.GGML_TYPE_Q8_0}
    params.cache_type_k = params.cache_type_v = types[cache]
    server = xllamacpp.Server(params)
    request = {"prompt": prompt_of(tokens), "n_predict": more, "cache_prompt": False, "ignore_eos": True,
               "temperature": 0}  # fmt: skip
    answer = server.handle_completions(request)
    timings = (answer if isinstance(answer, dict) else json.loads(answer))["timings"]
    print("LLAMA", json.dumps([timings["prompt_n"], timings["prompt_per_second"], timings["predicted_per_second"]]))


def child_llama(options, flash, cache, tokens, more):
    command = [sys.executable, __file__, "--child", flash, cache, str(tokens), str(more), "--model", options.model]
    out = subprocess.run(command + ["--threads", str(options.threads)], capture_output=True, text=True)
    for line in out.stdout.splitlines():
        if line.startswith("LLAMA "):
            return json.loads(line[6:])
    sys.exit(f"llama.cpp failed:\n{out.stderr[-2000:]}")


def child_fovea(options, cache, tokens, more):
    command = [options.fovea, "generate", "--model", options.model, "--raw", "--ignore-eos", "--json"]
    command += ["--threads", str(options.threads), "--kv-cache-dtype", cache, "--max-tokens", str(more)]
    environment = dict(os.environ, FOVEA_ISA=options.isa) if options.isa else dict(os.environ)
    out = subprocess.run(command + [prompt_of(tokens)], capture_output=True, text=True, env=environment)
    if out.returncode:
        sys.exit(f"fovea failed:\n{out.stderr[-2000:]}")
    result = json.loads(out.stdout)
    return [result["prefill"]["tokens"], result["prefill"]["tokens_per_second"],
            result["decode"]["tokens_per_second"]]  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fovea", default="build/fovea")
    parser.add_argument("--model", default=os.path.expanduser("~/.cache/fovea/SmolLM2-135M-Instruct.Q4_1.gguf"))
    parser.add_argument("--isa", default="", help="FOVEA_ISA for fovea")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", help="write the medians there")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        flash, cache, tokens, more = options.child
        run_llama(options.model, flash, cache, options.threads, int(tokens), int(more))
        return

    samples = collections.defaultdict(list)
    for _ in range(options.rounds):
        for tokens, more in CASES:
            for flash, cache in LLAMA:
                name = f"llama.cpp, flash attention {flash}, {cache}"
                samples[tokens, name].append(child_llama(options, flash, cache, tokens, more))
            for cache in FOVEA:
                samples[tokens, f"fovea, {cache}"].append(child_fovea(options, cache, tokens, more))
        print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)

    rows = []
    for (tokens, name), runs in samples.items():
        prompt, prefill, decode = (statistics.median(column) for column in zip(*runs))
        rows.append({"program": name, "prompt_tokens": prompt, "prefill_tokens_per_s": prefill,
                     "decode_tokens_per_s": decode})  # fmt: skip
        print(f"{name:42} {prompt:6.0f} tokens   prefill {prefill:7.1f}   decode {decode:6.1f} tokens/s")
    if options.json:
        result = {
            "command": " ".join(["bench/peers/llama.py"] + sys.argv[1:]),
            "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "rounds": options.rounds,
            "threads": options.threads,
            "isa": options.isa,
            "rows": rows,
        }
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(result, file, indent=1)


if __name__ == "__main__":
    main()
