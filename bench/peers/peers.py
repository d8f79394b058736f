#!/usr/bin/env python3
"""Times other libraries' attention on the GPU beside `fovea bench`: the same shapes, in one run.

    python3 bench/peers/peers.py [--parts gqa16,gqa64,mla,prefill] [--fovea build/fovea] [--json FILE]

Peers, each where it can be imported: FlashInfer (XQA, its tensor-core decode, MLA and paged prefill), FlashAttention 3
(flash_attn_interface or fa3_fwd_interface) and PyTorch's scaled_dot_product_attention on dense tensors. Wanted:
PyTorch; FlashInfer compiles its kernels at their first use, with nvcc.

Every peer has the method of `fovea bench`: random data, permuted pages, copies of the cache in turn that together are
several times the L2 cache, one CUDA graph for each copy, events around each replay, medians; a sleeping kernel holds
the stream until all replays of a round are sent. The data are other random numbers than fovea's. fovea also writes the
new keys and values to the cache; the peers find them there.
"""

import argparse
import datetime
import importlib
import json
import math
import statistics
import subprocess
import sys

import torch

NUM_REPLAYS = 60
SLEEP_CYCLES = 4_000_000  # about 2 ms: the host sends a round meanwhile
COLD_CACHES = 4
MAX_COPIES = 64
DEVICE = "cuda"
BF16 = torch.bfloat16


def module(*names):
    """The first of the modules that can be imported, or None."""
    for name in names:
        try:
            return importlib.import_module(name)
        except Exception as error:  # a broken installation is a missing one
            print(f"{name}: {type(error).__name__}: {str(error)[:200]}", file=sys.stderr)
    return None


def copies_of(bytes_of_copy):
    cold = COLD_CACHES * getattr(torch.cuda.get_device_properties(0), "L2_cache_size", 64 << 20)
    return max(2, min(MAX_COPIES, math.ceil(cold / bytes_of_copy)))


def median_us(calls):
    """Median of graph replays; calls[i] works on copy i of the cache."""
    calls[0]()
    torch.cuda.synchronize()
    graphs = []
    for call in calls:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        graphs.append(graph)
    times = []
    for is_timed in (False, True, True):  # the first round warms up
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(NUM_REPLAYS)]
        torch.cuda._sleep(SLEEP_CYCLES)
        for i, (start, end) in enumerate(events):
            start.record()
            graphs[i % len(graphs)].replay()
            end.record()
        torch.cuda.synchronize()
        if is_timed:
            times += [1e3 * start.elapsed_time(end) for start, end in events]
    return statistics.median(times)


class Pages:
    """Sequences of one length with their pages in random order."""

    def __init__(self, batch, length, page):
        self.batch, self.length, self.page = batch, length, page
        self.of_seq = -(-length // page)
        self.count = batch * self.of_seq
        order = torch.randperm(self.count, device=DEVICE, dtype=torch.int32)
        self.table = order.view(batch, self.of_seq)
        self.indices = order
        self.indptr = torch.arange(batch + 1, device=DEVICE, dtype=torch.int32) * self.of_seq
        self.last = torch.full((batch,), length - (self.of_seq - 1) * page, device=DEVICE, dtype=torch.int32)
        self.lengths = torch.full((batch,), length, device=DEVICE, dtype=torch.int32)


def workspace():
    return torch.zeros(256 << 20, dtype=torch.uint8, device=DEVICE)


# --- paged decode of grouped queries ------------------------------------------------------------------------------


def gqa_peers(batch, length, page, heads=32, kv_heads=8, size=128):
    """{name: function that returns the calls}."""
    pages = Pages(batch, length, page)
    caches = [
        torch.randn(pages.count, 2, page, kv_heads, size, device=DEVICE, dtype=BF16)
        for _ in range(copies_of(pages.count * page * kv_heads * size * 4))
    ]
    q = torch.randn(batch, heads, size, device=DEVICE, dtype=BF16)
    scale = size**-0.5

    def xqa():
        memory, out = workspace(), torch.empty_like(q)
        decode = importlib.import_module("flashinfer.decode").xqa_batch_decode_with_kv_cache
        return [
            lambda c=c: decode(q, (c[:, 0], c[:, 1]), memory, pages.table, pages.lengths, length, scale, 1.0, out=out)
            for c in caches
        ]

    def tensor_cores():
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace(), "NHD", use_cuda_graph=True, use_tensor_cores=True, paged_kv_indptr_buffer=pages.indptr.clone(),
            paged_kv_indices_buffer=pages.indices.clone(), paged_kv_last_page_len_buffer=pages.last.clone(),
            backend="fa2")
        wrapper.plan(pages.indptr, pages.indices, pages.last, heads, kv_heads, size, page, q_data_type=BF16,
                     kv_data_type=BF16)
        out = torch.empty_like(q)
        return [lambda c=c: wrapper.run(q, c, out=out) for c in caches]

    def fa3():
        query = q.view(batch, 1, heads, size)
        return [
            lambda c=c: flash_attn.flash_attn_with_kvcache(
                query, c[:, 0], c[:, 1], cache_seqlens=pages.lengths, page_table=pages.table, causal=True)
            for c in caches
        ]

    peers = {}
    if flashinfer:
        peers["XQA"] = xqa
        peers["FlashInfer"] = tensor_cores
    if flash_attn:
        peers["FA3"] = fa3
    return peers


