// sampling_row.h: one row's pick, in the vectors of the including file; each path compiles it once.
//
// A row is one thread's work and needs no memory but its stack: instead of sorting, the top_k and top_p filters find
// the logit at which they cut, by a radix descent over the 32 bits of floats in order. The weights
// exp((l - max) / temperature) are f32, all their sums double. Memory traffic: the logits once for greedy, twice more
// to draw, and three or four times more for each of top_k and top_p.
#pragma once
#include <cfloat>

#include "sampling.h"
#include "vector.h"

namespace ok {
namespace {

constexpr int64_t kChunk = 512;  // logits that are prepared together
constexpr int kDigitBits = 11;   // of a float's 32 bits: 11, 11 and 10
const float kInfinity = __builtin_inff();

// One row's parameters, in the order of the header.
struct Row {
    const float *logits;
    float temperature, top_p, min_p, repetition, presence, frequency;
    int64_t top_k;
    uint32_t seed_low, seed_high, position;
    const int32_t *banned;  // (OK_SAMPLE_MAX_BANNED) or null
    uint32_t *counts;       // (vocab) or null
    const float *bias;      // (vocab) or null
    int64_t vocab;

    Row(const SampleArgs &args, int64_t row) {
        const float *f = args.floats + row * OK_SAMPLE_FLOATS;
        const int32_t *n = args.ints + row * OK_SAMPLE_INTS;
        const int64_t slot = n[4];
        const bool has_slot = slot >= 0 && slot < args.slots;
        vocab = args.vocab;
        logits = args.logits + row * vocab;
        temperature = f[0], top_p = f[1], min_p = f[2], repetition = f[3], presence = f[4], frequency = f[5];
        top_k = n[0];
        seed_low = n[1], seed_high = n[2], position = n[3];
        banned = n + OK_SAMPLE_INTS - OK_SAMPLE_MAX_BANNED;
        counts = has_slot && args.counts ? args.counts + slot * vocab : nullptr;
        bias = has_slot && args.bias ? args.bias + slot * vocab : nullptr;
    }

    // l = logits [begin, begin + n) after bias, penalties and bans.
    void prepare(float *l, int64_t begin, int64_t n) const {
        std::memcpy(l, logits + begin, n * sizeof *l);
        if (bias)
            for (int64_t i = 0; i < n; i++) l[i] += bias[begin + i];
        if (counts)
            for (int64_t i = 0; i < n; i++) {
                const uint32_t count = counts[begin + i], times = count & ~kPromptBit;
                if (count == 0) continue;
                l[i] = l[i] > 0.0f ? l[i] / repetition : l[i] * repetition;
                if (times > 0) l[i] = l[i] - presence - frequency * static_cast<float>(times);
            }
        for (int i = 0; banned && i < OK_SAMPLE_MAX_BANNED; i++)
            if (banned[i] >= begin && banned[i] < begin + n) l[banned[i] - begin] = -kInfinity;
    }

