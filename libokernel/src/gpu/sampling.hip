// sampling.hip: picks one token a row: bias, penalties, bans, temperature, top_k, top_p, min_p, and a counter-based
// generator.
//
// One block a row. Nothing is sorted and nothing stored: the filters find the logit at which they cut by halving the
// ordered bits of floats 16-fold, in 8 passes over the logits. Weights exp((l - max) / temperature) are summed as
// integers of 2^-38, so that a sum does not depend on its order. Traffic: the logits once for greedy, 8 times more for
// each of top_k and top_p, from the cache.
#include "checks.h"
#include "gpu.h"

namespace ok {

constexpr int kSampleThreads = 512;
constexpr float kWeightUnit = 274877906944.0f;  // 2^38
constexpr uint32_t kPromptBit = 0x80000000u;
constexpr float kNothing = -__builtin_inff();

// Floats in order as unsigned integers; -0 counts as 0.
DEVICE uint32_t ordered_key(float x) {
    const uint32_t bits = __float_as_uint(x + 0.0f);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
DEVICE float float_of_key(uint32_t key) { return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key); }

// One row's parameters, in the order of the header.
struct SampleRow {
    const float *logits, *bias;
    const uint32_t *counts;
    const int32_t *banned;
    int32_t vocab;
    float temperature, top_p, min_p, repetition, presence, frequency;
    int32_t top_k;

    // The logit after bias, penalties and bans.
    __device__ float prepared(int32_t id) const {
        float l = logits[id];
        if (bias) l += bias[id];
        if (const uint32_t count = counts ? counts[id] : 0) {
            l = l > 0.0f ? l / repetition : l * repetition;
            const uint32_t times = count & ~kPromptBit;
            if (times > 0) l = l - presence - frequency * static_cast<float>(times);
        }
#pragma unroll
        for (int i = 0; i < OK_SAMPLE_MAX_BANNED; ++i)
            if (banned[i] == id) l = kNothing;
        return l;
    }
};

// Which tokens are left, and how much each weighs.
struct SampleFilter {
    float max, temperature, cut, least_weight;