# --- MLA decode ----------------------------------------------------------------------------------------------------


def mla_peers(batch, length, page, heads, query_len=1):
    if not flashinfer:
        return {}
    pages = Pages(batch, length, page)
    num_copies = copies_of(pages.count * page * 1152)
    caches = [torch.randn(pages.count, page, 576, device=DEVICE, dtype=BF16) for _ in range(num_copies)]
    q = torch.randn(batch * query_len, heads, 576, device=DEVICE, dtype=BF16)
    q_start = torch.arange(batch + 1, device=DEVICE, dtype=torch.int32) * query_len

    def latents():
        wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(
            workspace(), use_cuda_graph=True, qo_indptr=q_start.clone(), kv_indptr=pages.indptr.clone(),
            kv_indices=pages.indices.clone(), kv_len_arr=pages.lengths.clone(), backend="fa3")
        wrapper.plan(q_start, pages.indptr, pages.indices, pages.lengths, heads, 512, 64, page, True, 192**-0.5, BF16,
                     BF16)
        out = torch.empty(batch * query_len, heads, 512, device=DEVICE, dtype=BF16)
        nope, rope = q[..., :512], q[..., 512:]
        return [lambda c=c: wrapper.run(nope, rope, c[..., :512], c[..., 512:], out=out) for c in caches]

    return {"FlashInfer": latents}


# --- prefill ---------------------------------------------------------------------------------------------------------


def prefill_peers(batch, length, page, heads=32, kv_heads=8, size=128):
    q = torch.randn(batch, length, heads, size, device=DEVICE, dtype=BF16)
    k, v = (torch.randn(batch, length, kv_heads, size, device=DEVICE, dtype=BF16) for _ in range(2))
    pages = Pages(batch, length, page)
    cache = torch.randn(pages.count, 2, page, kv_heads, size, device=DEVICE, dtype=BF16)

    def paged():
        start = torch.arange(batch + 1, device=DEVICE, dtype=torch.int32) * length
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            workspace(), "NHD", use_cuda_graph=True, qo_indptr_buf=start.clone(),
            paged_kv_indptr_buf=pages.indptr.clone(), paged_kv_indices_buf=pages.indices.clone(),
            paged_kv_last_page_len_buf=pages.last.clone(), backend="fa3")
        wrapper.plan(start, pages.indptr, pages.indices, pages.last, heads, kv_heads, size, page, causal=True,
                     q_data_type=BF16)
        query = q.view(-1, heads, size)
        return [lambda: wrapper.run(query, cache)] * 2

    def dense_fa3():
        return [lambda: flash_attn.flash_attn_func(q, k, v, causal=True)] * 2

    def sdpa():
        heads_first = [t.transpose(1, 2) for t in (q, k, v)]
        attend = torch.nn.functional.scaled_dot_product_attention
        return [lambda: attend(*heads_first, is_causal=True, enable_gqa=True)] * 2

    peers = {"torch SDPA": sdpa}
    if flash_attn:
        peers["FA3 dense"] = dense_fa3
    if flashinfer:
        peers["FlashInfer"] = paged
    return peers


# --- the table -------------------------------------------------------------------------------------------------------

GQA = [(1, 1), (1, 8), (1, 64), (8, 1), (8, 8), (32, 1), (32, 8), (128, 1), (128, 8), (256, 4)]
MLA = [(96, 1, 128, 1), (96, 2, 128, 1), (96, 3, 128, 1), (96, 4, 128, 1), (96, 6, 128, 1), (96, 16, 128, 1),
       (96, 1, 128, 2), (96, 4, 128, 2), (96, 16, 128, 2), (1, 4, 128, 1), (1, 32, 128, 1), (4, 8, 128, 1),
       (64, 8, 16, 1), (64, 8, 64, 1)]