    // body(begin, n, l) for the chunks of the vocabulary in order; past n, l is padded with -infinity to whole vectors.
    // Stops when body returns false.
    template <class F>
    void for_chunks(F &&body) const {
        float l[kChunk];
        for (int64_t begin = 0; begin < vocab; begin += kChunk) {
            const int64_t n = vocab - begin < kChunk ? vocab - begin : kChunk;
            prepare(l, begin, n);
            for (int64_t i = n; i % kLanes != 0; i++) l[i] = -kInfinity;
            if (!body(begin, n, static_cast<const float *>(l))) return;
        }
    }
};

float largest_of(const float *l, int64_t n) {
    Vec top = broadcast(-kInfinity);
    for (int64_t i = 0; i < n; i += kLanes) top = max(top, load(l + i));
    return largest(top);
}

// Whether some value is NaN or +infinity.
bool has_overflow(const float *l, int64_t n) {
    bool found = false;
    for (int64_t i = 0; i < n; i++) found |= !(l[i] < kInfinity);
    return found;
}

// In one order, by eight chains. n is rounded up to whole vectors, whose rest holds zeros.
double sum_of(const float *w, int64_t n) {
    typedef float Float4 __attribute__((vector_size(16)));
    typedef double Double4 __attribute__((vector_size(32)));
    Double4 even = {}, odd = {};
    for (int64_t i = 0; i < n; i += 8) {
        Float4 a, b = {};
        std::memcpy(&a, w + i, sizeof a);
        if (i + 4 < n) std::memcpy(&b, w + i + 4, sizeof b);
        even += __builtin_convertvector(a, Double4);
        odd += __builtin_convertvector(b, Double4);
    }
    const Double4 sum = even + odd;
    return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

// ---- filters -------------------------------------------------------------------------------------------------------

// Which tokens are left, and how much each weighs.
struct Filter {
    float max, temperature;
    float cut = -FLT_MAX;       // logits below have dropped out; -infinity always has
    float least_weight = 0.0f;  // weights below have dropped out

    // w = weights of n logits (whole vectors are written), 0 for what has dropped out; false if that is all of them.
    bool weigh(float *w, const float *l, int64_t n) const {
        if (largest_of(l, n) < cut) return false;
        for (int64_t i = 0; i < n; i += kLanes) {
            const Vec x = load(l + i);
            const Vec weight = exp((x - max) / temperature);
            const VecInt left = (x >= cut) & (weight >= least_weight);
            store(w + i, left ? weight : Vec{});
        }
        return true;
    }

    double total(const Row &row) const {
        double total = 0.0;
        row.for_chunks([&](int64_t, int64_t n, const float *l) {
            float w[kChunk];
            if (weigh(w, l, n)) total += sum_of(w, n);
            return true;
        });
        return total;
    }
};

// Floats in order as unsigned integers. -0 comes before 0, which does no harm: the cut is compared as a float.
uint32_t ordered_key(float x) {
    const uint32_t bits = bit_cast<uint32_t>(x);
    return bits & 0x80000000 ? ~bits : bits | 0x80000000;
}

float float_of_key(uint32_t key) { return bit_cast<float>(key & 0x80000000 ? key & 0x7fffffff : ~key); }

// The largest logit such that those left that are not smaller weigh at least `target` together. A token weighs what the
// filter says, or 1 if `counted`. Finds the logit's key digit by digit, from the highest.
float cut_at(const Row &row, const Filter &filter, bool counted, double target) {
    double mass[1 << kDigitBits];  // of the tokens whose higher digits are the key's, by their next digit
    double above = 0.0;            // mass of the tokens with larger higher digits
    uint32_t key = 0;
    for (int low = 32 - kDigitBits, high = 32; high > 0; high = low, low = low > kDigitBits ? low - kDigitBits : 0) {
        const uint32_t digits = 1u << (high - low);
        for (uint32_t digit = 0; digit < digits; digit++) mass[digit] = 0.0;
        row.for_chunks([&](int64_t, int64_t n, const float *l) {
            float w[kChunk];
            if (counted ? largest_of(l, n) < filter.cut : !filter.weigh(w, l, n)) return true;
            for (int64_t i = 0; i < n; i++) {
                const uint32_t own = ordered_key(l[i]);
                if (l[i] < filter.cut || (high < 32 && (own ^ key) >> high != 0)) continue;
                mass[own >> low & (digits - 1)] += counted ? 1.0 : static_cast<double>(w[i]);
            }
            return true;
        });
        uint32_t chosen = 0;
        double passed = 0.0;  // mass above the chosen digit
        double sum = 0.0;
        for (uint32_t digit = digits; digit-- > 0;) {
            if (mass[digit] <= 0.0) continue;
            chosen = digit;  // also the smallest there is, where rounding keeps the sum below the target
            passed = sum;
            sum += mass[digit];
            if (above + sum >= target) break;
        }
        above += passed;
        key |= chosen << low;
    }
    return float_of_key(key);
}

// ---- the pick ------------------------------------------------------------------------------------------------------

// First word of Philox4x32-10 for a counter of one word (Salmon et al. 2011, section 4.3).
uint32_t philox(uint32_t counter, uint32_t key0, uint32_t key1) {
    uint32_t c0 = counter, c1 = 0, c2 = 0, c3 = 0;
    for (int round = 0; round < 10; round++) {
        const uint64_t p0 = uint64_t{0xD2511F53} * c0, p1 = uint64_t{0xCD9E8D57} * c2;
        c0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ key0;
        c1 = static_cast<uint32_t>(p1);
        c2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ key1;
        c3 = static_cast<uint32_t>(p0);
        key0 += 0x9E3779B9;
        key1 += 0xBB67AE85;
    }
    return c0;
}

// The id at which the cumulative weight passes `share` of the total.
int64_t walk(const Row &row, const Filter &filter, double share) {
    const double target = share * filter.total(row);
    double before = 0.0;
    int64_t id = -1;
    row.for_chunks([&](int64_t begin, int64_t n, const float *l) {
        float w[kChunk];
        if (!filter.weigh(w, l, n)) return true;
        const double chunk = sum_of(w, n);
        if (before + chunk <= target) {
            before += chunk;
            return true;
        }
        double sum = before;
        for (int64_t i = 0; i < n; i++) {
            if (w[i] <= 0.0f) continue;
            id = begin + i;  // the last one stays, should rounding keep the sum below the target
            sum += static_cast<double>(w[i]);
            if (sum > target) break;
        }
        return false;
    });
    return id;
}

int64_t pick(const Row &row) {
    float best = -kInfinity;
    int64_t best_id = -1;
    bool overflow = false;
    row.for_chunks([&](int64_t begin, int64_t n, const float *l) {
        overflow = has_overflow(row.logits + begin, n) || has_overflow(l, n);
        const float top = largest_of(l, n);
        if (top > best) {
            best = top;
            best_id = begin;
            while (l[best_id - begin] != top) best_id++;
        }
        return !overflow;
    });
    if (overflow) return -1;
    if (best_id < 0 || !(row.temperature > 0.0f)) return best_id;

    Filter filter;
    filter.max = best;
    filter.temperature = row.temperature;
    if (row.top_k > 0 && row.top_k < row.vocab) filter.cut = cut_at(row, filter, true, static_cast<double>(row.top_k));
    if (row.top_p < 1.0f) filter.cut = cut_at(row, filter, false, static_cast<double>(row.top_p) * filter.total(row));
    if (row.min_p > 0.0f) filter.least_weight = row.min_p < 1.0f ? row.min_p : 1.0f;
    return walk(row, filter, (philox(row.position, row.seed_low, row.seed_high) >> 8) * 0x1p-24);
}

// log softmax of the unchanged logits at `id`; -infinity where nothing was picked.
float logprob(const Row &row, int64_t id) {
    if (id < 0) return -kInfinity;
    Row plain = row;
    plain.counts = nullptr;
    plain.bias = nullptr;
    plain.banned = nullptr;
    Filter filter;
    filter.max = -kInfinity;
    filter.temperature = 1.0f;
    plain.for_chunks([&](int64_t, int64_t n, const float *l) {
        const float top = largest_of(l, n);
        if (top > filter.max) filter.max = top;
        return true;
    });
    return static_cast<float>(static_cast<double>(row.logits[id]) - filter.max - __builtin_log(filter.total(plain)));
}

void sample_row(const SampleArgs &args, int64_t r) {
    const Row row(args, r);
    const int64_t id = pick(row);
    args.ids[r] = static_cast<int32_t>(id);
    if (args.logprobs) args.logprobs[r] = logprob(row, id);
    if (id >= 0 && row.counts && (row.counts[id] & ~kPromptBit) != ~kPromptBit) row.counts[id]++;
}

}  // namespace
}  // namespace ok