    __device__ uint64_t weight(float l) const {
        if (!(l >= cut)) return 0;
        const float w = expf((l - max) / temperature);
        return w >= least_weight ? static_cast<uint64_t>(w * kWeightUnit) : 0;
    }
};

DEVICE uint64_t total_weight(const SampleRow &row, const SampleFilter &filter) {
    uint64_t total = 0;
    for (int32_t id = threadIdx.x; id < row.vocab; id += blockDim.x) total += filter.weight(row.prepared(id));
    return reduce_block<Add>(total);
}

// The largest logit such that those left that are not smaller weigh at least `target` >= 1 together; a token weighs
// what the filter says, or 1 if `counted`.
DEVICE float cut_at(const SampleRow &row, const SampleFilter &filter, bool counted, uint64_t target) {
    __shared__ uint64_t partial[15][kMaxWaves];
    uint32_t key = 0;
    for (int low = 28; low >= 0; low -= 4) {
        uint64_t mass[15] = {};  // of the tokens whose key is at least key | (n + 1) << low
        for (int32_t id = threadIdx.x; id < row.vocab; id += blockDim.x) {
            const float l = row.prepared(id);
            if (!(l >= filter.cut)) continue;
            const uint64_t weight = counted ? 1 : filter.weight(l);
            const uint32_t own = ordered_key(l);
#pragma unroll
            for (int n = 0; n < 15; ++n)
                if (own >= (key | static_cast<uint32_t>(n + 1) << low)) mass[n] += weight;
        }
#pragma unroll
        for (int n = 0; n < 15; ++n) {
            mass[n] = reduce_wave<Add>(mass[n]);
            if (lane_index() == 0) partial[n][wave_index()] = mass[n];
        }
        __syncthreads();
        uint32_t digit = 0;
        for (int n = 0; n < 15; ++n) {
            uint64_t sum = 0;
            for (int wave = 0; wave < wave_count(); ++wave) sum += partial[n][wave];
            if (sum >= target) digit = static_cast<uint32_t>(n + 1);
        }
        key |= digit << low;
        __syncthreads();
    }
    return key ? float_of_key(key) : filter.cut;  // 0: all together weigh less
}

// First word of Philox4x32-10 for a counter of one word (Salmon et al. 2011, section 4.3).
DEVICE uint32_t philox(uint32_t counter, uint32_t key0, uint32_t key1) {
    uint32_t c0 = counter, c1 = 0, c2 = 0, c3 = 0;
    for (int round = 0; round < 10; ++round) {
        const uint64_t p0 = static_cast<uint64_t>(0xD2511F53u) * c0, p1 = static_cast<uint64_t>(0xCD9E8D57u) * c2;
        c0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ key0;
        c1 = static_cast<uint32_t>(p1);
        c2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ key1;
        c3 = static_cast<uint32_t>(p0);
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
    return c0;
}

// The id at which the cumulative weight, in the order of ids, passes share / 2^24 of the total; -1 if nothing weighs.
DEVICE int32_t walk(const SampleRow &row, const SampleFilter &filter, uint32_t share) {
    __shared__ uint64_t wave_weight[kMaxWaves];
    __shared__ int32_t picked;
    const int32_t segment = (row.vocab - 1) / wave_count() + 1;
    const int64_t begin = static_cast<int64_t>(wave_index()) * segment;
    const int64_t end = begin + segment < row.vocab ? begin + segment : row.vocab;
    uint64_t own = 0;
    for (int64_t id = begin + lane_index(); id < end; id += kWave)
        own += filter.weight(row.prepared(static_cast<int32_t>(id)));
    own = reduce_wave<Add>(own);
    if (lane_index() == 0) wave_weight[wave_index()] = own;
    if (threadIdx.x == 0) picked = -1;
    __syncthreads();
    uint64_t total = 0;
    for (int wave = 0; wave < wave_count(); ++wave) total += wave_weight[wave];
    // floor(total * share / 2^24), in two halves.
    const uint64_t target = (total >> 32) * share * 256 + ((total & 0xffffffffu) * share >> 24);
    uint64_t before = 0;
    for (int wave = 0; wave < wave_index(); ++wave) before += wave_weight[wave];
    if (before <= target && before + own > target) {  // one wave
        for (int64_t base = begin; base < end; base += kWave) {
            const int64_t id = base + lane_index();
            uint64_t sum = id < end ? filter.weight(row.prepared(static_cast<int32_t>(id))) : 0;
            for (int distance = 1; distance < kWave; distance *= 2) {
                const uint64_t lower = shuffle_up(sum, distance);
                if (lane_index() >= distance) sum += lower;
            }
            // The first lane that passes the target is the one whose sum is the least that does.
            const int32_t passed = before + sum > target ? lane_index() : kWave;
            const int32_t first = -reduce_wave<Max>(-passed);
            if (first < kWave) {
                if (lane_index() == 0) picked = static_cast<int32_t>(base) + first;
                break;
            }
            before += shuffle(sum, kWave - 1);
        }
    }
    __syncthreads();
    return picked;
}

KERNEL_OF(kSampleThreads, 1)
sample_kernel(int32_t *ids, float *logprobs, const float *logits, const float *floats, const int32_t *ints,
              uint32_t *counts, const float *bias, const int32_t *active, int64_t slots, int64_t rows, int64_t vocab) {
    begin_kernel();
    const int64_t r = blockIdx.x;
    if (r >= active_rows(active, rows)) return;
    const float *f = floats + r * OK_SAMPLE_FLOATS;
    const int32_t *n = ints + r * OK_SAMPLE_INTS;
    const int64_t slot = n[4];
    const bool has_slot = slot >= 0 && slot < slots;
    uint32_t *own_counts = has_slot && counts ? counts + slot * vocab : nullptr;
    const SampleRow row = {logits + r * vocab,
                           has_slot && bias ? bias + slot * vocab : nullptr,
                           own_counts,
                           n + OK_SAMPLE_INTS - OK_SAMPLE_MAX_BANNED,
                           static_cast<int32_t>(vocab),
                           f[0],
                           f[1],
                           f[2],
                           f[3],
                           f[4],
                           f[5],
                           n[0]};

    // The largest prepared logit and the lowest id that has it, in one ordered word; the largest plain logit; overflow.
    uint64_t best = 0;
    float plain_max = kNothing;
    int32_t overflow = 0;
    for (int32_t id = threadIdx.x; id < row.vocab; id += blockDim.x) {
        const float plain = row.logits[id], l = row.prepared(id);
        overflow |= !(plain < -kNothing) || !(l < -kNothing);
        plain_max = fmaxf(plain_max, plain);
        const uint64_t word = static_cast<uint64_t>(ordered_key(l)) << 32 | (0xffffffffu - static_cast<uint32_t>(id));
        if (l > kNothing && word > best) best = word;
    }
    best = reduce_block<Max>(best);
    overflow = reduce_block<Max>(overflow);
    plain_max = reduce_block<Max>(plain_max);
    int32_t id = best && !overflow ? static_cast<int32_t>(0xffffffffu - static_cast<uint32_t>(best)) : -1;
    if (id >= 0 && row.temperature > 0.0f) {
        SampleFilter filter = {row.prepared(id), row.temperature, -3.402823466e38f, 0.0f};
        if (row.top_k > 0 && row.top_k < row.vocab)
            filter.cut = cut_at(row, filter, true, static_cast<uint64_t>(row.top_k));
        if (row.top_p < 1.0f) {
            const uint64_t total = total_weight(row, filter);
            const double wanted = ceil(static_cast<double>(row.top_p) * static_cast<double>(total));
            uint64_t target = wanted < 1.0 ? 1 : static_cast<uint64_t>(wanted);
            if (target > total) target = total;
            filter.cut = cut_at(row, filter, false, target);
        }
        if (row.min_p > 0.0f) filter.least_weight = row.min_p < 1.0f ? row.min_p : 1.0f;
        id = walk(row, filter,
                  philox(static_cast<uint32_t>(n[3]), static_cast<uint32_t>(n[1]), static_cast<uint32_t>(n[2])) >> 8);
    }

    if (logprobs) {  // log softmax of the unchanged logits
        float weight = kNothing;
        if (id >= 0) {
            const SampleFilter plain = {plain_max, 1.0f, -3.402823466e38f, 0.0f};
            uint64_t total = 0;
            for (int32_t i = threadIdx.x; i < row.vocab; i += blockDim.x) total += plain.weight(row.logits[i]);
            total = reduce_block<Add>(total);
            weight = row.logits[id] - plain_max - logf(static_cast<float>(total) / kWeightUnit);
        }
        if (threadIdx.x == 0) logprobs[r] = weight;
    }
    if (threadIdx.x == 0) {
        ids[r] = id;
        if (id >= 0 && own_counts && (own_counts[id] & ~kPromptBit) != ~kPromptBit) own_counts[id]++;
    }
}

KERNEL sample_reset_kernel(uint32_t *counts, float *bias, int64_t vocab, const int32_t *prompt, int64_t prompt_length,
                           const int32_t *bias_ids, const float *bias_values, int64_t bias_length) {
    begin_kernel();
    for (int64_t id = threadIdx.x; id < vocab; id += blockDim.x) {
        if (counts) counts[id] = 0;
        if (bias) bias[id] = 0.0f;
    }
    __syncthreads();
    for (int64_t i = threadIdx.x; counts && i < prompt_length; i += blockDim.x)
        if (prompt[i] >= 0 && prompt[i] < vocab) counts[prompt[i]] = kPromptBit;
    if (threadIdx.x != 0) return;
    for (int64_t i = 0; bias && i < bias_length; ++i)  // in order: of a repeated id the last value stays
        if (bias_ids[i] >= 0 && bias_ids[i] < vocab) bias[bias_ids[i]] = bias_values[i];
}

}  // namespace ok

// ---- launchers ----------------------------------------------------------------------------------------------------

ok_status ok_sample(ok_queue *queue, int32_t *ids, float *logprobs, const float *logits, const float *floats,
                    const int32_t *ints, uint32_t *counts, const float *bias, const int32_t *active, int64_t slots,
                    int64_t rows, int64_t vocab) {
    if (ok_status status = ok::check_sample(__func__, queue, ids, logits, floats, ints, slots, rows, vocab))
        return status;
    if (rows == 0) return OK_SUCCESS;
    const int32_t threads = vocab <= 64 ? 64 : vocab <= 4096 ? 256 : ok::kSampleThreads;
    return LAUNCH(queue, sample_kernel, {rows}, threads, ids, logprobs, logits, floats, ints, counts, bias, active,
                  slots, rows, vocab);
}

ok_status ok_sample_reset(ok_queue *queue, uint32_t *counts, float *bias, int64_t slot, int64_t slots, int64_t vocab,
                          const int32_t *prompt, int64_t prompt_length, const int32_t *bias_ids,
                          const float *bias_values, int64_t bias_length) {
    if (ok_status status = ok::check_sample_reset(__func__, queue, slot, slots, vocab, prompt, prompt_length, bias_ids,
                                                  bias_values, bias_length))
        return status;
    return LAUNCH(queue, sample_reset_kernel, {1}, ok::kBlock, counts ? counts + slot * vocab : nullptr,
                  bias ? bias + slot * vocab : nullptr, vocab, prompt, prompt_length, bias_ids, bias_values,
                  bias_length);
}