PREFILL = [(1, 4), (1, 16), (4, 4)]


def gqa(page):
    options = ["--block-size", str(page)]
    return [(f"{b}q1s{k}k", options, lambda b=b, k=k: gqa_peers(b, k << 10, page)) for b, k in GQA]


def mla():
    return [(f"{b}q{q}s{k}k", ["--mla", "--heads", str(heads), "--block-size", "64"],
             lambda b=b, k=k, heads=heads, q=q: mla_peers(b, k << 10, 64, heads, q)) for b, k, heads, q in MLA]


def prefill():
    return [(f"{b}q{k}k", ["--block-size", "16"], lambda b=b, k=k: prefill_peers(b, k << 10, 16)) for b, k in PREFILL]


PARTS = {"gqa16": lambda: gqa(16), "gqa64": lambda: gqa(64), "mla": mla, "prefill": prefill}


def ours(fovea, options, batches):
    """The rows of fovea bench by batch."""
    command = [fovea, "bench", "--device", DEVICE, "--min-time", "0.1", "--json", *options, *batches]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    if answer.returncode != 0:
        sys.exit(answer.stderr)
    return {row["batch"]: row for row in json.loads(answer.stdout)["rows"] if "median_us" in row}


def words(text):
    return [word for word in text.split(",") if word]


def run_part(name, fovea, batches, peers):
    rows = [row for row in PARTS[name]() if not batches or row[0] in batches]
    settings = {}
    for batch, options, _ in rows:
        settings.setdefault(tuple(options), []).append(batch)
    of_fovea = {options: ours(fovea, options, batches) if fovea else {} for options, batches in settings.items()}
    results, refused = [], set()
    for batch, options, make in rows:
        row = of_fovea[tuple(options)].get(batch)
        result = {"part": name, "batch": batch, "options": " ".join(options), "peers": {}}
        if row:
            result |= {"backend": row["backend"], "read_us": row["read_us"], "fovea_us": row["median_us"],
                       "fovea_list_us": row["list_us"]}
        for peer, calls in make().items():
            if peer in refused or (peers and peer not in peers):
                continue
            try:
                result["peers"][peer] = median_us(calls())
            except Exception as error:
                print(f"{batch} {peer}, left out: {type(error).__name__}: {str(error)[:300]}", file=sys.stderr)
                refused.add(peer)
        torch.cuda.empty_cache()
        print_row(result)
        results.append(result)
    return results


def print_row(result):
    peers = result["peers"]
    line = f"{result['batch']:<10} {result['options']:<36}"
    if "fovea_us" in result:
        line += f" read {result['read_us']:9.1f}  fovea {result['fovea_us']:9.1f} (list {result['fovea_list_us']:9.1f})"
        if peers:
            line += f"  best peer / fovea {min(peers.values()) / result['fovea_us']:5.2f}"
    print(line + "".join(f"   {name} {us:.1f}" for name, us in peers.items()), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS), help="of " + ", ".join(PARTS))
    parser.add_argument("--batches", default="", help="of these parts only these rows, e.g. 1q1s1k,8q1s8k")
    parser.add_argument("--peers", default="", help="only these, e.g. XQA,FA3")
    parser.add_argument("--fovea", default="build/fovea", help="the program; empty: the peers alone")
    parser.add_argument("--json", help="file for the rows")
    arguments = parser.parse_args()
    results = []
    for part in arguments.parts.split(","):
        if part not in PARTS:
            parser.error(f"no part '{part}'; accepted: {', '.join(PARTS)}")
        print(f"{part}, microseconds, medians of graph replays", flush=True)
        results += run_part(part, arguments.fovea, words(arguments.batches), words(arguments.peers))
    if arguments.json:
        setting = {"command": " ".join(sys.argv), "date": datetime.datetime.now(datetime.timezone.utc).isoformat(),
                   "device": torch.cuda.get_device_name(0), "torch": torch.__version__,
                   "flashinfer": getattr(flashinfer, "__version__", None), "fa3": getattr(flash_attn, "__name__", None)}
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump({**setting, "rows": results}, file, indent=1)


flashinfer = module("flashinfer")
flash_attn = module("flash_attn_interface", "fa3_fwd_interface")

if __name__ == "__main__":
    main()
